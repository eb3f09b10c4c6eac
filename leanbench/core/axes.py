"""The axes of a sweep, in one table: the fields of AttentionProblem, and what only sweeps have.

Flags, the keys of sweep files, grids, repeat commands and `leanbench list axes` follow from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from leanbench.core.axis import Axis, HeadPairs, Values, Whole
from leanbench.core.errors import UserError
from leanbench.core.lengths import UNIFORM, Lengths, as_context, is_explicit, read_lengths
from leanbench.core.llm.model import parse_models
from leanbench.core.problem import PLAIN_AXES, PROBLEM_AXES, AttentionProblem


class ModelNames(Values):
    """Names and paths of leanbench.core.llm.model."""

    def parse(self, name: str, text: str) -> tuple[str, ...]:
        return parse_models(text)

    def check(self, name: str, value: str) -> None:
        parse_models(value)


HEADS = Axis(
    "heads", HeadPairs(), "h", swept=((32, 8),), help="Query heads, or query/KV heads: 56,32/8."
)
#: Over the context, which is then the longest that a sequence may be.
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
#: Models say heads and head_dim in place of those axes.
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
    help="GPUs that share out a model's heads (tensor parallelism): 1,8; one of them is measured.",
)


#: Names of the axes of leanbench.core.kinds, and of those that came after them.
KINDS = tuple(axis.name for axis in PROBLEM_AXES)[
    [axis.name for axis in PROBLEM_AXES].index("causal") :
]


def _table() -> dict[str, Axis]:
    own = {axis.name: axis for axis in PROBLEM_AXES if not axis.part_of}
    of_problems = {"heads": HEADS, "context": own["context"], **own}
    of_sweeps = {axis.name: axis for axis in (LENGTHS, MODEL, TP)}
    kinds = {name: of_problems.pop(name) for name in KINDS}
    return {**of_problems, **of_sweeps, **kinds}


#: Every axis that a sweep can have, by name; heads and context first, kinds of attention last.
AXES: dict[str, Axis] = _table()


_EXAMPLE = "h32/8 n4096 d128, with b8, q4, p64, bf16 or NHD where needed"
#: Axes that a word can name. Whole words first, NHD is no context; then by the longest letters.
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
    given: dict[str, str] = {}
    for word in " ".join(words).split():
        name, value = _split(word)
        if name in given:
            raise UserError(
                f"{name} is given twice, as {given[name]!r} and {value!r}: leave one of them out"
            )
        given[name] = value
    missing = [f"{axis.letter} ({axis.name})" for axis in _needed() if axis.name not in given]
    if missing:
        raise UserError(
            f"the problem has no {' and no '.join(missing)}: write for example {_EXAMPLE}"
        )
    q_heads, kv_heads = _value("heads", given["heads"])
    lengths = _lengths(given["context"])
    batch = _value("batch", given["batch"]) if "batch" in given else len(lengths)
    context = as_context(lengths) if len(lengths) in (1, batch) else lengths
    plain = {
        axis.name: _value(axis.name, given[axis.name]) for axis in PLAIN_AXES if axis.name in given
    }
    return AttentionProblem(
        batch=batch, q_heads=q_heads, kv_heads=kv_heads, context=context, **plain
    )


def _needed() -> list[Axis]:
    return [
        axis for axis in AXES.values() if axis.is_required and axis.letter and axis.name != "batch"
    ]


def _split(word: str) -> tuple[str, str]:
    """Split a word into axis and value."""
    for axis in _NAMED:
        letter, value = word[: len(axis.letter)].lower(), word[len(axis.letter) :]
        # Anything may follow the context's letter: its own sentence says what should.
        if letter == axis.letter and (axis.values.reads(value) or axis.name == "context"):
            return axis.name, value
    raise UserError(f"problem word {word!r} is not understood, write for example {_EXAMPLE}")


def _lengths(text: str) -> tuple[int, ...]:
    if text.lower().startswith("ragged"):
        raise UserError(
            f"context {text!r} does not say how long each sequence is: write a length for each,"
            " such as n1k+300+16x3"
        )
    several = is_explicit(text.lower()) and not text.isdigit()
    return read_lengths("context", text) if several else (_value("context", text),)


def _value(name: str, text: str) -> Any:
    if not text:
        raise UserError(f"{name} has an empty entry: write for example {_EXAMPLE}")
    values = AXES[name].parse(text)
    if len(values) != 1:
        raise UserError(
            f"{name} has {len(values)} values, a problem has one: write for example {_EXAMPLE}"
        )
    return values[0]
