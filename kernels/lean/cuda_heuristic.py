"""Settings of LeanAttention's CUDA C++ implementation, chosen by sizes."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

from leanbench.kernels.lean.configs import LeanCudaConfig
from leanbench.kernels.lean.cuda_build import (
    BULK_TOKENS,
    HEAD_PAIR_ROWS,
    HOPPER,
    MOST_BUILT_Q_LEN,
    WARPGROUP_ROWS,
    CudaBuild,
    looks_up_rows,
    rows_of,
    takes_head_pairs,
    takes_warpgroups,
)
from leanbench.kernels.lean.cuda_schedule import few_idle, whole_ranges

from leanbench.core.decomposition import cluster_slots, stream_k_grid
from leanbench.core.errors import UserError
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.kinds import SAME
from leanbench.core.problem import AttentionProblem

# Thresholds of `heuristic`, for lengths known to the host. "Bytes" are those of K and V. Sources
# are timings on an H200: [families] reports/h200/settings/families.json.gz (240 problems, every
# candidate; entry 25), [trial] 34 problems (entry 28). Entries are those of
# reports/performance-log.md.
#: Tokens of a LeanTile.
TILE_TOKENS = 128
#: Tokens of a chunk: matrix instructions take 16.
_LEAST_CHUNK = 16
#: Rows of an output tile, padded.
TILE_ROWS = (8, 16, 32)
#: Bytes up to which clusters larger than 2 are taken: they leave SMs idle, which then costs more
#: than their reduction saves. [families] has no problem on which another limit from 1e9 on changes
#: the choice.
_MAX_BYTES_FOR_LARGE_CLUSTERS = 2e9
#: The same by cluster size where there are more than one for each of the GPU's processing clusters,
#: some of which then hold one more than others: a processing cluster's share of the bandwidth is
#: limited. From the first run of paper-500, 12 heads x 16k to 512k (entry 29).
_MAX_BYTES_FOR_UNEVEN_CLUSTERS = {8: 40e6, 4: 80e6, 2: math.inf}
_PROCESSING_CLUSTERS = 8
#: Where all lengths are equal, work ranges stay within an output tile (of 8 rows) as long as that
#: idles CTAs for less than it takes to read this: no tile boundary is crossed then. [families]
_MAX_IDLE_BYTES = 42e6
#: Output tiles that, with a cluster of 8 CTAs each, read nearly as fast as the GPU can; fewer are
#: few (entry 29: 8 heads on 64 SMs reach 97% of the floor). [trial]
_FEW_TILES = 8
#: Bytes that output tiles which share K and V read again from the L2 at most; else they have more
#: rows. Entry 23: 4 x 32/1 x 32k x 128. [families]
_MAX_REREAD_BYTES = 170e6
#: Bytes below which, and a quarter above it where KV heads are few, output tiles have the fewest
#: rows if a KV head then has at most two of them; otherwise the most rows that make enough output
#: tiles, `_FEW_TILES`. [families]
_MAX_BYTES_FOR_FEWEST_ROWS = 16e6
#: Above that, from some to many KV heads of all sequences, output tiles have the fewest rows.
#: Outside, the most that make enough output tiles and with which the bytes of all reads of K and V,
#: the L2's among them, stay below this for each row. [trial] (b)
_SOME_HEADS, _MANY_HEADS = 16, 100
_SHARED_ROW_BYTES = 19e6
#: Bytes above which output tiles that read the same K and V have no cluster of their own; from so
#: many of them on no pairs. [trial] (a)
_MAX_BYTES_FOR_SHARED_CLUSTERS = 20e6
_MANY_SHARED_TILES = 16
#: Bytes above which two stages of head_dim 128 are as good as three, or better. [families]
_MIN_BYTES_FOR_TWO_STAGES = 80e6
#: Bytes above which, by the numbers of a partial, pairs of CTAs are faster than single ones where a
#: grid of whole pairs to an output tile idles no more than this share of them. [families], and by
#: the numbers of a partial [trial] (e)
_MIN_BYTES_FOR_PAIRS = {1: 1e9, 512: 300e6, 1024: 100e6, 2048: 50e6}
_FEW_IDLE_SHARE = 0.04
#: Numbers of a partial from which on clusters of 2 or 4 merge it first where there are few output
#: tiles; work ranges of pairs may be this much longer than their mean. [trial]
_LARGE_PARTIAL = 512
_UNEVEN_SHARE = 0.02
#: Lengths on the device: by the size of a cluster, output tiles up to which each has one, and the
#: numbers of a partial from which on that pays (entries 36 and 43).
_ANY_LENGTH_CLUSTERS = {8: (8, 512), 4: (24, 1536)}
#: Bytes of a line and of a sector of the L2.
_LINE_BYTES = 128
_SECTOR_BYTES = 32
#: Lengths on the device: query heads of a KV head up to which four warps of 32 tokens are enough
#: (entry 32).
_FEW_QUERIES = 4
#: Lengths on the device: output tiles to an SM above which two CTAs share it (entry 43); of caches
#: in 8 bits, which were timed with no other (entry 34).
_MANY_OUTPUT_TILES, _MANY_OUTPUT_TILES_IN_8_BITS = 1, 1.5
#: The same of head_dims above 192, where each of the two has one stage: short sequences gain 11% in
#: the mean, long ones lose up to 4% (entry 46).
_MANY_WIDE_OUTPUT_TILES = 1.5
#: Caches in 8 bits, in [fp8] reports/h200/settings/fp8.json (entry 40): bytes above which pairs of
#: CTAs are faster, whatever a partial has.
_MIN_BYTES_FOR_PAIRS_IN_8_BITS = 100e6
#: Bytes below which two CTAs that share an output tile of up to 64 columns merge through memory,
#: with eight warps each, not as a pair: 3 to 8% less at 56 to 66 heads x 1k to 4k x 64; with three
#: CTAs to an output tile 7% more at 36 heads x 8k (entry 56).
_MIN_BYTES_FOR_PAIRS_OF_TILES = 100e6
#: Bytes from which on CTAs of such pairs have eight warps with chunks of 32 tokens, not four with
#: chunks of 64: 5 to 8% less at 36 to 40 heads x 4k to 8k x 64, the same at 2k; with few output
#: tiles up to 4% more ([families], entry 58).
_MIN_BYTES_FOR_WARPS_OF_PAIRS = 30e6
#: Bytes below which few clusters are enough. [families]
_SMALL_BYTES = 4e6
#: Query rows of a KV head from which on warpgroups multiply where there are several query tokens.
_MANY_ROWS = 17
#: The same where the host knows the lengths and there are no more KV heads of all sequences than
#: SMs: with 16 lean.cu takes 0 to 11% longer at 1 x 32k, 1 x 4k and 8 x 4k. Elsewhere it takes 2 to
#: 6% less, on batches with lengths on the device (entry 50).
_MANY_ROWS_OF_FEW_TILES = 16
#: Output tiles of 64 rows to an SM above which two CTAs share it, which takes up to 26% less; with
#: fewer up to 21% more (entry 50).
_OUTPUT_TILES_OF_PAIRS = 1.0
#: Lengths on the device: two CTAs also from a third of an output tile to an SM to a half. There one
#: CTA to an SM crosses output tiles that have two or three splits: two take 2 to 12% less at 8 x
#: some 1000 to 4000, 3 to 17% more with some 500 tokens (entry 50).
_SPLIT_OUTPUT_TILES_OF_PAIRS = (1 / 3, 1 / 2)
#: Lengths that the host knows, CTAs of many_rows.cu that have one part each: bytes of the stages of
#: an SM's CTAs together, and more for each warpgroup. Three stages of 32 KB for one warpgroup take
#: up to 2% less than six, two for each of two CTAs 0.6 to 1.1% less than three, four for two
#: warpgroups 1.9 and 2.9% less than six (entry 60).
_STAGE_BYTES, _STAGE_BYTES_OF_WARPGROUP = 64 * 1024, 32 * 1024
#: Rows of two KV heads copied as one, in 8 bits (entry 62): bytes of K and V from which on they are
#: where there is no output tile for each SM; CTAs of a cluster at most; output tiles to an SM from
#: which on two CTAs share one, as far as lengths are not known: 10 to 30% less on ragged batches of
#: 32 and 96. In 16 bits: `_wide_pair_build`.
_MIN_BYTES_FOR_HEAD_PAIRS = 30_000_000
_LARGEST_CLUSTER_OF_HEAD_PAIRS = 2
_MANY_HEAD_PAIRS = 0.9
#: LeanTiles of an output tile that is not split where there are many of them. [families]
_SHORT_TILES = 5
#: The same of up to 64 columns where one output tile has no more than five SMs: 3 and 6% less at 32
#: and 40 heads x 1k, 2 and 3% more at 2k (entry 58); 24 heads x 1k have clusters.
_SHORT_TILES_OF_FEW_COLUMNS = 8


# Checking settings takes as long as the rest of the heuristic.
@lru_cache(maxsize=1024)
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
) -> LeanCudaConfig:
    return LeanCudaConfig(
        tile_tokens=TILE_TOKENS,
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


def _heads_of_row(problem: AttentionProblem, rows: int) -> int:
    """Return the KV heads of an output tile of up to `rows`: two if more than `rows_of`."""
    return 2 if rows > rows_of(problem.group_size, problem.q_len, problem.value_dim) else 1


def _copied_numbers(problem: AttentionProblem, rows: int) -> int:
    """Return the numbers of a row of K or V as copied, for output tiles of up to `rows`.

    In 8 bits, two rows copied as one count as a row of 16 bits with the same bytes.
    """
    # The rows first: most calls differ in them, which saves a call on the host.
    two = rows == HEAD_PAIR_ROWS and problem.kv_dtype == SAME and _heads_of_row(problem, rows) == 2
    return (2 if two else 1) * max(problem.head_dim, problem.value_dim)


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
        shared_lines = _heads_of_row(problem, rows) == 1
    if problem.kv_dtype != SAME and problem.token_bytes == _LINE_BYTES:
        # Rows of 64 bytes: bulk copies are faster where these lie apart, by 5% and more, slower
        # where they do not, by 15% [fp8].
        shared_lines = not shared_lines
    whole_boxes = (problem.page_size or 0) % BULK_TOKENS == 0
    # Rows that start within a sector of 32 bytes: bulk copies take 2 to 15% longer (entry 42).
    whole_sectors = number_bytes * (problem.head_dim | problem.value_dim) % _SECTOR_BYTES == 0
    bulk = whole_boxes and whole_sectors and not shared_lines
    return "bulk" if bulk and gpu.compute_capability >= HOPPER else "async"


def _wide_in_8_bits(problem: AttentionProblem, rows: int) -> bool:
    """Return True if a chunk can have twice the tokens of 16 bits.

    They have the same bytes and must fit the registers.
    """
    return problem.kv_dtype != SAME and 64 < problem.head_dim <= 128 and rows == TILE_ROWS[0]


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


def tile_rows_of(problem: AttentionProblem) -> int:
    """Return the maximum rows of an output tile.

    Fewer rows make more output tiles. They keep more SMs busy and have less to merge, but read the
    same K and V from the L2 again.
    """
    all_rows = problem.group_size * problem.q_len
    heads = problem.batch * problem.kv_heads
    most = rows_of(problem.group_size, problem.q_len, problem.value_dim)
    # In 8 bits each rereading converts the numbers again.
    most_reread = _MAX_REREAD_BYTES / (1 if problem.kv_dtype == SAME else 2)
    # Output tiles per KV head: the number of times its K and V are read.
    reads = {rows: -(-all_rows // rows) for rows in TILE_ROWS if rows <= most}
    able = [
        rows
        for rows, times in reads.items()
        if rows == most or problem.kv_bytes * (times - 1) < most_reread
    ]
    enough = [rows for rows in reversed(able) if heads * reads[rows] >= _FEW_TILES]
    if problem.kv_bytes < (
        _MAX_BYTES_FOR_FEWEST_ROWS if heads >= _FEW_TILES else 1.25 * _MAX_BYTES_FOR_FEWEST_ROWS
    ):
        return able[0] if reads[able[0]] <= 2 or not enough else enough[0]
    if _SOME_HEADS <= heads <= _MANY_HEADS:
        return able[0]
    return next(
        (rows for rows in enough if problem.kv_bytes * reads[rows] < rows * _SHARED_ROW_BYTES), most
    )


def pairs_heads(problem: AttentionProblem, gpu: GpuSpec, one_length: bool) -> bool:
    """Return True if an output tile has the rows of two KV heads, copied as one.

    In 8 bits, a bulk copy takes as long for rows of 64 bytes as for rows of 128. Below a minimum
    size it pays only with an output tile per SM, because half as many CTAs have work
    (reports/performance-log.md, entry 62). In 16 bits, rows must share lines and have bulk copies
    (entry 66). GPUs before Hopper were not timed.

    Args:
        one_length: all sequences have one length known to the host; others are assumed long.
    """
    # The sizes first: most calls differ in them, which saves a call on the host.
    whole_lines = problem.head_dim % (_LINE_BYTES // 2) == 0
    if (problem.kv_dtype == SAME and whole_lines) or gpu.compute_capability < HOPPER:
        return False
    if not takes_head_pairs(problem):
        return False
    if problem.kv_dtype == SAME and copy_of(problem, gpu, HEAD_PAIR_ROWS) != "bulk":
        return False
    if problem.batch * problem.kv_heads // 2 >= gpu.sms:
        return True
    short = 0 <= problem.most_behind < TILE_TOKENS
    return not short and (not one_length or problem.kv_bytes >= _MIN_BYTES_FOR_HEAD_PAIRS)


def _launched_rows(problem: AttentionProblem, rows: int) -> tuple[int, int]:
    """Return the rows in an output tile of up to `rows`, and the number of output tiles."""
    heads_of_row = _heads_of_row(problem, rows)
    queries = heads_of_row * problem.group_size * problem.q_len
    heads = problem.batch * problem.kv_heads // heads_of_row
    return min(rows, queries), heads * -(-queries // rows)


def _cluster_size(
    output_tiles: int,
    row_tiles: int,
    lean_tiles: int,
    kv_bytes: int,
    align_bytes: float,
    in_8_bits: bool,
    gpu: GpuSpec,
) -> int:
    """Return the largest cluster size with room for exactly one cluster per output tile.

    Partials then meet without a detour through memory, worth the SMs left idle. 1 means no cluster.

    Args:
        row_tiles: output tiles of a KV head.
        lean_tiles: of an output tile; a CTA of the cluster has more than half of one.
        in_8_bits: half of the SMs cannot compute at the rate of memory.
    """
    if row_tiles > 1 and kv_bytes > _MAX_BYTES_FOR_SHARED_CLUSTERS:
        return 1
    for size in (8, 4, 2):
        if size >= 2 * lean_tiles or (size > 2 and kv_bytes > _MAX_BYTES_FOR_LARGE_CLUSTERS):
            continue
        if size > 2 and output_tiles > 1 and in_8_bits:
            continue
        if output_tiles > _PROCESSING_CLUSTERS and kv_bytes > _MAX_BYTES_FOR_UNEVEN_CLUSTERS[size]:
            continue
        if size == 2 and (1 - 2 * output_tiles / gpu.sms) * kv_bytes >= align_bytes:
            continue
        clusters = cluster_slots(gpu.sms, 1, size) // output_tiles
        if clusters == 1 or (clusters > 1 and (output_tiles == 1 or kv_bytes < _SMALL_BYTES)):
            return size
    return 1


def _hopper_build(
    problem: AttentionProblem, rows: int, output_tiles: int, cluster: int
) -> tuple[int, int, int]:
    """Return chunk, warps and stages for one CTA per SM."""
    numbers = _copied_numbers(problem, rows)
    if numbers > 128:
        return _LEAST_CHUNK, 4, 3
    if _wide_in_8_bits(problem, rows):
        # Copies of small pages are smaller.
        return (64, 4, 2) if (problem.page_size or 64) % 64 == 0 else (32, 4, 3)
    # Many rows per chunk, so more warps share their softmax; or several output tiles that read the
    # same chunk, as timed.
    many_rows = rows > 8 or (cluster == 1 and problem.group_size * problem.q_len > rows)
    if numbers > 64 and many_rows and cluster <= 2:
        return _LEAST_CHUNK, 8, 2
    if numbers > 64:
        few_pairs = cluster == 2 and output_tiles < _FEW_TILES
        deep = (
            output_tiles <= 64
            and problem.kv_bytes < _MIN_BYTES_FOR_TWO_STAGES
            and rows <= 16
            and not few_pairs
        )
        # Copies of pages are smaller.
        return 32, 4, 3 if deep or problem.page_size is not None else 2
    large_pairs = (
        cluster == 2
        and output_tiles > _FEW_TILES
        and problem.kv_dtype == SAME
        and problem.kv_bytes >= _MIN_BYTES_FOR_WARPS_OF_PAIRS
    )
    if cluster == 1 or rows > 16 or large_pairs:
        return 32, 8, 2
    if problem.max_context < 256 * cluster:
        return 32, 4, 3
    # A sequence that ends within a chunk of 64 takes longer than one that ends within 32.
    return (64, 4, 3) if problem.max_context % 64 == 0 else (32, 8, 2)


def _wide_pair_build(
    problem: AttentionProblem, rows: int, output_tiles: int, cluster: int, gpu: GpuSpec
) -> tuple[int, int, int, int] | None:
    """Return chunk, warps, stages and CTAs per SM for long pairs of rows in 16 bits.

    These are two rows copied as one with more than 128 numbers; None for others. With at least one
    output tile per SM, two CTAs share an SM. Otherwise one CTA has eight warps if they fit, else
    four warps and a third stage (reports/performance-log.md, entry 66).
    """
    if _copied_numbers(problem, rows) <= 128 or _heads_of_row(problem, rows) == 1:
        return None
    if cluster == 1:
        many = output_tiles > gpu.sms
        build = (small_chunk(problem, rows), *((4, 2, 2) if many else (8, 2, 1)))
        config = cuda_config(*build, cluster, rows, copy_of(problem, gpu, rows), 1, False)
        if CudaBuild.of(problem, config).fits(gpu):
            return build
    return (*_hopper_build(problem, rows, output_tiles, cluster), 1)


def has_many_rows(problem: AttentionProblem, gpu: GpuSpec) -> bool:
    """Return True if many query rows share a KV head and many_rows.cu supports the problem."""
    few_tiles = problem.lengths_on == "host" and problem.batch * problem.kv_heads <= gpu.sms
    least = _MANY_ROWS_OF_FEW_TILES if few_tiles else _MANY_ROWS
    return (
        gpu.compute_capability == HOPPER
        and problem.q_len > 1
        and problem.group_size * problem.q_len >= least
        and takes_warpgroups(problem)
    )


def _pairs_share_sms(problem: AttentionProblem, tiles_of_sm: float) -> bool:
    """Return True if two CTAs of many_rows.cu share an SM.

    One reads while the other begins or ends an output tile.
    """
    least, most = _SPLIT_OUTPUT_TILES_OF_PAIRS
    split = problem.lengths_on == "device" and least < tiles_of_sm <= most
    return widest(problem) <= 128 and (split or tiles_of_sm > _OUTPUT_TILES_OF_PAIRS)


def many_rows_config(problem: AttentionProblem, gpu: GpuSpec) -> LeanCudaConfig:
    """Return settings of many_rows.cu.

    Row tiles that share K and V read them in step, unless too many CTAs would idle.
    """
    all_rows = problem.group_size * problem.q_len
    rows = WARPGROUP_ROWS if all_rows <= WARPGROUP_ROWS else 2 * WARPGROUP_ROWS
    output_tiles = problem.batch * problem.kv_heads * -(-all_rows // rows)
    # Chunks of 64 tokens are 1 to 2% faster where memory is waited for.
    whole = all_rows > rows and widest(problem) <= 128
    chunk, stages = (TILE_TOKENS, 4) if whole else (TILE_TOKENS // 2, 8)
    pairs = rows == WARPGROUP_ROWS and _pairs_share_sms(problem, output_tiles / gpu.sms)
    ctas_per_sm = 2 if pairs else 1
    slots = ctas_per_sm * gpu.sms
    used = slots // output_tiles * output_tiles or whole_ranges(slots, output_tiles)
    align_grid = few_idle(used, slots)
    copy = copy_of(problem, gpu)
    config = cuda_config(
        chunk, rows // 16, stages, ctas_per_sm, 1, rows, copy, 1, align_grid=align_grid
    )
    return fitted(config, problem, gpu)


def one_length_config(problem: AttentionProblem, gpu: GpuSpec) -> LeanCudaConfig:
    """Return settings of many_rows.cu for sequences of one length known to the host.

    If each CTA has one part of an output tile with all rows of a KV head, copies run less far
    ahead. A pair of CTAs replaces two splits of an output tile (reports/performance-log.md, entry
    60).
    """
    config = many_rows_config(problem, gpu)
    all_rows = problem.group_size * problem.q_len
    output_tiles = problem.batch * problem.kv_heads
    splits = config.ctas_per_sm * gpu.sms // output_tiles
    one_part = all_rows <= config.tile_rows and config.align_grid and splits > 0
    # Others were not timed.
    if not one_part or config.copy != "bulk" or widest(problem) > 128:
        return config
    timed = problem.head_dim == problem.value_dim in (64, 128) and problem.page_size is None
    long = problem.max_context > _SHORT_TILES * TILE_TOKENS
    pairs = (config.tile_rows, config.ctas_per_sm, splits) == (WARPGROUP_ROWS, 1, 2)
    cluster = 2 if pairs and timed and long else 1
    stage_bytes = 2 * config.chunk_tokens * (problem.head_dim + problem.value_dim)
    most_bytes = _STAGE_BYTES // config.ctas_per_sm
    most_bytes += config.tile_rows // WARPGROUP_ROWS * _STAGE_BYTES_OF_WARPGROUP
    stages = min(config.num_stages, -(-most_bytes // stage_bytes))
    return replace(config, cluster_size=cluster, num_stages=stages)


def many_rows_configs(problem: AttentionProblem, gpu: GpuSpec) -> list[LeanCudaConfig]:
    """Return the settings of many_rows.cu to tune; none if it does not support the problem."""
    if not has_many_rows(problem, gpu):
        return []
    chosen = many_rows_config(problem, gpu)
    space = [
        replace(chosen, min_tiles_per_cta=min_tiles, align_grid=align_grid)
        for min_tiles in (1, 2, 4)
        for align_grid in (True, False)
    ]
    if problem.lengths_on == "device" or problem.leftpad or problem.q_lens is not None:
        return space
    return list(dict.fromkeys([one_length_config(problem, gpu), *space]))


def heuristic(problem: AttentionProblem, gpu: GpuSpec) -> LeanCudaConfig:
    """Return settings for sequences of one length known to the host, chosen by sizes."""
    if has_many_rows(problem, gpu):
        packed = problem.q_lens is not None
        return (many_rows_config if packed else one_length_config)(problem, gpu)
    if problem.q_len > MOST_BUILT_Q_LEN or looks_up_rows(problem):
        return any_length_heuristic(problem, gpu)
    if problem.max_context <= TILE_TOKENS:
        return _single_tile(problem, gpu)
    rows = HEAD_PAIR_ROWS if pairs_heads(problem, gpu, True) else tile_rows_of(problem)
    output_tiles = _launched_rows(problem, rows)[1]
    lean_tiles = -(-problem.max_context // TILE_TOKENS)
    if output_tiles >= gpu.sms:
        # Two CTAs to an SM: one reads while the other is between output tiles. Stages as timed.
        stages = 2 if _copied_numbers(problem, rows) <= 64 else 3
        build = _wide_pair_build(problem, rows, output_tiles, 1, gpu)
        build = build or (small_chunk(problem, rows), 4, stages, 2)
        config = cuda_config(*build, 1, rows, copy_of(problem, gpu, rows), 1, True)
    elif gpu.compute_capability < HOPPER:
        few_rows = rows <= 16 and widest(problem) <= 128
        chunk = (64 if widest(problem) <= 64 else 32) if few_rows else _LEAST_CHUNK
        config = cuda_config(chunk, 4, 3, 1, 1, rows, copy_of(problem, gpu), 1, True)
    else:
        config = _hopper_heuristic(problem, rows, output_tiles, lean_tiles, gpu)
    config = fitted(config, problem, gpu)
    if config.cluster_size > 1 or lean_tiles == config.min_tiles_per_cta:
        return config
    total = output_tiles * lean_tiles
    grid = stream_k_grid(total, config.ctas_per_sm * gpu.sms)
    idle = 1 - stream_k_grid(total, grid, multiple_of=output_tiles) / grid
    return _aligned(config, idle * problem.kv_bytes < _MAX_IDLE_BYTES * rows / 8)


@lru_cache(maxsize=1024)
def _aligned(config: LeanCudaConfig, align_grid: bool) -> LeanCudaConfig:
    return replace(config, align_grid=align_grid)


def _single_tile(problem: AttentionProblem, gpu: GpuSpec) -> LeanCudaConfig:
    """Return settings for contexts of at most one LeanTile, which cannot be split.

    All resident CTAs have an output tile, with all rows that share its K and V.
    """
    most = rows_of(problem.group_size, problem.q_len, problem.value_dim)
    rows = HEAD_PAIR_ROWS if pairs_heads(problem, gpu, True) else most
    chunk = small_chunk(problem, rows)
    config = cuda_config(chunk, 4, 2, 2, 1, rows, copy_of(problem, gpu, rows), 1, True)
    return fitted(config, problem, gpu)


def any_length_heuristic(problem: AttentionProblem, gpu: GpuSpec) -> LeanCudaConfig:
    """Return settings for lengths on the device: for a cache with sequences of any length.

    They follow only from the model's shape and the batch. The kernel distributes the work by the
    lengths (leanbench.core.decomposition.stream_k_by_lengths). Chosen by the regret over batches
    from traces and other distributions on an H200 (reports/performance-log.md, entries 34, 36 and
    43).
    """
    if has_many_rows(problem, gpu):
        return many_rows_config(problem, gpu)
    queries = problem.group_size * problem.q_len
    # Fewer rows would be faster where sequences are short, and read K and V twice where they are
    # long.
    pairs = pairs_heads(problem, gpu, False)
    most = rows_of(problem.group_size, problem.q_len, problem.value_dim)
    rows = HEAD_PAIR_ROWS if pairs else most
    row_count, output_tiles = _launched_rows(problem, rows)
    hopper = gpu.compute_capability >= HOPPER
    partial, in_8_bits = row_count * problem.value_dim, problem.kv_dtype != SAME
    cluster = _any_length_cluster(output_tiles, partial, in_8_bits) if hopper else 1
    if pairs:
        cluster = min(cluster, _LARGEST_CLUSTER_OF_HEAD_PAIRS)
    many = _MANY_OUTPUT_TILES_IN_8_BITS if in_8_bits else _MANY_OUTPUT_TILES
    chunk, warps, stages, ctas_per_sm = 2 * _LEAST_CHUNK, 4, 2, 1
    numbers = _copied_numbers(problem, rows)
    if build := _wide_pair_build(problem, rows, output_tiles, cluster, gpu):
        chunk, warps, stages, ctas_per_sm = build
    elif widest(problem) > 128:
        chunk, stages = _LEAST_CHUNK, 3
        few_rows = rows == TILE_ROWS[0] and not in_8_bits
        wide = hopper and widest(problem) > 192 and few_rows
        if wide and output_tiles > _MANY_WIDE_OUTPUT_TILES * gpu.sms:
            stages, ctas_per_sm = 1, 2
    elif cluster > 1:
        chunk = 64 if numbers <= 64 and rows <= 16 else chunk
        stages = 3 if rows == TILE_ROWS[0] or numbers <= 64 else 2
    elif pairs and output_tiles < _MANY_HEAD_PAIRS * gpu.sms:
        chunk, warps, stages = _hopper_build(problem, rows, output_tiles, cluster)
    elif numbers <= 64:
        ctas_per_sm = 2
    elif pairs or output_tiles > many * gpu.sms:
        # One CTA reads while the other ends an output tile.
        chunk, ctas_per_sm = small_chunk(problem, rows), 2
    elif _wide_in_8_bits(problem, rows):
        chunk, warps, stages = _hopper_build(problem, rows, output_tiles, cluster)
    elif problem.group_size > _FEW_QUERIES and queries <= rows:
        chunk, warps = _LEAST_CHUNK, 8
    if build := _timed_build(problem, rows, output_tiles, cluster, gpu):
        chunk, warps, stages, ctas_per_sm, cluster = build
    if in_8_bits and rows == TILE_ROWS[-1]:
        chunk = _LEAST_CHUNK  # more take more registers than there are
    copy = copy_of(problem, gpu, rows)
    config = cuda_config(
        chunk, warps, stages, ctas_per_sm, cluster, rows, copy, 1, align_grid=False
    )
    return fitted(config, problem, gpu)


def _timed_build(
    problem: AttentionProblem, rows: int, output_tiles: int, cluster: int, gpu: GpuSpec
) -> tuple[int, int, int, int, int] | None:
    """Return chunk, warps, stages, and CTAs per SM and cluster for row-wise page lookups.

    The same settings apply to several query tokens. None if those of one query token are as fast
    (reports/performance-log.md, entry 42).
    """
    few_tiles = output_tiles < _MANY_OUTPUT_TILES * gpu.sms
    if looks_up_rows(problem):
        # Each look-up takes instructions of a warp: many warps.
        if rows == HEAD_PAIR_ROWS and takes_head_pairs(problem) and few_tiles:
            return 2 * _LEAST_CHUNK, 8, 2, 1, 1
        if widest(problem) <= 64:
            return 2 * _LEAST_CHUNK, 4, 2, 2, 1
        return (_LEAST_CHUNK, 8, 2, 1, 1) if few_tiles else (_LEAST_CHUNK, 4, 2, 2, 1)
    if problem.q_len > MOST_BUILT_Q_LEN:
        return small_chunk(problem, rows), 4, 2, 2, 1
    if (
        problem.q_len == 1
        or problem.kv_dtype != SAME
        or not 64 < widest(problem) <= 128
        or not few_tiles
    ):
        return None
    if problem.group_size * problem.q_len > rows:
        return _LEAST_CHUNK, 8, 2, 1, 1
    pairs = rows == TILE_ROWS[-1] or (rows > TILE_ROWS[0] and cluster == 1)
    return (_LEAST_CHUNK, 8, 2, 1, 2) if pairs and gpu.compute_capability >= HOPPER else None


def _any_length_cluster(output_tiles: int, partial: int, in_8_bits: bool) -> int:
    """Return a cluster size with room for at least one cluster per output tile.

    Partials then meet without a detour through memory.

    Args:
        partial: numbers of an output tile's partial. Only large ones are worth the SMs that
            clusters leave idle.
        in_8_bits: as in `_cluster_size`.
    """
    if in_8_bits and output_tiles >= _FEW_TILES:
        return 1
    for size, (most_tiles, least_partial) in _ANY_LENGTH_CLUSTERS.items():
        if output_tiles <= most_tiles and partial >= least_partial:
            return size
    return 1


def _hopper_heuristic(
    problem: AttentionProblem, rows: int, output_tiles: int, lean_tiles: int, gpu: GpuSpec
) -> LeanCudaConfig:
    """Return settings for fewer output tiles than SMs, all of one length."""
    copy = copy_of(problem, gpu, rows)
    numbers = _copied_numbers(problem, rows)
    few_columns = numbers <= 64 and problem.kv_dtype == SAME
    narrow = few_columns and output_tiles > gpu.sms // 5
    short_tiles = _SHORT_TILES_OF_FEW_COLUMNS if narrow else _SHORT_TILES
    if lean_tiles <= short_tiles and output_tiles >= gpu.sms // 6:
        # So short that a merge costs more than it saves.
        build = _hopper_build(problem, rows, output_tiles, 1)
        return cuda_config(*build, 1, 1, rows, copy, lean_tiles, True)
    row_tiles = -(-problem.group_size * problem.q_len // rows)
    align_bytes = _MAX_IDLE_BYTES * rows / 8
    in_8_bits = problem.kv_dtype != SAME
    cluster = _cluster_size(
        output_tiles, row_tiles, lean_tiles, problem.kv_bytes, align_bytes, in_8_bits, gpu
    )
    two_ctas = cluster == 2 and gpu.sms // output_tiles == 2 and numbers <= 64
    # Pairs of KV heads in 8 bits are too much for half of the SMs: see `_cluster_size`.
    head_pairs = rows == HEAD_PAIR_ROWS and takes_head_pairs(problem)
    two_ctas = two_ctas and not head_pairs
    if two_ctas and problem.kv_bytes < _MIN_BYTES_FOR_PAIRS_OF_TILES:
        build = _hopper_build(problem, rows, output_tiles, 1)
        return cuda_config(*build, 1, 1, rows, copy, lean_tiles, True)
    if cluster > 1 and output_tiles > 1:
        build = _hopper_build(problem, rows, output_tiles, cluster)
        return cuda_config(*build, 1, cluster, rows, copy, lean_tiles, True)
    if output_tiles == 1:
        return cuda_config(
            *_hopper_build(problem, rows, 1, cluster), 1, cluster, rows, copy, 1, True
        )
    pairs = cluster_slots(gpu.sms, 1, 2)
    partial = _launched_rows(problem, rows)[0] * problem.value_dim
    if output_tiles < _FEW_TILES and partial >= _LARGE_PARTIAL:
        # Large partials of many parts: a cluster merges most of them before they go through memory.
        # Pairs if their runs are even, assumed for short contexts.
        ctas = 2 * (pairs // output_tiles)
        even = rows == 8 and -(-lean_tiles // ctas) * ctas <= (1 + _UNEVEN_SHARE) * lean_tiles
        size = 2 if problem.kv_bytes < _MAX_BYTES_FOR_FEWEST_ROWS or even or head_pairs else 4
        return cuda_config(
            *_hopper_build(problem, rows, output_tiles, size), 1, size, rows, copy, 1, size == 2
        )
    # Pairs halve the partials.
    least_bytes = min(
        least for numbers, least in _MIN_BYTES_FOR_PAIRS.items() if partial >= numbers
    )
    if in_8_bits:
        least_bytes = min(least_bytes, _MIN_BYTES_FOR_PAIRS_IN_8_BITS)
    few_idle = pairs % output_tiles <= _FEW_IDLE_SHARE * pairs
    alone = row_tiles > 1 and output_tiles >= _MANY_SHARED_TILES
    size = 2 if problem.kv_bytes > least_bytes and few_idle and not alone else 1
    return cuda_config(
        *_hopper_build(problem, rows, output_tiles, size), 1, size, rows, copy, 1, True
    )


def small_chunk(problem: AttentionProblem, rows: int) -> int:
    """Return the tokens of a chunk for two CTAs per SM."""
    # Rows of 160 bytes side by side: 3 to 6% faster in chunks of 32 than of 16 (entry 53).
    side_by_side = problem.kv_layout == "HND" and rows == TILE_ROWS[0]
    narrow = _copied_numbers(problem, rows) <= (80 if side_by_side else 64)
    return 32 if narrow or _wide_in_8_bits(problem, rows) else _LEAST_CHUNK
