"""Where the launch settings of a run came from, a line for each kernel that had a choice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

#: What rows call them, in sentences about cells.
_WORDS = {
    "tuned": "with tuned configs",
    "heuristic": "by the heuristic",
    "given": "with the given config",
}


def config_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """``lean: 9 of 12 cells with tuned configs (measured 2026-11-21 on NVIDIA H200, shipped), 3 by
    the heuristic.``

    Args:
        rows: as in results.jsonl; those that did not run, or that do not say why their settings
            were chosen, do not count.
    """
    by_kernel: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row.get("config_reason") and row.get("config_choice") in _WORDS:
            by_kernel.setdefault(row["kernel"], []).append(row)
    return [f"{kernel}: {_line(of_kernel)}." for kernel, of_kernel in by_kernel.items()]


def _line(rows: Sequence[Mapping[str, Any]]) -> str:
    counts = Counter(row["config_choice"] for row in rows)
    parts = []
    for choice in (choice for choice in _WORDS if choice in counts):
        # What stands before the colon is the file that it comes from; the rest is of one cell.
        reasons = [
            row["config_reason"].partition(":")[0] for row in rows if row["config_choice"] == choice
        ]
        # With tuned ones in the run, the heuristic's cells were decided by the same files.
        named = choice == "tuned" or (choice == "heuristic" and "tuned" not in counts)
        where = f" ({'; '.join(dict.fromkeys(reasons))})" if named else ""
        parts.append((counts[choice], f"{_WORDS[choice]}{where}"))
    total = sum(counts.values())
    cells = f"{total} cell{'s' if total > 1 else ''}"
    if len(parts) == 1:
        return f"{'all ' if total > 1 else ''}{cells} {parts[0][1]}"
    first, *others = parts
    return ", ".join(
        [f"{first[0]} of {cells} {first[1]}", *(f"{count} {words}" for count, words in others)]
    )
