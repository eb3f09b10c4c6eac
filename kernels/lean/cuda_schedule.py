"""Who does what in a launch of lean.cu: the schedule that `launch_of` and the kernel deal."""

from __future__ import annotations

from dataclasses import replace

from leanbench.kernels.launch import padded
from leanbench.kernels.lean.configs import LeanCudaConfig
from leanbench.kernels.lean.cuda_build import WARPGROUP_ROWS, CudaBuild, ManyRowsBuild
from leanbench.kernels.lean.cuda_masks import dealt_lengths, dealt_tokens, dealt_window
from leanbench.kernels.lean.workspace import WORKSPACE_BYTES

from leanbench.core.decomposition import (
    Schedule,
    TileGrid,
    cluster_slots,
    fixed_runs,
    stream_k,
    stream_k_by_lengths,
    stream_k_grid,
)
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.problem import AttentionProblem

#: What the end of an output tile (the warps' merge, the output) takes, in LeanTiles. Where contexts
#: differ, a CTA with many short ones has more ends than others; docs/performance-log.md, entry 31.
END_TILES = 1
#: Sixteenths by which a split may be longer than the mean work range so that no range crosses from
#: an output tile to the next. A cluster loses more at each crossing than unequal splits ever cost;
#: docs/performance-log.md, entry 36.
_LONGEST_STEPS = 0
_LONGEST_STEPS_OF_CLUSTERS = 31
#: The same of partials of so many numbers, whose end takes a CTA 2 us: one that crosses has two.
#: With 8 query heads to a KV head and more at head_dim 128 (entry 65).
_LONGEST_STEPS_OF_LARGE_PARTIALS = 8
_LARGE_PARTIAL = 1024
#: What a CTA of a cluster reads while a merge through memory goes on, about a microsecond (H200).
_MERGE_BYTES = 70e3
#: Bytes of K and V that the L2 holds for row tiles that are not in step; an H200's has 50 MB.
_MOST_L2_BYTES = 40e6
#: The same where warpgroups multiply, whose arithmetic idle CTAs cost; and LeanTiles of a merge, by
#: the warpgroups of an output tile. 1 for both costs 16 x some 1000 x 16 query tokens 20%, 4 costs
#: 8 x some 2000 x 32 10% (docs/performance-log.md, entry 50).
_LONGEST_STEPS_OF_WARPGROUPS = 2
_MERGE_TILES_OF_WARPGROUPS = {1: 4, 2: 1}
#: Fixed runs of a lone sequence, for as many CTAs; and tokens past which they are no longer.
_FIXED_RUNS = 128
_MOST_RUN_TOKENS = 1 << 17
#: Output tiles for each CTA that runs at once from which on, and bytes of one up to which, each is
#: a CTA's own: 1 to 4% less than equal shares where there are 5.8 of them and more, -3 to 2% where
#: there are 1.4 to 3.9 (entry 65).
_MANY_WHOLE_TILES, _MAX_BYTES_OF_WHOLE_TILES = 5.5, 2_100_000
#: Partials that a CTA merges at once, its own among them; more go through a tree. MERGE in the
#: kernel's source (entry 65); and of fixed runs.
MERGE_AT_ONCE = 8
_MERGE_FIXED_RUNS_AT_ONCE = 16


def split_limits(build: CudaBuild, tile_tokens: int, rereads: bool = False) -> tuple[int, int]:
    """`longest_steps` and `merge_tiles` of leanbench.core.decomposition.longest_split.

    Args:
        rereads: see `rereads_memory`.
    """
    if isinstance(build, ManyRowsBuild):
        return _LONGEST_STEPS_OF_WARPGROUPS, _MERGE_TILES_OF_WARPGROUPS[
            build.rows // WARPGROUP_ROWS
        ]
    tile_bytes = 2 * build.kv_bytes * tile_tokens * build.head_dim
    in_step = build.cluster > 1 or rereads
    large = build.q_len > 0 and build.row_count * build.v_head_dim >= _LARGE_PARTIAL
    others = _LONGEST_STEPS_OF_LARGE_PARTIALS if large else _LONGEST_STEPS
    steps = _LONGEST_STEPS_OF_CLUSTERS if in_step else others
    return steps, int(build.cluster * _MERGE_BYTES // tile_bytes)


def rereads_memory(build: CudaBuild, kv_bytes: int) -> bool:
    """Whether row tiles of many query tokens that are not in step with those that share their K and
    V read these from memory again, and nothing else is more urgent.
    """
    if isinstance(build, ManyRowsBuild):
        return False
    return build.q_len == 0 and kv_bytes > _MOST_L2_BYTES


def few_idle(used: int, slots: int) -> bool:
    """Whether so few of the CTAs that multiply with warpgroups idle that row tiles which share K
    and V are kept in step; `few_idle` in schedule.cuh.
    """
    return 8 * used >= 7 * slots


def has_whole_tiles(
    build: CudaBuild, output_tiles: int, lean_tiles: int, tile_tokens: int, slots: int
) -> bool:
    """Whether each of many output tiles of one length, of which none is to be crossed, is a work
    range of its own: ranges that begin when others end even out what SMs of different speed read.
    They wait for nobody: more of them may be launched than run at once.
    """
    tile_bytes = build.kv_bytes * tile_tokens * (build.head_dim + build.v_head_dim)
    return (
        lean_tiles > 1
        and output_tiles >= _MANY_WHOLE_TILES * slots
        and lean_tiles * tile_bytes * build.heads_of_row <= _MAX_BYTES_OF_WHOLE_TILES
        and not isinstance(build, ManyRowsBuild)
        and not build.peers
    )


def whole_ranges(work_ranges: int, output_tiles: int) -> int:
    """Work ranges, at most `work_ranges`, of a whole number of output tiles each, or nearly: where
    there are more output tiles than ranges, those that share K and V are then in step.
    """
    return output_tiles // -(-output_tiles // work_ranges)


def even_splits(tiles: int, most: int) -> tuple[int, int]:
    """Splits of an output tile of `tiles` LeanTiles, at most `most`, and LeanTiles of each; of the
    last there may be fewer.
    """
    length = -(-tiles // min(tiles, most))
    return -(-tiles // length), length


def fixed_run_tokens(tokens: int, per_sequence: int, config: LeanCudaConfig) -> int:
    """Tokens of a fixed run of a sequence with `per_sequence` output tiles: a power of two, so that
    it has `_FIXED_RUNS` of them, from a LeanTile to `fixed_run_tiles` of them.
    """
    wanted = min(tokens, _MOST_RUN_TOKENS) * per_sequence // _FIXED_RUNS
    most = config.tile_tokens * config.fixed_run_tiles
    return min(max(padded(max(wanted, 1)), config.tile_tokens), most)


def most_fixed_runs(capacity: int, per_sequence: int, config: LeanCudaConfig) -> int:
    """Fixed runs of an output tile at most, whatever its tokens up to `capacity`."""
    run_tokens, longest = config.tile_tokens, fixed_run_tokens(capacity, per_sequence, config)
    most = max(1, -(-capacity // longest))
    while run_tokens < longest:
        # The most tokens with fixed runs of this length.
        tokens = ((run_tokens + 1) * _FIXED_RUNS - 1) // per_sequence
        most, run_tokens = max(most, -(-tokens // run_tokens)), 2 * run_tokens
    return most


def cuda_schedule(
    problem: AttentionProblem, config: LeanCudaConfig, gpu: GpuSpec
) -> Schedule | None:
    """The launch's schedule, a segment's `cta` counting clusters.

    Over a ragged batch, segments are of LeanTiles as they are counted, see
    leanbench.core.decomposition.stream_k_with_ends. None where the number of query
    tokens is no part of the build, and for many_rows.cu.
    """
    build = CudaBuild.of(problem, config)
    if build.q_len == 0 or isinstance(build, ManyRowsBuild):
        return None
    lengths = dealt_lengths(build, problem)
    # Heads of a row are one of the launch.
    dealt = replace(problem, kv_heads=problem.kv_heads // build.heads_of_row)
    tiles = TileGrid.of(dealt, config.tile_tokens, build.rows, lengths)
    slots = cluster_slots(gpu.sms, build.ctas_per_sm, build.cluster)
    if config.fixed_run_tiles:
        runs = [
            fixed_run_tokens(length, tiles.per_sequence, config) // config.tile_tokens
            for length in lengths
        ]
        schedule = fixed_runs(tiles, runs, slots, _MERGE_FIXED_RUNS_AT_ONCE)
        return replace(schedule, cluster_size=build.cluster)
    # The workspace holds a partial for each work range.
    most = min(slots, WORKSPACE_BYTES // build.partial_bytes)
    min_tiles = config.min_tiles_per_cta
    if build.ragged:
        # The host knows the cache's capacity alone, or that no sequence is longer than `context`.
        on_device = problem.lengths_on == "device"
        capacity = problem.cache_capacity if on_device else problem.max_context
        window = dealt_window(problem.most_behind, problem.append)
        most_tokens = dealt_tokens(build, capacity, problem.q_len, window)
        capacity_tiles = -(-most_tokens // config.tile_tokens)
        launched = stream_k_grid(tiles.output_tiles * capacity_tiles, most, min_tiles)
        limits = split_limits(build, config.tile_tokens)
        schedule = stream_k_by_lengths(
            tiles, launched, min_tiles, END_TILES, *limits, packs=build.packs
        )
    else:
        (lean_tiles,) = set(tiles.lean_tiles)
        sizes = tiles.output_tiles, lean_tiles, config.tile_tokens, slots
        if config.align_grid and has_whole_tiles(build, *sizes):
            most, min_tiles = tiles.output_tiles, lean_tiles
        schedule = stream_k(tiles, most, min_tiles, config.align_grid)
    return replace(schedule, cluster_size=build.cluster)
