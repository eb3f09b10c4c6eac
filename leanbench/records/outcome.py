"""Outcome: what came of one kernel on one problem, in whole or in part."""

from __future__ import annotations

from typing import Any

from leanbench.core.quantities import Status
from leanbench.records.figures import Figures


class Outcome(Figures):
    """The fields of a row that only running or predicting its kernel fills in.

    `a | b` has the fields of both, those of `b` where both have one.
    """

    status: Status | None = None
    reason: str | None = None
    #: Fields of `leanbench.records.samples.Samples` but the cell.
    raw_samples: dict[str, Any] | None = None

    def __or__(self, other: Outcome) -> Outcome:
        return Outcome(**self.fields() | other.fields())

    def fields(self) -> dict[str, Any]:
        """Those that were set, by name."""
        return self.model_dump(exclude_unset=True)
