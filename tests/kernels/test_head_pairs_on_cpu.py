"""Two KV heads whose rows are copied as one, on the CPU: every kind that takes them is right."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lean_on_cpu import COMPILER, Cpu, Workspace
from leanbench.kernels.lean.cuda_heuristic import cuda_config
from test_lean_on_cpu import Case, attend, on_device

from leanbench.check.poison import poison_unused
from leanbench.check.reference import Reference
from leanbench.core.inputs import make_inputs
from leanbench.core.problem import AttentionProblem

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++ to compile lean.cu")

FP8: dict[str, Any] = {"kv_dtype": "e4m3", "kv_layout": "NHD"}
#: Scales of tensors are random numbers for each sequence and KV head.
HOST = AttentionProblem(2, 32, 4, 515, 64, "bf16", **FP8)
RAGGED = on_device((700, 1, 300, 64), "32/4", 64, 768, **FP8)
PAIR = on_device((700, 1, 300, 64), "16/2", 64, 768, **FP8)
MANY_SHORT = on_device((5, 100, 2, 30, 128, 64, 16, 129, 33, 1), "16/2", 64, 512, **FP8)
LONE = cuda_config(32, 4, 2, 1, 1, 16, "bulk", 1, False)
CLUSTER = cuda_config(32, 2, 2, 1, 2, 16, "bulk", 1, False)
ASYNC = replace(LONE, copy="async", num_warps=2)
CASES = {
    "scales of heads": Case(LONE, ((HOST, 7), (replace(HOST, scaled=False), 1))),
    "ragged": Case(LONE, ((RAGGED, 7), (RAGGED, 1), (PAIR, 40))),
    "e5m2": Case(LONE, ((replace(RAGGED, kv_dtype="e5m2"), 7),)),
    "fp8 queries": Case(LONE, ((replace(RAGGED, q_dtype="e4m3", dtype="bf16"), 7),)),
    "e5m2, fp8 queries, pages in clusters": Case(
        CLUSTER,
        ((replace(RAGGED, kv_dtype="e5m2", q_dtype="e5m2", dtype="bf16", page_size=64), 12),),
    ),
    # A range crosses output tiles; clusters of their own.
    "clusters": Case(CLUSTER, ((RAGGED, 12), (RAGGED, 22), (HOST, 8))),
    "a cluster of 8": Case(replace(CLUSTER, cluster_size=8), ((PAIR, 64), (PAIR, 24))),
    "pages of 16": Case(
        LONE, ((replace(RAGGED, page_size=16), 7), (replace(HOST, page_size=16), 7))
    ),
    "pages of 48": Case(
        replace(CLUSTER, chunk_tokens=64), ((replace(RAGGED, page_size=48, dtype="bf16"), 12),)
    ),
    "pages of 8": Case(ASYNC, ((replace(RAGGED, page_size=8), 7),)),
    "pages of 1": Case(ASYNC, ((replace(RAGGED, page_size=1), 7),)),
    "16-byte copies": Case(ASYNC, ((HOST, 7), (PAIR, 7))),
    "sinks, windows and a soft cap": Case(
        LONE, ((replace(RAGGED, sinks=True, window_left=130, softcap=2.0), 7),)
    ),
    "sinks on the host": Case(CLUSTER, ((replace(HOST, sinks=True, window_left=127), 8),)),
    "ALiBi, padding and rows of the cache": Case(
        LONE, ((replace(RAGGED, alibi=True, leftpad=True, batch_idx=True), 7),)
    ),
    "windows and padding in pages": Case(
        CLUSTER,
        (
            (replace(RAGGED, page_size=16, leftpad=True, window_left=200, sinks=True), 12),
            (replace(RAGGED, page_size=16, leftpad=True, window_left=200, sinks=True), 2),
        ),
    ),
    "attention chunks": Case(LONE, ((replace(RAGGED, attention_chunk=100), 7),)),
    "short output tiles": Case(
        LONE, ((MANY_SHORT, 2), (MANY_SHORT, 1), (replace(MANY_SHORT, alibi=True), 2))
    ),
    # Those that are chosen.
    "eight warps": Case(cuda_config(32, 8, 2, 1, 1, 16, "bulk", 1, True), ((HOST, 9),)),
    "chunks of 64": Case(cuda_config(64, 4, 3, 1, 2, 16, "bulk", 1, True), ((HOST, 9),)),
}


@pytest.fixture
def cpu(tmp_path: Path) -> Cpu:
    return Cpu(tmp_path)


@pytest.mark.parametrize("name", CASES)
def test_pairs_of_heads(cpu: Cpu, name: str) -> None:
    attend(cpu, CASES[name])
    assert {build.heads_of_row for build in cpu._libraries} == {2}


def test_heads_of_a_larger_cache(cpu: Cpu) -> None:
    """Rows lie side by side, tokens and sequences further apart."""
    wide = make_inputs(replace(HOST, q_heads=64, kv_heads=8), "cpu", 1)
    own = {name: getattr(wide, name)[:, :, 2:6] for name in ("k_cache", "v_cache")}
    inputs = replace(poison_unused(make_inputs(HOST, "cpu", 1)), **own)
    inputs.poison()
    launch = cpu.launch(inputs, LONE, 7, Workspace(1000))
    assert launch.build.heads_of_row == 2
    assert Reference(inputs).check(inputs).failure(HOST.dtype) is None
