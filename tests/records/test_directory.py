import json
import os
import pickle
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from example_rows import opened, row

from leanbench.core.errors import UserError
from leanbench.core.files import FileFault, UnreadableFile
from leanbench.measure.options import MeasureOptions
from leanbench.records.boards import Board
from leanbench.records.directory import (
    CannotWrite,
    RunDirectory,
    make_new_folder,
    newest_run,
    read_rows,
)
from leanbench.records.manifest import read_manifest
from leanbench.records.reading import read_run
from leanbench.records.samples import Samples, read_samples

ASKED = {
    "source": "predicted",
    "gpu": {"name": "a100"},
    "sweep": {"name": "s"},
    "environments": {},
    "cells": ["one", "two"],
}


@pytest.fixture
def run(tmp_path):
    """Write a run with one row."""
    path = tmp_path / "runs" / "mine"
    with RunDirectory.create(path, ASKED) as directory:
        directory.append(row("one", latency_us=1.5))
    return path


def test_a_run_is_written_and_read_back(run):
    manifest = read_manifest(run)
    assert {key: manifest[key] for key in ASKED} == ASKED
    assert (manifest["schema_version"], manifest["name"]) == (2, "mine")
    assert manifest["created"].endswith("+00:00")
    assert re.fullmatch("[0-9a-f]{12}", manifest["id"])
    assert read_rows(run) == [row("one", latency_us=1.5)]


def test_what_was_not_measured_is_not_written_and_what_later_versions_have_is_left_out(run):
    results = run / "results.jsonl"
    written = json.loads(results.read_text())
    assert None not in written.values()
    assert written["latency_us"] == 1.5
    assert "energy_mj" not in written
    assert read_rows(run)[0].energy_mj is None
    results.write_text(json.dumps({**written, "field_of_tomorrow": 3}) + "\n")
    assert read_rows(run) == [row("one", latency_us=1.5)]


def test_a_figure_that_the_status_forbids_is_named(run):
    unsupported = {**row("two").model_dump(), "status": "unsupported", "reason": "no pages"}
    (run / "results.jsonl").write_text(json.dumps(unsupported) + "\n")
    said = r"line 1 is not a row \(a row that is unsupported carries no latency_us\)"
    with pytest.raises(UserError, match=said):
        read_rows(run)


def test_what_a_merge_that_was_killed_left_is_no_run_to_resume(run):
    left = run.with_name(".both.part")
    with RunDirectory.create(left, ASKED):
        pass
    assert newest_run(run.parent, "s", ASKED["cells"]) == run


def test_boards_are_added_once(run):
    gpu = {"name": "a100"}
    first = Board("measured", gpu, {"gpu_uuid": "GPU-1"}, 63.0)
    with RunDirectory.resume(run, ASKED) as directory:
        directory.add_board(first)
        directory.add_board(replace(first, calibration_us=64.0))
        directory.add_board(Board("measured", gpu, {"gpu_uuid": "GPU-2"}))
    manifest = read_manifest(run)
    assert list(manifest["environments"].values()) == [{"gpu_uuid": "GPU-1"}, {"gpu_uuid": "GPU-2"}]
    assert manifest["environments"][first.key] == {"gpu_uuid": "GPU-1"}
    assert [board["calibration_us"] for board in manifest["boards"].values()] == [63.0, None]
    assert not list(run.glob("*.part"))


def test_an_existing_run_is_not_overwritten(run):
    with pytest.raises(UserError, match="is not empty: add --resume"):
        opened(RunDirectory.create(run, ASKED))
    assert len(read_rows(run)) == 1


def test_resume_drops_only_a_torn_last_line(run):
    results = run / "results.jsonl"
    whole = results.read_bytes()
    results.write_bytes(whole + b'{"cell":"tw')
    assert len(read_rows(run)) == 1
    with RunDirectory.resume(run, ASKED) as directory:
        assert directory.finished == {"one"}
        assert results.read_bytes() == whole
        directory.append(row("two"))
    assert [row.cell for row in read_rows(run)] == ["one", "two"]


@pytest.mark.parametrize("line", [b"{", b"[]", b"3", b'{"kernel":"lean"}', b"", b"\xff"])
def test_any_other_malformed_line_is_named(run, line):
    results = run / "results.jsonl"
    results.write_bytes(results.read_bytes() + line + b"\n" + row("two").line())
    before = results.read_bytes()
    with pytest.raises(UserError, match=r"results.jsonl, line 2 is not a row \(.+\): delete that"):
        opened(RunDirectory.resume(run, ASKED))
    assert results.read_bytes() == before


@pytest.mark.parametrize("version", [1, 3, "2", 2.0, True, None])
def test_another_schema_version_is_refused(run, version):
    manifest = json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").write_text(json.dumps({**manifest, "schema_version": version}))
    with pytest.raises(UserError) as error:
        read_manifest(run)
    stated = f"schema version {json.dumps(version)}, this leanbench reads 2"
    assert stated in str(error.value)
    assert ("update leanbench" in str(error.value)) == (version == 3)


@pytest.mark.parametrize("name", ["manifest.json", "results.jsonl", "samples.jsonl.gz"])
@pytest.mark.parametrize("kind", ["fifo", "device", "large"])
def test_a_file_without_an_end_is_refused(run, name, kind):
    path = run / name
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.touch()
        os.truncate(path, 1 << 40)
    with pytest.raises(UserError):
        opened(RunDirectory.resume(run, ASKED))
    fault = FileFault.TOO_LARGE if kind == "large" else FileFault.NOT_REGULAR
    with pytest.raises(UnreadableFile) as error:
        read_samples(run) if name.startswith("samples") else read_run(run)
    assert error.value.fault is fault


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("", "it is empty"),
        ("\xff", "it is not UTF-8 text"),
        ("[]", "it holds no keys and values"),
        ("{}", "it has no schema_version"),
        ("3", "it holds no keys and values"),
    ],
)
def test_a_damaged_manifest_is_refused(run, content, fault):
    path = run / "manifest.json"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(UserError) as refused:
        read_manifest(run)
    assert str(refused.value) == (
        f"{path} is damaged ({fault}): put back a copy of it, or sweep again under another --name;"
        " the rows are still in results.jsonl"
    )
    (run / "results.jsonl").unlink()
    with pytest.raises(UserError, match=r"under another --name$"):
        read_manifest(run)


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"schema_version": 2}, "it has no gpu"),
        ({"environments": [1]}, "environments is [1], not a table"),
        ({"cells": {"a": 1}}, 'cells is {"a": 1}, not a list'),
        ({"cells": ["one", 2]}, "cells has 2, not the key of a cell"),
    ],
)
def test_a_manifest_to_go_on_with_has_all_parts(run, changed, fault):
    path = run / "manifest.json"
    before = {} if "schema_version" in changed else json.loads(path.read_text())
    path.write_text(json.dumps({**before, **changed}))
    with pytest.raises(UserError, match=re.escape(f"is damaged ({fault}): put back a copy of it")):
        opened(RunDirectory.resume(run, ASKED))


def test_a_folder_without_manifest_is_no_run(tmp_path):
    with pytest.raises(UserError, match=r"is not a run directory, it has no manifest.json"):
        read_manifest(tmp_path)
    with pytest.raises(UserError, match="is not a run directory"):
        opened(RunDirectory.resume(tmp_path / "no", ASKED))
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cells": ["one"]}, r"1 of its 2 cells are not requested, such as two\)"),
        (
            {"cells": ["one", "two", "six"]},
            r"\(1 of 3 requested cells are not in it, such as six\)",
        ),
        ({"gpu": {"name": "h200"}}, "has rows predicted for a100, not predicted for h200"),
        ({"source": "measured"}, "has rows predicted for a100, not measured for a100"),
    ],
)
def test_resume_refuses_another_question(run, change, words):
    with pytest.raises(UserError, match=words):
        opened(RunDirectory.resume(run, {**ASKED, **change}))


MEASURE = MeasureOptions().to_dict()


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"cache": "warm"}, "cache"),
        ({"energy": True, "window_s": 5.0}, "energy, window_s"),
        ({"effort": {**MEASURE["effort"], "relative_ci": 0.01}}, "effort"),
    ],
)
def test_resume_refuses_other_settings(tmp_path, changes, names):
    run, asked = tmp_path / "r", {**ASKED, "measure": MEASURE}
    with RunDirectory.create(run, asked):
        pass
    with pytest.raises(UserError) as error:
        opened(RunDirectory.resume(run, {**asked, "measure": {**MEASURE, **changes}}))
    assert str(error.value) == (
        f"{run} was measured with other settings ({names}): repeat the command it was started"
        " with, or start a new run without --resume"
    )
    assert opened(RunDirectory.resume(run, asked)) == set()


def test_the_order_of_cells_is_no_difference(run):
    assert opened(RunDirectory.resume(run, {**ASKED, "cells": ["two", "one"]})) == {"one"}


def test_a_second_sweep_is_refused_while_one_writes(tmp_path):
    path = tmp_path / "mine"
    script = (
        "import sys; from pathlib import Path; from leanbench.records.directory import"
        f" RunDirectory\nwith RunDirectory.create(Path({str(path)!r}), {ASKED!r}):\n   "
        " print('open', flush=True); sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "open\n"
    with pytest.raises(UserError, match="another sweep is writing"):
        opened(RunDirectory.resume(path, ASKED))
    # A killed sweep leaves no lock behind.
    process.kill()
    process.communicate()
    assert opened(RunDirectory.resume(path, ASKED)) == set()


def test_runs_that_start_together_get_a_folder_each(tmp_path):
    names = [f"s-{number}" if number > 1 else "s" for number in range(1, 41)]
    with ThreadPoolExecutor(8) as threads:
        made = threads.map(make_new_folder, [tmp_path / "runs" / "s"] * len(names))
        assert sorted(path.name for path in made) == sorted(names)
    (tmp_path / "file").write_text("")
    (tmp_path / "gone").symlink_to("nowhere")
    for parent in ("file", "file/below", "gone"):
        with pytest.raises(CannotWrite):
            make_new_folder(tmp_path / parent / "s")


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write .*file/mine \(Not a directory\)"):
        opened(RunDirectory.create(tmp_path / "file" / "mine", ASKED))


@pytest.mark.parametrize("file", ["results.jsonl", "samples.jsonl.gz"])
def test_a_full_disk_is_a_sentence(run, monkeypatch, file):
    """One that is full for the samples costs their row too."""
    raw = Samples(cell="two", samples_us=[1.0], rounds=[0], sm_clock_mhz=[None])
    full = rf"cannot write .*{file} \(No space left on device\): fix it, then continue with --res"
    with RunDirectory.resume(run, ASKED) as directory:
        monkeypatch.setattr(os, "write", lambda fd, data: len(data) - 1)
        with pytest.raises(UserError, match=full):
            directory.append(row("two"), raw if file.startswith("samples") else None)
        assert directory.finished == {"one"}
    assert [row.cell for row in read_rows(run)][:1] == ["one"]


def test_the_newest_run_of_a_sweep_is_found(tmp_path):
    both = ["one", "two"]
    for name, sweep, cells in (
        *(("b", "s", both), ("a", "s", both)),
        *(("d", "s", ["one"]), ("c", "other", ["one"])),
    ):
        asked = {**ASKED, "sweep": {"name": sweep}, "cells": cells}
        with RunDirectory.create(tmp_path / name, asked):
            pass
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "manifest.json").write_text("{")
    assert newest_run(tmp_path, "s", ["two", "one"]) == tmp_path / "a"
    # Without a match, the newest: resuming it reports the difference.
    assert newest_run(tmp_path, "s", ["three"]) == tmp_path / "d"
    with pytest.raises(UserError, match="has no run of sweep 'none'"):
        newest_run(tmp_path, "none", [])


def test_a_fault_of_writing_passes_between_processes():
    fault = pickle.loads(pickle.dumps(CannotWrite("cannot write it", "No space left on device")))
    assert (str(fault), fault.why) == ("cannot write it", "No space left on device")
