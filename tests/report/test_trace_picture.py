"""Rows, lanes, merged marks and figures of timelines made by hand."""

from itertools import pairwise

import pytest
from colors import contrast
from hypothesis import given
from hypothesis import strategies as st
from trace_examples import cta, fixed_split, lean, reduction, tiles, timeline, wait

from leanbench.report.trace.picture import (
    TILE_COLORS,
    Mark,
    Panel,
    figure_words,
    merge_short,
    merge_to,
    ticks,
    union,
)


def test_rows_are_sms_in_the_order_of_their_first_cta() -> None:
    assert Panel(lean()).sm_order == (2, 0, 3, 1)
    # A second launch does not count: its numbers start again.
    late = timeline(
        cta(5, 0, tiles(0, 0, 4)),
        cta(6, 1, tiles(0, 0, 4)),
        cta(0, 1, tiles(0, 5, 6), launch="merge"),
    )
    assert Panel(late).sm_order == (0, 1, 2, 3)


def test_marks_of_a_cta_and_its_spans() -> None:
    marks = [mark for mark in Panel(lean()).marks if mark.cta == 1]
    fields = "{0.kind} {0.output_tile} {0.row} {0.start_us} {0.end_us}"
    assert "; ".join(map(fields.format, marks)) == (
        "cta None 1 0 40; tiles 0 1 0 10; tiles 1 1 10 20; wait 1 1 20 30; reduction 1 1 30 40"
    )


def lanes(panel: Panel, launch: str | None = None) -> list[tuple[int, int]]:
    """Return the lane of each CTA and the number of lanes."""
    ctas = [mark for mark in panel.marks if mark.kind == "cta"]
    return [(mark.lane, mark.lanes) for mark in ctas if launch in (None, mark.launch)]


def test_ctas_that_share_an_sm_have_a_lane_each() -> None:
    panel = Panel(fixed_split())
    split = {
        mark.cta: (mark.row, mark.lane, mark.lanes)
        for mark in panel.marks
        if (mark.kind, mark.launch) == ("cta", "split_kernel")
    }
    assert split == {number: (number % 4, number // 4, 2) for number in range(8)}
    # The second launch has the rows to itself.
    assert set(lanes(panel, "merge_kernel")) == {(0, 1)}


def test_a_lane_is_used_again_when_its_cta_has_ended() -> None:
    ctas = cta(0, 0, tiles(0, 0, 5)), cta(1, 0, tiles(1, 0, 9)), cta(2, 0, tiles(2, 5, 9))
    assert lanes(Panel(timeline(*ctas))) == [(0, 2), (1, 2), (0, 2)]
    # Which of two CTAs starts a moment earlier does not matter.
    ctas = cta(0, 0, tiles(0, 0.3, 5)), cta(132, 0, tiles(1, 0, 9)), cta(264, 0, tiles(2, 6, 9))
    marks = [mark for mark in Panel(timeline(*ctas)).marks if mark.kind == "cta"]
    assert {mark.cta: mark.lane for mark in marks} == {0: 0, 132: 1, 264: 0}


def test_launches_that_overlap_share_the_lanes() -> None:
    merge = cta(0, 0, reduction(0, 4, 9), launch="merge")
    assert lanes(Panel(timeline(cta(0, 0, tiles(0, 0, 5)), merge))) == [(0, 2), (1, 2)]


spans = st.lists(
    st.tuples(st.floats(0, 100), st.floats(0.01, 20), st.integers(0, 3)), min_size=1, max_size=40
)


@given(spans)
def test_lanes_never_overlap(lives: list[tuple[float, float, int]]) -> None:
    ctas = [cta(n, sm, tiles(n, at, at + length)) for n, (at, length, sm) in enumerate(lives)]
    by_lane: dict[tuple[int, int], list[Mark]] = {}
    for mark in Panel(timeline(*ctas)).marks:
        if mark.kind == "cta":
            assert mark.lane < mark.lanes
            by_lane.setdefault((mark.row, mark.lane), []).append(mark)
    for lane in by_lane.values():
        assert all(before.end_us <= after.start_us for before, after in pairwise(lane))


def test_figures() -> None:
    figures = Panel(lean()).figures
    # Of 4 SMs x 40 us: 20 + 30 + 30 busy, 10 with all CTAs waiting, 10 of reduction.
    assert figures.busy_share == pytest.approx(80 / 160)
    assert figures.waiting_share == pytest.approx(10 / 160)
    assert figures.reduction_share == pytest.approx(10 / 160)
    assert figures.idle_share == pytest.approx(70 / 160)
    assert (figures.working_sms, figures.first_end_us, figures.last_end_us) == (3, 20, 40)


def test_reductions_of_a_second_launch_count() -> None:
    figures = Panel(fixed_split()).figures
    # 4 SMs x 16 us: all four busy for 10, two of them for 4 more.
    assert figures.reduction_share == pytest.approx(8 / 64)
    assert figures.busy_share == pytest.approx(48 / 64)
    assert figures.waiting_share == 0


def test_a_wait_beside_a_working_cta_is_no_waiting_sm() -> None:
    ctas = cta(0, 0, tiles(0, 0, 10), wait(0, 10, 20)), cta(1, 0, tiles(1, 0, 20))
    figures = Panel(timeline(*ctas, sms=1)).figures
    assert (figures.busy_share, figures.waiting_share, figures.idle_share) == (1, 0, 0)


def test_figures_in_words() -> None:
    words = figure_words(Panel(lean(), quantisation_efficiency=0.75))
    assert "; ".join(words) == (
        "latency 41.0 µs; of it launch 1.98 + read 22.8 + tail 6.50 + merge 9.76;"
        " SMs busy 50.0%; waiting 6.2%; merging 6.2%; SMs end at 20.0 to 40.0 µs;"
        " 1 of 4 SMs without a CTA; quantisation efficiency 75.0%; latency with events 1.025x"
    )
    ctas = [cta(number, number, tiles(number, 0, 1)) for number in range(4)]
    bare = timeline(*ctas, latency_us=None, traced_latency_us=None)
    assert figure_words(Panel(bare)) == ["SMs busy 100.0%", "SMs end at 1.00 µs"]


def test_an_empty_timeline_has_a_panel() -> None:
    panel = Panel(timeline())
    assert (panel.marks, panel.sm_order, panel.figures.idle_share) == ((), (0, 1, 2, 3), 1)


def test_short_neighbours_become_one() -> None:
    spans = tiles(0, 0, 1), tiles(1, 1, 3), reduction(1, 3, 4), tiles(2, 4, 30)
    panel = Panel(timeline(cta(0, 0, *spans)))
    merged = [mark for mark in merge_short(panel.marks, 5) if mark.kind != "cta"]
    assert [
        (mark.kind, mark.output_tile, mark.start_us, mark.end_us, mark.merged) for mark in merged
    ] == [("tiles", 1, 0, 4, 3), ("tiles", 2, 4, 30, 1)]


@given(spans, st.floats(0.001, 50), st.integers(5, 40))
def test_merging_loses_no_mark_and_moves_no_end(lives, shortest_us, most):
    ctas = [cta(n, sm, tiles(n, at, at + us)) for n, (at, us, sm) in enumerate(lives)]
    marks = Panel(timeline(*ctas)).marks
    merged = merge_to(marks, shortest_us, most)
    assert sum(mark.merged for mark in merged) == len(marks)
    assert max(mark.end_us for mark in merged) == max(mark.end_us for mark in marks)
    assert {(mark.row, mark.lane, mark.kind) for mark in merged} == {
        (mark.row, mark.lane, mark.kind) for mark in marks
    }


def test_merging_stops_at_the_number_asked_for() -> None:
    panel = Panel(timeline(cta(0, 0, *(tiles(n, n, n + 1) for n in range(1000)))))
    merged = merge_to(panel.marks, 0.5, 100)
    assert 30 < len(merged) <= 100
    assert sum(mark.merged for mark in merged) == 1001


def test_union() -> None:
    assert union([(5, 7), (0, 2), (1, 3), (3, 4), (9, 9)]) == [(0, 4), (5, 7)]


@pytest.mark.parametrize(
    ("end_us", "most", "expected"),
    [
        (40, 5, [0, 10, 20, 30, 40]),
        (0.9, 4, [0, 0.5]),
        (368, 10, [50.0 * n for n in range(8)]),
        (0, 5, [0]),
    ],
)
def test_ticks_are_round(end_us: float, most: int, expected: list[float]) -> None:
    assert ticks(end_us, most) == expected


def test_neighbouring_colours_differ_by_lightness() -> None:
    """Neighbours differ without hue; every colour contrasts with white and with black."""
    assert len(TILE_COLORS) % 2 == 0
    neighbours = zip(TILE_COLORS, TILE_COLORS[1:] + TILE_COLORS[:1], strict=True)
    assert all(contrast(*pair) > 1.7 for pair in neighbours)
    for color in TILE_COLORS:
        assert contrast(color, "#ffffff") > 1.7
        assert contrast(color, "#17191d") > 2.3
