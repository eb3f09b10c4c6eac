"""The wheel: one top-level package with the rooms inside, compatible with another distribution's
`kernels`.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


COMPILED = "leanbench/attention/_fast.abi3.so"


def built(folder: Path, **variables: str) -> Path:
    """Build the wheel of this checkout from a copy, so that the checkout does not change."""
    copy = folder / "leanbench"
    skipped = shutil.ignore_patterns(
        ".*", "runs", "build", "dist", "__pycache__", "*.egg-info", "node_modules"
    )
    shutil.copytree(ROOT, copy, ignore=skipped)
    out = copy.parent / "wheel"
    words = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(out)]
    build = subprocess.run(
        [*PIP, *words, str(copy)], env={**os.environ, **variables}, capture_output=True, text=True
    )
    assert build.returncode == 0, build.stderr
    (wheel,) = out.glob("leanbench-*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return built(tmp_path_factory.mktemp("checkout"))


@pytest.fixture(scope="module")
def pure_wheel(tmp_path_factory) -> Path:
    """Build the wheel where there is no compiler."""
    return built(tmp_path_factory.mktemp("pure"), PATH="/nowhere")


def wheel_files(wheel: Path) -> list[str]:
    return zipfile.ZipFile(wheel).namelist()


@pytest.fixture(scope="module")
def files(wheel: Path) -> list[str]:
    return wheel_files(wheel)


def test_the_wheel_has_one_top_level_package(files):
    tops = {name.partition("/")[0] for name in files}
    assert tops == {"leanbench", f"leanbench-{importlib.metadata.version('leanbench')}.dist-info"}


#: Folders of the checkout, and their location in the wheel.
SHIPPED = {
    "leanbench": "leanbench",
    "kernels": "leanbench/_shipped/kernels",
    "sweeps": "leanbench/_shipped/sweeps",
    "reports/templates": "leanbench/_shipped/reports/templates",
}


def test_the_wheel_has_every_file_of_its_folders_and_no_other(files):
    """They are sources, CUDA headers, tuned configs, models, calibrations, sweeps and templates.

    What an editor reads is left out.
    """
    here = {
        f"{place}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, place in SHIPPED.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and not path.name.startswith(".")
    }
    names = {name for name in files if ".dist-info/" not in name}
    assert names - {COMPILED} == here - {COMPILED}
    kinds = {Path(name).suffix for name in here}
    assert {".py", ".cu", ".cuh", ".toml", ".json", ".css", ".js", ".j2"} <= kinds


def test_the_wheel_is_for_this_platform_if_it_has_the_c_path(wheel, files):
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    tag = f"cp311-abi3-{platform}" if COMPILED in files else "py3-none-any"
    assert wheel.name.endswith(f"-{tag}.whl")
    assert f"Tag: {tag}\n" in zipfile.ZipFile(wheel).read(metadata(files, "WHEEL")).decode()
    assert (COMPILED in files) == (shutil.which("cc") is not None)


def metadata(files: list[str], name: str) -> str:
    return next(each for each in files if each.endswith(f".dist-info/{name}"))


def test_without_a_compiler_the_wheel_is_pure(pure_wheel):
    files = wheel_files(pure_wheel)
    assert COMPILED not in files
    assert "leanbench/attention/fast.c" in files


def test_an_installed_wheel_finds_its_rooms(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    script = (
        "import leanbench, leanbench.core.paths as p; from leanbench.core.registry import kernels;"
        "from leanbench.run.sweep_file import shipped_sweeps;"
        "print(p.KERNELS, *kernels(), *shipped_sweeps())"
    )
    # The extracted wheel precedes the checkout on the path.
    own = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", script]
    printed = subprocess.check_output(command, cwd=tmp_path, env=own, text=True)
    folder, *names = printed.split()
    assert folder == str(tmp_path / "leanbench" / "_shipped" / "kernels")
    assert {"lean", "fa2", "fixed_split", "reference", "smoke", "paper-fig7a"} <= set(names)


#: A distribution with the name `kernels`, like Hugging Face's: it has this package and this
#: function.
OTHERS = "def get_kernel(name):\n    return f'kernel {name} of another distribution'\n"


@pytest.fixture(scope="module")
def others_wheel(tmp_path_factory) -> Path:
    """Build a wheel with the top-level package `kernels`."""
    path = tmp_path_factory.mktemp("others") / "kernels-1.0-py3-none-any.whl"
    files = {
        "kernels/__init__.py": OTHERS,
        "kernels-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: kernels\nVersion: 1.0\n",
        "kernels-1.0.dist-info/WHEEL": (
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        ),
    }
    files["kernels-1.0.dist-info/RECORD"] = "".join(
        f"{name},,\n" for name in [*files, "kernels-1.0.dist-info/RECORD"]
    )
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


class Environment:
    """A virtual environment with only the installed wheels, and dependencies next to pytest."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder / "venv", symlinks=True)
        self.bin = folder / "venv" / "bin"
        self.site = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder / "venv")}))
        # A path file adds the folder after the environment's own, and ignores path files in it. So
        # the checkout, named in one by an editable install, stays out.
        (self.site / "dependencies.pth").write_text(
            "".join(f"{sysconfig.get_path(name)}\n" for name in ("purelib", "platlib"))
        )
        self.elsewhere = folder / "elsewhere"
        self.elsewhere.mkdir()

    def pip(self, *words: str) -> None:
        # Identified by its folder, so that pip sees only this environment; --no-deps, so that it
        # downloads nothing.
        done = subprocess.run(
            [*PIP, "--python", str(self.bin / "python"), *words], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr

    def install(self, *wheels: Path) -> None:
        for wheel in wheels:
            self.pip("install", "--quiet", "--no-index", "--no-deps", str(wheel))

    def run(self, program: str, *words: str, **variables: str) -> str:
        """Return the output of an installed program, started outside the checkout."""
        hidden = ("PYTHONPATH", "LEANBENCH_KERNEL_PATH")
        kept = {name: value for name, value in os.environ.items() if name not in hidden}
        command = [str(self.bin / program), *words]
        done = subprocess.run(
            command,
            cwd=self.elsewhere,
            env={**kept, **variables},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


ASK_BOTH = """
import kernels, leanbench, leanbench.kernels.lean as lean
print(kernels.__file__, kernels.get_kernel("relu"), leanbench.__file__, lean.__file__, sep="\\n")
"""


@pytest.fixture(scope="module")
def environment(wheel, others_wheel, tmp_path_factory) -> Environment:
    """Install both distributions."""
    environment = Environment(tmp_path_factory.mktemp("environment"))
    environment.install(others_wheel, wheel)
    return environment


@pytest.mark.deep
def test_both_own_their_names(environment):
    theirs, answer, ours, room = environment.run("python", "-c", ASK_BOTH).splitlines()
    assert theirs == str(environment.site / "kernels" / "__init__.py")
    assert answer == "kernel relu of another distribution"
    assert ours == str(environment.site / "leanbench" / "__init__.py")
    assert room == str(
        environment.site / "leanbench" / "_shipped" / "kernels" / "lean" / "__init__.py"
    )


ATTEND = """
import torch, leanbench
torch.manual_seed(0)
q, k, v = (torch.randn(1, tokens, 1, 64, dtype=torch.float16) for tokens in (1, 200, 200))
got = leanbench.lean_attn_with_kvcache(q, k, v).double().flatten()
weights = torch.softmax(k[0, :, 0].double() @ q.double().flatten() / 8, 0)
print(leanbench.__file__, float((got - weights @ v[0, :, 0].double()).abs().max()))
"""


@pytest.mark.deep
def test_the_installed_command_and_kernels_work_outside_the_checkout(environment):
    assert "stream_k" in environment.run("leanbench", "list", "kernels")
    options = ("smoke", "--gpu", "h200", "--name", "r", "--quiet")
    # Predicted, even with an H200.
    printed = environment.run("leanbench", "sweep", *options, CUDA_VISIBLE_DEVICES="")
    assert printed.split() == ["runs/r/report.html", "runs/r/report.csv"]
    rows = (environment.elsewhere / "runs" / "r" / "results.jsonl").read_text().splitlines()
    assert len(rows) == 24
    assert all('"status":"ok"' in row for row in rows)
    file, error = environment.run("python", "-c", ATTEND, TRITON_INTERPRET="1").split()
    assert file == str(environment.site / "leanbench" / "__init__.py")
    assert float(error) < 2e-3


@pytest.mark.deep
@pytest.mark.parametrize("name", ["wheel", "pure_wheel"])
def test_an_installed_wheel_needs_no_compiler(name, request, tmp_path):
    """`doctor` names the path of calls, and both paths compute."""
    wheel = request.getfixturevalue(name)
    environment = Environment(tmp_path)
    environment.install(wheel)
    alone = str(environment.bin)
    assert shutil.which("cc", path=alone) is None
    findings = environment.run("leanbench", "doctor", PATH=alone, COLUMNS="200")
    in_c = "calls seen before take the C path"
    not_in_c = "calls take Python's path, not C's: fast.c was not compiled when leanbench was"
    assert (in_c if COMPILED in wheel_files(wheel) else not_in_c) in findings
    printed = environment.run("python", "-c", ATTEND, PATH=alone, TRITON_INTERPRET="1")
    assert float(printed.split()[-1]) < 2e-3
