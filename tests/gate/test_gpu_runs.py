"""Published runs made again: their commands, seeds and folders; predicted here, on no GPU."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace

import gpu_runs
import pytest
from gpu_runs import Again, make, place, runs_of, whole_run
from processes import Ended

from leanbench.report.evidence.places import FOLDER
from leanbench.report.evidence.sources import Source, Sources

ROOT = Path(__file__).resolve().parents[2]
PREDICTED = "sweep --heads 8 --context 1k,2k --head-dim 64 --kernels fa2,lean --gpu h200"


def copy_of(source: Source, command: str, name: str = "") -> Source:
    """A run as if it had been made by another command, or had another name."""
    manifest = {**source.manifest, "command": command}
    return Source(name or source.name, source.path, source.date, (), (), manifest)


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
    unsaid = copy_of(drawn[0], "leanbench sweep serving")
    with pytest.raises(SystemExit, match=r"`leanbench sweep serving` does not say --seed \d+"):
        runs_of([unsaid], 5)


def test_a_run_of_a_sweep_file_is_left_out(capsys):
    assert runs_of([copy_of(Sources(ROOT)["mla"], "leanbench sweep mine.toml")], 5) == []
    left_out = "mla left out, sweep mine.toml names a file of its own: run it by hand\n"
    assert capsys.readouterr().out == left_out


def test_the_second_gpu_is_made_on_that(tmp_path, monkeypatch):
    (run,) = runs_of([Sources(ROOT)["second-gpu"]], None)
    assert run.gpus == 2
    seen: list[str] = []

    def run_within(_limit_s: float, words: list[str], _folder: Path, own: dict[str, str]) -> Ended:
        assert "--require-gpu" in words
        seen.append(own["CUDA_VISIBLE_DEVICES"])
        return Ended(0, "", 0.0)

    monkeypatch.setattr(gpu_runs, "run_within", run_within)
    shared = Again("shared", ("sweep", "shared"), 2, 9.0)
    assert make([run, shared], tmp_path, ["4", "7"], 60) == ["second-gpu", "shared"]
    assert seen == ["7", "4,7"]


def test_runs_are_made_and_gone_on_with(tmp_path, capfd):
    out = tmp_path / "again"
    run = Again("tiny", tuple(shlex.split(PREDICTED)), 1, 9.0)
    # No time is left for any; two GPUs are not here.
    assert make([run], out, ["0"], 1) == ["tiny"]
    assert make([Again("pair", run.words, 2, 9.0)], out, ["0"], 60) == ["pair"]
    said = capfd.readouterr().out
    assert "not begun: no time is left" in said
    assert "not begun: asks for 2 GPUs" in said

    assert make([run], out, ["0", "1"], 60) == []
    assert "tiny                 whole, " in capfd.readouterr().out
    results = out / "tiny" / "results.jsonl"
    rows = results.read_text().splitlines()
    assert len(rows) == 4
    # Killed amid a line.
    results.write_text("\n".join(rows[:3]) + "\n" + rows[3][:40])
    assert whole_run(out / "tiny") is None
    assert make([run], out, ["0"], 60) == []
    assert results.read_text().splitlines()[:3] == rows[:3]
    (out / "tiny" / "manifest.json").write_text("{")
    assert whole_run(out / "tiny") is None


def test_a_run_of_another_gpu_has_its_name_without_the_gpu_in_the_folder(tmp_path, monkeypatch):
    mla, second = (Sources(ROOT)[name] for name in ("mla", "second-gpu"))
    again = [copy_of(of, "leanbench sweep mla", f"h100/{of.name}") for of in (mla, second)]
    of_two, of_one = runs_of(again, None)
    assert [(run.name, run.folder, run.gpus) for run in (of_two, of_one)] == [
        ("h100/second-gpu", "second-gpu", 2),
        ("h100/mla", "mla", 1),
    ]
    seen: list[tuple[str, str]] = []

    def run_within(_limit_s: float, words: list[str], _folder: Path, own: dict[str, str]) -> Ended:
        seen.append((words[words.index("--name") + 1], own["CUDA_VISIBLE_DEVICES"]))
        return Ended(0, "", 0.0)

    monkeypatch.setattr(gpu_runs, "run_within", run_within)
    assert make([of_two, of_one], tmp_path, ["4", "7"], 60) == ["h100/second-gpu", "h100/mla"]
    assert seen[0] == ("second-gpu", "7")
    assert [name for name, _ in seen] == ["second-gpu", "mla"]
    same = r"h100/mla and mla are both .*/mla: give each its own --out"
    with pytest.raises(SystemExit, match=same):
        make([of_one, *runs_of([mla], None)], tmp_path, ["4"], 60)


@pytest.mark.parametrize(
    ("products", "gpus"),
    [
        ([], {"h200", "h100-sxm"}),
        (["NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3"], {"h100-sxm"}),
        (["NVIDIA A100-SXM4-80GB", "NVIDIA H200"], {"h200"}),
        (["NVIDIA L4"], {"h200", "h100-sxm"}),
    ],
)
def test_without_names_the_runs_are_those_of_the_gpu_here(products, gpus, monkeypatch):
    here = [SimpleNamespace(product=product) for product in products]
    monkeypatch.setattr(gpu_runs, "local_gpus", lambda: here)
    sources = Sources(ROOT)
    pair = {name: copy_of(sources["mla"], "leanbench sweep", name) for name in ("a", "h100/a")}
    evidence = SimpleNamespace(sources=sources)
    monkeypatch.setattr(sources, "by_name", pair)
    monkeypatch.setattr(gpu_runs, "Evidence", lambda _: evidence)
    asked = {source.name for source in gpu_runs._chosen(())}
    assert asked == {{"h200": "a", "h100-sxm": "h100/a"}[gpu] for gpu in gpus}


def test_whole_runs_that_were_measured_are_placed(tmp_path, monkeypatch):
    out, root = tmp_path / "again", tmp_path / "root"
    (root / FOLDER).mkdir(parents=True)
    # The committed run stands for one that was just made.
    (own,) = Sources(ROOT)["mla"].kernels
    monkeypatch.setattr(gpu_runs, "kernels_hash", lambda *_: own)
    with pytest.raises(SystemExit, match=r"there is no run in .*again: make one, or give"):
        place(out, (), root)
    for name in ("new", "of H100", "predicted", "of another GPU", "unfinished", "damaged"):
        shutil.copytree(ROOT / FOLDER / "mla", out / name)

    def rewrite(name: str, **fields: object) -> None:
        path = out / name / "manifest.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

    command = "leanbench sweep mla --max-samples 100 --out /x --name y --quiet --require-gpu"
    rewrite("new", command=command)
    rewrite("predicted", source="predicted")
    rewrite("of another GPU", gpu={"name": "a100"})
    rewrite("of H100", gpu={"name": "h100-sxm"})
    results = out / "unfinished" / "results.jsonl"
    results.write_text("".join(results.read_text().splitlines(keepends=True)[:-1]))
    (out / "damaged" / "manifest.json").write_text("{")
    declare = "name it in reports/evidence.toml, and its seed where it was drawn"
    assert place(out, (), root) == [
        "damaged is not whole: left",
        f"new placed, new: {declare}",
        f"h100/of H100 placed, new: {declare}",
        "of another GPU was measured on a100, not measured on h200 or h100-sxm: left",
        "predicted was predicted on h200, not measured on h200 or h100-sxm: left",
        "unfinished is not whole: left",
    ]
    assert [path.name for path in (root / FOLDER).iterdir()] == ["new"]
    assert [path.name for path in (root / "reports" / "h100").iterdir()] == ["of H100"]
    placed = root / FOLDER / "new"
    assert (
        json.loads((placed / "manifest.json").read_text())["command"] == command.split(" --out")[0]
    )
    for name in ("results.jsonl", "samples.jsonl.gz"):
        assert (placed / name).read_bytes() == (ROOT / FOLDER / "mla" / name).read_bytes()
    assert place(out, ["new", "h100/of H100"], root) == ["new placed", "h100/of H100 placed"]
    with pytest.raises(SystemExit, match="there is no run 'other' in "):
        place(out, ["other"], root)

    monkeypatch.setattr(gpu_runs, "kernels_hash", lambda *_: "0" * 12)
    assert place(out, ["new"], root) == ["new is of other kernels than these: left"]
    with pytest.raises(SystemExit, match=r"again/new is of other kernels: move it away, or give"):
        make([Again("new", ("sweep", "mla"), 1, 9.0)], out, ["0"], 60)


def test_a_run_that_is_not_there_is_named():
    with pytest.raises(SystemExit, match="there is no run reports/h200/nothing: take names of"):
        gpu_runs.main(["nothing", "--list"])
    with pytest.raises(SystemExit, match="there is no run reports/h200/trace: take names of"):
        gpu_runs.main(["trace", "--list"])
    there_is_none = r"there is no run reports/h100/gone: take names of reports/h100/README\.md"
    with pytest.raises(SystemExit, match=there_is_none):
        gpu_runs.main(["h100/gone", "--list"])
