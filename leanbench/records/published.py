"""Published rows: a small file of all rows timed in `reports/`, made by tools/published.py."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from leanbench.core.problem import AttentionProblem
from leanbench.records.reading import Run, fastest

PUBLISHED = Path(__file__).with_suffix(".jsonl.gz")


@dataclass(frozen=True)
class PublishedRun:
    #: Path below `reports/`, or of a run that was made here.
    name: str
    #: Catalogue name.
    gpu: str
    #: ISO 8601.
    day: str
    #: Hash of the kernels' sources; None for runs from before it was recorded.
    kernels: str | None


@dataclass(frozen=True)
class PublishedRow:
    """The fastest timed row of a kernel on a problem in a run."""

    run: PublishedRun
    problem: AttentionProblem
    kernel: str
    latency_us: float
    #: 95% confidence interval of the median.
    low_us: float | None = None
    high_us: float | None = None
    read_floor_us: float | None = None
    #: Package and version of a third-party kernel.
    library: str | None = None
    #: Fastest mode of a kernel that chooses among several.
    mode: str | None = None
    #: GPU kernels of one call.
    launches: int | None = None
    is_noisy: bool = False

    @property
    def floor_share(self) -> float | None:
        return None if self.read_floor_us is None else self.read_floor_us / self.latency_us


def rows_of(run: Run, name: str) -> list[PublishedRow]:
    """Return the fastest timed row of each kernel and problem of a run, in the run's order."""
    environment = next(iter(run.environments.values()), {})
    about = PublishedRun(
        name,
        str(run.section("gpu").get("name")),
        str(run.manifest.get("created"))[:10],
        environment.get("kernels"),
    )
    return [
        PublishedRow(
            about,
            problem,
            row.kernel,
            row.latency_us or 0.0,
            row.latency_ci_low_us,
            row.latency_ci_high_us,
            row.read_floor_us,
            row.library,
            (row.config or {}).get("mode"),
            len(row.gpu_kernels) if row.gpu_kernels else None,
            row.status == "noisy",
        )
        for (problem, _), row in fastest(run.results).items()
    ]


@cache
def published() -> tuple[PublishedRow, ...]:
    """Return the published rows in the order of their runs."""
    first, *others = gzip.decompress(PUBLISHED.read_bytes()).splitlines()
    runs = [PublishedRun(**fields) for fields in json.loads(first)]
    rows = []
    for number, problem, fields in map(json.loads, others):
        of = runs[number], AttentionProblem.from_dict(problem)
        rows += [PublishedRow(*of, **row) for row in fields]
    return tuple(rows)
