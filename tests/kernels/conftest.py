"""Fixtures of all kernel tests."""

from __future__ import annotations

import pytest

# Failures of its checks name what differs.
pytest.register_assert_rewrite("lean_on_cpu")

from lean_on_cpu import Cpu


@pytest.fixture(scope="session")
def cpu() -> Cpu:
    """Return a fake GPU; its builds are compiled once."""
    return Cpu()
