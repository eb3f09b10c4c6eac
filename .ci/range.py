"""Runs leanbench at both ends of the range of versions: with the oldest of everything that
pyproject.toml names, and with the newest Triton beside the newest libraries, which constraints.txt
pins. torch comes from the environment that this runs in.

The packages of each end go into a folder of their own, ahead of the environment's: nothing that is
installed changes.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: The newest that was released when the range was last tried; README.md names it.
NEWEST_TRITON = "3.9.0"
COMMANDS = (
    "check --interpreter --limit 16",
    "sweep smoke --gpu h200 --quiet",
    "trace h32/8 n4k d128 --gpu h200 --quiet",
    "list gpus",
    "sweep --help",
)


def main() -> None:
    requirements = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    named = [re.match(r"([\w-]+)>=([\w.]+)", requirement) for requirement in requirements]
    bounds = {match[1]: match[2] for match in named if match is not None}
    if len(bounds) != len(requirements):
        sys.exit(f"a dependency of pyproject.toml has no lower bound: {requirements}")
    del bounds["torch"]
    for end, wanted in (
        ("oldest", [f"{name}=={bound}" for name, bound in bounds.items()]),
        ("newest", [f"triton=={NEWEST_TRITON}"]),
    ):
        with tempfile.TemporaryDirectory(prefix=f"leanbench-{end}-") as folder:
            try_end(end, wanted, Path(folder))


def try_end(end: str, wanted: list[str], folder: Path) -> None:
    """Install these requirements into the folder and run the commands with them."""
    began_s = time.monotonic()
    print(f"{end}: installing {' '.join(wanted)}", flush=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*pip, "--target", str(folder / "packages"), *wanted], check=True)
    env = os.environ | {"PYTHONPATH": f"{folder / 'packages'}{os.pathsep}{ROOT}"}
    for command in COMMANDS:
        print(f"{end}: leanbench {command}", flush=True)
        words = [sys.executable, "-m", "leanbench", *command.split()]
        subprocess.run(words, env=env, cwd=folder, check=True)
    print(f"{end}: all passed in {time.monotonic() - began_s:.0f} s", flush=True)


if __name__ == "__main__":
    main()
