"""The reports in the repository are those of the runs in their folders."""

from collections import Counter
from pathlib import Path

import pytest
from example_runs import data_of

ROOT = Path(__file__).parents[2]
PAGES = ("reports/h200/report.html", "reports/h100/report.html")


@pytest.mark.parametrize("page", PAGES)
def test_a_committed_page_is_of_the_runs_beside_it(page: str) -> None:
    """CONTRIBUTING.md has the command that makes it again."""
    data = data_of((ROOT / page).read_text(encoding="utf-8"))
    columns = [column["name"] for column in data["columns"]]
    column = data["columns"][columns.index("run")]
    places = Counter(row[columns.index("run")] for row in data["rows"])
    shown = {column["texts"][place]: count for place, count in places.items()}
    runs = (ROOT / page).parent.glob("*/results.jsonl")
    assert shown == {path.parent.name: len(path.read_bytes().splitlines()) for path in runs}
