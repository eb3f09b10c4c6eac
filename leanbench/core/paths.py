"""Where things are: the rooms beside the package (in the wheel under `_shipped`, in a checkout at
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
    """What was tuned and calibrated here is kept in it: `LEANBENCH_HOME`, or else leanbench in the
    XDG data folder.
    """
    if home := os.environ.get("LEANBENCH_HOME"):
        return Path(home).expanduser()
    data = Path(os.environ.get("XDG_DATA_HOME", ""))
    # The XDG specification has relative paths ignored.
    return (data if data.is_absolute() else Path.home() / ".local" / "share") / "leanbench"


def cache_folder() -> Path:
    """What can be made again is kept in it: `LEANBENCH_CACHE`, or else leanbench in the XDG cache
    folder.
    """
    if own := os.environ.get("LEANBENCH_CACHE"):
        return Path(own).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "leanbench"
