"""Files that are damaged or were written by an enemy: a report or a sentence, and no text of theirs
becomes markup.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
from depth import deep
from hostile import MARKUP, VALUES, changed, damaged_json, share, torn, within_limits
from hypothesis import given
from hypothesis import strategies as st
from tuned_examples import H200, LEAN, family, tuned, tuned_configs
from tuned_examples import PROBLEM as TUNED
from typer.testing import CliRunner

from leanbench.cli.main import app
from leanbench.cli.sweep_tables import show_ending
from leanbench.configs import store
from leanbench.core.errors import UserError
from leanbench.core.files import FileFault, UnreadableFile
from leanbench.core.problem import AttentionProblem
from leanbench.formats.definition import definition_of
from leanbench.formats.safetensors import write_int32
from leanbench.formats.workload import blob_path, index_tensors, workload_of
from leanbench.records.directory import RunDirectory, newest_run
from leanbench.records.merging import merge_runs
from leanbench.records.reading import read_run
from leanbench.records.row import SCHEMA_VERSION, Row, read_row
from leanbench.records.samples import Samples, pack, read_samples, whole_length
from leanbench.report import write_report
from leanbench.report.compare.core import compare
from leanbench.report.compare.document import json_text
from leanbench.run.cells import expand
from leanbench.run.sweep_file import load_sweep

PROBLEM = AttentionProblem(2, 32, 8, (4096, 512), 128)

PLAIN = AttentionProblem(1, 32, 8, 64, 128).to_dict()


def full_row(name: str, latency_us: float) -> dict[str, Any]:
    """A row with a value in every field."""
    by_type: list[tuple[type, Any]] = [
        (float, 1.5),
        (int, 30),
        (list, ["a", "b"]),
        (str, "said of the row"),
        (dict, {}),
    ]
    row: dict[str, Any] = {}
    for field, info in Row.model_fields.items():
        kinds = str(
            info.annotation
            if get_args(info.annotation)
            else getattr(info.annotation, "__name__", "")
        )
        row[field] = next((value for kind, value in by_type if kind.__name__ in kinds), None)
    row |= {
        "cell": name,
        "kernel": name,
        "problem": PROBLEM.to_dict(),
        "latency_us": latency_us,
        "cache": "cold",
    }
    row |= {
        "source": "measured",
        "status": "ok",
        "kv_bytes": PROBLEM.kv_bytes,
        "environment": "e",
        "reason": None,
    }
    return row | {
        "config_choice": "heuristic",
        "config": {"tile_tokens": 64},
        "time": "2026-01-02T03:04:05+00:00",
    }


ROWS = [
    full_row("lean", 10.0),
    full_row("fa2", 20.0),
    {**full_row("fixed_split", 30.0), "status": "noisy"},
]
MANIFEST: dict[str, Any] = {
    "schema_version": SCHEMA_VERSION,
    "name": "r",
    "created": "2026-01-02T03:04:05.123456+00:00",
    "command": "leanbench sweep",
    "source": "measured",
    "sweep": {"name": "s"},
    "measure": {"cache": "cold", "effort": {"relative_ci": 0.005}},
    "gpu": {"name": "h200", "product": "NVIDIA H200", "sms": 132},
    "environments": {"e": {"torch": "2", "driver": "580", "gpu_product": "NVIDIA H200"}},
    "cells": ["lean", "fa2", "fixed_split"],
}
SAMPLES = b"".join(
    pack(
        Samples(
            cell=row["cell"],
            samples_us=[9.0, 10.0, 11.0] * 4,
            rounds=[*range(12)],
            sm_clock_mhz=[None] * 12,
        )
    )
    for row in ROWS
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """One folder for all inputs of a module."""
    return tmp_path_factory.mktemp("runs") / "r"


def write(run: Path, manifest: Any = MANIFEST, rows: Any = ROWS, samples: bytes = SAMPLES) -> None:
    run.mkdir(exist_ok=True)
    (run / "manifest.json").write_bytes(
        manifest if isinstance(manifest, bytes) else json.dumps(manifest).encode()
    )
    lines = (
        rows
        if isinstance(rows, bytes)
        else b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    )
    (run / "results.jsonl").write_bytes(lines)
    (run / "samples.jsonl.gz").write_bytes(samples)


def read_by(run: Path, *readers: Callable[[Path], Any]) -> None:
    """UserError is an answer."""
    for read in readers:
        with contextlib.suppress(UserError):
            read(run)


def _as_report(run: Path) -> None:
    html, csv = write_report(run, run.with_name("report"), ["html", "csv"])
    assert_no_markup(html.read_text(encoding="utf-8"))
    assert csv.stat().st_size > 100


def _as_compare(run: Path) -> None:
    json_text(compare(f"{run}:lean", f"{run}:fa2", margin=0.01, kernels=[]))


def _as_table(run: Path) -> None:
    show_ending(read_run(run))


def _as_resume(run: Path) -> None:
    newest_run(run.parent, "s", MANIFEST["cells"])
    content = (run / "results.jsonl").read_bytes()
    with RunDirectory.resume(run, MANIFEST) as directory:
        assert directory.finished <= {
            json.loads(line)["cell"] for line in content.split(b"\n") if line.strip()
        }


#: Scripts of the page itself: one a part.
SCRIPTS = 7


def assert_no_markup(html: str) -> None:
    assert "<script>alert" not in html
    assert "<img" not in html
    assert len(re.findall("<script", html)) == html.count("</script>") == SCRIPTS


#: As `report`, `compare` and `sweep` at its end do.
SHOWN = (_as_report, _as_compare, _as_table)


def write_damaged(run: Path, lines: list[bytes], last_is_whole: bool) -> None:
    rows = [json.dumps(row).encode() for row in ROWS]
    write(run, rows=b"\n".join([rows[0], *lines, *rows[1:]]) + b"\n" * last_is_whole)


@share(0.10)
@given(st.lists(damaged_json(ROWS[0]), min_size=1, max_size=2), st.booleans())
def test_any_results_file_is_rows_or_a_sentence(folder, lines, last_is_whole):
    write_damaged(folder, lines, last_is_whole)
    with within_limits():
        read_by(folder, read_run, _as_resume)


@share(0.01)
@given(changed(ROWS[0]), changed(ROWS[1]))
def test_any_rows_are_a_report_or_a_sentence(folder, lean, fa2):
    write(folder, rows=[ROWS[2], lean, fa2])
    with within_limits():
        read_by(folder, *SHOWN)


@pytest.mark.parametrize(
    "value", [1e300, *map(deep, (0, None, "", -1, 1e-300, -1e300, 2**63 - 1, [], {}))]
)
def test_every_field_may_be_out_of_proportion(folder, value):
    """Of either kernel, in a run with a problem for each field, which has this value."""
    fields = [name for name in Row.model_fields if name not in ("cell", "problem", "kernel")]
    for kernel in ("lean", "fa2"):
        changed_rows = [
            {
                **full_row(name, 10.0),
                "cell": field + name,
                "problem": {**PLAIN, "context": 64 + number},
            }
            | ({field: value} if name == kernel else {})
            for number, field in enumerate(fields)
            for name in ("lean", "fa2")
        ]
        # One that is no row hides all others.
        rows = [row for row in changed_rows if is_row(row)]
        assert rows
        write(folder, rows=[*ROWS, *rows])
        with within_limits():
            for read in (_as_report, _as_table):
                read(folder)


def is_row(row: dict[str, Any]) -> bool:
    try:
        read_row(json.dumps(row))
    except ValueError:
        return False
    return True


@share(0.05)
@given(damaged_json(MANIFEST))
def test_any_manifest_is_read_or_a_sentence(folder, manifest):
    write(folder, manifest=manifest)
    with within_limits():
        read_by(folder, read_run, _as_resume)


@share(0.01)
@given(changed(MANIFEST))
def test_any_manifest_is_a_report_or_a_sentence(folder, manifest):
    write(folder, manifest=manifest)
    with within_limits():
        read_by(folder, *SHOWN)


@share(0.06)
@given(torn(SAMPLES))
def test_any_samples_file_is_read_or_a_sentence(folder, samples):
    write(folder, samples=samples)
    with within_limits():
        assert 0 <= whole_length(samples) <= len(samples)
        read_by(folder, _as_compare, _as_resume)


def test_a_samples_file_of_a_few_bytes_does_not_fill_the_memory(folder):
    compressor = zlib.compressobj(1, wbits=31)
    bomb = b"".join(compressor.compress(bytes(1 << 20)) for _ in range(256)) + compressor.flush()
    assert len(bomb) < 2_000_000
    write(folder, samples=SAMPLES + bomb + SAMPLES)
    tracemalloc.start()
    try:
        assert whole_length(SAMPLES + bomb + SAMPLES) == len(SAMPLES)
        assert set(read_samples(folder)) == {row["cell"] for row in ROWS}
        assert tracemalloc.get_traced_memory()[1] < 200_000_000
    finally:
        tracemalloc.stop()


def _resume(run: Path) -> None:
    with RunDirectory.resume(run, MANIFEST):
        pass


def _merge(run: Path) -> None:
    merge_runs([run], run.with_name("merged"))


@pytest.mark.parametrize("name", ["manifest.json", "results.jsonl", "samples.jsonl.gz"])
@pytest.mark.parametrize("kind", ["fifo", "device", "large"])
def test_a_file_without_an_end_is_a_sentence(tmp_path, caplog, name, kind):
    run = tmp_path / "r"
    write(run)
    path = run / name
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.touch()
        os.truncate(path, 1 << 40)
    fault = FileFault.TOO_LARGE if kind == "large" else FileFault.NOT_REGULAR
    with within_limits():
        with pytest.raises(UnreadableFile) as refused:
            read_samples(run) if name.startswith("samples") else read_run(run)
        assert refused.value.fault is fault
        for use in (_as_compare, _resume, _merge):
            with pytest.raises(UserError):
                use(run)
        result = CliRunner().invoke(app, ["report", str(run)])
    # Raw samples are not needed for a report.
    assert result.exit_code == (0 if name.startswith("samples") else 2), result.output
    assert refused.value.reason in result.stderr + caplog.text
    assert not (tmp_path / "merged").exists()


def test_a_folder_whose_rows_would_go_elsewhere_is_taken(tmp_path):
    run = tmp_path / "r"
    run.mkdir()
    (run / "results.jsonl").symlink_to("/dev/null")
    with pytest.raises(UserError, match="is not empty"), RunDirectory.create(run, MANIFEST):
        pass


@share(0.005)
@given(changed(MANIFEST), changed(ROWS[1]), VALUES)
def test_text_of_any_run_stays_text(folder, manifest, row, text):
    marked = {
        **full_row(MARKUP, 5.0),
        "config": {MARKUP: MARKUP},
        "reason": str(text) + MARKUP,
        "status": "crashed",
    }
    write(folder, manifest={**MANIFEST, "name": MARKUP, "sweep": manifest}, rows=[ROWS[0], marked])
    with within_limits():
        read_by(folder, *SHOWN)
    write(folder, manifest=manifest, rows=[*ROWS, row])
    with within_limits():
        result = CliRunner().invoke(app, ["report", str(folder)])
    assert result.exit_code in (0, 2), result.output
    assert not isinstance(result.exception, Exception), result.exception


PAGED = AttentionProblem(2, 32, 8, (37, 16), 128, page_size=16)
DEFINITION = definition_of(PAGED)
WORKLOAD = workload_of(PAGED, DEFINITION)
TRACED = {"workload": WORKLOAD}
BLOB = write_int32(index_tensors(PAGED))


@share(0.03)
@given(
    damaged_json(DEFINITION), damaged_json({"workload": WORKLOAD}), torn(BLOB), st.integers(0, 2)
)
def test_any_dataset_is_a_sweep_or_a_sentence(folder, definition, line, blob, damaged):
    """One of the three is damaged."""
    contents = {
        folder.parent / "set" / "definitions" / "d.json": (definition, json.dumps(DEFINITION)),
        folder.parent / "set" / "workloads" / "d.jsonl": (line, json.dumps(TRACED)),
        folder.parent / "set" / blob_path(DEFINITION, WORKLOAD["uuid"]): (blob, BLOB),
    }
    for number, (path, (bad, good)) in enumerate(contents.items()):
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = good.encode() if isinstance(good, str) else good
        path.write_bytes(bad if number == damaged else whole)
    with within_limits(), contextlib.suppress(UserError):
        expand(load_sweep(str(folder.parent / "set")))


def test_a_dataset_that_is_not_damaged_is_a_sweep(tmp_path):
    (tmp_path / "definitions").mkdir()
    (tmp_path / "definitions" / "d.json").write_text(json.dumps(DEFINITION))
    (tmp_path / "workloads").mkdir()
    (tmp_path / "workloads" / "d.jsonl").write_text(json.dumps(TRACED))
    blob = tmp_path / blob_path(DEFINITION, WORKLOAD["uuid"])
    blob.parent.mkdir(parents=True)
    blob.write_bytes(BLOB)
    assert {cell.problem for cell in expand(load_sweep(str(tmp_path)))} == {PAGED}


KEPT = json.loads(
    tuned_configs(family(problems=[tuned()]), family(group_size=8)).model_dump_json(
        exclude_none=True
    )
)


@share(0.12)
@given(damaged_json(KEPT))
def test_any_file_of_tuned_configs_is_read_or_a_sentence(folder, content):
    path = folder.parent / "h200.json"
    path.write_bytes(content)
    with within_limits():
        read_by(path, store.read)


@share(0.01)
@given(damaged_json(KEPT))
def test_tuned_configs_that_can_be_read_can_be_looked_up(folder, content):
    from leanbench.configs import lookup

    home = folder.parent / "home"
    (home / "configs").mkdir(parents=True, exist_ok=True)
    (home / "configs" / "h200.json").write_bytes(content)
    with pytest.MonkeyPatch.context() as patch, within_limits():
        patch.setenv("LEANBENCH_HOME", str(home))
        patch.setenv("LEANBENCH_CONFIGS", "on")
        assert all(isinstance(fault, str) for fault in store.user_faults())
        for configs in ("default", "energy"):
            read_by(home, lambda _, configs=configs: lookup.resolve(LEAN, TUNED, H200, configs))
        result = CliRunner().invoke(app, ["configs", "list"])
    assert result.exit_code in (0, 2), result.output
    assert not isinstance(result.exception, Exception), result.exception
