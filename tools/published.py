"""Make the file of published rows that comes with leanbench from the runs in `reports/`.

    python tools/published.py            # exit 1 if the file is not what the runs make
    python tools/published.py --write    # write it

It has the fastest timed row of each kernel, problem and run: enough for `leanbench lookup` and
`leanbench recommend`.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from leanbench.records.manifest import RESULTS
from leanbench.records.published import PUBLISHED
from leanbench.records.reading import Run, fastest, read_run
from leanbench.records.row import Row

REPORTS = Path(__file__).resolve().parents[1] / "reports"
_DIGITS = 5


def lines() -> list[str]:
    """Return the lines of the file: the runs, then each problem of a run with its rows."""
    runs = [read_run(path.parent) for path in sorted(REPORTS.rglob(RESULTS))]
    written = [_line([_about(run) for run in runs])]
    for number, run in enumerate(runs):
        rows: dict[Any, list[Row]] = {}
        for (problem, _), row in fastest(run.results).items():
            rows.setdefault(problem, []).append(row)
        for problem, timed in rows.items():
            fields = [number, problem.to_dict(), [*map(_fields, timed)]]
            written.append(_line(fields))
    return written


def _about(run: Run) -> dict[str, Any]:
    (environment, *_) = run.environments.values()
    return {
        "name": run.directory.relative_to(REPORTS).as_posix(),
        "gpu": run.section("gpu")["name"],
        "day": str(run.manifest["created"])[:10],
        "kernels": environment.get("kernels"),
    }


def _fields(row: Row) -> dict[str, Any]:
    figures = {
        "latency_us": row.latency_us,
        "low_us": row.latency_ci_low_us,
        "high_us": row.latency_ci_high_us,
        "read_floor_us": row.read_floor_us,
    }
    fields = {
        "kernel": row.kernel,
        **{name: _rounded(value) for name, value in figures.items() if value is not None},
        "library": row.library,
        "mode": (row.config or {}).get("mode"),
        "launches": len(row.gpu_kernels) if row.gpu_kernels else None,
        "is_noisy": row.status == "noisy" or None,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def _line(content: Any) -> str:
    return json.dumps(content, separators=(",", ":"))


def main(words: Sequence[str]) -> int:
    text = "".join(f"{line}\n" for line in lines())
    if PUBLISHED.exists() and gzip.decompress(PUBLISHED.read_bytes()).decode() == text:
        return 0
    if "--write" in words:
        PUBLISHED.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
        return 0
    print(f"{PUBLISHED.name} is not what the runs make: run `python tools/published.py --write`")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
