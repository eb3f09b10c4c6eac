"""How several GPUs share a problem: heads among some (tensor parallel), tokens among others
(context parallel).
"""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple

from leanbench.core import syntax
from leanbench.core.axis import Values
from leanbench.core.errors import UserError

#: GPUs of a host that NVLink connects.
MOST_GPUS = 8
#: One GPU.
NONE = "none"
_SHARE = re.compile(r"(tp|cp):(\d{1,9})", re.ASCII)


class GpuCounts(NamedTuple):
    """`tensor` x `context` GPUs: heads are split into `tensor` shares, and the tokens of each share
    over `context` GPUs.
    """

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

    kind = "text"
    is_word = True
    none = NONE
    or_none = "one GPU"
    _SYNTAX = "cp:2 (tokens over 2 GPUs), tp:2 (heads), cp:2xtp:2 (both), or none"

    def parse(self, name: str, text: str) -> tuple[str, ...]:
        return syntax.parse_list(name, text, lambda item: [self._value(name, item.lower())])

    def _value(self, name: str, item: str) -> str:
        if item == NONE:
            return NONE
        shares = [_SHARE.fullmatch(share) for share in item.split("x")]
        kinds = [share[1] for share in shares if share is not None]
        if None in shares or len(set(kinds)) < len(shares):
            raise UserError(f"{name} {item!r} is not understood, write {self._SYNTAX}")
        sizes = {share[1]: int(share[2]) for share in shares if share is not None}
        counts = GpuCounts(sizes.get("tp", 1), sizes.get("cp", 1))
        if min(counts) < 1 or counts.gpus > MOST_GPUS:
            raise UserError(
                f"{name} {item!r} is {counts.gpus} GPUs, choose 1 to {MOST_GPUS} together"
            )
        return str(counts)

    def check(self, name: str, value: str) -> None:
        if not isinstance(value, str) or self._value(name, value) != value:
            raise UserError(f"{name} {value!r} is not understood, write {self._SYNTAX}")

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
