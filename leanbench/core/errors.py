"""Exceptions shared by several packages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any


class UserError(Exception):
    """Bad input. The CLI prints the message and exits with code 2.

    A subclass with values is a dataclass, whose `__str__` is the message.
    """

    def __post_init__(self) -> None:
        # Exceptions are pickled and copied by their args.
        values: Any = self
        self.args = tuple(getattr(self, field.name) for field in fields(values))


class Reason(StrEnum):
    """Why a value is invalid. Messages use the text; tests compare the member."""

    EMPTY_ENTRY = "has an empty entry"
    SYNTAX = "is invalid"
    BELOW_MINIMUM = "is below the minimum of {limit}"
    NOT_POSITIVE = "is not above 0"
    ABOVE_MAXIMUM = "is above the maximum of {limit}"
    NOT_A_MULTIPLE = "is not a multiple of {limit}"
    NOT_ONE_EACH = "is not one for each of {limit} sequences"
    NEEDS = "needs {limit}"
    CONFLICT = "conflicts with {limit}"
    UNSUPPORTED = "is not supported"
    UNEVEN_HEADS = "needs query heads that are a multiple of its KV heads"
    REVERSED_RANGE = "starts above its end"
    ENDLESS_RANGE = "never reaches its end"
    TOO_MANY_VALUES = "has more than {limit} values"


@dataclass(eq=False)
class InvalidValue(UserError):
    """A value that an option, a sweep-file key or a problem field does not accept."""

    #: Option, key or field.
    name: str
    #: Rejected value, as given.
    value: object
    reason: Reason
    #: Fix, an imperative.
    fix: str
    #: Violated limit, if the reason has one.
    limit: object = None

    def __str__(self) -> str:
        return f"{self.name} {short(self.value)} {self.reason.format(limit=self.limit)}: {self.fix}"


@dataclass(eq=False)
class OptionWithoutEffect(UserError):
    """An option that changes nothing unless another one is given."""

    #: Option with its value.
    option: str
    #: Options that would give it an effect.
    needs: str
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.option} has no effect without {self.needs}{self.hint and f' ({self.hint})'}"


class DoesNotFit(UserError):
    """Launch settings that exceed the GPU's resources."""


class OutOfMemory(UserError):
    """A problem that needs more memory than the GPU has free."""


class SuspectResult(Exception):
    """A kernel invalidated its own measurement. The message goes into its row."""


class Tampered(SuspectResult):
    """A kernel changed what other kernels are measured with: they need a new process."""


class GpuUnusable(Exception):
    """The GPU fails every further call of this process. A new process may recover."""


def short(value: object, most: int = 80) -> str:
    """Return a value as a message repeats it, truncated if long."""
    words = repr(value)
    return words if len(words) <= most + 2 else f"{words[:most]}...{words[-1]}"


def nearest(name: str, known: Iterable[str], all_of_them: str = "") -> str:
    """Suggest the names that begin so or the nearest one, or list all: ``did you mean 'lean'?``.

    Args:
        all_of_them: Command that lists all names, such as "`leanbench list kernels`".
    """
    known = sorted(known)
    if begun := [each for each in known if name and each.startswith(name)][:3]:
        return f"did you mean {' or '.join(map(repr, begun))}?"
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.65)
    if close:
        return f"did you mean {close[0]!r}?"
    # A runs directory can hold hundreds of names.
    more = f" and {len(known) - 20} more" if len(known) > 20 else ""
    listed = f" ({all_of_them})" if all_of_them else ""
    return f"known: {', '.join(known[:20])}{more}{listed}"
