"""Launch settings of a call: those that were timed on this GPU for its signature, else those that
the model predicts to be fastest.

This module neither queries the device nor imports torch.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from leanbench.configs import store
from leanbench.configs.signature import signed, words_of
from leanbench.configs.store import TimedCall, TunedConfig
from leanbench.core.config import KernelConfig
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.kernel import BATCH_INVARIANT, Kernel
from leanbench.core.problem import AttentionProblem
from leanbench.core.switches import CONFIGS, is_on
from leanbench.kernels.lean import LEAN
from leanbench.kernels.lean.cuda_cost import Costs
from leanbench.kernels.lean.cuda_settings import WORST, for_any_length, use_costs
from leanbench.kernels.mla import LEAN_MLA
from leanbench.kernels.mla.build import refusal_of_gpu

if TYPE_CHECKING:
    from leanbench.core.inputs import AttentionInputs

#: Values of the variables that set the folder of the user's files or turn them off, and the number
#: of saves by this process.
State = tuple[bytes | None, bytes | None, bytes | None, int]


class Choice(NamedTuple):
    """Launch settings and their source."""

    #: None for a kernel without launch settings.
    config: KernelConfig | None
    #: `given`, `tuned`, `heuristic` (the model's) or `none`.
    how: str
    #: Reason as a sentence without full stop.
    why: str


class Ranking(NamedTuple):
    """Candidates that were timed for a signature, best first."""

    configs: tuple[TunedConfig, ...]
    #: ``timed 2026-11-28 on NVIDIA H200, yours``.
    where: str


def resolve(
    kernel: Kernel, problem: AttentionProblem, spec: GpuSpec, request: str | KernelConfig
) -> Choice:
    """Return the settings of a sweep's request.

    These are given settings, the model's (`heuristic`), or timed ones, if any: for latency
    (`default`), `energy` or `edp`. Kernels with a fixed request ignore it, see
    `Kernel.config_choice`.
    """
    if isinstance(request, KernelConfig):
        return choose(kernel, problem, spec, request)
    if request == BATCH_INVARIANT:
        config = kernel.batch_invariant_config(problem, spec)
        why = "these settings do not depend on the rest of the batch"
        return Choice(config, "heuristic" if config else "none", why)
    if request == "heuristic":
        learned_on(spec)
        kernel = kernel_for(kernel, problem)
        return _heuristic(kernel, problem.known_to_host, spec, "the heuristic was asked for")
    return choose(
        kernel, problem, spec, objective=request if request in store.OBJECTIVES else "latency"
    )


def row_fields(kernel: Kernel, choice: Choice) -> dict[str, Any]:
    """Return the fields of a leanbench.records.row.Row for the settings.

    The reason is empty for kernels without a choice.
    """
    chosen = choice.how != "none"
    there_was_a_choice = kernel.tuned_as is not None or kernel.config_choice == "best"
    return {
        "config": choice.config.to_dict() if choice.config else None,
        "config_choice": choice.how if chosen else None,
        "config_reason": choice.why if chosen and there_was_a_choice else None,
    }


def choose(
    kernel: Kernel,
    problem: AttentionProblem,
    spec: GpuSpec,
    explicit: KernelConfig | None = None,
    *,
    objective: str = "latency",
    uniform: bool = True,
) -> Choice:
    """Return the settings for launching `problem`: given, timed, or the model's.

    Args:
        objective: `latency`, `energy` or `edp`: the objective of the tuning.
        uniform: False for lengths on the device, with `problem.context` as their upper bound; as
            `problem.lengths_on` does.
    """
    if explicit is not None:
        return Choice(explicit, "given", "the settings were given")
    settings = Settings(kernel, problem, spec, objective=objective, uniform=uniform)
    timed = settings.timed(problem.batch, settings.problem.max_context)
    return timed or _heuristic(settings.kernel, settings.problem, spec, settings.why)


class Settings:
    """Settings for launching problems that differ in nothing but their batch and length.

    Args:
        problem: one of them; the other arguments are those of `choose`.
    """

    def __init__(
        self,
        kernel: Kernel,
        problem: AttentionProblem,
        spec: GpuSpec,
        *,
        objective: str = "latency",
        uniform: bool = True,
    ) -> None:
        self.kernel, self._objective = kernel_for(kernel, problem), objective
        self._spec = spec
        # The API launches a shared prefix alone.
        problem = looked_up(problem.own if self.kernel.is_api else problem)
        #: The problem for which settings are looked up.
        self.problem = problem if uniform else for_any_length(problem)
        self._learned: _Learned | None = None
        #: Reason for settings that were not timed.
        self.why = f"{self.kernel.name} is not tuned"
        if self.kernel.tuned_as is None:
            return
        if learned := learned_on(spec):
            self.why, self._learned = "not timed here", learned
            self._words = words_of(self.problem)
        else:
            timed = is_on(CONFIGS, default=True)
            self.why = "nothing was timed here" if timed else f"{CONFIGS} turns timings off"

    @cached_property
    def _default(self) -> Callable[[int, int], KernelConfig | None]:
        if self.kernel.tuned_as is not None:
            # The model uses its constants.
            learned_on(self._spec)
        return self.kernel.default_configs(self.problem, self._spec)

    def choice(self, batch: int, tokens: int) -> Choice:
        """Return the settings for a batch and a length: that of `looked_up`, or `bound_of` one."""
        timed = self.timed(batch, tokens)
        return timed or _by_default(self.kernel, self._default(batch, tokens), self.why)

    def timed(self, batch: int, tokens: int) -> Choice | None:
        """Return the settings that were timed for a batch and a length, or None."""
        if self._learned is None:
            return None
        signature = signed(self.problem, self._words, batch, tokens)
        ranking = self._learned.get((self._objective, signature))
        if ranking is None:
            return None
        for config in ranking.configs:
            if _launches(self.kernel, config, self.problem):
                return Choice(config, "tuned", f"{ranking.where}: {signature}")
        return None


def looked_up(problem: AttentionProblem) -> AttentionProblem:
    """Return the problem for which settings are looked up: what the caller's host knows."""
    problem = problem.known_to_host
    return for_any_length(problem) if problem.lengths_on == "device" else problem


def tuned_kernel(call: AttentionProblem | AttentionInputs) -> Kernel[Any]:
    """Return the kernel of the API that takes a call: `lean_mla` over a latent cache, or `lean`."""
    return LEAN_MLA if call.latent else LEAN


def refusal(call: AttentionProblem, spec: GpuSpec) -> str | None:
    """Return a sentence if `tuned_kernel` does not run a call on a GPU, or None."""
    of_gpu = refusal_of_gpu(spec.compute_capability) if call.latent else None
    return of_gpu or tuned_kernel(call).unsupported_reason(call)


def kernel_for(kernel: Kernel, problem: AttentionProblem) -> Kernel:
    """Return the kernel, or its CUDA C++ alone, which merges the partials of several GPUs, and a
    launch over a shared prefix into the API's next one.
    """
    merges = problem.gpus.context > 1 or (problem.shared_prefix and kernel.is_api)
    return getattr(kernel, "cuda", kernel) if merges else kernel


def _launches(kernel: Kernel, config: TunedConfig, problem: AttentionProblem) -> bool:
    """Return True if the kernel launches a config here. Signatures leave out masks, for example."""
    if not kernel.takes(config):
        return False
    implementation = kernel.implementation_of(config)
    reason = implementation.unavailable_reason() or implementation.unsupported_reason(problem)
    return reason is None


def _heuristic(kernel: Kernel, problem: AttentionProblem, spec: GpuSpec, why: str) -> Choice:
    return _by_default(kernel, kernel.default_config(problem, spec), why)


def _by_default(kernel: Kernel, config: KernelConfig | None, why: str) -> Choice:
    return (
        Choice(config, "heuristic", why)
        if config
        else Choice(None, "none", f"{kernel.name} has no settings")
    )


#: Dictionary behind os.environ. Every call of the API reads it, and os.environ takes longer to
#: report a missing variable than the rest of the look-up.
ENVIRONMENT: dict[bytes, bytes] = os.environ._data  # pyright: ignore[reportAttributeAccessIssue]


def state() -> State:
    """Return the state that results depend on, in addition to the arguments.

    Changes of files by other processes are not detected.
    """
    get = ENVIRONMENT.get
    return get(b"LEANBENCH_HOME"), get(b"XDG_DATA_HOME"), get(b"LEANBENCH_CONFIGS"), store.saves()


def watched() -> tuple[tuple[Any, bytes | str], ...]:
    """Return the dictionaries and keys of the values of `state`."""
    return (
        (ENVIRONMENT, b"LEANBENCH_HOME"),
        (ENVIRONMENT, b"XDG_DATA_HOME"),
        (ENVIRONMENT, b"LEANBENCH_CONFIGS"),
        (vars(store), "_saves"),
    )


class _Learned:
    """Rankings by objective and signature, decoded at first use, and the model's constants."""

    def __init__(self, files: Sequence[store.File]) -> None:
        constants = {name: us for file in reversed(files) for name, us in file.constants.items()}
        self.costs = Costs(**constants)
        self._rankings: dict[tuple[str, str], Ranking] = {}
        #: Lines of each file, a user's first.
        self._lines: dict[tuple[str, str], list[tuple[store.File, list[Mapping[str, Any]]]]] = {}
        for file in files:
            mine: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
            for line in file.lines:
                mine.setdefault((str(line.get("objective")), line["signature"]), []).append(line)
            for key, lines in mine.items():
                self._lines.setdefault(key, []).append((file, lines))

    def __bool__(self) -> bool:
        return bool(self._lines)

    def get(self, key: tuple[str, str]) -> Ranking | None:
        if key not in self._rankings:
            # The first file whose timings this version can use.
            for file, lines in self._lines.get(key, ()):
                if calls := list(store.decoded(file.path, lines)):
                    newest = max(calls, key=lambda call: call.time)
                    # Other kernels can have another best.
                    kernels = newest.versions.get("kernels")
                    calls = [call for call in calls if call.versions.get("kernels") == kernels]
                    where = f"timed {newest.time[:10]} on {file.gpu['product']}, {file.where}"
                    self._rankings[key] = Ranking(tuple(ranked(calls)), where)
                    break
        return self._rankings.get(key)


@lru_cache(maxsize=4)
def _learned(spec: GpuSpec, state: State) -> _Learned:
    return _Learned(store.files_of(spec))


def learned_on(spec: GpuSpec) -> _Learned:
    """Return what was timed on this GPU, and let the model use its constants."""
    learned = _learned(spec, state())
    use_costs(spec, learned.costs)
    return learned


def ranked(calls: Iterable[TimedCall]) -> list[TunedConfig]:
    """Return the candidates timed for most calls of a signature, best first.

    Calls are fills of one signature: the geometric mean of the costs counts, and the worst fill's.
    Calls of other sizes under one signature can have other candidates.
    """
    calls = list(calls)
    regrets: dict[TunedConfig, list[float]] = {}
    for call in calls:
        least = min(call.costs.values())
        for config, cost in call.costs.items():
            regrets.setdefault(config, []).append(math.log(cost / least))
    most = max(map(len, regrets.values()), default=0)
    common = {config: each for config, each in regrets.items() if len(each) == most}

    def score(config: TunedConfig) -> float:
        each = common[config]
        return sum(each) / len(each) + WORST * max(each)

    return sorted(common, key=score)
