"""Where the launch settings of a run came from, a line for each kernel that had a choice."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

#: What rows call them, in sentences about cells.
_WORDS = {
    "tuned": "with tuned configs",
    "heuristic": "by the heuristic",
    "given": "with the given config",
}
#: Where in a file a timing stands, which differs from cell to cell.
_PLACE = re.compile(r" at \d+ x \d+ tokens")


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
        reasons = [row["config_reason"] for row in rows if row["config_choice"] == choice]
        why = ""
        if choice == "tuned":
            # Before the colon stands the file that they come from; the rest is of one cell.
            why = "; ".join(dict.fromkeys(reason.partition(": ")[0] for reason in reasons))
        # With tuned ones in the run, the heuristic's cells were decided by the same files.
        elif choice == "heuristic" and "tuned" not in counts:
            why = "; ".join(_refusals(reasons))
        parts.append((counts[choice], f"{_WORDS[choice]}{f' ({why})' if why else ''}"))
    total = sum(counts.values())
    cells = f"{total} cell{'s' if total > 1 else ''}"
    if len(parts) == 1:
        return f"{'all ' if total > 1 else ''}{cells} {parts[0][1]}"
    first, *others = parts
    return ", ".join(
        [f"{first[0]} of {cells} {first[1]}", *(f"{count} {words}" for count, words in others)]
    )


def _refusals(reasons: Sequence[str]) -> list[str]:
    """Why the heuristic's settings ran: of each file of tuned configs that was looked up why it
    chose none, and how often where that differs; other reasons as they are.
    """
    by_file: dict[str, Counter[str]] = {}
    for reason in reasons:
        file, colon, why = reason.partition(": ")
        by_file.setdefault(file, Counter())[_PLACE.sub("", why) if colon else ""] += 1
    return [_refusal(file, whys) for file, whys in by_file.items()]


def _refusal(file: str, whys: Counter[str]) -> str:
    if "" in whys:
        return file
    several = len(whys) > 1
    words = [f"{why} ({count})" if several else why for why, count in whys.most_common()]
    return f"not with tuned configs, {file}: {', '.join(words)}"
