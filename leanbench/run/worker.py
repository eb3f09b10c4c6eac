"""The worker process: one problem after another on one GPU, or for one predicted GPU.

A crash costs one cell. Started as ``python -m leanbench.run.worker FD``, with FD its end of a
connection, see leanbench.run.messages. The first message has the target; the answer is the
environment. Each further one has a problem with kernels; the answer has row fields by kernel. A
message names a kernel before its code runs, so that the parent can blame it. The parent logs stdout
and stderr.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from leanbench.core import registry
from leanbench.core.config import KernelConfig
from leanbench.core.errors import GpuUnusable, SuspectResult, Tampered, UserError
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.kernel import Kernel
from leanbench.core.parent import die_with_parent
from leanbench.core.problem import AttentionProblem
from leanbench.measure.ranks import ProcessGroupReuseError, RankLost
from leanbench.measure.torch_errors import (
    first_line,
    is_out_of_memory,
    is_torch_error,
    launch_error,
)
from leanbench.run.messages import Message, receive, send

Outcome = dict[str, Any]
#: Function of problem, kernels, config choice and overrides that returns row fields by kernel.
RunProblem = Callable[
    [AttentionProblem, Sequence[Kernel], str, Mapping[str, KernelConfig]], dict[str, Outcome]
]


class Announcer:
    """Tells the parent which kernel runs next; None for no kernel. `current` is the last one."""

    def __init__(self, parent: Connection) -> None:
        self._parent = parent
        self.current: str | None = None

    def __call__(self, name: str | None) -> None:
        if self.current != name:
            self.current = name
            send(self._parent, {"at": name})


def main() -> None:
    # A hanging kernel never sees the closed socket.
    die_with_parent(os.getppid())
    with Connection(int(sys.argv[1])) as parent:
        _serve(parent)


def _serve(parent: Connection) -> None:
    """Answer requests until the parent closes its side or this process is unusable."""
    announce = Announcer(parent)
    try:
        run_problem, hello = _start(receive(parent), announce)
    except Exception as error:
        send(parent, {"failed": first_line(error)})
        return
    send(parent, hello)
    usable = True
    while usable:
        try:
            request = receive(parent)
        except EOFError:
            return
        announce(None)
        rows, usable = _attempt(run_problem, request, announce)
        send(parent, {"rows": rows, "usable": usable})


def _start(init: Message, announce: Announcer) -> tuple[RunProblem, Message]:
    """Return the function that runs a problem, and the first answer: environment, calibration."""
    from leanbench.configs.store import settings_hash
    from leanbench.measure.options import MeasureOptions
    from leanbench.records.environment import measured_environment, predicted_environment

    index, gpu = init["local_index"], GpuSpec.from_dict(init["gpu"])
    options = MeasureOptions.from_dict(init["options"])
    settings = {"settings": settings_hash(gpu)}
    if index is None:
        predictor = _predictor(gpu, announce, energy=options.energy)
        return predictor, {"environment": predicted_environment() | settings}
    from leanbench.decode.measure import ModelStep
    from leanbench.measure.calibration import calibrate
    from leanbench.measure.instruments import open_instruments
    from leanbench.measure.protocol import measure_problem
    from leanbench.measure.ranks import environment_of_ranks
    from leanbench.measure.shared import attention_on

    instruments = open_instruments(index, options, announce)
    several = environment_of_ranks(init["gpus"], index) if init["gpus"] > 1 else {}
    hello: Message = {"environment": measured_environment(index) | several | settings}
    if init["calibrate"]:
        hello["calibration_us"] = calibrate(instruments)
    # Imported modules stay: exclude them from garbage collection between problems.
    gc.collect()
    gc.freeze()

    def measure(problem: AttentionProblem, *request: Any) -> dict[str, Outcome]:
        subject = attention_on if problem.whole_model is None else ModelStep
        return measure_problem(subject(instruments, problem), *request)

    return measure, hello


def _predictor(gpu: GpuSpec, announce: Announcer, *, energy: bool) -> RunProblem:
    from leanbench.decode.predict import predict_step
    from leanbench.model.predict import predict_cell

    def predict(
        problem: AttentionProblem,
        kernels: Sequence[Kernel],
        configs: str,
        overrides: Mapping[str, KernelConfig],
    ) -> dict[str, Outcome]:
        rows: dict[str, Outcome] = {}
        for kernel in kernels:
            announce(kernel.name)
            request = overrides.get(kernel.name, kernel.config_choice or configs)
            predict_row = predict_cell if problem.whole_model is None else predict_step
            row = predict_row(problem, kernel, request, gpu)
            if not energy:
                row.pop("energy_mj", None)
            rows[kernel.name] = row
        return rows

    return predict


def _attempt(
    run_problem: RunProblem, request: Message, announce: Announcer
) -> tuple[dict[str, Outcome], bool]:
    """Return row fields by kernel, and True if this process is still usable.

    If a kernel fails, only its fields are returned. An error outside of kernels fails all of them.
    A problem that needs a new process has no fields.
    """
    names = request["kernels"]
    try:
        kernels = [registry.kernel(name) for name in names]
        overrides = {
            name: registry.kernel(name).read_config(fields)
            for name, fields in request["overrides"].items()
        }
        problem = AttentionProblem.from_dict(request["problem"])
        return run_problem(problem, kernels, request["configs"], overrides), True
    except ProcessGroupReuseError:
        return {}, False
    except Exception as error:
        outcome, usable = _failure(error)
        blamed = announce.current
        return {name: outcome for name in names if blamed in (None, name)}, usable


def _failure(error: Exception) -> tuple[Outcome, bool]:
    """Return the row fields of an error, and True if this process is still usable."""
    import traceback

    if isinstance(error, SuspectResult):
        return {"status": "suspect", "reason": str(error)}, not isinstance(error, Tampered)
    if isinstance(error, UserError) and not isinstance(error, GpuUnusable):
        # Such as a wrong version of a library. The process is intact.
        return {"status": "unsupported", "reason": str(error)}, True
    # A log on a full disk must not cost the reason.
    with contextlib.suppress(OSError):
        traceback.print_exception(error)
    if isinstance(error, RankLost):
        from leanbench.records.directory import WORKER_LOG

        # The same words as the parent, which can notice it first.
        return {"status": "crashed", "reason": f"{error}, see {WORKER_LOG}"}, False
    reason = first_line(launch_error(error))
    if is_out_of_memory(error):
        return {"status": "out_of_memory", "reason": reason}, True
    return {"status": "crashed", "reason": reason}, not _is_sticky(error)


def _is_sticky(error: Exception) -> bool:
    """Return True if every later CUDA call of this process would fail."""
    return (
        isinstance(error, GpuUnusable)
        or is_torch_error(error, "AcceleratorError")
        or "CUDA" in str(error)
    )


if __name__ == "__main__":
    main()
