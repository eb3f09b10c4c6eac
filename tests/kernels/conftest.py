"""Fixtures of all kernel tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from lean_on_cpu import Cpu

# Its checks are assertions, too: a failure says what differs.
pytest.register_assert_rewrite("lean_on_cpu")


@pytest.fixture(scope="session")
def cpu() -> Cpu:
    """Return a fake GPU; its builds are compiled once."""
    from lean_on_cpu import Cpu

    return Cpu()
