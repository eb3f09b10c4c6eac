"""The SVG: where known spans lie, that it is small, well-formed XML, and that text is text."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from trace_examples import cta, fixed_split, lean, reduction, tiles, timeline

from leanbench.core.timeline import Timeline
from leanbench.report.trace.picture import TILE_COLORS, Panel
from leanbench.report.trace.svg import KIND_COLORS, WIDTH, plot_height, svg_text

SVG = "{http://www.w3.org/2000/svg}"
#: The plot's left edge and width.
LEFT, PLOT = 40, 1060
BOX = re.compile(r"M([\d.]+) ([\d.]+)h([\d.]+)v([\d.]+)h-([\d.]+)z")


def read(*timelines: Timeline) -> ElementTree.Element:
    return ElementTree.fromstring(svg_text([Panel(timeline) for timeline in timelines]))


def boxes(root: ElementTree.Element, kernel: str, color: str) -> list[tuple[float, ...]]:
    """(x, y, width, height) of all rectangles of a colour, y from the panel's first row."""
    group = next(element for element in root.iter(f"{SVG}g") if element.get("id") == kernel)
    frame = next(path for path in group.iter(f"{SVG}path") if path.get("fill") == "none")
    top = float((frame.get("d") or "").split()[1].split("v")[0])
    paths = [path for path in group.iter(f"{SVG}path") if path.get("fill") == color]
    shapes = [BOX.findall(path.get("d") or "") for path in paths]
    return [
        (float(x), float(y) - top, float(w), float(h))
        for shape in shapes
        for x, y, w, h, _ in shape
    ]


def test_spans_lie_where_their_times_and_sms_say() -> None:
    root = read(lean())
    row = plot_height(Panel(lean())) / 4
    # 40 us over 1060 pixels: 10 us are 265. SM 2 is the first row, SM 0 the second, SM 3 the third.
    assert boxes(root, "lean", TILE_COLORS[0]) == [(LEFT, row, 265, row), (LEFT, 2 * row, 795, row)]
    assert boxes(root, "lean", TILE_COLORS[1]) == [(LEFT, 0, 530, row), (LEFT + 265, row, 265, row)]
    assert boxes(root, "lean", KIND_COLORS["wait"]) == [(LEFT + 530, row, 265, row)]
    assert boxes(root, "lean", KIND_COLORS["reduction"]) == [(LEFT + 795, row, 265, row)]
    assert len(boxes(root, "lean", KIND_COLORS["cta"])) == 3
    # What comes later lies on top.
    assert next(path.get("class") for path in root.iter(f"{SVG}path") if path.get("class")) == "cta"


def test_ctas_of_an_sm_are_in_bands_and_a_later_launch_has_all_rows() -> None:
    root = read(fixed_split())
    height = plot_height(Panel(fixed_split()))
    assert [y for _, y, _, _ in boxes(root, "fixed_split", TILE_COLORS[0])] == [
        n * height / 8 for n in range(4)
    ]
    assert [y for _, y, _, _ in boxes(root, "fixed_split", TILE_COLORS[1])] == [
        n * height / 8 for n in range(4, 8)
    ]
    assert [box[1:] for box in boxes(root, "fixed_split", KIND_COLORS["reduction"])] == [
        (0, PLOT / 4, height / 4),
        (height / 4, PLOT / 4, height / 4),
    ]


def test_panels_share_the_time_scale() -> None:
    root = read(lean(), fixed_split())
    assert {width for _, _, width, _ in boxes(root, "fixed_split", TILE_COLORS[0])} == {PLOT / 4}
    text = " ".join(label.text or "" for label in root.iter(f"{SVG}text"))
    assert "SMs busy 50.0%, waiting 6.2%, merging 6.2%, SMs end at 20.0 to 40.0 µs" in text
    assert "4 SMs × 2 CTAs" in text
    assert "Measured on NVIDIA H200" in text


def test_a_prediction_says_so() -> None:
    text = " ".join(label.text or "" for label in read(lean(source="predicted")).iter(f"{SVG}text"))
    assert "Predicted for NVIDIA H200, nothing was measured" in text
    assert "Measured" not in text


def test_many_figures_take_two_lines() -> None:
    short, long = Panel(lean()), Panel(lean(latency_us=12345.0, traced_latency_us=23456.0), 0.75)
    lines = [
        [label.text or "" for label in ElementTree.fromstring(svg_text([panel])).iter(f"{SVG}text")]
        for panel in (short, long)
    ]
    assert any(
        line.endswith("1 of 4 SMs without a CTA, latency with events 1.025x") for line in lines[0]
    )
    assert any(line.endswith("quantisation efficiency 75.0%,") for line in lines[1])
    assert "latency with events 1.900x" in lines[1]


def test_nothing_is_drawn_outside_the_picture() -> None:
    root = read(lean(), fixed_split())
    height = float(root.get("height") or 0)
    for group in root.iter(f"{SVG}g"):
        for path in group.iter(f"{SVG}path"):
            for x, y, width, tall, back in BOX.findall(path.get("d") or ""):
                assert width == back
                assert LEFT <= float(x) <= float(x) + float(width) <= WIDTH
                assert 0 < float(y) < float(y) + float(tall) < height


def test_names_are_only_text() -> None:
    hostile = '"><script>alert(1)</script>&'
    root = read(lean(kernel=hostile, gpu=hostile))
    assert not list(root.iter(f"{SVG}script"))
    assert hostile in [label.text for label in root.iter(f"{SVG}text")]


@pytest.mark.parametrize("sms", [1, 20, 132, 188])
def test_any_gpu_has_a_panel_of_a_readable_height(sms: int) -> None:
    assert 200 <= plot_height(Panel(timeline(cta(0, 0, tiles(0, 0, 1)), sms=sms))) <= 540


def test_a_hundred_thousand_spans_stay_under_a_megabyte() -> None:
    """132 SMs, and spans of a five-hundredth of a pixel: what is left is what can be seen, and the
    file says so.
    """
    ctas = [cta(n, n, *(tiles(i, i / 10, (i + 1) / 10) for i in range(800))) for n in range(132)]
    text = svg_text([Panel(timeline(*ctas, cta(132, 0, reduction(0, 100, 101)), sms=132))])
    assert 10_000 < len(text) < 1_000_000
    assert "Neighbours too short to be seen are drawn as one" in text
    assert "drawn as one" not in svg_text([Panel(lean())])
