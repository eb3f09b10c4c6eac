"""Latency of lean.cu by its parts: the model that chooses its settings.

Everything is in closed form over arrays of candidates, because a first call waits for it. Lengths
are groups of sequences; a launch with lengths on the device is judged over several such fills.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from leanbench.kernels.lean.configs import LeanCudaConfig
from leanbench.kernels.lean.cuda_build import CudaBuild
from leanbench.kernels.lean.cuda_schedule import (
    END_TILES,
    MERGE_AT_ONCE,
    many_whole_tiles,
    split_limits,
)
from leanbench.kernels.lean.workspace import WORKSPACE_BYTES

from leanbench.core.decomposition import cluster_slots
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.problem import AttentionProblem

#: Groups of sequences of a fill: (tokens of each, number of sequences).
Fill = tuple[tuple[int, int], ...]


class Costs(NamedTuple):
    """Times in microseconds, fitted to reports/{h100,h200}/settings/candidates.jsonl.gz together.

    tools/fit_costs.py fits them to either GPU, and prints the errors in docs/tuning.md.
    """

    #: Launch of one CTA an SM, its first copies and last stores.
    start: float = 2.3
    #: Each pipeline stage beyond the first, for each CTA of an SM.
    stage: float = 0.25
    #: A warp's chunk, whatever its size.
    chunk: float = 0.32
    #: 16 tokens x 64 columns of K and V x 8 rows of a chunk.
    block: float = 0.055
    #: A copy's way from DRAM, hidden behind the other stages.
    latency: float = 0.43
    #: End of an output tile in a CTA; and for each 1,024 numbers of its partial times a quarter of
    #: the warps.
    end: float = 0.47
    end_kn: float = 0.62
    #: Reduction in a cluster. Measured on each GPU by `leanbench tune`.
    cluster: float = 1.05
    #: A level of the merge through memory; and for each 1,024 numbers of a partial, for each of
    #: its partials, over a quarter of the warps. Measured on each GPU by `leanbench tune`.
    merge: float = 0.88
    merge_kn: float = 0.084


#: Extra time of 8 further rows, relative to the first 8. Pure numbers were searched for on the same
#: timings as `Costs`.
_MORE_ROWS = 0.75
#: Warps that an SM computes for at full speed.
_FULL_WARPS = 10
#: Start of each four warps of an SM beyond the first four, in `Costs.start`.
_MORE_WARPS = 0.17
#: Reads from the L2 that take as long as one from memory, as far as reading waits for them.
_L2_RATIO = 15
#: Exponent of the sum of reading and computing, which overlap in part.
_OVERLAP = 1.2


@dataclass(frozen=True, eq=False)
class Divisions:
    """Settings that decide which tokens a CTA gets, as arrays: candidates of one division once."""

    tile_tokens: Any
    heads_of_row: Any
    #: Output tiles of a KV head, or of the heads copied as one.
    row_tiles: Any
    align: Any
    packs: Any
    #: Most work ranges: CTAs or clusters that fit, with a partial each.
    slots: Any
    #: Steps and LeanTiles of leanbench.core.decomposition.longest_split.
    longest_steps: Any
    merge_tiles: Any


@dataclass(frozen=True, eq=False)
class Columns:
    """Candidates of one problem class as arrays of their settings."""

    configs: tuple[LeanCudaConfig, ...]
    builds: tuple[CudaBuild, ...]
    divisions: Divisions
    #: Index of each candidate's division.
    division: Any
    chunk: Any
    warps: Any
    stages: Any
    ctas: Any
    cluster: Any
    heads_of_row: Any
    #: Rows of a KV head's matrix instructions, and numbers of a partial in thousands.
    rows: Any
    kilo_numbers: Any

    @classmethod
    def of(
        cls, problem: AttentionProblem, configs: Sequence[LeanCudaConfig], gpu: GpuSpec
    ) -> Columns:
        import numpy as np

        by_key = {config.build_key: config for config in configs}
        built = {key: CudaBuild.of(problem, config) for key, config in by_key.items()}
        builds = tuple(built[config.build_key] for config in configs)
        division_of: dict[tuple[float, ...], int] = {}
        division = [
            division_of.setdefault(_division(problem, build, config, gpu), len(division_of))
            for build, config in zip(builds, configs, strict=True)
        ]
        table = [
            (
                build.chunk,
                build.warps,
                build.stages,
                build.ctas_per_sm,
                build.cluster,
                build.heads_of_row,
                build.rows / build.heads_of_row,
                build.row_count * build.v_head_dim / 1024,
            )
            for build in builds
        ]
        divisions = Divisions(*_columns(list(division_of)))
        return cls(tuple(configs), builds, divisions, np.array(division), *_columns(table))


def _columns(rows: Sequence[tuple[float, ...]]) -> Any:
    """Return columns of a table, to be broadcast along fills."""
    import numpy as np

    return np.array(rows, dtype=float).T[..., None]


def _division(
    problem: AttentionProblem, build: CudaBuild, config: LeanCudaConfig, gpu: GpuSpec
) -> tuple[float, ...]:
    """Return the fields of `Divisions`."""
    slots = cluster_slots(gpu.sms, build.ctas_per_sm, build.cluster)
    return (
        config.tile_tokens,
        build.heads_of_row,
        build.row_tiles(problem.q_len),
        config.align_grid,
        build.packs,
        min(slots, WORKSPACE_BYTES // build.partial_bytes),
        *split_limits(build, config.tile_tokens),
    )


class Work(NamedTuple):
    """What a launch does: arrays over candidates and fills; some have groups as a first axis."""

    #: Time to read K and V once from memory, and again from the L2.
    memory_us: Any
    #: Chunks of each warp, and output tiles, of the longest CTA of each group.
    rounds: Any
    segments: Any
    #: Tokens of its longest output tile or part.
    tokens: Any
    #: Partials of an output tile; 1 if it is not split.
    splits: Any
    #: CTAs that share an SM.
    share: Any


def work_of(
    problem: AttentionProblem, fills: Sequence[Fill], columns: Columns, gpu: GpuSpec
) -> Work:
    """Return the division of each fill by each candidate.

    Args:
        fills: with an equal number of groups each.
    """
    import numpy as np

    # Arrays over groups, divisions and fills.
    tokens, sequences = np.array(fills, dtype=float).transpose(2, 1, 0)[:, :, None]
    several = len(fills[0]) > 1
    ragged = problem.lengths_on == "device" or several
    by = columns.divisions
    tile = by.tile_tokens
    count = sequences * (problem.kv_heads / by.heads_of_row * by.row_tiles)
    output_tiles = count.sum(0)
    lean_tiles = np.maximum(1, np.ceil(tokens / tile))
    total, longest = (lean_tiles * count).sum(0), lean_tiles.max(0)
    grid = np.maximum(1, np.minimum(by.slots, total))
    # LeanTiles of a part if no CTA crosses output tiles, else 0; and CTAs one after another.
    waves = np.ones_like(grid)
    if ragged:
        whole = _equal_part(lean_tiles, count, total, grid, output_tiles, by)
        few = total - output_tiles <= np.floor(output_tiles / 8) * 3
        ends = np.where((by.packs > 0) & few & (lean_tiles == 1), 0, END_TILES)
    else:
        tile_bytes = tile * by.heads_of_row * problem.token_bytes
        many = many_whole_tiles(output_tiles, longest, tile_bytes, grid) & (by.align > 0)
        aligned = (by.align > 0) & (grid >= output_tiles)
        ranges = np.maximum(1, np.floor(grid / output_tiles))
        grid = np.where(aligned, ranges * output_tiles, grid)
        # A remainder of the division moves the boundaries of ranges off those of output tiles.
        whole = longest / ranges
        whole = np.where(aligned & (whole == np.floor(whole)), whole, 0)
        whole = np.where(many, longest, whole)
        waves = np.where(many, np.ceil(output_tiles / grid), 1)
        ends = np.zeros_like(lean_tiles)
    is_whole = whole > 0
    counted = lean_tiles + ends
    dealt = np.ceil((counted * count).sum(0) / grid - 1e-9)
    # Ranges that begin anywhere: whole output tiles, and pieces of the first and the last.
    segments = dealt / counted
    even = np.False_ if several else segments == np.floor(segments)
    segments = np.where(even, segments, np.ceil((dealt - 1) / counted) + 1)
    segments = np.minimum(segments, output_tiles)
    inner = np.where(even, segments, np.maximum(segments - 2, 0))
    rest = np.maximum(dealt - inner * counted - np.minimum(ends, 1) * (~even), 0)
    pieces = np.minimum(segments - inner, 2)
    alone = np.minimum(whole, lean_tiles)
    split_tokens = np.minimum(alone * tile, tokens)
    rest_tokens = np.where(is_whole, split_tokens, np.minimum(rest * tile, pieces * tokens))
    # Two pieces end with half a round more.
    more = (pieces > 1) & ~is_whole
    inner = np.where(is_whole, 0, inner)
    range_tiles = np.where(is_whole, np.maximum(whole, 1), dealt)
    splits = np.ceil(longest / range_tiles) + ((whole == 0) & (range_tiles < longest))
    segments = np.where(is_whole, 1, segments) * waves
    part = np.where(is_whole, split_tokens, np.minimum(dealt * tile, tokens))
    reads = (tokens * sequences).sum(0) * problem.kv_heads * problem.token_bytes
    # Output tiles of one KV head out of step read it again from memory if the L2 is too small.
    again = np.where(is_whole | (reads < gpu.l2_bytes), 1 / _L2_RATIO, 1)
    memory_us = reads / (gpu.bandwidth_tb_s * 1e6) * (1 + (by.row_tiles - 1) * again)
    parts = (np.ceil(lean_tiles / np.maximum(alone, 1)) * count).sum(0)
    used = np.where(is_whole, np.minimum(grid, parts), grid)
    # Arrays over groups, candidates and fills.
    memory_us, inner, rest_tokens, more, waves, segments, part, splits, used = (
        each.take(columns.division, -2)
        for each in (memory_us, inner, rest_tokens, more, waves, segments, part, splits, used)
    )
    step = columns.chunk * columns.warps * columns.cluster
    rounds = inner * np.ceil(tokens / step) + np.ceil(rest_tokens / step + more / 2)
    share = np.minimum(columns.ctas, np.ceil(used * columns.cluster / gpu.sms))
    return Work(memory_us, rounds * waves, segments, part, splits, share)


def _equal_part(
    lean_tiles: Any, count: Any, total: Any, grid: Any, output_tiles: Any, by: Divisions
) -> Any:
    """Return the LeanTiles of leanbench.core.decomposition.longest_split; 0 for stream-K."""
    import numpy as np

    longest, share = lean_tiles.max(0), np.ceil(total / grid)

    def enough(steps: Any) -> tuple[Any, Any]:
        part = share + np.ceil(share * steps / 16)
        return part, (np.ceil(lean_tiles / part) * count).sum(0) <= grid

    # More steps need no more CTAs: the fewest that are enough.
    low, most = np.zeros_like(share), np.broadcast_to(by.longest_steps, share.shape)
    high = most
    for _ in range(int(by.longest_steps.max()).bit_length()):
        middle = np.floor((low + high) / 2)
        _, fits = enough(middle)
        low, high = np.where(fits, low, np.minimum(middle + 1, most)), np.where(fits, middle, high)
    part, fits = enough(high)
    split = np.where(fits, part, 0)
    stays = longest <= np.where(split > 0, split, share) + by.merge_tiles
    return np.where(stays, longest, split) * (grid >= output_tiles)


def parts_us(
    problem: AttentionProblem, work: Work, columns: Columns, costs: Costs
) -> dict[str, Any]:
    """Return the parts of each launch in microseconds, in the order of `total_us`.

    They are arrays over fills and candidates.
    """
    import numpy as np

    tokens = np.minimum(columns.chunk, work.tokens)
    blocks = np.ceil(tokens / 16) * (problem.head_dim + problem.value_dim) / 128
    blocks = blocks * columns.heads_of_row * (1 + _MORE_ROWS * (columns.rows / 8 - 1))
    active = np.ceil(work.tokens / (columns.chunk * columns.cluster))
    active = np.minimum(np.maximum(active, 1), columns.warps)
    chunk = (costs.chunk + costs.block * blocks) * np.maximum(1, active * work.share / _FULL_WARPS)
    round_us = np.maximum(chunk, (costs.latency + chunk) / columns.stages)
    end = costs.end + costs.end_kn * columns.kilo_numbers * active / 4
    end = end + costs.cluster * (columns.cluster > 1)
    warps, ends = work.rounds * round_us, work.segments * end
    # Of the group that takes longest.
    last = (warps + ends).argmax(0)
    last = last * last.size + np.arange(last.size).reshape(last.shape)
    warps, ends, chunk = (part.take(last) for part in (warps, ends, chunk))
    levels = np.ceil(np.log(np.maximum(work.splits, 2)) / np.log(MERGE_AT_ONCE) - 1e-9)
    partials = np.minimum(work.splits, MERGE_AT_ONCE) * 4 / (columns.warps * columns.cluster)
    merge = levels * (costs.merge + costs.merge_kn * columns.kilo_numbers * partials)
    start = costs.start * (1 + _MORE_WARPS * np.maximum(0, columns.warps * work.share / 4 - 1))
    parts = {
        "start": start + costs.stage * (columns.stages - 1) * work.share + chunk,
        "memory": work.memory_us,
        "warps": warps,
        "ends": ends,
        "merge": merge * (work.splits > 1),
    }
    return {name: part.T for name, part in parts.items()}


def total_us(parts: dict[str, Any]) -> Any:
    """Return the latency of each launch. Reading overlaps with the warps' work and the ends."""
    busy = parts["warps"] + parts["ends"]
    together = (parts["memory"] ** _OVERLAP + busy**_OVERLAP) ** (1 / _OVERLAP)
    return parts["start"] + together + parts["merge"]
