"""Pairing, verdicts and statistics of two runs with figures computed by hand."""

import gzip
import random
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from compare_examples import ENVIRONMENT, problem, row, run_of, spread, write_run
from hypothesis import given
from hypothesis import strategies as st

from leanbench.core.errors import UserError
from leanbench.records.row import Row
from leanbench.records.samples import SAMPLES
from leanbench.report.compare.core import Comparison, compare, counts, group
from leanbench.report.compare.flips import flips_of
from leanbench.report.compare.pair import COMPARED, Pair, judge, make_pair
from leanbench.report.compare.ratios import Margin
from leanbench.report.compare.sentences import (
    best_gain,
    difference,
    microseconds,
    outcome,
    sentences,
    summarise,
    worst_regression,
)

SHORT, LONG = problem(1024), problem(4096)
LABEL = "b1 h8 n1024 d64 fp16 HND"
MARGIN = 0.01
#: Samples of the only cell of a run.
ONE = {(SHORT, "lean"): spread(10.0)}

Side = dict[Any, Any] | list[dict[str, Any]]


def pair_of(base: dict[str, Any], new: dict[str, Any], *samples: list[float]) -> Pair:
    rows = Row.model_validate(base), Row.model_validate(new)
    return make_pair(SHORT, rows, (samples[0], samples[1]) if samples else ([], []), MARGIN)


def sampled(base_us: list[float], new_us: list[float], **fields: Any) -> Pair:
    rows = row(SHORT, "lean", base_us), row(SHORT, "lean", new_us, **fields)
    return pair_of(*rows, base_us, new_us)


def written(path: Path, side: Side, **fields: Any) -> str:
    """Write a run of samples by cell, or of rows without samples."""
    if isinstance(side, list):
        return str(write_run(path, side, **fields))
    return str(run_of(path, side, **fields))


def compared(tmp_path: Path, base: Side, new: Side, **options: Any) -> Comparison:
    runs = written(tmp_path / "base", base), written(tmp_path / "new", new)
    return compare(*runs, margin=MARGIN, **options)


def differences(base: str, new: str) -> list[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    found = compare(base, new, margin=MARGIN).differences
    return [(difference.field, difference.base, difference.new) for difference in found]


def predicted(path: Path, latency_us: float = 10.0, **fields: Any) -> str:
    rows = [row(SHORT, source="predicted", latency_us=latency_us)]
    return written(path, rows, source="predicted", **fields)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        *((low, high, "same") for low, high in ((0.995, 1.005), (1 / 1.01, 1.01))),
        *((1.0101, 1.02, "slower"), (0.97, 0.9900, "faster")),
        *((1.005, 1.02, "ambiguous"), (0.98, 0.995, "ambiguous")),
        *((0.9, 1.1, "ambiguous"), (1.01, 1.02, "ambiguous")),
    ],
)
def test_judge(low, high, expected):
    assert judge(low, high, MARGIN) == expected


@given(
    st.floats(min_value=0.5, max_value=2.0),
    st.floats(min_value=0.0, max_value=0.5),
    st.floats(min_value=0, max_value=0.9),
)
def test_a_wider_margin_never_finds_a_difference(low, width, margin):
    """same stays same, and slower never turns into faster."""
    order = {"slower": 0, "faster": 0, "ambiguous": 1, "same": 2}
    narrow, wide = judge(low, low + width, margin), judge(low, low + width, margin + 0.05)
    assert order[wide] >= order[narrow]
    assert {narrow, wide} != {"slower", "faster"}


def test_the_interval_is_that_of_the_ratios_of_samples():
    base_us = [float(value) for value in range(101, 111)]
    new_us = [float(value) for value in range(201, 211)]
    pair = sampled(base_us, new_us)
    assert pair.ratio == pytest.approx(205.5 / 105.5)
    # Of the 100 ratios of a new to a base sample, the 24th from either end.
    ratios = sorted(later / earlier for later in new_us for earlier in base_us)
    assert (pair.ratio_low, pair.ratio_high) == (ratios[23], ratios[76])
    assert (pair.verdict, pair.from_samples, pair.reason) == ("slower", True, None)


@pytest.mark.parametrize(
    ("middle_us", "step", "expected"),
    [
        *[(100.0, 5e-4, "same"), (103.0, 5e-4, "slower"), (97.0, 5e-4, "faster")],
        *[(101.0, 5e-4, "ambiguous"), (105.0, 0.02, "ambiguous")],
    ],
)
def test_verdicts_from_samples(middle_us, step, expected):
    assert sampled(spread(100.0, step=step), spread(middle_us, step=step)).verdict == expected


def test_samples_count_not_the_interval_in_the_row():
    base_us, new_us = spread(100.0), spread(103.0)
    wide = {"latency_ci_low_us": 50.0, "latency_ci_high_us": 200.0}
    base, new = row(SHORT, "lean", base_us, **wide), row(SHORT, "lean", new_us, **wide)
    assert pair_of(base, new, base_us, new_us).verdict == "slower"
    without = pair_of(base, new)
    assert (without.verdict, without.from_samples) == ("ambiguous", False)
    assert (without.ratio_low, without.ratio_high) == (50 / 200, 200 / 50)


def test_one_side_without_samples_uses_that_rows_interval():
    base, new = row(SHORT, "lean", spread(100.0)), row(SHORT, "lean", spread(103.0))
    pair = pair_of(base, new, [], spread(103.0))
    # Of 11 samples the 2nd and the 10th stand in the row, at 95%.
    assert (pair.ratio_low, pair.ratio_high) == pytest.approx((102.588 / 100.4, 103.412 / 99.6))
    assert (pair.verdict, pair.from_samples) == ("slower", False)
    none = {"latency_ci_low_us": None, "latency_ci_high_us": None}
    pair = pair_of({**base, **none}, {**new, **none})
    assert (pair.verdict, pair.ratio, pair.ratio_low) == ("ambiguous", pytest.approx(1.03), None)
    assert pair.reason == "a row has no interval, neither from samples nor of its own"


def test_too_few_samples_for_the_interval():
    pair = sampled(spread(100.0, 11), spread(200.0, 3))
    assert (pair.verdict, pair.reason) == ("ambiguous", "new has 3 samples and an interval takes 4")
    assert sampled(spread(100.0, 11), spread(200.0, 4)).verdict == "slower"


@pytest.mark.parametrize("status", ["noisy", "suspect"])
def test_noisy_and_suspect_rows_are_ambiguous_at_best(status):
    pair = sampled(spread(100.0), spread(200.0), status=status, reason="for some reason")
    assert (pair.verdict, pair.reason) == ("ambiguous", f"new ({status}): for some reason")
    assert pair.ratio == pytest.approx(2.0)
    assert outcome(pair) == f"ambiguous (ok → {status})"
    # The figures of a suspect row mean nothing any more; a noisy row's are wide.
    assert pair.broken == (status == "suspect")


@pytest.mark.parametrize(
    "status", ["crashed", "timeout", "incorrect", "out_of_memory", "unsupported"]
)
def test_a_row_that_failed_has_no_verdict(status):
    # The latency of a wrong result is none.
    samples_us = spread(100.0) if status == "incorrect" else []
    pair = sampled(spread(100.0), samples_us, status=status, reason="it failed")
    assert (pair.verdict, pair.ratio) == (None, None)
    assert pair.latencies_us == (pytest.approx(100.0), None)
    assert (pair.broken, pair.mended, outcome(pair)) == (True, False, f"ok → {status}")
    assert (group(pair), pair.reason) == ("broken", f"new ({status}): it failed")


def test_a_cell_that_works_again_or_never_did():
    crashed, fine = row(SHORT, status="crashed", reason="it died"), row(SHORT, "lean", spread(10.0))
    mended = pair_of(crashed, fine)
    assert (group(mended), outcome(mended)) == ("mended", "crashed → ok")
    both = pair_of(crashed, crashed)
    assert (group(both), outcome(both)) == ("no verdict", "crashed")
    assert both.reason == "both (crashed): it died"
    differently = pair_of(crashed, row(SHORT, status="timeout"))
    assert outcome(differently) == "crashed → timeout"
    assert differently.reason == "base (crashed): it died; new (timeout)"
    assert not differently.broken
    noisy = row(SHORT, "lean", spread(10.0), status="noisy", reason="wide")
    assert group(pair_of(noisy, crashed)) == "broken"


@pytest.mark.parametrize(
    ("latency_us", "expected"), [(10.05, "same"), (10.2, "slower"), (9.8, "faster")]
)
def test_predictions_are_compared_by_their_medians(latency_us, expected):
    base = row(SHORT, source="predicted", latency_us=10.0)
    pair = pair_of(base, row(SHORT, source="predicted", latency_us=latency_us))
    assert (pair.verdict, pair.ratio_low, pair.from_samples) == (expected, None, False)
    assert pair.ratio == pytest.approx(latency_us / 10)


def test_what_rounds_to_zero_has_no_minus():
    assert difference(sampled(spread(100.0), spread(99.999))) == "+0.00%"
    assert difference(sampled(spread(100.0), spread(99.99))) == "-0.01%"


def test_energy_is_compared_too():
    [energy] = [quantity for quantity in COMPARED if quantity.name == "energy_mj"]
    assert energy.stem == "energy"
    base, new = (row(SHORT, "lean", spread(10.0), energy_mj=energy_mj) for energy_mj in (4.0, 5.0))
    assert pair_of(base, new).ratio_of(energy) == 1.25
    assert pair_of({**base, "energy_mj": None}, new).ratio_of(energy) is None
    assert pair_of(base, {**new, "status": "incorrect"}).ratio_of(energy) is None


@given(st.integers(min_value=0, max_value=2**32), st.floats(min_value=0.9, max_value=1.1))
def test_exchanging_the_runs_mirrors_the_interval(seed, ratio):
    generator = random.Random(seed)
    base_us = [100 * (1 + generator.gauss(0, 0.002)) for _ in range(12)]
    new_us = [100 * ratio * (1 + generator.gauss(0, 0.002)) for _ in range(15)]
    there, back = sampled(base_us, new_us), sampled(new_us, base_us)
    assert there.ratio_low is not None
    assert there.ratio_high is not None
    mirrored = 1 / there.ratio_high, 1 / there.ratio_low
    assert (back.ratio_low, back.ratio_high) == pytest.approx(mirrored)
    assert there.ratio_low <= median(new_us) / median(base_us) <= there.ratio_high
    assert {there.verdict, back.verdict} not in ({"slower"}, {"faster"})


def test_the_interval_holds_the_true_ratio():
    """95% is promised; three standard deviations of 1000 trials are 2%."""
    generator = random.Random(7)
    inside = 0
    for _ in range(1000):
        # A long tail to one side: medians 100 (1 + 0.01 ln 2) and 1.02 times that.
        base_us = [100 * (1 + generator.expovariate(100.0)) for _ in range(12)]
        new_us = [102 * (1 + generator.expovariate(100.0)) for _ in range(20)]
        pair = sampled(base_us, new_us)
        assert pair.ratio_low is not None
        assert pair.ratio_high is not None
        inside += pair.ratio_low <= 1.02 <= pair.ratio_high
    assert inside >= 930


def test_same_kernel_and_problem_are_paired(tmp_path):
    lean_us = spread(10.0)
    base = {(SHORT, "lean"): lean_us, (SHORT, "fa2"): spread(20.0), (LONG, "lean"): spread(40.0)}
    new = {
        (SHORT, "fa2"): spread(22.0),
        (SHORT, "lean"): lean_us,
        (LONG, "fixed_split"): spread(50.0),
    }
    comparison = compared(tmp_path, base, new)
    assert [(pair.label, pair.verdict) for pair in comparison.pairs] == [
        (f"fa2 · {LABEL}", "slower"),
        (f"lean · {LABEL}", "same"),
    ]
    assert comparison.only_in_base == ("lean · b1 h8 n4096 d64 fp16 HND",)
    assert comparison.only_in_new == ("fixed_split · b1 h8 n4096 d64 fp16 HND",)
    assert (comparison.without_samples, comparison.source) == (0, "measured")
    chosen = compared(tmp_path / "chosen", base, new, kernels=["fa2"])
    assert [pair.kernels for pair in chosen.pairs] == ["fa2"]
    assert chosen.only_in_base == ()


def test_two_kernels_of_a_run_are_paired_by_problem(tmp_path):
    latencies = {(SHORT, "lean"): 10.0, (SHORT, "fa2"): 20.0, (LONG, "fa2"): 80.0}
    latencies |= {(LONG, "lean"): 40.0, (problem(8192), "lean"): 80.0}
    run = written(tmp_path / "run", {cell: spread(us) for cell, us in latencies.items()})
    comparison = compare(f"{run}:lean", f"{run}:fa2", margin=MARGIN)
    assert [(pair.kernels, pair.problem, pair.ratio) for pair in comparison.pairs] == [
        ("lean → fa2", SHORT, pytest.approx(2.0)),
        ("lean → fa2", LONG, pytest.approx(2.0)),
    ]
    assert comparison.only_in_base == ("lean · b1 h8 n8192 d64 fp16 HND",)
    assert (comparison.base.name, comparison.new.name) == (f"{run}:lean", f"{run}:fa2")
    # Two kernels have settings of their own.
    assert comparison.other_settings == 0


def test_a_kernel_of_each_run(tmp_path):
    base = written(tmp_path / "base", {**ONE, (SHORT, "fa2"): spread(30.0)})
    new = written(tmp_path / "new", {(SHORT, "lean"): spread(50.0), (SHORT, "mine"): spread(5.0)})
    comparison = compare(f"{base}:lean", f"{new}:mine", margin=MARGIN)
    assert [pair.ratio for pair in comparison.pairs] == [pytest.approx(0.5)]


def test_warm_and_cold_never_pair_and_never_share_a_statistic(tmp_path):
    def rows(cold_us: float, warm_us: float) -> list[dict[str, Any]]:
        warm = row(SHORT, "lean", spread(warm_us), cache="warm", cell="warm cell")
        return [row(SHORT, "lean", spread(cold_us)), warm]

    comparison = compared(tmp_path, rows(10.0, 4.0), rows(20.0, 4.0))
    assert {pair.problem_label: pair.ratio for pair in comparison.pairs} == {
        LABEL: pytest.approx(2.0),
        f"{LABEL} warm": pytest.approx(1.0),
    }
    summaries = summarise(comparison.pairs)
    assert [(of.cache, of.every.problems, of.every.geomean) for of in summaries] == [
        ("cold", 1, pytest.approx(2.0)),
        ("warm", 1, pytest.approx(1.0)),
    ]


def test_a_row_that_failed_before_it_chose_settings_is_paired(tmp_path):
    """Its config_choice is null; the run's manifest has the request."""
    base = written(tmp_path / "base", ONE, configs="best")
    failed = [row(SHORT, status="crashed", reason="died")]
    comparison = compare(base, written(tmp_path / "new", failed, configs="best"), margin=MARGIN)
    assert counts(comparison.pairs) == {"broken": 1}
    assert [pair.label for pair in comparison.failures(0.05)] == [f"lean · {LABEL}"]


def test_order_is_what_needs_a_look_first(tmp_path):
    new_us = {1: 10.0, 2: 11.0, 3: 12.0, 4: 9.0, 5: 8.0, 6: 10.1}
    base = {(problem(n), "lean"): spread(10.0) for n in range(1, 8)}
    rows = [row(problem(n), "lean", spread(us)) for n, us in new_us.items()]
    comparison = compared(tmp_path, base, [*rows, row(problem(7), status="crashed")])
    order = "7 broken, 3 slower, 2 slower, 6 ambiguous, 5 faster, 4 faster, 1 same"
    named = [f"{pair.problem.context} {group(pair)}" for pair in comparison.pairs]
    assert named == order.split(", ")
    worst, best = worst_regression(comparison.pairs), best_gain(comparison.pairs)
    assert worst is not None
    assert best is not None
    assert (worst.problem.context, best.problem.context) == (3, 5)
    assert comparison.without_samples == 6
    assert [pair.problem.context for pair in comparison.failures(0.15)] == [7, 3]
    assert [pair.problem.context for pair in comparison.failures(0.0)] == [7, 3, 2]


def test_statistics_by_hand(tmp_path):
    """Ratios 2, 1/2, 2 and 1; a noisy 8 stays outside."""
    ratios = {1: 2.0, 2: 0.5, 3: 2.0, 4: 1.0}
    base = {(problem(n), "lean"): spread(10.0) for n in (1, 2, 3, 4, 5)}
    rows = [row(problem(n), "lean", spread(10.0 * ratio)) for n, ratio in ratios.items()]
    rows.append(row(problem(5), "lean", spread(80.0), status="noisy", reason="wide"))
    comparison = compared(tmp_path, base, rows)
    (summary,) = summarise(comparison.pairs)
    assert summary.changed is not None
    assert (summary.every.problems, summary.changed.problems) == (4, 3)
    assert summary.every.geomean == pytest.approx(2 ** (1 / 4))
    assert summary.changed.geomean == pytest.approx(2 ** (1 / 3))
    assert summary.median_difference == pytest.approx(0.75)
    assert sentences(comparison)[:2] == [
        "New over base: geometric mean 1.1892x, median 1.5000x, over 4 cells ok on both sides;"
        " median |difference| 75.00%.",
        "Not the same: 3 cells, geometric mean 1.2599x.",
    ]


def test_what_all_changed_has_one_mean_and_what_did_not_has_no_worst_cell(tmp_path):
    comparison = compared(tmp_path, ONE, {(SHORT, "lean"): spread(20.0)})
    assert not any(sentence.startswith("Not the same") for sentence in sentences(comparison))
    comparison = compared(tmp_path / "same", ONE, ONE)
    assert worst_regression(comparison.pairs) is best_gain(comparison.pairs) is None
    assert summarise(comparison.pairs)[0].changed is None
    assert comparison.failures(0.0) == []


def test_what_is_the_same_keeps_the_order_of_the_sweep(tmp_path):
    new_us = {4: 10.0, 1: 10.02, 3: 9.98, 2: 10.01}
    base, new = (
        {(problem(context), "lean"): spread(us) for context, us in of.items()}
        for of in (dict.fromkeys(new_us, 10.0), new_us)
    )
    comparison = compared(tmp_path, base, new)
    assert counts(comparison.pairs) == {"same": 4}
    assert [pair.problem.context for pair in comparison.pairs] == [4, 1, 3, 2]


def test_two_kernels_are_slower_and_faster_not_worse_and_better(tmp_path):
    latencies = {(SHORT, "lean"): 10.0, (LONG, "lean"): 10.0}
    latencies |= {(SHORT, "fa2"): 20.0, (LONG, "fa2"): 5.0}
    run = written(tmp_path / "run", {key: spread(us) for key, us in latencies.items()})
    words = sentences(compare(f"{run}:lean", f"{run}:fa2", margin=MARGIN))
    assert [line.split(",")[0] for line in words if "against base" in line] == [
        f"Slowest against base: lean → fa2 · {LABEL}",
        "Fastest against base: lean → fa2 · b1 h8 n4096 d64 fp16 HND",
    ]
    assert not any("Worst" in line or "Best" in line for line in words)
    # One kernel before and after has regressed.
    later = written(tmp_path / "later", {(SHORT, "lean"): spread(20.0)})
    words = sentences(compare(f"{run}:lean", f"{later}:lean", margin=MARGIN))
    assert any(line.startswith("Worst regression: lean · ") for line in words)


def test_winners_that_change_are_counted_by_medians_and_with_a_level_side(tmp_path):
    """Four problems on two boards; libraries stand against lean, other kernels do not."""

    def board(libraries_us: list[float]) -> Side:
        shapes = [problem(1024 * (1 + number)) for number in range(4)]
        us = {"lean": [10.0] * 4, "cudnn_best": libraries_us, "fa2": [5.0] * 4}
        timed = [(shape, name, us[name][at]) for at, shape in enumerate(shapes) for name in us]
        return {(shape, name): spread(latency, step=1e-5) for shape, name, latency in timed}

    # Ahead twice; within a percent; from ahead to behind; behind twice.
    comparison = compared(tmp_path, board([12.0, 10.05, 11.0, 9.0]), board([12.1, 9.95, 9.0, 9.5]))
    flips = flips_of(comparison)
    assert flips is not None
    assert (flips.baseline, flips.are_libraries, flips.problems) == (("lean",), True, 4)
    assert (flips.by_median, flips.by_standing) == (2, 1)
    assert flips.base == {"ahead": 2, "level": 1, "behind": 1}
    assert flips.new == {"ahead": 1, "level": 1, "behind": 2}
    of_two = compare(
        *(f"{side.run.directory}:lean" for side in (comparison.base, comparison.new)), margin=MARGIN
    )
    assert flips_of(of_two) is None


def test_environment_differences_name_the_fields(tmp_path):
    base = written(tmp_path / "base", ONE)
    changed = {"triton": "3.7.0", "gpu_product": "NVIDIA A100", "commit": None, "cuda": "13.0"}
    new = written(tmp_path / "new", ONE, environment={**ENVIRONMENT, **changed})
    assert differences(base, new) == [
        ("triton", ("3.6.0",), ("3.7.0",)),
        ("gpu_product", ("NVIDIA H200",), ("NVIDIA A100",)),
        ("commit", ("abc",), ("none",)),
    ]
    # What only one of them recorded is no difference, whichever it is.
    assert [field for field, *_ in differences(new, base)] == ["triton", "gpu_product", "commit"]
    assert differences(base, written(tmp_path / "equal", ONE)) == []


def test_other_ways_of_measuring_are_differences(tmp_path):
    def measure(samples: int) -> dict[str, Any]:
        effort = {"relative_ci": 0.005, "min_samples": samples}
        return {"effort": effort, "cache": "cold", "energy": samples > 10}

    runs = [written(tmp_path / str(n), ONE, measure=measure(n)) for n in (10, 20)]
    expected = [("min_samples", ("10",), ("20",)), ("energy", ("no",), ("yes",))]
    assert differences(*runs) == expected
    # Predictions measure nothing.
    runs = [predicted(tmp_path / f"p{n}", measure=measure(n)) for n in (10, 20)]
    assert differences(*runs) == []


@pytest.mark.usefixtures("wrong_by_2_5_percent")
def test_predictions_for_two_gpus_say_so(tmp_path):
    software = {**ENVIRONMENT, "gpu_product": None}
    runs = [
        predicted(tmp_path / gpu, gpu=f"NVIDIA {gpu}", environment=software)
        for gpu in ("H200", "A100")
    ]
    assert differences(*runs) == [("gpu_product", ("NVIDIA H200",), ("NVIDIA A100",))]
    comparison = compare(*runs, margin=MARGIN)
    assert comparison.source == "predicted"
    assert sentences(comparison)[-1].startswith(
        "Predicted: medians alone are compared, within the model's error of 2.5% is the same"
    )


@pytest.mark.parametrize(("new_us", "verdict"), [(10.2, "same"), (11.0, "slower")])
@pytest.mark.usefixtures("wrong_by_2_5_percent")
def test_a_difference_within_the_model_s_error_is_none(tmp_path, new_us, verdict):
    runs = predicted(tmp_path / "base"), predicted(tmp_path / "new", new_us)
    comparison = compare(*runs, margin=MARGIN)
    assert comparison.margin.is_model_error
    assert [pair.verdict for pair in comparison.pairs] == [verdict]
    # A wider margin is kept.
    assert compare(*runs, margin=0.2).margin == Margin(0.2)


def test_other_settings_are_counted(tmp_path):
    changed = row(SHORT, "lean", spread(10.0), config={"tile_tokens": 128})
    base = {**ONE, (LONG, "lean"): spread(10.0)}
    comparison = compared(tmp_path, base, [changed, row(LONG, "lean", spread(10.0))])
    assert comparison.other_settings == 1
    assert "Launch settings differ in 1 of 2 cells." in sentences(comparison)


def test_of_two_rows_of_a_cell_the_later_counts(tmp_path):
    new = [row(SHORT, "lean", spread(99.0)), row(SHORT, "lean", spread(20.0))]
    assert [pair.ratio for pair in compared(tmp_path, ONE, new).pairs] == [pytest.approx(2.0)]


def test_a_run_under_runs_and_a_colon_in_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "runs" / "before", ONE)
    written(tmp_path / "odd:name", ONE)
    comparison = compare("before", "odd:name", margin=MARGIN)
    assert (comparison.base.name, comparison.new.name) == ("runs/before", "odd:name")
    assert compare("before:lean", "odd:name:lean", margin=MARGIN).new.name == "odd:name:lean"


#: Sides and kernels of comparisons that are not possible.
REFUSED = (
    "a:lean b; a b:lean; a:lean b:lean lean; a a; a:lean ./a:lean; a: b; :lean b:lean;"
    " a:lena b:lean; a b nothing; a b fa2; a none; a empty; a far; a others; a warm; a best;"
    " a predicted; a damaged"
)


def test_refusals(tmp_path, monkeypatch, snapshot):
    monkeypatch.chdir(tmp_path)
    run_of(tmp_path / "a", ONE)
    run_of(tmp_path / "b", {**ONE, (SHORT, "fa2"): spread(10.0)})
    run_of(tmp_path / "far", {(LONG, "lean"): spread(10.0)})
    run_of(tmp_path / "others", {(SHORT, "fa2"): spread(10.0), (SHORT, "cudnn"): spread(10.0)})
    run_of(tmp_path / "best", ONE, configs="best")
    write_run(tmp_path / "empty", [])
    write_run(tmp_path / "warm", [row(SHORT, "lean", spread(4.0), cache="warm")])
    predicted(tmp_path / "predicted")
    (run_of(tmp_path / "damaged", ONE) / SAMPLES).write_bytes(b"garbage")
    messages = []
    for words in REFUSED.split("; "):
        base, new, *kernels = words.split()
        with pytest.raises(UserError) as raised:
            compare(base, new, margin=MARGIN, kernels=kernels)
        messages += [f"compare {words}", f"    {raised.value}"]
    assert all("\n" not in message for message in messages)
    assert "\n".join(messages) == snapshot


@pytest.mark.parametrize(
    "content",
    # Without ids pytest names a case by its bytes, which hold the time of compression: two workers
    # then collect two different lists.
    [
        pytest.param(gzip.compress(b"not json\n"), id="not-json"),
        pytest.param(gzip.compress(b'{"cell": "x"}\n'), id="no-samples"),
        pytest.param(b"garbage", id="not-gzip"),
        pytest.param(b"\x1f\x8b\x08", id="cut-off"),
    ],
)
def test_damaged_samples_are_named(tmp_path, content):
    base, new = run_of(tmp_path / "base", ONE), run_of(tmp_path / "new", ONE)
    (new / SAMPLES).write_bytes(content)
    with pytest.raises(UserError, match=r"samples\.jsonl\.gz is damaged: remove it, then"):
        compare(str(base), str(new), margin=MARGIN)


def test_microseconds():
    values = (5.2482, 11.8887, 108.12, 1610.4, 12345.6, None)
    assert [microseconds(value) for value in values] == "5.248 11.89 108.1 1610 12346 -".split()


def test_tuned_heuristic_and_given_settings_pair(tmp_path):
    """Whether one is faster is what the comparison is for; all settings were known before."""
    base = written(tmp_path / "heuristic", ONE, configs="heuristic")
    tuned = row(SHORT, "lean", spread(9.0), config={"tile_tokens": 128}, config_choice="tuned")
    comparison = compare(base, written(tmp_path / "new", [tuned], configs="default"), margin=MARGIN)
    assert counts(comparison.pairs) == {"faster": 1}
    assert comparison.other_settings == 1


def test_rows_of_several_processes_are_compared_by_their_intervals(tmp_path: Path) -> None:
    """The samples of one process do not show what another process would have measured."""
    base_us, new_us = spread(10.0, step=0.0001), spread(10.4, step=0.0001)
    many = {"processes": 3, "process_spread": 0.03}
    wide = {"latency_ci_low_us": 10.0, "latency_ci_high_us": 10.8}
    assert sampled(base_us, new_us).verdict == "slower"
    pair = sampled(base_us, new_us, **many, **wide)
    assert (pair.verdict, pair.from_samples) == ("ambiguous", False)
    # Whatever the margin that was asked for, the runs differ by 3% anyway.
    rows = [row(SHORT, "lean", spread(latency_us), **many) for latency_us in (10.0, 10.2)]
    comparison = compared(tmp_path, rows[:1], rows[1:])
    assert (comparison.margin.share, comparison.pairs[0].verdict) == (0.03, "same")
