"""The adapter of FlashMLA against a fake of its functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from depth import label
from library_stand_ins import attended, checked, stand_in

from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel

LATENT: dict[str, Any] = {"latent": True, "v_head_dim": 512, "dtype": "bf16"}
PROBLEMS = [
    AttentionProblem(2, 16, 1, 100, 576, page_size=64, **LATENT),
    AttentionProblem(3, 16, 1, (2, 65, 130), 576, q_len=2, page_size=64, **LATENT),
    AttentionProblem(2, 16, 1, 128, 576, **LATENT),
    AttentionProblem(2, 16, 1, (100, 7), 576, capacity=192, **LATENT),
]


@pytest.fixture
def schedules(monkeypatch) -> list[object]:
    """Install a fake of FlashMLA; return the schedules of its calls."""
    calls: list[object] = []

    def flash_mla_with_kvcache(
        q: torch.Tensor,
        k_cache: torch.Tensor,
        block_table: torch.Tensor,
        cache_seqlens: torch.Tensor,
        head_dim_v: int,
        tile_scheduler_metadata: object,
        *,
        softmax_scale: float,
        causal: bool,
        use_legacy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert use_legacy
        assert causal
        assert k_cache.shape[1:] == (64, 1, 576)
        calls.append(tile_scheduler_metadata)
        v_cache = k_cache[..., :head_dim_v]
        return attended(q, k_cache, v_cache, cache_seqlens, block_table, softmax_scale)

    def get_mla_decoding_metadata(
        seqlens_k: torch.Tensor, rows: int, h_k: int, h_q: int, *, use_legacy: bool
    ) -> tuple[list[int], int, int, int]:
        assert use_legacy
        return seqlens_k.tolist(), rows, h_k, h_q

    stand_in(
        monkeypatch,
        "flash_mla",
        flash_mla_with_kvcache=flash_mla_with_kvcache,
        get_mla_metadata=lambda: (object(), None),
        get_mla_decoding_metadata=get_mla_decoding_metadata,
    )
    return calls


@pytest.mark.parametrize("problem", PROBLEMS, ids=label)
def test_flash_mla_is_handed_pages_and_keeps_its_schedule(problem, schedules):
    adapter = kernel("flash_mla")
    assert adapter.unsupported_reason(problem) is None
    inputs, _ = checked("flash_mla", problem)
    assert len(schedules) == 2
    assert len(set(map(id, schedules))) == 1
    planner = adapter.planner(inputs, None)
    assert planner is not None
    assert planner() == (list(problem.contexts), 16 * problem.q_len, 1, 16)


@pytest.mark.usefixtures("schedules")
@pytest.mark.parametrize(
    ("problem", "sentence"),
    [
        (
            AttentionProblem(2, 16, 1, 100, 576, v_head_dim=512),
            "flash_mla takes latent caches with v_head_dim 512 alone",
        ),
        (
            AttentionProblem(2, 16, 1, 100, 576, **LATENT),
            "flash_mla reads pages of 64 tokens, and the cache has room for 100",
        ),
        (
            AttentionProblem(2, 16, 1, 100, 128, latent=True, v_head_dim=64),
            "flash_mla does not take head_dim 128",
        ),
        (
            AttentionProblem(2, 16, 1, 100, 576, page_size=32, **LATENT),
            "flash_mla does not take page_size 32",
        ),
    ],
    ids=lambda value: value.label if isinstance(value, AttentionProblem) else "",
)
def test_what_flash_mla_does_not_take_is_a_sentence(problem, sentence):
    assert str(kernel("flash_mla").unsupported_reason(problem)).startswith(f"{sentence}: ")


def test_other_kernels_refuse_a_latent_cache():
    assert kernel("lean").unsupported_reason(AttentionProblem(1, 8, 1, 64, 64, latent=True)) == (
        "lean takes no latent cache, in which V is a part of K, this problem has latent: leave"
        " it out"
    )
