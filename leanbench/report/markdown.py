"""A document as GitHub's Markdown. Texts of a run are escaped."""

from __future__ import annotations

import re
from collections.abc import Sequence

from leanbench.report.document import Block, Document, Section, Sentences, Table, Words


def markdown_text(document: Document) -> str:
    """Render a document."""
    lines = [f"# {_plain(document.title)}", ""] if document.title else []
    tags = "".join(f" ({tag})" for tag in document.tags)
    for section in document.sections:
        lines += _section(section, 2, tags if section.tagged else "")
    return "\n".join(lines).rstrip("\n") + "\n"


def _section(section: Section, level: int, tags: str = "") -> list[str]:
    content = [line for block in section.blocks for line in _block(block, level)]
    if not content:
        return []  # A section of figures alone.
    if section.folded == "closed":
        summary = _plain(section.heading)
        return [f"<details><summary>{summary}</summary>", "", *content, "</details>", ""]
    heading = [f"{'#' * level} {_plain(section.heading)}{tags}", ""] if section.heading else []
    return [*heading, *content]


def _block(block: Block, level: int) -> list[str]:
    if isinstance(block, Section):
        return _section(block, level + 1)
    if isinstance(block, Table):
        return _table(block)
    return _sentences(block) if isinstance(block, Sentences) else []


def _table(table: Table) -> list[str]:
    title = [f"{_plain(table.title)}:", ""] if table.title else []
    names = [_plain(column.heading) for column in table.columns]
    rule = ["---:" if column.numeric else "---" for column in table.columns]
    note = [_plain(table.note), ""] if table.note else []
    rows = [_line([*map(_words, row)]) for row in table.rows]
    return [*title, _line(names), f"|{'|'.join(rule)}|", *rows, "", *note]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _sentences(block: Sentences) -> list[str]:
    if block.layout in ("headline", "facts", "list"):
        names = [f"**{_plain(item.name)}:** " if item.name else "" for item in block.items]
        notes = [f" {_plain(item.note)}" if item.note else "" for item in block.items]
        texts = [_words(item.words) for item in block.items]
        return [f"- {''.join(parts)}" for parts in zip(names, texts, notes, strict=True)] + [""]
    return [line for item in block.items for line in (_words(item.words), "")]


def _words(words: Words) -> str:
    if isinstance(words, str):
        return _plain(words)
    text = _code(words.words) if words.role == "code" else _plain(words.words)
    if words.role in ("strong", "best") and text:
        text = f"**{text}**"
    more = f" and {len(words.more) + words.unnamed} more" if words.more else ""
    return f"{text}{f' ({_plain(words.note)})' if words.note else ''}{more}"


def _plain(text: str) -> str:
    """Escape markup and mentions."""
    escaped = re.sub(r"([\\`*_{}\[\]<>|#~])", r"\\\1", " ".join(text.split()))
    return escaped.replace("@", "@<!-- -->")


def _code(text: str) -> str:
    """Format code without links, mentions and ends of table cells."""
    return f"`{' '.join(text.split()).replace('`', chr(39)).replace('|', '¦')}`"
