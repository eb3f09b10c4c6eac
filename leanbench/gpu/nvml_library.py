"""NVML opened and read: its errors turned into few exceptions, and into None where it has no
answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from leanbench.core.errors import GpuUnusable, UserError


class NvmlError(UserError):
    """NVML could not answer; the sentence says the fix."""


class NvmlUnavailableError(NvmlError):
    """No NVIDIA driver, or no GPU that it can drive."""


class GpuNotFoundError(NvmlError):
    """The driver works, but has no such GPU."""


class GpuLostError(NvmlError, GpuUnusable):
    """The GPU fell off the bus or needs a reset."""


@contextmanager
def open_nvml() -> Iterator[Any]:
    """NVML, initialised; it counts its users, so nesting is fine.

    Raises:
        NvmlError: it cannot be used, or something that was read in it failed.
    """
    try:
        import pynvml
    except ImportError:
        raise NvmlUnavailableError("pynvml is not installed: pip install nvidia-ml-py") from None
    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError) as error:
        if getattr(error, "value", None) == pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
            raise NvmlError(
                "the NVIDIA driver was updated while its kernel module kept running: reboot, or"
                " reload the module"
            ) from None
        # A container or a machine without a GPU fails here in many ways; none of them leaves a GPU
        # to use.
        raise NvmlUnavailableError(
            f"there is no working NVIDIA driver here (NVML: {error})"
        ) from None
    try:
        yield pynvml
    except (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError) as error:
        raise _lost(pynvml, error) or NvmlError(
            f"NVML fails ({error}): see what `nvidia-smi` says"
        ) from None
    finally:
        # One that fails has nothing to close.
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def ask(nvml: Any, function: Callable[..., Any], *args: Any) -> Any:
    """The answer, or None where this GPU, driver or user has none."""
    try:
        return function(*args)
    except nvml.NVMLLibraryMismatchError:  # the driver is older than the call
        return None
    except nvml.NVMLError as error:
        if lost := _lost(nvml, error):
            raise lost from None
        return None


def _lost(nvml: Any, error: Exception) -> GpuLostError | None:
    if getattr(error, "value", None) in (
        nvml.NVML_ERROR_GPU_IS_LOST,
        nvml.NVML_ERROR_RESET_REQUIRED,
    ):
        return GpuLostError(
            "the GPU no longer answers: reset it with `nvidia-smi --gpu-reset`, or reboot"
        )
    return None
