"""lean.cu appends tokens to the cache and rotates them and Q, on a fake GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from depth import deep
from lean_on_cpu import Case, Cpu, attend, attend_over, case, needs_compiler, on_device, settings
from leanbench.kernels.lean.configs import LeanCudaConfig
from leanbench.kernels.reference.torch import attend_all

from leanbench.core.inputs import make_inputs
from leanbench.core.problem import AttentionProblem

pytestmark = needs_compiler


def appended(
    config: LeanCudaConfig,
    lengths: tuple[int, ...],
    heads: str,
    head_dim: int,
    sms: tuple[int, ...],
    **axes: Any,
) -> Case:
    """Return calls in caches with room for 768 tokens, on GPUs with these numbers of SMs."""
    problem = on_device(lengths, heads, head_dim, 768, **axes)
    return Case(config, tuple((problem, count) for count in sms))


#: settings takes chunk, warps, stages, CTAs per SM, cluster, rows, copy.
BULK = settings(32, 4, 2, 1, 1, 8, "bulk")
ASYNC = settings(32, 2, 2, 1, 1, 8, "async")
CLUSTERS = settings(32, 2, 3, 1, 2, 16, "bulk")
ROWS = settings(32, 2, 2, 1, 1, 32, "bulk")
LENGTHS = (300, 5, 700, 64)
CASES = {
    "plain": appended(BULK, LENGTHS, "8/2", 64, (7, 99), append=1),
    # A sequence that begins with the appended tokens; one with a chunk that begins with them.
    "rotated": appended(BULK, LENGTHS, "8/2", 64, (7, 1), append=5, rotary_dim=64),
    "clusters": appended(
        CLUSTERS, LENGTHS, "8/2", 64, (22, 8), append=1, rotary_dim=32, rotary_interleaved=True
    ),
    # Whole chunks of appended tokens, more than query tokens, over pages.
    "pages": appended(
        CLUSTERS,
        (700, 130),
        "8/1",
        64,
        (8,),
        append=70,
        rotary_dim=64,
        page_size=16,
        dtype="bf16",
        q_len=2,
    ),
    "host": case(
        ASYNC, (AttentionProblem(3, 2, 2, 515, 128, q_len=3, append=2, rotary_dim=128), 7)
    ),
    # Two row tiles, the first of which sees less; more query tokens than appended ones.
    "row tiles": appended(ROWS, (300, 77, 40), "8/2", 64, (5,), q_len=37, append=20, rotary_dim=64),
    # Appended tokens that no query token sees.
    "windows": appended(BULK, (300, 77), "8/2", 64, (7,), q_len=2, append=70, window_left=10),
    # More of them than one read takes, across the end of a chunk.
    "several tokens": appended(
        settings(16, 2, 2, 1, 1, 16, "bulk"),
        (300, 77, 69, 700),
        "8/2",
        128,
        (7, 2),
        append=7,
        q_len=2,
        kv_layout="NHD",
    ),
    # A warp has several chunks of appended tokens. The first tokens are read when its part begins.
    "chunks of a warp": appended(
        replace(BULK, num_warps=2), (301, 163), "8/2", 64, (7,), append=140, page_size=16
    ),
    "fp8": appended(BULK, LENGTHS, "8/2", 64, (7,), append=3, kv_dtype="e4m3"),
    "padding": appended(
        BULK, (300, 700), "8/2", 64, (7,), append=3, rotary_dim=64, leftpad=True, batch_idx=True
    ),
}
#: Cases with every mechanism; the others are of deep runs.
ALWAYS = ("rotated", "pages", "row tiles", "windows", "fp8", "padding")
ROTATED = on_device(LENGTHS, "8/2", 64, 768, append=5, rotary_dim=64)
DEEP_CASES = {
    "16-byte copies": appended(
        ASYNC, LENGTHS, "3/3", 80, (7,), append=5, rotary_dim=48, rotary_interleaved=True
    ),
    "queries in shared memory": appended(
        replace(ROWS, chunk_tokens=16), (300, 77), "16/1", 128, (5,), q_len=3, append=3,
        rotary_dim=128,
    ),
    "neighbours in shared memory": appended(
        replace(ROWS, chunk_tokens=16), (300, 77), "16/1", 128, (5,), q_len=3, append=50,
        rotary_dim=64, rotary_interleaved=True,
    ),
    "pages of 1": appended(ASYNC, LENGTHS, "8/2", 64, (9,), append=3, page_size=1),
    "ragged queries": appended(
        ROWS, (300, 77, 30, 515), "8/2", 64, (5,), q_lens=(37, 1, 5, 1), append=4, rotary_dim=64
    ),
    "fixed runs": appended(
        replace(BULK, fixed_run_tiles=4), LENGTHS, "8/2", 64, (7,), append=5, rotary_dim=64
    ),
    "not causal": appended(
        ASYNC, (300, 77), "8/2", 64, (7,), q_len=3, append=2, rotary_dim=64, causal=False
    ),
    "paged windows": appended(
        CLUSTERS, (300, 140), "8/2", 64, (7,), q_len=3, append=70, page_size=16, window_left=20,
        causal=False, window_right=1, rotary_dim=64,
    ),
    "windows, host": case(
        ASYNC, (AttentionProblem(2, 4, 2, 515, 64, q_len=2, append=90, window_left=16), 7)
    ),
    "windows of row tiles": appended(
        ROWS, (300, 77), "8/2", 64, (5,), q_len=20, append=60, window_left=12
    ),
    "V of its own head_dim": appended(
        replace(ASYNC, chunk_tokens=16), LENGTHS, "6/2", 192, (7,), append=3, v_head_dim=128
    ),
    "head_dim 72": appended(
        replace(BULK, chunk_tokens=16), LENGTHS, "3/3", 72, (7,), append=3, rotary_dim=64
    ),
    "head_dim 256": appended(
        replace(ASYNC, chunk_tokens=16), (100, 77), "2/1", 256, (7,), append=5, rotary_dim=128
    ),
    "fp8 in columns of 128 bytes": appended(
        CLUSTERS, LENGTHS, "8/2", 128, (8,), append=3, kv_dtype="e5m2", dtype="bf16"
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [*ALWAYS, *(deep(name) for name in CASES | DEEP_CASES if name not in ALWAYS)]
)
def test_appended_tokens_are_attended_to_and_stored(cpu: Cpu, name: str) -> None:
    attend(cpu, (CASES | DEEP_CASES)[name])


def test_what_the_cache_has_no_room_for_is_left_out(cpu: Cpu) -> None:
    """Lengths below 0, near the cache's end, at its end, and past it."""
    problem = replace(ROTATED, context=(768,) * 4, append=5)
    inputs = make_inputs(problem, "cpu", 1)
    assert inputs.cache_seqlens is not None
    inputs.cache_seqlens[:] = torch.tensor([100_000, 768, 766, -4])
    attend_over(cpu, inputs, BULK, 7)


def test_queries_past_the_last_position_have_it(cpu: Cpu) -> None:
    """At a cache's end with just enough angles, query tokens outnumber appended ones."""
    (problem, _), *_ = CASES["row tiles"].calls
    inputs = make_inputs(replace(problem, context=(768, 760, 40)), "cpu", 1)
    assert inputs.rotary_cos is not None
    assert inputs.rotary_sin is not None
    tables = {"rotary_cos": inputs.rotary_cos[:768], "rotary_sin": inputs.rotary_sin[:768]}
    attend_over(cpu, replace(inputs, **tables), ROWS, 5)


def test_a_call_that_is_made_again_appends_again(cpu: Cpu) -> None:
    """The call uses the lengths currently in the tensor, like a replayed CUDA graph."""
    problem = replace(ROTATED, context=(300, 5, 700, 64), append=5)
    inputs = make_inputs(problem, "cpu", 1)
    assert inputs.cache_seqlens is not None
    for _ in range(2):
        attend_over(cpu, inputs, BULK, 7)
        attend_all(inputs)
        inputs.cache_seqlens.add_(5)
