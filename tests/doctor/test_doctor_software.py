"""Versions, environment variables, folders and libraries."""

import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import leanbench
from leanbench.attention import fast
from leanbench.doctor import software
from leanbench.gpu.catalogue import find
from leanbench.gpu.local import Target


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in [*software._FALSIFYING, "TRITON_HOME", "TRITON_CACHE_DIR"]:
        monkeypatch.delenv(name, raising=False)


def test_leanbench_and_its_commit(machine, monkeypatch):
    assert software.leanbench_version(machine).values["leanbench"] == leanbench.__version__
    commit = "0123456789abcdef0123456789abcdef01234567"
    versions: dict[str, str | None] = {"leanbench": "1.2.3", "kernels": "ab12"}
    monkeypatch.setattr("leanbench.records.environment.predicted_environment", lambda: versions)
    for stated, text in (
        (f"{commit}+changes", " commit 0123456789ab+changes,"),
        (commit, " commit 0123456789ab,"),
        (None, ""),
    ):
        versions["commit"] = stated
        assert software.leanbench_version(machine).text == f"leanbench 1.2.3,{text} kernels ab12"


NO_CUDA = "there is an NVIDIA H200 here, but torch 2.11 is built without CUDA"


@pytest.mark.parametrize(
    ("built_for", "note", "status", "text", "fix"),
    [
        ("13.0", None, "ok", f"torch {torch.__version__}, built for CUDA 13.0", None),
        (None, None, "ok", f"torch {torch.__version__}, built without CUDA", None),
        (None, f"{NO_CUDA}: install a CUDA build", "problem", NO_CUDA, "install a CUDA build"),
    ],
)
def test_torch(machine, monkeypatch, built_for, note, status, text, fix):
    monkeypatch.setattr(torch.version, "cuda", built_for)
    machine.target = Target(find("h200"), None if note else 0, note)
    finding = software.torch_version(machine)
    assert (finding.status, finding.text, finding.fix) == (status, text, fix)
    assert finding.values["torch_cuda"] == built_for


@pytest.mark.parametrize("why_not", [None, "fast.c was not compiled when leanbench was installed"])
def test_the_path_of_calls(machine, monkeypatch, why_not):
    monkeypatch.setattr(fast, "why_not", why_not)
    finding = software.path_of_calls(machine)
    assert finding.status == ("ok" if why_not is None else "note")
    assert finding.text.endswith(why_not or "calls seen before take the C path")
    assert finding.values == {"c_path": why_not is None}


def test_nothing_falsifies_the_timing(machine, monkeypatch):
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "0")
    monkeypatch.setenv("TRITON_INTERPRET", "")
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "100")
    assert software.environment_variables(machine).status == "ok"


@pytest.mark.parametrize("name", software._FALSIFYING)
def test_a_variable_that_falsifies_the_timing(machine, monkeypatch, name):
    monkeypatch.setenv(name, "1")
    finding = software.environment_variables(machine)
    assert finding.status == "problem"
    assert finding.text.startswith(f"{name}=1 ")
    assert finding.fix == f"unset {name}"
    assert finding.values == {"variables": {name: "1"}}
    machine.gpus = []
    assert software.environment_variables(machine).status == "note"


def test_the_folder_of_runs(machine, monkeypatch, tmp_path):
    machine.runs = tmp_path / "some" / "runs"
    finding = software.runs_folder(machine)
    assert finding.status == "ok"
    assert finding.text.startswith(f"run directories go to {machine.runs}, ")
    # It is not made yet.
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=120_000_000))
    finding = software.runs_folder(machine)
    assert (finding.status, finding.values["free_bytes"]) == ("problem", 120_000_000)
    assert finding.text.endswith(", 0.12 GB free")

    def refuse(dir: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    finding = software.runs_folder(machine)
    assert finding.status == "problem"
    assert finding.text == f"run directories cannot be written to {machine.runs}: Permission denied"
    assert finding.fix == "give `leanbench sweep` another folder with --out"


@pytest.mark.parametrize(
    ("variable", "below"),
    [("TRITON_CACHE_DIR", "."), ("TRITON_HOME", ".triton/cache"), ("HOME", ".triton/cache")],
)
def test_the_triton_cache_is_where_triton_has_it(machine, monkeypatch, tmp_path, variable, below):
    monkeypatch.setenv(variable, str(tmp_path))
    assert software.triton_cache(machine).values["folder"] == str(tmp_path / below)


def test_libraries(machine, monkeypatch, tmp_path):
    (tmp_path / "sound_library.py").write_text("")
    (tmp_path / "broken_library.py").write_text(
        "raise ImportError('undefined symbol: _ZN3c10\\nmore')"
    )
    monkeypatch.syspath_prepend(tmp_path)

    def library(module: str, name: str) -> tuple[str, str]:
        finding = software.library(module, name, machine)
        return finding.status, finding.text

    here = "broken-library of unknown version is here; --deep imports it"
    assert library("broken_library", "broken-library") == ("ok", here)
    machine.deep = True
    cannot = "broken-library is installed and cannot be imported: undefined symbol: _ZN3c10"
    assert library("broken_library", "broken-library") == ("note", cannot)
    broken = software.library("broken_library", "broken-library", machine)
    assert broken.fix == "reinstall broken-library"
    assert library("sound_library", "typer")[1].startswith("typer 0.")
    unknown = "sound-library of unknown version can be imported"
    assert library("sound_library", "sound-library") == ("ok", unknown)
