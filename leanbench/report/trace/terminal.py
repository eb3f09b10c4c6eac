"""Timelines in a terminal: rows are SMs, columns are time, a cell shows its longest activity.

Colours distinguish output tiles, characters busy, waiting, merging and idle SMs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from leanbench.report.trace.picture import (
    TILE_COLORS,
    Panel,
    figure_words,
    source_words,
    ticks,
    union,
)

if TYPE_CHECKING:
    from rich.text import Text

#: Characters by the share of the cell's SM time with a working CTA, from an eighth on.
_FILL, _FILL_ASCII = "░▒▓█", ".:oO"
_WAIT, _REDUCTION, _IDLE = "-", "#", " "
#: Minimum share of the first lane's work for an output tile to give a cell its colour.
_DOMINANT = 0.3
_MANY = "#808690"
#: Maximum number of rows of a single panel, and of each of several.
_ROWS_ALONE, _ROWS_EACH = 24, 16
_LABEL = 8


def terminal_text(panels: Sequence[Panel], columns: int, ascii_only: bool = False) -> Text:
    """Render all panels in `columns`, at least 40."""
    from rich.text import Text

    end_us = max(panel.timeline.duration_us for panel in panels)
    most_rows = _ROWS_ALONE if len(panels) == 1 else _ROWS_EACH
    columns = max(40, columns)
    text = Text(no_wrap=True, overflow="crop")
    first = panels[0].timeline
    title = f"{first.problem.label}, {source_words(first)}\n"
    text.append(title if len(title) <= columns else title.replace(", ", "\n", 1), style="bold")
    for panel in panels:
        text.append("\n")
        _append_panel(text, panel, end_us, columns - _LABEL - 1, most_rows, ascii_only)
    for line in _legend(ascii_only, columns):
        text.append(f"\n{line}")
    if ascii_only:
        # The number of characters is unchanged, so styles keep their positions.
        text.plain = (
            text.plain.replace("µ", "u").replace("·", ";").encode("ascii", "replace").decode()
        )
    return text


def _append_panel(
    text: Text, panel: Panel, end_us: float, width: int, most_rows: int, ascii_only: bool
) -> None:
    sms = len(panel.sm_order)
    per_row = -(-sms // most_rows)
    text.append(f"{panel.timeline.name}", style="bold")
    for line in _figure_lines(panel, width + _LABEL - 2):
        text.append(f"  {line}\n")
    bar = "|" if ascii_only else "│"
    for row, cells in enumerate(_cells(panel, end_us, width, per_row)):
        first, last = row * per_row, min(sms, (row + 1) * per_row) - 1
        label = f"{first}" if first == last else f"{first}-{last}"
        text.append(f"{label:>{_LABEL - 1}} {bar}", style="dim")
        for cell in cells:
            text.append(*cell.look(ascii_only))
        text.append("\n")
    text.append(_axis(end_us, width, ascii_only), style="dim")


def _figure_lines(panel: Panel, length: int) -> list[str]:
    """Wrap the phrases of `figure_words`. The panel's name precedes the first line."""
    lines = [""]
    for phrase in figure_words(panel):
        taken = len(panel.timeline.name) if len(lines) == 1 else 0
        if lines[-1] and taken + len(lines[-1]) + len(phrase) + 3 > length:
            lines[-1] += ","
            lines.append(phrase)
        else:
            lines[-1] += f", {phrase}" if lines[-1] else phrase
    return lines


class _Cell:
    """One character, with the times in microseconds of its SMs or CTAs."""

    def __init__(self, sm_time_us: float) -> None:
        self.sm_time_us = sm_time_us
        #: SM time with a CTA, CTA time, and its parts.
        self.present = self.ctas = self.wait = self.reduction = 0.0
        #: Work by lane and output tile. Lanes hold CTAs of distant numbers: one gives the colour.
        self.tiles: dict[int, dict[int, float]] = {}

    def look(self, ascii_only: bool) -> tuple[str, str]:
        """Return the character and its style."""
        filled = self.present / self.sm_time_us if self.sm_time_us else 0.0
        if filled < 1 / 8:
            return _IDLE, ""
        if self.wait > self.ctas / 2:
            return _WAIT, ""
        if self.reduction > sum(sum(lane.values()) for lane in self.tiles.values()):
            return _REDUCTION, "bold"
        working = filled * (1 - self.wait / self.ctas)
        glyph = (_FILL_ASCII if ascii_only else _FILL)[max(0, min(3, int(4 * working - 0.5)))]
        tiles = self.tiles[min(self.tiles)] if self.tiles else {}
        tile = max(tiles, key=lambda tile: tiles[tile], default=-1)
        is_dominant = tile >= 0 and tiles[tile] >= _DOMINANT * sum(tiles.values())
        return glyph, TILE_COLORS[tile % len(TILE_COLORS)] if is_dominant else _MANY


def _cells(panel: Panel, end_us: float, width: int, per_row: int) -> list[list[_Cell]]:
    """Make rows of cells, `per_row` SMs each."""
    sms = len(panel.sm_order)
    step_us = end_us / width or 1.0
    grid = [
        [_Cell(step_us * (min(sms, first + per_row) - first)) for _ in range(width)]
        for first in range(0, sms, per_row)
    ]
    lives: dict[int, list[tuple[float, float]]] = {}
    for mark in panel.marks:
        cells = grid[mark.row // per_row]
        if mark.kind == "cta":
            lives.setdefault(mark.row, []).append((mark.start_us, mark.end_us))
        for column, time_us in _columns(mark.start_us, mark.end_us, step_us, width):
            cell = cells[column]
            if mark.kind == "cta":
                cell.ctas += time_us
            elif mark.kind == "tiles":
                assert mark.output_tile is not None
                tiles = cell.tiles.setdefault(mark.lane, {})
                tiles[mark.output_tile] = tiles.get(mark.output_tile, 0.0) + time_us
            elif mark.kind == "wait":
                cell.wait += time_us
            else:
                cell.reduction += time_us
    for row, intervals in lives.items():
        for start_us, stop_us in union(intervals):
            for column, time_us in _columns(start_us, stop_us, step_us, width):
                grid[row // per_row][column].present += time_us
    return grid


def _columns(start_us: float, end_us: float, step_us: float, width: int) -> list[tuple[int, float]]:
    """Split an interval into (column, time in it)."""
    first, last = int(start_us / step_us), min(width - 1, int(end_us / step_us))
    columns = []
    for column in range(min(first, width - 1), last + 1):
        overlap = min(end_us, (column + 1) * step_us) - max(start_us, column * step_us)
        if overlap > 0:
            columns.append((column, overlap))
    return columns


def _axis(end_us: float, width: int, ascii_only: bool) -> str:
    corner, line, tick = ("+", "-", "+") if ascii_only else ("└", "─", "┴")
    rule, labels = [line] * width, [" "] * (width + _LABEL)
    free_from = 0
    for time_us in ticks(end_us, max(2, width // 14)):
        column = min(width - 1, round(time_us / end_us * width)) if end_us else 0
        rule[column] = tick
        label = f"{time_us:g} µs" if column == 0 else f"{time_us:g}"
        at = max(0, column - len(label) // 2)
        if at >= free_from and at + len(label) <= width:
            labels[at : at + len(label)] = label
            free_from = at + len(label) + 1
    margin = " " * _LABEL
    return f"{margin}{corner}{''.join(rule)}\n{margin} {''.join(labels).rstrip()}\n"


def _legend(ascii_only: bool, columns: int) -> list[str]:
    fill = _FILL_ASCII if ascii_only else _FILL
    parts = [
        "rows: SMs in the order of their first CTA",
        f"{fill} busy, coloured by output tile, grey: many",
        f"{_WAIT} waiting",
        f"{_REDUCTION} merging partials",
        "blank: no CTA",
    ]
    lines = [""]
    for part in parts:
        joined = f"{lines[-1]} · {part}" if lines[-1] else part
        if len(joined) > columns and lines[-1]:
            lines.append(part)
        else:
            lines[-1] = joined
    return lines
