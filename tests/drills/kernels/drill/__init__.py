"""Kernels that do nothing, and at one context of 25 what a kernel must not do. They build on
tests/fixtures/kernels.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import time
from pathlib import Path

from leanbench.kernels.steady import Steady

from leanbench.core.problem import AttentionProblem

#: The thirteenth of 1k to 25k, in the middle.
FAULTY_CONTEXT = 13 * 1024


class Faulty(Steady):
    def misbehave(self, problem: AttentionProblem) -> None:
        if problem.context == FAULTY_CONTEXT:
            # A core file would be of use to nobody.
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            self.fail()

    def fail(self) -> None:
        raise NotImplementedError


class Raises(Faulty):
    name = "raises"

    def fail(self) -> None:
        raise ZeroDivisionError("division by zero\nand a second line")


class LosesGpu(Faulty):
    """As torch reports an error of the device, which leaves the process unusable."""

    name = "loses_gpu"
    failed = False

    def misbehave(self, problem: AttentionProblem) -> None:
        if self.failed:
            self.fail()
        super().misbehave(problem)

    def fail(self) -> None:
        LosesGpu.failed = True
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nand more")


class ReadsNull(Faulty):
    name = "reads_null"

    def fail(self) -> None:
        ctypes.string_at(0)


class Recurses(Faulty):
    name = "recurses"

    def fail(self) -> None:
        self.fail()


class Greedy(Faulty):
    name = "greedy_host"

    def fail(self) -> None:
        bytearray(1 << 60)


class Loops(Faulty):
    name = "loops"

    def fail(self) -> None:
        while True:
            pass


class IgnoresSignals(Faulty):
    """Only SIGKILL ends it."""

    name = "ignores_signals"

    def fail(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        while True:
            time.sleep(1)


class HangsUp(Faulty):
    """Closes what it did not open, the channel to the parent too."""

    name = "hangs_up"

    def fail(self) -> None:
        os.closerange(3, 1024)
        os._exit(0)


class Waits(Faulty):
    """Reports that it runs, and waits to be killed."""

    name = "waits"

    def fail(self) -> None:
        Path(os.environ["LEANBENCH_DRILL_MARK"]).touch()
        time.sleep(60)


class Unhurried(Steady):
    """So that a sweep can be ended in the middle."""

    name = "unhurried"

    def misbehave(self, problem: AttentionProblem) -> None:
        time.sleep(0.03)


_FAULTY = (Raises, LosesGpu, ReadsNull, Recurses, Greedy, Loops, IgnoresSignals, HangsUp, Waits)
KERNELS = [Unhurried(), *(kind() for kind in _FAULTY)]
