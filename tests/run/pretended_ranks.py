"""A worker and its followers in real processes, with pretended GPUs and measurements.

Imported by name, because requests to followers name a function of it.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from leanbench.core.kernel import Kernel
from leanbench.distributed import shards
from leanbench.gpu.catalogue import find
from leanbench.measure import follower, instruments, one_gpu, protocol, ranks, shared
from leanbench.measure.instruments import Instruments
from leanbench.measure.options import MeasureOptions
from leanbench.measure.read_floor import ReadFloor
from leanbench.records import environment
from leanbench.records.outcome import Outcome

#: Problem and kernel that rank 1 never finishes.
HANGS_AT, HANGS = 2048, "fa2"
#: Problem and kernel that fail on rank 1 while rank 0 waits for its GPU.
FAILS_AT, FAILS = 8192, "fa2"
#: Where followers say who they are, a line each.
FOLLOWERS = "LEANBENCH_TEST_FOLLOWERS"


def command(role: str, *words: str) -> list[str]:
    script = f"import sys, pretended_ranks as own; own.{role}()"
    return [sys.executable, "-c", script, *words]


def folders() -> str:
    """Return PYTHONPATH of the processes."""
    own = Path(__file__).parent
    return os.pathsep.join([str(own), str(own.parents[1]), os.environ.get("PYTHONPATH", "")])


def worker() -> None:
    from leanbench.run.worker import main

    _pretend()
    main()


def follow() -> None:
    with Path(os.environ[FOLLOWERS]).open("a") as file:
        file.write(f"{os.getpid()}\n")
    _pretend()
    follower.main()


def _measure(
    subject: shared.SeveralGpus, kernels: Sequence[Kernel], requests: Mapping[str, Any]
) -> dict[str, Outcome]:
    """Replace `measure_loaded` of a shared problem; the latency is all ranks' tokens."""
    own, problem, outcomes = subject.all_ranks, subject.problem, {}
    own.layout(problem.gpus)
    for kernel in kernels:
        subject.instruments.announce(kernel.name)
        if own.rank == 1 and (problem.context, kernel.name) == (HANGS_AT, HANGS):
            os.kill(os.getpid(), signal.SIGSTOP)
        if (problem.context, kernel.name) == (FAILS_AT, FAILS):
            if own.rank == 1:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            time.sleep(600)
        tokens = sum(own.all_gather(problem.shard(own.rank).max_context))
        outcomes[kernel.name] = _outcome(tokens)
    subject.instruments.announce(None)
    return outcomes


def _measure_alone(
    subject: protocol.Subject, kernels: Sequence[Kernel], requests: Mapping[str, Any]
) -> dict[str, Outcome]:
    """Replace `measure_loaded` of one GPU likewise."""
    return {kernel.name: _outcome(subject.problem.max_context) for kernel in kernels}


def _outcome(tokens: int) -> Outcome:
    """Return an outcome with the worker as a warning."""
    return Outcome(status="ok", latency_us=float(tokens), warnings=[f"worker {os.getpid()}"])


class _ContextGroup:
    """Stands for that of leanbench.distributed, and keeps process groups by name for the life of
    the process, as torch's symmetric memory does: where that would wait for ever, this one fails.
    """

    known: ClassVar[dict[str, Any]] = {}

    def __init__(self, processes: Any, timeout_s: float, workspace_bytes: int) -> None:
        name = processes.group_name
        if self.known.setdefault(name, processes) is not processes:
            raise RuntimeError(f"process group {name} is another one than before")


def _pretend() -> None:
    """Replace torch's GPUs by four pretended ones."""
    join = ranks.join

    def start(words: list[str], **options: Any) -> subprocess.Popen[Any]:
        return subprocess.Popen(command("follow", *words[-4:]), **options)

    def opened(index: int, options: MeasureOptions, announce: Any = lambda name: None) -> Any:
        device, spec = torch.device("cpu"), find("h200")
        return Instruments(device, spec, options, None, None, ReadFloor(), announce)

    fakes: dict[Any, dict[str, Any]] = {
        ranks: {
            "_device_count": lambda: 4,
            "_OWN_REPORT_S": 0.1,
            "environment_of_several": lambda devices: {
                "gpu_uuids": [f"GPU-{'abcd'[index]}" for index in devices]
            },
            "join": lambda rank, size, port, device: join(rank, size, port, None),
            "subprocess": SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL),
        },
        shared: {"measure_loaded": _measure},
        shared.SeveralGpus: {"load": lambda subject: None},
        protocol: {"measure_loaded": _measure_alone},
        one_gpu.OneGpu: {"load": lambda subject: None},
        shards: {"ContextGroup": _ContextGroup},
        instruments: {"open_instruments": opened},
        environment: {"measured_environment": lambda index: {"gpu_uuid": "GPU-a"}},
    }
    for module, names in fakes.items():
        for name, fake in names.items():
            setattr(module, name, fake)
