"""What was timed and not kept yet, so that the command that was interrupted goes on from there.

A line for each problem says by itself what it belongs to: tunings of other families, versions or boards share the file.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from leanbench.errors import UserError
from leanbench.problem import AttentionProblem
from leanbench.registry import KernelConfig
from leanbench.tune.files import locked, replace_file
from leanbench.tune.space import FamilyKey
from leanbench.tune.stopwatch import Time

Timed = tuple[FamilyKey, AttentionProblem, dict[KernelConfig, Time]]


class Journal:
    """A file of JSON lines.

    Args:
        about: what timings depend on beside the problem: board, versions, kernel.
        thorough: every candidate is timed; lines that say otherwise are not enough then.
    """

    def __init__(self, path: Path, about: dict[str, Any], thorough: bool = False) -> None:
        self._path, self._about, self._thorough = path, json.loads(json.dumps(about)), thorough

    def read(self, families: Collection[FamilyKey]) -> list[Timed]:
        """What was timed of these families; damaged lines are left out."""
        found: list[Timed] = []
        for line in self._lines():
            with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, UserError):
                entry = json.loads(line)
                family = FamilyKey(**entry["family"])
                enough = entry["thorough"] or not self._thorough
                if entry["about"] == self._about and family in families and enough:
                    times = {KernelConfig(**config): Time(*time) for config, time in entry["times"]}
                    found.append((family, AttentionProblem.from_dict(entry["problem"]), times))
        return found

    def add(self, family: FamilyKey, problem: AttentionProblem, times: dict[KernelConfig, Time]) -> None:
        """Appends a problem."""
        entry = {
            "about": self._about,
            "thorough": self._thorough,
            "family": vars(family),
            "problem": problem.to_dict(),
            "times": [
                (config.to_dict(), (time.latency_us, time.low_us, time.high_us)) for config, time in times.items()
            ],
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with locked(self._path), self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def forget(self, families: Collection[FamilyKey]) -> None:
        """Drops the lines of these families: they are kept now."""
        if not self._path.exists():
            return
        with locked(self._path):
            left = [line for line in self._lines() if not self._is_of(line, families)]
            if left:
                replace_file(self._path, "".join(f"{line}\n" for line in left))
            else:
                self._path.unlink(missing_ok=True)

    def _is_of(self, line: str, families: Collection[FamilyKey]) -> bool:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            entry = json.loads(line)
            return entry["about"] == self._about and FamilyKey(**entry["family"]) in families
        # Damaged: of use to nobody.
        return True

    def _lines(self) -> list[str]:
        try:
            return self._path.read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError):
            return []


#: Told of every problem that was timed.
Note = Callable[[FamilyKey, AttentionProblem, dict[KernelConfig, Time]], None]
