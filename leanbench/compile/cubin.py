"""Registers of a cubin, read by NVIDIA's cuobjdump: of Triton, which keeps no log of ptxas."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from leanbench.core.errors import UserError


@dataclass(frozen=True)
class CubinResources:
    """Registers of one kernel in a cubin."""

    registers_per_thread: int
    #: Stack of a thread, 4 bytes each: spills and local arrays.
    spilled_registers: int


def cubin_resources(cubin: bytes, kernel: str) -> CubinResources:
    """Return the resources of `kernel`, a mangled name, as written in the cubin.

    Raises:
        UserError: cuobjdump is missing.
        RuntimeError: The cubin has no such kernel.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        listing = subprocess.run(
            [_cuobjdump(), "--dump-resource-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    usage = re.search(rf"Function {re.escape(kernel)}:\s+REG:(\d+)\s+STACK:(\d+)", listing)
    if usage is None:
        raise RuntimeError(f"cuobjdump finds no kernel {kernel!r} in the cubin")
    registers, stack_bytes = map(int, usage.groups())
    return CubinResources(registers, stack_bytes // 4)


@cache
def _cuobjdump() -> str:
    """Return the path of the cuobjdump of Triton, or else of a CUDA toolkit."""
    # An import would take a second.
    triton = find_spec("triton")
    if triton is not None and triton.origin is not None:
        bundled = Path(triton.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        if bundled.is_file():
            return str(bundled)
    if (installed := shutil.which("cuobjdump")) is not None:
        return installed
    raise UserError("cuobjdump is found neither in Triton nor on PATH: pip install triton")
