"""The worker process: runs one cell after another on one GPU (or for one predicted GPU), so that a crash costs a cell.

Started as ``python -m leanbench.run.worker FD``. It speaks JSON lines over the socket FD: the first line names the
target and is answered with the environment, each further line is a cell and is answered with fields of its row.
Its own stdout and stderr belong to the kernels; the parent sends them to a log.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from leanbench.gpu.spec import GpuSpec
from leanbench.problem import AttentionProblem
from leanbench.registry import Kernel, kernel

Outcome = dict[str, Any]
RunCell = Callable[[AttentionProblem, Kernel, str], Outcome]

#: prctl's option "signal me when my parent dies".
_PR_SET_PDEATHSIG = 1


def main() -> None:
    parent = os.getppid()
    _die_with_parent(parent)
    with socket.socket(fileno=int(sys.argv[1])) as channel, channel.makefile("rw", encoding="utf-8") as lines:

        def answer(message: Outcome) -> None:
            lines.write(json.dumps(message) + "\n")
            lines.flush()

        try:
            run_cell, environment = _start(json.loads(lines.readline()))
        except Exception as error:
            answer({"failed": _first_line(error)})
            return
        answer({"environment": environment})
        # Ends when the parent closes its side.
        for line in lines:
            cell = json.loads(line)
            outcome, usable = _attempt(run_cell, cell)
            answer({"row": outcome, "usable": usable})
            if not usable:
                return


def _start(init: dict[str, Any]) -> tuple[RunCell, dict[str, Any]]:
    """What runs a cell on the target, and the environment its rows are taken in."""
    from leanbench.run.environment import measured_environment, predicted_environment

    index = init["local_index"]
    if index is None:
        from leanbench.model.cell import predict_cell

        spec = spec_from_dict(init["gpu"])
        return lambda problem, kernel, configs: predict_cell(problem, kernel, configs, spec), predicted_environment()
    from leanbench.measure.cell import Bench

    return Bench(index).run, measured_environment(index)


def _attempt(run_cell: RunCell, cell: dict[str, Any]) -> tuple[Outcome, bool]:
    """Fields of the cell's row, and whether this process can go on afterwards."""
    try:
        return run_cell(AttentionProblem.from_dict(cell["problem"]), kernel(cell["kernel"]), cell["configs"]), True
    except Exception as error:
        import traceback

        traceback.print_exc()
        reason = _first_line(error)
        if type(error).__name__ == "OutOfMemoryError":
            _free_gpu_memory()
            return {"status": "out_of_memory", "reason": reason}, True
        return {"status": "crashed", "reason": reason}, not _is_cuda_error(error)


def _is_cuda_error(error: Exception) -> bool:
    """A CUDA error is sticky: every later call of the process fails with it. torch and Triton word it differently."""
    return type(error).__name__ == "AcceleratorError" or "CUDA" in str(error)


def _free_gpu_memory() -> None:
    import gc

    gc.collect()
    if (torch := sys.modules.get("torch")) is not None:
        torch.cuda.empty_cache()


def _first_line(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def spec_from_dict(values: dict[str, Any]) -> GpuSpec:
    """A GpuSpec that went through JSON."""
    known = {field.name for field in fields(GpuSpec)}
    tuples = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    return GpuSpec(**{name: value for name, value in {**values, **tuples}.items() if name in known})


def _die_with_parent(parent: int) -> None:
    """A hanging kernel never sees the closed socket, so the operating system ends it with its parent (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the call above
            os._exit(1)


if __name__ == "__main__":
    main()
