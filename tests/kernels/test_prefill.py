"""The problems of the sweep `prefill`, without a GPU: which kernels take them."""

from dataclasses import replace
from importlib.machinery import ModuleSpec
from itertools import product
from types import SimpleNamespace

import pytest
from leanbench.kernels.libraries import flash_attn_3, library

from leanbench.core.memory import shortage_on
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel
from leanbench.gpu.catalogue import find
from leanbench.run.cells import expand
from leanbench.run.sweep_file import load_sweep

SWEEP = load_sweep("prefill")
PROBLEMS = list(dict.fromkeys(cell.problem for cell in expand(SWEEP)))
OWN = ("lean", "fa2")


@pytest.fixture
def all_installed(monkeypatch):
    """Take FlashAttention-3's build as one that refuses nothing."""
    monkeypatch.setattr(library, "find_spec", lambda name: ModuleSpec(name, None))
    build = SimpleNamespace(refusal=lambda problem: None)
    monkeypatch.setattr(flash_attn_3, "find_build", lambda: build)


def test_problems_are_square_causal_and_in_every_combination():
    axes = product((512 << n for n in range(6)), (64, 128), ((32, 8), (32, 32)), (1, 4))
    wanted = {
        AttentionProblem(batch, *heads, tokens, head_dim, "bf16", "NHD", q_len=tokens)
        for tokens, head_dim, heads, batch in axes
    }
    assert {*PROBLEMS} == wanted
    assert len(expand(SWEEP)) == 48 * len(SWEEP.kernels)


@pytest.mark.usefixtures("all_installed")
@pytest.mark.parametrize("name", SWEEP.kernels)
def test_every_kernel_takes_every_problem(name):
    reasons = {problem.label: kernel(name).unsupported_reason(problem) for problem in PROBLEMS}
    assert reasons == dict.fromkeys(reasons)


@pytest.mark.usefixtures("all_installed")
def test_kernels_that_were_left_out_say_why():
    prompt = PROBLEMS[0]
    words = {
        "fa2_triton": "does not take q_len 512: choose at most 16",
        "flashinfer_best": "decodes one query token per sequence",
        "torch_flash_no_split": "decodes one query token per sequence",
        "xformers_split_k": "decodes one query token per sequence",
        "torch_flex": "does not take q_len 512: choose at most 16",
    }
    for name, reason in words.items():
        assert reason in str(kernel(name).unsupported_reason(prompt))
    chunk = replace(prompt, context=1024)
    assert "takes one query token or a whole prompt" in str(
        kernel("torch_flash").unsupported_reason(chunk)
    )


@pytest.mark.parametrize("name", OWN)
def test_settings_of_this_projects_kernels_fit_an_h100(name):
    h100, own = find("h100-sxm"), kernel(name)
    for problem in PROBLEMS:
        config = own.default_config(problem, h100)
        assert config is not None
        assert own.implementation_of(config).unsupported_reason(problem) is None
        assert shortage_on(problem, h100) is None
