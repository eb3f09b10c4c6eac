"""Where things are: the rooms next to the package (in the wheel under `_shipped`, in a checkout at
its top), and what leanbench keeps for its user.
"""

from __future__ import annotations

import os
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
_SHIPPED = _PACKAGE / "_shipped"
_ROOT = _SHIPPED if _SHIPPED.is_dir() else _PACKAGE.parent

KERNELS = _ROOT / "kernels"
SWEEPS = _ROOT / "sweeps"
REPORT_TEMPLATES = _ROOT / "reports" / "templates"


def user_folder() -> Path:
    """The folder of what was tuned and calibrated here: `LEANBENCH_HOME`, or else leanbench in the
    user's data folder (XDG).
    """
    return _folder("LEANBENCH_HOME", "user_data_path")


def cache_folder() -> Path:
    """The folder of what can be made again: `LEANBENCH_CACHE`, or else leanbench in the user's
    cache folder (XDG).
    """
    return _folder("LEANBENCH_CACHE", "user_cache_path")


def _folder(variable: str, default: str) -> Path:
    """The folder that an environment variable names, or that platformdirs has; absolute."""
    if own := os.environ.get(variable):
        return Path(own).expanduser().absolute()
    import platformdirs

    folder: Path = getattr(platformdirs, default)("leanbench", appauthor=False)
    return folder.absolute()
