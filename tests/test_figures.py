"""Documents match the output of tools/figures.py for their templates and the published runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from example_rows import row

from leanbench.core.problem import AttentionProblem
from leanbench.records.manifest import MANIFEST, RESULTS
from leanbench.records.row import SCHEMA_VERSION
from tools import figures

SHORT = AttentionProblem(1, 8, 8, 1024, 64)
LONG = AttentionProblem(2, 8, 2, 65536, 64)
RAGGED = AttentionProblem(2, 8, 8, (512, 4096), 64)


@pytest.mark.parametrize("template", figures.templates(), ids=lambda path: path.name)
def test_a_document_is_what_its_template_makes(template: Path) -> None:
    document = template.with_suffix("").read_text(encoding="utf-8")
    assert document == figures.rendered(template), "run `python tools/figures.py --write`"


def latency(problem: AttentionProblem, kernel: str, us: float, **fields: Any) -> dict[str, Any]:
    taken = {"problem": problem.to_dict(), "kernel": kernel, "latency_us": us, **fields}
    fields = {"source": "measured", "environment": "a", **taken}
    return row(f"{problem.label} {kernel}", **fields).model_dump(mode="json")


#: `lean` is 2x and 0.5x as fast as `fa2`; the fastest library is 0.9x as fast as `lean` on one.
ROWS = [
    latency(SHORT, "lean", 10.0, schedule="equal splits"),
    latency(SHORT, "fa2", 20.0),
    latency(SHORT, "cudnn", 9.0),
    latency(SHORT, "flash_attn_3", 12.0),
    latency(LONG, "lean", 200.0, schedule="stream-K"),
    latency(LONG, "fa2", 100.0, status="noisy", reason="its interval is wide"),
    {**latency(LONG, "cudnn", 1.0), "status": "unsupported", "latency_us": None, "reason": "no"},
    latency(RAGGED, "lean", 30.0, schedule="stream-K"),
]


@pytest.fixture
def reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder of published runs, below an empty repository."""
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    monkeypatch.setattr(figures, "REPORTS", tmp_path / "reports")
    return tmp_path / "reports"


def publish(
    reports: Path,
    name: str = "h200/peers",
    rows: list[dict[str, Any]] = ROWS,
    product: str = "NVIDIA H200",
    day: str = "2026-01-02",
) -> None:
    (reports / name).mkdir(parents=True, exist_ok=True)
    environment = {"gpu_product": product, "kernels": "0123456789ab", "torch": "2.11.0"}
    manifest = {
        "schema_version": SCHEMA_VERSION,
        "name": "peers",
        "created": f"{day}T03:04:05+00:00",
        "source": "measured",
        "environments": {"a": environment},
    }
    (reports / name / MANIFEST).write_text(json.dumps(manifest))
    lines = "".join(f"{json.dumps(fields)}\n" for fields in rows)
    (reports / name / RESULTS).write_text(lines)
    figures._read.cache_clear()


def test_ratios(reports: Path) -> None:
    publish(reports)
    run = figures.runs("h200/peers")
    over = run.ratio("fa2")
    assert over.values == [2.0, 0.5]
    assert (over.count, over.counts) == (2, "1 / 0 / 1")
    assert (over.geomean, over.median) == pytest.approx((1.0, 1.25))
    assert (over.lowest, over.highest) == (0.5, 2.0)
    assert (over.worst.problem, over.best.problem) == (LONG, SHORT)
    assert [(value, problem.problem) for value, problem in over.behind] == [(0.5, LONG)]
    # The fastest library counts.
    assert run.ratio("libraries").values == [0.9]
    library = run.problems[0].fastest("libraries")
    assert library is not None
    assert library.kernel == "cudnn"
    assert run.ratio("flash_attn_3", "lean,fa2").values == [1.2]
    assert run.ended("unsupported", "cudnn") == 1
    # One value is of one problem.
    assert run.one("lean", batch=1) == 10.0
    with pytest.raises(ValueError, match="too many"):
        run.one("lean", batch=2)
    with pytest.raises(ValueError, match="not enough"):
        run.one("fa2", is_ragged=True)


@pytest.mark.parametrize(
    ("conditions", "chosen"),
    [
        ({}, [SHORT, LONG, RAGGED]),
        ({"batch": 2}, [LONG, RAGGED]),
        ({"max_context": (1024, 65536)}, [SHORT, RAGGED]),
        ({"is_ragged": True}, [RAGGED]),
        ({"schedule": "stream-K", "not_is_ragged": True}, [LONG]),
        ({"not_schedule": "stream-K"}, [SHORT]),
        ({"kv_mb": (0, 10)}, [SHORT, RAGGED]),
        ({"batch": 3}, []),
    ],
)
def test_where(reports: Path, conditions: dict[str, Any], chosen: list[AttentionProblem]) -> None:
    publish(reports)
    found = figures.runs("h200/peers").where(**conditions)
    assert [problem.problem for problem in found.problems] == chosen


def test_a_run_line_joins_runs_of_one_provenance(reports: Path) -> None:
    publish(reports)
    publish(reports, "h200/fp8")
    shared = AttentionProblem(1, 8, 8, 1024, 64, parallel="cp:2")
    publish(reports, "h100/scaling", [latency(shared, "lean", 9.0)], "NVIDIA H100", "2026-01-03")
    assert figures.runs("h200/peers").run_line() == (
        "Run: [h200/peers]({reports}/h200/peers): 2026-01-02, NVIDIA H200, kernels 0123456789ab."
    )
    both = figures.runs("h200/peers", "h200/fp8")
    assert figures.run_line(both, figures.runs("h100/scaling"), both) == (
        "Runs: [h200/peers]({reports}/h200/peers), [h200/fp8]({reports}/h200/fp8): 2026-01-02,"
        " NVIDIA H200, kernels 0123456789ab; [h100/scaling]({reports}/h100/scaling): 2026-01-03,"
        " 2 x NVIDIA H100, kernels 0123456789ab."
    )


def test_a_changed_row_changes_the_document(
    reports: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(reports)
    folder = reports.parent / "docs"
    folder.mkdir()
    template = '{% set run = runs("h200/peers") %}\n{{ run.ratio("fa2").lowest | x }} {reports}\n'
    (folder / "results.md.j2").write_text(template)
    assert figures.main([]) == 1
    assert not (folder / "results.md").exists()
    assert figures.main(["--write"]) == 0
    assert (folder / "results.md").read_text() == "0.50x ../reports\n"
    assert figures.main([]) == 0

    publish(reports, rows=[*ROWS[:5], latency(LONG, "fa2", 150.0)])
    capsys.readouterr()
    assert figures.main([]) == 1
    assert capsys.readouterr().out == "differs from its template: docs/results.md\n"
    assert figures.main(["--write"]) == 0
    assert (folder / "results.md").read_text() == "0.75x ../reports\n"


def test_tables_of_a_log(reports: Path) -> None:
    reports.mkdir()
    (reports / "a.txt").write_text("NVIDIA H100 80GB HBM3, kernels 01ab\n2026-01-02\n1 x 5 us\n")
    (reports / "b.txt").write_text("2026-01-03\nNVIDIA H200\n2 x 7 us\n3 x 9 us\n")
    assert figures.table("b.txt", r"(\d) x (\d) us") == [("2", "7"), ("3", "9")]
    assert figures.log_line("a.txt", "b.txt") == (
        "Logs: [a.txt]({reports}/a.txt): 2026-01-02, NVIDIA H100 80GB HBM3, kernels 01ab;"
        " [b.txt]({reports}/b.txt): 2026-01-03, NVIDIA H200."
    )
