"""`leanbench trace`: what it shows and writes, and that bad input is one sentence."""

import json
import warnings
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cli.running import invoke as invoke_any
from cli.running import refusal
from typer.testing import Result

from leanbench.cli import output
from leanbench.core.errors import GpuUnusable
from leanbench.core.kernel import Kernel
from leanbench.core.timeline import Timeline
from leanbench.gpu.catalogue import find
from leanbench.gpu.local import Target
from leanbench.measure.protocol import Subject
from leanbench.model import short_error
from leanbench.model.timeline import predict_timeline


@pytest.fixture(autouse=True)
def empty_folder(no_gpu, monkeypatch, tmp_path):
    """Start in an empty folder without a GPU."""
    monkeypatch.chdir(tmp_path)


def invoke(*words: str) -> Result:
    return invoke_any("trace", *words)


def test_without_a_gpu_it_predicts_and_says_so(tmp_path: Path):
    result = invoke("h56", "n64k", "d64", "--gpu", "h200", "--out", "here")
    assert result.exit_code == 0, result.output
    predicted = "No such GPU here: predicted for NVIDIA H200, nothing was measured. "
    assert result.stderr.startswith(predicted)
    assert result.stderr.rstrip().endswith(short_error("h200", ["lean", "fixed_split", "fa2"]))
    lines = result.stdout.splitlines()
    assert lines[0] == "b1 h56 n65536 d64 fp16 HND, predicted for NVIDIA H200, nothing was measured"
    kernels = [line.split()[0] for line in lines if "SMs busy" in line]
    assert kernels == ["lean", "fixed_split", "fa2"]
    assert lines[-2:] == ["here/trace.html", "here/trace.json"]
    assert all((tmp_path / line).stat().st_size > 1000 for line in lines[-2:])
    # 56 CTAs on 132 SMs: nine to a row, the seventh row has two of them.
    below = lines[next(i for i, line in enumerate(lines) if line.startswith("fa2")) + 1 :]
    picture = [line for line in below if "│" in line][:15]
    assert [line[9:10] for line in picture] == ["█"] * 6 + ["░"] + [" "] * 8
    assert max(map(len, lines)) <= 120


def test_files_go_to_a_new_folder_under_runs(tmp_path: Path, monkeypatch):
    from leanbench.cli import trace as module

    class Clock(datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2030, 1, 2, 3, 4, 5)

    monkeypatch.setattr(module, "datetime", Clock)
    words = ("b2 h32/8 n4096 d128 bf16 NHD", "--kernels", "lean", "--format", "json", "-q")
    folder = "runs/trace-b2-h32-8-n4096-d128-bf16-NHD-h200-20300102-030405"
    assert invoke(*words).stdout == f"{folder}/trace.json\n"
    assert invoke(*words).stdout == f"{folder}-2/trace.json\n"
    about = json.loads((tmp_path / folder / "trace.json").read_text())["otherData"]
    assert about["problem"] == "b2 h32/8 n4096 d128 bf16 NHD"
    assert list(about["configs"]) == ["lean"]


def test_a_kernel_without_a_timeline_is_said_and_the_others_are_drawn():
    result = invoke("h8", "n4k", "d64", "--kernels", "reference,lean", "--format", "html")
    assert result.exit_code == 0
    said = "reference has no schedule to predict from: measure it, or leave it out."
    assert f"No timeline of reference: {said}" in result.stderr
    assert "\nlean  latency" in result.stdout
    # Without any timeline, nothing is predicted and no model error is printed.
    result = invoke("h8", "n4k", "d64", "--kernels", "reference", "--out", "empty")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("No timeline of reference: ")
    assert isinstance(result.exception, SystemExit)
    assert not Path("empty").exists()


def test_gpus_that_share_a_problem_are_side_by_side(tmp_path: Path):
    words = ("h32/8", "n32k", "d128", "cp:2", "--gpu", "h200", "--out", "two", "--format", "json")
    result = invoke(*words)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("b1 h32/8 n32768 d128 fp16 HND cp:2, predicted for NVIDIA H200")
    ranks = [line.partition("  ")[0] for line in lines if "SMs busy" in line]
    assert ranks == ["lean, rank 0", "lean, rank 1"]
    assert "No timeline of fa2: fa2 runs on one GPU" in result.stderr
    drawn = json.loads((tmp_path / "two" / "trace.json").read_text())
    assert list(drawn["otherData"]["latency_us"]) == ranks
    named = [event for event in drawn["traceEvents"] if event["name"] == "process_name"]
    processes = [event["args"]["name"] for event in named]
    assert processes == [f"{rank} (predicted)" for rank in ranks]
    manifest = json.loads((tmp_path / "two" / "trace-manifest.json").read_text())
    assert list(manifest["kernels"]) == ranks
    assert manifest["problem"]["parallel"] == "cp:2"


def a_gpu_is_here(monkeypatch: pytest.MonkeyPatch, opened: Any, measure: Any) -> None:
    target = Target(find("h200"), 3)
    monkeypatch.setattr("leanbench.gpu.local.choose", lambda name, require: target)
    monkeypatch.setattr("leanbench.measure.instruments.open_instruments", opened)
    monkeypatch.setattr("leanbench.measure.protocol.measure_timelines", measure)


def measured_timelines(subject: Subject, kernel: Kernel, configs: str) -> list[Timeline] | str:
    """Return a model's timeline as if it was measured."""
    assert configs == "best"
    if kernel.name == "fa2":
        return "its build with timeline events failed"
    timeline = predict_timeline(subject.problem, kernel, "default", subject.instruments.spec)
    assert isinstance(timeline, Timeline)
    assert timeline.latency_us is not None
    return [replace(timeline, source="measured", traced_latency_us=1.02 * timeline.latency_us)]


def test_with_a_gpu_it_measures(monkeypatch):
    closed: list[bool] = []

    def opened(index: int) -> SimpleNamespace:
        assert index == 3
        gang = SimpleNamespace(close=lambda: closed.append(True))
        return SimpleNamespace(spec=find("h200"), gang=gang)

    a_gpu_is_here(monkeypatch, opened, measured_timelines)
    monkeypatch.setattr(
        "leanbench.records.environment.measured_environment", lambda index: {"driver": "580"}
    )
    result = invoke("h8", "n4k", "d64", "--configs", "best", "--format", "html")
    assert result.exit_code == 0, result.output
    assert "predicted" not in result.output
    assert closed == [True]
    assert "Tracing lean on NVIDIA H200." in result.stderr
    assert "No timeline of fa2: its build with timeline events failed." in result.stderr
    assert result.stdout.startswith("b1 h8 n4096 d64 fp16 HND, measured on NVIDIA H200\n")
    assert "latency with events 1.020x" in result.stdout
    path = Path(result.stdout.splitlines()[-1])
    assert "measured on NVIDIA H200" in path.read_text(encoding="utf-8")
    manifest = json.loads((path.parent / "trace-manifest.json").read_text(encoding="utf-8"))
    assert (manifest["source"], manifest["gpu"]["name"]) == ("measured", "h200")
    assert manifest["problem"]["context"] == 4096
    assert manifest["environment"] == {"driver": "580", "settings": "heuristic"}


def test_a_rank_that_fails_is_one_sentence(monkeypatch):
    def fail(*arguments: Any) -> None:
        raise GpuUnusable("rank 1: RuntimeError: no peer access")

    a_gpu_is_here(monkeypatch, lambda index: SimpleNamespace(spec=find("h200")), fail)
    result = invoke("h8", "n4k", "d64", "cp:2", "--kernels", "lean", "--out", "none")
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1] == (
        "Error: tracing lean failed: rank 1: RuntimeError: no peer access"
    )


def test_a_folder_that_cannot_be_written_is_a_sentence(tmp_path: Path):
    (tmp_path / "file").write_text("")
    assert "cannot write file/x" in refusal("trace", "h8", "n4k", "d64", "--out", "file/x")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_file_that_cannot_be_used_is_a_sentence(home: Path):
    broken = home / "configs" / "h200.json"
    broken.parent.mkdir(parents=True)
    broken.write_text("{")
    result = invoke("h32/8", "n4k", "d128", "--gpu", "h200", "--out", "here", "--quiet")
    assert result.exit_code == 0, result.output
    [line] = result.stderr.splitlines()[:-1]
    assert line.startswith(f"! {broken} is not a file of timings")
    assert line.endswith("; it is not used.")


def test_warnings_of_other_packages_stay_as_they_are():
    with pytest.warns(UserWarning, match="another's"), output.warnings_in_sentences():
        warnings.warn("another's", stacklevel=1)
