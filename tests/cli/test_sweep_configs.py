"""Where launch settings come from, from the command line to the rows and the summary."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from cli.running import invoke
from timed_examples import H200, OF_TRITON, PROBLEM, TRITON, timed
from typer.testing import Result

from leanbench.configs.store import save
from leanbench.records.directory import read_rows
from leanbench.records.manifest import read_manifest
from leanbench.records.row import Row

OVERRIDE = (
    "lean:implementation=triton,tile_tokens=64,num_warps=4,num_stages=2,"
    "ctas_per_sm=1,min_tiles_per_cta=1,align_grid=false"
)
SWEEP = "--heads 32/8 --context 4k,8k --kernels lean,fa2 --gpu h200 --no-report".split()


@pytest.fixture(autouse=True)
def empty(home: Path, no_gpu: None) -> None:
    """Remove GPUs and timings, also for workers."""


def sweep(tmp_path: Path, *words: str) -> Result:
    return invoke("sweep", *SWEEP, "--out", str(tmp_path / "runs"), *words)


def swept(tmp_path: Path, name: str, *words: str) -> Result:
    result = sweep(tmp_path, "--name", name, "--quiet", *words)
    assert result.exit_code == 0, result.output
    return result


def by_cell(tmp_path: Path, name: str) -> dict[tuple[str, int], Row]:
    rows = read_rows(tmp_path / "runs" / name)
    return {(row.kernel, row.problem["context"]): row for row in rows}


def test_a_dry_run_says_how_settings_are_chosen(tmp_path):
    result = sweep(tmp_path, "--dry-run", "--configs", "heuristic", "--config", OVERRIDE)
    lines = [line.split() for line in result.stdout.splitlines()]
    cells = [words for words in lines if words[:1] in (["lean"], ["fa2"])]
    chosen = {kernel: {"given", "heuristic"} & {*words} for kernel, *words in cells}
    assert (len(cells), chosen) == (4, {"lean": {"given"}, "fa2": {"heuristic"}})


@pytest.mark.deep
def test_timed_settings_reach_the_rows_and_the_summary(tmp_path):
    # The heuristic of `lean` itself depends on what is installed.
    kernels = ("--kernels", "lean_triton,fa2")
    heuristic = TRITON.default_config(PROBLEM, H200)
    save(H200, [timed(10.0, 9.0, configs=[heuristic, OF_TRITON])])
    result = sweep(tmp_path, *kernels, "--name", "timed")
    assert result.exit_code == 0, result.output
    cells = by_cell(tmp_path, "timed")
    where = "timed 2026-11-28 on NVIDIA H200, yours"
    chosen = {key: (row.config, row.config_choice, row.config_reason) for key, row in cells.items()}
    assert chosen["lean_triton", 4096] == (
        OF_TRITON.to_dict(),
        "tuned",
        f"{where}: 8 tiles d128 g4 2 B HND, 4096 tokens",
    )
    assert chosen["lean_triton", 8192][1] == "heuristic"
    assert str(chosen["lean_triton", 8192][2]).startswith("not timed here")
    assert [chosen["fa2", context][1:] for context in (4096, 8192)] == [("heuristic", None)] * 2
    said = f"lean_triton: 1 of 2 cells with tuned configs ({where}), 1 by the heuristic."
    assert said in result.stdout.splitlines()
    # The heuristic is still to be had, under its own cells.
    swept(tmp_path, "heuristic", *kernels, "--configs", "heuristic")
    plain = by_cell(tmp_path, "heuristic")
    assert plain["lean_triton", 4096].config == heuristic.to_dict()
    assert plain["lean_triton", 4096].config_reason == "the heuristic was asked for"
    assert not {row.cell for row in plain.values()} & {row.cell for row in cells.values()}


def test_given_settings_are_run_and_resumed(tmp_path, monkeypatch):
    # Workers have the shipped timings.
    monkeypatch.setenv("LEANBENCH_CONFIGS", "off")
    fa2 = "fa2:tile_tokens=64,num_warps=4,num_stages=2"
    assert sweep(tmp_path, "--config", OVERRIDE, "--config", fa2, "--name", "given").exit_code == 0
    cells = by_cell(tmp_path, "given")
    assert {row.config_choice for row in cells.values()} == {"given"}
    config = {"implementation": "triton", "tile_tokens": 64, "num_warps": 4, "num_stages": 2}
    assert cells["fa2", 8192].config == config
    more = {"ctas_per_sm": 1, "min_tiles_per_cta": 1, "align_grid": False}
    assert cells["lean", 4096].config == config | more
    manifest = read_manifest(tmp_path / "runs" / "given")
    assert manifest["sweep"]["config"]["fa2"] == cells["fa2", 4096].config
    # The command can be repeated as it stands there.
    again = shlex.split(manifest["command"])[1:]
    assert again.count("--config") == 2
    results = tmp_path / "runs" / "given" / "results.jsonl"
    lines = results.read_text().splitlines(keepends=True)
    results.write_text("".join(lines[:-1]))
    resumed = invoke(*again, "--name", "given", "--resume")
    assert resumed.exit_code == 0, resumed.output
    assert "3 of 4 cells are done, 1 are left." in resumed.stderr
    assert [row.cell for row in read_rows(tmp_path / "runs" / "given")] == manifest["cells"]
    # Other settings are other cells.
    refused = sweep(tmp_path, "--config", fa2, "--name", "given", "--resume")
    assert "has other cells (" in refused.stderr


@pytest.mark.deep
def test_cells_are_left_to_the_kernels_and_settings_of_the_rows(tmp_path, monkeypatch):
    monkeypatch.setenv("LEANBENCH_CONFIGS", "off")
    swept(tmp_path, "mine")
    path = tmp_path / "runs" / "mine"
    [environment] = read_manifest(path)["environments"].values()
    own = environment["kernels"]
    results = path / "results.jsonl"
    whole = results.read_text()
    first = whole.splitlines(keepends=True)[0]

    def resumed(rows: str, environment: dict[str, Any]) -> Result:
        results.write_text(rows)
        manifest = read_manifest(path)
        manifest["environments"] = dict.fromkeys(manifest["environments"], environment)
        (path / "manifest.json").write_text(json.dumps(manifest))
        return sweep(tmp_path, "--name", "mine", "--quiet", "--resume")

    assert resumed(first, environment).exit_code == 0
    for changed, words in (
        ({"kernels": "0123456789ab"}, f"kernels 0123456789ab, this command uses {own}"),
        ({"settings": "ba9876543210"}, "settings ba9876543210, this command uses heur"),
        ({"leanbench": "0.0.1"}, "leanbench 0.0.1, this command uses "),
    ):
        refused = resumed(first, environment | changed)
        assert refused.exit_code == 2
        [error] = [line for line in refused.stderr.splitlines() if line.startswith("Error: ")]
        assert error.startswith(f"Error: {path} has rows of {words}")
        assert error.endswith(": start a new run with another --name")
        assert results.read_text() == first
    # Another driver finishes what one began, and a run without cells that are left is no mixture.
    assert resumed(first, environment | {"driver": "1.2"}).exit_code == 0
    # A run of an older leanbench may lack what is compared.
    del environment["settings"]
    assert resumed(first, environment).exit_code == 0
    assert resumed(whole, environment | {"kernels": "0123456789ab"}).exit_code == 0


@pytest.mark.deep
@pytest.mark.parametrize(
    "words",
    [("--kernels", "fa2"), ("--kernels", "lean", "--config", OVERRIDE)],
)
def test_settings_that_no_cell_uses_do_not_keep_a_run_from_its_end(tmp_path, words):
    swept(tmp_path, "mine", *words)
    path = tmp_path / "runs" / "mine"
    results = path / "results.jsonl"
    results.write_text(results.read_text().splitlines(keepends=True)[0])
    save(H200, [timed(10.0, 8.0)])
    swept(tmp_path, "mine", "--resume", *words)
