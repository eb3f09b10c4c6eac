"""fp8 caches with a scale per page, on a GPU, against the fp64 reference."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from leanbench.attention import lean_attn_with_kvcache
from leanbench.check.grid import CheckCase, run_case, wild_case
from leanbench.check.launches import api_arguments
from leanbench.check.poison import poison_unused
from leanbench.check.reference import Reference
from leanbench.core.inputs import AttentionInputs, make_inputs
from leanbench.core.problem import AttentionProblem
from leanbench.gpu.local import spec_of_device

# The thread method ends the process, because a kernel that never ends cannot be interrupted.
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180, method="thread")]

ONE = AttentionProblem(
    8, 32, 8, 2000, 128, "bf16", "NHD", page_size=64, kv_dtype="e4m3", page_scales="page-head"
)
#: Short sequences: a cluster's first copies begin before the lengths are known and may reach past
#: their end.
SHORT = replace(ONE, batch=2, context=(900, 30), capacity=4096, lengths_on="device")
PROBLEMS = [
    *(replace(ONE, page_size=page) for page in (1, 16, 48, 64, 128, 544)),
    *(replace(ONE, q_len=q_len, page_scales="page", scaled=False) for q_len in (4, 64)),
    replace(ONE, kv_dtype="e5m2", q_dtype="e5m2", head_dim=64, q_heads=16),
    replace(ONE, dtype="fp16", q_heads=64, kv_layout="HND", page_size=16),
    replace(ONE, head_dim=256, page_size=1, q_heads=8),
    replace(ONE, batch=1, context=65_536, lengths_on="device"),
    replace(SHORT, q_len=4, page_size=16),
    replace(SHORT, window_left=300, sinks=True, softcap=20.0),
    replace(SHORT, leftpad=True, alibi=True, causal=False, q_len=3),
    replace(SHORT, append=2, page_size=1),
    replace(SHORT, q_lens=(1, 40), page_size=16),
    replace(SHORT, batch=64, context=tuple(range(1, 65)), page_size=16),
]


@pytest.mark.parametrize("kernel", ["lean_cuda", "fa2_cuda", "fixed_split_cuda"])
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.label)
def test_right_and_the_same_bits_again(kernel, problem):
    if problem.q_lens is not None and kernel != "lean_cuda":
        pytest.skip("of lean alone")
    for number, scale in enumerate((1.0, 6.0)):
        case = CheckCase(problem, scale, number)
        assert run_case(kernel, case, spec_of_device(0), "cuda").failure is None


@pytest.mark.parametrize("problem", [SHORT, replace(SHORT, page_size=1)], ids=["64", "1"])
def test_lengths_that_the_cache_does_not_have(problem):
    case = wild_case(problem, 1.0, 0)
    assert run_case("lean_cuda", case, spec_of_device(0), "cuda").failure is None


def call(inputs: AttentionInputs, **options: Any) -> AttentionInputs:
    """Return the inputs with the results of a call."""
    arguments = {**api_arguments(inputs), **options}
    out, lse = lean_attn_with_kvcache(inputs.q, inputs.k_cache, inputs.v_cache, **arguments)
    return replace(inputs, out=out, lse=lse)


def assert_right(inputs: AttentionInputs, **options: Any) -> AttentionInputs:
    reference = Reference(inputs, max_elements=1 << 62)
    called = call(inputs, **options)
    assert reference.check(called).failure("bf16") is None
    return called


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_pages_past_a_sequences_end_are_not_read(page_size):
    """Unused entries have invalid page numbers, and unused page 0 has a scale of NaN."""
    inputs = poison_unused(make_inputs(replace(SHORT, page_size=page_size), "cuda"))
    table, last = inputs.block_table, inputs.k_cache.shape[0] - 1
    assert table is not None
    moved: dict[str, Any] = {}
    for name in ("k_cache", "v_cache", "k_page_descale", "v_page_descale"):
        own = getattr(inputs, name)
        numbers = own.view(torch.uint8) if own.element_size() == 1 else own
        moved[name] = numbers.roll(1, 0).view(own.dtype)
    moved["block_table"] = (table + 1).masked_fill(table == last, 1 << 28)
    for options in ({}, {"batch_invariant": True}):
        assert_right(replace(inputs, **moved), **options)


def test_scales_of_pages_and_of_sequences_multiply():
    inputs = make_inputs(SHORT, "cuda")
    both = assert_right(inputs)
    assert inputs.k_page_descale is not None
    assert inputs.v_page_descale is not None
    assert inputs.k_descale is not None
    assert inputs.v_descale is not None
    # Powers of two move from one to the other without rounding.
    other = replace(
        inputs,
        k_page_descale=inputs.k_page_descale * 4,
        v_page_descale=inputs.v_page_descale / 8,
        k_descale=inputs.k_descale / 4,
        v_descale=inputs.v_descale * 8,
    )
    again = call(other)
    assert torch.equal(both.out, again.out)
    assert torch.equal(both.lse, again.lse)


def test_scales_of_one_page_each_are_those_of_all_its_heads():
    inputs = make_inputs(replace(SHORT, page_scales="page"), "cuda")
    assert inputs.k_page_descale is not None
    assert inputs.v_page_descale is not None
    wide = {
        name: getattr(inputs, name)[:, None].expand(-1, SHORT.kv_heads)
        for name in ("k_page_descale", "v_page_descale")
    }
    first, second = assert_right(inputs), call(replace(inputs, **wide))
    assert torch.equal(first.out, second.out)
    # Any strides.
    both = torch.stack([inputs.k_page_descale, inputs.v_page_descale], 1)
    third = call(replace(inputs, k_page_descale=both[:, 0], v_page_descale=both[:, 1]))
    assert torch.equal(first.out, third.out)


@pytest.mark.parametrize("power", [-100, 100])
def test_values_far_from_what_fp16_holds(power):
    inputs = make_inputs(ONE, "cuda")
    assert inputs.v_page_descale is not None
    assert inputs.v_descale is not None
    rise = torch.linspace(-8, 8, inputs.v_page_descale.shape[0], device="cuda").exp2()
    scales = inputs.v_page_descale * rise[:, None]
    inputs = replace(inputs, v_page_descale=scales)
    expected = assert_right(inputs)
    far = call(
        replace(
            inputs, v_page_descale=scales * 2.0**power, v_descale=inputs.v_descale * 2.0**-power
        )
    )
    assert torch.equal(expected.out, far.out)


def test_a_captured_call_reads_new_scales_and_new_pages():
    inputs = make_inputs(replace(SHORT, context=(4096, 4096)), "cuda")
    assert inputs.block_table is not None
    assert inputs.cache_seqlens is not None
    assert inputs.k_page_descale is not None
    assert inputs.v_page_descale is not None
    call(inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(inputs)
    draw = random.Random(0)
    for _ in range(6):
        inputs.k_page_descale.uniform_(0.5, 2)
        inputs.v_page_descale.uniform_(0.01, 10)
        pages = torch.randperm(inputs.k_cache.shape[0], device="cuda").int()
        inputs.block_table.copy_(pages.view(inputs.block_table.shape))
        inputs.cache_seqlens.copy_(torch.tensor([draw.randint(0, 4096) for _ in range(2)]))
        captured.poison()
        graph.replay()
        assert Reference(inputs, max_elements=1 << 62).check(captured).failure("bf16") is None
        eager = call(inputs)
        assert torch.equal(captured.out, eager.out)
        assert torch.equal(captured.lse, eager.lse)
