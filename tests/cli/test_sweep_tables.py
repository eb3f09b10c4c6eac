"""What `leanbench sweep` prints of rows with warnings, energy, occupancy and a warm L2."""

from __future__ import annotations

import re
from io import StringIO
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
    return {
        "problem": AttentionProblem(1, 8, 8, context, 64).to_dict(),
        "kernel": kernel,
        "source": "measured",
        "status": "ok",
        "reason": None,
        "cache": "cold",
        "warnings": None,
        "latency_us": latency_us,
        **fields,
    }


def ended(kernel: str, latency_us: float | None, **fields: Any) -> Row:
    return row_of("cell", **row(kernel, latency_us, **fields))


def lines_of(capsys: pytest.CaptureFixture[str], rows: list[dict[str, Any]]) -> list[str]:
    show_rows(rows)
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def test_a_latency_with_warnings_is_marked_and_the_warning_told_once(capsys):
    rows = [
        row("lean", 10.0 + i, 1024 << i, warnings=[f"the cross-check differs by {3 + i}.5%"])
        for i in range(6)
    ]
    rows += [row("fa2", 25.0, 1024 << i) for i in range(6)]
    lines = lines_of(capsys, rows)
    table = [line.split() for line in lines if line.startswith("n")]
    assert table[0] == ["n1024", "*", "!", "10.0", "25.0", "2.50x"]
    assert len(table) == 6
    assert [line for line in lines if line.startswith("!")] == [
        "! lean · b1 h8 n32768 d64 fp16 HND, b1 h8 n1024 d64 fp16 HND, b1 h8 n2048 d64 fp16 HND and"
        " 3 more: at worst, the cross-check differs by 8.5%"
    ]


def test_at_worst_is_said_only_where_sentences_differ(capsys):
    rows = [row("lean", 10.0, 1024 << i, warnings=["spills 4 registers"]) for i in range(2)]
    lines = lines_of(capsys, rows)
    assert (
        "! lean · b1 h8 n1024 d64 fp16 HND, b1 h8 n2048 d64 fp16 HND: spills 4 registers" in lines
    )


@pytest.mark.parametrize(
    ("latencies", "marked"),
    [
        ({"lean": 10.0, "fa2": 10.05, "fixed_split": 30.0}, []),
        ({"lean": 10.0, "fa2": 10.2, "fixed_split": 30.0}, ["10.0"]),
        ({"lean": 10.2, "fa2": 10.0}, ["10.0"]),
        ({"lean": 10.0}, []),
    ],
)
def test_a_mark_means_ahead_of_all_others(capsys, latencies, marked):
    lines = lines_of(capsys, [row(name, us) for name, us in latencies.items()])
    words = next(line for line in lines if line.startswith("b1")).split()
    assert [words[i + 1] for i, word in enumerate(words) if word == "*"] == marked
    assert ("* ahead of all others by more than 1%" in lines) == bool(marked)


def test_the_schedule_of_the_stream_k_kernel_is_the_last_column(capsys):
    rows = [
        row("fa2", 9.0, decomposition="one_cta_per_tile", schedule="one CTA a tile"),
        row("lean", 10.0, decomposition="stream_k", schedule="stream-K"),
        row("lean", 11.0, 2048, decomposition="stream_k", schedule="equal splits"),
        row("lean", 12.0, 4096, decomposition="stream_k", schedule=None),
    ]
    lines = lines_of(capsys, rows)
    assert next(line for line in lines if line.startswith("problem")).endswith("  lean schedule")
    table = [line for line in lines if line.startswith("n")]
    assert [line.rpartition("  ")[2] for line in table[:2]] == ["stream-K", "equal splits"]
    assert "schedule" not in "".join(lines_of(capsys, rows[:1]))


def test_kernels_with_the_same_reason_share_a_line(capsys):
    rows = [
        row(name, None, 1024 << i, status="unsupported", reason=f"{name} has no schedule")
        for name in ("sdpa", "eager")
        for i in range(4)
    ]
    rows += [row(name, 10.0, warnings=["rough"]) for name in ("lean", "fa2")]
    rows.append(row("fixed_split", None, status="unsupported", reason="too large"))
    lines = lines_of(capsys, rows)
    assert [line for line in lines if line.startswith(("unsupported:", "!"))] == [
        "! lean, fa2 · b1 h8 n1024 d64 fp16 HND: rough",
        "unsupported: sdpa, eager · 4 problems: has no schedule",
        "unsupported: fixed_split · b1 h8 n1024 d64 fp16 HND: too large",
    ]


@pytest.mark.parametrize("columns", [30, 80])
def test_sentences_are_wrapped_at_words(capsys, monkeypatch, columns):
    rows = [row(name, us, 1024 << i) for i in range(3) for name, us in (("lean", 10), ("fa2", 9))]
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
    show_rows([row("lean", 10.0), row("fa2", 20.0)])
    written = terminal.getvalue()
    green = re.findall(r"\x1b\[1;32m(.*?)\x1b\[0m", written)
    assert [text.strip() for text in green] == ([] if no_color else ["* 10.0", "Fastest:"])
    assert "Fastest:" in written


def test_numbers_stay_above_one_another_beside_marks(capsys):
    lines = lines_of(capsys, [row("lean", 10.0, warnings=["w"]), row("lean", 100.0, 2048)])
    rows = [line for line in lines if line.startswith("n")]
    ends = [
        line.index(number) + len(number)
        for line, number in zip(rows, (" 10.0", " 100.0"), strict=True)
    ]
    assert ends[0] == ends[1]


def test_without_warnings_there_is_no_mark(capsys):
    assert "!" not in "".join(lines_of(capsys, [row("lean", 10.0), row("fa2", 20.0)]))


def test_1500_rows_do_not_print_1500_lines(capsys):
    reason = (
        "the confidence interval of the median reaches {}% to one side after 60 samples, above 0.5%"
    )
    rows = [
        row("lean", 10.0, 1 + i, status="noisy", reason=reason.format(i / 100), warnings=[f"w {i}"])
        for i in range(1500)
    ]
    lines = lines_of(capsys, rows)
    warned = [line for line in lines if line.startswith(("noisy:", "!"))]
    assert len(warned) == 2
    assert warned[1].endswith("and 1497 more: at worst, " + reason.format(14.99))
    assert "n1500 " in warned[1].split(",")[0]


def test_many_kinds_of_sentences_are_cut(capsys):
    kinds = [row("lean", None, status="crashed", reason="x" * (1 + i)) for i in range(LINES + 7)]
    lines = lines_of(capsys, kinds)
    assert sum(line.startswith("crashed:") for line in lines) == LINES
    assert "and 7 more lines like these, see the report" in lines


def test_cold_and_warm_have_tables_of_their_own(capsys):
    rows = [
        row("lean", 10.0),
        row("fa2", 20.0),
        row("lean", 2.0, cache="warm"),
        row("fa2", 8.0, cache="warm"),
    ]
    lines = lines_of(capsys, rows)
    titles = [line for line in lines if "latency in µs" in line]
    assert titles == ["measured latency in µs", "measured latency in µs, warm L2"]
    assert [line.split()[6:9] for line in lines if line.startswith("b1")] == [
        ["*", "10.0", "20.0"],
        ["*", "2.0", "8.0"],
    ]


def test_energy_table(capsys):
    lean: dict[str, Any] = {
        "energy_mj": 4.0,
        "energy_floor_mj": 3.2,
        "sustained_power_w": 512.4,
        "sustained_us": 10.46,
    }
    rows = [row("lean", 10.0, **lean), row("fa2", 25.0, energy_mj=1234.5), row("fixed_split", 9.0)]
    lines = lines_of(capsys, rows)
    at = lines.index("measured energy of one launch in mJ")
    heading, line = lines[at + 1], next(line for line in lines[at:] if line.startswith("b1"))
    # Without an energy of fixed_split there is no column of it.
    assert heading.split()[:3] == ["problem", "lean", "fa2"]
    assert "fixed_split" not in heading
    assert heading.endswith("lean over floor  lean mean W  lean sustained µs")
    assert line.split()[6:] == ["4.000", "1,234", "308.62x", "1.25x", "512", "10.5"]


def test_energy_of_rows_that_count_for_nothing_gives_no_ratio(capsys):
    rows = [
        row("lean", 10.0, energy_mj=4.0),
        row("fa2", 25.0, energy_mj=2.0, status="suspect", reason="too fast"),
    ]
    lines = lines_of(capsys, rows)
    at = lines.index("measured energy of one launch in mJ")
    assert (
        next(line for line in lines[at:] if line.startswith("b1")).split()[6:]
        == "4.000 suspect 2.000".split()
    )
    latencies = next(line for line in lines if line.startswith("b1"))
    assert latencies.split()[6:] == ["10.0", "suspect", "25.0"]
    assert "suspect: fa2 · b1 h8 n1024 d64 fp16 HND: too fast" in lines


def test_occupancy_table(capsys):
    rows = [
        row("lean", 10.0, sm_busy_share=0.874, quantisation_efficiency=0.97),
        row("fa2", 20.0, sm_busy_share=0.5),
    ]
    lines = lines_of(capsys, rows)
    at = next(i for i, line in enumerate(lines) if line.startswith("measured SM busy share"))
    assert (
        next(line for line in lines[at:] if line.startswith("b1")).split()[6:]
        == "87% (97%) 50%".split()
    )
    # The title breaks where its table is narrow.
    assert " ".join(lines[at : at + 2]).startswith(
        "measured SM busy share (schedule: CTA slots with work)"
    )


def test_no_energy_and_no_occupancy_no_tables(capsys):
    out = "\n".join(lines_of(capsys, [row("lean", 10.0), row("fa2", 20.0)]))
    assert "energy" not in out
    assert "SM busy" not in out


def test_how_the_stopping_rule_and_the_cross_check_fared(capsys):
    interval: dict[str, Any] = {
        "latency_ci_low_us": 99.8,
        "latency_ci_high_us": 100.1,
        "crosscheck_us": 101.0,
    }
    rows = [
        row("lean", 100.0, **interval),
        row("fa2", 100.0, status="noisy", reason="wide", **interval),
    ]
    lines = lines_of(capsys, rows)
    assert (
        "1 of 2 timed rows met the stopping rule; half-width of the 95% interval of the median:"
        " 0.20% in the median row, 0.20% in the worst." in lines
    )
    assert any(
        line.startswith("The cross-check differs from the latency by 1.00% in the median of 1 row")
        for line in lines
    )


def test_predictions_have_no_such_lines(capsys):
    interval: dict[str, Any] = {"latency_ci_low_us": 99.8, "latency_ci_high_us": 100.1}
    lines = lines_of(capsys, [row("lean", 100.0, source="predicted", **interval)])
    assert not any("stopping rule" in line for line in lines)


def test_no_rows_print_nothing(capsys):
    assert lines_of(capsys, []) == []


def test_a_kernel_that_supports_nothing_has_no_column_but_a_notice(capsys):
    rows = [
        row("lean", 10.0),
        row("cudnn", None, status="unsupported", reason="no schedule"),
        row("fa2", 20.0),
    ]
    lines = lines_of(capsys, rows)
    assert next(line for line in lines if line.startswith("problem")).split() == [
        *("problem", "lean", "fa2", "lean", "vs", "fa2")
    ]
    assert "unsupported: cudnn · b1 h8 n1024 d64 fp16 HND: no schedule" in lines
    [alone] = [line for line in lines_of(capsys, rows[1:2]) if line.startswith("b1")]
    assert alone.split()[6:] == ["unsupported"]


@pytest.mark.parametrize(("columns", "tables"), [(200, 1), (90, 2), (50, 3)])
def test_a_narrow_terminal_cuts_no_figure(capsys, monkeypatch, columns, tables):
    monkeypatch.setattr("leanbench.cli.output.PIPED_COLUMNS", columns)
    kernels = ("lean", "fa2", "fixed_split", "fixed_split_oracle", "cudnn")
    rows = [
        row(name, 123456.7 + i, 1024 << n, bandwidth_tb_s=4.25, read_floor_share=0.9)
        for n in range(2)
        for i, name in enumerate(kernels)
    ]
    lines = lines_of(capsys, rows)
    lines = lines[: lines.index("")]
    assert max(map(len, lines)) <= columns
    assert "…" not in "".join(lines)
    # Below one another where they do not fit beside: every figure is there once, whole.
    of_one = [word for line in lines if line.startswith("n1024") for word in line.split()]
    figures = [word for word in of_one if word not in ("n1024", "*")]
    assert figures == [*(f"{123456.7 + i:.1f}" for i in range(5)), *["1.00x"] * 4, "4.25", "90%"]
    assert of_one.count("n1024") == tables
    assert sum("continued" in line for line in lines) == tables - 1


def test_progress_gives_reasons_of_failures_and_the_results_those_of_refusals(capsys):
    cells = [Cell(AttentionProblem(1, 8, 8, 1024 << i, 64), "lean", "default") for i in range(2)]
    with SweepProgress(2, quiet=False) as progress:
        progress.finished(cells[0], ended("lean", None, status="unsupported", reason="no schedule"))
        progress.finished(cells[1], ended("lean", None, status="crashed", reason="signal 11"))
    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith(": unsupported")
    assert second.endswith(": crashed (signal 11)")


def test_progress_lines_say_the_warnings(capsys):
    cell = Cell(AttentionProblem(1, 8, 8, 1024, 64), "lean", "default")
    with SweepProgress(2, quiet=False) as progress:
        progress.finished(cell, ended("lean", 10.0, warnings=["one thing", "another"]))
        progress.finished(cell, ended("lean", 10.0, warnings=None))
        progress.finished(cell, ended("fa2", 10.0, warnings=["another", "a third"]))
    first, second, third = capsys.readouterr().err.splitlines()
    assert first.endswith(": ok 10.0 µs ! one thing ! another")
    assert second.endswith(": ok 10.0 µs")
    assert third.endswith(": ok 10.0 µs ! as above ! a third")


def test_a_run_without_lean_has_ratios_bandwidth_and_floor_shares(capsys):
    rows = [
        row("fa2", 20.0, bandwidth_tb_s=2.0, read_floor_share=0.5),
        row("cudnn", 10.0, bandwidth_tb_s=4.0, read_floor_share=0.9),
    ]
    lines = lines_of(capsys, rows)
    assert lines[1].split()[:6] == ["problem", "fa2", "cudnn", "fa2", "vs", "cudnn"]
    shown = next(line for line in lines if line.startswith("b1"))
    assert shown.split()[6:] == ["20.0", "*", "10.0", "0.50x", "2.00", "50%"]
    assert lines[-2:] == [
        "Fastest: cudnn.",
        "By how much: fa2 is 0.50× as fast as the fastest other kernel.",
    ]


def test_a_long_table_is_cut_and_the_conclusion_stands_last(capsys):
    rows = [
        row(name, us, 64 * (1 + i)) for i in range(100) for name, us in (("lean", 1), ("fa2", 2))
    ]
    lines = lines_of(capsys, rows)
    assert len([line for line in lines if line.startswith("n")]) == ROWS
    assert f"and {100 - ROWS} more, see the rows in runs/example" in lines
    assert lines[-2].startswith("Fastest: lean is the fastest, or within 1% of it, on 100 of 100")
