"""Read rates of lean.cu in one launch, for the simulation.

A warp takes every (warps x cluster_size)-th chunk of its work range and has `num_stages` of them in
flight. Warps of an SM share its arithmetic, CTAs of a cluster their work range: a cluster is played
as one CTA on combined SMs. Output tiles of one KV head read it once from DRAM and again from the
L2, as long as they are at the same tokens or it fits the L2.
"""

from __future__ import annotations

from collections import defaultdict

from leanbench.core.decomposition import Schedule, usable_sms
from leanbench.core.errors import UserError
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.problem import AttentionProblem
from leanbench.kernels.lean.configs import CudaConfig
from leanbench.kernels.lean.cuda_build import CudaBuild
from leanbench.kernels.lean.cuda_schedule import MERGE_AT_ONCE
from leanbench.model.constants import Constants, LeanCudaConstants
from leanbench.model.engine import Packing
from leanbench.model.rates import Merge, Rates

#: Sharpness of the transition between two limits of an SM, its warps and its reads.
_SHARPNESS = 4
#: Unit of DRAM reads.
LINE_BYTES = 128
#: Partials of fixed runs that a CTA merges at once: MERGE in build.cuh.
MERGE_FIXED_RUNS_AT_ONCE = 16
#: Maximum tokens of packed output tiles, and with more than two per CTA: PACKED_TOKENS in
#: build.cuh.
_PACKED_TOKENS, _PACKED_TOKENS_OF_MANY = 64, 128
#: Lengths that a warp reads at once.
_LENGTHS_AT_ONCE = 32
#: Compute capability of the calibrated copies (bulk, on mbarriers) and clusters.
CALIBRATED_CAPABILITY = (9, 0)


def refusal(
    spec: GpuSpec,
    constants: Constants,
    config: CudaConfig | None = None,
    name: str = "lean_cuda",
) -> str | None:
    """Return a sentence if a kernel of lean_cuda's copies, or this config, cannot be predicted, or
    None.

    Args:
        name: Name of the kernel.
    """
    in_triton = f"{name.removesuffix('_cuda')}_triton"
    if config is not None and config.of_warpgroups:
        return (
            f"the performance model does not know the arithmetic of warpgroups, {name} with"
            f" tile_rows {config.tile_rows}: measure it, or choose settings with tile_rows 8 to 32"
        )
    if spec.compute_capability != CALIBRATED_CAPABILITY:
        return (
            f"{name} is predicted for compute capability 9.0 only, {spec.name} has "
            f"{'.'.join(map(str, spec.compute_capability))}: add --gpu h200, or "
            f"choose {in_triton} if it supports the problem"
        )
    if constants.lean_cuda is None:
        return (
            f"the calibration in use for {spec.name} does not know lean_cuda: fit it to a run that "
            f"measured it (`leanbench predict fit`), or predict {in_triton}"
        )
    return None


def step_tokens(problem: AttentionProblem, config: CudaConfig) -> int:
    """Return the tokens of a segment that all warps of a CTA, or of a cluster, take at a time."""
    build = CudaBuild.of(problem, config)
    return build.warps * build.cluster * build.chunk


def tile_heads(problem: AttentionProblem, config: CudaConfig) -> int:
    """Return the KV heads of an output tile: `Build::heads_of_row`."""
    return CudaBuild.of(problem, config).heads_of_row


def packing_of(problem: AttentionProblem, config: CudaConfig, schedule: Schedule) -> Packing | None:
    """Return how a launch packs output tiles that count no end (`Build::packs`).

    None if each CTA has one segment, or all warps walk every one.
    """
    build = CudaBuild.of(problem, config)
    if not build.packs or len(schedule.segments) == schedule.grid:
        return None
    many = schedule.output_tiles > 2 * schedule.grid
    return Packing(_PACKED_TOKENS_OF_MANY if many else _PACKED_TOKENS, build.chunk, build.warps)


def lean_cuda_rates(
    problem: AttentionProblem,
    config: CudaConfig,
    schedule: Schedule,
    spec: GpuSpec,
    constants: Constants,
) -> Rates:
    """Return the rates of a launch.

    Raises:
        UserError: The kernel cannot be predicted on this GPU, or no CTA of this config fits.
    """
    if (reason := refusal(spec, constants, config)) is not None:
        raise UserError(reason)
    costs = constants.lean_cuda
    assert costs is not None
    build = CudaBuild.of(problem, config)
    if not build.fits(spec):
        raise UserError(
            f"{build.ctas_per_sm} CTAs of {config.num_warps} warps x {config.num_stages} stages of"
            f" {config.chunk_tokens} tokens x head_dim {problem.head_dim} do not fit the shared"
            f" memory of an SM of {spec.name}: lower num_stages or chunk_tokens"
        )
    numbers = build.row_count * build.head_dim
    segment_us = costs.segment_us + costs.end_number_us * numbers
    if build.cluster > 1:
        segment_us += costs.cluster_us
    chunk_us = _chunk_us(build, spec, constants, costs)
    sm_rate = costs.sm_bytes_per_clock * spec.boost_clock_mhz
    start_us = costs.start_us + _lengths_us(problem, build, costs)
    return Rates(
        constants=constants,
        sms=usable_sms(spec.sms, build.cluster) // build.cluster,
        resident=build.ctas_per_sm,
        tile_bytes=build.cluster * build.warps * _chunk_bytes(build),
        compute_us=chunk_us,
        segment_us=segment_us,
        first_byte_us=constants.launch_us + constants.first_read_us + start_us + segment_us,
        warm_up_us=costs.warm_up_us,
        cta_bytes_per_us=build.cluster * _cta_bytes_per_us(build, chunk_us, sm_rate, costs),
        sm_bytes_per_us=build.cluster * sm_rate,
        gpu_bytes_per_us=_gpu_bytes_per_us(problem, build, schedule, spec, costs),
        merge=Merge(
            costs.merge_us,
            costs.merge_number_us * numbers / (build.warps * build.cluster),
            MERGE_FIXED_RUNS_AT_ONCE if build.fixed_runs else MERGE_AT_ONCE,
            costs.merge_level_us,
        ),
    )


def _lengths_us(problem: AttentionProblem, build: CudaBuild, costs: LeanCudaConstants) -> float:
    """Return the time until a CTA that reads the lengths knows its work range.

    Clusters copy their first chunks before: `guess` in schedule.cuh.
    """
    guesses = build.cluster > 1 and build.bulk
    if not build.ragged or guesses:
        return 0.0
    further = (problem.batch - 1) // _LENGTHS_AT_ONCE
    return costs.lengths_us + costs.lengths_batch_us * further


def _chunk_bytes(build: CudaBuild) -> int:
    row_numbers = build.heads_of_row * (build.head_dim + build.v_head_dim)
    return build.chunk * row_numbers * build.kv_bytes


def _chunk_us(
    build: CudaBuild, spec: GpuSpec, constants: Constants, costs: LeanCudaConstants
) -> float:
    """Return the time of a chunk in shared memory, if every warp of the SM has one."""
    blocks = build.chunk / 16 * build.head_dim / 64
    head_rows = build.rows // build.heads_of_row
    chunk_us = costs.chunk_us + costs.chunk_depth_us * build.head_dim / 16
    chunk_us += costs.chunk_rows_us * blocks * (head_rows // 8 - 1)
    chunk_us *= build.heads_of_row
    if build.page:
        chunk_us += costs.page_us
    turns = max(1.0, costs.warp_share * build.warps * build.ctas_per_sm)
    return chunk_us * turns * constants.reference_clock_mhz / spec.boost_clock_mhz


def _cta_bytes_per_us(
    build: CudaBuild, chunk_us: float, sm_rate: float, costs: LeanCudaConstants
) -> float:
    """Return the maximum that a CTA reads, limited by its warps' arithmetic, their bytes in flight
    (Little's law), and its part of the SM's maximum.
    """
    period_us = max(chunk_us, (costs.dram_latency_us + chunk_us) / build.stages)
    warps_rate = build.warps * _chunk_bytes(build) / period_us
    limits = warps_rate, sm_rate / build.ctas_per_sm
    return sum(limit**-_SHARPNESS for limit in limits) ** (-1 / _SHARPNESS)


def _gpu_bytes_per_us(
    problem: AttentionProblem,
    build: CudaBuild,
    schedule: Schedule,
    spec: GpuSpec,
    costs: LeanCudaConstants,
) -> float:
    """Return the rate of all CTAs together, from DRAM and the L2."""
    dram_rate = costs.bandwidth_share * spec.bandwidth_tb_s * 1e6
    dram_rate /= 1 + costs.line_share * _in_vain(problem, build)
    row_tiles = build.row_tiles(problem.q_len)
    if row_tiles == 1:
        return dram_rate
    again_bytes = (row_tiles - 1) * problem.kv_bytes
    misses = problem.kv_bytes / (problem.kv_bytes + spec.l2_bytes)
    apart = 1 - _in_step(schedule, row_tiles)
    dram_bytes = problem.kv_bytes + costs.reread_share * misses * apart * again_bytes
    reading_us = dram_bytes / dram_rate + again_bytes / (costs.l2_bandwidth_ratio * dram_rate)
    return (problem.kv_bytes + again_bytes) / reading_us


def _in_vain(problem: AttentionProblem, build: CudaBuild) -> float:
    """Return the wasted share of the lines that a token's row of one KV head touches; 0 if the rows
    of a KV head are contiguous.
    """
    if problem.kv_layout != "NHD" or problem.kv_heads == 1:
        return 0.0
    row_bytes = build.heads_of_row * build.head_dim * build.kv_bytes
    starts = range(0, row_bytes * LINE_BYTES, row_bytes)
    lines = [-(-(start % LINE_BYTES + row_bytes) // LINE_BYTES) for start in starts]
    return sum(lines) * LINE_BYTES / len(lines) / row_bytes - 1


def _in_step(schedule: Schedule, row_tiles: int) -> float:
    """Return the share of output tiles of one KV head that are split like the previous one."""
    splits: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for segment in schedule.segments:
        splits[segment.output_tile].append((segment.first, segment.last))
    followers = [tile for tile in splits if tile % row_tiles]
    return sum(splits[tile] == splits[tile - 1] for tile in followers) / len(followers)
