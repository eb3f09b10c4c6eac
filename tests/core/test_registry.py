import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import leanbench.kernels
from leanbench.core.config import KernelConfig
from leanbench.core.errors import UserError
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.inputs import AttentionInputs
from leanbench.core.kernel import Kernel
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel, kernel_warnings, kernels
from leanbench.gpu.catalogue import find

FIXTURES = Path(__file__).parents[1] / "fixtures" / "kernels"
H200 = find("h200")
PROBLEMS = [
    AttentionProblem(1, 56, 56, 65_536, 64),
    AttentionProblem(1, 32, 8, 4096, 128),
    AttentionProblem(2, 71, 1, 1000, 256, "bf16", "NHD"),
    AttentionProblem(4, 16, 4, (1, 5000, 128, 70), 80),
]


@pytest.fixture
def rooms(monkeypatch):
    """The folders that are searched for kernels, to add to."""
    folders = list(leanbench.kernels.__path__)
    monkeypatch.setattr(leanbench.kernels, "__path__", folders)
    kernels.cache_clear()
    yield folders
    kernels.cache_clear()


def test_this_projects_kernels_are_found_in_a_stable_order():
    names = ("fa2", "fixed_split", "lean", "reference")
    assert tuple(name for name in kernels() if name in names) == names
    for name, registered in kernels().items():
        assert isinstance(registered, Kernel)
        assert registered.name == name
        assert registered.title
        assert registered.source
        assert registered.decomposition in ("one_cta_per_tile", "fixed_split", "stream_k", "other")
    assert kernel("lean").decomposition == "stream_k"
    assert not kernel("reference").is_timed


def test_an_unknown_name_is_one_sentence():
    with pytest.raises(UserError, match=r"^there is no kernel 'fixed-split', did you mean 'fixed"):
        kernel("fixed-split")
    known = r"^there is no kernel 'xyz', known: cudnn, .*fa2, .* and \d+ more \(`leanbench list ker"
    with pytest.raises(UserError, match=known):
        kernel("xyz")


def test_two_kernels_of_one_name_are_refused(rooms, tmp_path):
    (tmp_path / "copy_of_lean").mkdir()
    text = "from leanbench.kernels.lean import KERNELS\n"
    (tmp_path / "copy_of_lean" / "__init__.py").write_text(text)
    rooms.append(str(tmp_path))
    with pytest.raises(UserError, match=r"^two kernels are called 'lean': rename one of them$"):
        kernels()


def test_a_module_or_a_family_without_kernels_is_no_error(rooms, tmp_path):
    (tmp_path / "shared_parts.py").write_text("raise AssertionError('imported')\n")
    (tmp_path / "parts_only").mkdir()
    (tmp_path / "parts_only" / "__init__.py").write_text("")
    before = list(kernels())
    rooms.append(str(tmp_path))
    kernels.cache_clear()
    assert list(kernels()) == before


@pytest.mark.parametrize(
    ("files", "why"),
    [
        (None, "it is not a folder"),
        ([], "a folder in it needs an __init__.py that lists its kernels in KERNELS"),
        (["plain.py"], "a folder in it needs an __init__.py that lists its kernels in KERNELS"),
        (["__init__.py"], "it is a family's own folder, so name the one above, {above}"),
        (["fa2/__init__.py"], "leanbench has a family fa2 already, so rename that folder"),
    ],
)
def test_a_folder_without_a_kernel_is_named(rooms, tmp_path, files, why):
    mine = tmp_path / "mine"
    if files is not None:
        mine.mkdir()
    for file in files or ():
        (mine / file).parent.mkdir(exist_ok=True)
        (mine / file).write_text("")
    rooms += [f"{mine}/", str(FIXTURES)]
    reason = why.format(above=tmp_path)
    warning = f"{mine}, of LEANBENCH_KERNEL_PATH, holds no kernel: {reason}"
    assert kernel_warnings() == [warning]
    assert "steady" in kernels()
    with pytest.raises(UserError) as refused:
        kernel("nobodys")
    assert str(refused.value).startswith(f"{warning}; there is no kernel 'nobodys', ")


@pytest.mark.parametrize(
    ("code", "at", "error"),
    [
        ("import no_such", ", line 1,", "ModuleNotFoundError: No module named 'no_such'"),
        ("def f(:", "", "SyntaxError: invalid syntax (__init__.py, line 1)"),
        ("one = 1\nKERNELS = (one / 0,)", ", line 2,", "ZeroDivisionError: division by zero"),
        ("raise SystemExit", ", line 1,", "SystemExit"),
        ("raise ValueError('one\\ntwo')", ", line 1,", "ValueError: one"),
        ("KERNELS = 1", "", "TypeError: 'int' object is not iterable"),
        ("KERNELS = ('lean',)", "", "AttributeError: 'str' object has no attribute 'name'"),
    ],
)
def test_a_family_that_cannot_be_loaded_costs_its_own_kernels_only(
    rooms, tmp_path, monkeypatch, code, at, error
):
    monkeypatch.delitem(sys.modules, "leanbench.kernels.broken", raising=False)
    before = list(kernels())
    assert kernel_warnings() == []
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "__init__.py").write_text(code + "\n")
    rooms += [str(tmp_path), str(FIXTURES)]
    kernels.cache_clear()
    sentence = (
        f"{tmp_path}/broken/__init__.py{at} cannot be loaded ({error}), so its kernels are left out"
    )
    assert kernel_warnings() == [sentence]
    assert set(before) | {"steady"} <= set(kernels())
    with pytest.raises(UserError) as refused:
        kernel("mine")
    assert str(refused.value).startswith(f"{sentence}; there is no kernel 'mine', ")
    rooms.remove(str(tmp_path))
    kernels.cache_clear()
    assert kernel_warnings() == []


@pytest.mark.parametrize("name", ["lean_triton", "fa2", "fixed_split", "fixed_split_cuda"])
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.label)
def test_the_default_is_among_the_candidates_and_all_have_a_schedule(name, problem):
    loaded = kernel(name)
    default = loaded.default_config(problem, H200)
    candidates = loaded.candidate_configs(problem, H200)
    assert default in candidates
    assert len(candidates) == len(set(candidates))
    assert len(candidates) > 1
    for config in candidates:
        schedule = loaded.schedule(problem, config, H200)
        assert schedule is not None
        assert schedule.decomposition == loaded.decomposition


@pytest.mark.parametrize("name", ["fa2_cuda", "fixed_split_cuda"])
@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"sinks": True, "append": 2, "kv_dtype": "e4m3", "leftpad": True, "q_len": 40}, None),
        ({"parallel": "tp:2"}, None),
        ({"parallel": "cp:2"}, "{} runs on one GPU, this problem has parallel cp:2"),
        ({"q_lens": (3, 1), "batch": 2}, "{} takes no "),
        (
            {"head_dim": 72, "kv_dtype": "e5m2"},
            "{} takes fp8 KV caches with head_dims that are multiples of 16, these are 72 and 72",
        ),
    ],
)
def test_what_lean_s_body_takes_in_other_decompositions(name, fields, sentence):
    problem = replace(AttentionProblem(1, 8, 2, 100, 64), **fields)
    reason = kernel(name).unsupported_reason(problem)
    assert reason is None if sentence is None else str(reason).startswith(sentence.format(name))


class Narrow(Kernel):
    """Takes one query token over contiguous caches of one length."""

    name = "narrow"

    def refusal(self, problem: AttentionProblem) -> str | None:
        return "narrow takes one KV head" if problem.kv_heads > 1 else None

    def default_config(self, problem: AttentionProblem, gpu: GpuSpec) -> KernelConfig | None:
        return None

    def prepare(self, inputs: AttentionInputs, config: KernelConfig | None) -> Callable[[], Any]:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("fields", "limit", "value"),
    [
        ({"q_len": 4}, "decodes one query token per sequence", "q_len 4"),
        ({"page_size": 16}, "takes no paged cache", "page_size 16"),
        ({"window_left": 4, "head_dim": 72}, "has no sliding window", "window_left 4"),
        ({"sinks": True}, "has no sinks", "sinks"),
        ({"append": 1}, "appends nothing to the cache", "append 1"),
    ],
)
def test_axes_that_a_kernel_does_not_name(fields, limit, value):
    problem = replace(AttentionProblem(1, 8, 1, 100, 64), **fields)
    reason = f"narrow {limit}, this problem has {value}: leave it out"
    assert Narrow().unsupported_reason(problem) == reason


class Wide(Narrow):
    """Takes pages and several query tokens, of its own sizes."""

    name = "wide"
    axes = Narrow.axes | {"q_len", "page_size"}
    page_sizes = range(32, 513, 32)
    max_q_len = 4


@pytest.mark.parametrize(
    ("own", "fields", "sentence"),
    [
        (Narrow(), {"dtype": "bf16", "kv_layout": "NHD"}, None),
        (Narrow(), {"batch": 2, "context": (7, 9)}, "takes no ragged batch, all sequences must "),
        (Narrow(), {"q_heads": 8, "kv_heads": 2}, "takes one KV head"),
        (Narrow(), {"head_dim": 72}, "does not take head_dim 72: choose one of 64, 80, 96, 128, "),
        (Wide(), {"page_size": 96, "q_len": 4}, None),
        (Wide(), {"page_size": 16}, "does not take page_size 16: choose from 32 to 512 in steps "),
        (Wide(), {"q_len": 5}, "does not take q_len 5: choose at most 4"),
    ],
)
def test_refusals_of_a_kernel(own, fields, sentence):
    problem = replace(AttentionProblem(1, 8, 1, 100, 64), **fields)
    reason = own.unsupported_reason(problem)
    assert (reason is None) == (sentence is None)
    assert reason is None or reason.startswith(f"{own.name} {sentence}")


def test_a_kernel_cannot_hide_the_check_of_axes():
    with pytest.raises(TypeError, match=r"^Bold.unsupported_reason would hide the check of axes"):
        type("Bold", (Narrow,), {"unsupported_reason": lambda self, problem: None})


def test_the_oracle_tries_every_split_count_of_the_heuristic_s_launch():
    problem = PROBLEMS[0]
    heuristic, oracle = kernel("fixed_split"), kernel("fixed_split_oracle")
    default = heuristic.default_config(problem, H200)
    assert default is not None
    candidates = oracle.candidate_configs(problem, H200)
    assert (oracle.config_choice, heuristic.config_choice) == ("best", None)
    assert candidates[0] == default
    of_ctas = [config for config in candidates if config.cluster_size == 1]
    assert {replace(config, splits=1, cluster_size=1) for config in candidates} == {
        replace(default, splits=1, cluster_size=1)
    }
    assert len({config.splits for config in of_ctas}) == len(of_ctas) > 8
    assert 1 in {config.splits for config in candidates}
