"""Switches of lean.cu that no call takes yet, on the CPU: each build is as right as without."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from lean_on_cpu import COMPILER, Cpu
from leanbench.kernels.lean import cuda
from leanbench.kernels.lean.configs import CudaConfig
from leanbench.kernels.lean.cuda_build import CudaBuild
from leanbench.kernels.lean.cuda_heuristic import cuda_config
from test_lean_on_cpu import EQUAL, FP8, ONE_LONG, WINDOWS, Case, attend, fixed, on_device

from leanbench.core.errors import DoesNotFit
from leanbench.core.inputs import AttentionInputs
from leanbench.core.problem import AttentionProblem

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++ to compile lean.cu")

LATE = {"late_entry": 1}
EARLY = {"late_entry": 1, "early_append": 1}
HALVES = {"halves": 1}
PLAIN = cuda_config(32, 4, 2, 1, 1, 8, "bulk", 1, False)
PAIRS = cuda_config(32, 2, 2, 1, 2, 8, "bulk", 1, False)
APPENDED = on_device((300, 77, 30, 515), "8/2", 64, 640, append=1)
#: More of them than are read at once, over the end of a chunk, and a sequence with room for none.
MANY = on_device((300, 77, 69, 640), "8/2", 128, 640, append=7, q_len=2, kv_layout="NHD")
ROTATED = replace(APPENDED, head_dim=128, rotary_dim=64, dtype="bf16")
SHORT = on_device(
    (5, 100, 2, 30, 128, 64, 16, 129, 33, 1), "16/2", 64, 512, kv_dtype="e4m3", kv_layout="NHD"
)
HEADS = AttentionProblem(2, 32, 4, 515, 64, "bf16", "NHD", kv_dtype="e4m3")
LONGER = on_device((700, 1, 300, 64), "16/2", 64, 768, kv_dtype="e4m3", kv_layout="NHD")
CASES: dict[str, tuple[dict[str, int], Case]] = {
    "late entry": (LATE, Case(PLAIN, ((ONE_LONG, 7), (ONE_LONG, 1)))),
    "late entry, sinks and windows": (LATE, Case(PLAIN, ((WINDOWS, 7), (WINDOWS, 1)))),
    "late entry, clusters": (LATE, Case(PAIRS, ((ONE_LONG, 12), (ONE_LONG, 22)))),
    "late entry, fixed runs": (LATE, Case(fixed(PLAIN), ((ONE_LONG, 7), (ONE_LONG, 99)))),
    "late entry, 16-byte copies": (
        LATE,
        Case(replace(PLAIN, copy="async"), ((replace(ONE_LONG, sinks=True), 7),)),
    ),
    "late entry, many rows": (
        LATE,
        Case(
            cuda_config(16, 2, 2, 1, 1, 32, "bulk", 1, False),
            tuple((on_device((300, 77), "16/1", 128, 384, q_len=3), sms) for sms in (5, 1)),
        ),
    ),
    "late entry, short output tiles": (
        LATE,
        Case(
            cuda_config(16, 4, 2, 1, 1, 8, "bulk", 1, False),
            ((on_device((5, 100, 2, 300, 128, 64, 16, 129, 33, 1), "8/2", 64, 512), 2),),
        ),
    ),
    "halves": (HALVES, Case(PLAIN, ((FP8, 7), (replace(FP8, kv_dtype="e5m2"), 7)))),
    "halves, 16-byte copies": (
        HALVES,
        Case(
            replace(PLAIN, copy="async"),
            ((replace(FP8, dtype="bf16", head_dim=128, q_dtype="e4m3"), 7),),
        ),
    ),
    "linear ALiBi": (
        {"linear_alibi": 1, **LATE},
        Case(
            PLAIN, ((replace(ONE_LONG, alibi=True), 7), (replace(WINDOWS, q_len=1, alibi=True), 7))
        ),
    ),
    "early append": (EARLY, Case(PLAIN, ((APPENDED, 7), (APPENDED, 1)))),
    "early append, clusters": (EARLY, Case(PAIRS, ((APPENDED, 12), (APPENDED, 22)))),
    "early append, pages": (
        EARLY,
        Case(PAIRS, ((replace(APPENDED, page_size=16, batch_idx=False), 12),)),
    ),
    "early append, rows of the cache": (
        EARLY,
        Case(PLAIN, ((replace(APPENDED, batch_idx=True), 7),)),
    ),
    "early append, several tokens": (
        EARLY,
        Case(cuda_config(16, 2, 2, 1, 1, 16, "bulk", 1, False), ((MANY, 7), (MANY, 2))),
    ),
    "early append, fixed runs": (EARLY, Case(fixed(PLAIN), ((APPENDED, 7), (APPENDED, 99)))),
    "early append, windows": (EARLY, Case(PLAIN, ((replace(APPENDED, window_left=20), 7),))),
    "early append, fp8": (
        EARLY | HALVES,
        Case(PLAIN, ((replace(APPENDED, kv_dtype="e4m3", head_dim=128), 7),)),
    ),
    "early append, rotated": (
        EARLY,
        Case(PAIRS, ((ROTATED, 12), (replace(ROTATED, rotary_interleaved=True), 7))),
    ),
    "early append, rotated, several tokens": (
        EARLY,
        Case(
            cuda_config(16, 2, 2, 1, 1, 16, "bulk", 1, False),
            ((replace(MANY, rotary_dim=128), 7), (replace(MANY, page_size=16, rotary_dim=128), 3)),
        ),
    ),
    "sequences first": (
        {"sequences_first": 1},
        Case(replace(PLAIN, copy="async"), tuple((EQUAL, sms) for sms in (7, 99, 1, 4))),
    ),
    "sequences first, head pairs": (
        {"sequences_first": 1, "pairs": 1} | LATE,
        Case(PAIRS, ((replace(HEADS, batch=5), 8), (replace(HEADS, batch=5), 5))),
    ),
    "head pairs": ({"pairs": 1} | HALVES, Case(PLAIN, ((HEADS, 7), (LONGER, 7), (LONGER, 1)))),
    "head pairs, short output tiles": (
        {"pairs": 1} | LATE,
        Case(PLAIN, ((SHORT, 2), (SHORT, 1))),
    ),
    "head pairs, e5m2, fp8 queries, pages": (
        {"pairs": 1},
        Case(
            PAIRS,
            ((replace(LONGER, kv_dtype="e5m2", q_dtype="e4m3", dtype="bf16", page_size=64), 12),),
        ),
    ),
    "head pairs, 16-byte copies": (
        {"pairs": 1},
        Case(replace(PLAIN, copy="async", num_warps=2), ((HEADS, 7), (LONGER, 7))),
    ),
    "head pairs, two columns": (
        {"pairs": 1} | HALVES | LATE,
        Case(
            cuda_config(16, 2, 3, 1, 1, 8, "bulk", 1, False),
            ((replace(HEADS, head_dim=128), 7), (replace(LONGER, head_dim=128, sinks=True), 7)),
        ),
    ),
}


@pytest.fixture
def cpu(tmp_path: Path) -> Cpu:
    return Cpu(tmp_path)


def switched(build: CudaBuild, switches: dict[str, int]) -> CudaBuild:
    """The build with these switches; `pairs` of heads in a row among them."""
    others = {name: value for name, value in switches.items() if name != "pairs"}
    return replace(build.of_head_pairs() if switches.get("pairs") else build, **others)


@pytest.mark.parametrize("name", CASES)
def test_a_switched_build(cpu: Cpu, name: str) -> None:
    switches, case = CASES[name]
    plain = cuda.build_of

    def build_of(inputs: AttentionInputs, config: CudaConfig) -> CudaBuild:
        return switched(plain(inputs, config), switches)

    with mock.patch.object(cuda, "build_of", build_of):
        attend(cpu, case)


def test_head_pairs_of_other_groups_are_refused() -> None:
    build = CudaBuild.of(AttentionProblem(1, 8, 2, 64, 64, kv_dtype="e4m3"), PLAIN)
    with pytest.raises(DoesNotFit, match="two KV heads"):
        build.of_head_pairs()
