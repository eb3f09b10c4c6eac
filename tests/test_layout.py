"""The rule of the layout: one top-level package, the rooms inside it, and a command that answers at once."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("kernels", "sweeps", "reports")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel of this checkout, built from a copy so that nothing is written into it."""
    copy = tmp_path_factory.mktemp("checkout") / "leanbench"
    skipped = shutil.ignore_patterns(".*", "runs", "build", "dist", "__pycache__", "*.egg-info", "node_modules")
    shutil.copytree(ROOT, copy, ignore=skipped)
    out = copy.parent / "wheel"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps"]
    build = subprocess.run(
        [*pip, "--no-build-isolation", "--wheel-dir", str(out), str(copy)], capture_output=True, text=True
    )
    assert build.returncode == 0, build.stderr
    (found,) = out.glob("leanbench-*.whl")
    return found


@pytest.fixture(scope="module")
def files(wheel: Path) -> list[str]:
    return zipfile.ZipFile(wheel).namelist()


def test_the_wheel_has_one_top_level_package(files):
    tops = {name.partition("/")[0] for name in files}
    assert tops == {"leanbench", f"leanbench-{importlib.metadata.version('leanbench')}.dist-info"}


def test_the_wheel_carries_the_rooms(files):
    shipped = {name.removeprefix("leanbench/_shipped/") for name in files if name.startswith("leanbench/_shipped/")}
    assert {name.partition("/")[0] for name in shipped} == set(ROOMS)
    for pattern in ("kernels/**/*.py", "sweeps/*.toml", "reports/templates/*.html*"):
        here = {str(path.relative_to(ROOT)) for path in ROOT.glob(pattern)}
        assert here, f"nothing matches {pattern} in the checkout"
        assert here <= shipped
    assert not [name for name in files if "__pycache__" in name or name.startswith("leanbench/_shipped/reports/runs")]


def test_an_installed_wheel_finds_its_rooms(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    script = (
        "import leanbench, leanbench.paths as p; from leanbench.registry import kernels;"
        "from leanbench.run.sweep_file import shipped_sweeps;"
        "print(p.KERNELS, *kernels(), *shipped_sweeps())"
    )
    # The extracted wheel comes before the checkout on the path.
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    folder, *names = done.stdout.split()
    assert folder == str(tmp_path / "leanbench" / "_shipped" / "kernels")
    assert {"lean", "fa2", "fixed_split", "reference", "smoke", "paper-fig7a"} <= set(names)


def test_no_room_is_a_package():
    for room in ROOMS:
        assert (ROOT / room).is_dir()
        assert not (ROOT / room / "__init__.py").exists()


def test_the_wheel_provides_no_room_by_its_own_name(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    (tmp_path / "empty").mkdir()
    script = f"import importlib.util as u; print([u.find_spec(name) is None for name in ('leanbench', *{ROOMS!r})])"
    # -S: nothing but the standard library and the wheel.
    done = subprocess.run(
        [sys.executable, "-S", "-c", script],
        cwd=tmp_path / "empty",
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[False, True, True, True]"


def test_another_distributions_package_wins_over_the_checkout(tmp_path):
    """In a checkout Python could take a room for a namespace package, but a real package comes first wherever it is."""
    for room in ROOMS:
        (tmp_path / room).mkdir()
        (tmp_path / room / "__init__.py").write_text("WHOSE = 'theirs'\n")
    script = f"import sys; sys.path.append({str(tmp_path)!r})\n"
    script += "import kernels, sweeps, reports, leanbench.kernels.lean\n"
    script += "print(kernels.WHOSE, sweeps.WHOSE, reports.WHOSE)"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["theirs"] * 3


def test_help_answers_at_once():
    def seconds() -> float:
        begun = time.perf_counter()
        script = "from leanbench.cli.main import main; main()"
        subprocess.run([sys.executable, "-c", script, "--help"], capture_output=True, check=True)
        return time.perf_counter() - begun

    assert min(seconds() for _ in range(3)) < 0.5


def test_the_command_line_imports_nothing_heavy():
    script = "import sys, leanbench.cli.main; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "typer" in loaded
    assert not loaded & {"torch", "triton", "numpy", "pandas", "plotly", "pydantic", "jinja2", "pynvml"}
