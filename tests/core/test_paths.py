"""Folders of a user who may have no home folder."""

import os
import pwd
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import platformdirs
import pytest

from leanbench.configs import store
from leanbench.core import paths
from leanbench.core.errors import UserError
from leanbench.gpu.catalogue import find

ROOT = Path(__file__).parents[2]
OWN = f"leanbench-{os.geteuid()}"


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No HOME and no passwd entry; the temporary directory that is left."""

    def unknown(user: object) -> None:
        raise KeyError(user)

    for name in ("HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME", "LEANBENCH_HOME", "LEANBENCH_CACHE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("TRITON_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        # Set first: the variable is taken back even if a test's code sets it.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(pwd, "getpwnam", unknown)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    paths._own_folder.cache_clear()
    return tmp_path


def test_folders_are_in_the_temporary_directory_or_in_paths_of_variables(homeless, monkeypatch):
    assert paths.user_folder() == homeless / OWN / "data"
    assert paths.cache_folder() == homeless / OWN / "cache"
    assert stat.S_IMODE((homeless / OWN).stat().st_mode) == 0o700
    assert paths.is_without_home(paths.user_folder() / "configs" / "h200.json")
    assert not paths.is_without_home(homeless / "export.json")
    monkeypatch.setenv("XDG_DATA_HOME", str(homeless / "xdg"))
    monkeypatch.setenv("LEANBENCH_CACHE", str(homeless / "cache"))
    assert paths.user_folder() == homeless / "xdg" / "leanbench"
    assert paths.cache_folder() == homeless / "cache"
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    (homeless / "leanbench-54321").mkdir(mode=0o700)
    assert paths.private_folder() != homeless / "leanbench-54321"


def test_a_home_in_a_variable_cannot_be_found_either(homeless, monkeypatch):
    for value in ("~/mine", "~nobody-of-that-name/mine"):
        monkeypatch.setenv("LEANBENCH_HOME", value)
        assert paths.user_folder() == homeless / OWN / "data"
    monkeypatch.delenv("LEANBENCH_HOME")
    # Early versions of platformdirs leave the tilde in.
    own = Path("~/.local/share/leanbench")
    monkeypatch.setattr(platformdirs, "user_data_path", lambda *names, **options: own)
    assert paths.user_folder() == homeless / OWN / "data"


def make_link(folder: Path) -> None:
    folder.with_name("theirs").mkdir(mode=0o700)
    folder.symlink_to(folder.with_name("theirs"))


def make_open_folder(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o770)


@pytest.mark.parametrize("make", [make_link, make_open_folder, Path.touch])
def test_a_folder_that_others_can_write_to_is_left_alone(homeless, make):
    make(homeless / OWN)
    folder = paths.user_folder()
    assert folder.parent.parent == homeless
    assert folder.parent.name != OWN
    assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
    # The same one all through the process.
    assert paths.user_folder() == folder


def test_without_a_temporary_directory_nothing_is_found_and_writing_is_refused(
    homeless, monkeypatch
):
    def none() -> str:
        raise FileNotFoundError("no usable temporary directory")

    monkeypatch.setattr(paths, "gettempdir", none)
    monkeypatch.setattr(tempfile, "gettempdir", none)
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert not [file for file in store.all_files() if file.where == "yours"]
    with pytest.raises(UserError, match="LEANBENCH_HOME"):
        store.save(find("h200"), [])


def test_compilers_write_to_the_same_folder(homeless):
    paths.redirect_compiler_caches()
    assert os.environ["TRITON_HOME"] == str(homeless / OWN)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(homeless / OWN / "inductor")


@pytest.mark.parametrize("name", ["HOME", "TRITON_HOME", "TRITON_CACHE_DIR"])
def test_compilers_that_have_a_folder_keep_it(homeless, monkeypatch, name):
    monkeypatch.setenv(name, str(homeless / "theirs" / "new"))
    before = dict(os.environ)
    paths.redirect_compiler_caches()
    assert dict(os.environ) == before


CALL = """
import pwd

def unknown(user):
    raise KeyError(user)

pwd.getpwuid = pwd.getpwnam = unknown
from leanbench import lean_attn_with_kvcache
import torch, triton
from leanbench.compile.nvrtc import cache_folder
from leanbench.configs.lookup import choose
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel
from leanbench.gpu.catalogue import find

q, k, v = (torch.ones(1, tokens, 1, 64, dtype=torch.float16) for tokens in (1, 32, 32))
assert (lean_attn_with_kvcache(q, k, v) == 1).all()
assert choose(kernel("lean"), AttentionProblem(1, 8, 8, 4096, 64), find("h200")).config
print(triton.knobs.cache.dir)
print(cache_folder())
"""


def test_a_call_works(tmp_path):
    (tmp_path / "here").mkdir()
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    environment |= {"TMPDIR": str(tmp_path), "TRITON_INTERPRET": "1"}
    options: dict[str, Any] = {"cwd": tmp_path / "here", "env": environment}
    call = [sys.executable, "-c", CALL]
    done = subprocess.run(call, **options, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / OWN
    assert done.stdout.split() == [str(folder / ".triton" / "cache"), str(folder / "cache")]
    assert not list((tmp_path / "here").iterdir())
