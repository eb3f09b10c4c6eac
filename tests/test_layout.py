"""The rule of the layout in a checkout: no room is a package, and a command that answers at
once.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = ("kernels", "sweeps", "reports")


def test_no_room_is_a_package():
    for room in ROOMS:
        assert (ROOT / room).is_dir()
        assert not (ROOT / room / "__init__.py").exists()


def test_another_distributions_package_wins_over_the_checkout(tmp_path):
    """In a checkout Python could take a room for a namespace package, but a real package comes
    first wherever it is.
    """
    for room in ROOMS:
        (tmp_path / room).mkdir()
        (tmp_path / room / "__init__.py").write_text("WHOSE = 'theirs'\n")
    script = f"import sys; sys.path.append({str(tmp_path)!r})\n"
    script += "import kernels, sweeps, reports, leanbench.kernels.lean\n"
    script += "print(kernels.WHOSE, sweeps.WHOSE, reports.WHOSE)"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["theirs"] * 3


def test_help_answers_at_once():
    def seconds() -> float:
        begun = time.perf_counter()
        script = "from leanbench.cli.main import main; main()"
        subprocess.run([sys.executable, "-c", script, "--help"], capture_output=True, check=True)
        return time.perf_counter() - begun

    assert min(seconds() for _ in range(3)) < 0.5


def test_the_command_line_imports_nothing_heavy():
    script = (
        "import sys, leanbench.cli.main; print(*sorted({name.partition('.')[0] for name in"
        " sys.modules}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    loaded = set(done.stdout.split())
    assert "typer" in loaded
    assert not loaded & {
        "torch",
        "triton",
        "numpy",
        "pandas",
        "pydantic",
        "jinja2",
        "pynvml",
    }
