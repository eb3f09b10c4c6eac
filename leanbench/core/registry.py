"""Registry of kernels.

A family is a folder in `kernels/` (or in a folder of `LEANBENCH_KERNEL_PATH`) with an `__init__.py`
that lists its kernels in `KERNELS`. It must import fast: `prepare` loads torch and triton.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import pkgutil
import traceback
from functools import cache
from pathlib import Path
from typing import Any

from leanbench.core.errors import UserError, nearest
from leanbench.core.kernel import Kernel
from leanbench.core.paths import KERNELS

#: Warnings of the latest search, see `kernel_warnings`.
_warnings: list[str] = []


@cache
def kernels() -> dict[str, Kernel[Any]]:
    """Return every kernel by name, in a stable order, except those of families that cannot be
    loaded.

    Raises:
        UserError: Two kernels have the same name.
    """
    _warnings.clear()
    folders = list(importlib.import_module("leanbench.kernels").__path__)
    registered: dict[str, Kernel[Any]] = {}
    used = {os.path.abspath(KERNELS)}
    for module in sorted(pkgutil.iter_modules(folders), key=lambda module: module.name):
        warned = len(_warnings)
        family = _family(module.name) if module.ispkg else []
        for name, kernel in family:
            if name in registered:
                raise UserError(f"two kernels are called {name!r}: rename one of them")
            registered[name] = kernel
        if family or len(_warnings) > warned:
            used.add(os.path.abspath(getattr(module.module_finder, "path", "")))
    unused = [Path(folder) for folder in folders if os.path.abspath(folder) not in used]
    _warnings.extend(map(_why_no_kernel, unused))
    return registered


def kernel_warnings() -> list[str]:
    """Return a sentence without its full stop for each family that cannot be loaded, and for each
    folder of `LEANBENCH_KERNEL_PATH` without a kernel.
    """
    kernels()
    return list(_warnings)


def _why_no_kernel(folder: Path) -> str:
    shipped = [module.name for module in pkgutil.iter_modules([str(KERNELS)]) if module.ispkg]
    shadowed = [name for name in shipped if (folder / name / "__init__.py").is_file()]
    if not folder.is_dir():
        why = "it is not a folder"
    elif (folder / "__init__.py").is_file():
        why = f"it is a family's own folder, so name the one above, {folder.resolve().parent}"
    elif shadowed:
        why = f"leanbench has a family {shadowed[0]} already, so rename that folder"
    else:
        why = "a folder in it needs an __init__.py that lists its kernels in KERNELS"
    return f"{folder}, of LEANBENCH_KERNEL_PATH, holds no kernel: {why}"


def _family(name: str) -> list[tuple[str, Kernel[Any]]]:
    """Return the kernels of a family, by name. Code that fails gives none and a warning."""
    module = f"leanbench.kernels.{name}"
    try:
        family = getattr(importlib.import_module(module), "KERNELS", ())
        return [(kernel.name, kernel) for kernel in family]
    except (Exception, SystemExit) as error:
        spec = importlib.util.find_spec(module)
        message = (str(error).strip().splitlines() or [""])[0]
        where = spec.origin if spec and spec.origin else module
        # The message of a SyntaxError has the line, and no frame is the file's.
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == where]
        at = f", line {lines[-1]}," if lines else ""
        error_text = f"{type(error).__name__}{': ' if message else ''}{message}"
        _warnings.append(
            f"{where}{at} cannot be loaded ({error_text}), so its kernels are left out"
        )
        return []


def kernel(name: str) -> Kernel[Any]:
    """Return the kernel of that name.

    Raises:
        UserError: There is none.
    """
    known = kernels()
    if name not in known:
        there_is = nearest(name, known, "`leanbench list kernels`")
        raise UserError("; ".join([*_warnings, f"there is no kernel {name!r}, {there_is}"]))
    return known[name]
