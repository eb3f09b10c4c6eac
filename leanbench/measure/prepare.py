"""A kernel is made ready for a loaded problem: its launch settings, its launches, a first check."""

from __future__ import annotations

from collections.abc import Callable

from leanbench.check.launches import finds_settings, launches_of
from leanbench.check.reference import CheckResult
from leanbench.configs import lookup
from leanbench.core.config import KernelConfig, TileConfig
from leanbench.core.decomposition import quantisation_efficiency
from leanbench.core.errors import UserError
from leanbench.core.inputs import AttentionInputs
from leanbench.core.kernel import Kernel, written_by
from leanbench.measure.candidate import Candidate
from leanbench.measure.loaded import LoadedProblem
from leanbench.measure.timing import Launches, fastest
from leanbench.records.outcome import Outcome


def prepare(loaded: LoadedProblem, kernel: Kernel, request: str | KernelConfig) -> Candidate:
    """The kernel with its settings, launched once over poisoned outputs; its outcome says
    `incorrect` where the reference disagrees.

    Args:
        request: as `choose_config`.

    Raises:
        SuspectResult: the kernel changed its inputs.
    """
    choice = choose_config(loaded, kernel, request)
    launches = launches_of(kernel, loaded.buffers, choice.config, request)
    outcome = Outcome(**lookup.row_fields(kernel, choice))
    candidate = Candidate(kernel=kernel, config=choice.config, launches=launches, outcome=outcome)
    candidate.outcome |= _first_check(loaded, candidate)
    if not candidate.is_incorrect:
        candidate.outcome |= _schedule_fields(loaded, candidate)
    return candidate


def choose_config(
    loaded: LoadedProblem, kernel: Kernel, request: str | KernelConfig
) -> lookup.Choice:
    """The launch settings of a kernel on a problem.

    Args:
        request: as `leanbench.configs.lookup.resolve`; `best` times the kernel's candidates here
            and takes the fastest whose outputs are right. Where none is right, the first.
    """
    problem, spec = loaded.problem, loaded.instruments.spec
    if finds_settings(kernel, request):
        return settings_for(loaded.buffers[0])
    choice = lookup.resolve(kernel, problem, spec, request)
    if request != "best" or choice.config is None:
        return choice

    wrong: dict[KernelConfig, str] = {}

    def launches(config: KernelConfig) -> Launches:
        made = launches_of(kernel, loaded.buffers, config)
        if failure := _check(loaded, kernel, made[0]).failure(kernel.precision(problem)):
            wrong[config] = failure
            raise UserError(failure)
        return made

    configs = dict.fromkeys([choice.config, *kernel.candidate_configs(problem, spec)])
    try:
        best, timed = fastest(
            {config: lambda config=config: launches(config) for config in configs}
        )
    except UserError:
        if not wrong:
            raise
        return lookup.Choice(next(iter(wrong)), "best of 0", "no candidate is right")
    whys = [f"the fastest of {timed} that were timed in this cell"]
    whys += [f"{config.to_dict()} is not right: {failure}" for config, failure in wrong.items()]
    return lookup.Choice(best, f"best of {timed}", "; ".join(whys))


def settings_for(inputs: AttentionInputs) -> lookup.Choice:
    """The launch settings that `lean_attn_with_kvcache` finds for these tensors."""
    from leanbench.calls.settings import settings_of, shared_problem

    return settings_of(inputs, shared_problem(inputs), batch_invariant=False)


def _first_check(loaded: LoadedProblem, candidate: Candidate) -> Outcome:
    check = _check(loaded, candidate.kernel, candidate.launches[0])
    loaded.refuse_changed_inputs(candidate.name)
    outcome = Outcome(
        relative_error=check.relative_error,
        lse_error=check.lse_error,
        checked_heads=check.checked_heads,
        total_heads=check.total_heads,
    )
    failure = check.failure(candidate.kernel.precision(loaded.problem))
    return outcome | Outcome(status="incorrect", reason=failure) if failure else outcome


def _check(loaded: LoadedProblem, kernel: Kernel, launch: Callable[[], object]) -> CheckResult:
    """Of one launch over the first buffer, whose outputs are poisoned before."""
    inputs = loaded.buffers[0]
    written_by(launch, inputs).poison()
    launch()
    return loaded.reference.check(written_by(launch, inputs), kernel.lse_base)


def _schedule_fields(loaded: LoadedProblem, candidate: Candidate) -> Outcome:
    spec, config = loaded.instruments.spec, candidate.config
    schedule = candidate.kernel.schedule(loaded.problem, config, spec)
    if schedule is None:
        return Outcome()
    per_sm = config.ctas_per_sm if isinstance(config, TileConfig) else None
    slots = schedule.slots(spec.sms, per_sm)
    efficiency = quantisation_efficiency(schedule, slots)
    return Outcome(schedule=schedule.kind, quantisation_efficiency=efficiency)
