"""Words of problems: those that a query chooses by, and those that tables say."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from leanbench.core.axes import AXES

if TYPE_CHECKING:
    from leanbench.core.problem import AttentionProblem

_LARGE = re.compile(r"([a-z]+)(\d+)([km])")
_SUFFIXES = {"k": 1024, "m": 1024**2}
#: ``..5MB``, ``5..50MB``, ``500MB..``: bytes of K and V, the second excluded.
_BYTES = re.compile(r"(\d*)(?:MB)?\.\.(?:(\d+)MB)?")


def has_words(label: Collection[str], kv_bytes: int, words: str) -> bool:
    """Whether a problem's label has these words, ``nragged*`` among them, and none that follow a
    ``!``; and whether its bytes are in a range, ``5..50MB``.
    """
    return all(_has_word(label, kv_bytes, word) for word in words.split())


def _has_word(label: Collection[str], kv_bytes: int, word: str) -> bool:
    if limits := _BYTES.fullmatch(word):
        low, high = float(limits[1] or 0), float(limits[2] or "inf")
        return low <= kv_bytes / 1e6 < high
    wanted = _in_full(word.removeprefix("!"))
    return any(fnmatchcase(own, wanted) for own in label) != word.startswith("!")


def _in_full(word: str) -> str:
    """``n4096`` for ``n4k``."""
    large = _LARGE.fullmatch(word)
    return f"{large[1]}{int(large[2]) * _SUFFIXES[large[3]]}" if large else word


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
