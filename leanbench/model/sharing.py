"""How SMs share the memory: alike ones form a load, and every load gets its due."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Load:
    """SMs of one class with the same number of streaming CTAs."""

    #: Share of full memory over the mean, CTAs that stream on each SM, and what such an SM asks
    #: for.
    weight: float
    ctas: int
    demand: float
    #: SMs.
    sms: int = 0
    #: What each of its CTAs gets, and could get if it were faster itself.
    rate: float = 0.0
    reach: float = 0.0


def share(loads: Sequence[Load], available: float, sm_limit: float) -> None:
    """Sets rate and reach: no SM gets more than it asks for, and those that ask for more than is
    left share the rest in proportion to their weights.

    Args:
        available: bytes per microsecond of the memory.
        sm_limit: the most that one SM reads.
    """
    if sum(load.demand * load.sms for load in loads) <= available:
        for load in loads:
            load.rate, load.reach = load.demand / load.ctas, sm_limit / load.ctas
        return
    weights = sum(load.weight * load.sms for load in loads)
    # The easiest to satisfy first: what they leave, the others share.
    for load in sorted(loads, key=lambda load: load.demand / load.weight):
        fair = load.weight * available / weights
        got = min(load.demand, fair)
        load.rate, load.reach = got / load.ctas, min(fair, sm_limit) / load.ctas
        available -= got * load.sms
        weights -= load.weight * load.sms
