"""A kernel that is ready to be timed on a problem."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from leanbench.core.registry import Kernel, KernelConfig
from leanbench.measure.timing import Launches


@dataclass
class Candidate:
    """One kernel, prepared on every buffer of the loaded problem and checked once."""

    kernel: Kernel
    config: KernelConfig | None
    #: One for each buffer, in the order of rotation.
    launches: Launches
    #: Fields of its row so far.
    row: dict[str, Any]
    warnings: list[str] = field(default_factory=list)
