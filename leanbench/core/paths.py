"""Paths of rooms outside the package (in the wheel under `_shipped`), and of the user's files."""

from __future__ import annotations

import os
import stat
from functools import cache
from pathlib import Path
from tempfile import gettempdir, mkdtemp

_PACKAGE = Path(__file__).resolve().parents[1]
_SHIPPED = _PACKAGE / "_shipped"
_ROOT = _SHIPPED if _SHIPPED.is_dir() else _PACKAGE.parent

KERNELS = _ROOT / "kernels"
SWEEPS = _ROOT / "sweeps"
REPORTS = _ROOT / "reports"
REPORT_TEMPLATES = REPORTS / "templates"


def user_folder() -> Path:
    """Return the folder of tuned configs and calibrations.

    That is `LEANBENCH_HOME`, or else leanbench in the user's data folder (XDG). A user without home
    gets `private_folder`.
    """
    return _folder("LEANBENCH_HOME", "user_data_path", "data")


def cache_folder() -> Path:
    """Return the folder of reproducible files: `LEANBENCH_CACHE`, or else the user's cache
    folder.
    """
    return _folder("LEANBENCH_CACHE", "user_cache_path", "cache")


def _folder(variable: str, default: str, name: str) -> Path:
    """Return the absolute folder of an environment variable, or else platformdirs' default."""
    try:
        if value := os.environ.get(variable):
            return Path(value).expanduser().absolute()
        import platformdirs

        folder: Path = getattr(platformdirs, default)("leanbench", appauthor=False)
        return folder.expanduser().absolute()
    except RuntimeError:  # no HOME, and no passwd entry
        return private_folder() / name


def is_without_home(path: Path) -> bool:
    """Return True for a path in `private_folder`, which can be gone after a restart."""
    folder = Path(gettempdir())
    inside = path.relative_to(folder).parts[0] if path.is_relative_to(folder) else ""
    return inside.startswith("leanbench-") and "LEANBENCH_HOME" not in os.environ


def private_folder() -> Path:
    """Return a folder in the temporary directory that no other user can write to.

    A folder of that name that another user made is left alone. This process then gets one of its
    own.
    """
    uid = os.geteuid()
    try:
        folder = Path(gettempdir()) / f"leanbench-{uid}"
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        others_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if stat.S_ISDIR(status.st_mode) and status.st_uid == uid and not others_write:
            return folder
    except OSError:
        pass
    return _own_folder()


@cache
def _own_folder() -> Path:
    try:
        return Path(mkdtemp(prefix="leanbench-"))
    except OSError:
        # Reads find nothing there, writes fail with the writer's message.
        return Path(os.devnull)


def redirect_compiler_caches() -> None:
    """Move the caches of Triton and torch.compile out of a home folder that cannot be written.

    Triton would fail, or create a folder named ``~``. What a variable names stays.
    """
    if os.environ.get("TRITON_HOME") or os.environ.get("TRITON_CACHE_DIR"):
        return
    triton = Path(os.path.expanduser("~"), ".triton")
    if triton.is_absolute() and os.access(nearest_existing(triton), os.W_OK):
        return
    folder = private_folder()
    os.environ["TRITON_HOME"] = str(folder)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))


def nearest_existing(path: Path) -> Path:
    """Return the path, or its nearest parent that exists."""
    return next(parent for parent in (path, *path.parents) if parent.exists())
