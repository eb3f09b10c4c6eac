"""Protocol of a measurement: the same steps in the same order for every kernel.

Load, prepare and check each kernel, time all in interleaved rounds, confirm, judge, measure what
else the options ask for. A `Subject` defines how each of these is done: on one GPU, on several GPUs
that share a problem, or for a step of a whole model. A further quantity is a further step.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Self

from leanbench.core.config import KernelConfig
from leanbench.core.errors import GpuUnusable, OutOfMemory, UserError
from leanbench.core.inputs import AttentionInputs
from leanbench.core.kernel import Kernel
from leanbench.core.problem import AttentionProblem
from leanbench.measure.candidate import Candidate
from leanbench.measure.instruments import Instruments
from leanbench.measure.timing import Launches, Replay, Sampler, Timing, run_rounds
from leanbench.records.outcome import Outcome

if TYPE_CHECKING:
    from leanbench.core.timeline import Timeline
    from leanbench.gpu.processes import GpuProcess
    from leanbench.measure.energy_meter import SustainedReading
    from leanbench.measure.ranks import Ranks

#: Source of launch settings by kernel (see leanbench.configs.lookup.resolve), or the settings.
Requests = Mapping[str, str | KernelConfig]
#: Measurement of a candidate on its subject.
Step = Callable[[Any, Candidate], Outcome]
#: Name of the read floor in the rounds.
FLOOR = "read floor"


class Subject(ABC):
    """Problem and the hardware that runs it. Loaded inside a `with` block."""

    #: Steps for every timed kernel.
    steps: ClassVar[tuple[Step, ...]]
    #: Steps for every kernel that is still correct. An error costs a warning, not the row.
    extras: ClassVar[tuple[Step, ...]] = ()

    def __init__(self, instruments: Instruments, problem: AttentionProblem) -> None:
        self.instruments, self.problem = instruments, problem
        #: Processes that share the problem; None if it is measured in this one.
        self.ranks: Ranks | None = None
        #: Names of the kernels in the row. Baselines are not among them.
        self.names: frozenset[str] = frozenset()
        #: Inputs that launches rotate over.
        self.buffers: list[AttentionInputs] = []
        #: Timings of the rounds by the name of a kernel or baseline.
        self.timings: dict[str, Timing] = {}
        #: Processes that used the GPU during the rounds.
        self.other_processes: Sequence[GpuProcess] = ()

    def __enter__(self) -> Self:
        self.load()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # A launch that a library keeps must not keep the inputs.
        self.buffers.clear()

    def refusal(self, kernel: Kernel, request: str | KernelConfig) -> str | None:
        """Return the reason why a kernel cannot be measured, or None."""
        if self.problem.whole_model is not None:
            return (
                f"{self.problem.whole_model} is a whole model, of which `leanbench decode` measures"
                " a step"
            )
        if not kernel.is_timed:
            return (
                f"{kernel.name} is there to check others, it cannot be captured in a CUDA graph and"
                " timed"
            )
        return kernel.unsupported_reason(self.problem)

    def known_fields(self, kernel: Kernel) -> dict[str, Any]:
        """Return the row fields that need no measurement."""
        return {
            "source": "measured",
            "decomposition": kernel.decomposition,
            "kv_bytes": self.problem.kv_bytes,
            "cache": self.instruments.options.cache,
            "library": kernel.library() if kernel.unavailable_reason() is None else None,
        }

    def measure(self, kernels: Sequence[Kernel], requests: Requests) -> dict[str, Outcome]:
        """Load the subject and measure the kernels."""
        with self:
            return measure_loaded(self, kernels, requests)

    @abstractmethod
    def load(self) -> None:
        """Allocate what launches need.

        Raises:
            OutOfMemory: The free memory is too small.
        """

    @abstractmethod
    def prepare(self, kernel: Kernel, request: str | KernelConfig) -> Candidate:
        """Choose the settings of a kernel, make its launches and check one of them.

        The outcome has a status if the kernel cannot be timed.
        """

    def capture(self, candidate: Candidate) -> Replay:
        """Capture the launches of a candidate."""
        return self.make_replay(candidate.launches)

    def make_replay(self, launches: Launches) -> Replay:
        """Capture launches in a CUDA graph."""
        return Replay(launches, self.instruments.options.effort.sample_ms)

    @abstractmethod
    def baselines(self) -> dict[str, Sampler]:
        """Return the samplers that kernels are compared with in the rounds."""

    def time(self, candidates: Sequence[Candidate]) -> None:
        """Time candidates and baselines in interleaved rounds."""
        samplers = {**self.baselines(), **{own.name: own.replay for own in candidates}}
        effort, state = self.instruments.options.effort, self.instruments.gpu_state
        self.timings = run_rounds(samplers, effort, state, self.before_sample)
        for candidate in candidates:
            candidate.timing = self.timings[candidate.name]

    def before_sample(self, name: str) -> None:
        """Announce the kernel of the next sample."""
        self.instruments.announce(name if name in self.names else None)

    def processes_since(self, start_us: int) -> Sequence[GpuProcess]:
        """Return the processes of others that used the GPU since a time of the epoch."""
        nvml = self.instruments.nvml
        seen = None if nvml is None else nvml.other_processes(start_us)
        # The parent is the sweep that started this worker.
        return [process for process in seen or () if process.pid != os.getppid()]

    def floor_reading(self) -> SustainedReading | None:
        """Return the sustained reading of the read floor, if there is one."""
        return None

    def finish(self, candidates: Sequence[Candidate], timed: Sequence[Candidate]) -> None:
        """Measure or check something after all kernels."""
        return

    def timelines(self, kernel: Kernel, request: str) -> list[Timeline] | str:
        """Record the timelines of one call, one per GPU. Return a sentence if there are none."""
        raise NotImplementedError


def measure_problem(
    subject: Subject,
    kernels: Sequence[Kernel],
    configs: str = "default",
    overrides: Mapping[str, KernelConfig] | None = None,
) -> dict[str, dict[str, Any]]:
    """Measure kernels on a subject. Return row fields by kernel, with raw samples in `raw_samples`.

    Args:
        configs: `default` or `heuristic`, see leanbench.configs.lookup, or `best` to time all
            candidates of a kernel and report the fastest.
        overrides: Launch settings by kernel, instead of those by `configs`.

    Raises:
        SuspectResult: The kernel announced last invalidated its own figures.
        GpuUnusable: The GPU no longer answers.
    """
    announce = subject.instruments.announce
    requests: dict[str, str | KernelConfig] = {}
    outcomes: dict[str, Outcome] = {}
    for kernel in kernels:
        announce(kernel.name)
        request = (overrides or {}).get(kernel.name, kernel.config_choice or configs)
        reason = subject.refusal(kernel, request)
        if reason:
            outcomes[kernel.name] = Outcome(status="unsupported", reason=reason)
        else:
            requests[kernel.name] = request
    announce(None)
    try:
        if requests:
            able = [kernel for kernel in kernels if kernel.name in requests]
            outcomes |= subject.measure(able, requests)
    except OutOfMemory as error:
        outcomes |= dict.fromkeys(requests, Outcome(status="out_of_memory", reason=str(error)))
    return {
        kernel.name: subject.known_fields(kernel) | outcomes[kernel.name].fields()
        for kernel in kernels
    }


def measure_loaded(
    subject: Subject, kernels: Sequence[Kernel], requests: Requests
) -> dict[str, Outcome]:
    """Measure kernels on a loaded subject. If GPUs share the problem, every rank calls this."""
    announce = subject.instruments.announce
    subject.names = frozenset(requests)

    candidates: list[Candidate] = []
    for kernel in kernels:
        announce(kernel.name)
        candidates.append(subject.prepare(kernel, requests[kernel.name]))
    timed = [candidate for candidate in candidates if candidate.outcome.status is None]

    if timed:
        start_us = int(time.time() * 1e6)
        for candidate in timed:
            announce(candidate.name)
            candidate.replay = subject.capture(candidate)
        subject.time(timed)
        subject.other_processes = subject.processes_since(start_us)

    for candidate in timed:
        announce(candidate.name)
        for step in subject.steps:
            candidate.outcome |= step(subject, candidate)
    for candidate in timed if subject.extras else ():
        announce(candidate.name)
        for step in () if candidate.is_incorrect else subject.extras:
            candidate.outcome |= _try_extra(step, subject, candidate)

    announce(None)
    subject.finish(candidates, timed)
    for candidate in candidates:
        if candidate in timed or candidate.warnings:
            candidate.outcome |= Outcome(warnings=candidate.warnings)
    return {candidate.name: candidate.outcome for candidate in candidates}


def measure_timelines(subject: Subject, kernel: Kernel, configs: str) -> list[Timeline] | str:
    """Record every CTA of one call, one timeline per GPU. Return a sentence if that is impossible.

    Raises:
        UserError: This machine has fewer GPUs than the problem needs.
    """
    if reason := subject.refusal(kernel, configs):
        return reason
    try:
        return subject.timelines(kernel, configs)
    except OutOfMemory as error:
        return str(error)


def _try_extra(step: Step, subject: Subject, candidate: Candidate) -> Outcome:
    """Measure an extra. An error becomes a warning."""
    import torch

    try:
        return step(subject, candidate)
    except GpuUnusable:
        raise
    except UserError as error:
        candidate.warnings.append(str(error))
    except Exception as error:
        # The latency is valid. An error of the GPU itself is sticky: then this raises.
        torch.cuda.synchronize()
        first_line = str(error).partition("\n")[0]
        candidate.warnings.append(
            f"part of what was asked is missing ({type(error).__name__}: {first_line})"
        )
    return Outcome()
