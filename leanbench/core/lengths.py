"""Lengths of the sequences of a batch: alike, drawn from a distribution, or one by one.

Batches of the traces in lengths.toml are those of a server at steady state: a sequence is in the
batch as often as it has output tokens, with its prompt and the output so far in the cache.
"""

from __future__ import annotations

import random
import re
import tomllib
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

from leanbench.core import syntax
from leanbench.core.axis_values import Values
from leanbench.core.errors import UserError, nearest
from leanbench.core.length_file import names_file, read_lengths_of

UNIFORM = "uniform"
#: One sequence has the context, every other one these tokens.
ONE_LONG = "one-long"
_SHORT_TOKENS = 16
#: The r-th longest sequence has the context over r.
ZIPF = "zipf"
#: The mean over the longest length follows, as in ``mean-0.25``.
_MEAN = "mean-"
#: With `_MEAN`, lengths are spread log-uniformly over this factor before they are scaled.
_SPREAD = 64
#: What can be named besides traces.
DISTRIBUTIONS = {
    UNIFORM: "all have the context",
    ONE_LONG: f"one has the context, the others {_SHORT_TOKENS} tokens",
    ZIPF: "the r-th longest has the context over r",
    f"{_MEAN}0.25": "one has the context, the mean is that share of it, the others log-uniform",
}
#: Sequences of a batch whose lengths differ.
MAX_SEQUENCES = 4096

#: Tokens of each sequence: one number for all, or one per sequence.
Context = int | tuple[int, ...]


@dataclass(frozen=True)
class Trace:
    """The lengths that a decode batch of a public trace has at steady state."""

    source: str
    licence: str
    requests: int
    #: Evenly spaced, from the shortest to the longest length.
    quantiles: tuple[int, ...]

    @property
    def mean_tokens(self) -> float:
        """Of what is drawn: linear between quantiles."""
        inner = sum(self.quantiles[1:-1])
        ends = (self.quantiles[0] + self.quantiles[-1]) / 2
        return (inner + ends) / (len(self.quantiles) - 1)


@cache
def traces() -> dict[str, Trace]:
    """The traces that come with leanbench, by name."""
    text = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    return {
        name: Trace(**{**fields, "quantiles": tuple(fields["quantiles"])})
        for name, fields in tomllib.loads(text).items()
    }


class Lengths(Values):
    """Names of distributions, ``mean-0.25``, files, ``FILE:COLUMN``, or the lengths themselves,
    ``64k+16x3``. All are text, which `draw_context` reads.
    """

    def parse(self, name: str, text: str) -> tuple[str, ...]:
        if "," in text and names_file(text):
            return (self._value(name, text),)
        return syntax.parse_list(name, text, lambda item: [self._value(name, item)])

    def check(self, name: str, value: str) -> None:
        self._value(name, value)

    def _value(self, name: str, item: str) -> str:
        word = item.lower()
        if word.startswith(_MEAN):
            mean = _mean(name, word)
            return UNIFORM if mean == 1 else f"{_MEAN}{mean:g}"
        if word in (*DISTRIBUTIONS, *traces()):
            return word
        if is_explicit(word):
            return write_lengths(read_lengths(name, word))
        _file_quantiles(name, item)
        return item


class QueryLengths(Values):
    """Query tokens of each sequence, ``512+1x7``; None: all sequences have as many."""

    or_none = "as many for all sequences"

    def parse(self, name: str, text: str) -> tuple[tuple[int, ...] | None, ...]:
        return syntax.parse_list(
            name,
            text,
            lambda item: [None] if item.lower() == "none" else [read_lengths(name, item)],
        )

    def check(self, name: str, value: tuple[int, ...] | None) -> None:
        if value is not None and (not value or min(value) < 1):
            raise UserError(
                f"{name} {value} is no number of tokens for each sequence: give numbers from 1 on,"
                " such as 512+1x7"
            )

    def write(self, value: tuple[int, ...] | None) -> str:
        return "none" if value is None else write_lengths(value)

    def to_json(self, value: tuple[int, ...] | None) -> list[int] | None:
        return None if value is None else list(value)

    def from_json(self, name: str, value: Any) -> tuple[int, ...] | None:
        if value is None:
            return None
        if not isinstance(value, list) or any(type(length) is not int for length in value):
            raise TypeError(f"{name} is no list of whole numbers")
        return tuple(value)


def is_explicit(lengths: str) -> bool:
    """Whether the text has a length for each sequence: those say batch and context themselves."""
    return lengths[:1].isdigit() and re.fullmatch(r"[0-9km+x]+", lengths) is not None


def read_lengths(name: str, text: str) -> tuple[int, ...]:
    """The tokens of each sequence from ``1k+300+16x3``, where ``16x3`` is 16+16+16.

    Raises:
        UserError: `text` is no such list, or has more than MAX_SEQUENCES lengths.
    """
    lengths: list[int] = []
    for part in text.lower().split("+"):
        tokens, times, count = part.partition("x")
        if not tokens or (times and not count):
            raise UserError(
                f"{name} {text[:40]!r} lacks a number beside + or x, write lengths such as 1k+300"
                " or 64k+16x3"
            )
        repeats = syntax.parse_number(name, count) if times else 1
        if len(lengths) + repeats > MAX_SEQUENCES:
            raise UserError(
                f"{name} {text[:40]!r} has more than {MAX_SEQUENCES} sequences: leave some out"
            )
        lengths += [
            syntax.parse_number(name, tokens, "lengths such as 1k+300 or 64k+16x3")
        ] * repeats
    return tuple(lengths)


def write_lengths(lengths: tuple[int, ...]) -> str:
    """The text that `read_lengths` reads back: ``65536+16x3``."""
    runs = [(length, len(list(run))) for length, run in groupby(lengths)]
    return "+".join(f"{length}x{count}" if count > 1 else f"{length}" for length, count in runs)


def as_context(lengths: tuple[int, ...]) -> Context:
    """One number where all lengths are alike."""
    return lengths[0] if len(set(lengths)) == 1 else lengths


def longest_in_file(lengths: str) -> int | None:
    """The longest length of a file that a value of `Lengths` names; None: it names none.

    Raises:
        UserError: the file cannot be read.
    """
    named = lengths in (*DISTRIBUTIONS, *traces()) or lengths.startswith(_MEAN)
    return None if named or is_explicit(lengths) else _file_quantiles("lengths", lengths)[-1]


def draw_context(
    lengths: str, batch: int, longest: int, draw: random.Random | None = None
) -> Context:
    """The lengths of a batch, none above `longest`.

    Args:
        lengths: a value of `Lengths`, not the lengths themselves.
        draw: None: one that depends on the other arguments alone, so that the same cell is the same
            problem in every sweep. random.Random keeps its sequence from one Python version to the
            next.

    Raises:
        UserError: the batch cannot have such lengths, or a file cannot be read.
    """
    if lengths == UNIFORM:
        return longest
    if batch > MAX_SEQUENCES:
        raise UserError(
            f"batch {batch} is above the limit of {MAX_SEQUENCES} for lengths that differ: choose a"
            " smaller one"
        )
    if lengths.startswith(_MEAN):
        mean = _mean("lengths", lengths)
        draw = draw or random.Random(f"{batch} {longest} {mean!r}")
        return as_context(_lengths_of_mean(batch, longest, mean, draw)) if batch > 1 else longest
    draw = draw or random.Random(f"{batch} {longest} {lengths}")
    if lengths in (ONE_LONG, ZIPF):
        return as_context(_ranked(lengths, batch, longest, draw))
    trace = traces().get(lengths)
    quantiles = trace.quantiles if trace else _file_quantiles("lengths", lengths)
    return as_context(tuple(min(longest, _inverse(quantiles, draw.random())) for _ in range(batch)))


def _ranked(lengths: str, batch: int, longest: int, draw: random.Random) -> tuple[int, ...]:
    """Lengths that follow from a sequence's rank, in random order."""
    if lengths == ZIPF:
        ranked = [max(1, longest // rank) for rank in range(1, batch + 1)]
    else:
        ranked = [longest, *[min(longest, _SHORT_TOKENS)] * (batch - 1)]
    draw.shuffle(ranked)
    return tuple(ranked)


def _inverse(quantiles: tuple[int, ...], share: float) -> int:
    """The length below which a share of a distribution lies, linear between its quantiles."""
    place = share * (len(quantiles) - 1)
    below = int(place)
    above = quantiles[min(below + 1, len(quantiles) - 1)]
    return max(1, round(quantiles[below] + (place - below) * (above - quantiles[below])))


def _mean(name: str, text: str) -> float:
    number = text.removeprefix(_MEAN)
    # Plain decimals only: float() would also take "nan", "inf" and "1_0".
    if not re.fullmatch(r"\d{0,1}\.?\d{1,9}", number, re.ASCII) or not 0 < float(number) <= 1:
        raise UserError(
            f"{name} {text!r} is not a mean over the longest length, write {_MEAN} and a number"
            f" above 0 and up to 1, as in {_MEAN}0.25"
        )
    return float(number)


def _lengths_of_mean(
    batch: int, longest: int, mean_over_max: float, draw: random.Random
) -> tuple[int, ...]:
    """`batch` lengths of which one is `longest` and whose mean is `mean_over_max` x `longest`.

    The others are log-uniform over a factor of _SPREAD, scaled by one factor that brings the mean
    to its target, clipped to 1..longest and rounded (so the mean is met to within one token).

    Raises:
        UserError: the longest sequence alone exceeds the mean.
    """
    if mean_over_max * batch <= 1:
        raise UserError(
            f"lengths {_MEAN}{mean_over_max:g} with batch {batch} cannot be: one sequence at the"
            f" full context alone has a mean of 1/{batch} of it, choose a mean above"
            f" {1 / batch:.3g} or a batch above {1 / mean_over_max:g}"
        )
    weights = [_SPREAD ** (draw.random() - 1) for _ in range(batch - 1)]
    target = mean_over_max * batch * longest - longest

    def clipped(scale: float) -> list[float]:
        return [min(longest, max(1.0, scale * weight)) for weight in weights]

    # The sum grows with the scale; at the upper end every length is clipped to the longest.
    low, high = 0.0, float(longest) * _SPREAD
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(clipped(middle)) < target else (low, middle)
    lengths = [round(length) for length in clipped(high)]
    lengths.insert(draw.randrange(batch), longest)
    return tuple(lengths)


@lru_cache(maxsize=16)
def _file_quantiles(name: str, file: str) -> tuple[int, ...]:
    """Return the lengths of a file from the shortest to the longest.

    Raises:
        UserError: There is no such file, or it has no lengths; see `read_lengths_of`.
    """
    if not names_file(file):
        raise UserError(
            f"{name} {file[:80]!r} is no distribution, no file and no lengths such as 64k+16x3,"
            f" {nearest(file, (*DISTRIBUTIONS, *traces()))}"
        )
    return tuple(sorted(read_lengths_of(name, file)))
