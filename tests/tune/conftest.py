from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from kept_examples import gpu, kept

from leanbench.tune import lookup, store
from leanbench.tune.kept import Family


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with nothing kept, nothing shipped either, and kept configs on."""
    (tmp_path / "shipped").mkdir()
    monkeypatch.setattr(store, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setenv("LEANBENCH_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("LEANBENCH_CONFIGS", raising=False)
    monkeypatch.setattr(lookup, "_warned", set())
    monkeypatch.setattr(lookup, "_told", set())
    lookup._entry.cache_clear()
    return tmp_path / "home"


@pytest.fixture
def ship(home: Path) -> Callable[..., None]:
    """Puts a file among those that come with leanbench."""

    def put(*families: Family, name: str = "h200") -> None:
        (store.SHIPPED / f"{name}.json").write_text(kept(*families, of=gpu(name)).model_dump_json())
        lookup._entry.cache_clear()

    return put
