import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from example_runs import WriteRun, manifest


@pytest.fixture
def write_run(tmp_path: Path) -> WriteRun:
    def write(
        rows: Iterable[dict[str, Any]], tail: str = "", folder: str = "run", **fields: Any
    ) -> Path:
        directory = tmp_path / folder
        directory.mkdir()
        (directory / "manifest.json").write_text(json.dumps(manifest(**fields)))
        (directory / "results.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows) + tail
        )
        return directory

    return write


@pytest.fixture
def wrong_by_2_5_percent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's error on every GPU, whatever the shipped calibrations say of theirs."""
    monkeypatch.setattr("leanbench.report.compare.ratios.model_error", lambda gpu, names: 0.025)
