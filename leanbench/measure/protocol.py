"""How one problem is measured: the same steps in the same order for every kernel.

Load, prepare and check each kernel, time all in turn, confirm what was timed, judge it, and measure
what else the options ask for. A step is a function of the loaded problem and the candidate that
returns an outcome; a further measured quantity is a further step in `EXTRAS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from leanbench.check.launches import launches_of
from leanbench.core.config import KernelConfig
from leanbench.core.errors import GpuUnusable, OutOfMemory, UserError
from leanbench.core.kernel import Kernel
from leanbench.core.parallel import NONE
from leanbench.core.problem import AttentionProblem
from leanbench.measure import extras
from leanbench.measure.candidate import Candidate, TimedCandidate
from leanbench.measure.confirm import check_replay, latency_fields
from leanbench.measure.instruments import Instruments
from leanbench.measure.judge import judge
from leanbench.measure.loaded import LoadedProblem
from leanbench.measure.prepare import choose_config, prepare
from leanbench.measure.rounds import time_together
from leanbench.measure.shared import measure_shared
from leanbench.measure.shared_timeline import trace_shared
from leanbench.measure.sustained import sustained_fields
from leanbench.measure.timeline import record_timeline
from leanbench.measure.timing import Replay, run_rounds
from leanbench.records.outcome import Outcome

if TYPE_CHECKING:
    from leanbench.core.timeline import Timeline

Step = Callable[[LoadedProblem, TimedCandidate], Outcome]
#: Of every kernel that was timed.
STEPS: tuple[Step, ...] = (check_replay, latency_fields, judge)
#: Of every kernel that is still correct. Each looks at the options itself and returns nothing where
#: it is not wanted; one that fails costs a warning.
EXTRAS: tuple[Step, ...] = (
    extras.plan_fields,
    extras.host_fields,
    sustained_fields,
    extras.resource_fields,
    extras.busy_fields,
    extras.counter_fields,
)


def measure_problem(
    instruments: Instruments,
    problem: AttentionProblem,
    kernels: Sequence[Kernel],
    configs: str = "default",
    overrides: Mapping[str, KernelConfig] | None = None,
) -> dict[str, dict[str, Any]]:
    """The row fields that a measurement fills, by kernel; raw samples under `raw_samples`.

    Args:
        configs: `default` or `heuristic`, see leanbench.configs.lookup, or `best` to time all of a
            kernel's candidates and report the fastest.
        overrides: launch settings by kernel, in place of what `configs` gives.

    Raises:
        SuspectResult: the kernel announced last did what makes its figures meaningless.
        GpuUnusable: the GPU no longer answers.
    """
    outcomes: dict[str, Outcome] = {}
    for kernel in kernels:
        instruments.announce(kernel.name)
        reason = _unable(kernel, problem)
        outcomes[kernel.name] = (
            Outcome(status="unsupported", reason=reason) if reason else Outcome()
        )
    able = [kernel for kernel in kernels if outcomes[kernel.name].status is None]
    requests = {
        kernel.name: (overrides or {}).get(kernel.name, kernel.config_choice or configs)
        for kernel in able
    }
    instruments.announce(None)
    try:
        if able and problem.parallel != NONE:
            outcomes |= measure_shared(instruments, problem, able, requests)
        elif able:
            with LoadedProblem(problem, instruments) as loaded:
                outcomes |= _measure(loaded, able, requests)
    except OutOfMemory as error:
        outcomes |= dict.fromkeys(requests, Outcome(status="out_of_memory", reason=str(error)))
    return {
        kernel.name: _known(kernel, problem, instruments) | outcomes[kernel.name].fields()
        for kernel in kernels
    }


def measure_timelines(
    instruments: Instruments, problem: AttentionProblem, kernel: Kernel, configs: str
) -> list[Timeline] | str:
    """Timelines of every CTA of one call, by GPU; a sentence where there can be none.

    Raises:
        UserError: this machine has fewer GPUs than the problem is for.
    """
    reason = _unable(kernel, problem)
    if reason:
        return reason
    try:
        if problem.parallel != NONE:
            return trace_shared(instruments, problem, kernel, configs)
        timeline = _timeline(instruments, problem, kernel, configs)
    except OutOfMemory as error:
        return str(error)
    return [timeline] if timeline else f"{kernel.name} has no instrumented build"


def _timeline(
    instruments: Instruments, problem: AttentionProblem, kernel: Kernel, configs: str
) -> Timeline | None:
    effort, spec = instruments.options.effort, instruments.spec
    with LoadedProblem(problem, instruments) as loaded:
        config = choose_config(loaded, kernel, configs).config
        launches = launches_of(kernel, loaded.buffers, config, configs)
        replays = {kernel.name: Replay(launches, effort.sample_ms)}
        timing = run_rounds(replays, effort, instruments.gpu_state)[kernel.name]
        return record_timeline(problem, kernel, config, loaded.buffers, spec, timing.median_us)


def _measure(
    loaded: LoadedProblem, kernels: Sequence[Kernel], requests: Mapping[str, str | KernelConfig]
) -> dict[str, Outcome]:
    announce = loaded.instruments.announce
    candidates: list[Candidate] = []
    for kernel in kernels:
        announce(kernel.name)
        candidates.append(prepare(loaded, kernel, requests[kernel.name]))
    outcomes = {candidate.name: candidate.outcome for candidate in candidates}
    correct = [candidate for candidate in candidates if not candidate.is_incorrect]
    if not correct:
        return outcomes
    timed = time_together(loaded, correct)
    for candidate in timed:
        announce(candidate.name)
        for step in STEPS:
            candidate.outcome |= step(loaded, candidate)
    for candidate in timed:
        announce(candidate.name)
        for extra in () if candidate.is_incorrect else EXTRAS:
            candidate.outcome |= _tolerant(extra, loaded, candidate)
        outcomes[candidate.name] = candidate.outcome | Outcome(warnings=candidate.warnings)
    announce(None)
    loaded.refuse_changed_inputs(", ".join(candidate.name for candidate in timed))
    return outcomes


def _tolerant(extra: Step, loaded: LoadedProblem, candidate: TimedCandidate) -> Outcome:
    """The fields of an extra; where they cannot be had, a warning and none."""
    import torch

    try:
        return extra(loaded, candidate)
    except GpuUnusable:
        raise
    except UserError as error:
        candidate.warnings.append(str(error))
    except Exception as error:
        # The latency is there. An error of the GPU itself is sticky: then this raises.
        torch.cuda.synchronize()
        first_line = str(error).partition("\n")[0]
        candidate.warnings.append(
            f"part of what was asked is missing ({type(error).__name__}: {first_line})"
        )
    return Outcome()


def _known(kernel: Kernel, problem: AttentionProblem, instruments: Instruments) -> dict[str, Any]:
    """Fields of the row that are known before anything runs."""
    return {
        "source": "measured",
        "decomposition": kernel.decomposition,
        "kv_bytes": problem.kv_bytes,
        "cache": instruments.options.cache,
        "library": kernel.library() if kernel.unavailable_reason() is None else None,
    }


def _unable(kernel: Kernel, problem: AttentionProblem) -> str | None:
    """One sentence where a kernel cannot run the problem, or cannot be timed."""
    if problem.whole_model is not None:
        return (
            f"{problem.whole_model} is a whole model, of which `leanbench decode` measures a step"
        )
    if not kernel.is_timed:
        return (
            f"{kernel.name} is there to check others, it cannot be captured in a CUDA graph and"
            " timed"
        )
    return kernel.unsupported_reason(problem)
