"""Remade published runs: commands, seeds and folders. They are predicted, without a GPU."""

import json
import shlex
import shutil
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import gpu_runs
import pytest
from gpu_runs import Again, kernels_of, make, place, published, runs_of, whole_run
from processes import Ended

ROOT = Path(__file__).resolve().parents[2]
MLA = ROOT / "reports" / "h200" / "mla"
PREDICTED = "sweep --heads 8 --context 1k,2k --head-dim 64 --kernels fa2,lean --gpu h200"


def copied(folder: Path, name: str, run: Path = MLA, **fields: object) -> Path:
    """Copy a run, with other fields in its manifest."""
    path = folder / name
    shutil.copytree(run, path)
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, **fields}))
    return path


def test_every_published_run_can_be_made_again(monkeypatch):
    monkeypatch.setattr(gpu_runs, "read_run", cache(gpu_runs.read_run))
    runs = published()
    assert {"h200/mla", "h100/mla"} <= set(runs)
    again = runs_of(runs.values(), 5)
    assert len(again) == len(runs)
    assert all(run.words[0] in ("sweep", "decode") for run in again)
    assert all(whole_run(folder) for folder in runs.values())


def test_a_run_is_made_by_the_command_in_its_manifest(tmp_path):
    where = "--out /somewhere/else --name other --no-report --quiet --resume --budget 90s"
    append = ROOT / "reports/h200/append"
    moved = copied(tmp_path, "append", append, command=f"leanbench sweep append {where} --ci 1%")
    variants = ROOT / "reports/h200/variants"
    first, second, third = runs_of([variants, moved, ROOT / "reports/h200/scaling"], None)
    # Several GPUs first, then the longest.
    assert (first.name, first.gpus) == ("scaling", 4)
    command = json.loads((variants / "manifest.json").read_text())["command"]
    assert (second.name, second.gpus) == ("variants", 1)
    assert second.words == tuple(shlex.split(command)[1:])
    assert (third.name, third.words) == ("append", ("sweep", "append", "--ci", "1%"))
    assert second.expected_s > third.expected_s > gpu_runs.START_S


def test_drawn_runs_get_a_seed_each():
    drawn = [folder for name, folder in published().items() if "serving-" in name]
    runs = {run.name: run.words for run in runs_of(drawn, 5)}
    assert sorted(runs) == [f"serving-{seed}" for seed in range(5, 5 + len(drawn))]
    for name, words in runs.items():
        assert words[words.index("--seed") + 1] == name.removeprefix("serving-")
    with pytest.raises(SystemExit):
        runs_of(drawn, None)


def test_a_sweep_that_is_drawn_now_gets_a_seed(tmp_path):
    """The command is from before. A folder whose name ends with no seed keeps it for documents."""
    words = {
        "mla": ("sweep", "mla", "--ci", "1%"),
        "fewer": ("sweep", "fp8", "--draw", "9"),
        "own-200": ("sweep", "own.toml", "--seed", "3"),
    }
    folders = [
        copied(tmp_path, name, command=shlex.join(["leanbench", *command]))
        for name, command in words.items()
    ]
    assert {run.name: run.words for run in runs_of(folders, 5)} == {
        "mla": (*words["mla"], "--seed", "5"),
        "fewer": (*words["fewer"], "--seed", "6"),
        "own-200": ("sweep", "own.toml", "--seed", "7"),
    }
    with pytest.raises(SystemExit):
        runs_of(folders[:1], None)


def test_a_run_of_several_gpus_gets_them(tmp_path, monkeypatch, capsys):
    seen: list[str] = []

    def run_within(_limit_s: float, words: list[str], _folder: Path, own: dict[str, str]) -> Ended:
        assert "--require-gpu" in words
        seen.append(own["CUDA_VISIBLE_DEVICES"])
        return Ended(0, "", 0.0)

    monkeypatch.setattr(gpu_runs, "run_within", run_within)
    pair, one = Again("pair", ("sweep", "scaling"), 2, 9.0), Again("one", ("sweep", "mla"), 1, 9.0)
    assert make([one, pair], tmp_path, ["4", "7"], 60) == ["one", "pair"]
    assert seen[0] == "4,7"
    assert seen[1] in ("4", "7")
    assert make([pair], tmp_path, ["4"], 60) == ["pair"]
    assert len(seen) == 2
    assert make([one], tmp_path, ["4"], 1) == ["one"]
    assert len(seen) == 2
    assert capsys.readouterr().out.count("not started") == 2


@pytest.mark.deep
def test_runs_are_made_and_gone_on_with(tmp_path, capfd):
    out = tmp_path / "again"
    run = Again("tiny", tuple(shlex.split(PREDICTED)), 1, 9.0)
    assert make([run], out, ["0", "1"], 60) == []
    assert "tiny                 whole, " in capfd.readouterr().out
    results = out / "tiny" / "results.jsonl"
    rows = results.read_text().splitlines()
    assert len(rows) == 4
    # Killed within a line.
    results.write_text("\n".join(rows[:3]) + "\n" + rows[3][:40])
    assert whole_run(out / "tiny") is None
    assert make([run], out, ["0"], 60) == []
    assert results.read_text().splitlines()[:3] == rows[:3]
    (out / "tiny" / "manifest.json").write_text("{")
    assert whole_run(out / "tiny") is None


@pytest.mark.deep
@pytest.mark.parametrize(
    ("products", "gpus"),
    [(["NVIDIA L4"], {"h200", "h100"}), (["NVIDIA A100-SXM4-80GB", "NVIDIA H200"], {"h200"})],
)
def test_without_names_the_runs_are_those_of_the_gpu_here(products, gpus, monkeypatch):
    here = [SimpleNamespace(product=product) for product in products]
    monkeypatch.setattr(gpu_runs, "local_gpus", lambda: here)
    monkeypatch.setattr(gpu_runs, "kernels_hash", lambda: "0" * 12)
    chosen = list(gpu_runs._chosen(()))
    assert {folder.parent.name for folder in chosen} == gpus
    (kernels,) = kernels_of(MLA)
    monkeypatch.setattr(gpu_runs, "kernels_hash", lambda: kernels)
    assert all(kernels_of(folder) != {kernels} for folder in gpu_runs._chosen(()))
    assert [folder.name for folder in gpu_runs._chosen(["mla"])] == ["mla"] * len(gpus)


def test_finished_runs_that_were_measured_are_placed(tmp_path, monkeypatch):
    out, root = tmp_path / "again", tmp_path / "root"
    (kernels,) = kernels_of(MLA)
    monkeypatch.setattr(gpu_runs, "kernels_hash", lambda *_: kernels)
    with pytest.raises(SystemExit):
        place(out, root)
    command = "leanbench sweep mla --max-samples 100 --out /x --name y --quiet --require-gpu"
    copied(out, "new", command=command)
    copied(out, "of H100", gpu={"name": "h100-sxm"})
    copied(out, "predicted", source="predicted")
    copied(out, "elsewhere", gpu={"name": "a100"})
    results = copied(out, "unfinished") / "results.jsonl"
    results.write_text("".join(results.read_text().splitlines(keepends=True)[:-1]))
    (copied(out, "damaged") / "manifest.json").write_text("{")
    assert place(out, root) == [
        "damaged is unfinished: left",
        "elsewhere was measured on a100, not measured on h200 or h100-sxm: left",
        "reports/h200/new placed",
        "reports/h100/of H100 placed",
        "predicted was predicted on h200, not measured on h200 or h100-sxm: left",
        "unfinished is unfinished: left",
    ]
    assert [path.name for path in (root / "reports" / "h200").iterdir()] == ["new"]
    assert [path.name for path in (root / "reports" / "h100").iterdir()] == ["of H100"]
    placed = root / "reports" / "h200" / "new"
    stored = json.loads((placed / "manifest.json").read_text())["command"]
    assert stored == command.split(" --out")[0]
    for name in ("results.jsonl", "samples.jsonl.gz"):
        assert (placed / name).read_bytes() == (MLA / name).read_bytes()

    monkeypatch.setattr(gpu_runs, "kernels_hash", lambda *_: "0" * 12)
    assert "new is of other kernels than these: left" in place(out, root)
    with pytest.raises(SystemExit):
        make([Again("new", ("sweep", "mla"), 1, 9.0)], out, ["0"], 60)


@pytest.mark.parametrize("name", ["nothing", "trace", "h100/gone"])
def test_a_run_that_is_not_there_is_refused(name):
    with pytest.raises(SystemExit) as refused:
        gpu_runs.main([name, "--list"])
    assert repr(name) in str(refused.value)
    assert "h200/mla" in str(refused.value)
