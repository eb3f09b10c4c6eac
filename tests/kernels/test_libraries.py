"""Common behavior of library adapters: messages for a library that is missing, too old or lacks a
feature, and checks of outputs made by the library.
"""

from __future__ import annotations

import importlib
import math
import sys
from functools import partial
from importlib.machinery import ModuleSpec
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from leanbench.kernels.libraries import KERNELS, library
from library_stand_ins import UNIFORM, lacking, stand_in
from typer.testing import CliRunner

from leanbench.check.reference import CheckResult, Reference
from leanbench.cli import output
from leanbench.cli.main import app
from leanbench.core.errors import UserError
from leanbench.core.inputs import AttentionInputs, make_inputs
from leanbench.core.kernel import Kernel, OwnOutputs
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel
from leanbench.doctor.checks import Check, run_check
from leanbench.doctor.software import kernel_is_right
from leanbench.gpu.catalogue import find
from leanbench.model.predict import predict_cell
from leanbench.records import environment
from leanbench.run.cells import DEFAULT_KERNELS

ADAPTERS = {adapter.name: adapter for adapter in KERNELS}
NAMES = tuple(ADAPTERS)
SDPA = ("cudnn", "cudnn_lse", "torch_flash", "torch_efficient", "torch_math")
IN_TORCH = (*SDPA, "torch_flex", "standard")
SINGLE = ("flashinfer_single", "flashinfer_single_cuda_cores")
BATCH = ("flashinfer_best", "flashinfer", "flashinfer_cuda_cores", "flashinfer_persistent")
#: Kernels that take only caches of whole pages.
XQA = ("flashinfer_xqa",)
FLASHINFER = (*BATCH, *SINGLE)
FLASH_ATTN_2 = ("flash_attn", "flash_decoding")
FLASH_ATTN_3 = ("flash_attn_3", "flash_attn_3_best")
FRONTEND = ("cudnn_frontend", "cudnn_frontend_lse")
CUDNN_BEST = "cudnn_best"
#: torch's kernel with a KV head per query head.
NO_SPLIT = "torch_flash_no_split"
#: Kernels that take only latent caches.
LATENT = ("flash_mla", "flashinfer_mla")
NOT_LATENT = tuple(name for name in NAMES if name not in (*LATENT, *XQA))
#: Kernels that attend only over uniform contiguous caches.
PLAIN = (*IN_TORCH, "xformers_split_k")


@pytest.fixture
def all_installed(monkeypatch):
    monkeypatch.setattr(library, "find_spec", lambda name: ModuleSpec(name, None))


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (IN_TORCH, None),
        (
            (*FLASHINFER, *XQA),
            "{} is not installed here (no module flashinfer, tvm_ffi): pip install"
            " flashinfer-python apache-tvm-ffi",
        ),
        (
            FLASH_ATTN_2,
            "{} is not installed here (no module flash_attn): pip install flash-attn"
            " --no-build-isolation",
        ),
        (
            FLASH_ATTN_3,
            (
                "{} is not installed here (no module flash_attn_interface or vllm): pip install"
                " vllm, or set LEANBENCH_FA3_LIBRARY to _vllm_fa3_C.abi3.so of a vLLM wheel"
            ),
        ),
        (FRONTEND, "{} is not installed here (no module cudnn): pip install nvidia-cudnn-frontend"),
        (
            ("xformers_split_k",),
            "{} is not installed here (no module xformers): pip install xformers",
        ),
    ],
)
def test_a_library_that_is_missing_is_said_with_what_installs_it(names, sentence, monkeypatch):
    monkeypatch.delenv("LEANBENCH_FA3_LIBRARY", raising=False)
    here = {"torch": ModuleSpec("torch", None)}
    monkeypatch.setattr(library, "find_spec", here.get)
    # No line breaks in sentences.
    monkeypatch.setattr(output, "PIPED_COLUMNS", 1000)
    for name in names:
        expected = None if sentence is None else sentence.format(name)
        assert kernel(name).unavailable_reason() == expected
        assert kernel(name).unsupported_reason(UNIFORM[0]) == expected
    lines = [
        line.strip() for line in CliRunner().invoke(app, ["list", "kernels"]).stdout.splitlines()
    ]
    for name in names:
        expected = [] if sentence is None else [sentence.format(name)]
        assert [line for line in lines if line.startswith(f"{name} is not installed")] == expected


@pytest.mark.usefixtures("all_installed")
def test_what_is_installed_is_available():
    families = (PLAIN, FLASHINFER, FLASH_ATTN_2, FLASH_ATTN_3, FRONTEND)
    assert set(NOT_LATENT) == {*chain(*families), CUDNN_BEST, NO_SPLIT}
    assert {name: kernel(name).unavailable_reason() for name in NAMES} == dict.fromkeys(NAMES)
    assert {
        name: kernel(name).unsupported_reason(UNIFORM[0]) for name in NOT_LATENT
    } == dict.fromkeys(NOT_LATENT)


@pytest.mark.usefixtures("all_installed")
@pytest.mark.parametrize(
    ("problem", "refused"),
    [
        (AttentionProblem(2, 4, 4, (50, 20), 64), dict.fromkeys((*PLAIN, *SINGLE), "ragged")),
        (
            AttentionProblem(1, 4, 4, 50, 64, page_size=16),
            dict.fromkeys((*PLAIN, *SINGLE, *FLASH_ATTN_2, NO_SPLIT), "page_size 16"),
        ),
        (
            AttentionProblem(1, 4, 4, 50, 64, page_size=256),
            dict.fromkeys((*PLAIN, *SINGLE, NO_SPLIT), "page_size 256"),
        ),
        (
            AttentionProblem(1, 4, 4, 50, 64, q_len=4),
            dict.fromkeys(
                (*SDPA, "standard", "xformers_split_k", *FLASHINFER, NO_SPLIT), "q_len 4"
            ),
        ),
        (
            AttentionProblem(2, 4, 4, (50, 3), 64, q_len=4),
            {
                **dict.fromkeys((*PLAIN, *FLASHINFER, NO_SPLIT), ""),
                **dict.fromkeys(FLASH_ATTN_2, "contexts of at least 4 tokens"),
            },
        ),
        (
            AttentionProblem(1, 4, 4, 50, 256),
            dict.fromkeys(("cudnn", "cudnn_lse", *FRONTEND, CUDNN_BEST), "head_dim 256"),
        ),
        (
            AttentionProblem(1, 4, 4, 50, 80),
            dict.fromkeys((*FLASHINFER, "xformers_split_k"), "head_dim 80"),
        ),
        (
            AttentionProblem(1, 4, 4, 50, 96),
            dict.fromkeys((*FLASHINFER, "xformers_split_k"), "head_dim 96"),
        ),
        (
            AttentionProblem(1, 10, 2, 50, 64),
            {
                **dict.fromkeys(
                    ("flashinfer_cuda_cores", "flashinfer_single_cuda_cores"),
                    "groups of 5 query heads",
                ),
                **dict.fromkeys(("torch_efficient", NO_SPLIT), "not one for 5 of them"),
                "torch_flex": "a power of two of query heads, this problem has 5",
            },
        ),
        (
            AttentionProblem(1, 4, 4, 1, 64),
            dict.fromkeys(("cudnn", "cudnn_lse"), "context of one token"),
        ),
        (
            AttentionProblem(2, 4, 4, 50, 64),
            dict.fromkeys(SINGLE, "a single sequence, this problem has batch 2"),
        ),
        (
            AttentionProblem(2, 4, 4, 50, 64, "fp16", "NHD"),
            {"standard": "choose HND", **dict.fromkeys(SINGLE, "batch 2")},
        ),
        (
            AttentionProblem(1, 4, 4, 65_537, 64),
            {"standard": "choose bf16, or at most 65536 tokens"},
        ),
        (AttentionProblem(1, 4, 4, 65_537, 64, "bf16"), {}),
        (
            AttentionProblem(1, 4, 4, 50, 64, lengths_on="device"),
            dict.fromkeys((*PLAIN, *SINGLE), "takes no lengths from the device"),
        ),
        (
            AttentionProblem(1, 4, 4, 50, 64, capacity=64),
            dict.fromkeys(SINGLE, "heads of this cache are 64 tokens apart and have 50"),
        ),
        (AttentionProblem(1, 4, 4, 50, 64, "fp16", "NHD", capacity=64), {}),
    ],
    ids=lambda value: value.label if isinstance(value, AttentionProblem) else "",
)
def test_what_a_library_cannot_do_is_said(problem, refused):
    reasons = {name: kernel(name).unsupported_reason(problem) for name in NOT_LATENT}
    assert {name for name, reason in reasons.items() if reason} == set(refused)
    for name, words in refused.items():
        assert words in str(reasons[name])
        assert str(reasons[name]).startswith(name)


@pytest.mark.usefixtures("all_installed")
def test_without_a_schedule_there_is_no_prediction_and_the_row_says_so():
    assert not set(NAMES) & set(DEFAULT_KERNELS)
    for name in NOT_LATENT:
        row = predict_cell(AttentionProblem(1, 8, 8, 4096, 128), kernel(name), "best", find("h200"))
        assert (row["status"], row["reason"]) == (
            "unsupported",
            f"{name} has no schedule to predict from: measure it, or leave it out",
        )


@pytest.mark.parametrize(
    ("names", "module", "function"),
    [
        (FLASH_ATTN_2, "flash_attn", "flash_attn_with_kvcache"),
        (("cudnn_frontend",), "cudnn", "pygraph"),
        (
            ("flashinfer", "flashinfer_cuda_cores"),
            "flashinfer",
            "BatchDecodeWithPagedKVCacheWrapper",
        ),
        (("flashinfer_persistent",), "flashinfer", "BatchAttention"),
        (SINGLE, "flashinfer", "single_decode_with_kv_cache"),
        (("xformers_split_k",), "xformers.ops", "fmha"),
    ],
)
@pytest.mark.parametrize("lacks", ["the function", "an argument", "everything"])
def test_another_version_of_a_library_is_said_in_a_sentence(
    names, module, function, lacks, monkeypatch
):
    """The function is missing, takes nothing, or its package does not load."""
    monkeypatch.setattr(library, "version", lambda distribution: "0.1")
    stand_in(monkeypatch, module.partition(".")[0])
    members = {function: lacking} if lacks == "an argument" else {}
    stand_in(monkeypatch, module, **members)
    if lacks == "everything":
        monkeypatch.setitem(sys.modules, module, None)
    for name in names:
        with pytest.raises(UserError) as raised:
            ADAPTERS[name].prepare(make_inputs(UNIFORM[0], "cpu"), None)
        message, adapter = str(raised.value), ADAPTERS[name]
        assert message.startswith(f"{name} cannot call {adapter.library()} (")
        assert f" {adapter.distribution} 0.1" in message
        assert message.endswith(
            f"it was written for {adapter.written_for}, install that or leave {name} out"
        )
        assert "\n" not in message


def test_the_doctor_says_it_too_and_goes_on(monkeypatch):
    machine: Any = SimpleNamespace(device="cpu", spec=find("h200"))
    check = Check("kernel flash_attn", partial(kernel_is_right, kernel("flash_attn")))
    missing = run_check(check, machine)
    assert (missing.status, missing.text) == ("note", kernel("flash_attn").unavailable_reason())
    stand_in(monkeypatch, "flash_attn")
    misfit = run_check(check, machine)
    assert misfit.status == "problem"
    assert misfit.text.startswith(
        "flash_attn cannot call flash-attn of unknown version (ImportError: "
    )


def test_an_lse_is_checked_in_the_base_it_is_written_in():
    inputs = make_inputs(AttentionProblem(1, 4, 2, 50, 64), "cpu")
    kernel("reference").prepare(inputs, None)()
    reference = Reference(inputs)
    assert reference.check(inputs).lse_error == pytest.approx(0, abs=1e-6)
    assert "LSE error" in str(reference.check(inputs, 2.0).failure("fp16"))
    inputs.lse.div_(math.log(2))
    assert reference.check(inputs, 2.0).lse_error == pytest.approx(0, abs=1e-6)
    inputs.lse.fill_(math.nan)
    assert reference.check(inputs, 2.0).lse_error == math.inf
    told_none = reference.check(inputs, None)
    assert told_none.lse_error is None
    assert told_none.failure("fp16") is None
    inputs.out[0, 0, 0, 0] = math.nan
    assert reference.check(inputs, None).relative_error == math.inf
    assert CheckResult(math.inf, None, 1, 1).failure("fp16") is not None


@pytest.fixture
def pretended(monkeypatch) -> Any:
    """Provide the fake GPU of the measuring tests."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "measure"))
    return importlib.import_module("pretended_gpu")


def own_outputs_kernel(pretended: Any, replay_writes: bool) -> Kernel:
    class Launch(OwnOutputs):
        def __init__(self, owner: Any, inputs: AttentionInputs) -> None:
            super().__init__(inputs)
            self.kernel, self.inputs = owner, inputs

        def compute(self) -> tuple[torch.Tensor, torch.Tensor]:
            own = make_inputs(pretended.PROBLEM, "cpu")
            kernel("reference").prepare(
                type(own)(**{**vars(self.inputs), "out": own.out, "lse": own.lse}), None
            )()
            return own.out, self.inputs.lse

    class Own(pretended.Right):
        lse_base = None

        def prepare(self, inputs: AttentionInputs, config: object) -> Launch:
            return Launch(self, inputs)

        def replay(self, launches: Any) -> None:
            """Write the captured tensors again, as a graph does."""
            for launch in launches:
                if replay_writes:
                    launch.results.out.copy_(launch.compute()[0])

    return Own("own")


def test_a_row_of_a_library_that_makes_its_own_output(pretended, monkeypatch):
    gpu = pretended.pretend(monkeypatch)
    row = pretended.measure(gpu, own_outputs_kernel(pretended, replay_writes=True))["own"]
    assert row["status"] == "ok"
    assert 0 < row["relative_error"] < 1e-3
    assert row["lse_error"] is None


def test_an_own_output_that_the_graph_does_not_write_is_an_alarm(pretended, monkeypatch):
    from leanbench.core.errors import SuspectResult

    gpu = pretended.pretend(monkeypatch)
    with pytest.raises(SuspectResult, match="3 of 3 outputs were not written"):
        pretended.measure(gpu, own_outputs_kernel(pretended, replay_writes=False))


def test_rows_are_taken_with_the_versions_of_the_libraries(monkeypatch):
    versions = {
        "flashinfer-python": "0.6.13",
        "flash-attn": "2.8.3",
        "nvidia-cuda-nvrtc": "13.0.88",
        "torch": "2.13.0",
    }
    monkeypatch.setattr(environment, "_version", versions.get)
    predicted = environment.predicted_environment()
    assert {name: predicted[name] for name in versions} == versions
    known = {adapter.distribution for adapter in KERNELS} - {"torch"}
    assert known <= set(environment._LIBRARIES)
    assert "flash_attn_3" not in predicted
