"""The search: compile and prune the candidates, time the promising ones problem by problem, fit,
shorten.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor

from leanbench.compile.build import Build, Job, build, build_all
from leanbench.configs.space import Candidate, FamilyKey, candidates, distinct, heuristics, jobs
from leanbench.core.errors import UserError
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.kernel import Kernel
from leanbench.core.problem import AttentionProblem
from leanbench.kernels.lean.configs import BuildKey, LeanConfig
from leanbench.tune.fits import Fit, Fitter, Trial, held_out
from leanbench.tune.journal import Note
from leanbench.tune.order import first, promising
from leanbench.tune.plan import Observer, Outcome, Plan, Progress, Ranker
from leanbench.tune.problems import problems
from leanbench.tune.stopwatch import Stopwatch, Time

#: Candidates timed per problem: more at first, while the model ranks and the formula has no data.
_FIRST_PROBLEMS, _FIRST_CANDIDATES, _CANDIDATES = 5, 64, 24
#: Problems of a family after which the formula is fitted again, and the minimum timings of a build
#: then. Builds that look good by few timings are timed again.
_FIT_AFTER = (5, 12)
_FEW_POINTS = 3
#: Seconds of the budget reserved for the last fits, and the minimum share of a problem.
_LAST_S, _PROBLEM_S = 4.0, 0.4


class NothingToTune(UserError):
    """No family has a candidate that runs on the GPU.

    Attributes:
        product: GPU that is tuned for.
        left_out: Why each family cannot be tuned.
    """

    def __init__(self, product: str, left_out: Mapping[FamilyKey, str]) -> None:
        super().__init__(product, left_out)
        self.product = product
        self.left_out = left_out

    def __str__(self) -> str:
        reasons = "; ".join(f"{family.label} ({why})" for family, why in self.left_out.items())
        return (
            f"nothing can be tuned on {self.product}: {reasons}; choose other families with"
            " --head-dim or --group"
        )


class Search:
    """The search for one kernel on one GPU. The budget starts with the first problem: compiling
    depends on the number of cores, and happens once.
    """

    def __init__(self, kernel: Kernel, spec: GpuSpec, plan: Plan, observer: Observer) -> None:
        self._kernel, self._spec, self._plan, self._observer = kernel, spec, plan, observer
        self._began_s = 0.0
        #: Callback for every timed problem.
        self.note: Note = lambda family, problem, times: None
        #: Families without a runnable candidate, and the reasons.
        self.left_out: dict[FamilyKey, str] = {}
        self._fitter = Fitter(kernel, spec)
        #: Verb for messages.
        self._done = "predicted" if plan.predicted else "timed"

    def compile(
        self, families: Sequence[FamilyKey], pool: Executor
    ) -> list[tuple[Progress, dict[BuildKey, Build]]]:
        """Compile every build, and return the families that have candidates.

        Raises:
            NothingToTune: no candidate of any family can run on this GPU.
        """
        wanted = [
            (family, key, job)
            for family in families
            for key, job in jobs(self._kernel, family, self._spec).items()
        ]
        done = 0

        def count_compiled(build: Build) -> None:
            nonlocal done
            done += 1
            self._observer.compiling(done, len(wanted))

        self._observer.compiling(0, len(wanted))
        built = build_all(
            [job for _, _, job in wanted], self._spec.compute_capability, pool, count_compiled
        )
        compiled_families: list[tuple[Progress, dict[BuildKey, Build]]] = []
        for family in families:
            builds = {
                key: build
                for (owner, key, _), build in zip(wanted, built, strict=True)
                if owner == family
            }
            able, left_out = candidates(self._kernel, family, self._spec, builds)
            if able:
                compiled_families.append((Progress(family, able, left_out), builds))
            else:
                why = next(iter(left_out.values()), "no candidate fits")
                self.left_out[family] = f"no candidate can run: {why}"
        if not compiled_families:
            raise NothingToTune(self._spec.product, self.left_out)
        return compiled_families

    def run(
        self,
        compiled: Sequence[tuple[Progress, dict[BuildKey, Build]]],
        stopwatch: Stopwatch,
        rank: Ranker,
        most_bytes: float,
    ) -> str:
        """Time problems of all families in turn, and return why it stopped.

        Raises:
            UserError: the budget ends before every family has enough timings to learn from.
            NothingToTune: no candidate of any family runs.
        """
        stopped = self._time_problems(compiled, stopwatch, rank, most_bytes)
        for progress, _ in compiled:
            if not (progress.able and progress.times):
                why = next(reversed(progress.left_out.values()), "no settings fit")
                self.left_out[progress.family] = f"nothing could be {self._done}: {why}"
        if all(progress.family in self.left_out for progress, _ in compiled):
            raise NothingToTune(self._spec.product, self.left_out)
        return stopped

    def _time_problems(
        self,
        compiled: Sequence[tuple[Progress, dict[BuildKey, Build]]],
        stopwatch: Stopwatch,
        rank: Ranker,
        most_bytes: float,
    ) -> str:
        """Time until the plan or the budget ends, and return which it was."""
        self._began_s = time.monotonic()
        streams = [problems(progress.family, self._spec, most_bytes) for progress, _ in compiled]
        total = self._plan.problems * len(compiled)
        for number in range(self._plan.problems):
            for index, ((progress, builds), stream) in enumerate(
                zip(compiled, streams, strict=True)
            ):
                problem = next(stream)
                done = number * len(compiled) + index
                # Known times come from the journal of an interrupted tuning.
                if not progress.able or problem in progress.times:
                    continue
                if self._left_s() < _LAST_S + _PROBLEM_S:
                    self._refuse_too_little(compiled)
                    return (
                        f"the budget of {self._plan.budget_s:.0f} s was spent after {done} of"
                        f" {total} problems"
                    )
                self._observer.timing(progress.family, problem, done, total)
                self._time(progress, builds, problem, stopwatch, rank)
            if number + 1 in _FIT_AFTER:
                self._observer.fitting()
                for progress, _ in compiled:
                    progress.fits = self._fitter.fits(progress.times, _FEW_POINTS)
        total = self._plan.problems * sum(bool(progress.able) for progress, _ in compiled)
        return f"all {total} problems were {self._done}"

    def finish(
        self,
        compiled: Sequence[tuple[Progress, dict[BuildKey, Build]]],
        stopped: str,
        pool: Executor,
    ) -> list[Outcome]:
        """Make the last fits and the shortlists of the families that were not left out."""
        self._observer.fitting()
        compiled = [pair for pair in compiled if pair[0].family not in self.left_out]
        futures = [
            pool.submit(_finish, self._kernel.name, self._spec, progress)
            for progress, _ in compiled
        ]
        results = [future.result() for future in futures]
        return [
            Outcome(progress, builds, fits, shortlist, trials, stopped)
            for (progress, builds), (fits, shortlist, trials) in zip(compiled, results, strict=True)
        ]

    def _left_s(self) -> float:
        return self._began_s + self._plan.budget_s - self._plan.reserve_s - time.monotonic()

    def take_up(
        self, progress: Progress, problem: AttentionProblem, times: dict[LeanConfig, Time]
    ) -> None:
        """Restore the timings of an interrupted tuning.

        Ignored unless they include the heuristic's current settings.
        """
        heuristic = self._heuristics(progress, problem)[0]
        if heuristic in times:
            progress.times[problem] = times
            progress.heuristic[problem] = heuristic

    def _refuse_too_little(
        self, compiled: Sequence[tuple[Progress, dict[BuildKey, Build]]]
    ) -> None:
        counts = [len(progress.times) for progress, _ in compiled if progress.able]
        if min(counts, default=_FIRST_PROBLEMS) >= _FIRST_PROBLEMS:
            return
        spent_s = time.monotonic() - self._began_s
        timed = sum(counts)
        missing = _FIRST_PROBLEMS * len(counts) - timed
        each_s = spent_s / timed if timed else 0.0
        rest_s = missing * max(each_s, 2 * _PROBLEM_S) + _LAST_S + self._plan.reserve_s
        needed_s = math.ceil((spent_s + rest_s) / 10) * 10
        raise UserError(
            f"--budget {self._plan.budget_s:.0f}s is too small: after {spent_s:.0f} s {timed}"
            f" problems are {self._done}, the last fits take {_LAST_S:.0f} s more, and"
            f" {_FIRST_PROBLEMS} problems of each of {len(counts)} families are needed; some"
            f" {needed_s} s would do"
        )

    def _heuristics(self, progress: Progress, problem: AttentionProblem) -> list[LeanConfig]:
        """Return the heuristic's choice and those of its implementations.

        A candidate with the same launch replaces them if there is one.
        """
        return [
            self._as_candidate(progress, problem, config)
            for config in heuristics(self._kernel, problem, self._spec)
        ]

    def _as_candidate(
        self, progress: Progress, problem: AttentionProblem, config: LeanConfig
    ) -> LeanConfig:
        own = Candidate(config, config.build_key)
        # The first of equal launches stays.
        launches = distinct([*progress.able, own], problem, self._kernel, self._spec)
        if own in launches:
            return config
        return next(
            candidate.config
            for candidate in launches
            if len(distinct([candidate, own], problem, self._kernel, self._spec)) == 1
        )

    def _time(
        self,
        progress: Progress,
        builds: dict[BuildKey, Build],
        problem: AttentionProblem,
        stopwatch: Stopwatch,
        rank: Ranker,
    ) -> None:
        launches = [
            candidate.config
            for candidate in distinct(progress.able, problem, self._kernel, self._spec)
        ]
        if self._plan.every_candidate:
            order = list(range(len(launches)))
        elif progress.fits:
            predicted = [
                self._fitter.predict_us(progress.fits, problem, config) for config in launches
            ]
            order = promising(launches, predicted, _CANDIDATES)
        else:
            order = first(
                problem,
                launches,
                lambda configs: rank(problem, configs, builds),
                (self._kernel, self._spec),
                begin=len(progress.times) * _FIRST_CANDIDATES // 2,
            )[:_FIRST_CANDIDATES]
        heuristic, *alternatives = self._heuristics(progress, problem)
        for config in (heuristic, *alternatives):
            if config.build_key not in builds:
                # Not a candidate, but the chosen config is compared with it.
                job = Job(self._kernel.name, problem, config)
                builds[config.build_key] = build(job, self._spec.compute_capability)
        # The heuristic leads: outputs of the others are compared with it.
        launched = dict.fromkeys([heuristic, *alternatives, *(launches[index] for index in order)])
        result = stopwatch.time(problem, list(launched))
        if result.failures:
            _drop(progress, result.failures)
        if heuristic in result.times:
            progress.times[problem] = result.times
            progress.heuristic[problem] = heuristic
            self.note(progress.family, problem, result.times)


def _drop(progress: Progress, failures: dict[LeanConfig, str]) -> None:
    """Remove the builds of these configs, with the reason, and their timings."""
    reasons = {config.build_key: reason for config, reason in failures.items()}
    for candidate in progress.able:
        if candidate.build in reasons:
            progress.left_out[candidate.config] = reasons[candidate.build]
    progress.left_out |= failures
    progress.able = [candidate for candidate in progress.able if candidate.build not in reasons]
    for problem, times in list(progress.times.items()):
        left = {config: time for config, time in times.items() if config.build_key not in reasons}
        if progress.heuristic[problem] in left:
            progress.times[problem] = left
        else:
            del progress.times[problem]


def _finish(
    kernel_name: str, spec: GpuSpec, progress: Progress
) -> tuple[dict[BuildKey, Fit], list[LeanConfig], list[Trial]]:
    """Finish a family in a separate process: fitting takes a second or two."""
    from leanbench.core.registry import kernel

    fitter = Fitter(kernel(kernel_name), spec)
    fits = fitter.fits(progress.times)
    shortlist = fitter.shortlist(progress.family, progress.able, fits, progress.times)
    return fits, shortlist, held_out(kernel(kernel_name), spec, progress.times, progress.heuristic)
