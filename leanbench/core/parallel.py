"""GPUs that share a problem: heads (tensor parallel) or tokens (context parallel)."""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple

from leanbench.core import syntax
from leanbench.core.axis import Values
from leanbench.core.errors import InvalidValue, Reason

#: Maximum number of GPUs of a host connected by NVLink.
MOST_GPUS = 8
#: One GPU.
NONE = "none"
_SHARE = re.compile(r"(tp|cp):(\d{1,9})", re.ASCII)


class GpuCounts(NamedTuple):
    """`tensor` shares of heads, each with its tokens split over `context` GPUs."""

    tensor: int = 1
    context: int = 1

    @property
    def gpus(self) -> int:
        return self.tensor * self.context

    def __str__(self) -> str:
        shares = [f"cp:{self.context}"] if self.context > 1 else []
        shares += [f"tp:{self.tensor}"] if self.tensor > 1 else []
        return "x".join(shares) or NONE


class GpuShares(Values):
    """Words such as ``cp:2``, ``tp:4``, ``cp:2xtp:2``, or ``none`` for one GPU."""

    is_word = True
    none = NONE
    or_none = "one GPU"
    _SYNTAX = "cp:2 (tokens over 2 GPUs), tp:2 (heads), cp:2xtp:2 (both), or none"

    def parse(self, name: str, text: str) -> tuple[str, ...]:
        return syntax.parse_list(name, text, lambda item: [self._value(name, item.lower())])

    def _value(self, name: str, item: str) -> str:
        if item == NONE:
            return NONE
        shares = item.split("x")
        kinds = {share[1] for share in map(_SHARE.fullmatch, shares) if share}
        if len(kinds) < len(shares):
            raise self._invalid(name, item)
        counts = counts_of(item)
        fix = f"choose 1 to {MOST_GPUS} GPUs together"
        if min(counts) < 1:
            raise InvalidValue(name, item, Reason.BELOW_MINIMUM, fix, 1)
        if counts.gpus > MOST_GPUS:
            raise InvalidValue(name, item, Reason.ABOVE_MAXIMUM, fix, MOST_GPUS)
        return str(counts)

    def _invalid(self, name: str, value: object) -> InvalidValue:
        return InvalidValue(name, value, Reason.SYNTAX, f"write {self._SYNTAX}")

    def check(self, name: str, value: str) -> None:
        if not isinstance(value, str) or self._value(name, value) != value:
            raise self._invalid(name, value)

    def reads(self, text: str) -> bool:
        return text[:3].lower() in ("cp:", "tp:")


@cache
def counts_of(value: str) -> GpuCounts:
    """Return the GPU counts of an axis value."""
    sizes = {share[1]: int(share[2]) for share in _SHARE.finditer(value)}
    return GpuCounts(sizes.get("tp", 1), sizes.get("cp", 1))


def shard_start(length: int, rank: int, size: int) -> int:
    """Return a rank's first token of a sequence in `size` consecutive shards. The first `length` %
    `size` shards have one token more.
    """
    return length // size * rank + min(length % size, rank)
