"""Attention on one GPU: inputs, launch settings, checks and the read floor of a problem."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from leanbench.check.launches import finds_settings, launches_of
from leanbench.check.reference import CELL_PAIRS, CheckResult, Reference
from leanbench.configs import lookup
from leanbench.core.config import KernelConfig, TileConfig
from leanbench.core.decomposition import quantisation_efficiency
from leanbench.core.errors import SuspectResult, UserError
from leanbench.core.inputs import AttentionInputs
from leanbench.core.kernel import Kernel, written_by
from leanbench.measure.buffers import free_memory, refuse_shortage, rotating_inputs
from leanbench.measure.candidate import Candidate, check_outcome
from leanbench.measure.energy_meter import SustainedReading
from leanbench.measure.extras import EXTRAS, read_window
from leanbench.measure.judge import judge, latency_fields
from leanbench.measure.protocol import FLOOR, Subject
from leanbench.measure.read_floor import fingerprint
from leanbench.measure.timeline import record_timeline
from leanbench.measure.timing import Launches, Replay, Sampler, fastest, run_rounds
from leanbench.records.outcome import Outcome

if TYPE_CHECKING:
    import torch

    from leanbench.core.timeline import Timeline

#: A kernel with a latency below this multiple of the floor's has the floor ranked again.
_NEAR_FLOOR = 0.99


def check_replay(subject: OneGpu, candidate: Candidate) -> Outcome:
    """Replay once over poisoned outputs: the graph that was timed must compute all of them.

    Raises:
        SuspectResult: Part of the outputs was not written.
    """
    import torch

    pairs = zip(candidate.launches, subject.buffers, strict=True)
    written = [written_by(launch, inputs) for launch, inputs in pairs]
    for results in written:
        results.poison()
    candidate.replay.graph.replay()
    # Wait once for all of them.
    unwritten = int(torch.stack([results.out.isnan().any() for results in written]).sum())
    if unwritten:
        raise SuspectResult(
            f"{unwritten} of {len(written)} outputs were not written when the CUDA graph was "
            "replayed: part of the work ran on another stream and was not timed"
        )
    check = subject.reference.check(written[0], candidate.kernel.lse_base)
    failure = check.failure(candidate.kernel.precision(subject.problem))
    if failure is None:
        return Outcome()
    return Outcome(status="incorrect", reason=f"after timing, {failure}")


class OneGpu(Subject):
    """Problem of attention on one GPU."""

    steps = (check_replay, latency_fields, judge)
    extras = EXTRAS

    #: fp64 reference of the first buffer.
    reference: Reference
    _fingerprint: list[torch.Tensor]
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
        self._fingerprint = fingerprint(self.buffers[0])
        self._floor_reading = None

    def prepare(self, kernel: Kernel, request: str | KernelConfig) -> Candidate:
        """Choose the settings, make the launches, and check one over poisoned outputs.

        Raises:
            SuspectResult: The kernel changed its inputs.
        """
        choice = self._choose(kernel, request)
        launches = launches_of(kernel, self.buffers, choice.config, request)
        fields = Outcome(**lookup.row_fields(kernel, choice))
        check = self._check(kernel, launches[0])
        self.check_inputs(kernel.name)
        fields |= check_outcome(check, check.failure(kernel.precision(self.problem)))
        if fields.status is None:
            fields |= self._schedule_fields(kernel, choice.config)
        return Candidate(kernel=kernel, launches=launches, config=choice.config, outcome=fields)

    def capture(self, candidate: Candidate) -> Replay:
        """Capture the launches.

        Raises:
            SuspectResult: The kernel changed its inputs.
        """
        replay = super().capture(candidate)
        self.check_inputs(candidate.name)
        return replay

    def baselines(self) -> dict[str, Sampler]:
        self.instruments.announce(None)
        read_floor, kv_bytes = self.instruments.read_floor, self.problem.kv_bytes
        reads = read_floor.launches(self.buffers, kv_bytes, self._ranks_floor)
        return {FLOOR: self.make_replay(reads)}

    def time(self, candidates: Sequence[Candidate]) -> None:
        """Time candidates and the read floor.

        The floor's variant was ranked for a problem of about this size. If a kernel beats it, rank
        the variants for this problem and time all again.
        """
        self._ranks_floor = False
        super().time(candidates)
        fastest_us = min(candidate.timing.median_us for candidate in candidates)
        if fastest_us <= _NEAR_FLOOR * self.timings[FLOOR].median_us:
            self._ranks_floor = True
            super().time(candidates)

    def floor_reading(self) -> SustainedReading:
        """Return the sustained reading of the read floor, measured once per problem."""
        if self._floor_reading is None:
            reads = self.instruments.read_floor.launches(self.buffers, self.problem.kv_bytes)
            (self._floor_reading,) = read_window(self, self.make_replay(reads))
        return self._floor_reading

    def finish(self, candidates: Sequence[Candidate], timed: Sequence[Candidate]) -> None:
        if timed:
            self.check_inputs(", ".join(candidate.name for candidate in timed))

    def check_inputs(self, names: str) -> None:
        """Check that the kernels that ran since the last check left the first buffer unchanged.

        Raises:
            SuspectResult: It has changed.
        """
        after = fingerprint(self.buffers[0])
        pairs = zip(self._fingerprint, after, strict=True)
        if not all(bool((was == is_now).all()) for was, is_now in pairs):
            raise SuspectResult(
                f"{names} changed its inputs: Q, K, V or the lengths are not what they were"
            )

    def timelines(self, kernel: Kernel, request: str) -> list[Timeline] | str:
        effort, spec = self.instruments.options.effort, self.instruments.spec
        with self:
            config = self._choose(kernel, request).config
            launches = launches_of(kernel, self.buffers, config, request)
            replays = {kernel.name: self.make_replay(launches)}
            timing = run_rounds(replays, effort, self.instruments.gpu_state)[kernel.name]
            timeline = record_timeline(
                self.problem, kernel, config, self.buffers, spec, timing.median_us
            )
        return [timeline] if timeline else f"{kernel.name} has no instrumented build"

    def _choose(self, kernel: Kernel, request: str | KernelConfig) -> lookup.Choice:
        """Choose the launch settings of a kernel.

        Args:
            request: See `leanbench.configs.lookup.resolve`. `best` times the kernel's candidates
                here and takes the fastest correct one, or the first if none is correct.
        """
        problem, spec = self.problem, self.instruments.spec
        if finds_settings(kernel, request):
            return settings_for(self.buffers[0])
        choice = lookup.resolve(kernel, problem, spec, request)
        if request != "best" or choice.config is None:
            return choice

        wrong: dict[KernelConfig, str] = {}

        def launches(config: KernelConfig) -> Launches:
            made = launches_of(kernel, self.buffers, config)
            if failure := self._check(kernel, made[0]).failure(kernel.precision(problem)):
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

    def _check(self, kernel: Kernel, launch: Callable[[], object]) -> CheckResult:
        """Launch once over the first buffer with poisoned outputs, and check these."""
        inputs = self.buffers[0]
        written_by(launch, inputs).poison()
        launch()
        return self.reference.check(written_by(launch, inputs), kernel.lse_base)

    def _schedule_fields(self, kernel: Kernel, config: KernelConfig | None) -> Outcome:
        spec = self.instruments.spec
        schedule = kernel.schedule(self.problem, config, spec)
        if schedule is None:
            return Outcome()
        per_sm = config.ctas_per_sm if isinstance(config, TileConfig) else None
        efficiency = quantisation_efficiency(schedule, schedule.slots(spec.sms, per_sm))
        return Outcome(schedule=schedule.kind, quantisation_efficiency=efficiency)


def settings_for(inputs: AttentionInputs) -> lookup.Choice:
    """Return the launch settings that `lean_attn_with_kvcache` finds for these tensors."""
    from leanbench.attention.prepared import settings_of, shared_problem

    return settings_of(inputs, shared_problem(inputs), batch_invariant=False)
