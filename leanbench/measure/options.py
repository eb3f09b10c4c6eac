"""Options of a sweep's measurements: what besides latency, and how many samples."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from leanbench.measure.timing import Effort

CacheState = Literal["cold", "warm"]


@dataclass(frozen=True)
class MeasureOptions:
    """Measurements that every cell of a sweep gets."""

    effort: Effort = field(default_factory=Effort)
    #: The L2 when a launch starts: `cold`, as K and V come in serving, or `warm`.
    cache: CacheState = "cold"
    #: Latency over seconds of back-to-back launches.
    sustained: bool = False
    #: Energy over the same seconds.
    energy: bool = False
    window_s: float = 3.0
    #: Theoretical warp occupancy, and the SM busy share from an instrumented build.
    occupancy: bool = False
    #: Hardware counters from Nsight Compute, in a pass of their own.
    counters: bool = False
    #: Time to first token of whole models, for contexts up to so many tokens; 0: for none.
    prefill: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; `from_dict` reads it back. What came after the others is left out where
        it is off: runs from before can be resumed.
        """
        fields = asdict(self)
        if not self.prefill:
            del fields["prefill"]
        return fields

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> MeasureOptions:
        return cls(**{**fields, "effort": Effort(**fields["effort"])})
