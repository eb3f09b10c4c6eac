"""Words for GitHub's Markdown: what a run brings along cannot break out of its place."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def plain(text: str) -> str:
    """Text with no markup in it."""
    return re.sub(r"([\\`*_{}\[\]<>|#~])", r"\\\1", " ".join(text.split()))


def code(text: str) -> str:
    """Text in which nothing links, mentions or ends a table's cell."""
    return f"`{' '.join(text.split()).replace('`', chr(39)).replace('|', '¦')}`"


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a table of cells in Markdown; a heading that ends with a colon is of a column of
    numbers.
    """
    names = [heading.removesuffix(":") for heading in headings]
    rule = ["---:" if heading.endswith(":") else "---" for heading in headings]
    return [_line(names), f"|{'|'.join(rule)}|", *map(_line, rows)]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
