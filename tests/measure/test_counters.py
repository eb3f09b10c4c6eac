"""Counters by a fake `ncu`: a script on the PATH with the output of Nsight Compute."""

import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from leanbench.kernels.fixed_split.configs import FixedSplitTritonConfig

from leanbench.core.config import read_config
from leanbench.core.problem import AttentionProblem
from leanbench.measure import counters, counters_target
from leanbench.measure.counters import CountedKernel, CountedLaunch, count, find_ncu
from leanbench.records.row import Row

PROBLEM = AttentionProblem(1, 56, 56, 4096, 64)
CONFIG = FixedSplitTritonConfig(128, 4, 3, splits=4)
HEADER = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block'
    ' Size","Grid Size","Device","CC","Section Name","Metric Name","Metric Unit","Metric Value"'
)


#: Units by metric.
METRICS = {
    "dram__bytes_read.sum": "byte",
    "dram__bytes_write.sum": "byte",
    "gpu__time_duration.sum": "ns",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "%",
}


def lines(number: int, name: str, read: str, written: str, duration: str, occupancy: str) -> str:
    """Return ncu's output for one GPU kernel, with its grouping of digits."""
    process = f'"{number}","4711","python3.12","127.0.0.1","{name}","1","7"'
    start = f'{process},"(128, 1, 1)","(224, 1, 1)","0","9.0","Command line profiler metrics"'
    figures = zip(METRICS.items(), (read, written, duration, occupancy), strict=True)
    return "".join(f'{start},"{name}","{unit}","{value}"\n' for (name, unit), value in figures)


#: fixed_split's two GPU kernels, in the text of Nsight Compute 2025.
TWO_KERNELS = f"""\
==PROF== Connected to process 4711 (/usr/bin/python3.12)
==PROF== Profiling "split_kernel" - 0: 0%....50%....100% - 1 pass
==PROF== Profiling "merge_kernel" - 1: 0%....50%....100% - 1 pass
==PROF== Disconnected from process 4711
{HEADER}
{lines(0, "split_kernel", "58,812,416", "120,832", "20,480", "11.25")}\
{lines(1, "merge_kernel", "1,024", "0", "2,048", "6.25")}\
"""
PERMISSION = """\
==PROF== Connected to process 87374 (/usr/bin/python3.12)
==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters on the target \
device 0. For instructions on enabling permissions and to get more information see \
https://developer.nvidia.com/ERR_NVGPUCTRPERM
==PROF== Disconnected from process 87374
==WARNING== No kernels were profiled.
"""
BUSY_COUNTERS = """\
==ERROR== Profiling failed because a driver resource was unavailable. Ensure that no other tool (like DCGM) is \
concurrently collecting profiling data.
==ERROR== Failed to profile "lean_kernel" in process 7508
==WARNING== No kernels were profiled.
"""


@pytest.fixture
def fake_ncu(tmp_path, monkeypatch):
    """Return a function that installs a shell script as the only `ncu`."""

    def install(body: str) -> None:
        script = tmp_path / "bin" / "ncu"
        script.parent.mkdir(exist_ok=True)
        script.write_text(f"#!/bin/sh\n{body}\n")
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{script.parent}{os.pathsep}{os.environ['PATH']}")

    return install


@pytest.fixture
def printing(fake_ncu, tmp_path):
    """Return a function that installs a `ncu` with this output, which writes its arguments."""

    def install(text: str, code: int = 0) -> None:
        (tmp_path / "said").write_text(text)
        (tmp_path / "record.py").write_text(
            textwrap.dedent("""
            import json, os, pathlib, sys
            record = {"arguments": sys.argv[1:], "LC_ALL": os.environ.get("LC_ALL")}
            pathlib.Path(__file__).with_name("record").write_text(json.dumps(record))
            """)
        )
        record = f"{shlex.quote(sys.executable)} -S {shlex.quote(str(tmp_path / 'record.py'))}"
        fake_ncu(f'{record} "$@"\ncat {shlex.quote(str(tmp_path / "said"))}\nexit {code}')

    return install


def counted() -> CountedLaunch:
    result = count(PROBLEM, "fixed_split", CONFIG, 0)
    assert isinstance(result, CountedLaunch), result
    return result


def test_two_kernels_are_added_up_into_fields_of_a_row(printing):
    printing(TWO_KERNELS)
    launch = counted()
    assert launch.kernels == (
        CountedKernel("split_kernel", 0.1125, 58_812_416, 120_832, 20.48),
        CountedKernel("merge_kernel", 0.0625, 1024, 0, 2.048),
    )
    assert launch.dram_bytes == 58_812_416 + 120_832 + 1024
    assert launch.duration_us == pytest.approx(22.528)
    assert launch.dram_tb_s == pytest.approx(58_934_272 / 22.528e-6 / 1e12)
    # From the longest GPU kernel, neither the first nor the mean.
    assert launch.warp_occupancy == 0.1125
    assert CountedLaunch(launch.kernels[::-1]).warp_occupancy == 0.1125
    printing(TWO_KERNELS)
    fields = counted().outcome().fields()
    assert set(fields) == {name for name in Row.model_fields if name.startswith("counted_")}
    assert fields["counted_dram_bytes"] == 58_934_272


def test_what_ncu_is_asked(printing, tmp_path):
    printing(TWO_KERNELS)
    count(PROBLEM, "fixed_split", CONFIG, 3, cache="warm")
    record = json.loads((tmp_path / "record").read_text())
    arguments = record["arguments"]
    options = dict(itertools.pairwise(arguments))
    assert options["--clock-control"] == options["--cache-control"] == "none"
    assert options["--profile-from-start"] == "off"
    assert options["--print-units"] == "base"
    assert set(options["--metrics"].split(",")) == {*METRICS}
    assert arguments[-5:-1] == [sys.executable, "-P", "-m", "leanbench.measure.counters_target"]
    request = json.loads(arguments[-1])
    assert AttentionProblem.from_dict(request["problem"]) == PROBLEM
    assert read_config((FixedSplitTritonConfig,), request["config"]) == CONFIG
    assert (request["kernel"], request["device_index"]) == ("fixed_split", 3)
    assert (request["cache"], request["caller_pid"]) == ("warm", os.getpid())
    # Otherwise a German user gets 58.812.416.
    assert record["LC_ALL"] == "C"


def test_lines_between_and_units_in_full_are_read(printing):
    printing(TWO_KERNELS.replace('"1","4711"', 'warning: a line between\n"1","4711"', 1))
    assert counted().dram_bytes == 58_934_272
    printing(TWO_KERNELS.replace('"ns"', '"nsecond"'))
    assert counted().duration_us == pytest.approx(22.528)
    printing(TWO_KERNELS.replace("- 1 pass", "- 3 passes", 1))
    assert isinstance(count(PROBLEM, "fixed_split", CONFIG, 0, cache="warm"), CountedLaunch)


NO_KERNELS = "==WARNING== No kernels were profiled.\n"
NO_METRIC = "==ERROR== Failed to access the following 1 metrics: dram__bytes_read.sum.\n"
TARGET = f"{counters.TARGET_FAILED}K and V take 30.1 GB\n==ERROR== An error code (1).\n{NO_KERNELS}"
FAILURES = {
    "permission": (PERMISSION, 0, counters.ADMINISTRATORS_ONLY),
    "dcgm": (BUSY_COUNTERS, 1, "another tool is reading this GPU's counters: "),
    "no kernels": (NO_KERNELS, 0, "Nsight Compute saw no GPU kernel"),
    "metrics": (NO_METRIC, 1, "Nsight Compute failed: .* 1 metrics: dram__bytes_read.sum"),
    "target": (TARGET, 1, "the counted process failed: K and V take 30.1 GB$"),
    "silent": ("", 3, "Nsight Compute gave no counters; its last words: none"),
    "broken": ("cannot open libncu\n", 127, ".* no counters; its last words: cannot open libncu"),
    "n/a": (
        TWO_KERNELS.replace('"byte","1,024"', '"","n/a"'),
        0,
        "Nsight Compute has no dram__bytes_read.sum of merge_kernel",
    ),
    "unit": (
        TWO_KERNELS.replace('"ns","2,048"', '"us","2.048"'),
        0,
        "Nsight Compute gives gpu__time_duration.sum in 'us'",
    ),
    "passes": (TWO_KERNELS.replace("- 1 pass", "- 3 passes", 1), 0, ".* 3 passes .* L2 is cold"),
}


@pytest.mark.parametrize(("reason", "code", "words"), FAILURES.values(), ids=FAILURES)
def test_failures_are_sentences(printing, reason, code, words):
    printing(reason, code)
    assert re.match(words, str(count(PROBLEM, "lean", CONFIG, 0)))


def test_a_timeout_ends_ncu_and_what_it_started(fake_ncu, tmp_path):
    fake_ncu(f"sleep 60 & echo $! > {tmp_path / 'pid'}\nwait")
    result = count(PROBLEM, "lean", CONFIG, 0, timeout_s=2)
    assert result == "Nsight Compute did not finish within 2 s"
    child = Path("/proc") / (tmp_path / "pid").read_text().strip() / "stat"
    deadline = time.monotonic() + 120
    # A zombie that has not been reaped yet is dead, too.
    while child.exists() and child.read_text().split()[2] != "Z" and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not child.exists() or child.read_text().split()[2] == "Z"


def test_a_script_that_cannot_be_started(fake_ncu, tmp_path):
    fake_ncu("")
    (tmp_path / "bin" / "ncu").write_text("#!/no/such/interpreter\n")
    result = count(PROBLEM, "lean", CONFIG, 0)
    assert result == f"{tmp_path / 'bin' / 'ncu'} cannot be started: No such file or directory"


def test_without_ncu(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(counters, "_USUAL_PLACES", ())
    assert find_ncu() is None
    result = count(PROBLEM, "lean", None, 0)
    assert result == "Nsight Compute is not installed: install it, or put `ncu` on the PATH"


def test_the_newest_of_the_usual_places_is_found(monkeypatch, tmp_path):
    for version in ("2024.3.2", "2025.10.0", "2025.9.1"):
        path = tmp_path / version / "ncu"
        path.parent.mkdir()
        path.touch(mode=0o755)
    (tmp_path / "2026.1.0").mkdir()
    (tmp_path / "2026.1.0" / "ncu").touch(mode=0o644)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(
        counters, "_USUAL_PLACES", (str(tmp_path / "none*" / "ncu"), str(tmp_path / "*" / "ncu"))
    )
    assert find_ncu() == str(tmp_path / "2025.10.0" / "ncu")


@pytest.mark.deep
def test_the_counted_process_says_why_it_failed(fake_ncu, monkeypatch):
    # A `ncu` that only starts the program, which finds no GPU.
    fake_ncu('while [ "$1" != "-P" ]; do program=$1; shift; done\nexec "$program" "$@"')
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    result = count(PROBLEM, "lean", CONFIG, 0)
    assert result == "the counted process failed: torch finds no GPU that it can use"


def test_only_the_call_on_the_oldest_inputs_is_profiled(monkeypatch):
    """Calls happen in order, with torch's parts replaced."""
    events: list[object] = []

    class FakeKernel:
        is_api = False

        def read_config(self, values):
            return read_config((FixedSplitTritonConfig,), values)

        def prepare(self, inputs, config):
            assert config == CONFIG
            return lambda: events.append(inputs)

    def rotating(problem, device, spec, cache):
        assert (problem, str(device), spec, cache) == (PROBLEM, "cuda:1", "spec of 1", "cold")
        return [0, 1, 2]

    monkeypatch.setattr(counters_target, "kernel", lambda name: {"fake": FakeKernel()}[name])
    monkeypatch.setattr("leanbench.measure.buffers.rotating_inputs", rotating)
    monkeypatch.setattr("leanbench.gpu.local.spec_of_device", lambda index: f"spec of {index}")
    fakes = {
        "is_available": lambda: True,
        "set_device": lambda device: None,
        "mem_get_info": lambda device: (10**10, 10**10),
        "synchronize": lambda: events.append("wait"),
        "profiler.start": lambda: events.append("start"),
        "profiler.stop": lambda: events.append("stop"),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(f"torch.cuda.{name}", fake)
    request = {"problem": PROBLEM.to_dict(), "kernel": "fake", "config": CONFIG.to_dict()}
    counters_target._run({**request, "device_index": 1, "cache": "cold"})
    assert events == [0, 1, 2, "wait", "start", 0, "wait", "stop"]


def test_the_counted_process_ends_with_the_one_that_waits():
    caller = subprocess.Popen(["sleep", "60"])
    code = (
        "from leanbench.measure import counters_target as t; import time;"
        f" t._end_with({caller.pid}); print(flush=True); time.sleep(60)"
    )
    target = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert target.stdout is not None
        assert target.stdout.readline() == "\n"
        with pytest.raises(subprocess.TimeoutExpired):
            target.wait(timeout=0.3)
        caller.send_signal(signal.SIGKILL)
        caller.wait()
        assert target.wait(timeout=60) == 1
    finally:
        for process in (caller, target):
            process.kill()
            process.communicate()
