"""The fake GPU of the measuring tests, for kernels that cheat."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "measure"))

from pretended_gpu import PretendedGpu, pretend


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> PretendedGpu:
    """Return the fake H200 that takes the place of torch's GPU 0."""
    return pretend(monkeypatch)
