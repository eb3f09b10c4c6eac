"""Schedule of a launch of lean.cu, computed by `launch_of` and the kernel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

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

#: Cost of an output tile's end (the warps' merge, the output) in LeanTiles. With different
#: contexts, a CTA with many short ones has more ends than others (reports/performance-log.md, entry
#: 31).
END_TILES = 1
#: Sixteenths by which a split may exceed the mean work range so that no range crosses an output
#: tile's boundary. For a cluster, crossings cost more than unequal splits (entry 36).
_LONGEST_STEPS = 0
_LONGEST_STEPS_OF_CLUSTERS = 31
#: The same for partials of at least this many numbers, which take long to store. A CTA that crosses
#: a boundary has two of them (entry 65).
_LONGEST_STEPS_OF_LARGE_PARTIALS = 8
_LARGE_PARTIAL = 1024
#: Bytes that a CTA of a cluster reads during a merge through memory, about a microsecond on an
#: H200.
_MERGE_BYTES = 70e3
#: Bytes of K and V that the L2 keeps for row tiles out of step; an H200's L2 has 50 MB.
_MOST_L2_BYTES = 40e6
#: The same for warpgroups: idle CTAs cost arithmetic. And LeanTiles per merge, by the warpgroups of
#: an output tile (entry 50).
_LONGEST_STEPS_OF_WARPGROUPS = 2
_MERGE_TILES_OF_WARPGROUPS = {1: 4, 2: 1}
#: Number of fixed runs of a lone sequence, one per CTA; and tokens beyond which they do not grow.
_FIXED_RUNS = 128
_MOST_RUN_TOKENS = 1 << 17
#: Minimum output tiles per resident CTA, and maximum bytes of one, for a CTA per output tile (entry
#: 65).
_MANY_WHOLE_TILES, _MAX_BYTES_OF_WHOLE_TILES = 5.5, 2_100_000
#: Partials that a CTA merges at once, including its own. More are merged in a tree. MERGE in the
#: kernel's source (entry 65); and for fixed runs.
MERGE_AT_ONCE = 8
_MERGE_FIXED_RUNS_AT_ONCE = 16


def split_limits(build: CudaBuild, tile_tokens: int, rereads: bool = False) -> tuple[int, int]:
    """Return `longest_steps` and `merge_tiles` of leanbench.core.decomposition.longest_split.

    Args:
        rereads: from `rereads_memory`.
    """
    if isinstance(build, ManyRowsBuild):
        return _LONGEST_STEPS_OF_WARPGROUPS, _MERGE_TILES_OF_WARPGROUPS[
            build.rows // WARPGROUP_ROWS
        ]
    tile_bytes = 2 * build.kv_bytes * tile_tokens * build.head_dim
    in_step = build.cluster > 1 or rereads
    large = build.q_len > 0 and build.row_count * build.v_head_dim >= _LARGE_PARTIAL
    default_steps = _LONGEST_STEPS_OF_LARGE_PARTIALS if large else _LONGEST_STEPS
    steps = _LONGEST_STEPS_OF_CLUSTERS if in_step else default_steps
    return steps, int(build.cluster * _MERGE_BYTES // tile_bytes)


def rereads_memory(build: CudaBuild, kv_bytes: int) -> bool:
    """Return True if row tiles of many query tokens reread K and V from memory when out of step.

    False if another limit is more urgent.
    """
    if isinstance(build, ManyRowsBuild):
        return False
    return build.q_len == 0 and kv_bytes > _MOST_L2_BYTES


def few_idle(used: int, slots: int) -> bool:
    """Return True if few enough CTAs with warpgroups idle to keep row tiles in step.

    `few_idle` in tiles.cuh.
    """
    return 8 * used >= 7 * slots


def has_whole_tiles(
    build: CudaBuild, output_tiles: int, lean_tiles: int, tile_tokens: int, slots: int
) -> bool:
    """Return True if each of many output tiles of one length is a work range.

    Requires that no boundary is crossed. Ranges that begin when others end balance SMs of different
    speed. They wait for nothing, so more of them than are resident can be launched.
    """
    token_bytes = build.kv_bytes * (build.head_dim + build.v_head_dim) * build.heads_of_row
    many = many_whole_tiles(output_tiles, lean_tiles, tile_tokens * token_bytes, slots)
    return many and not isinstance(build, ManyRowsBuild) and not build.peers


def many_whole_tiles(output_tiles: Any, lean_tiles: Any, tile_bytes: Any, slots: Any) -> Any:
    """Return True if output tiles are many and short enough; for arrays, where."""
    return (
        (lean_tiles > 1)
        & (output_tiles >= _MANY_WHOLE_TILES * slots)
        & (lean_tiles * tile_bytes <= _MAX_BYTES_OF_WHOLE_TILES)
    )


def whole_ranges(work_ranges: int, output_tiles: int) -> int:
    """Return a number of work ranges with an equal number of whole output tiles, or nearly.

    It is at most `work_ranges`. With more output tiles than ranges, those that share K and V are
    then in step.
    """
    return output_tiles // -(-output_tiles // work_ranges)


def even_splits(tiles: int, most: int) -> tuple[int, int]:
    """Return the number of splits of `tiles` LeanTiles, at most `most`, and the LeanTiles of each.

    The last split can be shorter.
    """
    length = -(-tiles // min(tiles, most))
    return -(-tiles // length), length


def fixed_run_tokens(tokens: int, per_sequence: int, config: LeanCudaConfig) -> int:
    """Return the tokens of a fixed run of a sequence with `per_sequence` output tiles.

    A power of two that gives the sequence `_FIXED_RUNS` runs, from one LeanTile to
    `fixed_run_tiles`.
    """
    wanted = min(tokens, _MOST_RUN_TOKENS) * per_sequence // _FIXED_RUNS
    most = config.tile_tokens * config.fixed_run_tiles
    return min(max(padded(max(wanted, 1)), config.tile_tokens), most)


def most_fixed_runs(capacity: int, per_sequence: int, config: LeanCudaConfig) -> int:
    """Return the maximum fixed runs of an output tile with up to `capacity` tokens."""
    run_tokens, longest = config.tile_tokens, fixed_run_tokens(capacity, per_sequence, config)
    most = max(1, -(-capacity // longest))
    while run_tokens < longest:
        # The most tokens with runs of this length.
        tokens = ((run_tokens + 1) * _FIXED_RUNS - 1) // per_sequence
        most, run_tokens = max(most, -(-tokens // run_tokens)), 2 * run_tokens
    return most


def cuda_schedule(
    problem: AttentionProblem, config: LeanCudaConfig, gpu: GpuSpec
) -> Schedule | None:
    """Return the launch's schedule; a segment's `cta` counts clusters.

    None if the number of query tokens is not part of the build, and for many_rows.cu. For a ragged
    batch, segments consist of LeanTiles as counted by
    leanbench.core.decomposition.stream_k_with_ends.
    """
    build, problem = CudaBuild.of(problem, config), problem.seen
    if build.q_len == 0 or isinstance(build, ManyRowsBuild):
        return None
    lengths = dealt_lengths(build, problem)
    # Heads copied as one count as one head of the launch.
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
        # The host knows only the cache's capacity, or the upper bound `context` of the lengths.
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
