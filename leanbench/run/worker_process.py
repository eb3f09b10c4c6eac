"""The parent's side of the worker: start it, give it problems, limit its time, kill it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from leanbench.core.errors import UserError
from leanbench.core.gpu_spec import GpuSpec
from leanbench.measure.options import MeasureOptions
from leanbench.measure.ranks import LOST_FOLLOWER, RANK_LOST
from leanbench.run.cells import Cell
from leanbench.run.messages import Message, receive, send

#: Importing torch from a cold disk and opening a GPU takes tens of seconds at worst.
START_TIMEOUT_S = 180.0


class WorkerFailure(Exception):
    """The worker did not answer. `blamed` is the running kernel, None for no kernel."""

    def __init__(self, message: str = "", blamed: str | None = None) -> None:
        super().__init__(message)
        self.blamed = blamed


class WorkerLost(WorkerFailure):
    """The worker ended; the message tells how. `was_killed`: by SIGKILL, which no kernel sends."""

    def __init__(self, message: str, blamed: str | None, was_killed: bool = False) -> None:
        super().__init__(message, blamed)
        self.was_killed = was_killed


class WorkerTimeout(WorkerFailure):
    """A kernel took longer than allowed."""


@dataclass(frozen=True)
class WorkerTarget:
    """A GPU of this machine, or the performance model of `gpu` if `local_index` is None."""

    gpu: GpuSpec
    local_index: int | None
    options: MeasureOptions = field(default_factory=MeasureOptions)
    #: Measure the cell of leanbench.measure.calibration first.
    calibrate: bool = False
    #: GPUs of the largest problem.
    gpus: int = 1

    @property
    def source(self) -> Literal["measured", "predicted"]:
        return "predicted" if self.local_index is None else "measured"


class WorkerProcess:
    """A running worker. `log` receives its output.

    Raises:
        UserError: It does not start, so that the sweep cannot run.
    """

    def __init__(self, target: WorkerTarget, log: Path) -> None:
        self._log = log
        try:
            self._spawn()
        except OSError as error:
            raise UserError(
                f"the worker did not start: {error}; fix it, then continue with --resume"
            ) from None
        try:
            hello = self._hello(target)
        except BaseException:
            self.kill()
            raise
        self.environment: dict[str, Any] = hello["environment"]
        #: Latency of the calibration cell, if it was measured.
        self.calibration_us: float | None = hello.get("calibration_us")

    def _spawn(self) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        with theirs, self._log.open("ab") as output:
            self._process = subprocess.Popen(
                # -P: files of the current folder must not shadow modules.
                [sys.executable, "-P", "-m", "leanbench.run.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # A process group: Ctrl-C reaches only the parent, a kill also ends compilers.
                start_new_session=True,
            )

    def _hello(self, target: WorkerTarget) -> Message:
        try:
            answer = self._ask(asdict(target), START_TIMEOUT_S)
        except WorkerTimeout:
            raise UserError(
                f"the worker did not start within {START_TIMEOUT_S:.0f} s, see {self._log}"
            ) from None
        except WorkerLost as lost:
            raise UserError(f"the worker did not start: {lost}, see {self._log}") from None
        if "failed" in answer:
            raise UserError(f"the worker did not start: {answer['failed']}, see {self._log}")
        return answer

    def run(
        self, cells: Sequence[Cell], timeout_s: float
    ) -> tuple[dict[str, dict[str, Any]], bool]:
        """Return row fields by kernel for cells of one problem, and True if the worker is usable.

        Kernels are missing after one of them failed, or if only a new worker can measure the
        problem.

        Raises:
            WorkerTimeout: A kernel did not finish in its `timeout_s`.
            WorkerLost: The process ended.
        """
        first = cells[0]
        kernels = [cell.kernel for cell in cells]
        overrides = {
            cell.kernel: cell.override.to_dict() for cell in cells if cell.override is not None
        }
        request = {
            "problem": first.problem.to_dict(),
            "kernels": kernels,
            "configs": first.configs,
            "overrides": overrides,
        }
        answer = self._ask(request, timeout_s)
        return answer["rows"], answer["usable"]

    def kill(self) -> None:
        """Kill the worker and everything it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._connection.close()

    def _ask(self, message: Message, timeout_s: float) -> Message:
        """Send a message and return the answer. All turns of a kernel together take `timeout_s` at
        most.
        """
        spent_s: dict[str | None, float] = {}
        at: str | None = None
        try:
            send(self._connection, message)
        except OSError:
            raise self._lost(at) from None
        while True:
            begun = time.monotonic()
            answer = self._receive(timeout_s - spent_s.get(at, 0.0), at)
            spent_s[at] = spent_s.get(at, 0.0) + time.monotonic() - begun
            if "at" not in answer:
                return answer
            at = answer["at"]

    def _receive(self, timeout_s: float, at: str | None) -> Message:
        try:
            if self._connection.poll(max(0.0, timeout_s)):
                return receive(self._connection)
        except (EOFError, OSError):
            raise self._lost(at) from None
        except (ValueError, RecursionError):
            # A kernel wrote into the connection.
            raise WorkerLost("the worker's answer cannot be read", at) from None
        raise WorkerTimeout(blamed=at)

    def _lost(self, at: str | None) -> WorkerLost:
        try:
            code = self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            return WorkerLost("the worker closed its connection", at)
        if code < 0:
            with contextlib.suppress(ValueError):
                ended_by = signal.Signals(-code)
                return WorkerLost(
                    f"the worker was ended by {ended_by.name}", at, ended_by == signal.SIGKILL
                )
        if code == LOST_FOLLOWER:
            return WorkerLost(RANK_LOST, at)
        return WorkerLost(f"the worker ended with exit code {abs(code)}", at)
