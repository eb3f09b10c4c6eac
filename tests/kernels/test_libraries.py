"""Common behavior of library adapters: messages for a library that is missing, too old or lacks a
feature, and checks of outputs made by the library.
"""

from __future__ import annotations

import importlib
import math
import sys
from dataclasses import replace
from functools import partial
from importlib.machinery import ModuleSpec
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from leanbench.kernels.libraries import KERNELS, library
from library_stand_ins import LATENT, SOFTCAPS, UNIFORM, lacking, stand_in
from typer.testing import CliRunner

from leanbench.check.reference import CheckResult, Reference
from leanbench.cli import output
from leanbench.cli.main import app
from leanbench.core.errors import SuspectResult, UserError
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
XFORMERS = ("xformers_split_k",)
SINGLE = ("flashinfer_single", "flashinfer_single_cuda_cores")
BATCH = ("flashinfer_best", "flashinfer", "flashinfer_cuda_cores", "flashinfer_persistent")
#: Kernels that take only caches of whole pages.
XQA = ("flashinfer_xqa",)
#: Kernels that take only a shared prefix.
CASCADE = ("flashinfer_cascade",)
FLASHINFER = (*BATCH, *SINGLE)
FLASH_ATTN_2 = ("flash_attn", "flash_decoding")
FLASH_ATTN_3 = ("flash_attn_3", "flash_attn_3_best")
FRONTEND = ("cudnn_frontend", "cudnn_frontend_lse")
#: torch's kernel with a KV head per query head.
NO_SPLIT = ("torch_flash_no_split",)
#: Kernels that take only latent caches.
OF_LATENT = ("flash_mla", "flash_mla_sparse", "flashinfer_mla")
NOT_LATENT = tuple(name for name in NAMES if name not in (*OF_LATENT, *XQA, *CASCADE))
#: Kernels that attend only over uniform contiguous caches.
PLAIN = (*IN_TORCH, *XFORMERS)


@pytest.fixture
def all_installed(monkeypatch):
    monkeypatch.setattr(library, "find_spec", lambda name: ModuleSpec(name, None))


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        (IN_TORCH, None),
        (
            (*FLASHINFER, *XQA),
            "flashinfer, tvm_ffi): pip install flashinfer-python apache-tvm-ffi",
        ),
        (FLASH_ATTN_2, "flash_attn): pip install flash-attn --no-build-isolation"),
        (
            FLASH_ATTN_3,
            "flash_attn_interface or vllm): pip install vllm, or set LEANBENCH_FA3_LIBRARY to"
            " _vllm_fa3_C.abi3.so of a vLLM wheel",
        ),
        (FRONTEND, "cudnn): pip install nvidia-cudnn-frontend"),
        (XFORMERS, "xformers): pip install xformers"),
    ],
)
def test_a_library_that_is_missing_is_said_with_what_installs_it(names, missing, monkeypatch):
    monkeypatch.delenv("LEANBENCH_FA3_LIBRARY", raising=False)
    monkeypatch.setattr(library, "find_spec", {"torch": ModuleSpec("torch", None)}.get)
    # No line breaks in sentences.
    monkeypatch.setattr(output, "PIPED_COLUMNS", 1000)
    listed = CliRunner().invoke(app, ["list", "kernels"]).stdout.splitlines()
    problem = replace(UNIFORM[0], context=160)
    for name in names:
        expected = missing and f"{name} is not installed here (no module {missing}"
        assert kernel(name).unavailable_reason() == expected
        assert kernel(name).unsupported_reason(problem) == expected
        reasons = [line.split(": ", 1) for line in listed if "is not installed here" in line]
        found = [reason for names, reason in reasons if name in names.split(", ")]
        assert found == ([expected.removeprefix(f"{name} ")] if expected else [])


@pytest.mark.usefixtures("all_installed")
def test_what_is_installed_is_available():
    families = (PLAIN, FLASHINFER, FLASH_ATTN_2, FLASH_ATTN_3, FRONTEND, NO_SPLIT)
    assert set(NOT_LATENT) == {*chain(*families), "cudnn_best"}
    assert {name: kernel(name).unavailable_reason() for name in NAMES} == dict.fromkeys(NAMES)


#: Changes of a plain problem, and words of the sentence of each kernel that refuses it.
REFUSED: list[tuple[dict[str, Any], dict[str, tuple[str, ...]]]] = [
    ({}, {}),
    ({"batch": 2, "context": (50, 20)}, {"ragged": (*PLAIN, *SINGLE)}),
    ({"page_size": 16}, {"page_size 16": (*PLAIN, *SINGLE, *FLASH_ATTN_2, *NO_SPLIT)}),
    ({"page_size": 256}, {"page_size 256": (*PLAIN, *SINGLE, *NO_SPLIT)}),
    ({"q_len": 4}, {"q_len 4": (*SDPA, "standard", *XFORMERS, *FLASHINFER, *NO_SPLIT)}),
    # A whole prompt.
    ({"q_len": 50}, {"q_len 50": ("standard", "torch_flex", *XFORMERS, *FLASHINFER, *NO_SPLIT)}),
    (
        {"batch": 2, "context": (50, 3), "q_len": 4},
        {
            "": (*PLAIN, *FLASHINFER, *NO_SPLIT),
            "contexts of at least 4 tokens": FLASH_ATTN_2,
        },
    ),
    ({"head_dim": 256}, {"head_dim 256": ("cudnn", "cudnn_lse", *FRONTEND, "cudnn_best")}),
    ({"head_dim": 80}, {"head_dim 80": (*FLASHINFER, *XFORMERS)}),
    ({"head_dim": 96}, {"head_dim 96": (*FLASHINFER, *XFORMERS)}),
    (
        {"q_heads": 10, "kv_heads": 2},
        {
            "groups of 5 query heads": ("flashinfer_cuda_cores", "flashinfer_single_cuda_cores"),
            "not one for 5 of them": ("torch_efficient", *NO_SPLIT),
            "a power of two of query heads, this problem has 5": ("torch_flex",),
        },
    ),
    ({"context": 1}, {"context of one token": ("cudnn", "cudnn_lse")}),
    ({"batch": 2}, {"a single sequence, this problem has batch 2": SINGLE}),
    ({"batch": 2, "kv_layout": "NHD"}, {"choose HND": ("standard",), "batch 2": SINGLE}),
    ({"context": 65_537}, {"choose bf16, or at most 65536 tokens": ("standard",)}),
    ({"context": 65_537, "dtype": "bf16"}, {}),
    ({"lengths_on": "device"}, {"takes no lengths from the device": (*PLAIN, *SINGLE)}),
    ({"capacity": 64}, {"heads of this cache are 64 tokens apart and have 50": SINGLE}),
    ({"capacity": 64, "kv_layout": "NHD"}, {}),
]


@pytest.mark.usefixtures("all_installed")
@pytest.mark.parametrize(("axes", "refused"), REFUSED, ids=[str(axes) for axes, _ in REFUSED])
def test_what_a_library_cannot_do_is_said(axes, refused):
    problem = replace(AttentionProblem(1, 4, 4, 50, 64), **axes)
    reasons = {name: kernel(name).unsupported_reason(problem) for name in NOT_LATENT}
    assert {name for name, reason in reasons.items() if reason} == {*chain(*refused.values())}
    for words, names in refused.items():
        for name in names:
            assert words in str(reasons[name])
            assert str(reasons[name]).startswith(name)


PIECES = "plans at most 16384 pieces of work, this problem has"
#: Kernels of some caches, problems that they do not take, and the beginning of the sentence.
OF_SOME_CACHES = [
    *((name, replace(LATENT, latent=False), "takes latent caches with") for name in OF_LATENT),
    *(
        (name, replace(LATENT, head_dim=128, v_head_dim=64), "does not take head_dim 128")
        for name in OF_LATENT
    ),
    ("flash_mla", LATENT, "reads pages of 64 tokens, and the cache has room for 100"),
    ("flash_mla", replace(LATENT, page_size=32), "does not take page_size 32"),
    ("flashinfer_mla", replace(LATENT, batch=15_361, q_heads=128), f"{PIECES} 15361"),
    (
        "flashinfer_mla",
        replace(LATENT, dtype="bf16", kv_dtype="e5m2", scaled=False),
        "takes fp8 as e4m3",
    ),
    (
        "flashinfer_mla",
        replace(LATENT, dtype="fp16", kv_dtype="e4m3", scaled=False),
        "takes fp8 as e4m3",
    ),
    ("flashinfer_mla", replace(LATENT, dtype="bf16", kv_dtype="e4m3"), "has no scales"),
    ("flashinfer_mla", replace(LATENT, batch=7681, q_heads=64, q_len=3), f"{PIECES} 7681"),
    (
        "flashinfer_xqa",
        UNIFORM[3],
        "reads pages of 16 to 128 tokens, and the cache has room for 97",
    ),
    ("flashinfer_xqa", replace(UNIFORM[1], kv_dtype="e5m2", scaled=False), "takes fp8 as e4m3"),
    ("flashinfer_xqa", replace(UNIFORM[1], kv_dtype="e4m3"), "has no scales for each KV head"),
    ("flashinfer_xqa", SOFTCAPS[1], "has no soft cap"),
    ("lean_cuda", LATENT, "takes latent caches with all columns of K in V"),
]


@pytest.mark.usefixtures("all_installed")
@pytest.mark.parametrize(("name", "problem", "words"), OF_SOME_CACHES)
def test_what_a_kernel_of_some_caches_does_not_take(name, problem, words):
    assert str(kernel(name).unsupported_reason(problem)).startswith(f"{name} {words}")


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
    # An LSE that is not checked.
    unchecked = reference.check(inputs, None)
    assert (unchecked.lse_error, unchecked.failure("fp16")) == (None, None)
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
    assert (row["status"], row["lse_error"]) == ("ok", None)
    assert 0 < row["relative_error"] < 1e-3
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
