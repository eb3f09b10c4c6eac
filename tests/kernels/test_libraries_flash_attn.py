"""The adapters of flash-attn against fakes of its functions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from depth import label
from leanbench.kernels.libraries.flash_attn_2 import FlashDecodingConfig
from library_stand_ins import (
    APPENDS,
    CAPACITY,
    OF_FLASH_ATTN,
    RAGGED,
    SEVERAL_QUERIES,
    SOFTCAPS,
    UNIFORM,
    WINDOWS,
    attended,
    checked,
    stand_in,
)

from leanbench.core.errors import UserError
from leanbench.core.inputs import make_inputs
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel
from leanbench.gpu.catalogue import find


@pytest.fixture
def asked_splits(monkeypatch) -> list[int]:
    """Install a fake of flash-attn; return the `num_splits` of its calls."""
    calls: list[int] = []

    def flash_attn_with_kvcache(
        q, k_cache, v_cache, k=None, v=None, *, cache_seqlens, block_table, softmax_scale,
        window_size, num_splits, return_softmax_lse, **kinds,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        assert return_softmax_lse
        assert cache_seqlens.dtype == torch.int32
        assert block_table is None or k_cache.shape[1] % 256 == 0
        calls.append(num_splits)
        left, right = window_size
        kinds = {"k_new": k, "v_new": v, "window_left": left, "window_right": right, **kinds}
        call = (q, k_cache, v_cache, cache_seqlens, block_table, softmax_scale)
        return attended(*call, **kinds)

    stand_in(monkeypatch, "flash_attn", flash_attn_with_kvcache=flash_attn_with_kvcache)
    return calls


LARGE_PAGES = [
    AttentionProblem(2, 8, 2, 300, 64, "fp16", "HND", page_size=256),
    AttentionProblem(3, 4, 2, (3, 256, 530), 96, "bf16", "NHD", q_len=3, page_size=256),
]


@pytest.mark.parametrize(
    "problem",
    [
        *(*UNIFORM, *RAGGED, *SEVERAL_QUERIES[:1], *LARGE_PAGES, *CAPACITY[:3], *WINDOWS[:2]),
        *(SOFTCAPS[0], *OF_FLASH_ATTN, *APPENDS, replace(UNIFORM[1], alibi=True)),
        replace(LARGE_PAGES[0], window_left=9, softcap=30.0, alibi=True),
    ],
    ids=label,
)
@pytest.mark.parametrize(("name", "num_splits"), [("flash_attn", 1), ("flash_decoding", 0)])
def test_flash_attn_2_is_handed_the_tensors(name, num_splits, problem, asked_splits):
    assert kernel(name).unsupported_reason(problem) is None
    config = kernel(name).default_config(problem, find("h200"))
    inputs, launch = checked(name, problem, config)
    assert set(asked_splits) == {num_splits}
    call = launch._attend
    for tensor, own in zip(call.args, (inputs.q, inputs.k_cache, inputs.v_cache), strict=False):
        assert tensor is own
    assert call.keywords["block_table"] is inputs.block_table
    cached = [context - problem.append for context in problem.contexts]
    assert call.keywords["cache_seqlens"].tolist() == cached
    assert call.keywords["softmax_scale"] == problem.head_dim**-0.5


@pytest.mark.parametrize(
    ("head_dim", "tile_tokens"), [(64, 256), (80, 128), (96, 128), (128, 128), (256, 64)]
)
def test_best_of_flash_decoding_is_its_heuristic_and_every_split_count(
    head_dim, tile_tokens, asked_splits
):
    problem, h200 = AttentionProblem(1, 8, 8, 65_536, head_dim), find("h200")
    default, *others = kernel("flash_decoding").candidate_configs(problem, h200)
    assert (
        default
        == kernel("flash_decoding").default_config(problem, h200)
        == FlashDecodingConfig(tile_tokens, 4, 1)
    )
    counts = [config.splits for config in others]
    assert counts[0] == 1
    # From half a wave of CTAs to eight: 132 SMs, 8 output tiles.
    assert {8, 16, 33, 66, 99} <= set(counts)
    assert max(filter(None, counts)) <= 128
    small = AttentionProblem(1, 4, 2, 1500, head_dim)
    checked("flash_decoding", small, default)
    checked("flash_decoding", small, replace(default, splits=5))
    assert list(dict.fromkeys(asked_splits)) == [0, 5]


@pytest.mark.usefixtures("asked_splits")
def test_settings_that_flash_decoding_cannot_have_are_refused():
    inputs = make_inputs(UNIFORM[0], "cpu")
    with pytest.raises(
        UserError,
        match=r"compiled with .*'tile_tokens': 256.* has .*'tile_tokens': 64.*only splits",
    ):
        kernel("flash_decoding").prepare(inputs, FlashDecodingConfig(64, 4, 1, splits=3))
