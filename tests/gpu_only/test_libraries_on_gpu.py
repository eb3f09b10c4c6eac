"""The libraries themselves, where they are installed: against the reference, and as a CUDA graph replays them."""

from __future__ import annotations

import pytest
import torch

from leanbench.inputs import make_inputs
from leanbench.measure.cell import Bench
from leanbench.measure.check import Reference
from leanbench.measure.timing import capture
from leanbench.problem import AttentionProblem
from leanbench.registry import kernel, written_by

# The first call of FlashInfer compiles for minutes.
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600, method="thread")]

NAMES = ("cudnn", "torch_flash", "flashinfer", "flashinfer_cuda_cores", "flash_attn_3")
PROBLEMS = [
    AttentionProblem(1, 56, 56, 4096, 64),
    AttentionProblem(4, 32, 8, 3000, 128, "bf16", "NHD"),
    AttentionProblem(2, 32, 8, 65_536, 128),
    AttentionProblem(3, 8, 2, 1021, 64, "fp16", "HND"),
    AttentionProblem(1, 16, 2, 777, 80, "bf16"),
    AttentionProblem(2, 8, 8, 2048, 256),
    AttentionProblem(4, 16, 4, (5000, 1, 129, 2047), 128),
    AttentionProblem(4, 16, 4, (5000, 1, 129, 2047), 64, "bf16", "NHD", page_size=16),
    AttentionProblem(2, 32, 8, 1000, 128, "fp16", "HND", page_size=64),
    AttentionProblem(2, 32, 8, 1000, 128, "fp16", "NHD", q_len=4),
]


def or_skip(name: str, problem: AttentionProblem) -> None:
    reason = kernel(name).unsupported_reason(problem)
    if reason is not None:
        pytest.skip(reason)
    if name == "flash_attn_3" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("FlashAttention-3 is for Hopper")


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.label)
@pytest.mark.parametrize("name", NAMES)
def test_right_when_called_and_when_a_graph_is_replayed(name, problem):
    or_skip(name, problem)
    lse_base = kernel(name).lse_base
    # Two buffers: what one launch writes, the other must not.
    buffers = [make_inputs(problem, "cuda") for _ in range(2)]
    references = [Reference(inputs) for inputs in buffers]
    launches = [kernel(name).prepare(inputs, None) for inputs in buffers]
    for launch, inputs in zip(launches, buffers, strict=True):
        written_by(launch, inputs).poison()
        launch()
    for launch, inputs, reference in zip(launches, buffers, references, strict=True):
        assert reference.check(written_by(launch, inputs), lse_base).failure(problem.dtype) is None

    graph = capture(launches, 5)
    captured = [written_by(launch, inputs) for launch, inputs in zip(launches, buffers, strict=True)]
    for written in captured:
        written.poison()
    graph.replay()
    for written, reference in zip(captured, references, strict=True):
        assert reference.check(written, lse_base).failure(problem.dtype) is None


@pytest.mark.parametrize("name", NAMES)
def test_a_row_holds_the_librarys_own_gpu_kernels(name):
    problem = AttentionProblem(1, 32, 8, 8192, 128)
    or_skip(name, problem)
    row = Bench(0).run(problem, [kernel(name)], "default")[name]
    assert row["status"] in ("ok", "noisy"), row["reason"]
    assert row["relative_error"] < 2e-3
    assert row["gpu_kernels"]
    assert not [each for each in row["gpu_kernels"] if "copy" in each.lower()]
