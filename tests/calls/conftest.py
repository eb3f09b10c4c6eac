"""Kernels that take every call."""

from __future__ import annotations

import pytest
from every_kind import take_every_kind, take_latent_calls

from leanbench.attention.call import Call
from leanbench.core.inputs import AttentionInputs


@pytest.fixture
def prepared_for(monkeypatch: pytest.MonkeyPatch) -> list[AttentionInputs]:
    """Replace `lean` by a kernel for everything; return the inputs of prepared launches."""
    return take_every_kind(monkeypatch)


@pytest.fixture
def latent(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Replace `lean_mla` in the same way; return the calls that reach it."""
    return take_latent_calls(monkeypatch)
