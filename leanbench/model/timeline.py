"""Predicted timeline of a kernel: the simulation behind a predicted latency, CTA by CTA."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from leanbench.core.config import TileConfig
from leanbench.core.decomposition import Schedule, quantisation_efficiency, tile_rows
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.kernel import Kernel
from leanbench.core.parallel import NONE
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernels
from leanbench.core.timeline import CtaTimeline, Span, Timeline
from leanbench.model import rates
from leanbench.model.calibration import calibration_for
from leanbench.model.predict import predict_cell, unknown_exchange
from leanbench.model.simulate import MERGE_LAUNCH_WARPS, Simulation, simulate

#: Timelines of more CTAs are unreadable, and take minutes to play.
MAX_CTAS = 500_000
#: Names of GPU kernels as in this project's Triton code, without a second launch that merges.
_LAUNCHES = {
    "stream_k": "lean_kernel",
    "one_cta_per_tile": "fa2_kernel",
    "fixed_split": "fa2_kernel",
}
_SPLIT_LAUNCH, _MERGE_LAUNCH = "split_kernel", "merge_kernel"


def predict_timelines(
    problem: AttentionProblem, kernel: Kernel, configs: str, spec: GpuSpec
) -> list[Timeline] | str:
    """Return timelines by GPU, or a sentence why there are none.

    GPUs that share a problem have one each, of their own part, without the exchange.
    """
    if problem.parallel == NONE:
        timeline = predict_timeline(problem, kernel, configs, spec)
        return timeline if isinstance(timeline, str) else [timeline]
    reason = kernel.unsupported_reason(problem) or unknown_exchange(problem, kernel)
    if reason is not None:
        return reason
    timelines: list[Timeline] = []
    for rank in range(problem.gpus.gpus):
        timeline = predict_timeline(problem.shard(rank), kernel, configs, spec)
        if isinstance(timeline, str):
            return timeline
        timelines.append(replace(timeline, problem=problem, rank=rank))
    return timelines


def predict_timeline(
    problem: AttentionProblem, kernel: Kernel, configs: str, spec: GpuSpec
) -> Timeline | str:
    """Predict the timeline of every CTA, or return a sentence why there is none.

    The latency is that of the simulation, within a percent of `predict_cell`'s shortcut. It
    includes the launch before the first CTA, which the timeline does not show. fixed_split's second
    launch is approximate: its CTAs take as long as their partials, dealt to the SMs in turn.

    Args:
        configs: `default`, or `best`: the kernel's candidate with the lowest predicted latency.
    """
    work = problem.batch * problem.kv_heads
    if work > MAX_CTAS:
        return (
            f"the problem has {work} output tiles, more than the {MAX_CTAS} CTAs that a timeline"
            " can show"
        )
    fields = predict_cell(problem, kernel, configs, spec)
    if fields["status"] != "ok":
        return str(fields["reason"])
    config = kernel.read_config(fields["config"])
    schedule = kernel.schedule(problem, config, spec)
    assert schedule is not None
    assert isinstance(config, TileConfig)
    is_cuda = config.implementation == "cuda"
    played: list[tuple[int, Span]] = []
    simulation = simulate(schedule, problem, config, spec, played)
    if is_cuda:
        launch = kernel.implementation_of(config).name
    elif schedule.merge_launch:
        launch = _SPLIT_LAUNCH
    else:
        launch = _LAUNCHES.get(schedule.decomposition, schedule.decomposition)
    ctas = _ctas(launch, schedule.cluster_size, simulation, played)
    if schedule.merge_launch:
        ctas += _merge_ctas(schedule, problem, simulation, spec)
    return Timeline(
        kernel=kernel.name,
        problem=problem,
        config=fields["config"],
        source="predicted",
        gpu=spec.product,
        sms=spec.sms,
        output_tiles=schedule.output_tiles,
        ctas=_from_first_start(ctas),
        latency_us=simulation.latency_us,
    )


def schedule_efficiency(timeline: Timeline, spec: GpuSpec) -> float | None:
    """Return the quantisation efficiency of a timeline, counted as in rows; None if the schedule is
    unknown.
    """
    kernel = kernels().get(timeline.kernel)
    if kernel is None or timeline.config is None:
        return None
    config = kernel.read_config(timeline.config)
    schedule = kernel.schedule(timeline.own_problem, config, spec)
    if schedule is None or not isinstance(config, TileConfig):
        return None
    slots = schedule.slots(spec.sms, config.ctas_per_sm)
    return quantisation_efficiency(schedule, slots)


def _ctas(
    launch: str, cluster_size: int, simulation: Simulation, played: list[tuple[int, Span]]
) -> list[CtaTimeline]:
    """Return every CTA. Those of a cluster, which was played as one, act at the same time."""
    spans: dict[int, list[Span]] = {}
    for cta, span in played:
        spans.setdefault(cta, []).append(span)
    ctas = []
    for cta in simulation.ctas:
        ordered = tuple(sorted(spans[cta.cta], key=lambda span: span.start_us))
        for rank in range(cluster_size):
            number, sm = cta.cta * cluster_size + rank, cta.sm * cluster_size + rank
            ctas.append(CtaTimeline(launch, number, sm, cta.start_us, cta.end_us, ordered))
    return ctas


def _merge_ctas(
    schedule: Schedule, problem: AttentionProblem, simulation: Simulation, spec: GpuSpec
) -> list[CtaTimeline]:
    """Return one CTA per query head and position. The longest of the last wave ends with the
    call.
    """
    parts = Counter(segment.output_tile for segment in schedule.segments)
    costs = calibration_for(spec).constants
    partial_us = rates.merge_partial_us(costs, problem.head_dim, MERGE_LAUNCH_WARPS)
    rows = tile_rows(problem.group_size, problem.head_dim, problem.q_len)
    row_tiles = -(-problem.group_size * problem.q_len // rows)
    at_once = spec.sms * rates.MAX_CTAS_PER_SM
    begin_us = max(cta.end_us for cta in simulation.ctas) + costs.merge_launch_us
    # What follows the waves: the most partials that one CTA reads, and their traffic.
    waves_us = rates.merge_waves(len(parts), spec.sms) * costs.merge_us
    reading_us = simulation.latency_us - begin_us - waves_us
    most = max(parts.values())
    ctas = []
    for cta in range(problem.batch * problem.q_heads * problem.q_len):
        head, position = divmod(cta, problem.q_len)
        kv_head, row = divmod(head, problem.group_size)
        output_tile = kv_head * row_tiles + (position * problem.group_size + row) // rows
        # The model counts waves of output tiles; the rows of a tile are in the same wave.
        start_us = begin_us + output_tile // at_once * costs.merge_us
        fewer_us = partial_us * (most - parts[output_tile])
        end_us = start_us + costs.merge_us + reading_us - fewer_us
        span = Span("reduction", output_tile, start_us, end_us)
        ctas.append(CtaTimeline(_MERGE_LAUNCH, cta, cta % spec.sms, start_us, end_us, (span,)))
    return ctas


def _from_first_start(ctas: list[CtaTimeline]) -> tuple[CtaTimeline, ...]:
    """Shift all times so that 0 is the first CTA's start."""
    begin_us = min(cta.start_us for cta in ctas)

    def shifted(cta: CtaTimeline) -> CtaTimeline:
        spans = tuple(
            Span(span.kind, span.output_tile, span.start_us - begin_us, span.end_us - begin_us)
            for span in cta.spans
        )
        start_us, end_us = cta.start_us - begin_us, cta.end_us - begin_us
        return CtaTimeline(cta.launch, cta.cta, cta.sm, start_us, end_us, spans)

    return tuple(map(shifted, ctas))
