"""Alarms for kernels that change what they are measured with: clocks, graphs, the L2."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from types import BuiltinFunctionType
from typing import Self

from leanbench.core.errors import Tampered


@dataclass(frozen=True)
class Untouched:
    """State of the instruments before any kernel ran."""

    persisting_l2_bytes: int

    @classmethod
    def now(cls) -> Self:
        """Read the state of the current device."""
        import torch

        torch.cuda.synchronize()  # makes the context that has the limit
        return cls(persisting_l2_bytes())

    def check(self, name: str) -> None:
        """Check the state after a kernel was prepared.

        Raises:
            Tampered: It has changed.
        """
        if replaced := replaced_functions():
            raise Tampered(
                f"{name} replaced {', '.join(replaced)}, which times and replays launches"
            )
        set_aside = persisting_l2_bytes()
        if set_aside != self.persisting_l2_bytes:
            raise Tampered(
                f"{name} set {set_aside / 1e6:.1f} MB of the L2 aside for data that persists"
                f" ({self.persisting_l2_bytes / 1e6:.1f} MB before): K and V could stay in it"
            )


def replaced_functions() -> list[str]:
    """Return the functions under the timing that are not the ones that torch or Python define."""
    import torch

    package = str(Path(torch.__file__).parent)
    functions = {
        "torch.cuda.Event.record": torch.cuda.Event.record,
        "torch.cuda.Event.synchronize": torch.cuda.Event.synchronize,
        "torch.cuda.Event.elapsed_time": torch.cuda.Event.elapsed_time,
        "torch.cuda.CUDAGraph.replay": torch.cuda.CUDAGraph.replay,
    }
    replaced = [
        name
        for name, function in functions.items()
        if not getattr(function, "__code__", _NoCode).co_filename.startswith(package)
    ]
    if not isinstance(time.perf_counter, BuiltinFunctionType):
        replaced.append("time.perf_counter")
    return replaced


class _NoCode:
    """Code of a callable that is no Python function."""

    co_filename = ""


def persisting_l2_bytes() -> int:
    """Return the bytes of the L2 that this process keeps for accesses marked as persisting."""
    from cuda.bindings import driver  # pyright: ignore[reportAttributeAccessIssue]

    limit = driver.CUlimit.CU_LIMIT_PERSISTING_L2_CACHE_SIZE
    status, size = driver.cuCtxGetLimit(limit)
    # GPUs before compute capability 8.0 have none.
    return 0 if int(status) else int(size)
