"""Table of all axes: the fields of AttentionProblem, and those of sweeps alone.

Flags, keys of sweep files, grids, repeat commands and `leanbench list axes` follow from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from leanbench.core.axis import Axis, HeadPairs, Values, Whole
from leanbench.core.errors import InvalidValue, Reason
from leanbench.core.lengths import UNIFORM, Lengths, as_context, is_explicit, read_lengths
from leanbench.core.llm.model import parse_models
from leanbench.core.problem import PLAIN_AXES, PROBLEM_AXES, AttentionProblem


class ModelNames(Values):
    def parse(self, name: str, text: str) -> tuple[str, ...]:
        return parse_models(text)

    def check(self, name: str, value: str) -> None:
        parse_models(value)


HEADS = Axis(
    "heads", HeadPairs(), "h", swept=((32, 8),), help="Query heads, or query/KV heads: 56,32/8."
)
#: Distribution below the context, the maximum length of a sequence.
LENGTHS = Axis(
    "lengths",
    Lengths(),
    default=UNIFORM,
    help="Of a batch, up to the context: uniform, one-long, zipf, mean-0.25, azure-code,"
    " azure-conversation, mooncake, mooncake-synthetic, FILE, FILE:COLUMN, or one by one:"
    " 64k+16x3.",
    label="batch lengths",
    refusal="takes no ragged batch",
)
#: Replaces heads and head_dim.
MODEL = Axis(
    "model",
    ModelNames(),
    swept=(),
    help="Attention of models, names from `leanbench list models` or a config.json:"
    " llama-3-70b,gpt-oss-20b.",
)
TP = Axis(
    "tp",
    Whole(),
    default=1,
    help="Tensor-parallel size of --model: 1,8. One GPU's share of the heads is measured.",
)


_NAMES = tuple(axis.name for axis in PROBLEM_AXES)
#: Names of the axes of leanbench.core.kinds, and of later ones.
KINDS = _NAMES[_NAMES.index("causal") :]


def _table() -> dict[str, Axis]:
    table = {axis.name: axis for axis in PROBLEM_AXES if not axis.part_of}
    table = {"heads": HEADS, "context": table["context"], **table}
    kinds = {name: table.pop(name) for name in KINDS}
    return {**table, "lengths": LENGTHS, "model": MODEL, "tp": TP, **kinds}


#: Every axis of sweeps by name: heads and context first, kinds of attention last.
AXES: dict[str, Axis] = _table()


_FIX = "write for example h32/8 n4096 d128, with b8, q4, p64, bf16 or NHD where needed"
#: Axes that a word can name: whole words first (NHD is no context), then the longest letters.
_NAMED = sorted(
    (axis for axis in AXES.values() if axis.letter or axis.values.is_word),
    key=lambda axis: (axis.letter != "", -len(axis.letter)),
)


def parse_problem(words: Sequence[str]) -> AttentionProblem:
    """Parse the words of one problem, in any order, quoted together or not.

    The letters are those of `AXES`. Axes with a default may be omitted, and so may the batch: it is
    1, or the number of contexts. A ragged batch has one length per sequence, ``n1k+300+16x3``.

    Raises:
        UserError: A word is unknown, duplicate or missing, or the problem is invalid.
    """
    parsed: dict[str, str] = {}
    for word in " ".join(words).split():
        name, value = _split(word)
        if name in parsed:
            fix = "leave one of them out"
            raise InvalidValue(name, value, Reason.CONFLICT, fix, repr(parsed[name]))
        parsed[name] = value
    missing = [
        f"{axis.letter} ({axis.name})"
        for axis in AXES.values()
        if axis.is_required and axis.letter and axis.name not in (*parsed, "batch")
    ]
    if missing:
        limit = " and ".join(missing)
        raise InvalidValue("problem", " ".join(words), Reason.NEEDS, _FIX, limit)
    q_heads, kv_heads = _value("heads", parsed["heads"])
    lengths = _lengths(parsed["context"])
    batch = _value("batch", parsed["batch"]) if "batch" in parsed else len(lengths)
    context = as_context(lengths) if len(lengths) in (1, batch) else lengths
    plain = {
        axis.name: _value(axis.name, parsed[axis.name])
        for axis in PLAIN_AXES
        if axis.name in parsed
    }
    return AttentionProblem(
        batch=batch, q_heads=q_heads, kv_heads=kv_heads, context=context, **plain
    )


def _split(word: str) -> tuple[str, str]:
    """Split a word into axis and value."""
    for axis in _NAMED:
        letter, value = word[: len(axis.letter)].lower(), word[len(axis.letter) :]
        # Any text after the context's letter is left to its own check.
        if letter == axis.letter and (axis.values.reads(value) or axis.name == "context"):
            return axis.name, value
    raise InvalidValue("problem word", word, Reason.SYNTAX, _FIX)


def _lengths(text: str) -> tuple[int, ...]:
    if text.lower().startswith("ragged"):
        fix = "write a length for each sequence, such as n1k+300+16x3"
        raise InvalidValue("context", text, Reason.SYNTAX, fix)
    several = is_explicit(text.lower()) and not text.isdigit()
    return read_lengths("context", text) if several else (_value("context", text),)


def _value(name: str, text: str) -> Any:
    values = AXES[name].parse(text)
    if len(values) != 1:
        raise InvalidValue(name, text, Reason.TOO_MANY_VALUES, _FIX, 1)
    return values[0]
