"""Compiles CUDA C++ at run time by NVRTC, for a GPU that need not be here, and keeps the results on
disk.

A kept result is one file: the SHA-256 of all that follows, a line of JSON with the kernel's
resources, the cubin. Its name is the SHA-256 of all that the result depends on: source, options,
architecture and NVRTC's version (major, minor).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from leanbench.compile.cubin import cubin_resources
from leanbench.core.errors import UserError
from leanbench.core.paths import cache_folder

#: Of the files; a new one for what this module changes in them.
_FORMAT_VERSION = 1
#: Their own instructions (wgmma, tcgen05) are there for this architecture alone, which the `a` asks
#: for.
_WITH_OWN_INSTRUCTIONS = {(9, 0), (10, 0)}
#: The system takes it from every CTA that uses shared memory, and from 9.0 on the cubin says so.
_SYSTEM_SHARED_BYTES = 1024


@dataclass(frozen=True)
class CudaSource:
    """A kernel before it is compiled."""

    #: A whole translation unit, but for the headers of `folder`.
    text: str
    #: Its `extern "C"` name.
    kernel: str
    #: Macros and their values, sorted.
    defines: tuple[tuple[str, int], ...]
    #: The compute capability to compile for: (9, 0).
    capability: tuple[int, int]
    #: Where its includes find their headers, `*.cuh`; None: it includes nothing.
    folder: Path | None = None


@dataclass(frozen=True)
class CudaBinary:
    """A compiled kernel, and what it takes of an SM."""

    cubin: bytes
    registers_per_thread: int
    #: The stack of a thread, 4 bytes each: what it spills, and its local arrays.
    spilled_registers: int
    #: Shared memory that the source declares, without what a launch adds and the system takes.
    static_shared_bytes: int


class CudaCompileError(Exception):
    """NVRTC refuses a source: a fault of ours. The message has the log's first error."""

    def __init__(self, kernel: str, log: str) -> None:
        super().__init__(kernel, log)
        self.kernel = kernel
        self.log = log

    def __str__(self) -> str:
        # Warnings may stand before it.
        found = re.search(r".*\b(?:error|fatal)\b.*", self.log)
        return f"{self.kernel} does not compile: {found[0] if found else self.log}"


def compile_cuda(source: CudaSource, folder: Path | None = None) -> CudaBinary:
    """The kernel of a source, compiled now or taken from what was kept.

    Args:
        folder: where results are kept; `cuda` in leanbench.core.paths.cache_folder() unless it is
            given. If it cannot be written, nothing is kept, and a warning says so once.

    Raises:
        UserError: cuda-bindings, NVRTC or cuobjdump is missing.
        CudaCompileError: NVRTC refuses the source.
        RuntimeError: the source has no such kernel.
    """
    nvrtc, version = load_nvrtc()
    folder = folder or cache_folder() / "cuda"
    path = folder / f"{_key(source, version)}.bin"
    if (kept := _read(path)) is not None:
        return kept
    binary = _binary(source, _cubin(nvrtc, source))
    try:
        _write(path, binary)
    except OSError as error:
        _warn_unwritable(folder, error.strerror or str(error))
    return binary


def load_nvrtc() -> tuple[Any, tuple[int, int]]:
    """cuda.bindings.nvrtc, and the version of the library that it loads with the first call.

    Raises:
        UserError: one of them is missing or cannot be loaded.
    """
    try:
        from cuda.bindings import nvrtc  # pyright: ignore[reportAttributeAccessIssue]

        major, minor = _values(nvrtc.nvrtcVersion())
    except (ImportError, OSError, RuntimeError) as error:
        said = str(error).strip().partition("\n")[0]
        raise UserError(
            f"CUDA kernels need cuda-bindings and NVRTC, which cannot be loaded ({said}): "
            "pip install cuda-bindings nvidia-cuda-nvrtc"
        ) from None
    return nvrtc, (major, minor)


def _values(answer: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a call of the bindings returns after its status."""
    status, *values = answer
    if status.value != 0:
        raise RuntimeError(f"NVRTC fails with {status.name}")
    return tuple(values)


def _options(source: CudaSource) -> list[str]:
    major, minor = source.capability
    own = "a" if source.capability in _WITH_OWN_INSTRUCTIONS else ""
    return [
        f"--gpu-architecture=sm_{major}{minor}{own}",
        "--std=c++17",
        "--device-as-default-execution-space",
        *([] if source.folder is None else [f"--include-path={source.folder}"]),
        *(f"--define-macro={name}={value:d}" for name, value in source.defines),
    ]


def _key(source: CudaSource, version: tuple[int, int]) -> str:
    # The options hold the defines and the compute capability.
    headers = [] if source.folder is None else _headers(source.folder)
    parts = [_FORMAT_VERSION, version, source.text, headers, source.kernel, _options(source)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _headers(folder: Path) -> list[tuple[str, str]]:
    return [(path.name, path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.cuh"))]


def _cubin(nvrtc: Any, source: CudaSource) -> bytes:
    options = [option.encode() for option in _options(source)]
    (program,) = _values(
        nvrtc.nvrtcCreateProgram(source.text.encode(), f"{source.kernel}.cu".encode(), 0, [], [])
    )
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if status.value != 0:
            log = _filled(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
            raise CudaCompileError(
                source.kernel, log.rstrip(b"\0").decode(errors="replace").strip() or status.name
            )
        return _filled(program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _filled(program: Any, size: Any, fill: Any) -> bytes:
    """What NVRTC writes into memory of the size that it asks for."""
    (size_bytes,) = _values(size(program))
    memory = bytearray(size_bytes)
    _values(fill(program, memory))
    return bytes(memory)


def _binary(source: CudaSource, cubin: bytes) -> CudaBinary:
    taken = cubin_resources(cubin, source.kernel)
    system_bytes = _SYSTEM_SHARED_BYTES if source.capability >= (9, 0) else 0
    return CudaBinary(
        cubin,
        taken.registers_per_thread,
        taken.spilled_registers,
        max(0, taken.shared_bytes - system_bytes),
    )


def _read(path: Path) -> CudaBinary | None:
    """None where nothing is kept, or what is there is damaged."""
    try:
        checksum, _, content = path.read_bytes().partition(b"\n")
    except OSError:
        return None
    if checksum != _checksum(content):
        return None
    resources, _, cubin = content.partition(b"\n")
    return CudaBinary(cubin, **json.loads(resources))


def _write(path: Path, binary: CudaBinary) -> None:
    """Others who compile the same find nothing or all of it, and whoever is last wins with the same
    content.
    """
    resources = {name: value for name, value in vars(binary).items() if name != "cubin"}
    content = json.dumps(resources).encode() + b"\n" + binary.cubin
    path.parent.mkdir(parents=True, exist_ok=True)
    part, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(part, "wb") as file:
            file.write(_checksum(content) + b"\n" + content)
        # Others may share the folder.
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _checksum(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()


@cache
def _warn_unwritable(folder: Path, why: str) -> None:
    warnings.warn(
        f"compiled CUDA kernels are not kept, {folder} cannot be written ({why}): "
        "choose a writable folder in LEANBENCH_CACHE",
        stacklevel=3,
    )
