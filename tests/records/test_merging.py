"""Runs of shards put together: every cell once, every row as it was taken, nothing else mixed."""

import contextlib
import gzip
import json
import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from example_rows import row

from leanbench.core.errors import UserError
from leanbench.records.boards import Board
from leanbench.records.directory import RunDirectory, read_rows
from leanbench.records.manifest import read_manifest
from leanbench.records.merging import merge_runs
from leanbench.records.samples import SAMPLES, Samples, read_samples

CELLS = ["one", "two", "three", "four"]
GPU = {"name": "h200", "product": "NVIDIA H200", "boost_clock_mhz": 1980}
BOARDS = [
    Board("measured", GPU, {"gpu_uuid": f"GPU-{number}", "kernels": "aa"}, 63.0 + number)
    for number in (1, 2)
]
ASKED = {
    "command": "leanbench sweep s --shard 1/2 --quiet",
    "source": "measured",
    "gpu": GPU,
    "sweep": {"name": "s", "kernels": ["lean"]},
    "measure": {"cache": "cold"},
    "environments": {},
}
MakeShard = Callable[..., Path]


@pytest.fixture
def shard(tmp_path) -> MakeShard:
    def make(index: int, *, board: Board | None = None, rows: int = 2, **asked: Any) -> Path:
        own = CELLS[index - 1 :: 2]
        part = {"index": index, "count": 2, "cells": CELLS}
        manifest = {**deepcopy(ASKED), "cells": own, "shard": part, **asked}
        board = board or BOARDS[index - 1]
        path = tmp_path / f"s{index}"
        with RunDirectory.create(path, manifest) as run:
            run.add_board(board)
            for cell in own[:rows]:
                us = [float(index)]
                samples = Samples(cell=cell, samples_us=us, rounds=[0], sm_clock_mhz=[1980])
                fields = {"source": "measured", "environment": board.key}
                run.append(row(cell, **fields, run_id=run.manifest["id"]), samples)
        (path / "worker.log").write_text(f"log of {index}\n")
        return path

    return make


def test_two_shards_are_one_run_in_the_order_of_the_sweep(tmp_path, shard):
    parts = [shard(2), shard(1)]
    assert merge_runs(parts, tmp_path / "both") == []
    manifest = read_manifest(tmp_path / "both")
    rows = read_rows(tmp_path / "both")
    assert [own.cell for own in rows] == manifest["cells"] == CELLS
    by_cell = {own.cell: own for part in parts for own in read_rows(part)}
    assert rows == [by_cell[cell] for cell in CELLS]
    assert [own.environment for own in rows] == [board.key for board in BOARDS] * 2
    assert manifest["environments"] == {board.key: board.environment for board in BOARDS}
    assert manifest["boards"][BOARDS[1].key] == {"gpu": GPU, "calibration_us": 65.0}
    samples = read_samples(tmp_path / "both")
    assert [samples[cell].samples_us for cell in CELLS] == [[1.0], [2.0]] * 2
    assert (manifest["name"], manifest["command"]) == ("both", "leanbench sweep s --quiet")
    origins = [read_manifest(part)["id"] for part in parts]
    merged = [(own["id"], own["shard"]) for own in manifest["merged"]]
    assert merged == [(origins[0], "2/2"), (origins[1], "1/2")]
    assert "shard" not in manifest
    assert (tmp_path / "both" / "worker.log").read_text() == "log of 2\nlog of 1\n"
    assert not list(tmp_path.glob(".*"))


def _other(**environment: Any) -> Board:
    return Board("measured", GPU, {**BOARDS[1].environment, **environment}, 65.0)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"source": "predicted"}, "has another source than .*s1 .predicted, not measured."),
        ({"sweep": {"name": "s", "kernels": ["fa2"]}}, "request than .*s1 .kernels.: merge"),
        ({"measure": {"cache": "warm"}}, "another settings of measuring than .*s1 .cache."),
        (
            {"shard": {"index": 2, "count": 2, "cells": CELLS[:2]}},
            "has other cells than .*s1 .2 and 4 in all.",
        ),
        ({"board": _other(kernels="bb")}, "kernels is bb, not aa as in .*: run its cells again"),
        ({"board": _other(settings="ff")}, "settings is ff, not None"),
        ({"board": Board("measured", {**GPU, "name": "h100"}, {}, 65.0)}, "GPU is h100, not h200"),
        ({"board": _other(driver="570")}, "driver is 570, not None .*or add --mix-boards"),
        (
            {"board": Board("measured", GPU, BOARDS[1].environment, 70.0)},
            "the calibration cell takes 70.0 us, not 64.0, 5% apart at most",
        ),
        ({"rows": 1}, "1 of 4 cells have no row, such as four: finish .*s2 with --resume"),
    ],
)
def test_what_differs_or_lacks_is_refused(tmp_path, shard, other, words):
    parts = [shard(1), shard(2, **other)]
    with pytest.raises(UserError, match=words) as refused:
        merge_runs(parts, tmp_path / "both")
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "both").exists()


def test_boards_that_differ_may_be_mixed_knowingly(tmp_path, shard):
    parts = [shard(1), shard(2, board=_other(driver="570"))]
    (difference,) = merge_runs(parts, tmp_path / "both", mix_boards=True)
    assert "driver is 570, not None" in difference
    with pytest.raises(UserError, match="kernels is bb"):
        merge_runs([parts[0], _relabelled(parts[1])], tmp_path / "more", mix_boards=True)


def _relabelled(path: Path) -> Path:
    manifest = json.loads((path / "manifest.json").read_text())
    for environment in manifest["environments"].values():
        environment["kernels"] = "bb"
    (path / "manifest.json").write_text(json.dumps(manifest))
    return path


def _of_several(index: int, count: int, *, nvlinks: int = 18) -> Board:
    """Return a board of `count` GPUs. Links after the first have `nvlinks`."""
    pairs = combinations(range(count), 2)
    links = [{"first": a, "second": b, "nvlinks": nvlinks if b > 1 else 18} for a, b in pairs]
    several = {
        "gpu_products": ["NVIDIA H200"] * count,
        "gpu_uuids": [f"GPU-{index}-{rank}" for rank in range(count)],
        "gpu_links": links,
    }
    return Board("measured", GPU, {**BOARDS[index - 1].environment, **several}, 64.0)


@pytest.mark.parametrize("counts", [(2, 4), (4, 2), (1, 8), (2, 2)])
def test_shards_whose_problems_are_for_other_numbers_of_gpus_are_one_run(tmp_path, shard, counts):
    pairs = enumerate(counts, 1)
    boards = [_of_several(i, count) if count > 1 else BOARDS[i - 1] for i, count in pairs]
    parts = [shard(index, board=board) for index, board in enumerate(boards, 1)]
    assert merge_runs(parts, tmp_path / "both") == []
    manifest = read_manifest(tmp_path / "both")
    assert manifest["environments"] == {board.key: board.environment for board in boards}
    keys = [own.environment for own in read_rows(tmp_path / "both")]
    assert keys == [board.key for board in boards] * 2


def test_gpus_that_both_shards_have_must_be_linked_alike(tmp_path, shard):
    parts = [shard(1, board=_of_several(1, 3)), shard(2, board=_of_several(2, 4, nvlinks=4))]
    with pytest.raises(UserError, match=r"gpu_links is .*'second': 2.* or add --mix-boards"):
        merge_runs(parts, tmp_path / "both")


@pytest.mark.parametrize("links", [None, 5, ["a"], [{}], [{"second": "b"}]])
def test_links_that_somebody_wrote_are_no_traceback(tmp_path, shard, links):
    board = _of_several(2, 4)
    parts = [
        shard(1, board=_of_several(1, 2)),
        shard(2, board=replace(board, environment={**board.environment, "gpu_links": links})),
    ]
    with contextlib.suppress(UserError):
        merge_runs(parts, tmp_path / "both")


def test_a_cell_of_two_runs_and_a_run_given_twice_are_refused(tmp_path, shard):
    first = shard(1)
    with pytest.raises(UserError, match="is given twice: name each run once"):
        merge_runs([first, first], tmp_path / "both")
    again = first.rename(tmp_path / "s1-again")
    with pytest.raises(UserError, match=r"cell one has a row in .*s1-again and in .*s1: leave one"):
        merge_runs([again, shard(1)], tmp_path / "both")
    with pytest.raises(UserError, match="2 of 4 cells have no row, such as two: name the runs"):
        merge_runs([again], tmp_path / "both")
    (tmp_path / "both").mkdir()
    with pytest.raises(UserError, match="both already exists: choose another --out"):
        merge_runs([again, shard(2)], tmp_path / "both")


@pytest.mark.parametrize(
    "tail", [b"garbage", gzip.compress(b"...")[:-3]], ids=["not-gzip", "cut-off"]
)
def test_samples_that_are_cut_off_are_refused_and_nothing_is_written(tmp_path, shard, tail):
    parts = [shard(1), shard(2)]
    path = parts[1] / SAMPLES
    whole = path.stat().st_size
    path.write_bytes(path.read_bytes() + tail)
    damaged = f"{path} is damaged after {whole} of its {whole + len(tail)} bytes: put back a copy"
    with pytest.raises(UserError, match=re.escape(damaged)):
        merge_runs(parts, tmp_path / "both")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s1", "s2"]


@pytest.mark.parametrize(
    "content", [b"garbage", gzip.compress(b"no samples\n")], ids=["not-gzip", "no-samples"]
)
def test_damaged_samples_are_refused_and_nothing_is_written(tmp_path, shard, content):
    parts = [shard(1), shard(2)]
    (parts[1] / SAMPLES).write_bytes(content)
    damaged = r"s2/samples\.jsonl\.gz is damaged: put back a copy of it, or remove it"
    with pytest.raises(UserError, match=damaged):
        merge_runs(parts, tmp_path / "both")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s1", "s2"]
    (parts[1] / SAMPLES).unlink()
    merge_runs(parts, tmp_path / "both")
    assert read_samples(tmp_path / "both").keys() == {own.cell for own in read_rows(parts[0])}
