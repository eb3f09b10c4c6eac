"""Settings of LeanAttention's CUDA C++ implementation: the candidates, and the model's choice."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import groupby, pairwise, product
from typing import Any

from leanbench.kernels.lean.configs import BuildKey, LeanCudaConfig
from leanbench.kernels.lean.cuda_build import (
    BULK_TOKENS,
    HEAD_PAIR_ROWS,
    HOPPER,
    WARPGROUP_ROWS,
    CudaBuild,
    rows_of,
    takes_head_pairs,
    takes_warpgroups,
)
from leanbench.kernels.lean.cuda_cost import (
    Columns,
    Costs,
    Fill,
    parts_us,
    total_us,
    work_of,
)
from leanbench.kernels.lean.cuda_masks import most_seen
from leanbench.kernels.lean.cuda_schedule import few_idle, whole_ranges

from leanbench.core.decomposition import cluster_slots
from leanbench.core.errors import UserError
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.kinds import SAME
from leanbench.core.parallel import NONE
from leanbench.core.problem import AttentionProblem

#: Tokens of a LeanTile outside of the candidates.
TILE_TOKENS = 128
#: Rows of an output tile, padded.
TILE_ROWS = (8, 16, 32)
#: Tokens of a chunk: matrix instructions take 16.
_LEAST_CHUNK = 16
#: Bytes of a line and of a sector of the L2.
_LINE_BYTES = 128
_SECTOR_BYTES = 32
#: Candidates: (chunk_tokens, num_warps, num_stages, ctas_per_sm) by the bytes of a row of K or V.
#: Chosen on the timings of an H100 and an H200 (docs/performance.md, Settings). The last ones fit
#: CTAs of 99 KB.
_BUILDS: dict[int, tuple[tuple[int, int, int, int], ...]] = {
    64: ((32, 8, 2, 1), (64, 4, 3, 1), (32, 4, 3, 1), (32, 4, 3, 2)),
    128: ((32, 4, 3, 1), (32, 8, 2, 1), (32, 4, 2, 2), (64, 4, 3, 1), (32, 4, 2, 1)),
    256: ((32, 4, 2, 1), (16, 4, 2, 2), (16, 8, 2, 1), (32, 4, 3, 1), (16, 4, 2, 1)),
    512: ((16, 4, 2, 1), (16, 8, 1, 1), (16, 4, 3, 1), (16, 4, 1, 1)),
    1152: ((16, 4, 1, 1), (16, 2, 3, 1), (16, 2, 2, 1), (16, 2, 1, 1)),
}
#: LeanTiles, and CTAs of a cluster.
_TILES = (128, 64, 256)
_CLUSTERS = (1, 2, 4, 8)
#: A cluster that is a candidate if a GPU holds one for each output tile, and too few of the next
#: larger.
_BETWEEN, _NEXT = 3, 4
#: Lengths on the device are judged over fills, by shares of the longest sequence: those of short
#: sequences, and of a quarter of mixed ones each.
_SHORT, _MIXED = 1 / 16, (1, 0.4, 0.1, 0.02)
#: Latency of many_rows.cu without reading, in microseconds, and of reading relative to the memory's
#: time: read off the timings of `Costs`.
_MANY_ROWS_US, _MANY_ROWS_SHARE = 9.0, 1.17
#: Candidates by prediction alone that are timed first (docs/performance.md, Settings).
_FASTEST = 8
#: Lengths between two multiples of this share settings and a launch, so a sequence that grows token
#: by token finds both prepared.
LENGTHS_TOGETHER = 64
#: Choices that are made at once, of batches and of lengths: if batches alone differ, lengths alone,
#: or both. And blocks of them that are kept.
_AT_ONCE = {"host": ((128, 1), (1, 128), (32, 16)), "device": ((64, 1), (1, 2), (64, 2))}
_MOST_BLOCKS = 256
#: Numbers of an array, at most: malloc returns larger ones to the system after each operation.
_ARRAY_NUMBERS = 24_000
#: Batch, and longest length.
Sizes = tuple[int, int]
#: Rows of output tiles with which clusters of `_BETWEEN` are candidates.
BetweenRows = tuple[int, ...]
#: Weight of the worst fill's regret next to the mean's.
WORST = 0.5


# Checking settings takes as long as a look-up.
@lru_cache(maxsize=4096)
def cuda_config(
    chunk: int,
    warps: int,
    stages: int,
    per_sm: int,
    cluster: int,
    rows: int,
    copy: str,
    min_tiles: int,
    align_grid: bool,
    tile_tokens: int = TILE_TOKENS,
) -> LeanCudaConfig:
    return LeanCudaConfig(
        tile_tokens=tile_tokens,
        num_warps=warps,
        num_stages=stages,
        ctas_per_sm=per_sm,
        min_tiles_per_cta=min_tiles,
        align_grid=align_grid,
        chunk_tokens=chunk,
        tile_rows=rows,
        cluster_size=cluster,
        copy=copy,
    )


def widest(problem: AttentionProblem) -> int:
    """Return the larger head_dim of K and V."""
    return max(problem.head_dim, problem.value_dim)


def copy_of(problem: AttentionProblem, gpu: GpuSpec, rows: int = TILE_ROWS[0]) -> str:
    """Return "bulk" if the GPU has bulk copies, unless rows of several KV heads share a line.

    A bulk copy would read all of the line for each. Two rows copied as one consist of whole DRAM
    units of 64 bytes.

    Args:
        rows: of an output tile.
    """
    number_bytes = problem.token_bytes // (problem.head_dim + problem.value_dim)
    split_lines = number_bytes * (problem.head_dim | problem.value_dim) % _LINE_BYTES > 0
    shared_lines = problem.kv_layout == "NHD" and problem.kv_heads > 1 and split_lines
    if shared_lines and problem.kv_dtype == SAME:
        shared_lines = rows < HEAD_PAIR_ROWS or not takes_head_pairs(problem)
    if problem.kv_dtype != SAME and problem.token_bytes == _LINE_BYTES:
        # Rows of 64 bytes: bulk copies are faster where these lie apart, by 5% and more, slower
        # where they do not, by 15% (reports/h200/settings/fp8.json).
        shared_lines = not shared_lines
    whole_boxes = (problem.page_size or 0) % BULK_TOKENS == 0
    # Rows that start within a sector: bulk copies take 2 to 15% longer.
    whole_sectors = number_bytes * (problem.head_dim | problem.value_dim) % _SECTOR_BYTES == 0
    bulk = whole_boxes and whole_sectors and not shared_lines
    return "bulk" if bulk and gpu.compute_capability >= HOPPER else "async"


def fitted(config: LeanCudaConfig, problem: AttentionProblem, gpu: GpuSpec) -> LeanCudaConfig:
    """Return the config, reduced until its shared memory fits.

    A third stage goes first, the cluster and the warps last.

    Raises:
        UserError: no reduction fits.
    """
    while not CudaBuild.of(problem, config).fits(gpu):
        config = _smaller(config, gpu)
    return config


def _smaller(config: LeanCudaConfig, gpu: GpuSpec) -> LeanCudaConfig:
    chunk_tokens, cluster_size = config.chunk_tokens, config.cluster_size
    if config.num_stages > 2:
        return replace(config, num_stages=config.num_stages - 1)
    if config.ctas_per_sm > 1:
        return replace(config, ctas_per_sm=1)
    if chunk_tokens > _LEAST_CHUNK:
        return replace(config, chunk_tokens=chunk_tokens // 2)
    if config.num_stages > 1:
        return replace(config, num_stages=1)
    if cluster_size > 1:
        return replace(config, cluster_size=1)
    if config.num_warps > 1:
        return replace(config, num_warps=config.num_warps // 2)
    raise UserError(
        f"lean_cuda finds no room in the {gpu.shared_kb_per_cta} KB of shared memory of a CTA on"
        f" {gpu.name}"
    )


def small_chunk(problem: AttentionProblem, rows: int) -> int:
    """Return the tokens of a chunk for two CTAs per SM."""
    pair = rows == HEAD_PAIR_ROWS and takes_head_pairs(problem)
    row_bytes = problem.token_bytes // 2 * (2 if pair else 1)
    # 32 tokens of 128 numbers in 8 bits and 32 rows would spill registers.
    spills = rows == TILE_ROWS[-1] and problem.kv_dtype != SAME and widest(problem) > 64
    return 32 if row_bytes <= 128 and not spills else _LEAST_CHUNK


def has_many_rows(problem: AttentionProblem, gpu: GpuSpec) -> bool:
    """Return True if many_rows.cu supports the problem, and more query rows share a KV head than
    half of the widest output tile of warps has.
    """
    return (
        gpu.compute_capability == HOPPER
        and problem.q_len > 1
        and problem.group_size * problem.q_len > TILE_ROWS[-1] // 2
        and takes_warpgroups(problem)
    )


def many_rows_config(
    problem: AttentionProblem, gpu: GpuSpec, batch: int | None = None
) -> LeanCudaConfig:
    """Return settings of many_rows.cu, for the problem or another batch.

    Row tiles that share K and V read them in step, unless too many CTAs would idle.
    """
    all_rows = problem.group_size * problem.q_len
    rows = WARPGROUP_ROWS if all_rows <= WARPGROUP_ROWS else 2 * WARPGROUP_ROWS
    output_tiles = (batch or problem.batch) * problem.kv_heads * -(-all_rows // rows)
    narrow = widest(problem) <= 128
    chunk, stages = (128, 4) if all_rows > rows and narrow else (64, 8)
    # Two CTAs share an SM: one reads while the other begins or ends an output tile.
    ctas_per_sm = 2 if rows == WARPGROUP_ROWS and narrow and output_tiles > gpu.sms else 1
    slots = ctas_per_sm * gpu.sms
    used = slots // output_tiles * output_tiles or whole_ranges(slots, output_tiles)
    config = cuda_config(
        *(chunk, rows // 16, stages, ctas_per_sm, 1, rows),
        *(copy_of(problem, gpu), 1, few_idle(used, slots)),
    )
    return fitted(config, problem, gpu)


def _many_rows_configs(problem: AttentionProblem, gpu: GpuSpec) -> Iterator[LeanCudaConfig]:
    if not has_many_rows(problem, gpu):
        return
    config = many_rows_config(problem, gpu)
    yield config
    yield replace(config, align_grid=not config.align_grid)
    alone = config.tile_rows == WARPGROUP_ROWS and widest(problem) <= 128
    if alone and config.copy == "bulk":
        yield fitted(replace(config, ctas_per_sm=3 - config.ctas_per_sm), problem, gpu)
        if problem.lengths_on == "host" and problem.q_lens is None:
            # A pair of CTAs for each output tile, whose splits it replaces.
            yield replace(config, cluster_size=2, ctas_per_sm=1)


def space(problem: AttentionProblem, gpu: GpuSpec) -> list[LeanCudaConfig]:
    """Return all candidates of a problem in the order to time them.

    First come those of many_rows.cu and those predicted to be fastest, then the fastest of each
    other LeanTile and cluster, which the model knows least. Candidates of one build that are
    predicted to be equal mostly are: all but one come last.
    """
    distinct: dict[tuple[BuildKey, float], LeanCudaConfig] = {}
    equal: list[LeanCudaConfig] = []
    for config, us in ranked(problem, gpu, costs_of(gpu)):
        if distinct.setdefault((config.build_key, us), config) is not config:
            equal.append(config)
    order = [*distinct.values(), *equal]
    varied: dict[tuple[int, int], LeanCudaConfig] = {}
    for config in order:
        varied.setdefault((config.tile_tokens, config.cluster_size), config)
    fastest = [*_many_rows_configs(problem, gpu), *order[:_FASTEST]]
    return list(dict.fromkeys([*fastest, *varied.values(), *order]))


def _of_any_size(problem: AttentionProblem, kv_heads: int) -> AttentionProblem:
    """Return a problem that stands for those of other batches and lengths."""
    return replace(
        problem,
        batch=1,
        q_heads=problem.group_size * kv_heads,
        kv_heads=kv_heads,
        context=max(1, problem.append),
        capacity=None,
        q_lens=None if problem.q_lens is None else (problem.q_len,),
    )


def _columns(
    problem: AttentionProblem, gpu: GpuSpec, between: BetweenRows, likely: bool = False
) -> Columns:
    """Return the candidates of lean.cu, or those that are `is_likely`."""
    # Problems of other sizes have the same, and most of other KV heads.
    kv_heads = min(problem.kv_heads, 2 + problem.kv_heads % 2)
    return _columns_of(_of_any_size(problem, kv_heads), gpu, between, likely)


def _between_rows(
    problem: AttentionProblem, gpu: GpuSpec, batches: Iterable[int]
) -> dict[int, BetweenRows]:
    """Return the rows of output tiles with which clusters of `_BETWEEN` are candidates."""
    if gpu.compute_capability < HOPPER:
        return dict.fromkeys(batches, ())
    rows = problem.group_size * problem.q_len
    tiles = {each: problem.kv_heads * -(-rows // each) for each in TILE_ROWS}
    if takes_head_pairs(problem):
        tiles[HEAD_PAIR_ROWS] = problem.kv_heads // 2
    few, most = (cluster_slots(gpu.sms, 1, size) for size in (_NEXT, _BETWEEN))
    return {
        batch: tuple(each for each, count in tiles.items() if few < batch * count <= most)
        for batch in batches
    }


@lru_cache(maxsize=256)
def _columns_of(
    problem: AttentionProblem, gpu: GpuSpec, between: BetweenRows, likely: bool
) -> Columns:
    row_bytes = -(-problem.token_bytes // 2)
    builds = next(builds for most, builds in _BUILDS.items() if row_bytes <= most)
    most = rows_of(problem.group_size, problem.q_len, problem.value_dim)
    if gpu.compute_capability >= HOPPER and takes_head_pairs(problem):
        most = HEAD_PAIR_ROWS
    clusters = _CLUSTERS if gpu.compute_capability >= HOPPER else (1,)
    rows = [rows for rows in TILE_ROWS if rows <= most]
    align_grid = problem.lengths_on == "host"
    shapes = [
        *product(builds, product(clusters, rows), _TILES),
        *product(builds, ((_BETWEEN, each) for each in between if each <= most), (TILE_TOKENS,)),
    ]
    configs = [
        cuda_config(*build, cluster, each, copy_of(problem, gpu, each), 1, align_grid, tile)
        for build, (cluster, each), tile in shapes
        if not (build[3] > 1 and cluster > 2)
    ]
    if likely:
        configs = list(filter(is_likely, configs))
    in_8_bits = problem.kv_dtype != SAME
    able = [
        config
        for config in configs
        # Larger chunks of so many rows do not fit the registers.
        if not (in_8_bits and config.tile_rows == TILE_ROWS[-1] and config.chunk_tokens > 16)
        and CudaBuild.of(problem, config).fits(gpu)
    ]
    if not able:
        smallest = cuda_config(
            *builds[-1], 1, rows[0], copy_of(problem, gpu, rows[0]), 1, align_grid
        )
        able = [fitted(smallest, problem, gpu)]
    return Columns.of(problem, able, gpu)


def is_likely(config: LeanCudaConfig) -> bool:
    """Return False for what the model never chooses, with lengths on the device: clusters with
    LeanTiles for which it predicts gains that the committed timings hardly have.
    """
    on_device = not config.align_grid
    return config.cluster_size == 1 or config.tile_tokens == TILE_TOKENS or not on_device


def bound_of(tokens: int) -> int:
    """Return the next 2**n or 1.5 * 2**n: settings for any lengths are chosen for that."""
    bound = 1 << (tokens - 1).bit_length()
    return bound * 3 // 4 if tokens <= bound * 3 // 4 else bound


def for_any_length(problem: AttentionProblem) -> AttentionProblem:
    """Return the problem with lengths on the device, up to `bound_of` its longest."""
    bound = bound_of(problem.max_context)
    if (problem.lengths_on, problem.context, problem.capacity) == ("device", bound, None):
        return problem
    return replace(problem, context=bound, capacity=None, lengths_on="device")


def known(problem: AttentionProblem) -> AttentionProblem:
    """Return the problem as the caller's host knows it.

    With paddings, the start and so the length of sequences is known only on the device.
    """
    problem = problem.seen
    if problem.parallel != NONE:
        problem = problem.shard(0)
    if problem.lengths_on == "host" and not problem.leftpad:
        return problem
    return for_any_length(problem if problem.capacity is None else problem.known_to_host)


def fill_lengths(batch: int, longest: int) -> list[tuple[int, ...]]:
    """Return lengths of a batch that settings are chosen for if only the device knows them.

    All long, all short, a single long one, and mixed; without repetitions.
    """
    fills = [
        tuple(length for length, count in fill for _ in range(count))
        for fill in _fills(batch, longest)
    ]
    return list(dict.fromkeys(fills))


@lru_cache(maxsize=512)
def _fills(batch: int, longest: int) -> list[Fill]:
    """Return `fill_lengths` as groups, some without a sequence: as many for every batch."""
    ends = [-(-batch * quarter // 4) for quarter in range(5)]
    counts = [end - start for start, end in pairwise(ends)]
    half = -(-batch // 2)
    fills = [
        [(1, half), (1, batch - half)],
        [(_SHORT, half), (_SHORT, batch - half)],
        [(1, 1), (_SHORT, batch - 1)],
        list(zip(_MIXED, counts, strict=True)),
    ]
    return [
        tuple((max(1, round(share * longest)), count) for share, count in fill) for fill in fills
    ]


def ranked(
    problem: AttentionProblem, gpu: GpuSpec, costs: Costs
) -> list[tuple[LeanCudaConfig, float]]:
    """Return the candidates of lean.cu with their predicted latencies in us, best first.

    With lengths on the device, these are geometric means over `fill_lengths`, and the worst fill's
    regret counts as in leanbench.configs.lookup.ranked.
    """
    between = _between_rows(problem, gpu, [problem.batch])
    sizes, columns = [_sizes_of(problem)], _columns(problem, gpu, between[problem.batch])
    scores, latency_us = _scores(problem, gpu, costs, sizes, columns, between)
    order = sorted(
        zip(columns.configs, scores[0].tolist(), latency_us[0].tolist(), strict=True),
        key=lambda each: (not is_likely(each[0]), each[1]),
    )
    return [(config, us) for config, _, us in order]


def predict(
    problem: AttentionProblem, gpu: GpuSpec, costs: Costs
) -> tuple[Columns, dict[str, Any]]:
    """Return the candidates of lean.cu, and leanbench.kernels.lean.cuda_cost.parts_us of each
    fill.
    """
    between = _between_rows(problem, gpu, [problem.batch])
    columns = _columns(problem, gpu, between[problem.batch])
    return columns, _parts(problem, gpu, costs, [_sizes_of(problem)], columns)


def _parts(
    problem: AttentionProblem,
    gpu: GpuSpec,
    costs: Costs,
    sizes: Sequence[Sizes],
    columns: Columns,
) -> dict[str, Any]:
    """Return `parts_us` of a fill of all sizes after another."""
    import numpy as np

    kinds = zip(*(_seen_fills(problem, *each) for each in sizes), strict=True)
    parts = []
    for _, alike in groupby(kinds, lambda fills: len(fills[0])):
        fills = [fill for fills in alike for fill in fills]
        parts.append(parts_us(problem, work_of(problem, fills, columns, gpu), columns, costs))
    return {name: np.concatenate([each[name] for each in parts]) for name in parts[0]}


def _scores(
    problem: AttentionProblem,
    gpu: GpuSpec,
    costs: Costs,
    sizes: Sequence[Sizes],
    columns: Columns,
    between: Mapping[int, BetweenRows],
) -> tuple[Any, Any]:
    """Return what candidates are ranked by, and their predicted latencies in us: arrays over sizes
    and candidates, infinite for clusters that are none of a batch.

    Args:
        between: from `_between_rows`.
    """
    import numpy as np

    logs = np.log(total_us(_parts(problem, gpu, costs, sizes, columns)))
    logs = logs.reshape(-1, len(sizes), len(columns.configs))
    for index, config in enumerate(columns.configs):
        if config.cluster_size == _BETWEEN:
            others = [
                at for at, (batch, _) in enumerate(sizes) if config.tile_rows not in between[batch]
            ]
            logs[:, others, index] = np.inf
    worst = (logs - logs.min(2, keepdims=True)).max(0)
    mean = logs.mean(0)
    return mean + WORST * worst, np.exp(mean)


def chosen(problem: AttentionProblem, gpu: GpuSpec) -> LeanCudaConfig:
    """Return the model's choice."""
    return _chosen(problem, gpu, costs_of(gpu))


@lru_cache(maxsize=4096)
def _chosen(problem: AttentionProblem, gpu: GpuSpec, costs: Costs) -> LeanCudaConfig:
    return _choices(problem, gpu, costs, [_sizes_of(problem)])[0]


def _sizes_of(problem: AttentionProblem) -> Sizes:
    return problem.batch, _rounded(problem, problem.max_context)


def _rounded(problem: AttentionProblem, tokens: int) -> int:
    """Return the length that the model predicts for: shorter ones, down to the next, share it.

    On the host, lengths of one LeanTile more can divide otherwise, so no wider steps are taken.
    """
    if problem.lengths_on == "device":
        return max(LENGTHS_TOGETHER, bound_of(tokens))
    return -(-tokens // LENGTHS_TOGETHER) * LENGTHS_TOGETHER


def _choices(
    problem: AttentionProblem, gpu: GpuSpec, costs: Costs, sizes: Sequence[Sizes]
) -> list[LeanCudaConfig]:
    """Return the model's choice for problems of these sizes that are the same otherwise."""
    many_rows: dict[int, LeanCudaConfig] = {}
    if has_many_rows(problem, gpu):
        many_rows = {batch: many_rows_config(problem, gpu, batch) for batch, _ in sizes}
        if problem.group_size * problem.q_len > WARPGROUP_ROWS:
            return [many_rows[batch] for batch, _ in sizes]
    chosen: list[LeanCudaConfig] = []
    groups = sum(map(len, _seen_fills(problem, *sizes[0])))
    between = _between_rows(problem, gpu, {batch for batch, _ in sizes})
    columns = _columns(problem, gpu, tuple(sorted(set().union(*between.values()))), likely=True)
    count = max(1, _ARRAY_NUMBERS // (len(columns.configs) * groups))
    for start in range(0, len(sizes), count):
        some = sizes[start : start + count]
        scores, latency_us = _scores(problem, gpu, costs, some, columns, between)
        for (batch, tokens), index, us in zip(some, scores.argmin(1), latency_us, strict=True):
            is_slower = many_rows and us[index] >= _many_rows_us(problem, gpu, batch, tokens)
            chosen.append(many_rows[batch] if is_slower else columns.configs[index])
    return chosen


class Choices:
    """The model's choices for problems that differ in nothing but their batch and length.

    The first is made alone. Later ones are made in blocks of sizes, in what has differed so far: a
    call of another size seldom waits for the model.
    """

    def __init__(self, problem: AttentionProblem, gpu: GpuSpec, costs: Costs) -> None:
        self._problem, self._gpu, self._costs = problem, gpu, costs
        self._on_device = problem.lengths_on == "device"
        self._first: Sizes | None = None
        #: Batches and lengths of a block, and blocks by their numbers. Other threads replace both.
        self._made: tuple[tuple[int, int], dict[Sizes, list[LeanCudaConfig]]] = (1, 1), {}

    def __call__(self, batch: int, tokens: int) -> LeanCudaConfig:
        number = _number_of_bound(tokens) if self._on_device else -(-tokens // LENGTHS_TOGETHER)
        (batches, lengths), blocks = self._made
        block = (batch - 1) // batches, (number - 1) // lengths
        chosen = blocks.get(block)
        if chosen is None:
            (batches, lengths), chosen = self._make(batch, number)
        return chosen[(batch - 1) % batches * lengths + (number - 1) % lengths]

    def _make(self, batch: int, number: int) -> tuple[tuple[int, int], list[LeanCudaConfig]]:
        """Make the block of a batch and a length; return its batches and lengths, and choices."""
        shape, blocks = self._made
        first_batch, first_number = self._first = self._first or (batch, number)
        differ = batch != first_batch or shape[0] > 1, number != first_number or shape[1] > 1
        if any(differ):
            batches_alone, lengths_alone, both = _AT_ONCE[self._problem.lengths_on]
            wanted = both if all(differ) else batches_alone if differ[0] else lengths_alone
            if wanted != shape:
                shape, blocks = self._made = wanted, {}
        if len(blocks) >= _MOST_BLOCKS:
            shape, blocks = self._made = shape, {}
        block = (batch - 1) // shape[0], (number - 1) // shape[1]
        batches, numbers = (
            range(at * count + 1, at * count + count + 1)
            for at, count in zip(block, shape, strict=True)
        )
        lengths = (
            _rounded(self._problem, _bound_of_number(each))
            if self._on_device
            else LENGTHS_TOGETHER * each
            for each in numbers
        )
        sizes = list(product(batches, lengths))
        blocks[block] = chosen = _choices(self._problem, self._gpu, self._costs, sizes)
        return shape, chosen


def _number_of_bound(tokens: int) -> int:
    """Return the number of `bound_of`, two for each power of two."""
    bits = (max(LENGTHS_TOGETHER, tokens) - 1).bit_length()
    return 2 * bits - (4 * tokens <= 3 << bits)


def _bound_of_number(number: int) -> int:
    return (4 - number % 2) << (number + 1) // 2 >> 2


def choices_of(problem: AttentionProblem, gpu: GpuSpec) -> Choices:
    """Return the model's choices for a problem with other batches and lengths."""
    problem = known(problem)
    return _shared_choices(_of_any_size(problem, problem.kv_heads), gpu, costs_of(gpu))


# All calls of a process share them.
_shared_choices = lru_cache(maxsize=64)(Choices)


def _seen_fills(problem: AttentionProblem, batch: int, longest: int) -> list[Fill]:
    """Return the tokens that queries see, of the host's length or of `fill_lengths`."""
    fills = _fills(batch, longest) if problem.lengths_on == "device" else [((longest, batch),)]
    if problem.most_behind < 0:
        return fills
    most = most_seen(problem)
    return [tuple((min(most, tokens), count) for tokens, count in fill) for fill in fills]


def _many_rows_us(problem: AttentionProblem, gpu: GpuSpec, batch: int, tokens: int) -> float:
    """Return the latency of many_rows.cu with one row tile, which reads K and V once.

    With lengths on the device, a geometric mean over the fills.
    """
    token_us = problem.kv_heads * problem.token_bytes / (gpu.bandwidth_tb_s * 1e6)
    fills = _seen_fills(problem, batch, tokens)
    memory_us = [token_us * sum(tokens * count for tokens, count in fill) for fill in fills]
    logs = [math.log(_MANY_ROWS_US + _MANY_ROWS_SHARE * us) for us in memory_us]
    return math.exp(sum(logs) / len(logs))


def shares_prefix(prefix_bytes: int, batch: int, gpu: GpuSpec) -> bool:
    """Return True if a launch over a shared prefix is faster than a read of it by each sequence.

    Later reads come from the L2 if it holds the prefix. Tokens after the prefix take the same time
    either way.
    """
    memory_us = prefix_bytes / (gpu.bandwidth_tb_s * 1e6)
    again_us = prefix_bytes / gpu.l2_bytes_per_us if prefix_bytes < gpu.l2_bytes else memory_us
    launch_us = _MANY_ROWS_US + _MANY_ROWS_SHARE * memory_us
    return launch_us < memory_us + (batch - 1) * again_us


#: Constants measured on a GPU, if not `Costs()`.
_measured: dict[GpuSpec, Costs] = {}


def use_costs(gpu: GpuSpec, costs: Costs) -> None:
    """Let the model use constants that were measured on this GPU."""
    _measured[gpu] = costs


def costs_of(gpu: GpuSpec) -> Costs:
    """Return the model's constants for a GPU."""
    return _measured.get(gpu) or Costs()
