"""The figures of one GPU that schedules, predictions and reports need."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class GpuSpec:
    """One GPU model. Figures are the vendor's unless `source` says measured."""

    #: Catalogue name, e.g. ``a100-80gb``.
    name: str
    #: Product name as the driver prints it, e.g. ``NVIDIA A100-SXM4-80GB``.
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

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> GpuSpec:
        """The spec that `dataclasses.asdict` gave, through JSON or not; unknown keys are
        left out.
        """
        known = {field.name for field in fields(cls)}
        tuples = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        return cls(**{name: value for name, value in {**values, **tuples}.items() if name in known})
