"""Calls with a shared prefix on a GPU, against fp64, at once and in CUDA graphs."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from attention_calls import assert_right, captured, compiled

from leanbench import lean_attn_with_kvcache, shared_prefix
from leanbench.attention import prefix as path
from leanbench.check.launches import api_arguments
from leanbench.check.poison import poison_unused
from leanbench.core.inputs import AttentionInputs, make_inputs
from leanbench.core.problem import AttentionProblem

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180, method="thread")]

PLAIN = AttentionProblem(
    *(24, 32, 8, 1200, 128, "bf16", "NHD"),
    page_size=16,
    shared_prefix=1024,
    capacity=1536,
    lengths_on="device",
)
CASES: dict[str, dict[str, Any]] = {
    "uniform": {},
    "ragged": {"context": tuple(1024 + 7 * sequence for sequence in range(24))},
    "a length on the host": {"lengths_on": "host", "capacity": None},
    "no tokens of their own": {"context": 1024, "capacity": None},
    "one sequence": {"batch": 1},
    "few rows": {"batch": 2, "q_heads": 8, "dtype": "fp16"},
    "groups of 8": {"q_heads": 64, "page_size": 64},
    "sinks and a soft cap": {"sinks": True, "softcap": 20.0},
    "drafts": {"q_len": 4},
    "many queries": {"batch": 3, "q_len": 40, "causal": False},
    "packed queries": {"batch": 3, "q_lens": (40, 1, 7), "context": (1200, 1024, 1100)},
    "HND": {"kv_layout": "HND", "page_size": 64},
    "odd pages": {"page_size": 3, "shared_prefix": 1023},
    "fp8": {"kv_dtype": "e4m3", "page_scales": "page-head"},
    "two heads of a row": {"q_heads": 16, "head_dim": 80},
    "wide": {"head_dim": 256, "q_heads": 16, "kv_heads": 4},
}
DEEP_CASES: dict[str, dict[str, Any]] = {
    f"{batch} x {prefix}, p{page_size}": {
        "batch": batch,
        "context": prefix + 100,
        "shared_prefix": prefix,
        "page_size": page_size,
        "capacity": None,
    }
    for batch, prefix, page_size in (
        *((8, 16384, 16), (16, 4096, 64), (64, 16384, 16), (64, 16384, 64), (128, 8192, 128)),
    )
}


@pytest.fixture(autouse=True)
def share_short_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let prefixes that are faster read by each sequence have a launch of their own."""
    monkeypatch.setattr(path, "shares_prefix", lambda *sizes: True)


def called(inputs: AttentionInputs, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.full_like(inputs.out, math.nan)
    arguments = {**api_arguments(inputs), "out": out, **options}
    return lean_attn_with_kvcache(inputs.q, inputs.k_cache, inputs.v_cache, **arguments)  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize(
    "axes",
    [
        *CASES.values(),
        *(pytest.param(axes, marks=pytest.mark.deep) for axes in DEEP_CASES.values()),
    ],
    ids=[*CASES, *DEEP_CASES],
)
@pytest.mark.parametrize("score_scale", [1.0, 6.0])
def test_it_is_right_and_the_same_bits_again(axes, score_scale):
    problem = replace(PLAIN, **axes)
    inputs = poison_unused(make_inputs(problem, "cuda", score_scale=score_scale))
    results = called(inputs)
    assert_right(inputs, *results)
    for _ in range(3):
        assert all(map(torch.equal, called(inputs), results))


def test_own_tokens_may_have_nearly_all_weight():
    inputs = make_inputs(PLAIN, "cuda", score_scale=6.0)
    assert inputs.block_table is not None
    inputs.k_cache[inputs.block_table[:, PLAIN.shared_prefix // 16 :].unique().long()] *= 16
    assert_right(inputs, *called(inputs))


def test_it_is_near_the_plain_call():
    inputs = make_inputs(PLAIN, "cuda")
    both = zip(called(inputs), called(inputs, shared_prefix=0), strict=True)
    for merged, plain in both:
        assert torch.allclose(merged.float(), plain.float(), rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("axes", [{}, {"q_len": 3, "sinks": True}], ids=["decode", "drafts"])
def test_a_graph_is_replayed_with_other_lengths_and_pages(axes):
    problem = replace(PLAIN, **axes)
    inputs = make_inputs(problem, "cuda")
    lengths, table = inputs.cache_seqlens, inputs.block_table
    assert lengths is not None
    assert table is not None
    graph, out, lse = captured(lambda: called(inputs))
    shared = PLAIN.shared_prefix // 16
    own = torch.randperm(inputs.k_cache.shape[0], device="cuda")
    for seed in range(5):
        torch.manual_seed(seed)
        inputs.q.normal_()
        # From no tokens of their own, but for drafts, to all pages that a sequence has.
        lengths.copy_(torch.randint(1024 + problem.q_len - 1, 1201, lengths.shape))
        table[:, shared:] = own[torch.randint(len(own), table[:, shared:].shape)]
        table[:, :shared] = own[torch.randint(len(own), (shared,))]
        out.fill_(math.nan)
        lse.fill_(math.nan)
        graph.replay()
        assert_right(inputs, out, lse)


def test_torch_compile_takes_it_whole():
    inputs = make_inputs(PLAIN, "cuda")
    assert_right(inputs, *compiled(partial(called, out=None), "inductor")(inputs))


def test_new_batches_and_prefixes_after_each_other():
    for batch, prefix in ((3, 64), (24, 1024), (5, 1024), (24, 512), (3, 64)):
        inputs = make_inputs(replace(PLAIN, batch=batch, shared_prefix=prefix), "cuda")
        for _ in range(3):
            assert_right(inputs, *called(inputs))


def test_the_prefix_of_a_table_of_numbers():
    inputs = make_inputs(PLAIN, "cuda")
    assert inputs.block_table is not None
    assert inputs.cache_seqlens is not None
    table, lengths = inputs.block_table.cpu(), inputs.cache_seqlens.cpu()
    assert shared_prefix(table, lengths, 16) == PLAIN.shared_prefix
