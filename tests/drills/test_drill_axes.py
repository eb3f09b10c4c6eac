"""Flags and sweep files that nobody means well: a sentence or a sweep, in little time and memory,
in its folder.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hostile import SCALARS, TYPED, VALUES, share, torn, within_limits
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from leanbench.cli import sweep_run
from leanbench.cli.main import app
from leanbench.core.axes import AXES, parse_problem
from leanbench.core.errors import UserError
from leanbench.core.paths import SWEEPS
from leanbench.records.reading import Run
from leanbench.run.cells import MAX_CELLS, expand
from leanbench.run.sweep_file import parse_kernels, requested_sweep

PARSERS = {"kernels": parse_kernels, **{name: axis.parse for name, axis in AXES.items()}}
FLAGS = [axis.flag for axis in AXES.values()]
OTHERS = "--kernels --configs --config --cache --window --ci --gpu --timeout --budget".split()
SHIPPED = [path.read_bytes() for path in sorted(SWEEPS.glob("*.toml"))]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr("leanbench.gpu.local.local_gpus", list)


@share(0.37)
@given(st.sampled_from(sorted(PARSERS)), TYPED)
def test_any_text_on_an_axis_is_values_or_a_sentence(axis, text):
    with within_limits():
        try:
            values = PARSERS[axis](text)
        except UserError as error:
            assert_a_sentence(error)
        else:
            assert 1 <= len(values) <= 10_000
            assert len(set(values)) == len(values)


@share(0.06)
@given(st.lists(TYPED, max_size=5))
def test_any_words_are_a_problem_or_a_sentence(words):
    with within_limits():
        try:
            problem = parse_problem(words)
        except UserError as error:
            assert_a_sentence(error)
        else:
            assert parse_problem([problem.label]) == problem or problem.is_ragged


@share(0.04)
@given(st.dictionaries(st.sampled_from([*FLAGS, *OTHERS]), TYPED, min_size=1, max_size=4))
def test_any_command_line_is_a_table_or_a_sentence(flags):
    words = [word for flag, text in flags.items() for word in (flag, text)]
    with within_limits():
        assert_answered(["--dry-run", *words])


def assert_answered(words: list[str]) -> None:
    result = CliRunner().invoke(app, ["sweep", *words])
    assert result.exit_code in (0, 2), (words, result.output, result.exception)
    assert isinstance(result.exception, SystemExit | None), (words, result.exception)
    if result.exit_code == 2:
        assert result.stdout == ""


@pytest.mark.parametrize(
    "words",
    [
        "--context 1:1e12:+1",
        "--context 1:2147483647:+1",
        "--context 1:10000:+1 --batch 1:10000:+1",
        "--batch 2147483647",
        "--batch 2147483647 --lengths mean-0.5",
        "--context 1k:9k:+1 --batch 1048576 --lengths mean-0.5",
        "--context 1k:9k:+1 --batch 1048576 --page-size 16",
        "--context 2147483647 --heads 2147483647 --batch 1048576",
        "--heads 2147483647/1 --q-len 16",
    ],
)
def test_numbers_out_of_all_proportion_are_answered_at_once(words):
    with within_limits():
        assert_answered(["--dry-run", *words.split()])


def toml_value(value: Any) -> str:
    if isinstance(value, dict):
        return (
            "{"
            + ", ".join(f"{json.dumps(key)} = {toml_value(item)}" for key, item in value.items())
            + "}"
        )
    if isinstance(value, list):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    return (
        "''"
        if value is None
        else json.dumps(value).replace("NaN", "nan").replace("Infinity", "inf")
    )


KEYS = [
    "name",
    "description",
    "kernels",
    "configs",
    "config",
    "cache",
    "energy",
    "grid",
    "typo",
    *AXES,
]
WRITTEN = st.dictionaries(st.sampled_from(KEYS), VALUES | TYPED, max_size=5).map(
    lambda keys: "\n".join(
        f"{key} = {toml_value(value)}" for key, value in {"name": "x", **keys}.items()
    ).encode("utf-8", "replace")
)
TORN = st.sampled_from(SHIPPED).flatmap(torn)


@share(0.20)
@given(WRITTEN | TORN)
def test_any_sweep_file_is_a_sweep_or_a_sentence(tmp_path_factory, content):
    path = file_of(tmp_path_factory)
    path.write_bytes(content)
    with within_limits():
        try:
            sweep = requested_sweep(str(path), {}, None, None)
            cells = expand(sweep)
        except UserError as error:
            assert_a_sentence(error)
        else:
            assert 0 < len(cells) <= MAX_CELLS
            assert "/" not in sweep.name
            assert not sweep.name.startswith(".")


def file_of(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file for all inputs of a test."""
    return tmp_path_factory.getbasetemp() / "fuzzed.toml"


def assert_a_sentence(error: UserError) -> None:
    text = str(error)
    assert text
    assert "Traceback" not in text


@share(0.01)
@given(
    st.sampled_from(
        ["../../x", "/tmp/x", "..", ".", "a/../../b", "a\x00b", "x" * 300, *map(str, SCALARS)]
    )
    | TYPED
)
def test_no_name_leaves_the_folder_of_runs(tmp_path_factory, name):
    out = tmp_path_factory.getbasetemp() / "runs"
    written: list[Path] = []

    def run(path: Path, *rest: object, **options: object) -> Run:
        written.append(path)
        return Run(path, {}, ())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep_run, "run_remaining_cells", run)
        result = CliRunner().invoke(
            app, ["sweep", "--no-report", "--quiet", "--out", str(out), f"--name={name}"]
        )
    assert result.exit_code == (0 if written else 2), (name, result.output)
    assert not isinstance(result.exception, Exception), result.exception
    for path in written:
        assert path.parent == out
        assert path.name not in ("", ".", "..")
