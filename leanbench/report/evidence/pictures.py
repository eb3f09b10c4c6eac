"""Line charts of published runs as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, log10

from leanbench.report.evidence import canvas
from leanbench.report.styles import PALETTE

#: Intervals of the y axis, about.
_INTERVALS = 5


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
        *_grid(step, top),
        *(canvas.place(_x(place, len(places)), name) for place, name in enumerate(places)),
        *(_drawn(line, colours.get(line.name), top, len(places)) for line in lines),
        *_legend(lines, colours),
    ]
    return canvas.picture(title, below, x_name, y, parts)


def _colours(lines: Sequence[Line]) -> dict[str, str]:
    """Colours of the kernels; limits have none."""
    kernels = [line.name for line in lines if not line.is_limit]
    return {name: PALETTE[index % len(PALETTE)] for index, name in enumerate(kernels)}


def _step(most: float) -> float:
    """1, 2 or 5 times a power of ten."""
    rough = most / _INTERVALS
    power = 10.0 ** floor(log10(rough))
    return next(times * power for times in (1, 2, 5, 10) if times * power >= rough)


def _x(place: int, places: int) -> float:
    return canvas.LEFT + canvas.PLOT_WIDTH * (place + 0.5) / places


def _y(value: float, top: float) -> float:
    return canvas.TOP + canvas.PLOT_HEIGHT * (1 - value / top)


def _grid(step: float, top: float) -> list[str]:
    values = [number * step for number in range(round(top / step) + 1)]
    return [part for value in values for part in canvas.level(_y(value, top), f"{value:g}")]


def _stroke(colour: str | None) -> str:
    """Of a kernel's line, or of a limit's."""
    return f'stroke="{colour}"' if colour else 'class="limit" stroke-dasharray="5 4"'


def _drawn(line: Line, colour: str | None, top: float, places: int) -> str:
    points = [
        (_x(place, places), _y(value, top))
        for place, value in enumerate(line.values)
        if value is not None
    ]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    marks = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2"/>' for x, y in points)
    drawn = f'<polyline points="{path}" fill="none" {_stroke(colour)} stroke-width="2"/>'
    return f'{drawn}<g fill="{colour}">{marks}</g>' if colour else drawn


def _legend(lines: Sequence[Line], colours: dict[str, str]) -> list[str]:
    parts, x = [], float(canvas.LEFT)
    for line in lines:
        parts += [
            f'<line x1="{x:.1f}" x2="{x + 22:.1f}" y1="62" y2="62"'
            f' {_stroke(colours.get(line.name))} stroke-width="3"/>',
            canvas.text(x + 28, 66, line.name),
        ]
        x += 28 + canvas.CHARACTER * len(line.name) + 22
    return parts
