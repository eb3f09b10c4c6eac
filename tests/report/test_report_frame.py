import csv
import io
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from example_runs import (
    GPU,
    HOSTILE,
    WriteRun,
    measured_rows,
    problem,
    row,
    row_with_all_fields,
    rows_with_all_fields,
)
from pandas import DataFrame

from leanbench.core.problem import AttentionProblem
from leanbench.core.work import flops
from leanbench.records.reading import Run, read_run
from leanbench.report import write_report
from leanbench.report.document import Table
from leanbench.report.facts.problems import problems_section
from leanbench.report.facts.results import Results, Summary, Winner
from leanbench.report.frame import (
    csv_cell,
    csv_text,
    has_values,
    kernel_order,
    ratios_to_baseline,
    results_frame,
)
from leanbench.report.series import (
    add_series_columns,
    fixed_words,
    narrower_words,
    short_labels,
    varying_axes,
)

FORMULAS = ("=A(1)", "+1+cmd|' /C calc'!A0", "-2+3", "@SUM(1)", "\t=1", " =1", "＝1+1", "'=1", "-")
PLAIN = ("-1.5e3", "+7", "lean", "a=1", "'lean'", "", -1.5, None)


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        *((text, f"'{text}") for text in FORMULAS),
        *((text, text) for text in PLAIN),
        *(("\r=1", "'\n=1"), ("a\rb\r\nc", "a\nb\nc")),
    ],
)
def test_a_cell_of_csv_is_no_formula(text, cell):
    assert csv_cell(text) == cell
    # As docs/formats.md reads it back.
    if isinstance(text, str):
        written = text.replace("\r\n", "\n").replace("\r", "\n")
        assert re.sub(r"^'(?=['\s]*[=+\-@＝＋－＠]|'*[\t\n])", "", cell) == written


def test_a_csv_has_no_formulas_and_its_numbers_stay(write_run: WriteRun) -> None:
    rows = [row(problem(n), kernel, 10.0) for n in (64, 128) for kernel in ("=A1", "@b", "lean")]
    directory = write_run([{**row_, "reason": None} for row_ in rows])
    [path] = write_report(directory, directory, ["csv"])
    read = pd.read_csv(path)
    assert [*read["kernel"]] == ["'=A1", "'@b", "lean"] * 2
    assert read["latency_us"].dtype == "float64"
    assert has_values(read, "speedup")
    text = csv_text(DataFrame({"a": ["\r=1", "b\rc"]}))
    assert [*csv.reader(io.StringIO(text, newline=""))] == [["a"], ["'\n=1"], ["b\nc"]]
    text = csv_text(DataFrame({"a": ["-x", None], "b": [-1.5, None], "c": pd.array([-1, None])}))
    assert text == "a,b,c\n'-x,-1.5,-1\n,,\n"


def results_of(write_run: WriteRun, rows: list[dict[str, Any]], **fields: Any) -> Results:
    return Results([read_run(write_run(rows, **fields))])


def frame_of(write_run: WriteRun, rows: list[dict[str, Any]]) -> DataFrame:
    return results_frame(read_run(write_run(rows)))


def summary_of(write_run: WriteRun, rows: list[dict[str, Any]], **fields: Any) -> Summary:
    [part] = results_of(write_run, rows, **fields).parts
    return part.summary


def timed(context: int = 1024, **latencies_us: float) -> list[dict[str, Any]]:
    return [row(problem(context), kernel, us) for kernel, us in latencies_us.items()]


def signs(ratios: Any) -> tuple[int, int, int]:
    return ratios.ahead, ratios.level, ratios.behind


def test_csv_holds_every_row_and_exact_values(write_run: WriteRun) -> None:
    directory = write_run(measured_rows())
    [path] = write_report(directory, directory, ["csv"])
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 9
    fa2, crashed = rows[4], rows[7]

    def cells(row: dict[str, str], names: str) -> list[str]:
        return [row[name] for name in names.split()]

    shape = cells(fa2, "batch q_heads kv_heads group_size context is_ragged")
    assert shape == ["1", "56", "56", "1", "65536", "False"]
    assert fa2["problem"] == "b1 h56 n65536 d64 fp16 HND"
    measured = cells(fa2, "kernel latency_us speedup samples gpu source")
    assert measured == ["fa2", "1600.0", "8.0", "25", GPU, "measured"]
    assert fa2["config"] == "tile_tokens=128 num_warps=4 num_stages=3"
    assert float(fa2["bandwidth_tb_s"]) == 2 * 65536 * 56 * 64 * 2 / 1600.0 * 1e-6
    contexts = cells(crashed, "context max_context mean_context is_ragged")
    assert contexts == ["512 4096", "4096", "2304.0", "True"]
    assert cells(crashed, "status reason") == ["crashed", HOSTILE]
    # Not measured is empty, never 0.
    assert cells(crashed, "latency_us samples config speedup power_w") == [""] * 5


def test_lists_are_text_in_the_csv(write_run: WriteRun) -> None:
    reasons = ["sw_power_cap", "hw_slowdown"]
    rows = [
        row(problem(), "lean", 1.0, warnings=["one thing", "another"], throttle_reasons=reasons),
        row(problem(), "fa2", 1.0, warnings=[]),
    ]
    frame = frame_of(write_run, rows)
    assert frame["throttle_reasons"].tolist()[0] == "sw_power_cap hw_slowdown"
    assert frame.to_csv().count("one thing; another") == 1
    assert frame["warnings"].isna().tolist() == [False, True]


def test_speedups_by_problem(write_run: WriteRun) -> None:
    frame = frame_of(write_run, measured_rows())
    table = ratios_to_baseline(frame, "latency_us")
    assert list(table.columns) == ["fa2", "fixed_split"]
    labels = table.index.get_level_values("problem")
    by_label = dict(zip(labels, table.to_numpy().tolist(), strict=True))
    # Of lean, with noise, and two kernels that failed.
    assert all(map(math.isnan, by_label.pop("b2 h56 n512+4096 d64 fp16 HND")))
    assert by_label == {
        "b1 h56 n1024 d64 fp16 HND": [2.0, 1.0],
        "b1 h56 n65536 d64 fp16 HND": [8.0, 0.5],
    }
    assert frame["speedup"].dropna().tolist() == [2.0, 1.0, 8.0, 0.5]


def test_summary_values(write_run: WriteRun) -> None:
    summary = summary_of(write_run, measured_rows())
    assert list(summary.speedups) == ["fa2", "fixed_split"]
    fa2, fixed_split = summary.speedups.values()
    assert fa2.geomean == pytest.approx(4.0)
    assert (fa2.lowest, fa2.lowest_at) == (2.0, "b1 h56 n1024 d64 fp16 HND")
    assert (fa2.highest, fa2.highest_at) == (8.0, "b1 h56 n65536 d64 fp16 HND")
    assert (signs(fa2), fa2.problems) == ((2, 0, 0), 2)
    assert fixed_split.geomean == pytest.approx(math.sqrt(0.5))
    assert (signs(fixed_split), fixed_split.problems) == ((0, 1, 1), 2)
    assert summary.best is not None
    assert (summary.best.kernel, summary.best.at) == ("fixed_split", "b1 h56 n65536 d64 fp16 HND")
    assert summary.best.bandwidth_tb_s == 2 * 65536 * 56 * 64 * 2 / 100.0 * 1e-6


def test_a_difference_within_1_percent_is_level(write_run: WriteRun) -> None:
    # Lean over the other, 0.99 to 1.01.
    fa2 = (100.0, 100.5, 101.0, 99.1, 101.2, 98.9)
    rows = [row(problem(1024 << i), "lean", 100.0, energy_mj=50.0) for i in range(6)]
    rows += [row(problem(1024 << i), "fa2", us, energy_mj=us / 2) for i, us in enumerate(fa2)]
    summary = summary_of(write_run, rows)
    assert signs(summary.energies["fa2"]) == (1, 4, 1)
    # The intervals of the latencies reach 1% to each side, and overlap.
    assert signs(summary.speedups["fa2"]) == (0, 6, 0)
    for own in rows:
        own |= {"latency_ci_low_us": own["latency_us"], "latency_ci_high_us": own["latency_us"]}
    exact = summary_of(write_run, rows, folder="exact")
    assert signs(exact.speedups["fa2"]) == (1, 4, 1)
    # Three processes of a cell differed by more.
    for own in rows:
        own |= {"processes": 3, "process_spread": 0.0125}
    spread = summary_of(write_run, rows, folder="spread")
    assert signs(spread.speedups["fa2"]) == (0, 6, 0)
    assert spread.margin.words == "1.2%"
    # So did those of the doctor, if the run has no repeats.
    for own in rows:
        del own["processes"], own["process_spread"]
    assert signs(summary_of(write_run, rows, folder="d", process_spread=0.02).speedups["fa2"]) == (
        0,
        6,
        0,
    )


@pytest.mark.parametrize(
    ("cells", "best"),
    [
        (((5.0, ["not warm"]), (20.0, []), (30.0, None)), ("at 20.0", False)),
        (((5.0, ["not warm"]), (4.0, ["not warm"])), ("at 4.0", True)),
    ],
)
def test_the_best_bandwidth_is_one_without_a_warning(write_run, cells, best):
    rows = [row(problem(), f"at {us}", us, warnings=sentence) for us, sentence in cells]
    summary = summary_of(write_run, rows)
    assert summary.best is not None
    assert (summary.best.kernel, summary.best.warned) == best


def test_a_kernel_with_several_configs_counts_with_its_fastest(write_run: WriteRun) -> None:
    rows = [row(problem(), name, us) for name, us in (("lean", 10.0), ("fa2", 30.0), ("fa2", 20.0))]
    results = results_of(write_run, rows)
    [fa2] = results.parts[0].summary.speedups.values()
    assert (fa2.geomean, fa2.problems) == (pytest.approx(2.0), 1)
    assert results.frame["speedup"].tolist()[1:] == [3.0, 2.0]


def test_only_timed_rows_enter_a_statistic(write_run: WriteRun) -> None:
    rows = [
        row(problem(), "lean", 10.0),
        row(problem(), "fa2", 11.0, status="suspect", reason="beats the memory"),
        row(problem(), "fixed_split", 12.0, status="incorrect", reason="wrong"),
    ]
    results = results_of(write_run, rows)
    assert results.parts[0].summary.speedups == {}
    assert not has_values(results.frame, "speedup")


@pytest.mark.parametrize("noisy", [{"fa2", "cudnn"}, {"lean", "fa2", "cudnn"}])
def test_a_noisy_rival_is_a_rival(write_run: WriteRun, noisy: set[str]) -> None:
    """Left out, the slowest kernel would pass for the fastest other one."""
    rows = timed(lean=10.0, fa2=10.5, cudnn=12.0, torch_flash=40.0)
    for own in rows:
        if own["kernel"] in noisy:
            own |= {"status": "noisy", "reason": "x"}
    summary = summary_of(write_run, rows)
    assert summary.over_best is not None
    assert summary.over_best.highest == pytest.approx(1.05)
    assert summary.over_peers is not None
    assert summary.over_peers.ratios.highest == pytest.approx(1.2)
    assert summary.winners is not None
    assert summary.winners.kernels[0] == Winner("lean", 1, 1, "")


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("source", ("measured", "predicted")),
        ("cache", ("cold", "warm")),
        ("environment", ("a", "b")),
    ],
)
def test_no_statistic_spans_two(write_run: WriteRun, field: str, values: tuple[str, str]) -> None:
    first, second = ({field: value} for value in values)
    rows = [
        row(problem(), "lean", 10.0, energy_mj=10.0, **first),
        row(problem(), "fa2", 20.0, energy_mj=20.0, **first),
        row(problem(), "lean", 1.0, energy_mj=1.0, **second),
        row(problem(), "fa2", 5.0, energy_mj=5.0, **second),
        row(problem(4096), "lean", 3.0, **second),
        row(problem(4096), "fa2", 30.0, **first),
    ]
    environments = {key: {"gpu_product": key.upper()} for key in ("a", "b", "env0")}
    results = results_of(write_run, rows, environments=environments)
    for ratios in ("speedups", "energies"):
        of_fa2 = [getattr(part.summary, ratios)["fa2"] for part in results.parts]
        assert [ratio.geomean for ratio in of_fa2] == [pytest.approx(2.0), pytest.approx(5.0)]
        assert [ratio.problems for ratio in of_fa2] == [1, 1]
    assert results.frame["speedup"].dropna().tolist() == [2.0, 5.0]


def test_derived_columns(write_run: WriteRun) -> None:
    frame = frame_of(write_run, [*rows_with_all_fields(), row(problem(4096), "lean", 3.0)])
    assert frame["crosscheck_difference"].tolist()[:2] == pytest.approx([0.05, 0.1])
    assert frame["sustained_slowdown"].tolist()[:6] == pytest.approx([0.25] * 6)
    floor_mj = problem(1024).kv_bytes * 1e-7
    assert frame["energy_over_floor"].tolist()[0] == pytest.approx(6.25 / floor_mj)
    # The noisy row of fixed_split counts, the suspect one does not.
    assert frame["energy_ratio"].dropna().to_dict() == {1: 2.0, 2: 1.0, 4: 8.0}
    # A row without the new fields has none of the figures.
    derived = "crosscheck_difference sustained_slowdown energy_over_floor energy_ratio warnings"
    assert frame[derived.split()].iloc[6].isna().all()
    assert frame["cache"].tolist()[6] == "cold"


def test_a_parts_heads_are_told_with_their_kv_heads() -> None:
    whole = DataFrame(
        [(56, 56, 1024), (32, 8, 1024), (32, 8, 4096), (64, 8, 4096)],
        columns=["q_heads", "kv_heads", "max_context"],
    ).assign(batch=1, head_dim=128, q_len=1)
    assert narrower_words(whole, whole) == ""
    assert narrower_words(whole.iloc[1:3], whole) == "heads 32/8"
    assert narrower_words(whole.iloc[2:], whole) == "context 4k"
    assert narrower_words(whole.iloc[:1], whole) == "context 1k, heads 56"
    assert narrower_words(whole.iloc[:0], whole) == ""


def test_page_sizes_are_told_apart(write_run: WriteRun) -> None:
    problems = [problem(), problem(page_size=16), problem(page_size=16, q_len=4)]
    rows = [
        row(shape, kernel, factor * us)
        for shape, us in zip(problems, (1, 2, 4), strict=True)
        for kernel, factor in (("lean", 1), ("fa2", 3))
    ]
    frame = add_series_columns(frame_of(write_run, rows))
    assert frame["page_size"].tolist() == ["none", "none", "16", "16", "16", "16"]
    assert frame["speedup"].dropna().tolist() == [3.0, 3.0, 3.0]
    assert len(ratios_to_baseline(frame, "latency_us")) == 3
    axes = varying_axes(frame)
    values = {axis.name: axis.values for axis in axes}
    assert values == {"q_len": (1, 4), "page_size": ("none", "16")}
    assert list(short_labels(frame, axes).values()) == [
        "q_len 1, a contiguous cache",
        "q_len 1, pages of 16",
        "q_len 4, pages of 16",
    ]
    assert "q_len 1 to 4 · page size none/16" in fixed_words(frame)
    assert "page size" not in fixed_words(frame.iloc[:2])


def test_suspect_rows_stay_out_and_noisy_and_warned_ones_in(write_run: WriteRun) -> None:
    summary = summary_of(write_run, rows_with_all_fields())
    problems = {name: ratios.problems for name, ratios in summary.speedups.items()}
    assert problems == {"fa2": 2, "fixed_split": 1}
    assert summary.energies["fa2"].geomean == pytest.approx(4.0)
    assert summary.energies["fixed_split"].problems == 1
    assert summary.baseline_energy is not None
    assert (summary.baseline_energy.problems, summary.baseline_energy.power_w) == (2, 500.0)
    assert summary.baseline_energy.slowdown == pytest.approx(0.25)


def test_energy_that_was_read_as_zero_is_no_ratio(write_run: WriteRun) -> None:
    # A window shorter than a tick of the counter.
    rows = [
        row_with_all_fields(problem(), "lean", 1.0, energy_mj=0.0),
        row_with_all_fields(problem(), "fa2", 2.0),
    ]
    summary = summary_of(write_run, rows)
    assert (summary.energies, summary.baseline_energy) == ({}, None)


def test_energy_alone_is_no_card(write_run: WriteRun) -> None:
    # As predictions have it: no floor, no power, nothing sustained.
    rows = [{**own, "source": "predicted", "energy_mj": 2.0} for own in timed(lean=10.0, fa2=10.0)]
    summary = summary_of(write_run, rows, source="predicted")
    assert summary.baseline_energy is None
    assert summary.energies["fa2"].geomean == 1.0


def test_ragged_batches_of_equal_sums_are_different_problems(write_run: WriteRun) -> None:
    first, second = problem((10, 20, 60, 1)), problem((15, 14, 60, 2))
    assert first.label == second.label
    rows = [row(first, "lean", 10.0), row(second, "fa2", 20.0)]
    assert not has_values(frame_of(write_run, rows), "speedup")


def test_lean_comes_first(write_run: WriteRun) -> None:
    rows = timed(fixed_split=1.0, fa2=1.0, lean=1.0)
    assert kernel_order(frame_of(write_run, rows)) == ["lean", "fixed_split", "fa2"]


def test_gpu_of_a_prediction_is_the_one_it_is_for() -> None:
    environments = {"here": {"gpu_product": "the GPU of this machine"}}
    manifest = {"source": "predicted", "gpu": {"product": "A100"}, "environments": environments}
    assert Run(Path(), manifest, ()).gpu_name("here") == "A100"
    measured = Run(Path(), {**manifest, "source": "measured"}, ())
    assert measured.gpu_name("here") == "the GPU of this machine"
    assert Run(Path(), {}, ()).gpu_name() == "unknown GPU"


def test_arithmetic_and_tokens_are_computed_from_rows(write_run: WriteRun) -> None:
    latent = AttentionProblem(2, 16, 1, 1024, 576, "bf16", "NHD", v_head_dim=512, latent=True)
    step = AttentionProblem(8, 16, 4, 1024, 128, whole_model="llama-3-8b:tp=2", lengths_on="device")
    rows = [
        row(latent, "lean_mla", 10.0),
        row(step, "lean", 2000.0, tokens_per_s=4000.0),
        row(problem(), "lean", status="timeout", reason="x"),
    ]
    frame = results_frame(read_run(write_run(rows)))
    tera = 2 * 2 * 16 * 1024 * (576 + 512) / 10.0 * 1e-6
    assert frame["tflop_s"].tolist() == pytest.approx([tera, math.nan, math.nan], nan_ok=True)
    assert frame["flop_per_byte"].tolist()[0] == tera * 10.0 * 1e6 / latent.io_bytes
    user, gpu = frame["tokens_per_s_user"], frame["tokens_per_s_gpu"]
    assert user.tolist() == pytest.approx([math.nan, 500.0, math.nan], nan_ok=True)
    # Two GPUs share the model.
    assert gpu.tolist() == pytest.approx([math.nan, 2000.0, math.nan], nan_ok=True)


def test_chunks_have_a_table_of_their_arithmetic(write_run: WriteRun) -> None:
    """A decode call has none: memory is its limit."""
    prompt = AttentionProblem(1, 32, 8, 4096, 128, q_len=4096)
    slow = {"status": "noisy", "reason": "x"}
    rows = [
        row(prompt, "lean", 250.0),
        row(prompt, "fa2", 1000.0, **slow),
        row(replace(prompt, q_len=1), "lean", 10.0),
        row(replace(prompt, q_len=1), "fa2", status="timeout", reason="x"),
    ]
    tables = problems_section(Results([read_run(write_run(rows))])).blocks
    [table] = [each for each in tables if isinstance(each, Table) and "TFLOP/s" in each.title]
    work = flops(prompt)
    assert work is not None
    tera = work / 250.0 * 1e-6
    assert [column.heading for column in table.columns] == ["problem", "lean", "fa2"]
    assert [row[1:] for row in table.rows] == [(f"{tera:.0f}", f"noisy {tera / 4:.0f}"), ("", "")]
    [decode] = problems_section(Results([read_run(write_run(rows[2:], folder="one"))])).blocks
    assert "TFLOP/s" not in str(decode)
