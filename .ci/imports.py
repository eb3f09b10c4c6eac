"""Runs the import contracts of pyproject.toml on the rooms by the names that they import each other
by: kernels/ stands at the top of the checkout and is leanbench.kernels at run time, which
`lint-imports` at the top would take for a module without anything in it.

    python .ci/imports.py [CHECKOUT]
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    checkout = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT
    with tempfile.TemporaryDirectory(prefix="leanbench-imports-") as folder:
        lay_out(checkout, Path(folder))
        lint = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
        config = ["--config", str(checkout / "pyproject.toml")]
        return subprocess.run([*lint, *config], cwd=folder, check=False).returncode


def lay_out(checkout: Path, folder: Path) -> None:
    """A tree of links that has every module under its import path."""
    package = folder / "leanbench"
    kernels = package / "kernels"
    kernels.mkdir(parents=True)
    for entry in (checkout / "leanbench").iterdir():
        if entry.stem != "kernels":
            (package / entry.name).symlink_to(entry)
    shutil.copy(checkout / "leanbench" / "kernels.py", kernels / "__init__.py")
    for entry in (checkout / "kernels").iterdir():
        (kernels / entry.name).symlink_to(entry)


if __name__ == "__main__":
    sys.exit(main())
