"""The installed libraries, against the reference and replayed by a CUDA graph."""

from __future__ import annotations

import importlib
import re
from dataclasses import replace

import pytest
import torch

from leanbench.check.reference import Reference
from leanbench.core.errors import UserError
from leanbench.core.inputs import make_inputs
from leanbench.core.kernel import written_by
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel
from leanbench.gpu.local import spec_of_device
from leanbench.measure.instruments import open_instruments
from leanbench.measure.protocol import measure_problem
from leanbench.measure.shared import attention_on
from leanbench.measure.timing import capture

# The first calls of FlashInfer compile for minutes, and those of FlexAttention for each problem.
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600, method="thread")]

NAMES = tuple(
    adapter.name for adapter in importlib.import_module("leanbench.kernels.libraries").KERNELS
)
PROBLEMS = [
    AttentionProblem(1, 56, 56, 4096, 64),
    AttentionProblem(4, 32, 8, 3000, 128, "bf16", "NHD"),
    AttentionProblem(2, 32, 8, 65_536, 128),
    AttentionProblem(3, 8, 2, 1021, 64, "fp16", "HND"),
    AttentionProblem(1, 16, 2, 777, 80, "bf16"),
    AttentionProblem(2, 8, 8, 2048, 256),
    AttentionProblem(4, 16, 4, (5000, 1, 129, 2047), 128),
    AttentionProblem(4, 16, 4, (5000, 1, 129, 2047), 64, "bf16", "NHD", page_size=16),
    AttentionProblem(4, 16, 4, (5000, 1, 129, 2047), 128, "fp16", "HND", capacity=8192),
    AttentionProblem(4, 16, 4, (5000, 1, 129, 2047), 128, page_size=64, capacity=8192),
    AttentionProblem(2, 8, 8, 1000, 64, "fp16", "NHD", capacity=4096, lengths_on="device"),
    AttentionProblem(2, 8, 2, 1000, 64, "fp16", "HND", capacity=4096),
    AttentionProblem(1, 8, 2, 1000, 64, "fp16", "NHD", capacity=4096),
    AttentionProblem(2, 32, 8, 1000, 128, "fp16", "HND", page_size=64),
    AttentionProblem(2, 32, 8, 1000, 128, "fp16", "NHD", page_size=256),
    AttentionProblem(2, 32, 8, 1000, 128, "fp16", "NHD", q_len=4),
    AttentionProblem(3, 32, 8, (1000, 4, 130), 64, "bf16", "HND", q_len=4, page_size=256),
    AttentionProblem(1, 8, 1, 131_072, 128, "bf16", "NHD"),
    AttentionProblem(1, 32, 1, 5000, 64),
    AttentionProblem(4, 8, 8, 65_536, 64),
]
ONE_LATENT = AttentionProblem(
    1, 128, 1, 4096, 576, "bf16", page_size=64, latent=True, v_head_dim=512
)
LATENT = [
    ONE_LATENT,
    replace(ONE_LATENT, page_size=None, context=131_072),
    replace(ONE_LATENT, page_size=None, batch=3, context=(5000, 1, 777), capacity=8256),
    replace(ONE_LATENT, batch=64, context=1024, q_heads=16, dtype="fp16"),
    replace(ONE_LATENT, batch=4, context=(2, 64, 30_000, 500), q_heads=16, q_len=2),
    replace(ONE_LATENT, batch=5, context=1000, capacity=4096, lengths_on="device"),
    replace(ONE_LATENT, batch=3, context=(5000, 1, 777), page_size=16),
]
PLAIN = AttentionProblem(3, 8, 2, 704, 128, "bf16", "NHD")
KINDS = [
    replace(shape, **kinds)
    for kinds in (
        {"window_left": 100},
        {"softcap": 20.0},
        {"sinks": True},
        {"window_left": 127, "sinks": True},
        {"alibi": True},
        {"kv_dtype": "e4m3", "scaled": False},
        {"kv_dtype": "e4m3"},
        {"q_len": 4, "window_left": 64},
        {"q_len": 5, "causal": False},
        {"leftpad": True},
        {"batch_idx": True},
        {"q_lens": (17, 1, 2)},
    )
    for shape in (PLAIN, replace(PLAIN, capacity=1408, lengths_on="device", kv_layout="HND"))
]
#: Reasons of an installed library to reject a call. Any other reason is a failure.
REFUSALS = "has no room for|refused by xFormers"


def or_skip(name: str, problem: AttentionProblem) -> None:
    reason = kernel(name).unsupported_reason(problem)
    if reason is not None:
        pytest.skip(reason)
    if name.startswith("flash_attn_3") and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("FlashAttention-3 is for Hopper")


@pytest.mark.parametrize("problem", [*PROBLEMS, *KINDS, *LATENT], ids=lambda problem: problem.label)
@pytest.mark.parametrize("name", NAMES)
def test_right_when_called_and_when_a_graph_is_replayed(name, problem):
    or_skip(name, problem)
    lse_base, precision = kernel(name).lse_base, kernel(name).precision(problem)
    # Two buffers: no launch may write to the other's.
    buffers = [make_inputs(problem, "cuda") for _ in range(2)]
    references = [Reference(inputs) for inputs in buffers]
    try:
        config = kernel(name).default_config(problem, spec_of_device(0))
        launches = [kernel(name).prepare(inputs, config) for inputs in buffers]
    except UserError as refusal:
        if not re.search(REFUSALS, str(refusal)):
            raise
        pytest.skip(str(refusal))
    for launch, inputs in zip(launches, buffers, strict=True):
        written_by(launch, inputs).poison()
        launch()
    for launch, inputs, reference in zip(launches, buffers, references, strict=True):
        assert reference.check(written_by(launch, inputs), lse_base).failure(precision) is None

    graph = capture(launches, 5)
    captured = [
        written_by(launch, inputs) for launch, inputs in zip(launches, buffers, strict=True)
    ]
    for written in captured:
        written.poison()
    graph.replay()
    for written, reference in zip(captured, references, strict=True):
        assert reference.check(written, lse_base).failure(precision) is None


@pytest.mark.parametrize("name", NAMES)
def test_a_row_holds_the_librarys_own_gpu_kernels(name):
    problem = AttentionProblem(1, 32, 8, 8192, 128)
    or_skip(name, problem)
    row = measure_problem(attention_on(open_instruments(0), problem), [kernel(name)])[name]
    if row["status"] == "unsupported" and re.search(REFUSALS, row["reason"]):
        pytest.skip(row["reason"])
    assert row["status"] in ("ok", "noisy"), row["reason"]
    assert row["relative_error"] < 2e-3
    assert row["gpu_kernels"]
    # torch_math casts and repeats K and V.
    assert name == "torch_math" or not [
        name for name in row["gpu_kernels"] if "copy" in name.lower()
    ]


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_flash_decoding_is_right_with_every_split_count(head_dim):
    own, problem = kernel("flash_decoding"), AttentionProblem(2, 16, 4, 20_000, head_dim)
    or_skip(own.name, problem)
    inputs = make_inputs(problem, "cuda")
    reference = Reference(inputs)
    candidates = own.candidate_configs(problem, spec_of_device(0))
    assert len(candidates) > 5
    for config in candidates:
        launch = own.prepare(inputs, config)
        written_by(launch, inputs).poison()
        launch()
        assert (
            reference.check(written_by(launch, inputs), own.lse_base).failure(problem.dtype) is None
        ), config


@pytest.mark.parametrize("name", ["flash_decoding", "flash_attn"])
def test_flash_attn_splits_as_it_is_told(name):
    problem = AttentionProblem(1, 8, 8, 65_536, 128)
    or_skip(name, problem)
    row = measure_problem(attention_on(open_instruments(0), problem), [kernel(name)])[name]
    if row["status"] == "unsupported" and re.search(REFUSALS, row["reason"]):
        pytest.skip(row["reason"])
    # Splits are merged by a second kernel.
    assert len(row["gpu_kernels"]) == (2 if name == "flash_decoding" else 1), row["gpu_kernels"]
