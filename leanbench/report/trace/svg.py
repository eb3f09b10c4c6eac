"""The timelines as one SVG that stands alone: white ground and explicit colours, for light and dark
pages alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from leanbench.report.trace.picture import TILE_COLORS, Mark, Panel, merge_to, ticks
from leanbench.report.trace.words import figure_lines, source_words

WIDTH = 1120
_LEFT, _RIGHT, _TOP, _BOTTOM = 40, 20, 62, 62
_HEADER, _LINE, _AXIS, _GAP = 24, 16, 22, 20
#: Characters of a line of figures that surely fit.
_LINE_LENGTH = 146
_PLOT_WIDTH = WIDTH - _LEFT - _RIGHT
#: A panel is at least about as high, and at most; in between rows are whole pixels, so that no
#: seams show.
_PLOT_HEIGHT, _MOST_HEIGHT = 260, 540
#: Rectangles of one picture: 15 to 20 bytes each, under 1 MB together.
MOST_MARKS = 45_000
_INK, _MUTED, _RULE, _GRID = "#1b1e23", "#5d646e", "#c5cad1", "#e8eaed"
_FONT = "system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"
#: A CTA outside its spans is pale, a wait light, a reduction dark.
KIND_COLORS = {"cta": "#e1e5ea", "wait": "#b4bcc7", "reduction": "#16181c"}


def svg_text(panels: Sequence[Panel]) -> str:
    """The whole file."""
    end_us = max(panel.timeline.duration_us for panel in panels) or 1.0
    parts, y, merged = [], _TOP, False
    bands = any(panel.lanes > 1 for panel in panels)
    for panel in panels:
        drawn, is_merged = _panel(panel, y, end_us, MOST_MARKS // len(panels))
        parts.append(drawn)
        merged = merged or is_merged
        y += _header_height(panel) + plot_height(panel) + _AXIS + _GAP
    height = y - _GAP + _BOTTOM
    first = panels[0].timeline
    title = (
        f"Timeline of {', '.join(panel.timeline.name for panel in panels)}: {first.problem.label}"
    )
    return "\n".join(
        [
            (
                f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}"'
                f' viewBox="0 0 {WIDTH} {height}" role="img" font-family="{_FONT}" font-size="13">'
            ),
            f"<title>{escape(title)}, {escape(source_words(first))}</title>",
            f'<rect width="{WIDTH}" height="{height}" rx="6" fill="#ffffff"/>',
            _text(_LEFT, 28, first.problem.label, size=17, weight=650),
            _text(_LEFT, 48, _capital(source_words(first)), color=_MUTED),
            *parts,
            _legend(height - 38, bands, merged),
            "</svg>\n",
        ]
    )


def plot_height(panel: Panel) -> int:
    """Pixels of a panel's rows: one row for each CTA that each SM held at once."""
    rows = panel.lanes * len(panel.sm_order)
    return min(_MOST_HEIGHT, rows * max(1, -(-_PLOT_HEIGHT // max(1, rows))))


def _header_height(panel: Panel) -> int:
    return _HEADER + _LINE * len(_figure_lines(panel))


def _figure_lines(panel: Panel) -> list[str]:
    return figure_lines(panel, _LINE_LENGTH)


def _panel(panel: Panel, top: int, end_us: float, most: int) -> tuple[str, bool]:
    """A panel's elements, and whether marks were merged by more than the resolution asks."""
    height = plot_height(panel)
    plot_top = top + _header_height(panel)
    scale = _PLOT_WIDTH / end_us
    marks = merge_to(panel.marks, 0.5 / scale, most)
    merged = len(marks) < len(panel.marks)
    lines = []
    for time_us in ticks(end_us, 10):
        x = _number(_LEFT + time_us * scale)
        lines.append(f'<path d="M{x} {plot_top}v{height + 4}" stroke="{_GRID}"/>')
        anchor = "start" if time_us == 0 else "middle"
        lines.append(
            _text(
                x,
                plot_top + height + 17,
                f"{time_us:g}{' µs' if time_us == 0 else ''}",
                11,
                _MUTED,
                anchor,
            )
        )
    paths = [
        f'<path class="{name}" fill="{color}" d="{shapes}"/>'
        for name, color, shapes in _shapes(marks, plot_top, height, len(panel.sm_order), scale)
    ]
    label_y = plot_top + height / 2
    return (
        "\n".join(
            [
                f'<g class="panel" id="{escape(panel.timeline.name, quote=True)}">',
                _text(_LEFT, top + 15, panel.timeline.name, size=15, weight=650),
                *(
                    _text(_LEFT, top + 32 + _LINE * n, line, 12, _MUTED)
                    for n, line in enumerate(_figure_lines(panel))
                ),
                *lines,
                *paths,
                (
                    f'<path d="M{_LEFT} {plot_top}v{height}h{_PLOT_WIDTH}" fill="none"'
                    f' stroke="{_RULE}"/>'
                ),
                (
                    f'<text x="24" y="{label_y:g}" font-size="11" fill="{_MUTED}"'
                    ' text-anchor="middle" transform="rotate(-90 24'
                    f' {label_y:g})">{_rows_words(panel)}</text>'
                ),
                "</g>",
            ]
        ),
        merged,
    )


def _rows_words(panel: Panel) -> str:
    return f"{len(panel.sm_order)} SMs" + (f" × {panel.lanes} CTAs" if panel.lanes > 1 else "")


def _shapes(
    marks: Sequence[Mark], top: int, height: int, sms: int, scale: float
) -> list[tuple[str, str, str]]:
    """(class, colour, path) of all marks of a colour. The first mark is a CTA, so spans lie on top
    of CTAs.

    Where SMs hold several CTAs at once, each lane is a band with all SMs: CTAs of neighbouring
    number, often of one output tile, lie next to each other.
    """
    boxes_by_name: dict[str, list[str]] = {}
    for mark in marks:
        x, width = _LEFT + mark.start_us * scale, (mark.end_us - mark.start_us) * scale
        row_height = height / (mark.lanes * sms)
        y = top + (mark.lane * sms + mark.row) * row_height
        name = (
            mark.kind
            if mark.output_tile is None or mark.kind != "tiles"
            else f"tiles-{_color_index(mark)}"
        )
        box = (
            f"M{_number(x)} {_number(y)}h{_number(width)}v{_number(row_height)}h-{_number(width)}z"
        )
        boxes_by_name.setdefault(name, []).append(box)
    return [(name, _color_of(name), "".join(boxes)) for name, boxes in boxes_by_name.items()]


def _color_index(mark: Mark) -> int:
    return (mark.output_tile or 0) % len(TILE_COLORS)


def _color_of(name: str) -> str:
    return KIND_COLORS[name] if name in KIND_COLORS else TILE_COLORS[int(name.rpartition("-")[2])]


def _legend(y: int, bands: bool, merged: bool) -> str:
    parts, x = [], _LEFT
    for color in TILE_COLORS:
        parts.append(f'<rect x="{x}" y="{y - 10}" width="11" height="11" fill="{color}"/>')
        x += 11
    parts.append(_text(x + 6, y, f"output tiles ({len(TILE_COLORS)} colours in turn)", 12, _MUTED))
    x += 205
    for kind, label in (("reduction", "merging partials"), ("wait", "waiting for partials")):
        parts.append(
            f'<rect x="{x}" y="{y - 10}" width="11" height="11" fill="{KIND_COLORS[kind]}"/>'
        )
        parts.append(_text(x + 17, y, label, 12, _MUTED))
        x += 150
    parts.append(
        f'<rect x="{x}.5" y="{y - 9.5}" width="10" height="10" fill="#ffffff" stroke="{_RULE}"/>'
    )
    parts.append(_text(x + 17, y, "no CTA", 12, _MUTED))
    note = "Rows: SMs in the order of their first CTA"
    note += ", a band for each CTA that an SM held at once." if bands else "."
    if merged:
        note += " Neighbours too short to be seen are drawn as one."
    parts.append(_text(_LEFT, y + 20, note, 12, _MUTED))
    return "\n".join(parts)


def _text(
    x: float | str,
    y: float,
    words: str,
    size: int = 13,
    color: str = _INK,
    anchor: str = "start",
    weight: int = 400,
) -> str:
    more = f' text-anchor="{anchor}"' if anchor != "start" else ""
    more += f' font-weight="{weight}"' if weight != 400 else ""
    return f'<text x="{x}" y="{y:g}" font-size="{size}" fill="{color}"{more}>{escape(words)}</text>'


def _number(value: float) -> str:
    """At most two decimals, which is a hundredth of a pixel."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]
