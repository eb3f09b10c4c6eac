"""Two KV heads with rows copied as one, on the CPU: every supported feature is right."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from depth import deep
from hostile_inputs import assert_nan_of_kv_head_0
from lean_on_cpu import Cpu, Workspace, attend, case, needs_compiler, on_device, settings

from leanbench.check.poison import poison_unused
from leanbench.check.reference import Reference
from leanbench.core.inputs import AttentionInputs, make_inputs
from leanbench.core.problem import AttentionProblem

pytestmark = needs_compiler

FP8: dict[str, Any] = {"kv_dtype": "e4m3", "kv_layout": "NHD"}
#: Scales in tensors are random for each sequence and KV head.
HOST = AttentionProblem(2, 32, 4, 515, 64, "bf16", **FP8)
RAGGED = on_device((700, 1, 300, 64), "32/4", 64, 768, **FP8)
PAIR = on_device((700, 1, 300, 64), "16/2", 64, 768, **FP8)
MANY_SHORT = on_device((5, 100, 2, 30, 128, 64, 16, 129, 33, 1), "16/2", 64, 512, **FP8)
LONE = settings(32, 4, 2, 1, 1, 16, "bulk")
CLUSTER = settings(32, 2, 2, 1, 2, 16, "bulk")
ASYNC = replace(LONE, copy="async", num_warps=2)
CASES = {
    "scales of heads": case(LONE, (HOST, 7), (replace(HOST, scaled=False), 1)),
    "ragged": case(LONE, (RAGGED, 7), (RAGGED, 1), (PAIR, 40)),
    "e5m2": case(LONE, (replace(RAGGED, kv_dtype="e5m2"), 7)),
    "fp8 queries": case(LONE, (replace(RAGGED, q_dtype="e4m3", dtype="bf16"), 7)),
    "e5m2, fp8 queries, pages in clusters": case(
        CLUSTER, (replace(RAGGED, kv_dtype="e5m2", q_dtype="e5m2", dtype="bf16", page_size=64), 12)
    ),
    # A range that crosses output tiles; a cluster per output tile.
    "clusters": case(CLUSTER, (RAGGED, 12), (RAGGED, 22), (HOST, 8)),
    "a cluster of 8": case(replace(CLUSTER, cluster_size=8), (PAIR, 64), (PAIR, 24)),
    "pages of 16": case(LONE, (replace(RAGGED, page_size=16), 7), (replace(HOST, page_size=16), 7)),
    "pages of 48": case(
        replace(CLUSTER, chunk_tokens=64), (replace(RAGGED, page_size=48, dtype="bf16"), 12)
    ),
    "pages of 8": case(ASYNC, (replace(RAGGED, page_size=8), 7)),
    "pages of 1": case(ASYNC, (replace(RAGGED, page_size=1), 7)),
    "16-byte copies": case(ASYNC, (HOST, 7), (PAIR, 7)),
    "sinks, windows and a soft cap": case(
        LONE, (replace(RAGGED, sinks=True, window_left=130, softcap=2.0), 7)
    ),
    "sinks on the host": case(CLUSTER, (replace(HOST, sinks=True, window_left=127), 8)),
    "ALiBi, padding and rows of the cache": case(
        LONE, (replace(RAGGED, alibi=True, leftpad=True, batch_idx=True), 7)
    ),
    "windows and padding in pages": case(
        CLUSTER,
        (replace(RAGGED, page_size=16, leftpad=True, window_left=200, sinks=True), 12),
        (replace(RAGGED, page_size=16, leftpad=True, window_left=200, sinks=True), 2),
    ),
    "attention chunks": case(LONE, (replace(RAGGED, attention_chunk=100), 7)),
    "short output tiles": case(
        LONE, (MANY_SHORT, 2), (MANY_SHORT, 1), (replace(MANY_SHORT, alibi=True), 2)
    ),
    # The heuristic's choices.
    "eight warps": case(settings(32, 8, 2, 1, 1, 16, "bulk", align=True), (HOST, 9)),
    "chunks of 64": case(settings(64, 4, 3, 1, 2, 16, "bulk", align=True), (HOST, 9)),
}
NHD: dict[str, Any] = {"kv_layout": "NHD"}
#: In 16 bits: rows of 160 bytes, with groups of 1, 2 and 4.
ALONE = on_device((700, 1, 300, 64), "4/4", 80, 768, **NHD)
GROUPS_OF_2 = replace(ALONE, q_heads=8, dtype="bf16")
GROUPS_OF_4 = replace(ALONE, q_heads=16)
ONE_LENGTH = AttentionProblem(2, 4, 4, 515, 80, "bf16", **NHD)
SHORT_ALONE = on_device((5, 100, 2, 30, 128, 64, 16, 129, 33, 1), "2/2", 80, 512, **NHD)
DEEP_RING = settings(16, 4, 3, 1, 1, 16, "bulk")
SHARED_SM = settings(16, 4, 2, 2, 1, 16, "bulk", align=True)
CLUSTER_OF_2 = settings(16, 4, 3, 1, 2, 16, "bulk", align=True)
CASES |= {
    "one length": case(DEEP_RING, (ONE_LENGTH, 7), (ONE_LENGTH, 1), (ONE_LENGTH, 40)),
    "groups of 1": case(DEEP_RING, (ALONE, 7), (ALONE, 1), (replace(ALONE, kv_heads=4), 40)),
    "groups of 2": case(DEEP_RING, (GROUPS_OF_2, 7), (replace(GROUPS_OF_2, dtype="fp16"), 1)),
    "groups of 4": case(SHARED_SM, (GROUPS_OF_4, 4), (GROUPS_OF_4, 20)),
    "groups of 3": case(SHARED_SM, (replace(ALONE, q_heads=12), 4)),
    "groups of 8": case(DEEP_RING, (replace(ALONE, q_heads=32), 7)),
    "head_dim 96": case(DEEP_RING, (replace(ALONE, head_dim=96), 7)),
    "head_dim 112": case(DEEP_RING, (replace(GROUPS_OF_2, head_dim=112), 7)),
    "head_dim 48": case(LONE, (replace(ALONE, head_dim=48), 7)),
    "head_dim 32": case(LONE, (replace(GROUPS_OF_2, head_dim=32), 7)),
    "head_dim 16": case(LONE, (replace(ALONE, head_dim=16), 7)),
    "chunks of 32": case(LONE, (GROUPS_OF_4, 7)),
    "pages of 16 in 16 bits": case(
        DEEP_RING, (replace(ALONE, page_size=16), 7), (replace(ONE_LENGTH, page_size=16), 7)
    ),
    "pages of 64": case(SHARED_SM, (replace(GROUPS_OF_4, page_size=64), 4)),
    "pages of 48, chunks of 32": case(LONE, (replace(ALONE, page_size=48), 7)),
    "clusters in 16 bits": case(
        CLUSTER_OF_2, (GROUPS_OF_4, 12), (GROUPS_OF_4, 22), (ONE_LENGTH, 8)
    ),
    "pages in clusters": case(CLUSTER_OF_2, (replace(ALONE, page_size=16), 12)),
    "16-byte copies in 16 bits": case(ASYNC, (ONE_LENGTH, 7), (ALONE, 7)),
    "pages of 8 in 16 bits": case(ASYNC, (replace(GROUPS_OF_2, page_size=8), 7)),
    "pages of 1 in 16 bits": case(ASYNC, (replace(ALONE, page_size=1), 7)),
    "sinks and a soft cap": case(
        DEEP_RING,
        (replace(GROUPS_OF_4, sinks=True, window_left=130, softcap=2.0), 7),
        (replace(ALONE, sinks=True, softcap=2.0), 7),
    ),
    "windows in pages": case(
        SHARED_SM,
        (replace(ALONE, page_size=64, window_left=200), 4),
        (replace(GROUPS_OF_2, page_size=16, leftpad=True, window_left=200, sinks=True), 4),
    ),
    "ALiBi": case(
        DEEP_RING, (replace(ALONE, alibi=True), 7), (replace(GROUPS_OF_4, alibi=True), 7)
    ),
    "padding and rows of the cache": case(
        DEEP_RING, (replace(GROUPS_OF_2, leftpad=True, batch_idx=True), 7)
    ),
    "attention chunks in 16 bits": case(DEEP_RING, (replace(ALONE, attention_chunk=100), 7)),
    "short output tiles in 16 bits": case(
        SHARED_SM, (SHORT_ALONE, 2), (SHORT_ALONE, 1), (replace(SHORT_ALONE, q_heads=8), 2)
    ),
}
#: Cases with every mechanism; the others are of deep runs.
ALWAYS = (
    *("scales of heads", "ragged", "e5m2, fp8 queries, pages in clusters", "groups of 1"),
    *("sinks, windows and a soft cap", "windows and padding in pages", "groups of 2", "ALiBi"),
    "windows in pages",
)


@pytest.mark.parametrize("name", [name if name in ALWAYS else deep(name) for name in CASES])
def test_pairs_of_heads(name: str) -> None:
    cpu = Cpu()
    attend(cpu, CASES[name])
    assert {build.heads_of_row for build in cpu._libraries} == {2}


def launched(cpu: Cpu, inputs: AttentionInputs) -> AttentionInputs:
    """Return the inputs with the outputs of a launch over pairs of heads."""
    inputs.poison()
    assert cpu.launch(inputs, LONE, 7, Workspace(1000)).build.heads_of_row == 2
    return inputs


@pytest.mark.parametrize("problem", [HOST, ONE_LENGTH], ids=["8 bits", "16 bits"])
def test_heads_of_a_larger_cache(cpu: Cpu, problem: AttentionProblem) -> None:
    """Rows are adjacent, tokens and sequences are not."""
    wide = make_inputs(replace(problem, q_heads=2 * problem.q_heads, kv_heads=8), "cpu", 1)
    own = {name: getattr(wide, name)[:, :, 2:6] for name in ("k_cache", "v_cache")}
    inputs = replace(poison_unused(make_inputs(problem, "cpu", 1)), **own)
    reference = Reference(inputs)
    assert reference.check(launched(cpu, inputs)).failure(problem.dtype) is None


def test_heads_whose_scores_are_far_apart(cpu: Cpu) -> None:
    """Each head's weights are relative to its own reference."""
    inputs = poison_unused(make_inputs(replace(ONE_LENGTH, q_heads=8), "cpu", 1))
    for heads, factor in ((slice(0, 2), 1e30), (slice(2, 4), -1e30), (slice(4, 6), 1e-30)):
        inputs.q[:, :, heads] *= factor
    reference = Reference(inputs)
    assert reference.check(launched(cpu, inputs)).failure("bf16") is None


def test_finite_scores_below_minus_1e30_are_scores(cpu: Cpu) -> None:
    """Only one head of a pair has them. The output is the V of the token with the highest score."""
    inputs = make_inputs(replace(ONE_LENGTH, context=500), "cpu", 1)
    inputs.q[:, :, 1] = 3e15
    inputs.k_cache[:, :, 1] = -6e15
    inputs.k_cache[:, 137, 1] = -3e15
    reference = Reference(inputs)
    assert reference.check(launched(cpu, inputs)).failure("bf16") is None
    assert inputs.lse[:, 1].max() < -1e31
    assert torch.equal(inputs.out[:, 0, 1], inputs.v_cache[:, 137, 1])


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
def test_nan_of_a_head_stays_in_it(cpu: Cpu, name: str) -> None:
    inputs = make_inputs(AttentionProblem(1, 4, 2, 500, 80, **NHD), "cpu", 1)
    getattr(inputs, name)[0, 250, 0] = float("nan")
    launched(cpu, inputs)
    if name == "k_cache":
        assert_nan_of_kv_head_0(inputs)
    else:
        assert inputs.out[:, :, :2].isnan().all()
        assert inputs.out[:, :, 2:].isfinite().all()
        assert inputs.lse.isfinite().all()
