"""Words of problems: those that a query chooses by, and those that tables say."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from math import inf
from typing import TYPE_CHECKING

from leanbench.core.axes import AXES

if TYPE_CHECKING:
    from leanbench.core.problem import AttentionProblem

_LARGE = re.compile(r"([a-z]+)(\d+[km])")
_SUFFIXES = {"k": 1024, "m": 1024**2}
#: ``..5MB``, ``5..50MB``, ``500MB..``, ``8..17tiles``: the second excluded.
_RANGE = re.compile(r"(?P<low>\d*)(?P<of>MB|tiles)?\.\.(?:(?P<high>\d+)(?P<unit>MB|tiles))?")
#: ``n16k..``, ``n1k..4k``
_CONTEXTS = re.compile(r"n(\d+[km]?)\.\.(\d+[km]?)?")


def sizes(problem: AttentionProblem) -> dict[str, float]:
    """What ranges of sizes are of: bytes of K and V, output tiles, the longest context."""
    return {
        "MB": problem.kv_bytes / 1e6,
        "tiles": problem.batch * problem.kv_heads,
        "n": problem.max_context,
    }


def has_words(label: Collection[str], sizes: Mapping[str, float], words: str) -> bool:
    """Whether a problem's label has these words, ``nragged*`` among them, and none that follow a
    ``!``; and whether its sizes are in a range, ``5..50MB``.
    """
    return all(_has_word(label, sizes, word) for word in words.split())


def _has_word(label: Collection[str], sizes: Mapping[str, float], word: str) -> bool:
    if limits := _RANGE.fullmatch(word):
        size = sizes[limits["of"] or limits["unit"] or "MB"]
        return float(limits["low"] or 0) <= size < float(limits["high"] or inf)
    if limits := _CONTEXTS.fullmatch(word):
        return _number(limits[1]) <= sizes["n"] < (_number(limits[2]) if limits[2] else inf)
    wanted = _in_full(word.removeprefix("!"))
    return any(fnmatchcase(own, wanted) for own in label) != word.startswith("!")


def _number(text: str) -> int:
    """4096 for ``4k``."""
    return int(text.rstrip("km")) * _SUFFIXES.get(text[-1], 1)


def _in_full(word: str) -> str:
    """``n4096`` for ``n4k``."""
    large = _LARGE.fullmatch(word)
    return f"{large[1]}{_number(large[2])}" if large else word


def with_axes(problem: AttentionProblem, axes: str) -> AttentionProblem:
    """The problem with other values, ``lengths_on=host capacity=exact``."""
    pairs = [pair.partition("=") for pair in axes.split()]
    return replace(problem, **{name: AXES[name].parse(text)[0] for name, _, text in pairs})


def size_words(problem: AttentionProblem) -> str:
    """Batch x heads x context x head_dim, then layout and pages where they are not the default."""
    words = problem_words(problem)
    page = f", pages of {problem.page_size}" if problem.page_size else ""
    layout = f", {problem.kv_layout}" if problem.kv_layout != "HND" else ""
    return f"{words['size']}{layout}{page}"


def problem_words(problem: AttentionProblem) -> dict[str, str]:
    """What a table can say of a problem."""
    heads = f"{problem.q_heads}"
    if problem.kv_heads != problem.q_heads:
        heads += f"/{problem.kv_heads}"
    tokens = _tokens(problem)
    return {
        "batch": f"{problem.batch}",
        "heads": heads,
        "context": tokens,
        "head_dim": f"{problem.head_dim}",
        "size": f"{problem.batch} x {heads} x {tokens} x {problem.head_dim}",
        "layout": _layout(problem),
        "capacity": _of(problem.cache_capacity),
        "mb": _megabytes(problem.kv_bytes),
        "label": problem.label,
        "model": (problem.whole_model or "").partition(":")[0],
    }


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.0f}" if size >= 10e6 else f"{size / 1e6:.1f}"


def _layout(problem: AttentionProblem) -> str:
    """Layout, pages, and whether the host knows the lengths."""
    words = [problem.kv_layout]
    words += [f"pages of {problem.page_size}"] if problem.page_size else []
    words += ["lengths on the device"] if problem.lengths_on == "device" else []
    return ", ".join(words)


def _tokens(problem: AttentionProblem) -> str:
    if problem.is_ragged:
        return f"{problem.total_context / problem.batch:,.0f} in the mean"
    return _of(problem.max_context)


def _of(tokens: int) -> str:
    """``4k``, ``1M``."""
    for suffix, size in (("M", 1024**2), ("k", 1024)):
        if tokens % size == 0:
            return f"{tokens // size}{suffix}"
    return f"{tokens}"
