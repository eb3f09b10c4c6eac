"""Exceptions shared by several packages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from enum import StrEnum


class UserError(Exception):
    """Bad input. The CLI prints the message and exits with code 2."""


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


class InvalidValue(UserError):
    """A value that an option, a sweep-file key or a problem field does not accept.

    Attributes:
        name: Option, key or field.
        value: Rejected value, as given.
        reason: Cause.
        limit: Violated limit, if the reason has one.
        fix: Fix, an imperative.
    """

    def __init__(
        self, name: str, value: object, reason: Reason, fix: str, limit: object = None
    ) -> None:
        super().__init__(name, value, reason, fix, limit)
        self.name = name
        self.value = value
        self.reason = reason
        self.fix = fix
        self.limit = limit

    def __str__(self) -> str:
        return f"{self.name} {self.value!r} {self.reason.format(limit=self.limit)}: {self.fix}"


class OptionWithoutEffect(UserError):
    """An option that changes nothing unless another one is given.

    Attributes:
        option: Option with its value.
        needs: Options that would give it an effect.
        hint: Further advice.
    """

    def __init__(self, option: str, needs: str, hint: str = "") -> None:
        super().__init__(option, needs, hint)
        self.option = option
        self.needs = needs
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.option} has no effect without {self.needs}{self.hint and f' ({self.hint})'}"


class DoesNotFit(UserError):
    """Launch settings that exceed the GPU's resources."""


class OutOfMemory(UserError):
    """A problem that needs more memory than the GPU has free."""


class SuspectResult(Exception):
    """A kernel invalidated its own measurement. The message goes into its row."""


class GpuUnusable(Exception):
    """The GPU fails every further call of this process. A new process may recover."""


def nearest(name: str, known: Iterable[str], all_of_them: str = "") -> str:
    """Suggest the nearest known name, or list the known names: ``did you mean 'lean'?``.

    Args:
        all_of_them: Command that lists all names, such as "`leanbench list kernels`".
    """
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}?"
    # A runs directory can hold hundreds of names.
    more = f" and {len(known) - 20} more" if len(known) > 20 else ""
    listed = f" ({all_of_them})" if all_of_them else ""
    return f"known: {', '.join(known[:20])}{more}{listed}"
