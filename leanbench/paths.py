"""Where the rooms beside the package are: in the wheel under `_shipped`, in a checkout at its top."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
_SHIPPED = _PACKAGE / "_shipped"
_ROOT = _SHIPPED if _SHIPPED.is_dir() else _PACKAGE.parent

KERNELS = _ROOT / "kernels"
SWEEPS = _ROOT / "sweeps"
REPORT_TEMPLATES = _ROOT / "reports" / "templates"
