"""Layout of a checkout: no room is a package, and commands start immediately."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("kernels", "sweeps", "reports")


def test_no_room_is_a_package():
    for room in ROOMS:
        assert (ROOT / room).is_dir()
        assert not (ROOT / room / "__init__.py").exists()


def test_another_distributions_package_wins_over_the_checkout(tmp_path):
    """Python could treat a room as a namespace package, but a real package precedes it anywhere."""
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


#: Modules imported by `leanbench --help`, including the standard library. They dominate its time.
HELP_MODULES = 240
HEAVY = {"torch", "triton", "numpy", "pandas", "pydantic", "jinja2", "pynvml", "scipy"}


def test_help_imports_little_and_nothing_heavy():
    script = (
        "import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr))\n"
        "from leanbench.cli.main import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "--help"], capture_output=True, text=True, check=True
    )
    modules = done.stderr.split()
    packages = {name.partition(".")[0] for name in modules}
    assert "Usage: leanbench" in done.stdout
    assert "typer" in packages
    assert not packages & HEAVY
    assert len(modules) <= HELP_MODULES


#: Files, and modules that they may not import: three above them, and one in a circle.
UP = {
    "leanbench/core/files.py": ["leanbench.kernels.lean.configs"],
    "leanbench/configs/store.py": ["leanbench.records.row"],
    "kernels/lean/configs.py": ["leanbench.measure.protocol", "leanbench.kernels.lean.cuda"],
}


def test_imports_that_go_up_or_round_are_refused(tmp_path):
    """Imports inside a function count, too. At module level a circle would fail immediately."""
    done = imports_with(tmp_path, UP)
    assert done.returncode == 1
    assert re.search("Imports go down BROKEN\nNo circles .* BROKEN", done.stdout)
    for chain in (
        "core.files -> leanbench.kernels.lean.configs",
        "configs.store -> leanbench.records.row",
        "kernels.lean.configs -> leanbench.measure.protocol",
    ):
        assert f"- leanbench.{chain} " in done.stdout
    assert "in leanbench.kernels.lean." in done.stdout
    assert "- .configs -> .cuda " in done.stdout


def test_a_room_without_a_layer_is_refused(tmp_path):
    done = imports_with(tmp_path, {"leanbench/attic.py": ["leanbench.cli"]})
    assert done.returncode == 1
    assert "not listed as layers:\n\n- leanbench.attic\n" in done.stdout


def imports_with(folder: Path, imported: dict[str, list[str]]) -> subprocess.CompletedProcess[str]:
    """Run `.ci/imports.py` on a copy of the sources with these imports in functions."""
    pytest.importorskip("importlinter")
    for room in ("leanbench", "kernels"):
        shutil.copytree(ROOT / room, folder / room, ignore=only_python)
    shutil.copy(ROOT / "pyproject.toml", folder)
    for path, modules in imported.items():
        with (folder / path).open("a") as file:
            file.writelines(f"\n\ndef late():\n    from {module} import X\n" for module in modules)
    command = [sys.executable, ROOT / ".ci" / "imports.py", folder]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def only_python(folder: str, names: list[str]) -> list[str]:
    paths = [Path(folder, name) for name in names]
    return [path.name for path in paths if path.is_file() and path.suffix != ".py"]


COMPLETE = (
    "from leanbench.cli import completion; [getattr(completion, f'{name}_names')('') for name in"
    " ('kernel', 'gpu', 'model', 'sweep', 'run')]"
)


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        ("import leanbench.cli.compare", HEAVY | {"rich.table"}),
        ("import leanbench.cli.report, leanbench.report", HEAVY),
        (f"import leanbench.cli.main; {COMPLETE}", HEAVY),
        ("import leanbench.gpu.nvml, leanbench.gpu.catalogue", {"torch", "pynvml"}),
        ("import leanbench.measure.energy", {"torch", "pynvml", "numpy"}),
        ("import leanbench.compile.nvrtc", {"cuda", "torch", "triton", "numpy"}),
    ],
)
def test_what_loads_slowly_is_imported_where_it_is_used(code, heavy):
    code = f"{code}; import sys; print(*sorted({heavy!r} & {{*sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
