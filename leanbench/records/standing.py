"""Order of two latencies. Every count of wins uses `standing`."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

from leanbench.core.files import UnreadableFile, locked, parse_json, read_if_there, replace_file
from leanbench.core.paths import user_folder

if TYPE_CHECKING:
    from leanbench.records.row import Row

Standing = Literal["ahead", "level", "behind"]

#: Relative difference up to which latencies are level, if nothing measured the machine's own.
SPREAD = 0.01
#: Spreads of this machine's GPUs, by UUID, in the user's folder.
_SPREADS = "spreads.json"


class Ratio(NamedTuple):
    """Latency of a rival over the own, and the ends of its interval; above 1 the own is faster."""

    value: float
    low: float
    high: float

    @classmethod
    def exactly(cls, value: float) -> Self:
        """Return a ratio without an interval."""
        return cls(value, value, value)


class Latency(NamedTuple):
    """A latency, and the ends of its interval, which are the latency itself if there is none."""

    us: float
    low_us: float
    high_us: float

    @classmethod
    def of(cls, row: Row) -> Self:
        us = row.latency_us
        assert us is not None
        return cls(us, row.latency_ci_low_us or us, row.latency_ci_high_us or us)

    def over(self, own: Latency) -> Ratio:
        """Divide a rival's latency by the own one, and the ends of the intervals crosswise."""
        return Ratio(self.us / own.us, self.low_us / own.high_us, self.high_us / own.low_us)


def standing(ratio: Ratio, spread: float = SPREAD) -> Standing:
    """Return where a side stands whose rival takes `ratio` times its latency.

    Level if the intervals of both overlap, or if the longer one exceeds the shorter one by at most
    `spread`: what the same kernel differs by between processes.
    """
    overlap = ratio.low < ratio.high and ratio.low <= 1 <= ratio.high
    if overlap or max(ratio.value, 1 / ratio.value) <= 1 + spread:
        return "level"
    return "ahead" if ratio.value > 1 else "behind"


def standings(ratios: Iterable[Ratio], spread: float = SPREAD) -> dict[Standing, int]:
    """Count the sides ahead, level and behind."""
    counts = Counter(standing(ratio, spread) for ratio in ratios)
    return {"ahead": counts["ahead"], "level": counts["level"], "behind": counts["behind"]}


def measured_spread(shares: Iterable[float | None], of_machine: Any = None) -> float:
    """Return the spread between processes: the median of what repeats of rows measured, or else
    what `leanbench doctor` measured, or `SPREAD`.
    """
    known = [share for share in shares if share is not None]
    if known:
        return statistics.median(known)
    return of_machine if isinstance(of_machine, float) else SPREAD


def spread_of_processes(latencies_us: Sequence[float]) -> float:
    """Return half the range of the processes' latencies over their median."""
    return (max(latencies_us) - min(latencies_us)) / 2 / statistics.median(latencies_us)


def record_spread(gpu_uuid: str, spread: float) -> None:
    """Record what `leanbench doctor` measured on a GPU of this machine.

    Raises:
        OSError: The user's folder cannot be written.
    """
    path = user_folder() / _SPREADS
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path):
        replace_file(path, json.dumps({**_recorded_spreads(), gpu_uuid: spread}, indent=2) + "\n")


def recorded_spread(gpu_uuid: str | None) -> float | None:
    """Return the spread that `leanbench doctor` recorded for a GPU, or None."""
    spread = _recorded_spreads().get(gpu_uuid) if gpu_uuid else None
    return spread if isinstance(spread, float) else None


def _recorded_spreads() -> dict[Any, Any]:
    try:
        spreads = parse_json(read_if_there(user_folder() / _SPREADS, 1) or b"{}")
    except (UnreadableFile, ValueError):
        return {}
    return spreads if isinstance(spreads, dict) else {}
