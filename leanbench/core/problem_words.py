"""One problem as people type it: ``h56 n64k d64``, or a label such as ``b1 h32/8 n4096 d128 fp16
HND``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from leanbench.core.axes import (
    parse_head_dims,
    parse_heads,
    parse_numbers,
    parse_page_sizes,
    parse_q_lens,
)
from leanbench.core.errors import UserError
from leanbench.core.problem import DTYPES, KV_LAYOUTS, AttentionProblem

_EXAMPLE = "h32/8 n4096 d128, with b8, q4, p64, bf16 or NHD where needed"
_NEEDED = {"h": "heads", "n": "context", "d": "head_dim"}
_FIELDS = {"b": "batch", **_NEEDED, "q": "q_len", "p": "page_size"}

T = TypeVar("T")


def parse_problem(words: Sequence[str]) -> AttentionProblem:
    """The problem that the words name, in any order, quoted together or not.

    ``h`` query heads or query/KV heads, ``n`` context, ``d`` head_dim; ``b`` batch, ``q`` q_len,
    ``p`` page_size, dtype and kv_layout may be left out: 1, 1, a contiguous cache, fp16 and HND.
    ``k`` and ``m`` are 1024 and 1024 x 1024. A ragged batch is one length per sequence,
    ``n1k+300+64k``.

    Raises:
        UserError: a word that is not understood or given twice, one that is missing, or a problem
            that cannot be.
    """
    found: dict[str, str] = {}
    for word in " ".join(words).split():
        name, value = _split(word)
        if name in found:
            raise UserError(
                f"{name} is given twice, as {found[name]!r} and {value!r}: leave one of them out"
            )
        found[name] = value
    missing = [f"{letter} ({name})" for letter, name in _NEEDED.items() if name not in found]
    if missing:
        raise UserError(
            f"the problem has no {' and no '.join(missing)}: write for example {_EXAMPLE}"
        )
    q_heads, kv_heads = _one("heads", parse_heads(found["heads"]))
    head_dim = _one("head_dim", parse_head_dims(found["head_dim"]))
    context = _context(found["context"])
    batch = _number("batch", found["batch"]) if "batch" in found else _sequences(context)
    return AttentionProblem(
        batch,
        q_heads,
        kv_heads,
        context,
        head_dim,
        found.get("dtype", "fp16"),
        found.get("kv_layout", "HND"),
        _one("q_len", parse_q_lens(found.get("q_len", "1"))),
        _one("page_size", parse_page_sizes(found.get("page_size", "none"))),
    )


def _split(word: str) -> tuple[str, str]:
    """(field, value) of one word."""
    if word.lower() in DTYPES:
        return "dtype", word.lower()
    if word.upper() in KV_LAYOUTS:
        return "kv_layout", word.upper()
    name, value = _FIELDS.get(word[0].lower()), word[1:]
    # Anything may follow the context's letter: its own sentence says what should.
    if name is None or not (value[:1] in {*"0123456789+-"} or name == "context"):
        raise UserError(f"problem word {word!r} is not understood, write for example {_EXAMPLE}")
    return name, value


def _context(text: str) -> int | tuple[int, ...]:
    if text.lower().startswith("ragged"):
        raise UserError(
            f"context {text!r} does not say how long each sequence is: write a length for each,"
            " such as n1k+300+64k"
        )
    first, *others = (_number("context", part) for part in text.split("+"))
    return (first, *others) if others else first


def _sequences(context: int | tuple[int, ...]) -> int:
    return 1 if isinstance(context, int) else len(context)


def _number(field: str, text: str) -> int:
    if not text:
        raise UserError(f"{field} has an empty entry: write for example {_EXAMPLE}")
    return _one(field, parse_numbers(field, text))


def _one(field: str, values: tuple[T, ...]) -> T:
    if len(values) != 1:
        raise UserError(
            f"{field} has {len(values)} values, a problem has one: write for example {_EXAMPLE}"
        )
    return values[0]
