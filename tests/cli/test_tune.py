"""`leanbench tune` through Typer's runner; the search itself is tested in tests/tune."""

import json
import re
import signal
from dataclasses import replace

import pytest
from cli.running import invoke, printed, refusal

from leanbench.cli.tune import _chosen, _range, _show_lean_tiles, _show_spills, _show_table
from leanbench.configs.space import FamilyKey
from leanbench.configs.store import tuned_for
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel
from leanbench.gpu.catalogue import find
from leanbench.tune import run as run_module
from leanbench.tune.result import Summary
from leanbench.tune.run import Tuned


@pytest.fixture(autouse=True)
def home(no_gpu, tmp_path, monkeypatch):
    monkeypatch.setenv("LEANBENCH_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def tune(*words: str):
    return invoke("tune", *words)


def test_without_a_gpu_the_model_tunes_and_says_so(home, monkeypatch):
    monkeypatch.setattr("leanbench.cli.progress._LINE_EVERY_S", 0.0)
    result = tune("--gpu", "a100", "--head-dim", "256", "--group", "1")
    assert result.exit_code == 0, result.stderr
    named = "predicted by the performance model of NVIDIA A100-SXM4-80GB, nothing is timed"
    assert named in result.stderr
    assert "not fitted to a100-80gb" in result.stderr
    assert "predicted for NVIDIA A100-SXM4-80GB" in result.stdout
    assert "d256 MHA fp16 HND" in result.stdout
    assert "all 12 problems were predicted" in result.stdout
    assert "By prediction, the heuristic takes" in result.stdout
    # One family has one error.
    assert re.search(r"builds and whose median error is \d+\.\d%\.$", result.stdout, re.MULTILINE)
    assert "predicting" in result.stderr
    # What is not done is said once; nothing else speaks of it.
    words = f"{result.stdout}{result.stderr}".replace("nothing is timed", "")
    assert "timed" not in words
    assert "timing " not in words
    mine = tuned_for(find("a100-80gb"))[0]
    assert mine.where == "yours"
    (family,) = mine.tuned.families
    # There is CUDA C++ to consider, of which the model knows nothing.
    space = kernel("lean").tuning_space(AttentionProblem(1, 8, 8, 4096, 256), find("a100"))
    assert {config.implementation for config in space} == {"triton", "cuda"}
    assert {candidate.config.implementation for candidate in family.candidates} == {"triton"}
    assert "CUDA" not in result.stdout
    assert (family.head_dim, family.group_size, family.source) == (256, 1, "predicted")
    assert len(family.problems) == 12
    assert family.shortlist
    listed = printed("configs", "list")
    assert "a100-80gb" in listed
    assert "predicted" in listed


def test_a_tuning_that_would_leave_nothing_is_refused_before_it_begins(home, monkeypatch):
    def never(*_):
        raise AssertionError("it looked for a GPU")

    monkeypatch.setattr("leanbench.gpu.local.choose", never)
    assert refusal("tune", "--gpu", "h100", "--no-keep", "--quiet") == (
        "--no-keep and --quiet together leave nothing of a tuning: leave --no-keep out to"
        " keep what is found, or --quiet to see it"
    )
    assert not home.exists()


def summary(tile_tokens: dict[int, int], cuda: int) -> Summary:
    figures = (3.0, 1.05, 1.5, 1.0, 40, 50, 0.99, 0.95, 0.02)
    return Summary(FamilyKey(128, 4), 24, 300, 7, [], tile_tokens, cuda, [], *figures)


def test_what_was_chosen_says_which_implementation(capsys):
    both, triton = summary({64: 2, 128: 6}, 16), summary({64: 18, 128: 6}, 0)
    assert _chosen(both) == ["64 (2)", "128 (6)", "CUDA (16)"]
    assert _chosen(triton) == ["64 (18)", "128 (6)"]
    _show_lean_tiles([both])
    _show_lean_tiles([triton])
    _show_lean_tiles([summary({}, 24)])
    of = "LeanTile for head_dim 128"
    paper = "(the LeanAttention paper names 128 for an A100)."
    assert capsys.readouterr().out.splitlines() == [
        f"{of}: 128 tokens on 75% of the problems where Triton is chosen {paper}",
        f"{of}: 64 tokens on 75% of the problems {paper}",
    ]


@pytest.mark.parametrize(
    ("shares", "words"),
    [([0.028], "2.8%"), ([0.0281, 0.0279], "2.8%"), ([0.028, 0.012, 0.02], "1.2% to 2.8%")],
)
def test_a_range_of_one_value_is_said_once(shares, words):
    assert _range(shares) == words


def test_the_table_fits_100_columns(capsys, monkeypatch):
    monkeypatch.setattr("leanbench.cli.output.PIPED_COLUMNS", 100)
    tiles = {64: 2, 128: 16, 256: 6}
    keys = [FamilyKey(*key) for key in ((64, 1), (128, 4), (128, 8))]
    several = [replace(summary(tiles, 16), family=key) for key in keys]
    _show_table(several, "measured on NVIDIA H200", predicted=False)
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert max(map(len, lines)) <= 100
    assert lines[0] == "measured on NVIDIA H200, all fp16 HND"
    at = next(number for number, line in enumerate(lines) if line.startswith("d128 group 4"))
    shown = "d128 group 4 24 300 7 0 3.0 +5.0% +50.0% 99.0% 64 (2), 128 (16),"
    assert lines[at].split() == shown.split()
    assert lines[at + 1].split() == ["256", "(6),", "CUDA", "(16)"]


def test_nothing_is_saved_where_that_is_asked(home, monkeypatch):
    monkeypatch.setattr(run_module, "tune", lambda request, observer: Tuned([], {}))
    monkeypatch.setattr("leanbench.cli.tune._show", lambda results, target, took_s: None)
    assert tune("--gpu", "a100", "--no-keep").exit_code == 0
    assert not home.exists()


@pytest.mark.parametrize("quiet", [(), ("--quiet",)])
def test_a_family_that_is_left_out_is_named(monkeypatch, quiet):
    left_out = {FamilyKey(128, 8): "no candidate can run: takes 230 KB of shared memory"}
    monkeypatch.setattr(run_module, "tune", lambda request, observer: Tuned([], left_out))
    monkeypatch.setattr("leanbench.cli.tune._show", lambda results, target, took_s: None)
    monkeypatch.setattr("leanbench.cli.tune._save", lambda request, results: None)
    result = tune("--gpu", "a100", *quiet)
    assert result.exit_code == 0
    assert result.stderr.splitlines()[-1] == (
        f"d128 group 8 fp16 HND is left out, {left_out[FamilyKey(128, 8)]}."
    )


def test_spilled_registers_are_noted(capsys):
    kept, spills = summary({}, 24), replace(summary({}, 24), spilled=[2, 40, 8])
    _show_spills([kept], predicted=True)
    assert capsys.readouterr().out == ""
    _show_spills([kept, spills], predicted=False)
    assert capsys.readouterr().out == (
        "Chosen settings spill registers: d128 group 4 fp16 HND on 3 of 24 problems (up to 40 of"
        " a thread).\n"
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_says_how_to_go_on(monkeypatch, number):
    def interrupted(request, observer):
        raise KeyboardInterrupt(number)

    monkeypatch.setattr(run_module, "tune", interrupted)
    result = tune("--gpu", "a100")
    assert result.exit_code == 128 + number
    assert "Stopped: nothing was saved but what was compiled" in result.stderr


def test_a_foreign_file_is_not_overwritten(home):
    path = home / "configs" / "a100-80gb.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"models": []}))
    result = tune("--gpu", "a100", "--head-dim", "256", "--group", "1", "--quiet")
    assert result.exit_code == 2
    assert str(path) in result.stderr
    assert json.loads(path.read_text()) == {"models": []}
