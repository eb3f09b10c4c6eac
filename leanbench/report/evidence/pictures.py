"""Line charts of published runs as SVG that stands alone: white ground and explicit colours, for
light and dark pages alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import floor, log10

from leanbench.report.styles import PALETTE

_WIDTH, _HEIGHT = 820, 460
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 24, 106, 52
_PLOT_WIDTH, _PLOT_HEIGHT = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
_INK, _MUTED, _GRID = "#1b1e23", "#5d646e", "#e8eaed"
_FONT = "system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"
#: Intervals of the y axis, about.
_INTERVALS = 5
_CHARACTER = 7.2


@dataclass(frozen=True)
class Line:
    """One line of a chart."""

    name: str
    #: One at each place of the x axis; None: not measured.
    values: tuple[float | None, ...]
    #: A limit rather than a kernel: dashed and grey.
    is_limit: bool = False


def chart(
    title: str, below: str, x: tuple[str, Sequence[str]], y: str, lines: Sequence[Line]
) -> str:
    """The whole file.

    Args:
        below: what stands under the title.
        x: the name of the x axis and its places, which lie evenly.
        y: the name of the y axis, with its unit.
    """
    x_name, places = x
    most = max(value for line in lines for value in line.values if value is not None)
    step = _step(most)
    top = step * -(-most // step)
    colours = _colours(lines)
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}"'
            f' viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" font-family="{_FONT}" font-size="13">'
        ),
        f"<title>{escape(title)}</title>",
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" rx="6" fill="#ffffff"/>',
        _text(_LEFT, 26, title, size=16),
        _text(_LEFT, 45, below, color=_MUTED),
        *_grid(step, top),
        _text(12, _TOP - 12, y, color=_MUTED),
        *(
            _text(_x(place, len(places)), _HEIGHT - 30, name, anchor="middle")
            for place, name in enumerate(places)
        ),
        _text(_LEFT + _PLOT_WIDTH / 2, _HEIGHT - 10, x_name, color=_MUTED, anchor="middle"),
        *(_drawn(line, colours[line.name], top, len(places)) for line in lines),
        *_legend(lines, colours),
        "</svg>\n",
    ]
    return "\n".join(parts)


def _colours(lines: Sequence[Line]) -> dict[str, str]:
    kernels = [line.name for line in lines if not line.is_limit]
    coloured = {name: PALETTE[index % len(PALETTE)] for index, name in enumerate(kernels)}
    return {line.name: coloured.get(line.name, _MUTED) for line in lines}


def _step(most: float) -> float:
    """1, 2 or 5 times a power of ten."""
    rough = most / _INTERVALS
    power = 10.0 ** floor(log10(rough))
    return next(times * power for times in (1, 2, 5, 10) if times * power >= rough)


def _x(place: int, places: int) -> float:
    return _LEFT + _PLOT_WIDTH * (place + 0.5) / places


def _y(value: float, top: float) -> float:
    return _TOP + _PLOT_HEIGHT * (1 - value / top)


def _grid(step: float, top: float) -> list[str]:
    parts = []
    for number in range(round(top / step) + 1):
        value = number * step
        y = _y(value, top)
        parts += [
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"'
            f' stroke="{_GRID}"/>',
            _text(_LEFT - 8, y + 4, f"{value:g}", color=_MUTED, anchor="end"),
        ]
    return parts


def _drawn(line: Line, colour: str, top: float, places: int) -> str:
    points = [
        (_x(place, places), _y(value, top))
        for place, value in enumerate(line.values)
        if value is not None
    ]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashes = ' stroke-dasharray="5 4"' if line.is_limit else ""
    marks = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2"/>' for x, y in points)
    drawn = f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>'
    return drawn if line.is_limit else f'{drawn}<g fill="{colour}">{marks}</g>'


def _legend(lines: Sequence[Line], colours: dict[str, str]) -> list[str]:
    parts, x = [], float(_LEFT)
    for line in lines:
        dashes = ' stroke-dasharray="5 4"' if line.is_limit else ""
        parts += [
            f'<line x1="{x:.1f}" x2="{x + 22:.1f}" y1="62" y2="62" stroke="{colours[line.name]}"'
            f' stroke-width="3"{dashes}/>',
            _text(x + 28, 66, line.name),
        ]
        x += 28 + _CHARACTER * len(line.name) + 22
    return parts


def _text(
    x: float, y: float, text: str, *, size: int = 13, color: str = _INK, anchor: str = "start"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{color}"'
        f' text-anchor="{anchor}">{escape(text)}</text>'
    )
