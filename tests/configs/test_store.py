"""Files of tuned configs: contents, rejected files, and no lost entries."""

from __future__ import annotations

import json
import multiprocessing
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tuned_examples import H200, family, gpu, tuned, tuned_configs

from leanbench.configs.store import merge, path_of, save_families, saves, tuned_for
from leanbench.configs.tuned import TunedConfigs
from leanbench.configs.tuned_file import read
from leanbench.core.errors import UserError
from leanbench.core.files import FileFault, UnreadableFile, locked
from leanbench.gpu.catalogue import find


def test_what_is_saved_is_read_again(home):
    tuned_family = family(problems=[tuned()])
    before = saves()
    saved = save_families(H200, [tuned_family])
    assert saved.path == path_of("h200") == home / "configs" / "h200.json"
    assert (saved.added, saved.replaced, saved.refused) == ((tuned_family,), (), ())
    assert read(saved.path) == tuned_configs(tuned_family)
    assert [(file.where, file.tuned) for file in tuned_for(H200)] == [
        ("yours", tuned_configs(tuned_family))
    ]
    assert saves() == before + 1
    assert sorted(path.name for path in saved.path.parent.iterdir()) == [
        ".h200.json.lock",
        "h200.json",
    ]


def test_a_family_replaces_its_namesake_alone(home):
    old, second = family(), family(group_size=8)
    save_families(H200, [old, second])
    new, bf16 = family(large_us=8.0), family(dtype="bf16")
    saved = save_families(H200, [new, bf16])
    assert (saved.added, saved.replaced) == ((bf16,), (old,))
    assert read(saved.path).families == [new, second, bf16]


@pytest.mark.parametrize(
    "field",
    [
        {"head_dim": 64},
        {"dtype": "bf16"},
        {"group_size": 2},
        {"kv_layout": "NHD"},
        {"objective": "energy"},
    ],
)
def test_every_part_of_the_key_makes_another_family(home, field):
    save_families(H200, [family()])
    assert save_families(H200, [family(**field)]).replaced == ()
    assert len(read(path_of("h200")).families) == 2


def test_a_predicted_family_replaces_no_measured_one(home):
    measured, predicted = family(), family(source="predicted", large_us=5.0)
    save_families(H200, [measured])
    saved = save_families(H200, [predicted])
    assert (saved.added, saved.replaced, saved.refused) == ((), (), (predicted,))
    assert read(saved.path).families == [measured]
    # A measurement replaces a prediction, and so does a prediction.
    elsewhere = home / "other.json"
    for new in (predicted, family(source="predicted"), measured):
        save_families(H200, [new], elsewhere)
        assert read(elsewhere).families == [new]


def _save_some(home: str, first: int, count: int) -> None:
    os.environ["LEANBENCH_HOME"] = home
    for number in range(first, first + count):
        save_families(H200, [family(group_size=number)])


def test_savers_at_once_lose_nothing(home):
    context = multiprocessing.get_context("fork")
    savers = [
        context.Process(target=_save_some, args=(str(home), 1 + 10 * number, 10))
        for number in range(4)
    ]
    for saver in savers:
        saver.start()
    for saver in savers:
        saver.join(60)
        assert saver.exitcode == 0
    assert sorted(saved.group_size for saved in read(path_of("h200")).families) == list(
        range(1, 41)
    )
    assert not list(path_of("h200").parent.glob("*.part"))


def test_a_crash_while_writing_leaves_the_old_file(home, monkeypatch):
    save_families(H200, [family()])
    before = path_of("h200").read_bytes()

    def fail(*paths: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(
        UserError, match=r"^cannot write .*h200.json \(No space left on device\): choose a writable"
    ):
        save_families(H200, [family(large_us=1.0)])
    assert path_of("h200").read_bytes() == before
    assert not list(path_of("h200").parent.glob(".*.part"))


def write(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def plain(**fields: Any) -> dict[str, Any]:
    return {**tuned_configs(family(problems=[tuned()])).model_dump(mode="json"), **fields}


def spoiled(path: str, value: Any) -> dict[str, Any]:
    """Return a file with `value` at a place of its family, such as ``shortlist``."""
    content: Any = plain()
    steps: list[Any] = [int(step) if step.isdigit() else step for step in path.split(".")]
    at = content if path == "gpu.name" else content["families"][0]
    for step in steps[:-1]:
        at = at[step]
    at[steps[-1]] = value
    return content


FAULTS = {
    "cut off": (json.dumps(plain())[:500], r"\(no JSON at column 500\)"),
    "no JSON": ("hello", r"\(no JSON at column 1\)"),
    "a list": ([1], "it has no schema_version and families: move it away"),
    "another tool's": ({"models": []}, "it has no schema_version and families: move it away"),
    "older": (plain(schema_version=0), "schema version 0, .* 3: move it away and tune"),
    "newer": (plain(schema_version=4), "schema version 4, .* 3: .* update leanbench"),
    "no version": (plain(schema_version="one"), 'has schema version "one"'),
    "an unknown field": (plain(more=1), r"\(more: extra inputs are not permitted\)"),
    "a missing field": (
        {key: value for key, value in plain().items() if key != "gpu"},
        r"\(gpu: field required\)",
    ),
    "a wrong type": (spoiled("head_dim", "big"), "families.0.head_dim: "),
    "infinite": (spoiled("builds.0.start_us", float("inf")), "builds.0.start_us: "),
    "a build that is not there": (spoiled("candidates.1.build", 2), "is 2, there are 2"),
    "a shortlist past the end": (spoiled("shortlist", [2]), "is 2, there are 2"),
    "a negative index": (spoiled("shortlist", [-1]), "is -1, there are 2"),
    "a choice past the end": (spoiled("problems.0.chosen", 9), "is 9, there are 2"),
    "a tie past the end": (spoiled("problems.0.ties", [1, 7]), "is 7, there are 2"),
    "a time past the end": (spoiled("problems.0.timed.1.0", 5), "is 5, there are 2"),
    "listed but never timed": (spoiled("candidates.1.build", None), "shortlist and has no build"),
    "CUDA C++ without its settings": (
        spoiled("candidates.1.config.implementation", "cuda"),
        "copy must be",
    ),
    "Triton with settings of CUDA C++": (
        spoiled("candidates.1.config.cluster_size", 2),
        "no setting 'cluster_size'",
    ),
    "a setting out of range": (spoiled("candidates.1.config.tile_tokens", 48), "tile_tokens 48"),
    "a path for a name": (spoiled("gpu.name", "../../x"), "gpu.name: .*no GPU name"),
    "no time": (spoiled("time", "yesterday"), "time 'yesterday' is no ISO 8601 time"),
    "twice": ({**plain(), "families": plain()["families"] * 2}, "family 1 .* twice"),
}


@pytest.mark.parametrize(("content", "words"), FAULTS.values(), ids=FAULTS)
def test_a_fault_is_one_sentence_and_nothing_is_overwritten(home, content, words):
    path = write(path_of("h200"), content)
    before = path.read_bytes()
    with pytest.raises(UserError, match=words) as caught:
        read(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match=r"move it away, it is not overwritten$"):
        save_families(H200, [family()])
    assert path.read_bytes() == before


def test_families_that_contradict_themselves_are_not_saved(home):
    wrong = family(shortlist=[5])
    with pytest.raises(
        UserError, match="a candidate of the shortlist is 5, there are 2: tune again"
    ):
        save_families(H200, [wrong])
    with pytest.raises(UserError, match="it is there twice"):
        save_families(H200, [family(), family()])
    assert not path_of("h200").exists()


def test_a_file_of_another_gpu_or_kernel_is_not_overwritten(home):
    path = home / "mine.json"
    save_families(find("a100"), [family()], path)
    with pytest.raises(
        UserError, match=r"is of NVIDIA A100.* \(108 SMs, 2.04 TB/s\), not of NVIDIA H200"
    ):
        save_families(H200, [family()], path)
    with pytest.raises(UserError, match="is of kernel 'lean', not of 'other'"):
        save_families(find("a100"), [family()], path, kernel="other")
    assert read(path) == tuned_configs(of=gpu("a100"))


def test_a_part_of_a_gpu_has_a_file_of_its_own(home):
    """A MIG instance has the whole GPU's name."""
    part = replace(H200, sms=16, bandwidth_tb_s=0.6)
    save_families(H200, [family()])
    saved = save_families(part, [family(large_us=3.0)])
    assert saved.path == home / "configs" / "h200-16sms-0.6tb.json"
    of_part = tuned_configs(family(large_us=3.0), of=gpu(sms=16, bandwidth_tb_s=0.6))
    assert [file.tuned for file in tuned_for(H200)] == [tuned_configs()]
    assert [file.tuned for file in tuned_for(part)] == [of_part]


@pytest.mark.parametrize(
    ("fields", "same"),
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
def test_which_gpus_are_the_same(home, fields, same):
    save_families(H200, [family()])
    assert bool(tuned_for(replace(H200, **fields))) is same


def test_shipped_files_are_another_place(home):
    merge(gpu(), [family()], home.parent / "shipped" / "h200.json")
    assert [(file.where, file.tuned) for file in tuned_for(H200)] == [("shipped", tuned_configs())]
    save_families(H200, [family(large_us=2.0)])
    assert [(file.where, file.tuned) for file in tuned_for(H200)] == [
        ("yours", tuned_configs(family(large_us=2.0))),
        ("shipped", tuned_configs()),
    ]
    assert tuned_for(find("a100")) == []


def test_what_cannot_be_read_or_written(home):
    with pytest.raises(UnreadableFile) as refused:
        read(home / "none.json")
    assert refused.value.fault is FileFault.MISSING
    (home / "file").parent.mkdir()
    (home / "file").write_text("")
    with pytest.raises(
        UserError, match=r"^cannot write .*choose a writable folder in LEANBENCH_HOME$"
    ):
        save_families(H200, [family()], home / "file" / "h200.json")


def test_a_lock_that_cannot_be_made_is_an_error():
    """The folder exists; a lock would be waited for."""
    with pytest.raises(FileNotFoundError), locked(Path("/proc/x.json")):
        pass


def test_files_that_come_with_leanbench_are_whole():
    from leanbench.configs.store import SHIPPED

    for path in SHIPPED.glob("*.json"):
        assert isinstance(read(path), TunedConfigs)
        assert find(path.stem).sms == read(path).gpu.sms
