"""Files of timings: contents, faults, and no lost calls."""

from __future__ import annotations

import json
import multiprocessing
import os
import warnings
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from timed_examples import (
    CUDA,
    H200,
    LATENT,
    MODELS,
    OF_TRITON,
    OTHERS,
    OTHERS_OF_LATENT,
    PROBLEM,
    RULES,
    timed,
)

from leanbench.configs import store
from leanbench.configs.lookup import choose
from leanbench.configs.store import (
    HEURISTIC,
    all_files,
    check_target,
    export,
    files_of,
    merge,
    path_for,
    read,
    save,
    saves,
    settings_hash,
    user_faults,
)
from leanbench.core.errors import UserError
from leanbench.core.files import FileFault, UnreadableFile
from leanbench.core.problem import AttentionProblem
from leanbench.core.switches import is_on
from leanbench.gpu.catalogue import find

A100 = find("a100")
#: Another call than `PROBLEM`.
OTHER = replace(PROBLEM, batch=2)


@pytest.fixture(autouse=True)
def _home(home):
    """Start every test without timings."""


@pytest.mark.parametrize(
    "call",
    [
        timed(10.0, 9.5, 9.25),
        timed(10.0, 12.0, configs=[OF_TRITON, MODELS], objective="energy", versions={}),
        timed(
            7.0,
            problem=AttentionProblem(
                *(3, 8, 2, (9, 70, 4), 128, "bf16", "NHD"),
                page_size=16,
                capacity=128,
                kv_dtype="e4m3",
                window_left=63,
            ),
        ),
        timed(20.4, 15.6, problem=LATENT, configs=[RULES, *OTHERS_OF_LATENT]),
    ],
    ids=["cuda", "both implementations", "a fill in fp8", "latent"],
)
def test_calls_are_read_as_saved(call, home):
    before = saves()
    path = save(H200, [call], {"merge": 0.75})
    assert path == path_for(H200) == home / "configs" / "h200.json"
    file = read(path)
    assert file.calls() == [call]
    # The model's choice is the first.
    assert list(file.calls()[0].costs.items()) == list(call.costs.items())
    assert file.calls()[0].best == min(call.costs, key=call.costs.__getitem__)
    assert (file.where, file.constants, file.gpu["sms"]) == ("yours", {"merge": 0.75}, 132)
    assert files_of(H200) == [file]
    assert saves() == before + 1
    assert {each.name for each in path.parent.iterdir()} == {".h200.json.lock", "h200.json"}
    # A line for each call.
    assert len(path.read_text().splitlines()) == 2


def test_a_call_replaces_one_of_the_same_problem_and_objective_alone():
    old, other, energy = timed(10.0), timed(20.0, problem=OTHER), timed(5.0, objective="energy")
    save(H200, [old, other], {"cluster": 1.0})
    new = timed(11.0, 8.0, time="2027-01-01T00:00:00+00:00")
    path = save(H200, [new, energy], {"merge": 2.0})
    assert read(path).calls() == [new, other, energy]
    assert read(path).constants == {"merge": 2.0}
    save(H200, [])
    assert read(path).calls() == [new, other, energy]
    assert read(path).constants == {"merge": 2.0}
    save(H200, [], {})
    assert read(path).constants == {}


def _save_some(home: str, first: int) -> None:
    os.environ["LEANBENCH_HOME"] = home
    for batch in range(first, first + 10):
        save(H200, [timed(10.0, problem=replace(PROBLEM, batch=batch))])


def test_savers_at_once_lose_nothing(home):
    context = multiprocessing.get_context("fork")
    savers = [
        context.Process(target=_save_some, args=(str(home), 1 + 10 * number)) for number in range(4)
    ]
    for saver in savers:
        saver.start()
    for saver in savers:
        saver.join(60)
        assert saver.exitcode == 0
    saved = read(path_for(H200)).calls()
    assert sorted(call.problem.batch for call in saved) == list(range(1, 41))
    assert not list(path_for(H200).parent.glob(".*.part"))


@pytest.mark.parametrize("function", ["replace", "open"])
def test_a_write_that_fails_leaves_the_old_file(function, monkeypatch):
    path = save(H200, [timed(10.0)])
    before = path.read_bytes()

    def fail(*paths: Any) -> None:
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as patched:
        patched.setattr(os, function, fail)
        words = r"^cannot write .*h200.json \(Read-only file system\): choose a writable folder in"
        with pytest.raises(UserError, match=words):
            save(H200, [timed(1.0)])
    assert path.read_bytes() == before
    assert not list(path.parent.glob(".*.part"))


def test_a_file_where_the_folder_should_be(home):
    home.write_text("")
    for write in (lambda: save(H200, []), lambda: check_target(H200)):
        with pytest.raises(UserError, match=r"^cannot write .*: choose a writable folder in LEANB"):
            write()
    assert choose(CUDA, PROBLEM, H200).how == "heuristic"


def test_the_check_before_a_save(home):
    check_target(H200)
    assert list((home / "configs").iterdir()) == []
    path = save(H200, [timed(10.0)])
    before = path.read_bytes()
    check_target(H200)
    assert path.read_bytes() == before
    path.write_text("{")
    with pytest.raises(UserError, match=r"h200.json is not a file of timings .* not overwritten$"):
        check_target(H200)


def content(**fields: Any) -> dict[str, Any]:
    gpu = {name: getattr(H200, name) for name in store._GPU}
    calls = [timed(10.0, 9.0).to_dict()]
    head = {"schema_version": store.SCHEMA_VERSION, "kernel": "lean", "gpu": gpu}
    return {**head, "constants": {}, "calls": calls, **fields}


def of_gpu(**fields: Any) -> dict[str, Any]:
    return content(gpu={**content()["gpu"], **fields})


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in content().items() if key != name}


def write(value: Any, name: str = "h200") -> Path:
    path = store.configs_folder() / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


FAULTS: dict[str, tuple[Any, str]] = {
    "empty": ("", "it is empty"),
    "cut off": (json.dumps(content())[:300], "no JSON at column "),
    "a list": ([1], "its structure is another"),
    "a number": (5, "its structure is another"),
    "of another tool": ({"models": []}, "no 'schema_version'"),
    "older": (content(schema_version=3), "schema version 3, this leanbench reads 4"),
    "newer": (content(schema_version=5), "schema version 5, this leanbench reads 4"),
    "another kernel": (content(kernel="fa2"), "kernel 'fa2', timings are of 'lean'"),
    "no gpu": (without("gpu"), "no 'gpu'"),
    "a path for a name": (of_gpu(name="../../x"), "'../../x' is no GPU name"),
    "a gpu without SMs": (of_gpu(sms=0), "gpu has a size out of range"),
    "a gpu in words": (of_gpu(l2_mib="much"), "gpu has no compute capability, SMs, L2"),
    "half a capability": (of_gpu(compute_capability=[9]), "gpu has no compute capability, SMs"),
    "no constants": (without("constants"), "no 'constants'"),
    "an unknown constant": (content(constants={"speed": 1.0}), "constant speed is 1.0"),
    "a constant of 0": (content(constants={"merge": 0}), "constant merge is 0"),
    "no number": (content(constants={"merge": "x"}), "could not convert string to float"),
    "not finite": (content(constants={"merge": float("nan")}), "constant merge is nan"),
    "no calls": (without("calls"), "no 'calls'"),
    "calls that are none": (content(calls=5), "its structure is another"),
    "a call in words": (content(calls=["fast"]), "its structure is another"),
    "a call without signature": (content(calls=[{}]), "a call has no signature"),
}


@pytest.mark.parametrize(("value", "words"), FAULTS.values(), ids=FAULTS)
def test_a_damaged_file_warns_once_and_is_not_overwritten(value, words):
    path = write(value)
    before = path.read_bytes()
    with pytest.raises(UserError) as caught:
        read(path)
    sentence = str(caught.value)
    assert sentence.startswith(f"{path} is not a file of timings (")
    assert sentence.endswith("): move it away and tune again")
    assert words in sentence
    assert "\n" not in sentence
    assert user_faults() == [sentence]
    with pytest.raises(UserError, match=r"\): move it away, it is not overwritten$"):
        save(H200, [timed(10.0)])
    assert path.read_bytes() == before
    with pytest.warns(UserWarning, match="; it is not used$") as warned:
        choices = [choose(CUDA, problem, H200) for problem in (PROBLEM, OTHER)]
    assert [str(warning.message) for warning in warned] == [f"{sentence}; it is not used"]
    assert [choice.how for choice in choices] == ["heuristic"] * 2
    assert choices[0].config == MODELS


@pytest.mark.parametrize(
    ("place", "value"),
    [*product(("constant", "size", "cost"), (-1, 10**400))],
    ids=lambda value: value if isinstance(value, str) else str(value)[:4],
)
def test_numbers_out_of_range(place, value):
    call = timed(10.0, 9.0).to_dict()
    if place == "cost":
        call["costs"][0][-1] = value
    wrong = {
        "constant": content(constants={"merge": value}),
        "size": of_gpu(l2_mib=value),
        "cost": content(calls=[call]),
    }
    path = write(wrong[place])
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert choose(CUDA, PROBLEM, H200).how == "heuristic"
    assert [str(warning.message).startswith(f"{path} ") for warning in warned] == [True]


def spoiled(**fields: Any) -> dict[str, Any]:
    return {**timed(10.0, 9.0).to_dict(), **fields}


def settings(**changed: Any) -> list[Any]:
    return list({"implementation": "cuda", **vars(MODELS), **changed}.values())


LINE_FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "no costs": (spoiled(costs=[]), "no timings"),
    "a cost in words": (spoiled(costs=[[*settings(), "fast"]]), "'fast' is no cost"),
    "a cost of 0": (spoiled(costs=[[*settings(), 0]]), "0 is no cost"),
    "not finite": (spoiled(costs=[[*settings(), float("nan")]]), "nan is no cost"),
    "an unknown implementation": (
        spoiled(costs=[[*settings(implementation="ptx"), 9.0]]),
        "'ptx' is no implementation",
    ),
    "a setting of lean_mla": (spoiled(costs=[[None, 3, True, 3, 9.0]]), "column_groups 3 is not"),
    "a setting more": (spoiled(costs=[[*settings(), True, 9.0]]), "zip()"),
    "a setting less": (spoiled(costs=[[*settings()[:-1], 9.0]]), "zip()"),
    "a value that no longer exists": (
        spoiled(costs=[[*settings(copy="slow"), 9.0]]),
        "copy 'slow' is not bulk or async",
    ),
    "an unknown objective": (spoiled(objective="price"), "no timings"),
    "a problem that no longer exists": (spoiled(problem={"batch": 1}), "('q_heads')"),
}


@pytest.mark.parametrize(("line", "words"), LINE_FAULTS.values(), ids=LINE_FAULTS)
def test_a_damaged_call_is_left_out_alone(line, words):
    good = timed(10.0, 9.0, problem=OTHER)
    path = write(content(calls=[line, good.to_dict()]))
    sentence = "has timings that this version cannot use .*, they are left out: tune again$"
    with pytest.warns(UserWarning, match=sentence) as warned:
        assert read(path).calls() == read(path).calls() == [good]
    (warning,) = warned
    assert words in str(warning.message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose(CUDA, PROBLEM, H200).how == "heuristic"
        assert choose(CUDA, OTHER, H200).config == OTHERS[0]
        # Nothing that another version may use is lost.
        save(H200, [timed(1.0, problem=replace(PROBLEM, batch=3))])
    assert len(read(path).lines) == 3


def test_a_file_that_is_not_there(home):
    with pytest.raises(UnreadableFile) as refused:
        read(home / "none.json")
    assert refused.value.fault is FileFault.MISSING


def test_a_file_of_another_gpu_is_not_used_or_overwritten(home):
    path = save(A100, [timed(10.0, 9.0)], path=home / "configs" / "mine.json")
    before = path.read_bytes()
    words = r"is of NVIDIA A100.* \(108 SMs\), not of NVIDIA H200 \(132 SMs\): move it away, it is"
    with pytest.raises(UserError, match=words):
        save(H200, [timed(10.0)], path=path)
    assert path.read_bytes() == before
    assert files_of(H200) == []
    assert choose(CUDA, PROBLEM, H200).how == "heuristic"


def test_a_namesake_has_a_file_of_its_own(home):
    """A MIG instance has the whole GPU's name."""
    part = replace(H200, sms=16, bandwidth_tb_s=0.6)
    save(H200, [timed(10.0)])
    path = save(part, [timed(20.0)])
    assert path == path_for(part) == home / "configs" / "h200-16sms-0.6tb.json"
    assert path_for(H200) == home / "configs" / "h200.json"
    for spec, us in ((H200, 10.0), (part, 20.0)):
        (file,) = files_of(spec)
        assert file.calls()[0].costs[MODELS] == us
    assert merge(read(path)) == path


@pytest.mark.parametrize(
    ("fields", "shared"),
    [
        ({"l2_mib": 60.9}, True),
        ({"l2_mib": 62.0}, False),
        ({"bandwidth_tb_s": 4.4}, True),
        ({"bandwidth_tb_s": 4.0}, False),
        ({"sms": 131}, False),
        ({"compute_capability": (9, 1)}, False),
        ({"product": "NVIDIA H200 NVL", "name": "h200-nvl"}, True),
    ],
)
def test_which_gpus_share_timings(fields, shared):
    save(H200, [timed(10.0)])
    assert bool(files_of(replace(H200, **fields))) is shared


def test_export_and_merge(home, monkeypatch):
    mine, shipped = timed(10.0, 9.0), timed(20.0, 19.0)
    only_shipped = timed(30.0, problem=OTHER)
    save(H200, [shipped, only_shipped], {"cluster": 1.5, "merge": 2.0}, store.SHIPPED / "h200.json")
    save(H200, [mine], {"merge": 0.5})
    files = files_of(H200)
    assert [file.where for file in files] == ["yours", "shipped"]
    exported = home.parent / "new" / "mine.json"
    assert export(exported, files) == 2
    assert read(exported).calls() == [mine, only_shipped]
    assert read(exported).constants == {"cluster": 1.5, "merge": 0.5}
    # Another machine has timings of its own.
    monkeypatch.setenv("LEANBENCH_HOME", str(home.parent / "other"))
    more = timed(5.0, problem=replace(PROBLEM, batch=9))
    save(H200, [timed(99.0), more], {"merge": 9.0})
    path = merge(read(exported))
    assert path == home.parent / "other" / "configs" / "h200.json"
    assert read(path).calls() == [mine, more, only_shipped]
    assert read(path).constants == {"cluster": 1.5, "merge": 0.5}
    with pytest.raises(UserError, match=r"^cannot write /proc/mine.json \(.*\): choose a FILE in"):
        export(Path("/proc/mine.json"), files)


def test_the_hash_follows_the_files(monkeypatch):
    hashes = [settings_hash(H200)]
    for number, where in enumerate((None, None, store.SHIPPED / "h200.json")):
        save(H200, [timed(10.0 + number)], path=where)
        hashes.append(settings_hash(H200))
    assert hashes[0] == HEURISTIC
    assert len(set(hashes)) == 4
    assert {len(each) for each in hashes[1:]} == {12}
    save(A100, [timed(10.0)])
    assert settings_hash(H200) == hashes[-1]
    monkeypatch.setenv("LEANBENCH_CONFIGS", "off")
    assert settings_hash(H200) == HEURISTIC


@pytest.mark.parametrize(
    ("word", "off"),
    [("off", True), ("0", True), (" NO ", True), ("", False), ("on", False), ("1", False)],
)
def test_the_switch(word, off, monkeypatch):
    save(H200, [timed(10.0, 9.0)])
    monkeypatch.setenv("LEANBENCH_CONFIGS", word)
    assert is_on("LEANBENCH_CONFIGS", default=True) is not off
    choice = choose(CUDA, PROBLEM, H200)
    assert choice.config == (MODELS if off else OTHERS[0])
    assert (choice.why == "LEANBENCH_CONFIGS turns timings off") is off


def test_another_word_for_the_switch(monkeypatch):
    monkeypatch.setenv("LEANBENCH_CONFIGS", "maybe")
    with pytest.raises(UserError, match="LEANBENCH_CONFIGS 'maybe' is neither on nor off: set it"):
        choose(CUDA, PROBLEM, H200)


def test_a_file_is_parsed_once_until_it_changes(monkeypatch):
    path = save(H200, [timed(10.0)])
    reads: list[Path] = []
    monkeypatch.setattr(store, "read", lambda path, where: reads.append(path) or read(path, where))
    for _ in range(3):
        files_of(H200)
    assert reads == [path]
    path.write_text(json.dumps(content(constants={"merge": 3.0})))
    assert [file.constants for file in all_files()] == [{"merge": 3.0}]


def test_an_export_leaves_out_a_namesakes_calls(home, tmp_path):
    part = replace(H200, sms=16, bandwidth_tb_s=0.6)
    files = [read(save(H200, [timed(10.0)])), read(save(part, [timed(20.0)]))]
    assert store.export(tmp_path / "one.json", files) == 1
    assert read(tmp_path / "one.json").calls()[0].costs[MODELS] == 10.0


def test_an_import_without_constants_keeps_those_measured_here(home, tmp_path):
    path = save(H200, [], {"merge": 2.0})
    merge(read(save(H200, [timed(10.0)], {}, tmp_path / "other.json")))
    assert read(path).constants == {"merge": 2.0}
    assert len(read(path).calls()) == 1
