"""Figures of one GPU for schedules, predictions and reports."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any

from leanbench.core.errors import UserError

#: Names of GPUs are names of files, not paths.
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
#: Bytes per clock that an SM reads at most, from the L2 too.
SM_BYTES_PER_CLOCK = 34.5


def name_fault(name: str) -> str | None:
    """Return a phrase about an invalid GPU name, or None."""
    if _NAME.fullmatch(name):
        return None
    return f"{name!r} is no GPU name: write up to 64 lower-case letters, digits, '.', '_' and '-'"


@dataclass(frozen=True)
class GpuSpec:
    """One GPU model. Figures are the vendor's unless `source` says measured.

    Raises:
        UserError: The name is no file name.
    """

    #: Catalogue name, such as ``a100-80gb``.
    name: str
    #: Product name of the driver, such as ``NVIDIA A100-SXM4-80GB``.
    product: str
    compute_capability: tuple[int, int]
    sms: int
    memory_gb: float
    bandwidth_tb_s: float
    l2_mib: float
    shared_kb_per_sm: int
    shared_kb_per_cta: int
    registers_per_sm: int
    boost_clock_mhz: int
    power_limit_w: int
    source: str
    aliases: tuple[str, ...] = ()

    @property
    def l2_bytes(self) -> int:
        return int(self.l2_mib * 2**20)

    @property
    def l2_bytes_per_us(self) -> float:
        """Bytes that all SMs together read from the L2."""
        return SM_BYTES_PER_CLOCK * self.boost_clock_mhz * self.sms

    def __post_init__(self) -> None:
        if (fault := name_fault(self.name)) is not None:
            raise UserError(fault)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> GpuSpec:
        """Build a spec from the output of `dataclasses.asdict`, through JSON or not. Ignore unknown
        keys.
        """
        known = {field.name for field in fields(cls)}
        tuples = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        return cls(**{name: value for name, value in {**values, **tuples}.items() if name in known})
