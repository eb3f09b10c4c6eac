"""What an interrupted tuning had timed, so that the same command goes on from there."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from leanbench.problem import AttentionProblem
from leanbench.registry import KernelConfig
from leanbench.tune.space import FamilyKey
from leanbench.tune.stopwatch import Time

Timed = tuple[FamilyKey, AttentionProblem, dict[KernelConfig, Time]]


class Journal:
    """A file of JSON lines: what the tuning is about, then one line for each problem.

    A file about something else (other families, GPU or versions), or a damaged one, is begun anew.
    """

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        self._path, self._about = path, json.dumps(about, sort_keys=True)

    def read(self) -> list[Timed]:
        """What was timed before; a last line that was cut off is left out."""
        found: list[Timed] = []
        try:
            head, *lines = self._path.read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError):
            return []
        if head != self._about:
            return []
        for line in lines:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                entry = json.loads(line)
                times = {KernelConfig(**config): Time(*time) for config, time in entry["times"]}
                found.append((FamilyKey(**entry["family"]), AttentionProblem.from_dict(entry["problem"]), times))
        return found

    def begin(self, kept: Sequence[Timed]) -> None:
        """Writes what the tuning is about, and what it starts with."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        lines = [self._about, *(_line(*timed) for timed in kept)]
        self._path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")

    def add(self, family: FamilyKey, problem: AttentionProblem, times: dict[KernelConfig, Time]) -> None:
        """Appends a problem."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(_line(family, problem, times) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def end(self) -> None:
        """The tuning is kept: nothing to go on from."""
        self._path.unlink(missing_ok=True)


def _line(family: FamilyKey, problem: AttentionProblem, times: dict[KernelConfig, Time]) -> str:
    return json.dumps(
        {
            "family": vars(family),
            "problem": problem.to_dict(),
            "times": [
                (config.to_dict(), (time.latency_us, time.low_us, time.high_us)) for config, time in times.items()
            ],
        }
    )
