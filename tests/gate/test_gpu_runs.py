"""Published runs made again: their commands, seeds and folders; predicted here, on no GPU."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import gpu_runs
import pytest
from gpu_runs import Again, is_whole, make, place, runs_of

from leanbench.report.evidence.sources import FOLDER, Source, Sources

ROOT = Path(__file__).resolve().parents[2]
PREDICTED = "sweep --heads 8 --context 1k,2k --head-dim 64 --kernels fa2,lean --gpu h200"


def copy_of(source: Source, command: str) -> Source:
    """A run as if it had been made by another command."""
    manifest = {**source.manifest, "command": command}
    return Source(source.name, source.path, source.date, (), (), manifest)


def test_a_run_is_made_by_the_command_in_its_manifest():
    mla, shared, append = (Sources(ROOT)[name] for name in ("mla", "shared", "append"))
    where = "--out /somewhere/else --name other --no-report --quiet --resume --budget 90s"
    moved = copy_of(append, f"leanbench sweep append {where} --ci 1%")
    first, second, third = runs_of([mla, moved, shared], None)
    # Several GPUs first, then the longest.
    assert (first.name, first.gpus) == ("shared", 2)
    assert (second.name, second.gpus, second.words) == ("mla", 1, ("sweep", "mla", *MLA_REST))
    assert (third.name, third.words) == ("append", ("sweep", "append", "--ci", "1%"))
    assert second.expected_s > third.expected_s > gpu_runs.START_S


#: What follows the sweep's name in mla's command.
MLA_REST = shlex.split(Sources(ROOT)["mla"].manifest["command"])[3:]


def test_drawn_runs_get_a_seed_each():
    sources = Sources(ROOT)
    drawn = [source for source in sources.by_name.values() if source.name.startswith("serving-")]
    runs = {run.name: run.words for run in runs_of(drawn, 5)}
    assert sorted(runs) == [f"serving-{seed}" for seed in range(5, 5 + len(drawn))]
    for name, words in runs.items():
        assert words[words.index("--seed") + 1] == name.removeprefix("serving-")
    with pytest.raises(SystemExit, match=r"serving-\d+ was drawn: give --seed"):
        runs_of(drawn, None)
    by_file = copy_of(drawn[0], "leanbench sweep mine.toml")
    with pytest.raises(SystemExit, match=r"`leanbench sweep mine.toml` does not say --seed \d+"):
        runs_of([by_file], 5)


def test_runs_are_made_gone_on_with_and_placed(tmp_path, capfd):
    out, root = tmp_path / "again", tmp_path / "root"
    (root / FOLDER).mkdir(parents=True)
    run = Again("tiny", tuple(shlex.split(PREDICTED)), 1, 9.0)
    # No time is left for any; two GPUs are not here.
    assert make([run], out, ["0"], 1) == ["tiny"]
    assert make([Again("pair", run.words, 2, 9.0)], out, ["0"], 60) == ["pair"]
    said = capfd.readouterr().out
    assert "not begun: no time is left" in said
    assert "not begun: asks for 2 GPUs" in said
    assert place(out, root) == []

    assert make([run], out, ["0", "1"], 60) == []
    assert "tiny                 whole, " in capfd.readouterr().out
    results = out / "tiny" / "results.jsonl"
    rows = results.read_text().splitlines()
    assert len(rows) == 4
    results.write_text("\n".join(rows[:3]) + "\n")
    assert not is_whole(out / "tiny")
    assert make([run], out, ["0"], 60) == []
    assert results.read_text().splitlines()[:3] == rows[:3]

    assert place(out, root) == ["tiny"]
    manifest = json.loads((root / FOLDER / "tiny" / "manifest.json").read_text())
    assert manifest["command"] == f"leanbench {PREDICTED}"
    assert (root / FOLDER / "tiny" / "results.jsonl").read_text() == results.read_text()


def test_a_run_that_is_not_there_is_named():
    with pytest.raises(SystemExit, match="there is no run reports/h200/nothing: take names of"):
        gpu_runs.main(["nothing", "--list"])
    with pytest.raises(SystemExit, match="there is no run reports/h200/trace: take names of"):
        gpu_runs.main(["trace", "--list"])
