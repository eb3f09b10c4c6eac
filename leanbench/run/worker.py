"""The worker process: one problem after another on one GPU (or for one predicted GPU), so that a
crash costs a cell.

Started as ``python -m leanbench.run.worker FD``. It speaks JSON lines over the socket FD: the first
line names the target and is answered with the environment, each further line is a problem with its
kernels and is answered with row fields for each kernel. Before a kernel's code runs, a line names
it: if this process dies or hangs, the parent knows whom to blame. Its own stdout and stderr belong
to the kernels; the parent sends them to a log.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import Kernel, KernelConfig, kernel

Outcome = dict[str, Any]
#: Row fields by kernel, for a problem, its kernels, how their configs are chosen, and those that
#: are given instead.
RunProblem = Callable[
    [AttentionProblem, Sequence[Kernel], str, Mapping[str, KernelConfig]], dict[str, Outcome]
]
#: Told whose code runs next, None for nobody's.
Announce = Callable[[str | None], None]

#: prctl's option "signal me when my parent dies".
_PR_SET_PDEATHSIG = 1


def main() -> None:
    parent = os.getppid()
    _die_with_parent(parent)
    with (
        socket.socket(fileno=int(sys.argv[1])) as channel,
        channel.makefile("rw", encoding="utf-8") as lines,
    ):

        def answer(message: Outcome) -> None:
            lines.write(json.dumps(message) + "\n")
            lines.flush()

        at: list[str | None] = [None]

        def announce(name: str | None) -> None:
            if at[0] != name:
                at[0] = name
                answer({"at": name})

        try:
            run_problem, environment = _start(json.loads(lines.readline()), announce)
        except Exception as error:
            answer({"failed": _first_line(error)})
            return
        answer({"environment": environment})
        # Ends when the parent closes its side.
        for line in lines:
            announce(None)
            rows, usable = _attempt(run_problem, json.loads(line), lambda: at[0])
            answer({"rows": rows, "usable": usable})
            if not usable:
                return


def _start(init: dict[str, Any], announce: Announce) -> tuple[RunProblem, dict[str, Any]]:
    """What runs a problem on the target, and the environment its rows are taken in."""
    from leanbench.records.environment import measured_environment, predicted_environment

    index = init["local_index"]
    if index is None:
        from leanbench.model.cell import predict_cell

        spec = GpuSpec.from_dict(init["gpu"])

        def predict(
            problem: AttentionProblem,
            kernels: Sequence[Kernel],
            configs: str,
            pins: Mapping[str, KernelConfig],
        ) -> dict[str, Outcome]:
            rows = {}
            for each in kernels:
                announce(each.name)
                rows[each.name] = predict_cell(
                    problem, each, pins.get(each.name, each.config_choice or configs), spec
                )
            return rows

        return predict, predicted_environment()
    from leanbench.measure.cell import Bench
    from leanbench.measure.options import MeasureOptions

    bench = Bench(index, MeasureOptions.from_dict(init["options"]), announce)
    environment = measured_environment(index)
    # What is imported stays: collecting garbage between problems need not look at it.
    gc.collect()
    gc.freeze()
    return bench.run, environment


def _attempt(
    run_problem: RunProblem, request: dict[str, Any], at: Callable[[], str | None]
) -> tuple[dict[str, Outcome], bool]:
    """Row fields by kernel, and whether this process can go on afterwards.

    When a kernel fails, only its fields are returned: the parent asks again for the others. What
    fails where no kernel's code ran is everybody's.
    """
    names = request["kernels"]
    try:
        kernels = [kernel(name) for name in names]
        pins = {name: KernelConfig(**config) for name, config in request.get("pins", {}).items()}
        return run_problem(
            AttentionProblem.from_dict(request["problem"]), kernels, request["configs"], pins
        ), True
    except Exception as error:
        outcome, usable = _failure(error)
        blamed = at()
        return {name: outcome for name in names if blamed in (None, name)}, usable


def _failure(error: Exception) -> tuple[Outcome, bool]:
    """The row fields of an error, and whether this process can go on afterwards."""
    import traceback

    name = type(error).__name__
    if name == "Alarm":
        return {"status": "suspect", "reason": str(error)}, True
    if name == "UserError":
        # A library of another version, settings that do not fit: a sentence, and nothing of the
        # process is broken.
        return {"status": "unsupported", "reason": str(error)}, True
    # A log on a full disk must not cost the reason.
    with contextlib.suppress(OSError):
        traceback.print_exception(error)
    reason = _first_line(error)
    if name == "OutOfMemoryError" or isinstance(error, MemoryError):
        return {"status": "out_of_memory", "reason": reason}, True
    return {"status": "crashed", "reason": reason}, not _is_sticky(error)


def _is_sticky(error: Exception) -> bool:
    """A CUDA error makes every later call of the process fail, as does the loss of the GPU; a new
    process knows more.

    torch and Triton word it differently.
    """
    return type(error).__name__ in ("AcceleratorError", "GpuLostError") or "CUDA" in str(error)


def _first_line(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _die_with_parent(parent: int) -> None:
    """A hanging kernel never sees the closed socket, so the operating system ends it with its
    parent (Linux).
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the call above
            os._exit(1)


if __name__ == "__main__":
    main()
