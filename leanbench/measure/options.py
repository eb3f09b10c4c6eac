"""Options of a sweep's measurements: quantities and sampling effort."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from leanbench.measure.timing import Effort

CacheState = Literal["cold", "warm"]


@dataclass(frozen=True)
class MeasureOptions:
    """Measurements that every cell of a sweep gets."""

    effort: Effort = field(default_factory=Effort)
    #: State of the L2 when a launch starts: `cold`, as in serving, or `warm`.
    cache: CacheState = "cold"
    #: Latency over seconds of back-to-back launches.
    sustained: bool = False
    #: Energy in the same seconds.
    energy: bool = False
    window_s: float = 3.0
    #: Theoretical warp occupancy, and the SM busy share from an instrumented build.
    occupancy: bool = False
    #: Hardware counters from Nsight Compute, in a separate pass.
    counters: bool = False
    #: Maximum context for which the time to first token of a whole model is measured.
    prefill: int = 0
    #: Fresh processes that measure each cell.
    repeat: int = 1

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types for `from_dict`.

        A later option is left out at its default, so that earlier runs can be resumed.
        """
        fields = asdict(self)
        if not self.prefill:
            del fields["prefill"]
        if self.repeat == 1:
            del fields["repeat"]
        return fields

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> MeasureOptions:
        return cls(**{**fields, "effort": Effort(**fields["effort"])})
