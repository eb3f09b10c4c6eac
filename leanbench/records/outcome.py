"""Outcome: results of one kernel on one problem. Workers import it without the model of rows."""

from __future__ import annotations

from typing import Any

from leanbench.core.quantities import Status
from leanbench.records.figures import Figures


class Outcome(Figures):
    """Fields of a row that running or predicting its kernel fills in, in whole or in part.

    `a | b` has the fields of both. Those of `b` win.
    """

    status: Status | None = None
    reason: str | None = None
    #: Fields of `leanbench.records.samples.Samples` but the cell.
    raw_samples: dict[str, Any] | None = None

    def __or__(self, other: Outcome) -> Outcome:
        return Outcome(**self.fields() | other.fields())

    def fields(self) -> dict[str, Any]:
        """Return the fields that are set, by name."""
        return self.model_dump(exclude_unset=True)
