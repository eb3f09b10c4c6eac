"""A compute capability for Triton to compile for, whatever GPU is here or none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def triton_target(capability: tuple[int, int]) -> Iterator[None]:
    """Compile Triton kernels for this compute capability, with or without such a GPU."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    # None: not looked for yet, and where there is no GPU there is none to find.
    before: Any = driver._active
    named: Any = _NamedTarget(GPUTarget("cuda", 10 * capability[0] + capability[1], 32))
    driver.set_active(named)
    try:
        yield
    finally:
        driver.set_active(before)


class _NamedTarget:
    """What Triton asks of a driver before it compiles."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        # Triton keeps what it compiled by device: one of its own for each architecture, none that
        # exists.
        return -int(self._target.arch)

    def get_current_stream(self, device: int) -> int:
        return 0
