"""What `leanbench sweep` prints of rows with warnings, energy, occupancy and a warm L2."""

import re
from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest
from example_rows import row as row_of
from example_rows import show_rows

from leanbench.cli import output
from leanbench.cli.document import LINES
from leanbench.cli.progress import SweepProgress
from leanbench.core.problem import AttentionProblem
from leanbench.records.row import Row
from leanbench.report.facts.problems import ROWS
from leanbench.run.cells import Cell


def row(
    kernel: str, latency_us: float | None, context: int = 1024, **fields: Any
) -> dict[str, Any]:
    shared = {"source": "measured", "status": "ok", "reason": None, "cache": "cold"}
    problem = AttentionProblem(1, 8, 8, context, 64).to_dict()
    taken = {"problem": problem, "kernel": kernel, "latency_us": latency_us, "warnings": None}
    return {**shared, **taken, **fields}


def ended(kernel: str, latency_us: float | None, **fields: Any) -> Row:
    return row_of("cell", **row(kernel, latency_us, **fields))


def lines_of(capsys: pytest.CaptureFixture[str], rows: list[dict[str, Any]]) -> list[str]:
    show_rows(rows)
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def timed(context: int = 1024, **latencies_us: float) -> list[dict[str, Any]]:
    return [row(name, us, context) for name, us in latencies_us.items()]


INTERVAL: dict[str, Any] = {"latency_ci_low_us": 99.8, "latency_ci_high_us": 100.1}
ENERGY: dict[str, Any] = {"energy_mj": 4.0, "energy_floor_mj": 3.2}
ENERGY |= {"sustained_power_w": 512.4, "sustained_us": 10.46}
#: Rows of the summaries in the snapshot.
SUMMARIES = {
    "a figure per kernel, ratios, and the reason of a failure": [
        row("lean", 10.0, bandwidth_tb_s=2.346, read_floor_share=0.876),
        row("fa2", 25.0),
        row("fixed_split", 9.0),
        row("reference", None, status="timeout", reason="too slow"),
    ],
    "marks beside figures of all widths, and the worst of several warnings": [
        *(row("lean", 10.0**i, 1024 << i, warnings=[f"differs by {3 + i}.5%"]) for i in range(5)),
        *(row("fa2", 25.0, 1024 << i) for i in range(5)),
    ],
    "equal warnings": [row("lean", 10.0 + i, 1024 << i, warnings=["spills"]) for i in range(2)],
    "the schedule of the stream-K kernel": [
        row("fa2", 9.0, decomposition="one_cta_per_tile", schedule="one CTA a tile"),
        row("lean", 10.0, decomposition="stream_k", schedule="stream-K"),
        row("lean", 11.0, 2048, decomposition="stream_k", schedule="equal splits"),
        row("lean", 12.0, 4096, decomposition="stream_k", schedule=None),
    ],
    "kernels with the same reason": [
        *(
            row(name, None, 1024 << i, status="unsupported", reason=f"{name} has no schedule")
            for name in ("sdpa", "eager")
            for i in range(4)
        ),
        *(row(name, 10.0, warnings=["rough"]) for name in ("lean", "fa2")),
        row("fixed_split", None, status="unsupported", reason="too large"),
    ],
    "cold and warm": [
        row(name, us, cache=cache)
        for cache, us in (("cold", 10.0), ("warm", 2.0))
        for name in ("lean", "fa2")
    ],
    "energy of two kernels of three": [
        row("lean", 10.0, **ENERGY),
        row("fa2", 25.0, energy_mj=1234.5),
        row("fixed_split", 9.0),
    ],
    "no ratio to a suspect or incorrect row": [
        row("lean", 10.0, energy_mj=4.0),
        row("fa2", 25.0, energy_mj=2.0, status="suspect", reason="too fast"),
        row("fixed_split", 5.0, status="incorrect", reason="off by 3"),
    ],
    "occupancy": [
        row("lean", 10.0, sm_busy_share=0.874, quantisation_efficiency=0.97),
        row("fa2", 20.0, sm_busy_share=0.5),
    ],
    "the stopping rule and the cross-check": [
        row("lean", 100.0, crosscheck_us=101.0, **INTERVAL),
        row("fa2", 100.0, crosscheck_us=101.0, status="noisy", reason="wide", **INTERVAL),
    ],
    "a kernel that supports nothing": [
        row("lean", 10.0),
        row("cudnn", None, status="unsupported", reason="no schedule"),
    ],
    "a mark means ahead of all others": [
        *timed(lean=10.0, fa2=10.05, fixed_split=30.0),
        *timed(2048, lean=10.0, fa2=10.2, fixed_split=30.0),
        *timed(4096, lean=10.2, fa2=10.0),
        *timed(8192, lean=10.0),
    ],
    "a run without lean": [
        row("fa2", 20.0, bandwidth_tb_s=2.0, read_floor_share=0.5),
        row("cudnn", 10.0, bandwidth_tb_s=4.0, read_floor_share=0.9),
    ],
}


def test_summaries(capsys, snapshot):
    lines = []
    for name, rows in SUMMARIES.items():
        lines += [f"# {name}", *lines_of(capsys, rows)]
    assert "\n".join(lines) == snapshot


@pytest.mark.parametrize("columns", [30, 80])
def test_sentences_are_wrapped_at_words(capsys, monkeypatch, columns):
    rows = [own for i in range(3) for own in timed(1024 << i, lean=10, fa2=9)]
    whole = [line for line in lines_of(capsys, rows) if line.startswith(("Fastest", "By how"))]
    assert max(map(len, whole)) > 80
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = lines_of(capsys, rows)
    sentences = lines[next(i for i, line in enumerate(lines) if line.startswith("Fastest")) :]
    assert " ".join(sentences) == " ".join(whole)
    assert max(map(len, sentences)) <= columns


def test_a_path_and_a_word_without_a_space_are_never_broken(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    path = "runs/a-folder-with-a-long-name/report.html"
    output.show(f"see {path} for more")
    output.show_whole(f"{path} with a space")
    output.say(f"go on with {path} --resume", whole=True)
    captured = capsys.readouterr()
    assert captured.out.splitlines() == ["see", path, "for more", f"{path} with a space"]
    assert captured.err == f"go on with {path} --resume\n"


class _Terminal(StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("no_color", [False, True])
def test_the_fastest_is_green_on_a_terminal(monkeypatch, no_color):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    terminal = _Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    show_rows(timed(lean=10.0, fa2=20.0))
    written = terminal.getvalue()
    green = re.findall(r"\x1b\[1;32m(.*?)\x1b\[0m", written)
    assert [text.strip() for text in green] == ([] if no_color else ["* 10.0", "Fastest:"])
    assert "Fastest:" in written


def test_1500_rows_do_not_print_1500_lines(capsys):
    wide = "the confidence interval of the median reaches {}% to one side after 60 samples"
    fields = [
        {"reason": wide.format(i / 100), "warnings": [f"w {i}"], "status": "noisy"}
        for i in range(1500)
    ]
    rows = [row("lean", 10.0, 1 + i, **own) for i, own in enumerate(fields)]
    lines = lines_of(capsys, rows)
    warned = [line for line in lines if line.startswith(("noisy:", "!"))]
    assert len(warned) == 2
    assert warned[1].endswith("and 1497 more: at worst, " + wide.format(14.99))
    assert "n1500 " in warned[1].split(",")[0]


def test_many_kinds_of_sentences_are_cut(capsys):
    kinds = [row("lean", None, status="crashed", reason="x" * (1 + i)) for i in range(LINES + 7)]
    lines = lines_of(capsys, kinds)
    assert sum(line.startswith("crashed:") for line in lines) == LINES
    assert "and 7 more lines like these, see the report" in lines


@pytest.mark.parametrize(("columns", "tables"), [(200, 1), (90, 2), (50, 3)])
def test_a_narrow_terminal_cuts_no_figure(capsys, monkeypatch, columns, tables):
    monkeypatch.setattr("leanbench.cli.output.PIPED_COLUMNS", columns)
    kernels = "lean fa2 fixed_split fixed_split_oracle cudnn".split()
    more = {"bandwidth_tb_s": 4.25, "read_floor_share": 0.9}
    rows = [
        row(name, 123456.7 + i, 1024 << n, **more) for n in (0, 1) for i, name in enumerate(kernels)
    ]
    lines = lines_of(capsys, rows)
    lines = lines[: lines.index("")]
    assert max(map(len, lines)) <= columns
    assert "…" not in "".join(lines)
    # Every figure is printed once and whole, in several tables if necessary.
    of_one = [word for line in lines if line.startswith("n1024") for word in line.split()]
    figures = [word for word in of_one if word not in ("n1024", "*")]
    assert figures == [*(f"{123456.7 + i:.1f}" for i in range(5)), *["1.00x"] * 4, "4.25", "90%"]
    assert of_one.count("n1024") == tables
    assert sum("continued" in line for line in lines) == tables - 1


def test_progress_lines_have_warnings_and_reasons_of_failures(capsys):
    """The reasons of refusals are among the results."""
    cell = Cell(AttentionProblem(1, 8, 8, 1024, 64), "lean", "default")
    rows = [
        ended("lean", 10.0, warnings=["one thing", "another"]),
        ended("lean", 10.0, warnings=None),
        ended("fa2", 10.0, warnings=["another", "a third"]),
        ended("lean", None, status="unsupported", reason="no schedule"),
        ended("lean", None, status="crashed", reason="signal 11"),
    ]
    with SweepProgress(len(rows), quiet=False) as progress:
        for finished in rows:
            progress.finished(cell, finished)
    assert [line.partition(": ")[2] for line in capsys.readouterr().err.splitlines()] == [
        "ok 10.0 µs ! one thing ! another",
        "ok 10.0 µs",
        "ok 10.0 µs ! as above ! a third",
        "unsupported",
        "crashed (signal 11)",
    ]


def test_progress_of_repeats_counts_measurements_and_says_what_runs(capsys, monkeypatch):
    clock = SimpleNamespace(now_s=100.0)
    times = SimpleNamespace(monotonic=lambda: clock.now_s)
    monkeypatch.setattr("leanbench.cli.progress.time", times)
    cells = [Cell(AttentionProblem(1, 8, 8, 1024, 64), kernel) for kernel in ("lean", "fa2")]
    with SweepProgress(2, quiet=False, repeat=3) as progress:
        for process in (1, 2, 3):
            clock.now_s += 4.0
            progress.starts(cells[0], process)
            for cell in cells if process == 1 else cells[:1]:
                progress.measured(cell)
        assert progress._bar.tasks[0].completed == 4
        progress.finished(cells[0], ended("lean", 10.0))
        progress.finished(cells[1], ended("fa2", None, status="crashed", reason="signal 11"))
        task = progress._bar.tasks[0]
        assert (task.completed, task.total) == (6, 6)
    # A line every few seconds, from the second problem on.
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition("]")[0] for line in lines] == ["[0/2", "[1/2", "[2/2"]
    assert "2 of 3" in lines[0]


def test_a_long_table_is_cut_and_the_conclusion_stands_last(capsys):
    rows = [own for i in range(100) for own in timed(64 * (1 + i), lean=1, fa2=2)]
    lines = lines_of(capsys, rows)
    assert len([line for line in lines if line.startswith("n")]) == ROWS
    assert f"and {100 - ROWS} more, see the rows in runs/example" in lines
    assert lines[-2].startswith("Fastest: lean is ahead of all others on 100 of 100 problems")
