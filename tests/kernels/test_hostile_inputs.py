"""Triton kernels on hostile inputs, in the interpreter without a GPU and on the GPU with one.
tests/gpu_only/test_robust_on_gpu.py has the same for CUDA C++.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hostile_inputs import assert_nan_of_kv_head_0, nan_in_k, very_low_scores, wild_lengths
from leanbench.kernels.fixed_split.configs import FixedSplitTritonConfig
from leanbench.kernels.lean.configs import LeanTritonConfig

from leanbench.check.reference import Reference
from leanbench.core.config import TileConfig
from leanbench.core.inputs import AttentionInputs
from leanbench.core.registry import kernel

CONFIGS = {
    "lean": LeanTritonConfig(32, 4, 2, ctas_per_sm=1, min_tiles_per_cta=1, align_grid=False),
    "fa2": TileConfig(32, 4, 2),
    "fixed_split": FixedSplitTritonConfig(32, 4, 2, splits=3),
}


def launch(name: str, inputs: AttentionInputs) -> AttentionInputs:
    kernel(name).prepare(inputs, CONFIGS[name])()
    return inputs


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("page_size", [None, 16])
def test_lengths_outside_the_cache_are_the_nearest_inside(name, page_size, device):
    inputs = launch(name, wild_lengths(device, page_size))
    assert Reference(inputs).check(inputs).failure("fp16") is None
    inside = replace(
        inputs,
        cache_seqlens=torch.tensor((96, 0, 96, 33, 0), dtype=torch.int32, device=device),
        out=torch.empty_like(inputs.out),
        lse=torch.empty_like(inputs.lse),
    )
    launch(name, inside)
    assert torch.equal(inputs.out, inside.out)
    assert torch.equal(inputs.lse, inside.lse)


@pytest.mark.parametrize("name", CONFIGS)
def test_finite_scores_below_minus_1e30_are_scores(name, device):
    inputs = launch(name, very_low_scores(device))
    assert inputs.lse.max().item() < -1e31
    assert inputs.lse.isfinite().all()
    assert Reference(inputs).check(inputs).failure("bf16") is None


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("token", [0, 250, 499])
def test_nan_in_k_shows_in_output_and_lse(name, token, device):
    assert_nan_of_kv_head_0(launch(name, nan_in_k(device, token)))
