"""CUDA C++ compiled at run time by NVRTC, through cuda.core, for any GPU.

Compiled kernels are cached on disk by source, headers, options, architecture and NVRTC's version.
"""

from __future__ import annotations

import hashlib
import io
import re
import warnings
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from leanbench.core.errors import UserError
from leanbench.core.paths import cache_folder

#: Architectures with instructions of their own (wgmma, tcgen05), enabled by the suffix `a`.
_WITH_OWN_INSTRUCTIONS = {(9, 0), (10, 0)}
#: Size of the SHA-256 in front of a kernel on disk.
_CHECKSUM_BYTES = 32


@dataclass(frozen=True)
class CudaSource:
    """A kernel before it is compiled."""

    #: Translation unit, without the headers of `folder`.
    text: str
    #: `extern "C"` name.
    kernel: str
    #: Macros and their values, sorted.
    defines: tuple[tuple[str, int], ...]
    #: Compute capability to compile for: (9, 0).
    capability: tuple[int, int]
    #: Folder of the headers, `*.cuh` in it or below; None without includes.
    folder: Path | None = None


@dataclass(frozen=True)
class CudaBinary:
    """A compiled kernel, and what its compilers report."""

    cubin: bytes
    #: Warnings, and the resources of a CTA, which a launch does not need.
    log: str
    source: CudaSource

    @property
    def registers_per_thread(self) -> int:
        return int(self._resources["registers"])

    @property
    def spilled_registers(self) -> int:
        """Stores of spilled registers in the code, 4 bytes each. Local arrays and arguments of
        calls are on the stack too, but are no spills.
        """
        return -(-int(self._resources["spilled_bytes"]) // 4)

    @property
    def static_shared_bytes(self) -> int:
        """Shared memory that the source declares, without that of the launch and the system."""
        return int(self._resources["shared_bytes"] or 0)

    @property
    def _resources(self) -> re.Match[str]:
        """Resources of the kernel in the log. Raises RuntimeError if they are missing."""
        found = re.search(
            rf"Function properties for {re.escape(self.source.kernel)}\n"
            r".* (?P<spilled_bytes>\d+) bytes spill stores,.*\n"
            r".*Used (?P<registers>\d+) registers(?:.* (?P<shared_bytes>\d+) bytes smem)?",
            self.log,
        )
        if found is None:
            raise RuntimeError(f"ptxas reports no kernel {self.source.kernel!r}: {self.log}")
        return found


class CudaCompileError(Exception):
    """NVRTC refuses a source: a fault of ours. The message has the log's first error."""

    def __init__(self, kernel: str, log: str) -> None:
        super().__init__(kernel, log)
        self.kernel = kernel
        self.log = log

    def __str__(self) -> str:
        # Warnings may stand before it.
        first_error = re.search(r".*\b(?:error|fatal)\b.*", self.log)
        return f"{self.kernel} does not compile: {first_error[0] if first_error else self.log}"


def compile_cuda(source: CudaSource, folder: Path | None = None) -> CudaBinary:
    """Compile a source, or take the kernel from the cache.

    Args:
        folder: Cache folder; `cuda` in `cache_folder()` by default. If it cannot be written,
            nothing is kept and a warning appears once.

    Raises:
        UserError: cuda-core, cuda-bindings or NVRTC is missing.
        CudaCompileError: NVRTC rejects the source.
    """
    check_nvrtc()
    from cuda.core.utils import make_program_cache_key

    options = _options(source)
    key = make_program_cache_key(
        code=source.text,
        code_type="c++",
        options=options,
        target_type="cubin",
        extra_digest=_digest_of_headers(source),
    )
    folder = folder or cache_folder() / "cuda"
    compiled = _read(folder, key)
    if compiled is None:
        compiled = _compiled(source, options)
        _write(folder, key, compiled)
    log, _, cubin = compiled.partition(b"\0")
    return CudaBinary(cubin, log.decode(), source)


@cache
def check_nvrtc() -> None:
    """Load NVRTC and look for cuda-core, whose import takes a quarter of a second.

    Raises:
        UserError: cuda-core, cuda-bindings or NVRTC is missing or cannot be loaded.
    """
    try:
        core_version = version("cuda-core")
        if int(core_version.partition(".")[0]) < 1:
            raise ImportError(f"cuda-core is {core_version}")
        from cuda.bindings import nvrtc  # pyright: ignore[reportAttributeAccessIssue]

        status, *_ = nvrtc.nvrtcVersion()
        if status.value != 0:
            raise RuntimeError(f"NVRTC fails with {status.name}")
    except (ImportError, OSError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            "CUDA kernels need cuda-core 1.0, cuda-bindings and NVRTC, which cannot be loaded"
            f" ({reason}): pip install 'cuda-core>=1.0' cuda-bindings nvidia-cuda-nvrtc"
        ) from None


def _options(source: CudaSource) -> Any:
    from cuda.core import ProgramOptions  # pyright: ignore[reportAttributeAccessIssue]

    major, minor = source.capability
    suffix = "a" if source.capability in _WITH_OWN_INSTRUCTIONS else ""
    return ProgramOptions(
        name=f"{source.kernel}.cu",
        arch=f"sm_{major}{minor}{suffix}",
        std="c++17",
        device_as_default_execution_space=True,
        define_macro=[(name, f"{value:d}") for name, value in source.defines] or None,
        include_path=None if source.folder is None else str(source.folder),
        # It reports resources in the log.
        ptxas_options="-v",
    )


def _digest_of_headers(source: CudaSource) -> bytes:
    digest = hashlib.sha256()
    for path in sorted(source.folder.rglob("*.cuh")) if source.folder is not None else ():
        digest.update(hashlib.sha256(path.name.encode()).digest())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.digest()


def _compiled(source: CudaSource, options: Any) -> bytes:
    """Return the log, a zero and the cubin."""
    from cuda.core import Program  # pyright: ignore[reportAttributeAccessIssue]

    program = Program(source.text, "c++", options)
    log = io.StringIO()
    try:
        cubin = bytes(program.compile("cubin", logs=log).code)
    except Exception as error:
        # The class of cuda.core's error is private; its message has NVRTC's log at the end.
        log = str(error).partition("compilation log:")[2] or str(error)
        raise CudaCompileError(source.kernel, log.strip("\0\n ")) from None
    finally:
        program.close()
    # Without times, equal builds are equal files.
    lines = re.sub(r"(?m)^.*Compile time = .*\n", "", log.getvalue())
    return lines.strip("\0\n ").encode() + b"\0" + cubin


def _read(folder: Path, key: bytes) -> bytes | None:
    """Return a log and cubin from the cache, or None if they are missing or damaged."""
    from cuda.core.utils import FileStreamProgramCache

    try:
        content = FileStreamProgramCache(folder).get(key) or b""
    except OSError:
        return None
    checksum, compiled = content[:_CHECKSUM_BYTES], content[_CHECKSUM_BYTES:]
    return compiled if checksum == hashlib.sha256(compiled).digest() else None


def _write(folder: Path, key: bytes, compiled: bytes) -> None:
    from cuda.core.utils import FileStreamProgramCache

    try:
        FileStreamProgramCache(folder)[key] = hashlib.sha256(compiled).digest() + compiled
    except OSError as error:
        _warn_unwritable(folder, error.strerror or str(error))


@cache
def _warn_unwritable(folder: Path, why: str) -> None:
    warnings.warn(
        f"compiled CUDA kernels are not kept, {folder} cannot be written ({why}): "
        "choose a writable folder in LEANBENCH_CACHE",
        stacklevel=4,
    )
