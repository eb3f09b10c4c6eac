"""`leanbench merge`, and the flags of commands that use many machines."""

import json
from pathlib import Path
from typing import Any

import pytest
from cli.running import printed

AXES = "--heads 8 --head-dim 64 --context 1k:3k:+1k --kernels lean,fa2 --gpu h200 --no-report -q"


def invoke(words: str, tmp_path: Path) -> None:
    printed(*words.split(), "--out", str(tmp_path))


def figures(path: Path) -> list[dict[str, Any]]:
    """Return the rows without times and ids."""
    rows = [json.loads(line) for line in (path / "results.jsonl").read_text().splitlines()]
    when = ("time", "wall_s", "run_id")
    return [{name: row[name] for name in row if name not in when} for row in rows]


@pytest.mark.deep
def test_two_shards_merged_are_one_run(tmp_path):
    invoke(f"sweep {AXES} --name whole", tmp_path)
    for shard in "12":
        invoke(f"sweep {AXES} --name s{shard} --shard {shard}/2", tmp_path)
    assert len(figures(tmp_path / "s1")) == 4
    both = tmp_path / "both"
    shown = printed("merge", str(tmp_path / "s2"), str(tmp_path / "s1"), "--out", str(both))
    assert shown.split() == [str(both / name) for name in ("report.html", "report.csv")]
    assert figures(tmp_path / "both") == figures(tmp_path / "whole")
    manifests = [
        json.loads((tmp_path / name / "manifest.json").read_text()) for name in ("both", "whole")
    ]
    own = ("name", "id", "created", "merged")
    both, whole = ({key: of[key] for key in of if key not in own} for of in manifests)
    assert both == whole
    assert len((tmp_path / "both" / "report.csv").read_text().splitlines()) == 7
