"""Scatter charts of published runs as SVG: a ratio of every problem over the bytes of its KV cache,
both logarithmic.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, log10

from leanbench.report.evidence import canvas
from leanbench.report.styles import PALETTE

_RATIOS = (0.25, 0.5, 0.7, 0.8, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 10.0, 20.0)
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
    powers = [log10(point.kv_bytes) for point in points]
    low, high = floor(min(powers)), ceil(max(powers))
    levels = _levels([point.ratio for point in points])
    parts = [
        *(part for ratio in levels for part in _level(ratio, levels)),
        *(
            canvas.place(_along(power, low, high), _bytes(10.0**power))
            for power in range(low, high + 1)
        ),
        *_legend(colours, Counter(point.name for point in points)),
    ]
    for point, power in zip(points, powers, strict=True):
        at = f'cx="{_along(power, low, high):.1f}" cy="{_height(point.ratio, levels):.1f}"'
        parts.append(f'<circle {at} r="3.4" fill="{colours[point.name]}" fill-opacity="0.8"/>')
    return canvas.picture(title, below, x, y, parts)


def _levels(ratios: Sequence[float]) -> list[float]:
    """Values of the y axis, 1 among them, around all ratios."""
    low, high = min(*ratios, 1.0), max(*ratios, 1.0)
    first = max((ratio for ratio in _RATIOS if ratio <= low), default=_RATIOS[0])
    last = min((ratio for ratio in _RATIOS if ratio >= high), default=_RATIOS[-1])
    return [ratio for ratio in _RATIOS if first <= ratio <= last]


def _level(ratio: float, levels: Sequence[float]) -> list[str]:
    style = "limit" if ratio == 1 else "grid"
    return canvas.level(_height(ratio, levels), f"{ratio:g}x", style)


def _along(power: float, low: int, high: int) -> float:
    share = (power - low) / (high - low) if high > low else 0.5
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
