"""Properties of schedules: everything is walked once, shares are fair, special cases."""

from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leanbench.core.decomposition import (
    Schedule,
    TileGrid,
    equal_splits,
    fixed_runs,
    fixed_runs_us,
    fixed_split,
    fixed_split_heuristic,
    longest_split,
    one_cta_per_tile,
    quantisation_efficiency,
    stream_k,
    stream_k_by_lengths,
    stream_k_grid,
    stream_k_start,
    stream_k_with_ends,
    tile_rows,
)
from leanbench.core.problem import AttentionProblem

tile_grids = st.builds(
    TileGrid,
    lean_tiles=st.lists(st.integers(1, 40), min_size=1, max_size=9).map(tuple),
    per_sequence=st.integers(1, 7),
)


def walked(schedule: Schedule, tiles: TileGrid) -> None:
    """Every LeanTile of every output tile is walked exactly once."""
    seen = {tile: [0] * tiles.of_output_tile(tile) for tile in range(tiles.output_tiles)}
    for segment in schedule.segments:
        assert segment.of == tiles.of_output_tile(segment.output_tile)
        assert 0 <= segment.first < segment.last <= segment.of
        assert 0 <= segment.cta < schedule.grid
        for lean_tile in range(segment.first, segment.last):
            seen[segment.output_tile][lean_tile] += 1
    assert all(count == 1 for counts in seen.values() for count in counts)


@given(tile_grids, st.integers(1, 300), st.integers(1, 5), st.booleans())
def test_stream_k_walks_everything_once_in_fair_shares(tiles, max_grid, min_tiles, aligned):
    schedule = stream_k(tiles, max_grid, min_tiles, aligned)
    walked(schedule, tiles)
    assert schedule.grid <= max_grid
    share = [0] * schedule.grid
    for segment in schedule.segments:
        share[segment.cta] += segment.last - segment.first
    assert max(share) - min(share) <= 1
    if schedule.grid > 1 and not aligned:
        assert min(share) >= min_tiles


@given(tile_grids, st.integers(1, 300))
def test_stream_k_ctas_own_two_slots_and_hosts_wait_for_lower_ones(tiles, max_grid):
    # What the kernel's two slots per run rest on.
    schedule = stream_k(tiles, max_grid)
    for cta in range(schedule.grid):
        split = [s for s in schedule.segments if s.cta == cta and not s.is_whole]
        assert sum(not s.is_host for s in split) <= 1
        assert sum(s.is_host for s in split) <= 1
        if len(split) == 2:
            assert not split[0].is_host
            assert split[1].is_host
    # Hence no deadlock; and the part that a host waits for is the other CTA's first.
    schedule = stream_k(tiles, max_grid)
    first_of = {}
    for segment in schedule.segments:
        first_of.setdefault(segment.cta, segment)
    hosts = {s.output_tile: s.cta for s in schedule.segments if s.is_host}
    for segment in schedule.segments:
        if not segment.is_host:
            assert segment.cta < hosts[segment.output_tile]
            assert first_of[segment.cta] is segment


@given(tile_grids, st.integers(1, 50), st.sampled_from([1, 2, 8]))
def test_equal_splits_have_the_ranges_of_fixed_split(tiles, splits, cluster_size):
    schedule, flash = equal_splits(tiles, splits, cluster_size), fixed_split(tiles, splits)
    walked(schedule, tiles)
    assert {(s.output_tile, s.first, s.last) for s in schedule.segments} == {
        (s.output_tile, s.first, s.last) for s in flash.segments
    }
    assert len({segment.cta for segment in schedule.segments}) == len(schedule.segments)
    assert (schedule.grid, schedule.cluster_size) == (flash.grid, cluster_size)
    assert not schedule.merge_launch


@given(tile_grids, st.integers(1, 50))
def test_equal_splits_wait_for_lower_ctas_only(tiles, splits):
    """A split may wait for any that comes after it in the output tile."""
    ctas = defaultdict(list)
    for segment in sorted(equal_splits(tiles, splits).segments, key=lambda s: s.first):
        ctas[segment.output_tile].append(segment.cta)
    for of_tile in ctas.values():
        assert of_tile == sorted(of_tile, reverse=True)


@pytest.mark.parametrize(
    ("schedule", "kind"),
    [
        (stream_k(TileGrid((10,), 3), 4), "stream-K"),
        # As many CTAs as output tiles, twice as many, and half.
        (stream_k(TileGrid((10,), 4), 4), "one CTA a tile"),
        (stream_k(TileGrid((10,), 4), 8), "equal splits"),
        (stream_k(TileGrid((10,), 4), 2), "several tiles a CTA"),
        # 5 LeanTiles in two: a CTA crosses to the next output tile.
        (stream_k(TileGrid((5,), 2), 4, aligned=True), "stream-K"),
        (replace(stream_k(TileGrid((10,), 4), 4), cluster_size=2), "one cluster a tile"),
        (stream_k_by_lengths(TileGrid((8, 2), 1), 5, 1, 1, 31, 0), "splits by length"),
        (stream_k_by_lengths(TileGrid((8, 8), 1), 8, 1, 1, 31, 0), "equal splits"),
        (fixed_split(TileGrid((8, 1), 1), 4), "equal splits"),
        (fixed_split(TileGrid((8, 1), 1), 1), "one CTA a tile"),
        (equal_splits(TileGrid((8, 1), 1), 4, 2), "equal splits"),
        (equal_splits(TileGrid((8, 1), 1), 1, 2), "one cluster a tile"),
        (one_cta_per_tile(TileGrid((8, 1), 3)), "one CTA a tile"),
        (fixed_runs(TileGrid((8, 3), 2), 2, 5), "fixed runs"),
        (fixed_runs(TileGrid((8, 3), 2), 8), "one CTA a tile"),
    ],
)
def test_kinds_of_schedules(schedule, kind):
    assert schedule.kind == kind


@given(tile_grids, st.integers(1, 300), st.integers(1, 5), st.integers(0, 3), st.integers(0, 3))
def test_counted_ends_change_where_it_is_cut_and_not_into_how_many(
    tiles, max_grid, min_tiles, end_tiles, merge_tiles
):
    schedule = stream_k_with_ends(tiles, max_grid, min_tiles, end_tiles, merge_tiles)
    assert schedule.grid == stream_k(tiles, max_grid, min_tiles).grid
    counted = TileGrid(tuple(count + end_tiles for count in tiles.lean_tiles), tiles.per_sequence)
    walked(schedule, counted)
    share = [0] * schedule.grid
    for segment in schedule.segments:
        share[segment.cta] += segment.last - segment.first
    # A work range may lose a rest to the one before, and take one from the one after.
    assert max(share) - min(share) <= 1 + 2 * (end_tiles + merge_tiles)


@given(tile_grids, st.integers(1, 300), st.integers(0, 3), st.integers(0, 3))
def test_a_rest_is_longer_than_a_merge_takes(tiles, max_grid, end_tiles, merge_tiles):
    for segment in stream_k_with_ends(tiles, max_grid, 1, end_tiles, merge_tiles).segments:
        assert segment.is_host or segment.of - segment.first > end_tiles + merge_tiles
        assert segment.is_finishing or segment.of - segment.last > end_tiles + merge_tiles


@pytest.mark.parametrize("end_tiles", [0, 1, 2])
def test_counted_ends_cut_no_output_tile_that_would_be_whole(end_tiles):
    """More CTAs than output tiles, each of which is not worth cutting."""
    schedule = stream_k_with_ends(TileGrid((4,) * 8, 8), 132, 4, end_tiles)
    assert schedule.grid == 64
    assert all(segment.is_whole for segment in schedule.segments)


def test_counted_ends_spread_short_sequences():
    tiles = TileGrid((31, *[1] * 32), 1)
    # 63 LeanTiles in sevens; 96 in tens and elevens, two for each short sequence.
    for ends, most in ((0, 7), (1, 6)):
        segments = stream_k_with_ends(tiles, 9, 1, ends).segments
        assert max(Counter(segment.cta for segment in segments).values()) == most


@given(st.integers(1, 10_000), st.integers(1, 500))
def test_shares_of_stream_k_differ_by_at_most_one_the_longer_first(total, grid):
    grid = min(grid, total)
    starts = [stream_k_start(number, total, grid) for number in range(grid + 1)]
    shares = [end - start for start, end in pairwise(starts)]
    assert (starts[0], starts[-1]) == (0, total)
    assert shares == sorted(shares, reverse=True)
    assert shares[0] - shares[-1] <= 1


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 9))
def test_aligned_stream_k_is_flash_decoding(output_tiles, lean_tiles, splits):
    """A grid that is a multiple of the output tiles is FlashDecoding's (section IV-C)."""
    tiles = TileGrid((lean_tiles * splits,) * output_tiles, 1)
    lean = stream_k(tiles, splits * output_tiles, aligned=True)
    flash = fixed_split(tiles, splits)

    def parts(schedule):
        return {(s.output_tile, s.first, s.last) for s in schedule.segments}

    assert parts(lean) == parts(flash)
    if splits == 1:
        assert parts(lean) == parts(one_cta_per_tile(tiles))


@given(tile_grids, st.integers(1, 200))
def test_fixed_split_walks_everything_once(tiles, splits):
    schedule = fixed_split(tiles, splits)
    walked(schedule, tiles)
    assert schedule.merge_launch == (splits > 1)
    for tile in range(tiles.output_tiles):
        parts = [s.last - s.first for s in schedule.segments if s.output_tile == tile]
        assert len(set(parts[:-1])) <= 1
        assert parts[-1] <= parts[0]


@given(tile_grids)
def test_one_cta_per_tile_never_splits(tiles):
    schedule = one_cta_per_tile(tiles)
    walked(schedule, tiles)
    assert schedule.partials == 0
    assert all(
        segment.is_whole and segment.cta == segment.output_tile for segment in schedule.segments
    )


def test_grids_tile_rows_and_waves():
    assert stream_k_grid(1000, 264, multiple_of=56) == 224
    assert stream_k_grid(1000, 264, multiple_of=300) == 264
    assert stream_k_grid(10, 264) == 10
    assert stream_k_grid(10, 264, min_tiles_per_cta=4) == 2
    assert stream_k_grid(1, 264, min_tiles_per_cta=4) == 1
    sizes = {(1, 64): 16, (5, 128): 16, (17, 64): 32, (71, 128): 64, (71, 256): 32}
    assert {size: tile_rows(*size) for size in sizes} == sizes
    # They are output tiles: 71 heads of a group in two of them.
    tiles = TileGrid.of(AttentionProblem(2, 71 * 3, 3, 1000, 128), 128)
    assert (tiles.per_sequence, tiles.lean_tiles) == (3 * 2, (8, 8))
    # 56 output tiles on 132 SMs: two splits fill 112 slots of 132 (84.8%), seven 392 of 396; the
    # best, 33, 1848 of 1848.
    assert fixed_split_heuristic(56, 132, 1000) == 7
    assert fixed_split_heuristic(8, 132, 1000) == 15
    # 120 of 132 busy already.
    assert fixed_split_heuristic(120, 132, 1000) == 1
    # No more splits than LeanTiles.
    assert fixed_split_heuristic(1, 132, 3) == 3
    tiles = TileGrid((10,), 6)
    assert quantisation_efficiency(one_cta_per_tile(tiles), 4) == pytest.approx(60 / (4 * 20))
    assert quantisation_efficiency(stream_k(tiles, 4), 4) == 1.0


def test_what_fixed_runs_add_to_a_read():
    def added_us(schedule, bandwidth_tb_s=1.33):
        return fixed_runs_us(schedule, 133_000_000, bandwidth_tb_s)

    # Seven CTAs read 1.33 TB/s, 133 MB take 100 us. One of nine CTAs has two of ten LeanTiles.
    assert added_us(fixed_runs(TileGrid((10,), 1), 1, 9)) == pytest.approx(60.75)
    # Of a memory of 19 TB/s, a hundred CTAs would be needed.
    assert added_us(fixed_runs(TileGrid((1,), 10), 1), 19.0) == pytest.approx(7 * 9)
    whole = fixed_runs(TileGrid((1,), 9), 1)
    assert added_us(whole) == pytest.approx(0)
    tree = TileGrid((17,), 1)
    assert added_us(fixed_runs(tree, 1, merge_at_once=16)) == pytest.approx(1.5)
    assert added_us(fixed_runs(tree, 1)) == pytest.approx(0.75)
    assert added_us(stream_k(tree, 9)) is None


@given(tile_grids, st.integers(1, 300), st.integers(0, 31), st.integers(0, 3), st.integers(1, 4))
def test_dealing_by_lengths_covers_every_output_tile(tiles, max_grid, steps, merge_tiles, least):
    schedule = stream_k_by_lengths(tiles, max_grid, least, 0, steps, merge_tiles)
    walked(schedule, tiles)
    assert schedule.grid <= max_grid
    able = stream_k_grid(tiles.total, max_grid, least)
    longest = longest_split(tiles, able, steps, merge_tiles)
    if longest:
        parts = Counter(segment.cta for segment in schedule.segments)
        assert set(parts.values()) == {1}
        assert max(segment.last - segment.first for segment in schedule.segments) <= longest


def test_a_rest_without_tokens_belongs_to_the_range_before():
    """One with tokens does not, however few: of 4 LeanTiles the last one is a split."""

    def dealt(lengths):
        schedule = stream_k_by_lengths(TileGrid(lengths, 1), 2, 1, 1, 0, 1)
        return [(part.cta, part.output_tile, part.first, part.last) for part in schedule.segments]

    assert sorted(dealt((4, 4, 4))) == [(0, 1, 3, 5), (0, 2, 0, 5), (1, 0, 0, 5), (1, 1, 0, 3)]
    assert sorted(dealt((9, 3, 3))) == [(0, 1, 0, 4), (0, 2, 0, 4), (1, 0, 0, 10)]


@pytest.mark.parametrize(
    ("lengths", "per_sequence", "longest"),
    [
        # 8 output tiles, 16 CTAs each, of 132.
        ((32,), 8, 2),
        # 64 output tiles, 2 CTAs each.
        ((8,) * 8, 8, 4),
        # Two LeanTiles: a merge takes as long as it saves.
        ((2,) * 8, 8, 2),
        # 56 output tiles, 2 CTAs each and 20 CTAs left over: 256 would do, candidates are 13 or 14
        # apart.
        ((512,), 56, 259),
        # A CTA to each output tile, 60 CTAs left over.
        ((512,), 72, 512),
        # More output tiles than CTAs.
        ((4,) * 20, 8, 0),
        # Lengths differ: 13 splits of the long output tiles, the short ones whole.
        ((512, 1, 1, 1), 8, 40),
        # All whole where none is much longer than the mean work range.
        ((2, 1, 1, 1), 8, 2),
        # The short output tiles take nearly all CTAs: stream-K.
        ((1000, *[1] * 15), 8, 0),
    ],
)
def test_longest_split(lengths, per_sequence, longest):
    assert longest_split(TileGrid(lengths, per_sequence), 132, 16, 1) == longest
