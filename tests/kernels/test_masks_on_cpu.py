"""lean.cu's windows, sinks, biases and paddings at their edges, on a fake GPU."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from lean_on_cpu import Cpu, Workspace, needs_compiler
from leanbench.kernels.lean.cuda_settings import cuda_config
from leanbench.kernels.reference.torch import attend_all

from leanbench.check.poison import poison_unused
from leanbench.check.reference import Reference
from leanbench.core.inputs import AttentionInputs, make_inputs
from leanbench.core.problem import AttentionProblem

pytestmark = needs_compiler

DEEP = pytest.mark.deep
CONFIG = cuda_config(32, 2, 2, 1, 1, 8, "bulk", 1, False)
SINKS = AttentionProblem(
    2, 4, 1, (70, 300), 64, q_len=3, sinks=True, leftpad=True, capacity=384, lengths_on="device"
)


def attend(cpu: Cpu, inputs: AttentionInputs) -> None:
    """Make the call and compare its results with the reference."""
    inputs = poison_unused(inputs)
    inputs.poison()
    cpu.launch(inputs, CONFIG, 5, Workspace(1000))
    assert Reference(inputs).check(inputs).failure("fp16") is None


def test_rows_that_see_nothing_have_their_sink(cpu: Cpu) -> None:
    """One sequence is padding only, one has fewer tokens than query tokens."""
    inputs = make_inputs(SINKS, "cpu", 1)
    assert inputs.cache_seqlens is not None
    assert inputs.cache_leftpad is not None
    inputs.cache_leftpad[:] = torch.tensor([100, 298])
    sinks = torch.tensor([-50.0, 0.0, 3.0, 200.0])
    attend(cpu, replace(inputs, sinks=sinks))
    assert not inputs.out[0].any()
    assert not inputs.out[1, 0].any()
    assert torch.allclose(inputs.lse[0], sinks[:, None].expand(4, 3))
    assert torch.allclose(inputs.lse[1, :, 0], sinks)
    assert inputs.lse[1, 0, 1] > sinks[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_sinks_of_each_dtype(cpu: Cpu, dtype: torch.dtype) -> None:
    """One sink is far above all scores, one is negligible."""
    inputs = make_inputs(SINKS, "cpu", 1)
    sinks = torch.tensor([-math.inf, 1.3, -2.7, 30.0]).to(dtype)
    attend(cpu, replace(inputs, sinks=sinks))
    plain = make_inputs(replace(SINKS, sinks=False), "cpu", 1)
    attend(cpu, plain)
    assert torch.equal(inputs.out[:, :, 0], plain.out[:, :, 0])
    assert torch.equal(inputs.lse[:, 0], plain.lse[:, 0])


def test_sinks_that_leave_the_smallest_numbers(cpu: Cpu) -> None:
    """Outputs below the smallest normal number of fp16 are rounded, not flushed to zero.

    They pass the check, because they are only some spacings in size.
    """
    inputs = make_inputs(SINKS, "cpu", 1)
    sinks = torch.tensor([17.0, 18.0, 19.0, 20.0])
    attend(cpu, replace(inputs, sinks=sinks))
    assert 2**-24 < inputs.out.abs().max() < 2**-14
    rounded = replace(inputs, sinks=sinks, out=torch.empty_like(inputs.out))
    attend_all(rounded)
    assert (inputs.out.double() - rounded.out.double()).abs().max() <= 2**-24


def test_padding_that_is_none(cpu: Cpu) -> None:
    """Below 0 counts as 0."""
    inputs = make_inputs(SINKS, "cpu", 1)
    assert inputs.cache_leftpad is not None
    inputs.cache_leftpad[:] = torch.tensor([-7, 0])
    cpu.launch(inputs, CONFIG, 5, Workspace(1000))
    none = torch.zeros_like(inputs.cache_leftpad)
    unpadded = replace(inputs, cache_leftpad=none, out=torch.zeros_like(inputs.out))
    cpu.launch(unpadded, CONFIG, 5, Workspace(1000))
    assert torch.equal(inputs.out, unpadded.out)


def test_pages_before_a_window_may_be_any(cpu: Cpu) -> None:
    """Servers free such pages, so the block table names a page of NaN."""
    problem = AttentionProblem(
        2, 4, 1, (300, 100), 64, page_size=16, window_left=40, q_len=2, capacity=384
    )
    inputs = poison_unused(make_inputs(problem, "cpu", 1))
    assert inputs.block_table is not None
    reference = Reference(inputs)
    nobody = inputs.k_cache.shape[0] - 1
    assert not inputs.k_cache[nobody].isfinite().any()
    for sequence, context in enumerate(problem.contexts):
        inputs.block_table[sequence, : (context - 42) // 16] = nobody
    inputs.poison()
    cpu.launch(inputs, CONFIG, 5, Workspace(1000))
    assert reference.check(inputs).failure("fp16") is None


#: Chunks that begin within a page, before the end of a sequence's padding, and with more tokens
#: than it has.
CHUNKS: dict[str, dict[str, Any]] = {
    "not causal, padded pages": {
        "context": (300, 131, 64), "q_len": 3, "causal": False, "leftpad": True, "page_size": 16,
    },
    "ragged": {"context": (300, 131, 2), "q_lens": (33, 1, 4), "leftpad": True},
}  # fmt: skip
DEEP_CHUNKS: dict[str, dict[str, Any]] = {
    "one query": {"context": (300, 257, 128)},
    "several": {"context": (300, 131, 2), "q_len": 5},
    "not causal": {"context": (300, 131, 2), "q_len": 5, "causal": False},
    "a window, too": {"context": (300, 200, 90), "q_len": 4, "window_left": 70, "append": 2},
    "many queries": {"context": (300, 131, 2), "q_len": 40, "causal": False, "window_right": 9},
}


@pytest.mark.parametrize(
    "name", [*CHUNKS, *(pytest.param(name, marks=DEEP) for name in DEEP_CHUNKS)]
)
@pytest.mark.parametrize("tokens", [1, 37, 64, 2**31 - 1])
def test_attention_chunks(cpu: Cpu, name: str, tokens: int) -> None:
    kinds = {**CHUNKS, **DEEP_CHUNKS}[name]
    problem = AttentionProblem(3, 4, 1, capacity=384, head_dim=64, **kinds)
    attend(cpu, make_inputs(replace(problem, attention_chunk=tokens), "cpu", 1))


def test_a_launch_over_a_short_window_has_ctas_for_the_window(cpu: Cpu) -> None:
    problem = AttentionProblem(1, 2, 2, 4000, 64, window_left=255)
    inputs = make_inputs(problem, "cpu", 1)
    launch = cpu.launch(inputs, CONFIG, 99, Workspace(1000))
    assert launch.grid == 2 * 256 // CONFIG.tile_tokens
    assert Reference(inputs).check(inputs).failure("fp16") is None


@pytest.mark.parametrize("page", [10**8, -7])
@pytest.mark.parametrize(
    ("page_size", "copy"), [(1, "async"), pytest.param(16, "bulk", marks=DEEP)]
)
def test_pages_past_a_sequences_end_are_not_followed(cpu, page, page_size, copy) -> None:
    problem = AttentionProblem(
        3, 4, 1, (300, 1, 77), 64, page_size=page_size, capacity=384, lengths_on="device"
    )
    inputs = poison_unused(make_inputs(problem, "cpu", 1))
    reference = Reference(inputs)
    assert inputs.block_table is not None
    for row, tokens in zip(inputs.block_table, problem.contexts, strict=True):
        row[-(-tokens // page_size) :] = page
    inputs.poison()
    cpu.launch(inputs, replace(CONFIG, copy=copy), 5, Workspace(1000))
    assert reference.check(inputs).failure("fp16") is None
