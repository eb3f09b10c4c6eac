"""Schedules that deal LeanTiles to CTAs. Each kernel's index arithmetic must equal these.

An **output tile** is one sequence's rows of one KV head (its query heads packed together,
`tile_rows` at a time). Its context is divided into **LeanTiles** of `tile_tokens`. A decomposition
assigns LeanTiles to CTAs. Output tiles are numbered batch -> KV head -> row tile, LeanTiles along
the context (LeanAttention, arXiv 2405.10480, section IV).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate

from leanbench.core.problem import AttentionProblem

#: Tensor cores need 16 rows. Above 64 (32 at head_dim 256) accumulator and tiles exceed the
#: registers.
MIN_TILE_ROWS = 16
MAX_TILE_ROWS = 64
#: TB/s that a CTA reads at most, the rate of an SM's copies, and us of a partial's way through
#: memory (clock readings in reports/performance-log.md).
_CTA_TB_S, _TRIP_US = 0.19, 0.75
#: SMs of an H200 in clusters of 1 to 8 CTAs: 39 of 3, 30 of 4, 22 of 5, 17 of 6, 15 of 7 or 8.
_CLUSTERED_SMS = (132, 132, 117, 120, 110, 102, 105, 120)


def tile_rows(group_size: int, head_dim: int, q_len: int = 1) -> int:
    """Return the rows of one output tile (the paper's T_m): a power of two from 16 to 64, at most
    32 at head_dim 256.
    """
    rows = 1 << (group_size * q_len - 1).bit_length()
    return max(MIN_TILE_ROWS, min(rows, MAX_TILE_ROWS if head_dim <= 128 else MAX_TILE_ROWS // 2))


@dataclass(frozen=True)
class TileGrid:
    """LeanTiles of a problem: sequence `b` has `per_sequence` output tiles of `lean_tiles[b]`."""

    lean_tiles: tuple[int, ...]
    per_sequence: int

    @classmethod
    def of(
        cls,
        problem: AttentionProblem,
        tile_tokens: int,
        rows: int | None = None,
        lengths: tuple[int, ...] | None = None,
    ) -> TileGrid:
        """Return the grid of LeanTiles of `tile_tokens`.

        Args:
            rows: Rows of an output tile, if a kernel does not take `tile_rows` of them.
            lengths: Tokens dealt per sequence, if not the visible ones.
        """
        rows = rows or tile_rows(problem.group_size, problem.head_dim, problem.q_len)
        row_tiles = -(-problem.group_size * problem.q_len // rows)
        lengths = lengths or problem.visible_lengths
        # An empty sequence has one masked LeanTile, whose CTA writes the output.
        lean_tiles = tuple(max(1, -(-length // tile_tokens)) for length in lengths)
        return cls(lean_tiles, problem.kv_heads * row_tiles)

    @property
    def output_tiles(self) -> int:
        return len(self.lean_tiles) * self.per_sequence

    @property
    def total(self) -> int:
        """Number of LeanTiles (the paper's I)."""
        return sum(self.lean_tiles) * self.per_sequence

    def of_output_tile(self, output_tile: int) -> int:
        """Return the LeanTiles of one output tile (the paper's C_n)."""
        return self.lean_tiles[output_tile // self.per_sequence]


@dataclass(frozen=True)
class Segment:
    """LeanTiles `[first, last)` of one output tile, walked by one CTA."""

    cta: int
    output_tile: int
    first: int
    last: int
    #: LeanTiles of the whole output tile.
    of: int

    @property
    def is_host(self) -> bool:
        """True for the host block: it holds the first LeanTile of the output tile."""
        return self.first == 0

    @property
    def is_finishing(self) -> bool:
        """True for the finishing block: it holds the last LeanTile of the output tile."""
        return self.last == self.of

    @property
    def is_whole(self) -> bool:
        """True if it needs no reduction: the CTA writes the output directly."""
        return self.is_host and self.is_finishing


@dataclass(frozen=True)
class Schedule:
    """Work of each CTA: `segments` in order of CTA, then of its walk."""

    decomposition: str
    grid: int
    segments: tuple[Segment, ...]
    #: fixed_split merges partials in a second launch; stream-K in the same.
    merge_launch: bool = False
    #: CTAs that walk a segment together. Above 1 a segment's `cta`, and `grid`, count clusters.
    cluster_size: int = 1
    #: True if the splits, and so the bits, of a sequence follow from its length.
    in_fixed_runs: bool = False
    #: Levels of the tree in which partials of fixed runs meet.
    merge_levels: int = 1

    @property
    def kind(self) -> str:
        """Effective kind of schedule. Stream-K with one CTA per output tile is one CTA a tile.

        `stream-K` crosses from one output tile to the next, `splits by length` and `equal splits`
        do not.
        """
        units = {segment.cta for segment in self.segments}
        if all(segment.is_whole for segment in self.segments):
            unit = "CTA" if self.cluster_size == 1 else "cluster"
            single = len(units) == len(self.segments)
            return f"one {unit} a tile" if single else f"several tiles a {unit}"
        if self.in_fixed_runs:
            return "fixed runs"
        if len(units) < len(self.segments):
            return "stream-K"
        splits = Counter(segment.output_tile for segment in self.segments)
        equal = self.decomposition == "fixed_split" or len(set(splits.values())) == 1
        return "equal splits" if equal else "splits by length"

    @property
    def partials(self) -> int:
        return sum(not segment.is_whole for segment in self.segments)

    @property
    def output_tiles(self) -> int:
        return 1 + max(segment.output_tile for segment in self.segments)

    def slots(self, sms: int, ctas_per_sm: int | None) -> int:
        """Return how many CTAs, or clusters, run at once on a GPU with `sms` SMs."""
        return cluster_slots(sms, ctas_per_sm or 1, self.cluster_size)

    def running_sms(self, sms: int) -> int:
        """Return the number of SMs that run a CTA."""
        ctas = len({segment.cta for segment in self.segments}) * self.cluster_size
        return min(usable_sms(sms, self.cluster_size), ctas)


def stream_k_start(work_range: int, total: int, grid: int) -> int:
    """Return the first LeanTile of a work range. Ranges differ by at most one LeanTile, longer ones
    come first.
    """
    share, longer = divmod(total, grid)
    return work_range * share + min(work_range, longer)


def stream_k_grid(
    total: int, max_grid: int, min_tiles_per_cta: int = 1, multiple_of: int = 1
) -> int:
    """Return the number of CTAs with work: at most `max_grid`, each with `min_tiles_per_cta` or
    more.

    Args:
        multiple_of: Round down to a multiple of this unless that is 0. With the number of output
            tiles of equal length, no CTA crosses output tiles: the paper's special case of
            FlashDecoding (section IV-C), except for a remainder of the division.
    """
    grid = max(1, min(max_grid, total // min_tiles_per_cta))
    return grid // multiple_of * multiple_of or grid


def usable_sms(sms: int, cluster_size: int = 1) -> int:
    """Return the number of SMs that clusters can use. A cluster lives in one GPC, and GPCs have SMs
    left over.
    """
    return sms * _CLUSTERED_SMS[cluster_size - 1] // _CLUSTERED_SMS[0]


def cluster_slots(sms: int, ctas_per_sm: int, cluster_size: int) -> int:
    """Return how many clusters run at once: the work ranges of a stream-K launch of clusters."""
    return ctas_per_sm * usable_sms(sms, cluster_size) // cluster_size


def stream_k(
    tiles: TileGrid,
    max_grid: int,
    min_tiles_per_cta: int = 1,
    aligned: bool = False,
    short_rests: Sequence[int] = (),
) -> Schedule:
    """Build the schedule of LeanAttention: all LeanTiles end to end, an equal work range for each
    CTA (section IV, Algorithm 2).

    Work ranges are dealt from the last to the first: the host block of an output tile waits for its
    other parts, and those then belong to CTAs of lower index, which the hardware starts earlier.

    Args:
        short_rests: LeanTiles per sequence up to which the rest of an output tile goes to the
            previous work range; none by default.
    """
    grid = stream_k_grid(
        tiles.total, max_grid, min_tiles_per_cta, tiles.output_tiles if aligned else 1
    )
    # First LeanTile of each sequence.
    starts = [0, *accumulate(count * tiles.per_sequence for count in tiles.lean_tiles)]

    def walk() -> Iterator[Segment]:
        for cta in range(grid):
            work_range = grid - 1 - cta
            at = stream_k_start(work_range, tiles.total, grid)
            end = stream_k_start(work_range + 1, tiles.total, grid)
            sequence = bisect_right(starts, at) - 1
            while at < end:
                while at >= starts[sequence + 1]:
                    sequence += 1
                of = tiles.lean_tiles[sequence]
                head, first = divmod(at - starts[sequence], of)
                last = min(of, first + end - at)
                short_rest = short_rests[sequence] if short_rests else 0
                if of - last <= short_rest:
                    last = of
                if first == 0 or of - first > short_rest:
                    yield Segment(cta, sequence * tiles.per_sequence + head, first, last, of)
                at += last - first

    return Schedule("stream_k", grid, tuple(walk()))


def stream_k_with_ends(
    tiles: TileGrid,
    max_grid: int,
    min_tiles_per_cta: int,
    end_tiles: int,
    merge_tiles: int = 0,
    packs: bool = False,
) -> Schedule:
    """Build stream-K over a ragged batch. Every output tile counts `end_tiles` extra, empty
    LeanTiles.

    They stand for the time to end an output tile: a CTA with many short sequences ends many. The
    number of CTAs follows from the real LeanTiles. Segments, and their `of`, count the extra ones.

    Args:
        merge_tiles: LeanTiles that take as long as a merge. A shorter rest of an output tile goes
            to the previous work range.
        packs: Output tiles of one LeanTile count no end if few have more: a CTA then walks several
            at a time.
    """
    few = tiles.total - tiles.output_tiles <= tiles.output_tiles // 8 * 3
    ends = [0 if packs and few and count == 1 else end_tiles for count in tiles.lean_tiles]
    counted = TileGrid(
        tuple(count + end for count, end in zip(tiles.lean_tiles, ends, strict=True)),
        tiles.per_sequence,
    )
    grid = stream_k_grid(tiles.total, max_grid, min_tiles_per_cta)
    return stream_k(counted, grid, short_rests=[merge_tiles + end for end in ends])


#: Candidates for the longest split: their number, and steps per mean work range.
_SPLIT_STEP = 16
_SPLIT_STEPS = 32


def longest_split(tiles: TileGrid, grid: int, longest_steps: int, merge_tiles: int) -> int:
    """Return the LeanTiles of the longest split; 0 for stream-K.

    `grid` CTAs then take one split of one output tile each. This is the choice of lean.cu for
    lengths on the device: the shortest split that needs no more CTAs than there are, if it exceeds
    the mean work range by `longest_steps` sixteenths at most. Output tiles stay whole if splits
    save no more than `merge_tiles`, the time of a merge through memory.
    """
    if grid < tiles.output_tiles:
        return 0
    share = -(-tiles.total // grid)
    longest = 0
    for step in range(min(_SPLIT_STEPS, longest_steps + 1)):
        candidate = share + -(-share * step // _SPLIT_STEP)
        splits = sum(-(-count // candidate) for count in tiles.lean_tiles)
        if splits * tiles.per_sequence <= grid:
            longest = candidate
            break
    most = max(tiles.lean_tiles)
    return most if most <= (longest or share) + merge_tiles else longest


def stream_k_by_lengths(
    tiles: TileGrid,
    max_grid: int,
    min_tiles_per_cta: int,
    end_tiles: int,
    longest_steps: int,
    merge_tiles: int,
    packs: bool = False,
) -> Schedule:
    """Build stream-K as lean.cu deals it by lengths on the device.

    That is equal splits of each output tile, none longer than `longest_split`, or else
    `stream_k_with_ends`. First splits come last, because they wait for the other splits of their
    output tile.
    """
    most = stream_k_grid(tiles.total, max_grid, min_tiles_per_cta)
    longest = longest_split(tiles, most, longest_steps, merge_tiles)
    if longest == 0:
        return stream_k_with_ends(tiles, max_grid, min_tiles_per_cta, end_tiles, packs=packs)
    counts = [-(-count // longest) for count in tiles.lean_tiles]
    others = [
        (output_tile, split)
        for output_tile in range(tiles.output_tiles)
        for split in range(1, counts[output_tile // tiles.per_sequence])
    ]
    grid = len(others) + tiles.output_tiles
    firsts = [(cta % tiles.output_tiles, 0) for cta in range(len(others), grid)]

    def walk() -> Iterator[Segment]:
        for cta, (output_tile, split) in enumerate([*reversed(others), *firsts]):
            of, count = tiles.of_output_tile(output_tile), counts[output_tile // tiles.per_sequence]
            first, last = stream_k_start(split, of, count), stream_k_start(split + 1, of, count)
            yield Segment(cta, output_tile, first, last, of)

    return Schedule("stream_k", grid, tuple(walk()))


def fixed_runs(
    tiles: TileGrid,
    run_tiles: int | Sequence[int],
    max_grid: int | None = None,
    merge_at_once: int = 1,
) -> Schedule:
    """Build stream-K in fixed runs, which depend only on a sequence's own length.

    A run has `run_tiles` LeanTiles, for all sequences or for each, or the rest of an output tile.
    Runs are dealt from the last to the first, as in `stream_k`, evenly to `max_grid` CTAs; None
    gives each its own CTA. A CTA walks merging runs last: every `merge_at_once`-th run of an output
    tile waits for others. It walks an output tile from the last run to the first.
    """
    of_sequences = [run_tiles] * len(tiles.lean_tiles) if isinstance(run_tiles, int) else run_tiles

    def run_of(output_tile: int) -> int:
        return of_sequences[output_tile // tiles.per_sequence]

    def is_merging(output_tile: int, first: int) -> bool:
        return first // run_of(output_tile) % merge_at_once == 0

    runs = [
        (output_tile, first)
        for output_tile in range(tiles.output_tiles)
        for first in range(0, tiles.of_output_tile(output_tile), run_of(output_tile))
    ]
    total = len(runs)
    grid = min(total, max_grid or total)
    most = max(Counter(output_tile for output_tile, _ in runs).values())
    levels = 1
    while 1 < merge_at_once**levels < most:
        levels += 1

    def walk() -> Iterator[Segment]:
        for cta in range(grid):
            lowest = total - stream_k_start(cta + 1, total, grid)
            end = total - stream_k_start(cta, total, grid)
            for _, output_tile, negative in sorted(
                (is_merging(output_tile, first), output_tile, -first)
                for output_tile, first in runs[lowest:end]
            ):
                of = tiles.of_output_tile(output_tile)
                last = min(of, run_of(output_tile) - negative)
                yield Segment(cta, output_tile, -negative, last, of)

    return Schedule("stream_k", grid, tuple(walk()), in_fixed_runs=True, merge_levels=levels)


def one_cta_per_tile(tiles: TileGrid) -> Schedule:
    """Build the schedule of FlashAttention-2: one CTA walks the whole context of an output tile."""
    counts = [tiles.of_output_tile(tile) for tile in range(tiles.output_tiles)]
    return Schedule(
        "one_cta_per_tile",
        tiles.output_tiles,
        tuple(Segment(tile, tile, 0, count, count) for tile, count in enumerate(counts)),
    )


def fixed_split_range(split: int, splits: int, lean_tiles: int) -> tuple[int, int]:
    """Return the LeanTiles `[first, last)` of one split: equal parts, rounded up, so the last ones
    can be shorter or empty.
    """
    share = -(-lean_tiles // splits)
    return min(split * share, lean_tiles), min((split + 1) * share, lean_tiles)


def fixed_split(tiles: TileGrid, splits: int) -> Schedule:
    """Build the schedule of FlashDecoding: every output tile in the same number of equal splits,
    merged by a second kernel.
    """
    segments = []
    for tile in range(tiles.output_tiles):
        of = tiles.of_output_tile(tile)
        for split in range(splits):
            first, last = fixed_split_range(split, splits, of)
            if first < last:
                segments.append(Segment(tile * splits + split, tile, first, last, of))
    return Schedule(
        "fixed_split", tiles.output_tiles * splits, tuple(segments), merge_launch=splits > 1
    )


def equal_splits(tiles: TileGrid, splits: int, cluster_size: int = 1) -> Schedule:
    """Build the schedule of lean.cu with the same number of splits in every output tile.

    The ranges are those of `fixed_split`, the merge is in the same launch. First splits come last,
    because they wait for the other splits of their output tile.
    """

    def walk() -> Iterator[Segment]:
        for turn in range(splits):
            for tile in range(tiles.output_tiles):
                of = tiles.of_output_tile(tile)
                first, last = fixed_split_range(splits - 1 - turn, splits, of)
                if first < last:
                    yield Segment(turn * tiles.output_tiles + tile, tile, first, last, of)

    grid = tiles.output_tiles * splits
    return Schedule("fixed_split", grid, tuple(walk()), cluster_size=cluster_size)


def fixed_split_heuristic(
    output_tiles: int, ctas_at_once: int, lean_tiles: int, max_splits: int = 128
) -> int:
    """Return the fewest splits whose last wave is nearly as full as that of the best split count.

    `ctas_at_once` is how many CTAs the GPU holds (SMs x resident CTAs). With 80% of them busy
    already, nothing is split. "Nearly" is 85%, as in FlashAttention's heuristic. Split counts that
    leave splits empty are skipped.
    """
    if output_tiles >= 0.8 * ctas_at_once:
        return 1
    efficiency: dict[int, float] = {}
    for splits in range(1, min(max_splits, ctas_at_once, lean_tiles) + 1):
        share = -(-lean_tiles // splits)
        if splits > 1 and share == -(-lean_tiles // (splits - 1)):
            continue
        waves = output_tiles * splits / ctas_at_once
        efficiency[splits] = waves / -(-(output_tiles * splits) // ctas_at_once)
    best = max(efficiency.values())
    return next(splits for splits, value in efficiency.items() if value >= 0.85 * best)


def quantisation_efficiency(schedule: Schedule, slots: int) -> float:
    """Return the share of CTA slots x time with work, if every LeanTile took equally long and
    `slots` CTAs ran at once.

    CTAs start in order as slots fall free. This is the schedule's ceiling, before any hardware
    effect (0 to 1).
    """
    work: Counter[int] = Counter()
    for segment in schedule.segments:
        work[segment.cta] += segment.last - segment.first
    running: list[int] = []
    now = 0
    for duration in work.values():
        if len(running) == slots:
            now = heappop(running)
        heappush(running, now + duration)
    return work.total() / (slots * max(running))


def fixed_runs_us(schedule: Schedule, kv_bytes: int, bandwidth_tb_s: float) -> float | None:
    """Return what fixed runs add at least to reading K and V at the memory's rate, in us.

    CTAs with more LeanTiles than others read on when those have ended, and few CTAs read more
    slowly than the memory. Each level of the merge is a trip through memory. None for schedules
    without fixed runs.
    """
    if not schedule.in_fixed_runs:
        return None
    work: Counter[int] = Counter()
    for segment in schedule.segments:
        work[segment.cta] += segment.last - segment.first
    # LeanTiles that the memory could read meanwhile.
    readable, before = 0.0, 0
    for ended, tiles in enumerate(sorted(work.values())):
        readable += (tiles - before) * max(len(work) - ended, bandwidth_tb_s / _CTA_TB_S)
        before = tiles
    read_us = kv_bytes / (bandwidth_tb_s * 1e6)
    trips = schedule.merge_levels if schedule.partials else 0
    return read_us * (readable / work.total() - 1) + trips * _TRIP_US
