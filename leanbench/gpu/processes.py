"""Who else is on a GPU, and who of them uses its SMs."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leanbench.gpu.nvml_library import ask

#: Clients of the Multi-Process Service are in a list of their own.
_LISTS = (
    "nvmlDeviceGetComputeRunningProcesses",
    "nvmlDeviceGetMPSComputeRunningProcesses",
    "nvmlDeviceGetGraphicsRunningProcesses",
)


@dataclass(frozen=True)
class GpuProcess:
    """A process with a context on a GPU."""

    #: As NVML counts. In a container that can be the host's count: such a process may not exist
    #: here.
    pid: int
    #: The program, without its folder; None where that cannot be seen from here.
    name: str | None
    #: Percent of the time in which the process had a kernel on the SMs, the highest of NVML's
    #: samples; 0: it only holds a context. None where NVML does not say.
    sm_utilisation: int | None


def other_processes(nvml: Any, gpu: Any, since_us: int) -> list[GpuProcess] | None:
    """See `leanbench.gpu.nvml.Nvml.other_processes`.

    Args:
        nvml: the `pynvml` module.
        gpu: its handle of the whole GPU.
    """
    lists = [ask(nvml, getattr(nvml, name), gpu) for name in _LISTS]
    if lists[0] is None:
        return None
    pids = {int(process.pid) for processes in lists for process in processes or ()}
    if os.getpid() not in pids and _runs_cuda_here():
        # The pids are counted elsewhere, and one of them is this process.
        strangers = {pid for pid in pids if not Path(f"/proc/{pid}").exists()}
        if len(strangers) > 1:
            return None
        pids -= strangers
    utilisation = _sm_utilisation(nvml, gpu, since_us)
    return [
        GpuProcess(pid, _name(nvml, pid), None if utilisation is None else utilisation.get(pid, 0))
        for pid in sorted(pids - {os.getpid()})
    ]


def _sm_utilisation(nvml: Any, gpu: Any, since_us: int) -> dict[int, int] | None:
    """The highest sample of each pid, in percent; a pid without samples had no work."""

    def read() -> list[Any]:
        try:
            return nvml.nvmlDeviceGetProcessUtilization(gpu, since_us)
        except nvml.NVMLError as error:
            # The binding raises SUCCESS when the driver says that there are no samples.
            if error.value in (nvml.NVML_ERROR_NOT_FOUND, nvml.NVML_SUCCESS):
                return []
            raise

    samples = ask(nvml, read)
    if samples is None:
        return None
    highest: dict[int, int] = {}
    for sample in samples:
        # Drivers are known to return entries that were never filled: old times, thousands of
        # percent.
        if sample.timeStamp > since_us and sample.smUtil <= 100:
            highest[sample.pid] = max(highest.get(sample.pid, 0), int(sample.smUtil))
    return highest


def _runs_cuda_here() -> bool:
    """Whether this process has a context for certain: torch has memory of a GPU."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 0


def _name(nvml: Any, pid: int) -> str | None:
    name = ask(nvml, nvml.nvmlSystemGetProcessName, pid)
    if not name:
        try:
            name = Path(f"/proc/{pid}/comm").read_text()
        except OSError:
            return None
    # NVML gives the whole path, of some programs the arguments too.
    words = name.split()
    return words[0].rsplit("/", 1)[-1] if words else None
