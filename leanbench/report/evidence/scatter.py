"""Scatter charts of published runs as SVG: a ratio of every problem over the bytes of its KV cache,
both logarithmic.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, log, log10

from leanbench.report.evidence import canvas
from leanbench.report.styles import PALETTE

#: Values of the y axis, for a wide range and for a narrow one.
_RATIOS = (0.25, 0.5, 0.7, 0.8, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 10.0, 20.0)
_TENTHS = tuple(number / 10 for number in range(1, 31))
_NARROW = 2.0
#: The y axis ends before a point that would make it this many times as long; at most this share
#: of the points.
_STRETCH, _FEW = 1.5, 0.05
_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


@dataclass(frozen=True)
class Point:
    """A problem."""

    kv_bytes: int
    ratio: float
    #: What its colour says.
    name: str


def scatter(title: str, below: str, x: str, y: str, points: Sequence[Point]) -> str:
    """The whole file; arguments are those of `canvas.picture`."""
    names = [name for name, _ in Counter(point.name for point in points).most_common()]
    colours = {name: PALETTE[index % len(PALETTE)] for index, name in enumerate(names)}
    sizes = [float(point.kv_bytes) for point in points]
    low, high = min(sizes), max(sizes)
    levels = _levels([point.ratio for point in points])
    parts = [
        *(part for ratio in levels for part in _level(ratio, levels)),
        *(canvas.place(_along(size, low, high), _bytes(size)) for size in _sizes(low, high)),
        *_legend(colours, Counter(point.name for point in points)),
    ]
    for point in points:
        at = _along(point.kv_bytes, low, high)
        if levels[0] <= point.ratio <= levels[-1]:
            place = f'cx="{at:.1f}" cy="{_height(point.ratio, levels):.1f}"'
            parts.append(
                f'<circle {place} r="3.4" fill="{colours[point.name]}" fill-opacity="0.8"/>'
            )
        else:
            parts += _arrow(at, point, levels, colours[point.name])
    return canvas.picture(title, below, x, y, parts)


def _without_outliers(ratios: Sequence[float]) -> list[float]:
    """The ratios that the y axis spans."""
    shown = sorted(ratios)
    for _ in range(int(_FEW * len(ratios))):
        rest = min(shown[:-1], shown[1:], key=_span)
        if not _span(shown) > _STRETCH * _span(rest) > 0:
            break
        shown = rest
    return shown


def _span(ratios: Sequence[float]) -> float:
    """Length of an axis around the ratios and 1."""
    return log(max(*ratios, 1.0) / min(*ratios, 1.0))


def _levels(ratios: Sequence[float]) -> list[float]:
    """Values of the y axis, 1 among them, around all ratios but outliers, for which one more makes
    room.
    """
    shown = _without_outliers(ratios)
    low, high = min(*shown, 1.0), max(*shown, 1.0)
    values = _TENTHS if high / low <= _NARROW else _RATIOS
    below = sum(ratio <= low for ratio in values) - 1 - (min(ratios) < low)
    above = sum(ratio < high for ratio in values) + (max(ratios) > high)
    return list(values[max(below, 0) : above + 1])


def _level(ratio: float, levels: Sequence[float]) -> list[str]:
    style = "limit" if ratio == 1 else "grid"
    return canvas.level(_height(ratio, levels), f"{ratio:g}x", style)


def _arrow(x: float, point: Point, levels: Sequence[float], colour: str) -> list[str]:
    """A point beyond the axis: a triangle that points out of the plot, and the ratio."""
    y, up = _height(point.ratio, levels), point.ratio > levels[-1]
    base, tip = (y + 11, -9) if up else (y - 11, 9)
    is_right = x > canvas.LEFT + canvas.PLOT_WIDTH / 2
    beside, anchor = (-9, "end") if is_right else (9, "start")
    return [
        f'<path d="M{x - 5:.1f},{base:.1f}h10l-5,{tip}z" fill="{colour}"/>',
        canvas.text(x + beside, base, f"{point.ratio:.2f}x", anchor=anchor),
    ]


def _sizes(low: float, high: float) -> list[float]:
    """Values of the x axis: powers of ten, and 2 and 5 times these where they are few."""
    powers = [10.0**power for power in range(floor(log10(low)), ceil(log10(high)) + 1)]
    tens = [size for size in powers if low <= size <= high]
    if len(tens) > 2:
        return tens
    return [
        size * times for size in powers for times in (1, 2, 5) if low <= size * times <= high
    ] or [low]


def _along(size: float, low: float, high: float) -> float:
    share = log10(size / low) / log10(high / low) if high > low else 0.5
    return canvas.LEFT + 16 + (canvas.PLOT_WIDTH - 32) * share


def _height(ratio: float, levels: Sequence[float]) -> float:
    """Ratios outside of the levels are drawn at the nearest."""
    bottom, top = log10(levels[0]), log10(levels[-1])
    share = (log10(ratio) - bottom) / (top - bottom) if top > bottom else 0.5
    return canvas.TOP + canvas.PLOT_HEIGHT * (1 - min(max(share, 0.0), 1.0))


def _bytes(size: float) -> str:
    unit, word = next(pair for pair in (*_UNITS, (1.0, "B")) if size >= pair[0])
    return f"{size / unit:g} {word}"


def _legend(colours: dict[str, str], counts: Counter[str]) -> list[str]:
    parts, x = [], float(canvas.LEFT)
    for name, colour in colours.items():
        words = f"{name} ({counts[name]})"
        parts += [
            f'<circle cx="{x + 5:.1f}" cy="62" r="5" fill="{colour}"/>',
            canvas.text(x + 16, 66, words),
        ]
        x += 16 + canvas.CHARACTER * len(words) + 22
    return parts
