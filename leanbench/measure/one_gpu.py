"""Attention on one GPU: inputs, launch settings, checks and the read floor of a problem."""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from leanbench.check.launches import finds_settings, launches_of
from leanbench.check.reference import (
    CELL_PAIRS,
    CHECK_ELEMENTS,
    RELATIVE_ERROR_LIMIT,
    CheckResult,
    Reference,
    draw_pairs,
)
from leanbench.configs import lookup
from leanbench.core.config import KernelConfig, TileConfig
from leanbench.core.decomposition import fixed_runs_us, quantisation_efficiency
from leanbench.core.errors import SuspectResult, UserError
from leanbench.core.inputs import AttentionInputs
from leanbench.core.kernel import Kernel, written_by
from leanbench.measure.buffers import (
    change_tokens,
    flip_signs,
    free_memory,
    refuse_shortage,
    rotating_inputs,
)
from leanbench.measure.candidate import Candidate, check_outcome
from leanbench.measure.energy_meter import SustainedReading
from leanbench.measure.extras import EXTRAS, read_window
from leanbench.measure.judge import judge, latency_fields
from leanbench.measure.protocol import FLOOR, Subject
from leanbench.measure.read_floor import fingerprint
from leanbench.measure.timeline import record_timeline
from leanbench.measure.timing import Launches, Replay, Sampler, fastest, run_rounds
from leanbench.model.workspace import workspace_bytes
from leanbench.records.outcome import Outcome

if TYPE_CHECKING:
    import torch

    from leanbench.core.problem import AttentionProblem
    from leanbench.core.timeline import Timeline

    #: Settings of a call, and its problem: without a shared prefix if it reads it each time.
    _Way = tuple[KernelConfig, AttentionProblem]

#: Buffers with checked values. Together they have as many checked heads as one alone.
_WATCHED = 8
#: (sequence, KV head) pairs whose K and V change after timing, of all watched buffers together.
_CHANGED_PAIRS = 16
#: Error of a result over K and V before the change, as a multiple of the limit. A kernel's own
#: error, up to the limit, can hide a part of it.
_CHANGE = 3
#: A kernel with a latency below this multiple of the floor's has the floor ranked again.
_NEAR_FLOOR = 0.99


def check_replay(subject: OneGpu, candidate: Candidate) -> Outcome:
    """Replay the graph that was timed over changed K and V, and check its outputs.

    The first replay is over few changed tokens: a kernel that looks for changes fails. The second
    one, over all of K and V changed, finds wrong numbers in the outputs: a kernel that keeps
    results, or leaves numbers that are already there, fails. The third one finds NaN: the graph
    must write all outputs of all buffers.

    Raises:
        SuspectResult: Part of the outputs was not written.
    """
    import torch

    pairs = zip(candidate.launches, subject.buffers, strict=True)
    written = [subject.results(candidate.name, *pair) for pair in pairs]
    failure = subject.failure_over_few_changes(candidate, written)
    for index in subject.watched:
        written[index].out.fill_(1.0)
        written[index].lse.fill_(1.0)
    candidate.replay.graph.replay()
    failure = failure or subject.failure_now(candidate, written)
    for results in written:
        results.poison()
    candidate.replay.graph.replay()
    # NaN if an element is, 0 for a row of zeros. Wait once for all of them.
    least = torch.stack([results.out.abs().amax(dim=-1).amin() for results in written]).tolist()
    if unwritten := sum(map(math.isnan, least)):
        raise SuspectResult(
            f"{unwritten} of {len(written)} outputs were not written when the CUDA graph was "
            "replayed: part of the work ran on another stream and was not timed"
        )
    failure = failure or subject.failure_now(candidate, written)
    if failure is None and 0.0 in least and _never_zero(subject.problem):
        failure = f"{least.count(0.0)} of {len(written)} outputs have rows of zeros"
    if failure is None:
        return Outcome()
    return Outcome(status="incorrect", reason=f"after timing, over other K and V, {failure}")


def _never_zero(problem: AttentionProblem) -> bool:
    """Return True if every query token sees a token, and no sink can take all weight."""
    sequences = zip(problem.contexts, problem.leftpads, problem.query_lengths, strict=True)
    return not problem.sinks and all(
        context - pad >= q_len for context, pad, q_len in sequences if q_len
    )


class OneGpu(Subject):
    """Problem of attention on one GPU."""

    steps = (check_replay, latency_fields, judge)
    extras = EXTRAS

    #: fp64 reference of the first buffer.
    reference: Reference
    #: Buffers that are checked: the first, and some that no kernel can foresee.
    watched: list[int]
    _fingerprints: list[list[torch.Tensor]]
    #: fp64 references of the watched buffers once K and V have changed.
    _references: list[Reference]
    _ranks_floor = False
    _floor_reading: SustainedReading | None = None

    def load(self) -> None:
        # Reference cycles, and the tensors that they hold, would pile up.
        gc.collect()
        spec, device = self.instruments.spec, self.instruments.device
        free_memory(spec)
        refuse_shortage(self.problem, device)
        self.buffers = rotating_inputs(self.problem, device, spec, self.instruments.options.cache)
        self.reference = Reference(self.buffers[0], max_pairs=CELL_PAIRS)
        others = range(1, len(self.buffers))
        drawn = random.SystemRandom().sample(others, min(len(others), _WATCHED - 1))
        self.watched = [0, *drawn]
        self._fingerprints = self._take_fingerprints()
        self._floor_reading = None

    def prepare(self, kernel: Kernel, request: str | KernelConfig) -> Candidate:
        """Choose the settings, make the launches, and check one over poisoned outputs.

        Raises:
            SuspectResult: The kernel changed its inputs or the instruments.
        """
        choice, launches, problem = self._choose(kernel, request)
        fields = Outcome(**lookup.row_fields(kernel, choice))
        check = self._check(kernel, launches[0])
        self.check_inputs(kernel.name)
        self.check_instruments(kernel.name)
        fields |= check_outcome(check, check.failure(kernel.precision(self.problem)))
        if fields.status is None:
            fields |= self._schedule_fields(problem, kernel, choice.config)
        return Candidate(kernel=kernel, launches=launches, config=choice.config, outcome=fields)

    def capture(self, candidate: Candidate) -> Replay:
        """Capture the launches.

        Raises:
            SuspectResult: The kernel changed its inputs or the instruments.
        """
        replay = super().capture(candidate)
        self.check_inputs(candidate.name)
        self.check_instruments(candidate.name)
        return replay

    def baselines(self) -> dict[str, Sampler]:
        self.instruments.announce(None)
        read_floor, kv_bytes = self.instruments.read_floor, self.problem.kv_bytes
        reads = read_floor.launches(self.buffers, kv_bytes, self._ranks_floor)
        return {FLOOR: self.make_replay(reads)}

    def time(self, candidates: Sequence[Candidate]) -> None:
        """Time candidates and the read floor, then change K and V for the check of the replays.

        The floor's variant was ranked for a problem of about this size. If a kernel beats it, rank
        the variants for this problem and time all again.

        Raises:
            SuspectResult: A kernel changed its inputs.
        """
        self._ranks_floor = False
        super().time(candidates)
        fastest_us = min(candidate.timing.median_us for candidate in candidates)
        if fastest_us <= _NEAR_FLOOR * self.timings[FLOOR].median_us:
            self._ranks_floor = True
            super().time(candidates)
        self.instruments.announce(None)
        self.check_inputs(", ".join(candidate.name for candidate in candidates))
        self._change_inputs(candidates)

    def _change_inputs(self, candidates: Sequence[Candidate]) -> None:
        """Change few tokens of the watched buffers, then the signs of all, and compute the outputs
        that are right after either change.

        The first change is large enough for the kernel with the highest limit.
        """
        kernels = [candidate.kernel for candidate in candidates]
        limit = max(RELATIVE_ERROR_LIMIT[kernel.precision(self.problem)] for kernel in kernels)
        watched = [self.buffers[index] for index in self.watched]
        limits = CHECK_ELEMENTS // len(watched), CELL_PAIRS // len(watched)
        self._few_changes = []
        for inputs in watched:
            pairs = draw_pairs(inputs, *limits)
            count = min(len(pairs), -(-_CHANGED_PAIRS // len(watched)))
            pairs = random.SystemRandom().sample(pairs, count)
            change_tokens(inputs, pairs, _CHANGE * limit)
            self._few_changes.append(Reference(inputs, pairs=pairs))
        flip_signs(watched)
        self._references = [Reference(inputs, *limits) for inputs in watched]
        self._fingerprints = self._take_fingerprints()

    def failure_over_few_changes(
        self, candidate: Candidate, written: Sequence[AttentionInputs]
    ) -> str | None:
        """Replay over few changed tokens, and check as `failure_now` does."""
        watched = [self.buffers[index] for index in self.watched]
        flip_signs(watched)
        candidate.replay.graph.replay()
        failure = self._failure(candidate, written, self._few_changes)
        flip_signs(watched)
        return failure

    def failure_now(self, candidate: Candidate, written: Sequence[AttentionInputs]) -> str | None:
        """Check what a kernel wrote to the watched buffers. Return a sentence if it is wrong."""
        return self._failure(candidate, written, self._references)

    def _failure(
        self,
        candidate: Candidate,
        written: Sequence[AttentionInputs],
        references: Sequence[Reference],
    ) -> str | None:
        precision = candidate.kernel.precision(self.problem)
        for index, reference in zip(self.watched, references, strict=True):
            check = reference.check(written[index], candidate.kernel.lse_base)
            if failure := check.failure(precision):
                return failure
        return None

    def floor_reading(self) -> SustainedReading:
        """Return the sustained reading of the read floor, measured once per problem."""
        if self._floor_reading is None:
            reads = self.instruments.read_floor.launches(self.buffers, self.problem.kv_bytes)
            (self._floor_reading,) = read_window(self, self.make_replay(reads))
        return self._floor_reading

    def finish(self, candidates: Sequence[Candidate], timed: Sequence[Candidate]) -> None:
        if timed:
            names = ", ".join(candidate.name for candidate in timed)
            self.check_inputs(names)
            self.check_instruments(names)

    def check_inputs(self, names: str) -> None:
        """Check that the kernels that ran since the last check left the watched buffers unchanged.

        Raises:
            SuspectResult: It has changed.
        """
        pairs = zip(self._fingerprints, self._take_fingerprints(), strict=True)
        tensors = (pair for before, after in pairs for pair in zip(before, after, strict=True))
        if not all(bool((was == is_now).all()) for was, is_now in tensors):
            raise SuspectResult(
                f"{names} changed its inputs: Q, K, V or the lengths are not what they were"
            )

    def check_instruments(self, names: str) -> None:
        """Check that the kernels that ran since the last check left clocks, graphs and the L2.

        Raises:
            Tampered: They did not.
        """
        if self.instruments.untouched is not None:
            self.instruments.untouched.check(names)

    def _take_fingerprints(self) -> list[list[torch.Tensor]]:
        return [fingerprint(self.buffers[index]) for index in self.watched]

    def results(
        self, name: str, launch: Callable[[], object], inputs: AttentionInputs
    ) -> AttentionInputs:
        """Return the outputs that the latest call of `launch` wrote.

        Raises:
            SuspectResult: They are no plain tensors, which could be computed when they are read.
        """
        import torch

        results = written_by(launch, inputs)
        kinds = {type(results.out), type(results.lse)} - {torch.Tensor}
        if kinds:
            found = ", ".join(sorted(kind.__name__ for kind in kinds))
            raise SuspectResult(f"{name} returns {found}, not torch.Tensor, as its outputs")
        return results

    def timelines(self, kernel: Kernel, request: str) -> list[Timeline] | str:
        effort, spec = self.instruments.options.effort, self.instruments.spec
        with self:
            choice, launches, _ = self._choose(kernel, request)
            replays = {kernel.name: self.make_replay(launches)}
            timing = run_rounds(replays, effort, self.instruments.gpu_state)[kernel.name]
            timeline = record_timeline(
                self.problem, kernel, choice.config, self.buffers, spec, timing.median_us
            )
        return [timeline] if timeline else f"{kernel.name} has no instrumented build"

    def _choose(
        self, kernel: Kernel, request: str | KernelConfig
    ) -> tuple[lookup.Choice, Launches, AttentionProblem]:
        """Choose the launch settings of a kernel, and make its launches with them.

        Args:
            request: See `leanbench.configs.lookup.resolve`. `best` times the kernel's candidates
                here and takes the fastest correct one, or the first if none is correct. The API's
                call without a shared prefix is a candidate, too.

        Returns:
            The settings, the launches, and the problem without a shared prefix if the call reads it
            with each sequence.
        """
        problem, spec = self.problem, self.instruments.spec
        plain = replace(problem, shared_prefix=0)
        if finds_settings(kernel, request):
            choice = settings_for(self.buffers[0])
            is_plain = last_launch_of(self.buffers[0]).prior is None
        else:
            choice, is_plain = lookup.resolve(kernel, problem, spec, request), False
        if request != "best" or choice.config is None:
            launches = launches_of(kernel, self.buffers, choice.config, request)
            return choice, launches, plain if is_plain else problem

        made: dict[_Way, Launches] = {}
        wrong: dict[_Way, str] = {}

        def launches_by(way: _Way) -> Launches:
            config, of = way
            copies = [replace(inputs, shared_prefix=of.shared_prefix) for inputs in self.buffers]
            return launches_of(kernel, copies, config)

        def right_launches(way: _Way) -> Launches:
            launches = launches_by(way)
            if failure := self._check(kernel, launches[0]).failure(kernel.precision(problem)):
                wrong[way] = failure
                raise UserError(failure)
            made[way] = launches
            return launches

        configs = [choice.config, *kernel.candidate_configs(problem, spec)]
        ways: list[_Way] = [(config, problem) for config in configs]
        if problem.shared_prefix and kernel.is_api:
            config = lookup.resolve(kernel, plain, spec, "default").config
            ways += [(config, plain)] if config else []
        try:
            best, timed = fastest({way: partial(right_launches, way) for way in ways})
        except UserError:
            if not wrong:
                raise
            way = next(iter(wrong))
            choice = lookup.Choice(way[0], "best of 0", "no candidate is right")
            return choice, launches_by(way), way[1]
        config, of = best
        whys = [f"the fastest of {timed} that were timed in this cell"]
        whys += ["as a call without shared_prefix"] * (of != problem)
        whys += [f"{way[0].to_dict()} is not right: {why}" for way, why in wrong.items()]
        return lookup.Choice(config, f"best of {timed}", "; ".join(whys)), made[best], of

    def _check(self, kernel: Kernel, launch: Callable[[], object]) -> CheckResult:
        """Launch once over the first buffer with poisoned outputs, and check these."""
        inputs = self.buffers[0]
        self.results(kernel.name, launch, inputs).poison()
        launch()
        return self.reference.check(self.results(kernel.name, launch, inputs), kernel.lse_base)

    def _schedule_fields(
        self, problem: AttentionProblem, kernel: Kernel, config: KernelConfig | None
    ) -> Outcome:
        spec = self.instruments.spec
        schedule = kernel.schedule(problem, config, spec)
        if schedule is None:
            return Outcome()
        per_sm = config.ctas_per_sm if isinstance(config, TileConfig) else None
        efficiency = quantisation_efficiency(schedule, schedule.slots(spec.sms, per_sm))
        return Outcome(
            schedule=schedule.kind,
            quantisation_efficiency=efficiency,
            fixed_runs_us=fixed_runs_us(schedule, self.problem.kv_bytes, spec.bandwidth_tb_s),
            workspace_bytes=workspace_bytes(problem, config, schedule),
        )


def settings_for(inputs: AttentionInputs) -> lookup.Choice:
    """Return the launch settings that `lean_attn_with_kvcache` finds for these tensors, of its last
    launch.
    """
    from leanbench.attention.prepared import settings_of, shared_problem

    launched = last_launch_of(inputs)
    return settings_of(launched, shared_problem(launched), batch_invariant=False)


def last_launch_of(inputs: AttentionInputs) -> AttentionInputs:
    """Return the tensors of the last launch of `lean_attn_with_kvcache`."""
    from leanbench.attention.prefix import last_launch

    return last_launch(inputs)
