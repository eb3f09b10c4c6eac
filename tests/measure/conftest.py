"""Fixtures of all measuring tests."""

import pytest
from pretended_gpu import PretendedGpu, pretend


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> PretendedGpu:
    """Return the fake H200 that takes the place of torch's GPU 0."""
    return pretend(monkeypatch)
