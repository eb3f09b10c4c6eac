"""Access to NVML, with few exceptions, and None for missing answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from leanbench.core.errors import GpuUnusable, UserError


class NvmlError(UserError):
    """NVML could not answer."""


class NvmlUnavailableError(NvmlError):
    """No NVIDIA driver, or no GPU that it can drive."""


class GpuNotFoundError(NvmlError):
    """The driver works, but has no such GPU."""


class GpuLostError(NvmlError, GpuUnusable):
    """The GPU fell off the bus or needs a reset."""


@dataclass(eq=False)
class OldBindingError(NvmlError):
    """A `pynvml` that is outdated, most often the package of that name, which shadows nvidia-ml-py;
    or one that cannot be imported.
    """

    #: File that was imported.
    path: str
    is_broken: bool = False

    def __str__(self) -> str:
        fault = "a broken" if self.is_broken else "an outdated"
        return (
            f"{self.path} is {fault} pynvml: pip uninstall pynvml, then pip install"
            " --force-reinstall nvidia-ml-py"
        )


@contextmanager
def open_nvml() -> Iterator[Any]:
    """Initialize NVML. It counts its users, so nesting is fine.

    Raises:
        NvmlError: NVML cannot be used, or a read in this block failed.
    """
    pynvml = _import_pynvml()
    try:
        with _initialised(pynvml):
            yield pynvml
    except AttributeError as error:
        if error.obj is not pynvml:
            raise
        raise OldBindingError(_path_of_pynvml()) from None


@contextmanager
def _initialised(pynvml: Any) -> Iterator[None]:
    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError) as error:
        if getattr(error, "value", None) == pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
            raise NvmlError(
                "the NVIDIA driver was updated while its kernel module kept running: reboot, or"
                " reload the module"
            ) from None
        # Containers and machines without a GPU fail in many ways.
        raise NvmlUnavailableError(
            f"there is no working NVIDIA driver here (NVML: {error})"
        ) from None
    try:
        yield
    except (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError) as error:
        raise _lost(pynvml, error) or NvmlError(
            f"NVML fails ({error}): see what `nvidia-smi` says"
        ) from None
    finally:
        # One that fails has nothing to close.
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _import_pynvml() -> Any:
    """Import the bindings that nvidia-ml-py installs.

    Raises:
        NvmlUnavailableError: They are not installed.
        OldBindingError: Another package's module of the same name is found first.
    """
    try:
        import pynvml
    except Exception as error:  # bindings for Python 2 are a syntax error
        if isinstance(error, ModuleNotFoundError) and error.name == "pynvml":
            missing = "pynvml is not installed: pip install nvidia-ml-py"
            raise NvmlUnavailableError(missing) from None
        raise OldBindingError(_path_of_pynvml(), is_broken=True) from None
    # The newest required name, in nvidia-ml-py since 12.560.
    if not hasattr(pynvml, "NVMLLibraryMismatchError"):
        raise OldBindingError(_path_of_pynvml())
    return pynvml


def _path_of_pynvml() -> str:
    spec = find_spec("pynvml")
    assert spec is not None
    return spec.origin or str(spec.submodule_search_locations)


def ask(nvml: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Return the answer, or None if this GPU, driver or user has none."""
    try:
        return function(*args)
    except nvml.NVMLLibraryMismatchError:  # the driver is older than the call
        return None
    except nvml.NVMLError as error:
        if lost := _lost(nvml, error):
            raise lost from None
        return None


def unreadable(nvml: Any, name: str, error: Exception) -> NvmlError:
    """Return the fault of one of several GPUs, named as in ``GPU 1``."""
    if isinstance(error, GpuLostError) or _lost(nvml, error):
        return GpuLostError(
            f"{name} no longer answers: reset it with `nvidia-smi --gpu-reset`, or reboot, or pick"
            " another with CUDA_VISIBLE_DEVICES"
        )
    return NvmlError(
        f"{name} cannot be read (NVML: {error}): see what `nvidia-smi` says, or pick another with"
        " CUDA_VISIBLE_DEVICES"
    )


def _lost(nvml: Any, error: Exception) -> GpuLostError | None:
    if getattr(error, "value", None) in (
        nvml.NVML_ERROR_GPU_IS_LOST,
        nvml.NVML_ERROR_RESET_REQUIRED,
    ):
        return GpuLostError(
            "the GPU no longer answers: reset it with `nvidia-smi --gpu-reset`, or reboot"
        )
    return None
