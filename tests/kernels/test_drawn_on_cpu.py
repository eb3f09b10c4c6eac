"""Drawn settings and calls of lean.cu and mla.cu on the CPU: launches in turn on one workspace,
each over other tensors and lengths.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from lean_on_cpu import (
    Cpu,
    Workspace,
    failure_over,
    fixed,
    launch_on,
    needs_compiler,
    on_device,
    settings,
)
from leanbench.kernels.lean.configs import CudaConfig
from leanbench.kernels.mla.configs import MlaConfig
from library_stand_ins import LATENT

from leanbench.core.inputs import make_inputs
from leanbench.core.problem import AttentionProblem

pytestmark = [needs_compiler, pytest.mark.deep]
CAPACITY = 768
#: Of calls of lean.cu; none of them excludes the others' lengths.
FORMS: list[dict[str, Any]] = [
    {},
    {"page_size": 16},
    {"page_size": 32, "kv_dtype": "e4m3", "page_scales": "page-head"},
    {"leftpad": True, "sinks": True},
    {"q_len": 5, "window_left": 60},
    {"kv_layout": "NHD", "head_dim": 80, "batch_idx": True},
]
#: Of calls of lean_mla.
LATENT_FORMS: list[dict[str, Any]] = [
    {"page_size": 64, "q_heads": 128},
    {"page_size": 1, "q_len": 2},
    {"kv_dtype": "e4m3", "page_size": 16, "q_heads": 128},
    {"kv_dtype": "e4m3", "row_scales": True, "page_size": 1},
    {"head_dim": 320, "v_head_dim": 256, "q_len": 3, "dtype": "fp16"},
    {"head_dim": 160, "v_head_dim": 128, "q_heads": 64},
]


def drawn_lengths(draw: random.Random, batch: int) -> torch.Tensor:
    """Return lengths, of which some are 0, some short and some whole caches."""
    kinds = (lambda: 0, lambda: draw.randint(1, 63), lambda: draw.randint(0, CAPACITY))
    return torch.tensor([draw.choice((*kinds, lambda: CAPACITY))() for _ in range(batch)])


def drawn_config(draw: random.Random) -> tuple[CudaConfig, int]:
    """Return settings of lean.cu, and a GPU's SMs that hold clusters of them."""
    cluster = draw.choice((1, 1, 2, 3, 5, 8))
    config = settings(
        draw.choice((16, 32)), draw.choice((1, 2)), draw.choice((1, 2, 3)), 1, cluster,
        draw.choice((8, 16, 32)), "bulk", tiles=draw.choice((1, 2)),
    )  # fmt: skip
    return fixed(config) if draw.random() < 0.25 else config, draw.choice((12, 24, 40))


def move_first_copies(
    workspace: Workspace, problem: AttentionProblem, config: CudaConfig, sms: int
) -> None:
    """Give each warp the kept first copy of another CTA's."""
    build = launch_on(make_inputs(problem, "cpu"), config, sms).build
    stride = build.kept_stride(problem.batch)
    of_ctas = workspace.kept[: workspace.kept.numel() // stride * stride].view(-1, stride)
    copies = of_ctas[:, 16 : 16 + 4 * build.warps]
    copies.copy_(copies.roll(1, 0))


@pytest.mark.parametrize("seed", range(12))
def test_launches_of_lean_in_turn(cpu: Cpu, seed: int) -> None:
    """Lengths are drawn, the same, longer by a token, and others; copies that were kept are wrong,
    and tensors are others each time.
    """
    draw = random.Random(seed)
    form, batch = FORMS[seed % len(FORMS)], draw.choice((1, 3, 6, 34))
    heads = draw.choice(("4/1", "8/2", "3/3"))
    problem = on_device(
        (CAPACITY,) * batch, heads, **{"head_dim": 64, "capacity": CAPACITY, **form}
    )
    (config, sms), workspace = drawn_config(draw), Workspace(1000 * seed)
    lengths = drawn_lengths(draw, batch)
    for turn in range(6):
        if turn in (3, 5):
            lengths = drawn_lengths(draw, batch)
        elif turn == 2:
            lengths = (lengths + 1).clamp(max=CAPACITY)
        inputs = make_inputs(problem, "cpu", turn, score_scale=6.0)
        assert inputs.cache_seqlens is not None
        inputs.cache_seqlens.copy_(lengths)
        workspace.epoch += 2  # new slots hold units of the next epoch
        assert failure_over(cpu, workspace, inputs, config, sms, turn, turn % 2 == 0) is None
        if turn == 3:
            move_first_copies(workspace, problem, config, sms)


@pytest.mark.parametrize("seed", range(12))
def test_launches_of_mla_in_turn(cpu: Cpu, seed: int) -> None:
    """Lengths of short, long, empty and whole sequences, on GPUs of several sizes."""
    draw = random.Random(seed)
    form, batch = LATENT_FORMS[seed % len(LATENT_FORMS)], draw.choice((1, 3, 6))
    axes = {"capacity": CAPACITY, "lengths_on": "device", **form}
    problem = replace(LATENT, batch=batch, context=(CAPACITY,) * batch, **axes)
    groups = 1 if "kv_dtype" in form or problem.value_dim == 128 else draw.choice((1, 2))
    workspace = Workspace(1000 * seed)
    for turn in range(4):
        inputs = make_inputs(problem, "cpu", turn, score_scale=6.0)
        assert inputs.cache_seqlens is not None
        inputs.cache_seqlens.copy_(drawn_lengths(draw, batch))
        workspace.epoch += 2
        config, sms = MlaConfig(draw.choice((1, 3)), False, groups), draw.choice((3, 8, 24))
        assert failure_over(cpu, workspace, inputs, config, sms, turn, turn % 2 == 0) is None
        empty = inputs.cache_seqlens == 0
        assert not inputs.out[empty].any()
        assert inputs.lse[empty].isneginf().all()
