"""A kernel on its way through the measurement of a problem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from leanbench.core.config import KernelConfig
from leanbench.core.kernel import Kernel
from leanbench.measure.timing import Launches, Replay, Timing
from leanbench.records.outcome import Outcome

if TYPE_CHECKING:
    from leanbench.gpu.processes import GpuProcess


@dataclass(kw_only=True)
class Candidate:
    """One kernel, prepared on every buffer of the loaded problem and checked once."""

    kernel: Kernel
    config: KernelConfig | None
    #: One for each buffer, in the order of rotation.
    launches: Launches
    #: What is known so far.
    outcome: Outcome
    #: Sentences for its row.
    warnings: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.kernel.name

    @property
    def is_incorrect(self) -> bool:
        """Whether a check has failed: nothing more is measured then."""
        return self.outcome.status == "incorrect"


@dataclass(kw_only=True)
class TimedCandidate(Candidate):
    """A candidate after the rounds in which all were timed in turn."""

    #: The graph that was replayed.
    replay: Replay
    timing: Timing
    #: Median latency of the read floor in the same rounds.
    read_floor_us: float
    #: That used the GPU meanwhile.
    other_processes: Sequence[GpuProcess]
