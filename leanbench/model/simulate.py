"""Simulation of one launch: the play of its CTAs, and a second launch that merges."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from leanbench.core.config import TileConfig
from leanbench.core.decomposition import Schedule
from leanbench.core.errors import UserError
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.problem import AttentionProblem
from leanbench.core.timeline import Span
from leanbench.kernels.lean.cuda_build import CudaBuild
from leanbench.model.calibration import calibration_for
from leanbench.model.constants import Constants
from leanbench.model.engine import CtaWork, Played, Player, work_of
from leanbench.model.lean_cuda import lean_cuda_rates, packing_of, step_tokens, tile_heads
from leanbench.model.rates import (
    Rates,
    merge_partial_us,
    merge_waves,
    rates_for,
    resident_ctas,
    split_bytes,
)

#: Number of segments per CTA above which `latency_us` merges whole output tiles. Sequences shorter
#: than `_LEAST_COARSE_TOKENS` have pauses too long for that.
_MANY_SEGMENTS = 6
_LEAST_COARSE_TOKENS = 1024
#: Warps of a CTA of fixed_split's second kernel.
MERGE_LAUNCH_WARPS = 4


@dataclass(frozen=True)
class Simulation:
    """Result of one launch."""

    latency_us: float
    #: K and V that must be read, over the latency.
    bandwidth_tb_s: float
    #: Maximum number of CTAs at once.
    slots: int
    #: CTAs with work, by number, without the second launch.
    ctas: tuple[Played, ...]
    #: Time until the first byte, and what the memory's warm-up adds to reading.
    ramp_us: float


def simulate(
    schedule: Schedule,
    problem: AttentionProblem,
    config: TileConfig,
    spec: GpuSpec,
    spans: list[tuple[int, Span]] | None = None,
    *,
    resident: int | None = None,
    constants: Constants | None = None,
) -> Simulation:
    """Play one launch of `schedule` with cold caches, CTA by CTA.

    Args:
        spans: Receives every CTA's spans, by number; microseconds from the launch.
        resident: CTAs per SM, if the compiled kernel's resources are known.
        constants: Constants other than those in use for this GPU.

    Raises:
        UserError: No CTA of this config fits an SM, or the model does not know lean_cuda there.
    """
    work, rates = _launch(schedule, problem, config, spec, resident, constants)
    player = Player(work, rates, schedule.merge_launch, spans)
    total_us = player.play() + merge_launch_us(schedule, problem, rates)
    ctas = tuple(sorted(player.played, key=lambda played: played.cta))
    ramp_us = rates.first_byte_us - rates.start_us + rates.warm_up_loss_us(total_us)
    return Simulation(total_us, problem.kv_bytes / total_us / 1e6, rates.slots, ctas, ramp_us)


def latency_us(
    schedule: Schedule,
    problem: AttentionProblem,
    config: TileConfig,
    spec: GpuSpec,
    *,
    resident: int | None = None,
    constants: Constants | None = None,
) -> float:
    """Return `simulate`'s latency alone, sooner where a CTA has many whole output tiles.

    Tiles that follow each other are played as one; docs/model.md gives the difference.

    Raises:
        UserError: not even one CTA of this config fits an SM, or the model does not know lean_cuda
            there.
    """
    work, rates = _launch(schedule, problem, config, spec, resident, constants)
    long = min(problem.visible_lengths) >= _LEAST_COARSE_TOKENS
    if long and len(schedule.segments) > _MANY_SEGMENTS * len(work):
        work, rates = _coarse(work, rates)
    reading_us = Player(work, rates, schedule.merge_launch).play()
    return reading_us + merge_launch_us(schedule, problem, rates)


def fits(problem: AttentionProblem, config: TileConfig, spec: GpuSpec) -> bool:
    """Return True if an SM holds a CTA of this config, or as many as it asks for."""
    if config.implementation == "cuda":
        return CudaBuild.of(problem, config).fits(spec)
    return resident_ctas(problem, config, spec) > 0


def merge_launch_us(schedule: Schedule, problem: AttentionProblem, rates: Rates) -> float:
    """Return the time of fixed_split's second kernel; 0 without one.

    One CTA per query head and position reads its partials.
    """
    if not schedule.merge_launch:
        return 0.0
    parts = Counter(segment.output_tile for segment in schedule.segments)
    costs = rates.constants
    # Most reads hit the L2: DRAM's rate is a bound.
    traffic_us = sum(parts.values()) * split_bytes(problem) / rates.gpu_bytes_per_us
    longest_us = merge_partial_us(costs, problem.head_dim, MERGE_LAUNCH_WARPS) * max(parts.values())
    return (
        costs.merge_launch_us
        + merge_waves(len(parts), rates.sms) * costs.merge_us
        + longest_us
        + traffic_us
    )


def _launch(
    schedule: Schedule,
    problem: AttentionProblem,
    config: TileConfig,
    spec: GpuSpec,
    resident: int | None,
    constants: Constants | None,
) -> tuple[list[CtaWork], Rates]:
    costs = calibration_for(spec).constants if constants is None else constants
    if config.implementation == "cuda":
        rates = lean_cuda_rates(problem, config, schedule, spec, costs)
        step = step_tokens(problem, config)
        heads = tile_heads(problem, config)
        packing = packing_of(problem, config, schedule)
        return work_of(schedule, problem, config.tile_tokens, step, heads, packing), rates
    rates = rates_for(problem, config, spec, costs, resident)
    if rates.resident == 0:
        raise UserError(
            f"{config.num_stages} stages of {config.tile_tokens} tokens x head_dim"
            f" {problem.head_dim} do not fit the {spec.shared_kb_per_cta} KB of shared memory of a"
            f" CTA on {spec.name}: lower num_stages or tile_tokens"
        )
    return work_of(schedule, problem, config.tile_tokens), rates


def _coarse(work: Sequence[CtaWork], rates: Rates) -> tuple[list[CtaWork], Rates]:
    """Merge consecutive whole output tiles, and spread their pauses over the reading.

    Pauses of many CTAs fall at different times and hide behind other CTAs' reading. They lower the
    demand of a CTA, not the rate of the memory.
    """
    coarse, saved = [], 0
    for cta in work:
        segments, read = [], []
        for segment, count in zip(cta.segments, cta.read_bytes, strict=True):
            if segments and segment.is_whole and segments[-1].is_whole:
                read[-1] += count
                saved += 1
            else:
                segments.append(segment)
                read.append(count)
        coarse.append(CtaWork(cta.cta, tuple(segments), tuple(read)))
    pause_us = rates.segment_us + rates.compute_us
    streaming_us = sum(sum(cta.read_bytes) for cta in work) / rates.cta_bytes_per_us
    slower = streaming_us / (streaming_us + saved * pause_us)
    return coarse, replace(rates, cta_bytes_per_us=slower * rates.cta_bytes_per_us)
