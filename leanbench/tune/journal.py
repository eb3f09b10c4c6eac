"""Unsaved timings, from which an interrupted command resumes.

Each line, one per problem, names its family, versions and board, so several tunings share the file.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from leanbench.configs.space import FamilyKey
from leanbench.core.config import read_config
from leanbench.core.errors import UserError
from leanbench.core.files import (
    append_whole,
    locked,
    parse_json,
    read_file,
    read_if_there,
    replace_file,
    whole_lines,
)
from leanbench.core.problem import AttentionProblem
from leanbench.kernels.lean.configs import LEAN_CONFIGS, LeanConfig
from leanbench.tune.stopwatch import Time

_MOST_MB = 1000

Timed = tuple[FamilyKey, AttentionProblem, dict[LeanConfig, Time]]


class Journal:
    """A file of JSON lines.

    Args:
        about: dependencies of timings in addition to the problem: board, versions, kernel.
        thorough: every candidate is timed; lines without it do not suffice then.
    """

    def __init__(self, path: Path, about: dict[str, Any], thorough: bool = False) -> None:
        self._path, self._about, self._thorough = path, json.loads(json.dumps(about)), thorough

    def read(self, families: Collection[FamilyKey]) -> list[Timed]:
        """Read the timings of these families; skip damaged lines and a truncated last line."""
        timed: list[Timed] = []
        for line in self._lines():
            with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, UserError):
                entry = parse_json(line)
                family = FamilyKey(**entry["family"])
                enough = entry["thorough"] or not self._thorough
                if entry["about"] == self._about and family in families and enough:
                    times = {
                        read_config(LEAN_CONFIGS, config): Time(*time)
                        for config, time in entry["times"]
                    }
                    timed.append((family, AttentionProblem.from_dict(entry["problem"]), times))
        return timed

    def add(
        self, family: FamilyKey, problem: AttentionProblem, times: dict[LeanConfig, Time]
    ) -> None:
        """Append a problem, overwriting a truncated last line.

        Raises:
            OSError: the disk is full, or the file cannot be written.
        """
        entry = {
            "about": self._about,
            "thorough": self._thorough,
            "family": vars(family),
            "problem": problem.to_dict(),
            "times": [
                (config.to_dict(), (time.latency_us, time.low_us, time.high_us))
                for config, time in times.items()
            ],
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with locked(self._path), self._path.open("ab", buffering=0) as file:
            file.truncate(len(whole_lines(read_file(self._path, _MOST_MB))))
            try:
                append_whole(file.fileno(), json.dumps(entry).encode() + b"\n")
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(self._path)) from None

    def forget(self, families: Collection[FamilyKey]) -> None:
        """Drop the lines of these families, because they are saved."""
        if not self._path.exists():
            return
        with locked(self._path):
            left = [line for line in self._lines() if not self._is_of(line, families)]
            if left:
                replace_file(self._path, "".join(f"{line.decode()}\n" for line in left))
            else:
                self._path.unlink(missing_ok=True)

    def _is_of(self, line: bytes, families: Collection[FamilyKey]) -> bool:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            entry = parse_json(line)
            return entry["about"] == self._about and FamilyKey(**entry["family"]) in families
        # Damaged lines go, too.
        return True

    def _lines(self) -> list[bytes]:
        return whole_lines(read_if_there(self._path, _MOST_MB)).split(b"\n")[:-1]


#: Callback for every timed problem.
Note = Callable[[FamilyKey, AttentionProblem, dict[LeanConfig, Time]], None]
