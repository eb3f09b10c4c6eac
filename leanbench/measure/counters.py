"""Hardware counters of one call of a kernel, read by Nsight Compute (`ncu`) in its own process.

The call is the plain one that is timed, on inputs made in the same way. `--cache-control none`:
Nsight Compute would otherwise empty the L2 before each GPU kernel of a call, and a merge would read
its partials from memory. The rotation of buffers decides what the L2 holds, as in the timing.
`--clock-control none` leaves the clocks as they are. The four metrics fit into one pass. On a GPU
that needs several, Nsight Compute repeats each GPU kernel, and later passes find K and V in the L2.
Cold counts of several passes are therefore refused.

The GPU is idle between the GPU kernels, so its clocks may be lower than in a timing. The counts are
valid; the time of this pass relates to the counts alone.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from glob import glob
from typing import Any

from leanbench.core.config import KernelConfig
from leanbench.core.problem import AttentionProblem
from leanbench.measure.options import CacheState
from leanbench.records.outcome import Outcome

#: Start of the line with the reason why the counted process failed.
TARGET_FAILED = "leanbench.measure.counters_target: "
#: Time limit. Starting torch, making inputs and compiling take half a minute at worst.
TIMEOUT_S = 90.0
#: Reason if the driver denies access to the counters.
ADMINISTRATORS_ONLY = (
    "the driver lets only administrators read hardware counters: run as root, or set the driver's"
    " option NVreg_RestrictProfilingToAdminUsers=0, see"
    " https://developer.nvidia.com/ERR_NVGPUCTRPERM"
)

_WARPS_ACTIVE = "sm__warps_active.avg.pct_of_peak_sustained_active"
_DRAM_READ = "dram__bytes_read.sum"
_DRAM_WRITTEN = "dram__bytes_write.sum"
_DURATION = "gpu__time_duration.sum"
#: Unit of each metric as versions of `--print-units base` write it.
_UNITS = {
    _WARPS_ACTIVE: ("%",),
    _DRAM_READ: ("byte",),
    _DRAM_WRITTEN: ("byte",),
    _DURATION: ("ns", "nsecond"),
}
#: Folders of installers that do not put ncu on the PATH. The newest version sorts last.
_USUAL_PLACES = ("/opt/nvidia/nsight-compute/*/ncu", "/usr/local/cuda*/bin/ncu")
_FAILURES = (
    ("ERR_NVGPUCTRPERM", ADMINISTRATORS_ONLY),
    (
        "driver resource was unavailable",
        (
            "another tool is reading this GPU's counters: stop it, or pause DCGM with `dcgmi"
            " profile --pause`"
        ),
    ),
)


@dataclass(frozen=True)
class CountedKernel:
    """One GPU kernel of the call."""

    name: str
    #: Active warps over the maximum of an SM, 0 to 1, averaged over the SM's active cycles.
    warp_occupancy: float
    dram_read_bytes: int
    dram_written_bytes: int
    #: Duration in the counted pass.
    duration_us: float


@dataclass(frozen=True)
class CountedLaunch:
    """GPU kernels of one call in launch order, at least one."""

    kernels: tuple[CountedKernel, ...]

    @property
    def warp_occupancy(self) -> float:
        """Warp occupancy of the longest GPU kernel."""
        return max(self.kernels, key=lambda kernel: kernel.duration_us).warp_occupancy

    @property
    def dram_bytes(self) -> int:
        """Bytes read and written by all GPU kernels."""
        return sum(kernel.dram_read_bytes + kernel.dram_written_bytes for kernel in self.kernels)

    @property
    def duration_us(self) -> float:
        return sum(kernel.duration_us for kernel in self.kernels)

    @property
    def dram_tb_s(self) -> float:
        return self.dram_bytes / self.duration_us / 1e6

    def outcome(self) -> Outcome:
        """Return the figures of a row."""
        return Outcome(
            counted_warp_occupancy=self.warp_occupancy,
            counted_dram_bytes=self.dram_bytes,
            counted_dram_tb_s=self.dram_tb_s,
        )


class _NotCountedError(Exception):
    """Reason for no counts. `count` returns the message."""


def count(
    problem: AttentionProblem,
    kernel_name: str,
    config: KernelConfig | None,
    device_index: int,
    cache: CacheState = "cold",
    timeout_s: float = TIMEOUT_S,
) -> CountedLaunch | str:
    """Count one call, or return a sentence with the reason why that is impossible.

    Args:
        config: None for a kernel without launch settings.
        device_index: Torch's index. The GPU needs memory for a second set of inputs.
        cache: `cold` if other inputs larger than the L2 are read before the call, `warm` if its own
            are.
    """
    ncu = find_ncu()
    if ncu is None:
        return "Nsight Compute is not installed: install it, or put `ncu` on the PATH"
    request = {
        "problem": problem.to_dict(),
        "kernel": kernel_name,
        "config": None if config is None else config.to_dict(),
        "device_index": device_index,
        "cache": cache,
        "caller_pid": os.getpid(),
    }
    try:
        return _parse(_run(_command(ncu, request), timeout_s), cache)
    except _NotCountedError as reason:
        return str(reason)


def find_ncu() -> str | None:
    """Return the path of `ncu` on the PATH, or the newest in the folders of installers."""
    on_path = shutil.which("ncu")
    if on_path:
        return on_path
    for pattern in _USUAL_PLACES:
        paths = [path for path in glob(pattern) if os.access(path, os.X_OK)]
        if paths:
            return max(paths, key=lambda path: [int(number) for number in re.findall(r"\d+", path)])
    return None


def _command(ncu: str, request: dict[str, Any]) -> list[str]:
    options = ["--clock-control", "none", "--cache-control", "none", "--target-processes", "all"]
    options += [
        "--profile-from-start",
        "off",
        "--csv",
        "--print-units",
        "base",
        "--metrics",
        ",".join(_UNITS),
    ]
    # -P keeps files of the current folder from shadowing modules.
    return [
        ncu,
        *options,
        sys.executable,
        "-P",
        "-m",
        "leanbench.measure.counters_target",
        json.dumps(request),
    ]


def _run(command: list[str], timeout_s: float) -> str:
    """Return the output of ncu and of the counted process."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            # Write numbers as 1,234.5 in any locale.
            env={**os.environ, "LC_ALL": "C"},
            # A group of its own: ncu may be a script, and its children must end with it.
            start_new_session=True,
        )
    except OSError as error:
        raise _NotCountedError(f"{command[0]} cannot be started: {error.strerror}") from None
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise _NotCountedError(f"Nsight Compute did not finish within {timeout_s:g} s") from None
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return output


def _parse(output: str, cache: CacheState) -> CountedLaunch:
    for mark, sentence in _FAILURES:
        if mark in output:
            raise _NotCountedError(sentence)
    metrics = list(_metrics(output))
    if not metrics:
        raise _NotCountedError(_why_nothing(output))
    passes = max((int(number) for number in re.findall(r"- (\d+) pass", output)), default=1)
    if cache == "cold" and passes > 1:
        raise _NotCountedError(
            f"Nsight Compute needs {passes} passes for these counters on this GPU, and the L2 is"
            " cold in the first only"
        )
    return CountedLaunch(tuple(_counted(name, values) for name, values in metrics))


def _metrics(output: str) -> Iterator[tuple[str, dict[str, tuple[str, str]]]]:
    """Yield (name, metric -> (value, unit)) of the GPU kernels in launch order, as ncu wrote it."""
    lines = output.splitlines()
    start = next(
        (number for number, line in enumerate(lines) if line.startswith('"ID",')), len(lines)
    )
    table = [line for line in lines[start:] if line.startswith('"')]
    kernels: dict[str, tuple[str, dict[str, tuple[str, str]]]] = {}
    for row in csv.DictReader(table):
        _, metrics = kernels.setdefault(row["ID"], (row["Kernel Name"], {}))
        metrics[row["Metric Name"]] = (row["Metric Value"], row["Metric Unit"])
    yield from kernels.values()


def _counted(name: str, metrics: dict[str, tuple[str, str]]) -> CountedKernel:
    values: dict[str, float] = {}
    for metric, units in _UNITS.items():
        value, unit = metrics.get(metric, ("n/a", ""))
        number = value.replace(",", "")
        if not re.fullmatch(r"\d+(\.\d+)?(e[+-]?\d+)?", number):
            raise _NotCountedError(f"Nsight Compute has no {metric} of {name} on this GPU")
        if unit not in units:
            raise _NotCountedError(
                f"Nsight Compute gives {metric} in {unit!r}, where {units[0]!r} was expected"
            )
        values[metric] = float(number)
    return CountedKernel(
        name,
        warp_occupancy=values[_WARPS_ACTIVE] / 100,
        dram_read_bytes=round(values[_DRAM_READ]),
        dram_written_bytes=round(values[_DRAM_WRITTEN]),
        duration_us=values[_DURATION] / 1e3,
    )


def _why_nothing(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    for start, meaning in (
        (TARGET_FAILED, "the counted process failed: "),
        ("==ERROR==", "Nsight Compute failed: "),
    ):
        for line in lines:
            if line.startswith(start):
                return meaning + line.removeprefix(start).strip().rstrip(".")
    if any("No kernels were profiled" in line for line in lines):
        return "Nsight Compute saw no GPU kernel in the call"
    return f"Nsight Compute gave no counters; its last words: {lines[-1] if lines else 'none'}"
