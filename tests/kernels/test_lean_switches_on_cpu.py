"""Switches of lean.cu that no call uses yet, on the CPU: each build is as right as without."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
from lean_on_cpu import COMPILER, Cpu
from leanbench.kernels.lean import cuda
from leanbench.kernels.lean.configs import CudaConfig
from leanbench.kernels.lean.cuda_build import CudaBuild
from leanbench.kernels.lean.cuda_heuristic import cuda_config
from test_lean_on_cpu import Case, attend, on_device

from leanbench.core.errors import DoesNotFit
from leanbench.core.inputs import AttentionInputs
from leanbench.core.problem import AttentionProblem

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++ to compile lean.cu")

PLAIN = cuda_config(32, 4, 2, 1, 1, 8, "bulk", 1, False)
PAIRS = cuda_config(32, 2, 2, 1, 2, 8, "bulk", 1, False)
SHORT = on_device(
    (5, 100, 2, 30, 128, 64, 16, 129, 33, 1), "16/2", 64, 512, kv_dtype="e4m3", kv_layout="NHD"
)
HEADS = AttentionProblem(2, 32, 4, 515, 64, "bf16", "NHD", kv_dtype="e4m3")
LONGER = on_device((700, 1, 300, 64), "16/2", 64, 768, kv_dtype="e4m3", kv_layout="NHD")
CASES: dict[str, tuple[dict[str, int], Case]] = {
    "head pairs": ({"pairs": 1}, Case(PLAIN, ((HEADS, 7), (LONGER, 7), (LONGER, 1)))),
    "head pairs, clusters": (
        {"pairs": 1},
        Case(PAIRS, ((replace(HEADS, batch=5), 8), (replace(HEADS, batch=5), 5))),
    ),
    "head pairs, short output tiles": (
        {"pairs": 1},
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
        {"pairs": 1},
        Case(
            cuda_config(16, 2, 3, 1, 1, 8, "bulk", 1, False),
            ((replace(HEADS, head_dim=128), 7), (replace(LONGER, head_dim=128, sinks=True), 7)),
        ),
    ),
}


@pytest.fixture
def cpu() -> Cpu:
    return Cpu()


def switched(build: CudaBuild, switches: dict[str, int]) -> CudaBuild:
    """Return the build with these switches, including `pairs` of heads in a row."""
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
