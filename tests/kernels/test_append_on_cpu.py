"""lean.cu appends tokens to the cache and rotates them and Q, on a fake GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from depth import deep
from lean_on_cpu import COMPILER, Cpu, Mutation, Workspace, with_cut_table
from leanbench.kernels.lean.configs import LeanCudaConfig
from leanbench.kernels.lean.cuda_heuristic import cuda_config
from leanbench.kernels.reference.torch import attend_all

from leanbench.check.poison import poison_unused
from leanbench.check.reference import Reference
from leanbench.core.inputs import AttentionInputs, make_inputs
from leanbench.core.problem import AttentionProblem

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++ to compile lean.cu")


@dataclass(frozen=True)
class Case:
    """A call on GPUs with these numbers of SMs."""

    config: LeanCudaConfig
    problem: AttentionProblem
    sms: tuple[int, ...]


def case(
    config: LeanCudaConfig,
    lengths: tuple[int, ...],
    heads: str,
    head_dim: int,
    sms: tuple[int, ...],
    **axes: object,
) -> Case:
    """Return a case with lengths on the device, in caches with room for 768 tokens."""
    q_heads, kv_heads = map(int, heads.split("/"))
    problem = AttentionProblem(
        len(lengths),
        q_heads,
        kv_heads,
        lengths,
        head_dim,
        capacity=768,
        lengths_on="device",
    )
    return Case(config, replace(problem, **axes), sms)


#: cuda_config takes chunk, warps, stages, CTAs per SM, cluster, rows, copy, LeanTiles per CTA.
BULK = cuda_config(32, 4, 2, 1, 1, 8, "bulk", 1, False)
ASYNC = cuda_config(32, 2, 2, 1, 1, 8, "async", 1, False)
CLUSTERS = cuda_config(32, 2, 3, 1, 2, 16, "bulk", 1, False)
ROWS = cuda_config(32, 2, 2, 1, 1, 32, "bulk", 1, False)
LENGTHS = (300, 5, 700, 64)
CASES = {
    "plain": case(BULK, LENGTHS, "8/2", 64, (7, 99), append=1),
    # A sequence that begins with the appended tokens; one with a chunk that begins with them.
    "rotated": case(BULK, LENGTHS, "8/2", 64, (7, 1), append=5, rotary_dim=64),
    "clusters": case(
        CLUSTERS, LENGTHS, "8/2", 64, (22, 8), append=1, rotary_dim=32, rotary_interleaved=True
    ),
    # Whole chunks of appended tokens, more than query tokens, over pages.
    "pages": case(
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
    "host": Case(
        ASYNC, AttentionProblem(3, 2, 2, 515, 128, q_len=3, append=2, rotary_dim=128), (7,)
    ),
    # Two row tiles, the first of which sees less; more query tokens than appended ones.
    "row tiles": case(ROWS, (300, 77, 40), "8/2", 64, (5,), q_len=37, append=20, rotary_dim=64),
    # Appended tokens that no query token sees.
    "windows": case(BULK, (300, 77), "8/2", 64, (7,), q_len=2, append=70, window_left=10),
    # More of them than one read takes, across the end of a chunk.
    "several tokens": case(
        cuda_config(16, 2, 2, 1, 1, 16, "bulk", 1, False),
        (300, 77, 69, 700),
        "8/2",
        128,
        (7, 2),
        append=7,
        q_len=2,
        kv_layout="NHD",
    ),
    # A warp has several chunks of appended tokens. The first tokens are read when its part begins.
    "chunks of a warp": case(
        replace(BULK, num_warps=2), (301, 163), "8/2", 64, (7,), append=140, page_size=16
    ),
    "fp8": case(BULK, LENGTHS, "8/2", 64, (7,), append=3, kv_dtype="e4m3"),
    "padding": case(
        BULK, (300, 700), "8/2", 64, (7,), append=3, rotary_dim=64, leftpad=True, batch_idx=True
    ),
}
DEEP_CASES = {
    "16-byte copies": case(
        ASYNC, LENGTHS, "3/3", 80, (7,), append=5, rotary_dim=48, rotary_interleaved=True
    ),
    "queries in shared memory": case(
        replace(ROWS, chunk_tokens=16), (300, 77), "16/1", 128, (5,), q_len=3, append=3,
        rotary_dim=128,
    ),
    "neighbours in shared memory": case(
        replace(ROWS, chunk_tokens=16), (300, 77), "16/1", 128, (5,), q_len=3, append=50,
        rotary_dim=64, rotary_interleaved=True,
    ),
    "pages of 1": case(ASYNC, LENGTHS, "8/2", 64, (9,), append=3, page_size=1),
    "ragged queries": case(
        ROWS, (300, 77, 30, 515), "8/2", 64, (5,), q_lens=(37, 1, 5, 1), append=4, rotary_dim=64
    ),
    "fixed runs": case(
        replace(BULK, fixed_run_tiles=4), LENGTHS, "8/2", 64, (7,), append=5, rotary_dim=64
    ),
    "not causal": case(
        ASYNC, (300, 77), "8/2", 64, (7,), q_len=3, append=2, rotary_dim=64, causal=False
    ),
    "paged windows": case(
        CLUSTERS, (300, 140), "8/2", 64, (7,), q_len=3, append=70, page_size=16, window_left=20,
        causal=False, window_right=1, rotary_dim=64,
    ),
    "windows, host": Case(
        ASYNC, AttentionProblem(2, 4, 2, 515, 64, q_len=2, append=90, window_left=16), (7,)
    ),
    "windows of row tiles": case(
        ROWS, (300, 77), "8/2", 64, (5,), q_len=20, append=60, window_left=12
    ),
    "V of its own head_dim": case(
        replace(ASYNC, chunk_tokens=16), LENGTHS, "6/2", 192, (7,), append=3, v_head_dim=128
    ),
    "head_dim 72": case(
        replace(BULK, chunk_tokens=16), LENGTHS, "3/3", 72, (7,), append=3, rotary_dim=64
    ),
    "head_dim 256": case(
        replace(ASYNC, chunk_tokens=16), (100, 77), "2/1", 256, (7,), append=5, rotary_dim=128
    ),
    "fp8 in columns of 128 bytes": case(
        CLUSTERS, LENGTHS, "8/2", 128, (8,), append=3, kv_dtype="e5m2", dtype="bf16"
    ),
}  # fmt: skip
#: Late copies, resident CTAs, seed of the order.
ORDERS = [(True, 1 << 20, 1), (False, 16, 2)]


@pytest.fixture(scope="module")
def cpu() -> Cpu:
    return Cpu()


def copied(inputs: AttentionInputs) -> AttentionInputs:
    """Return the same call with its own caches and outputs."""
    return replace(
        inputs,
        k_cache=inputs.k_cache.clone(),
        v_cache=inputs.v_cache.clone(),
        out=torch.full_like(inputs.out, torch.nan),
        lse=torch.full_like(inputs.lse, torch.nan),
    )


def is_same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return True if all bits are equal, including NaN."""
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


def attend(cpu: Cpu, inputs: AttentionInputs, config: LeanCudaConfig, sms: int) -> None:
    """Run the call in every order and check outputs and caches.

    The caches have the appended tokens and are otherwise unchanged.
    """
    expected = copied(inputs)
    attend_all(expected)
    reference, workspace = Reference(inputs), Workspace(1000)
    for lazy, ctas, seed in ORDERS:
        own = copied(inputs)
        cpu.launch(own, config, sms, workspace, max(ctas, config.cluster_size), lazy, seed)
        dtype = "bf16" if own.out.dtype == torch.bfloat16 else "fp16"
        assert reference.check(own).failure(dtype) is None
        assert is_same(own.k_cache, expected.k_cache)
        assert is_same(own.v_cache, expected.v_cache)


def attend_case(cpu: Cpu, name: str) -> None:
    case = (CASES | DEEP_CASES)[name]
    inputs = with_cut_table(poison_unused(make_inputs(case.problem, "cpu", 1, score_scale=3.0)))
    for sms in case.sms:
        attend(cpu, inputs, case.config, sms)


@pytest.mark.parametrize("name", [*CASES, *(deep(name) for name in DEEP_CASES)])
def test_appended_tokens_are_attended_to_and_stored(cpu: Cpu, name: str) -> None:
    attend_case(cpu, name)


def test_what_the_cache_has_no_room_for_is_left_out(cpu: Cpu) -> None:
    """Lengths below 0, near the cache's end, at its end, and past it."""
    problem = replace(CASES["rotated"].problem, context=(768,) * 4, append=5)
    inputs = make_inputs(problem, "cpu", 1)
    assert inputs.cache_seqlens is not None
    inputs.cache_seqlens[:] = torch.tensor([100_000, 768, 766, -4])
    attend(cpu, inputs, BULK, 7)


def test_queries_past_the_last_position_have_it(cpu: Cpu) -> None:
    """At a cache's end with just enough angles, query tokens outnumber appended ones."""
    case = CASES["row tiles"]
    inputs = make_inputs(replace(case.problem, context=(768, 760, 40)), "cpu", 1)
    assert inputs.rotary_cos is not None
    assert inputs.rotary_sin is not None
    tables = {"rotary_cos": inputs.rotary_cos[:768], "rotary_sin": inputs.rotary_sin[:768]}
    attend(cpu, replace(inputs, **tables), case.config, 5)


def test_a_call_that_is_made_again_appends_again(cpu: Cpu) -> None:
    """The call uses the lengths currently in the tensor, like a replayed CUDA graph."""
    problem = replace(CASES["rotated"].problem, context=(300, 5, 700, 64), append=5)
    inputs = make_inputs(problem, "cpu", 1)
    assert inputs.cache_seqlens is not None
    for _ in range(2):
        attend(cpu, inputs, BULK, 7)
        attend_all(inputs)
        inputs.cache_seqlens.add_(5)


#: Evidence that a mutation is detected.
NOTICED = r"failure\(|is_same|^CTA |deadlock"
#: Mutations, each with the case that detects it.
MUTATIONS: list[tuple[str, Mutation]] = [
    (
        "rotated",
        ("append.cuh", "load<APPEND_ROWS>(p, part, at,", "load<APPEND_ROWS>(p, part, first,"),
    ),
    ("rotated", ("append.cuh", "swizzle_of(row % 8)", "swizzle_of(0)")),
    ("rotated", ("rotary.cuh", "low ? ROTARY_DIM / 4 : -ROTARY_DIM / 4", "low ? 2 : -2")),
    ("rotated", ("schedule.cuh", "length + min(p.new_tokens, p.context - length)", "length")),
    (
        "rotated",
        (
            "append.cuh",
            "early = chunk;\n    load<FIRST_ROWS>(p, part, max(token, length), lane);",
            "early = chunk;\n    load<FIRST_ROWS>(p, part, stop - 1, lane);",
        ),
    ),
    (
        "chunks of a warp",
        ("append.cuh", "if (any && part.chunk != early)", "if (any && early < 0)"),
    ),
    ("chunks of a warp", ("append.cuh", "outer_of(p, part, at + row);", "outer_of(p, part, at);")),
    ("clusters", ("rotary.cuh", "x.y * c.x + x.x * s.x)", "x.y * c.x - x.x * s.x)")),
    ("pages", ("append.cuh", "+ at / PAGE_OR_1);", "+ (at + 1) / PAGE_OR_1);")),
    ("host", ("schedule.cuh", "max(p.context - p.new_tokens, 0) :", "p.context :")),
    ("row tiles", ("append.cuh", "tile.row_offset + ROWS >= all_rows", "0 * all_rows")),
    ("row tiles", ("append.cuh", "tile.row_offset + ROWS >=", "tile.row_offset == 0 * ")),
    ("windows", ("schedule.cuh", "WINDOW_LEFT && APPEND ?", "false ?")),
    ("fp8", ("append.cuh", "WORD_NUMBERS = 4 / KV_BYTES", "WORD_NUMBERS = 2")),
    ("padding", ("append.cuh", "return BATCH_IDX ? __ldg", "return false ? __ldg")),
]


@pytest.mark.deep
@pytest.mark.parametrize(("name", "mutation"), MUTATIONS)
def test_a_changed_line_is_noticed(name: str, mutation: Mutation) -> None:
    with pytest.raises(AssertionError, match=NOTICED):
        attend_case(Cpu(mutation), name)
