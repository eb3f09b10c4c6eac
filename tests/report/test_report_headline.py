from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from example_runs import WriteRun, measured_rows, problem, row

from leanbench.core.errors import UserError
from leanbench.model import known_error, short_error
from leanbench.records.reading import read_run, read_runs
from leanbench.report import write_report
from leanbench.report.document import Sentences, Table
from leanbench.report.facts.headline import (
    FEW_RUNS,
    banner_section,
    caveats,
    headline,
    near,
    overview_of,
    summary_section,
    title,
)
from leanbench.report.facts.results import Part, Results, Winner, Winners, winners
from leanbench.report.frame import results_frame


def sentences_of(directory: Path) -> list[dict[str, str]]:
    parts = Results([read_run(directory)]).parts
    return [{sentence.name: str(sentence.words) for sentence in headline(part)} for part in parts]


def parts_of(directories: list[Path]) -> list[Part]:
    return Results(read_runs(directories)).parts


def pair(us: float, other: str = "fa2") -> list[tuple[str, float]]:
    """Return 10 us of lean, and the time of another kernel."""
    return [("lean", 10.0), (other, us)]


def test_winners_are_counted_with_ties(write_run: WriteRun) -> None:
    latencies = {(1024, 8): 10.05, (1024, 16): 10.05, (4096, 8): 9.0, (16384, 8): 20.0}
    rows = [
        *(row(problem(*of), name, us) for of, fa2 in latencies.items() for name, us in pair(fa2)),
        # Slower with one config, faster with another: the faster one counts.
        row(problem(16384, 8), "fa2", 30.0, cell="another config"),
        # Only lean ran this.
        row(problem(65536, 8), "lean", 1.0),
        row(problem(65536, 8), "fa2", status="crashed", reason="x"),
    ]
    frame = results_frame(read_run(write_run(rows)))
    lean = Winner("lean", near=3, alone=1, at="context 16k, heads 8")
    fa2 = Winner("fa2", near=3, alone=1, at="context 4k, heads 8")
    assert winners(frame) == Winners(4, (lean, fa2))


def timed(latencies: dict[int, dict[str, float]]) -> list[dict[str, Any]]:
    """Make rows from latencies by context and kernel."""
    return [
        row(problem(context), kernel, us, energy_mj=us / 5)
        for context, of_problem in latencies.items()
        for kernel, us in of_problem.items()
    ]


BOUND = {"no_attention": 8.0, "lean": 10.0, "fa2": 15.0}
HEADLINES = {
    "one kernel": timed({1024: {"lean": 10.0}}),
    "the bound is not compared": timed({1024: BOUND}),
    "the first timed kernel replaces lean": [
        row(problem(), "xformers", status="unsupported", reason="x"),
        *timed({1024: {"fa2": 10.0, "cudnn": 12.0}}),
    ],
    # 1.2, 0.95 and 1 times as fast as the fastest peer.
    "peers": timed(
        {
            1024: {"lean": 10.0, "fa2": 1.0, "cudnn": 12.0, "flashinfer": 20.0},
            4096: {"lean": 10.0, "cudnn": 30.0, "flashinfer": 9.5},
            16384: {"lean": 10.0, "cudnn": 10.0},
            65536: {"lean": 10.0, "fa2": 5.0},
        }
    ),
    "one peer": [
        *timed({1024: {"lean": 10.0, "fa2": 10.0, "cudnn": 10.0}}),
        row(problem(), "flashinfer", status="crashed"),
    ],
}


@pytest.mark.parametrize("name", HEADLINES)
def test_headlines(write_run: WriteRun, snapshot, name: str) -> None:
    [sentences] = sentences_of(write_run(HEADLINES[name]))
    assert "\n".join(f"{title}: {words}" for title, words in sentences.items()) == snapshot


def test_the_bound_of_whole_models_has_won_nothing(write_run: WriteRun) -> None:
    frame = results_frame(read_run(write_run(timed({1024: BOUND}))))
    assert list(frame["speedup"].dropna()) == [1.5]
    found = winners(frame)
    assert found is not None
    assert [winner.kernel for winner in found.kernels] == ["lean", "fa2"]
    without_lean = timed({1024: {"no_attention": 8.0, "fa2": 15.0}})
    assert {*results_frame(read_run(write_run(without_lean, folder="b")))["baseline"]} == {"fa2"}


WITHIN = "within the model's error of 2.5%"


@pytest.mark.parametrize(
    ("fa2_us", "fastest", "by_how_much"),
    [
        (10.2, f"lean and fa2, level ({WITHIN}).", f"1.02×{{}}, {WITHIN}."),
        (12.0, "lean.", "1.20×{}."),
    ],
)
@pytest.mark.usefixtures("wrong_by_2_5_percent")
def test_headline_of_a_prediction_says_so(write_run, fa2_us, fastest, by_how_much):
    rows = [row(problem(), name, us, source="predicted") for name, us in pair(fa2_us)]
    [sentences] = sentences_of(write_run(rows, source="predicted"))
    words = by_how_much.format(" as fast as the fastest other kernel")
    assert (sentences["Fastest"], sentences["By how much"]) == (fastest, f"lean is {words}")
    assert sentences["Note"] == (
        "Predicted by the performance model, nothing was measured."
        f" {short_error('NVIDIA H200', ['lean', 'fa2'])}"
    )


@pytest.mark.parametrize("predicted", [("lean",), ()])
def test_the_model_s_error_is_that_of_kernels_with_a_prediction(write_run, predicted):
    refused: dict[str, Any] = {"status": "unsupported", "reason": "no schedule"}
    rows = [
        row(problem(), name, source="predicted", **({"latency_us": 10.0} if ok else refused))
        for name, ok in (("lean", "lean" in predicted), ("fa2", False))
    ]
    run = write_run(rows, source="predicted")
    [sentences] = sentences_of(run)
    failed = 2 - len(predicted)
    error = f" {short_error('NVIDIA H200', predicted)}" if predicted else ""
    assert sentences["Note"] == (
        f"Predicted by the performance model, nothing was measured.{error} {failed} of 2 rows"
        f" {'is' if failed == 1 else 'are'} excluded: {failed} unsupported."
    )
    [block] = banner_section(Results([read_run(run)])).blocks
    assert isinstance(block, Sentences)
    [banner] = block.items
    assert banner.note == (known_error("NVIDIA H200", predicted) if predicted else "")


@pytest.mark.usefixtures("wrong_by_2_5_percent")
def test_no_kernel_is_ahead_where_all_lie_within_the_model_s_error(write_run: WriteRun) -> None:
    rows = [
        row(problem(context=context), name, us, source="predicted")
        for context in (1024, 4096)
        for name, us in pair(10.2)
    ]
    [sentences] = sentences_of(write_run(rows, source="predicted"))
    assert sentences["Fastest"] == (
        "No kernel is ahead of all others by more than the model's error of 2.5% on any of 2"
        " problems."
    )


@pytest.mark.deep
def test_another_baseline_is_compared_with_all_others(write_run: WriteRun) -> None:
    directory = write_run(measured_rows())
    results = Results([read_run(directory)], "fa2")
    [part] = results.parts
    assert list(part.summary.speedups) == ["lean", "fixed_split"]
    assert part.summary.speedups["lean"].geomean == pytest.approx(1 / 4)
    assert results.frame["speedup"].dropna().tolist() == [0.5, 0.5, 0.125, 0.0625]
    assert str(headline(part)[1].words).startswith("fa2 is 0.18× as fast as the fastest other")
    formats = ["html", "csv", "markdown"]
    [html, csv, markdown] = write_report(directory, directory, formats, baseline="fa2")
    assert "Speedup of fa2" in html.read_text()
    assert "| speedup of fa2 |" in markdown.read_text()
    assert csv.read_text().splitlines()[1].endswith(",fa2")
    with pytest.raises(UserError, match="--baseline fa3 is no kernel of these runs, did you mean"):
        write_report(directory, directory, ["csv"], baseline="fa3")


def runs_of(write_run: WriteRun, fa2_us: list[float]) -> list[Path]:
    """Write a run for each of these times of fa2, of 10 us of lean on two problems."""
    rows = [[row(problem(1024, h), *of) for h in (8, 16) for of in pair(us)] for us in fa2_us]
    return [write_run(of_run, folder=f"run{number}") for number, of_run in enumerate(rows)]


def test_many_runs_have_an_overview(write_run: WriteRun) -> None:
    runs = runs_of(write_run, [20.0, 15.0, 9.0, 10.05])
    parts = parts_of(runs)
    overview = overview_of(parts)
    assert overview is not None
    [sentence] = overview.sentences
    assert sentence.name == "lean"
    assert sentence.words == (
        "The fastest, or level with it, on 6 of 8 problems (counted once a run; level: intervals"
        " overlap, or within 1%). Against the fastest other kernel: at worst 0.90× as fast (run2)."
    )
    assert [near(part) for _, part in overview.parts] == [2, 2, 0, 2]
    assert title(list("abcd"), overview) == f"{parts[0].summary.gpu}: 4 runs"
    assert overview_of(parts[:FEW_RUNS]) is None
    assert title(["a", "b", "c"], None) == "a, b and c"


@pytest.mark.deep
def test_runs_that_differ_are_not_counted_together(write_run: WriteRun) -> None:
    runs = runs_of(write_run, [20.0, 15.0, 9.0])
    rows = [row(problem(1024), "lean", 10.0), row(problem(1024), "fa2", 30.0)]
    runs.append(write_run([{**row, "source": "predicted"} for row in rows], folder="told"))
    runs.append(write_run([row(problem(1024), "fa2", 30.0, cache="warm")], folder="warm"))
    # A run without lean has another baseline.
    rows = [row(problem(1024), name, 30.0) for name in ("fa2", "fixed_split")]
    runs.append(write_run(rows, folder="without"))
    overview = overview_of(parts_of(runs))
    assert overview is not None
    counts = {
        sentence.name: str(sentence.words).partition(" on ")[2].partition(" (")[0]
        for sentence in overview.sentences
    }
    assert counts == {
        "lean, cold L2": "4 of 6 problems",
        "lean, predicted, cold L2": "1 of 1 problem",
        "fa2, cold L2": "1 of 1 problem",
    }
    names = [name.rpartition("/")[2] for name, _ in overview.parts]
    own = ["told, predicted, cold L2", "warm, warm L2", "without, cold L2"]
    assert names == [*(f"run{i}, cold L2" for i in range(3)), *own]
    assert "nothing was measured" in " ".join(caveats(overview.parts[3][1]))


@pytest.mark.deep
def test_the_overview_compares_each_run_with_others_and_libraries(write_run: WriteRun) -> None:
    latencies: list[dict[str, list[float]]] = [
        # The fastest other is of this project, the libraries are behind or ahead.
        {"lean": [10.0, 10.0], "fixed_split": [10.5, 10.5], "cudnn": [20.0, 9.0]},
        {"lean": [10.0], "fa2": [20.0]},
        {"lean": [10.0]},
        # A run without lean has a baseline of its own.
        {"lean_mla": [10.0, 10.0], "flash_mla": [12.0, 12.0]},
    ]
    runs = []
    for number, of_run in enumerate(latencies):
        cells = [(1024 << i, name, us) for name, of in of_run.items() for i, us in enumerate(of)]
        rows = [row(problem(context), name, us) for context, name, us in cells]
        runs.append(write_run(rows, folder=f"run{number}"))
    verdict, of_overview = summary_section(Results(read_runs(runs))).blocks[:2]
    assert isinstance(verdict, Sentences)
    assert isinstance(of_overview, Table)
    # Libraries and other kernels have separate sentences.
    assert {item.name: str(item.words).split(". ")[1:] for item in verdict.items} == {
        "lean": [
            "Against the fastest library: ahead on 1, level on 0, behind on 1 of 2; at worst"
            " 0.90× as fast (run0), at best 2.00× (run0)",
            "Against kernels that are not libraries: at worst 1.05× as fast (run0).",
        ],
        "lean_mla": [
            "Against the fastest library: ahead on 2, level on 0, behind on 0 of 2; at worst"
            " 1.20× as fast (run3), at best 1.20× (run3)."
        ],
    }
    headings = [str(column.heading) for column in of_overview.columns]
    assert headings[1] == "the baseline fastest, or level"
    shown = {
        str(first).rpartition("/")[2]: [str(cells[i]) for i in (0, 1, 6, 7)]
        for first, *cells in of_overview.rows
    }
    assert shown == {
        "run0": ["1 of 2", "0.97×", "1.34×", "1, 0, 1"],
        "run1": ["1 of 1", "2.00×", "", ""],
        "run2": ["lean met no other kernel", "", "", ""],
        "run3": ["2 of 2 (lean_mla)", "1.20×", "1.20×", "2, 0, 0"],
    }
    # One that was chosen is not replaced.
    chosen = Results(read_runs(runs), "fa2").parts
    assert [part.summary.baseline for part in chosen] == ["fa2"] * 4
    assert [part.summary.over_best is None for part in chosen] == [True, False, True, True]


def test_many_runs_without_rows_are_named(write_run: WriteRun) -> None:
    runs = [write_run([], folder=f"empty{number}") for number in range(4)]
    [written] = write_report(runs[0], runs[0], ["markdown"], runs[1:])
    assert written.read_text().startswith("# ")
    assert "empty3" in written.read_text().splitlines()[0]


def test_the_baseline_is_held_against_the_fastest_peer_of_each_kind(write_run: WriteRun) -> None:
    window = {"window_left": 1023}
    kinds: list[tuple[dict[str, Any], dict[str, float]]] = [
        ({}, {"lean": 10.0, "cudnn": 12.0, "flashinfer": 20.0}),
        (window, {"lean": 10.0, "cudnn": 30.0, "flashinfer": 9.0}),
        ({**window, "context": 8192}, {"lean": 10.0, "cudnn": 40.0}),
        ({"kv_dtype": "e4m3", "sinks": True}, {"lean": 10.0, "flashinfer": 15.0}),
        ({"q_len": 4}, {"lean": 10.0, "cudnn": 20.0}),
        # No peer took it.
        ({"alibi": True}, {"lean": 10.0}),
    ]
    rows = [
        row(replace(problem(4096), **of_problem), kernel, latency_us)
        for of_problem, latencies in kinds
        for kernel, latency_us in latencies.items()
    ]
    directory = write_run(rows)
    [part] = parts_of([directory])
    by_kind = part.summary.over_peers_by_kind
    counted = {kind: (over.kernels, over.ratios.ahead) for kind, over in by_kind.items()}
    assert counted == {
        "plain": (("cudnn", "flashinfer"), 1),
        "window": (("cudnn", "flashinfer"), 1),
        "sinks, e4m3 KV cache": (("flashinfer",), 1),
        "q_len": (("cudnn",), 1),
    }
    geomeans = {kind: over.ratios.geomean for kind, over in by_kind.items()}
    assert geomeans == pytest.approx(
        {"plain": 1.2, "window": (0.9 * 4.0) ** 0.5, "sinks, e4m3 KV cache": 1.5, "q_len": 2.0}
    )
    [path] = write_report(directory, directory, ["markdown"])
    line = (
        "| (window) | 1.90× | 2.45× | 2 | 1, 0, 1 | 0.90× (context 4k, q\\_len 1, window of 1023) |"
    )
    assert line in path.read_text()
    # Of one kind there is nothing to tell apart.
    rows = [row(problem(), kernel, 10.0) for kernel in ("lean", "cudnn", "flashinfer")]
    [part] = parts_of([write_run(rows, folder="one")])
    assert part.summary.over_peers_by_kind == {}
