"""What all tests share: the interpreter where there is no GPU, skips with a reason, and how hypothesis runs."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

import pytest
import torch
from hypothesis import settings

# Triton decides when a kernel is defined: before any test module is imported, and alike in every pytest-xdist worker.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# What whoever runs the tests has tuned and calibrated changes nothing; tests of kept configs turn them on.
os.environ["LEANBENCH_CONFIGS"] = "off"
os.environ["LEANBENCH_HOME"] = os.path.join(tempfile.gettempdir(), "leanbench-tests-no-such-home")

# CUDA kernels are compiled once for all tests; the workers of pytest-xdist inherit the folder.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["LEANBENCH_CACHE"] = tempfile.mkdtemp(prefix="leanbench-tests-cache-")
    atexit.register(shutil.rmtree, os.environ["LEANBENCH_CACHE"], ignore_errors=True)

# No deadline: the first example of a test pays for imports.
settings.register_profile("leanbench", deadline=None)
settings.load_profile("leanbench")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = _why_no_gpu()
    for item in items:
        if reason is not None and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def device() -> str:
    """Where kernels run in these tests."""
    return "cuda" if _why_no_gpu() is None else "cpu"


def _why_no_gpu() -> str | None:
    if not torch.cuda.is_available():
        return "needs an NVIDIA GPU that torch can use, there is none here"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "needs kernels on the GPU, TRITON_INTERPRET=1 keeps them in the interpreter"
    return None
