"""Common setup of all tests: the interpreter without a GPU, skips with a reason, and the depth."""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import shutil
import sys
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from depth import DEEP, EXAMPLES
from hypothesis import settings

# Width of messages and tables without a terminal.
os.environ.pop("COLUMNS", None)

# Triton decides when a kernel is defined: before the import of any test module, and identically in
# every pytest-xdist worker.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

if os.environ.get("TRITON_INTERPRET") == "1":
    _interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    _patch_lang, _language = _interpreter._patch_lang, _interpreter.tl

    @cache
    def _languages_of(function: Any) -> list[Any]:
        values = function.__globals__.values()
        languages = (_language, _language.core)
        return [language for language in languages if any(language is value for value in values)]

    # Triton's interpreter patches its language for every call of a device function, which takes a
    # third of the time. A patched language stays patched. `load` represents all functions.
    def _patch_lang_once(function: Any) -> Any:
        if any(_language.core.is_builtin(own.load) for own in _languages_of(function)):
            return _patch_lang(function)
        return _interpreter._LangPatchScope()

    _interpreter._patch_lang = _patch_lang_once

    # For every operation, the interpreter builds a table of all dtypes to look up one.
    _dtype_of, _known_dtypes = _interpreter._get_np_dtype, {}

    def _get_np_dtype_once(type: Any) -> Any:
        name = type.scalar.name
        if name not in _known_dtypes:
            _known_dtypes[name] = _dtype_of(type.scalar)
        return _known_dtypes[name]

    _interpreter._get_np_dtype = _get_np_dtype_once

    # Sums and products of integers are also computed in int64, for an assertion that only `debug`
    # enables: another third.
    _builder = _interpreter.interpreter_builder
    _builder.options = replace(_builder.options, sanitize_overflow=_builder.options.debug)

# Tensors are small here: threads would wait for each other and for those of other processes.
torch.set_num_threads(1)

# Processes started by tests reuse the byte code compiled by the first of them.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# No test turns the machine off, so files need not reach the disk.
os.fsync = lambda descriptor: None

# The user's tuned configs and calibrations have no effect; tests of tuned configs enable them.
os.environ["LEANBENCH_CONFIGS"] = "off"
os.environ["LEANBENCH_HOME"] = os.path.join(tempfile.gettempdir(), "leanbench-tests-no-such-home")

# CUDA kernels are compiled once for all tests; workers of pytest-xdist inherit the folder.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["LEANBENCH_CACHE"] = tempfile.mkdtemp(prefix="leanbench-tests-cache-")
    atexit.register(shutil.rmtree, os.environ["LEANBENCH_CACHE"], ignore_errors=True)

# No deadline: the first example of a test pays for imports. Examples are the same every time,
# except in a deep run, so a failure of `make test` comes from a change.
settings.register_profile("leanbench", deadline=None, max_examples=EXAMPLES, derandomize=not DEEP)
settings.load_profile("leanbench")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not DEEP:
        deep = [item for item in items if item.get_closest_marker("deep")]
        config.hook.pytest_deselected(items=deep)
        items[:] = [item for item in items if not item.get_closest_marker("deep")]
    reason = _why_no_gpu()
    for item in items:
        if reason is not None and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """Exclude shared objects from collections, which measuring triggers.

    Python's own collections after every 700 objects are unnecessary.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


@pytest.fixture(autouse=True)
def _no_launches_of_other_tests() -> None:
    """Let the C path of calls know no launch at the start of a test."""
    fast = sys.modules.get("leanbench.attention.fast")
    if fast is not None:
        fast.clear()


@pytest.fixture
def device() -> str:
    """Return the device of kernels in these tests."""
    return "cuda" if _why_no_gpu() is None else "cpu"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a user's folder; enable files of timings, with no user's or shipped ones."""
    from leanbench.kernels.lean import cuda_settings

    from leanbench.configs import store

    (tmp_path / "shipped").mkdir()
    monkeypatch.setattr(store, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setenv("LEANBENCH_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("LEANBENCH_CONFIGS", raising=False)
    monkeypatch.setattr(store, "_warned", set())
    monkeypatch.setattr(cuda_settings, "_measured", {})
    return tmp_path / "home"


def _why_no_gpu() -> str | None:
    if not torch.cuda.is_available():
        return "needs an NVIDIA GPU that torch can use, there is none here"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "needs kernels on the GPU, TRITON_INTERPRET=1 keeps them in the interpreter"
    return None
