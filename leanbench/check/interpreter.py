"""Which kernels Triton's interpreter runs, on a machine without a GPU."""

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
    """The name of the kernel that runs where `name` is asked for: of two implementations, the
    interpreter runs Triton's.
    """
    in_triton = f"{name}_triton"
    return in_triton if interpreted and in_triton in kernels() else name


def refuse_cuda(names: Iterable[str], why: str, remedy: str) -> None:
    """Refuses kernels that are CUDA C++ alone where only the interpreter runs.

    Args:
        why: they have no GPU, as a clause.
        remedy: what gives them one, as in "use a machine with a GPU".

    Raises:
        UserError: there is one among `names`.
    """
    needy = [name for name in names if _is_cuda_alone(kernel(name))]
    if not needy:
        return
    verbs = ("is", "needs") if len(needy) == 1 else ("are", "need")
    stand_ins = [f"{name.removesuffix('_cuda')}_triton" for name in needy]
    known = [name for name in stand_ins if name in kernels()]
    fix = f"check {','.join(known)} instead, or {remedy}" if known else remedy
    raise UserError(
        f"{', '.join(needy)} {verbs[0]} CUDA C++ and {verbs[1]} a GPU: {why}, and Triton's"
        f" interpreter runs Triton kernels alone; {fix}"
    )


def refuse_libraries(names: Iterable[str], why: str, remedy: str) -> None:
    """Refuses libraries' kernels that run on GPUs alone, as `refuse_cuda` does its own.

    Raises:
        UserError: there is one among `names`.
    """
    needy = [name for name in names if _is_library_on_gpu(name)]
    if not needy:
        return
    are, it = "is a library's kernel and needs", "it"
    if len(needy) > 1:
        are, it = "are libraries' kernels and need", "them"
    raise UserError(f"{', '.join(needy)} {are} a GPU: {why}; leave {it} out, or {remedy}")


def skipped_cuda(names: Iterable[str]) -> str | None:
    """A sentence without its full stop on the CUDA C++ implementations of `names`, which the
    interpreter does not run; None where there are none.
    """
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


def _is_cuda_alone(asked: Kernel[Any]) -> bool:
    return asked.implementation == "cuda" or MlaConfig in asked.config_types
