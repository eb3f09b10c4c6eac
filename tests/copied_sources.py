"""A copy of the sources for a test to change, and commands that run in it."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = ("leanbench", "kernels", "sweeps", "reports/templates")
#: Runs commands in one process that imports the copy; prints a line of JSON for each.
DRIVER = """
import json, sys
from typer.testing import CliRunner
from leanbench.cli.main import app
for words in json.loads(sys.argv[1]):
    done = CliRunner().invoke(app, words)
    print(json.dumps([done.exit_code, done.stdout, done.stderr]))
"""


def copy_sources(folder: Path) -> None:
    for room in ROOMS:
        shutil.copytree(ROOT / room, folder / room, ignore=shutil.ignore_patterns("__pycache__"))


def run(copy: Path, *commands: str) -> list[tuple[int, str, str]]:
    """Return (exit code, stdout, stderr) of each command, run in the copy."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LEANBENCH_")}
    own = {
        "PYTHONPATH": str(copy),
        "LEANBENCH_HOME": str(copy / "home"),
        "LEANBENCH_CACHE": str(copy / "cache"),
        "COLUMNS": "200",
        "CUDA_VISIBLE_DEVICES": "",
    }
    words = json.dumps([shlex.split(command) for command in commands])
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, words],
        cwd=copy,
        env={**kept, **own},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]
