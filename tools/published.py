"""Make the file of published rows that comes with leanbench from the runs in `reports/`.

    python tools/published.py            # exit 1 if the file is not what the runs make
    python tools/published.py --write    # write it

It has the fastest timed row of each kernel, problem and run: enough for `leanbench lookup` and
`leanbench recommend`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from leanbench.core.problem import AttentionProblem
from leanbench.records.manifest import RESULTS
from leanbench.records.published import PUBLISHED, PublishedRow, rows_of
from leanbench.records.reading import read_run
from tools.shipped import update

REPORTS = Path(__file__).resolve().parents[1] / "reports"
_DIGITS = 5


def lines() -> list[str]:
    """Return the lines of the file: the runs, then each problem of a run with its rows."""
    runs = [read_run(path.parent) for path in sorted(REPORTS.rglob(RESULTS))]
    found = [rows_of(run, run.directory.relative_to(REPORTS).as_posix()) for run in runs]
    written = [_line([vars(rows[0].run) for rows in found])]
    for number, rows in enumerate(found):
        by_problem: dict[AttentionProblem, list[PublishedRow]] = {}
        for row in rows:
            by_problem.setdefault(row.problem, []).append(row)
        for problem, timed in by_problem.items():
            written.append(_line([number, problem.to_dict(), [*map(_fields, timed)]]))
    return written


def _fields(row: PublishedRow) -> dict[str, Any]:
    fields = {
        name: _rounded(value) if isinstance(value, float) else value
        for name, value in vars(row).items()
        if name not in ("run", "problem")
    }
    return {name: value for name, value in fields.items() if value not in (None, False)}


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def _line(content: Any) -> str:
    return json.dumps(content, separators=(",", ":"))


def main(words: Sequence[str]) -> int:
    return update(PUBLISHED, "".join(f"{line}\n" for line in lines()), "the runs make", words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
