"""The finding of one check."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

#: `note`: worth knowing, figures are right all the same. `problem`: nothing can be measured, or
#: figures would mislead.
Status = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """One line, and what to do about it."""

    status: Status
    text: str
    #: None where there is nothing to do, or `text` says it.
    fix: str | None = None
    #: The figures of `text`, units in their names; null where the machine does not say.
    values: dict[str, Any] = field(default_factory=dict)


def ok(text: str, **values: Any) -> Finding:
    return Finding("ok", text, None, values)


def note(text: str, fix: str | None = None, **values: Any) -> Finding:
    return Finding("note", text, fix, values)


def problem(text: str, fix: str | None, **values: Any) -> Finding:
    return Finding("problem", text, fix, values)
