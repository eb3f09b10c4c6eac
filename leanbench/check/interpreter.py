"""Kernels that Triton's interpreter runs on a machine without a GPU."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from leanbench.core.errors import UserError
from leanbench.core.kernel import Kernel
from leanbench.core.registry import kernel, kernels
from leanbench.kernels.mla.configs import MlaConfig

#: The package of the libraries' kernels, and those that torch also has for the CPU.
_LIBRARIES = "leanbench.kernels.libraries"
_LIBRARIES_ON_CPU = ("standard", "torch_flash", "torch_flex", "torch_math")


def runs_as(name: str, interpreted: bool) -> str:
    """Return the kernel that runs for `name`; the interpreter runs only Triton implementations."""
    in_triton = f"{name}_triton"
    return in_triton if interpreted and in_triton in kernels() else name


def refuse_cuda(names: Iterable[str], why: str, remedy: str) -> None:
    """Reject kernels that exist only in CUDA C++ if there is only the interpreter.

    Args:
        why: Why there is no GPU, as a clause.
        remedy: How to get one, such as "use a machine with a GPU".

    Raises:
        UserError: `names` has one.
    """
    rejected = [name for name in names if _is_cuda_alone(kernel(name))]
    if not rejected:
        return
    verbs = ("is", "needs") if len(rejected) == 1 else ("are", "need")
    stand_ins = [f"{name.removesuffix('_cuda')}_triton" for name in rejected]
    known = [name for name in stand_ins if name in kernels()]
    fix = f"check {','.join(known)} instead, or {remedy}" if known else remedy
    raise UserError(
        f"{', '.join(rejected)} {verbs[0]} CUDA C++ and {verbs[1]} a GPU: {why}, and Triton's"
        f" interpreter runs Triton kernels alone; {fix}"
    )


def refuse_libraries(names: Iterable[str], why: str, remedy: str) -> None:
    """Reject kernels of libraries that run only on GPUs; arguments as of `refuse_cuda`.

    Raises:
        UserError: `names` has one.
    """
    rejected = [name for name in names if _is_library_on_gpu(name)]
    if not rejected:
        return
    are, it = "is a library's kernel and needs", "it"
    if len(rejected) > 1:
        are, it = "are libraries' kernels and need", "them"
    raise UserError(f"{', '.join(rejected)} {are} a GPU: {why}; leave {it} out, or {remedy}")


def skipped_cuda(names: Iterable[str]) -> str | None:
    """Return a clause about skipped CUDA C++ implementations, or None."""
    both = [
        name
        for name in names
        if "cuda" in {config.implementation for config in kernel(name).config_types}
    ]
    if not both:
        return None
    return (
        f"Of {', '.join(both)} the interpreter runs the Triton kernels alone: the CUDA C++ ones"
        " need a GPU and are skipped"
    )


def _is_library_on_gpu(name: str) -> bool:
    is_library = type(kernel(name)).__module__.startswith(_LIBRARIES)
    return is_library and name not in _LIBRARIES_ON_CPU


def _is_cuda_alone(target: Kernel[Any]) -> bool:
    return target.implementation == "cuda" or MlaConfig in target.config_types
