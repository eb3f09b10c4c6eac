"""Shards: the problems of a sweep dealt out to several commands, as the tasks of a Slurm array or
of a CI matrix run them. `leanbench merge` puts them together.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from leanbench.core.errors import UserError
from leanbench.run.cells import Cell

MOST_SHARDS = 1000


@dataclass(frozen=True)
class Shard:
    """The `index`-th of `count`, from 1 on."""

    index: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """From ``2/8``.

        Raises:
            UserError: it is no such pair, or out of range.
        """
        match = re.fullmatch(r"(\d{1,18})/(\d{1,18})", text.strip(), re.ASCII)
        if match is None:
            raise UserError(
                f"--shard {text!r} is not understood, write I/N, as in 1/4 for the first of four"
            )
        index, count = int(match[1]), int(match[2])
        if not 1 <= count <= MOST_SHARDS:
            raise UserError(f"--shard {text}: {count} shards, choose from 1 to {MOST_SHARDS}")
        if not 1 <= index <= count:
            raise UserError(
                f"--shard {text}: there is no shard {index} of {count}, choose from 1/{count} to"
                f" {count}/{count}"
            )
        return cls(index, count)

    def of(self, cells: Sequence[Cell]) -> list[Cell]:
        """Every `count`-th problem's cells.

        Raises:
            UserError: there are none.
        """
        problems = [list(together) for _, together in groupby(cells, lambda cell: cell.problem)]
        own = problems[self.index - 1 :: self.count]
        if not own:
            raise UserError(
                f"--shard {self} is empty, the sweep has {len(problems)} problems: choose"
                f" {len(problems)} shards at most"
            )
        return [cell for cells in own for cell in cells]

    def to_manifest(self, cells: Sequence[Cell]) -> dict[str, Any]:
        """For the manifest: which shard it is, and of which cells."""
        return {"index": self.index, "count": self.count, "cells": [cell.key for cell in cells]}

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"
