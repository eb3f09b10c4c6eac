from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from example_runs import WriteRun, problem, row, row_with_all_fields

from leanbench.core.llm.model import read_model
from leanbench.core.problem import AttentionProblem
from leanbench.paper.claim import FEWEST_SAMPLES, SAMPLES
from leanbench.paper.claims import claims
from leanbench.paper.measured import MeasuredClaim, claims_of_runs
from leanbench.records.reading import read_runs
from leanbench.run.sweep_file import shipped_sweeps

OVER_FA2 = "7a: LA over FA2 at 512k"
OVER_FD = "abstract: LA over FD at 256k, 56 heads"
GAP = "13: the gap to FD grows past 128k: LA over FD, 512k over 128k"


def value(measured: MeasuredClaim) -> float:
    assert measured.figure is not None
    return round(measured.figure.value, 9)


def found(measured: MeasuredClaim) -> tuple[float, str | None]:
    return value(measured), measured.verdict


def named(outcomes: list[MeasuredClaim]) -> dict[str, MeasuredClaim]:
    return {f"{outcome.claim.figure}: {outcome.claim.words}": outcome for outcome in outcomes}


def claims_of(*directories: Path) -> dict[str, MeasuredClaim]:
    [(_, _, outcomes)] = claims_of_runs(read_runs(directories))
    return named(outcomes)


def timed(shapes: Iterable[AttentionProblem], **latencies_us: float) -> list[dict[str, Any]]:
    return [row(shape, name, us) for shape in shapes for name, us in latencies_us.items()]


def at_512k(heads: int = 56) -> AttentionProblem:
    return problem(512 * 1024, heads)


def gap_rows() -> list[dict[str, Any]]:
    """Energy of lean over fixed_split is 1 at 128k and 256k, and 1.001 at 512k."""
    energies = {(k, name): 1.0 for k in (128, 256, 512) for name in ("lean", "fixed_split")}
    energies[512, "lean"] = 1.001
    return [
        row(problem(k * 1024), name, 10.0, energy_mj=energy)
        for (k, name), energy in energies.items()
    ]


def test_a_claim_of_one_cell(write_run: WriteRun) -> None:
    rows = [
        row_with_all_fields(at_512k(), "lean", 100.0, energy_mj=10.0),
        # Of several configs the fastest counts.
        row_with_all_fields(at_512k(), "lean", 90.0, cell="slower", status="suspect", reason="x"),
        row_with_all_fields(at_512k(), "lean", 120.0, cell="other"),
        row_with_all_fields(at_512k(), "fa2", 246.0, energy_mj=9.0),
        row_with_all_fields(at_512k(), "fixed_split", 101.0, energy_mj=11.0),
    ]
    outcomes = claims_of(write_run(rows))
    assert len(outcomes) == len(claims())
    over_fa2 = outcomes[OVER_FA2]
    assert (over_fa2.words, over_fa2.verdict) == ("2.46x (2.41 to 2.51)", "holds")
    assert (over_fa2.run, over_fa2.cell) == ("example", "b1 h56 n524288 d64 fp16 HND")
    assert found(outcomes["7a: FD over FA2 at 512k"]) == (pytest.approx(2.46 / 1.01), "more")
    energy = outcomes["13: energy of LA over FA2 at 512k"]
    assert (energy.words, energy.verdict) == ("1.11x (1.10 to 1.12)", "reversed")
    assert outcomes["13: energy of LA over FD at 512k, 56 heads"].verdict == "holds"
    # An energy is one reading, known to 1%.
    gap = claims_of(write_run(gap_rows(), folder="gap"))[GAP]
    assert (gap.words, gap.verdict) == ("1.00x (0.98 to 1.02)", "not resolved")
    lacking = outcomes["7a: LA over FA2 past 8k, 56 heads, batch 1, head_dim 64"]
    assert (lacking.figure, lacking.verdict, lacking.words, lacking.run) == (None, None, "", "")
    assert lacking.cell.startswith("has 1 of 6 problems, b1 h56 n16384")


def test_claims_of_several_cells_name_the_one_that_decides(write_run: WriteRun) -> None:
    contexts = [16, 32, 64, 128, 256, 512]
    rows = [row(problem(k * 1024), "lean", 10.0) for k in contexts]
    rows += [row(problem(k * 1024), "fa2", 10.0 * (1.5 if k == 64 else 3.0)) for k in contexts]
    lowest = claims_of(write_run(rows))["7a: LA over FA2 past 8k, 56 heads, batch 1, head_dim 64"]
    assert found(lowest) == (1.5, "less")
    assert lowest.cell == "b1 h56 n65536 d64 fp16 HND, of 6 problems"


def test_occupancy_is_of_sms_if_measured_and_of_schedules_if_predicted(write_run: WriteRun) -> None:
    needed = next(claim for claim in claims() if claim.words == "occupancy of FA2 is low").problems

    def occupancy(folder: str, share: float | None, **fields: Any) -> MeasuredClaim:
        own = {"sm_busy_share": share, "quantisation_efficiency": 0.9, **fields}
        rows = [row(shape, "fa2", 10.0, **own) for shape in needed]
        return claims_of(write_run(rows, folder=folder))["4: occupancy of FA2 is low"]

    measured = occupancy("measured", 0.4)
    assert (measured.words, measured.verdict) == ("40% (40 to 40)", "holds")
    predicted = occupancy("predicted", 0.4, source="predicted")
    assert (predicted.words, predicted.verdict) == ("90%", "more")
    # A run without --occupancy has no SM busy share.
    assert occupancy("without", None).figure is None


def test_figure_11_takes_a_uniform_batch_for_equal_lengths(write_run: WriteRun) -> None:
    claim = next(claim for claim in claims() if claim.figure == "11")
    uniform = problem(65536, 32, batch=8)
    assert {*claim.problems[0].contexts} == {65536}
    problems = [uniform, *claim.problems[1:]]
    rows = [row(shape, "lean", 10.0) for shape in problems]
    rows += [row(shape, "fixed_split", 10.0 + 2 * i) for i, shape in enumerate(problems)]
    assert found(claims_of(write_run(rows))[f"11: {claim.words}"]) == (1.8, "holds")


def step(model: str, context: int) -> AttentionProblem:
    q_heads, kv_heads, head_dim = read_model(model).heads
    return AttentionProblem(1, q_heads, kv_heads, context, head_dim, whole_model=model)


def test_a_request_is_its_prompt_and_the_middle_step_of_its_output(write_run: WriteRun) -> None:
    model, prompt = "opt-1.3b:positions=182272", 50 * 1024
    middle = step(model, prompt + 512)
    # 1 s of prompt, then 1024 tokens of 1 and 2 ms.
    rows = [
        row(step(model, prompt), "lean", 900.0, prefill_us=1e6),
        row(middle, "lean", 1000.0),
        row(middle, "fa2", 2000.0),
    ]
    name = "10: request with LA over FA2, OPT-1.3B, prompt of 50k, 1k output tokens"
    outcome = claims_of(write_run(rows))[name]
    assert value(outcome) == pytest.approx((1 + 2.048) / (1 + 1.024))
    # The steps are known to 1% to either side, the prompt's time is one reading.
    assert (outcome.words, outcome.verdict) == ("1.51x (1.49 to 1.52)", "more")
    assert outcome.cell == middle.label
    # Without the time of a prompt there is none.
    without = claims_of(write_run(rows[1:], folder="without"))[name]
    assert without.figure is None


def test_decodes_share_is_the_lowest_of_the_models(write_run: WriteRun) -> None:
    rows = []
    for model, prefill_us in (("opt-6.7b", 3e3), ("llama-3-8b", 1e3)):
        text = f"{model}:positions=17408"
        rows.append(row(step(text, 1024), "lean", 900.0, prefill_us=prefill_us))
        rows.append(row(step(text, 1032), "lean", 1000.0))
    outcomes = claims_of(write_run(rows))
    outcome = outcomes["3: decode's share of a request with LA, prompt of 1024, 16 output tokens"]
    assert value(outcome) == pytest.approx(16 / 19)
    assert (outcome.words, outcome.verdict) == ("84% (84 to 84)", "holds")


@pytest.mark.parametrize("count", [FEWEST_SAMPLES - 1, FEWEST_SAMPLES])
def test_samples_are_any_150_multi_head_problems(write_run: WriteRun, count: int) -> None:
    problems = [problem(1024 * (1 + i), 8 + i % 2) for i in range(count)]
    rows = timed(problems, lean=10.0, fa2=25.0)
    # Grouped-query problems are none of the paper's.
    rows += timed([problem(1024, 56, kv_heads=8)], lean=1.0, fa2=1.0)
    outcome = claims_of(write_run(rows))[f"text: LA over FA2, mean of {SAMPLES} samples"]
    if count < FEWEST_SAMPLES:
        assert (outcome.figure, outcome.cell) == (None, "needs 150 multi-head problems, has 149")
    else:
        assert found(outcome) == (pytest.approx(2.5), "holds")
        assert outcome.cell == (
            "150 multi-head problems: batch 1, heads 8 to 9, context 1k to 150k, head_dim 64, fp16"
        )


def at(second: int, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**row, "time": f"2026-01-02T03:04:{second:02}+00:00"} for row in rows]


def pair(context_k: int, lean_us: float, kernel: str, other_us: float) -> list[dict[str, Any]]:
    return timed([problem(context_k * 1024)], **{"lean": lean_us, kernel: other_us})


def test_each_claim_is_of_the_run_that_measured_it_last(write_run: WriteRun) -> None:
    rows = at(1, [*pair(512, 100, "fa2", 300), *pair(256, 100, "fixed_split", 110)])
    old = write_run(rows, folder="old", name="old")
    new = write_run(at(9, pair(512, 100, "fa2", 200)), folder="new", name="new")
    for order in ((old, new), (new, old)):
        outcomes = claims_of(*order)
        assert (value(outcomes[OVER_FA2]), outcomes[OVER_FA2].run) == (2.0, "new")
        # The older run alone has these cells.
        assert (value(outcomes[OVER_FD]), outcomes[OVER_FD].run) == (pytest.approx(1.1), "old")


def test_the_run_of_the_sweep_made_for_a_claim_goes_before_later_ones(write_run: WriteRun) -> None:
    def run(second: int, fa2_us: float, name: str, sweep: str) -> Path:
        rows = at(second, pair(512, 100, "fa2", fa2_us))
        return write_run(rows, folder=f"at{second}", name=name, sweep={"name": sweep})

    own = run(1, 300, "mine", "paper-fig7a")
    again = run(2, 280, "mine", "paper-fig7a")
    later = run(9, 200, "paper-fig7a", "another")
    # Of two runs of one sweep, which are named by their folders, the later one.
    outcome = claims_of(own, again, later)[OVER_FA2]
    assert (value(outcome), outcome.run) == (2.8, again.name)
    assert value(claims_of(own, later)[OVER_FA2]) == 3.0


def test_every_claim_has_a_shipped_sweep() -> None:
    assert {sweep for claim in claims() for sweep in claim.sweeps} <= set(shipped_sweeps())


def test_no_claim_mixes_runs(write_run: WriteRun) -> None:
    energies = gap_rows()
    # The newer run has lean alone at 512k, and is faster there: with the older run's fa2 it would
    # be 6x.
    old = write_run(at(1, [*pair(512, 100, "fa2", 300), *energies[:4]]), folder="old", name="old")
    new = write_run(at(9, [row(at_512k(), "lean", 50.0), *energies[4:]]), folder="new", name="new")
    outcomes = claims_of(old, new)
    assert (value(outcomes[OVER_FA2]), outcomes[OVER_FA2].run) == (3.0, "old")
    # Two of three problems in one run, the third in the other.
    gap = outcomes[GAP]
    assert (gap.figure, gap.run) == (None, "")
    assert gap.cell.startswith("has 2 of 3 problems, b1 h56 n131072")


def test_predictions_other_gpus_and_a_warm_l2_have_tables_of_their_own(write_run: WriteRun) -> None:
    rows = pair(512, 100, "fa2", 200)
    again = at(9, pair(512, 100, "fa2", 400))
    warm = [{**row, "cache": "warm"} for row in rows]
    predicted = [{**row, "source": "predicted"} for row in rows]
    there = {"env0": {"gpu_product": "NVIDIA B200"}}
    runs = [
        write_run(rows, folder="here", name="here"),
        write_run(again, folder="again", name="again"),
        write_run(warm, folder="warm", name="warm"),
        write_run(predicted, folder="model", name="model", source="predicted"),
        write_run(rows, folder="there", name="there", environments=there),
    ]
    seen = []
    for name, is_predicted, outcomes in claims_of_runs(read_runs(runs)):
        claim = named(outcomes)[OVER_FA2]
        seen.append((name, is_predicted, value(claim), claim.run))
    here = "NVIDIA H200, cold L2"
    assert seen == [
        *((here, False, 4.0, "again"), ("NVIDIA H200, warm L2", False, 2.0, "warm")),
        *((here, True, 2.0, "model"), ("NVIDIA B200, cold L2", False, 2.0, "there")),
    ]


def test_a_claim_is_evaluated_with_each_baseline_that_was_measured(write_run: WriteRun) -> None:
    us = {"lean": 100.0, "fa2": 180.0, "torch_flash_no_split": 500.0, "torch_flash": 120.0}
    rows = timed([at_512k()], **us)
    [(_, _, outcomes)] = claims_of_runs(read_runs([write_run(rows)]))
    over_fa2 = [outcome for outcome in outcomes if outcome.claim.words == "LA over FA2 at 512k"]
    assert [(outcome.baselines.fa2, value(outcome), outcome.verdict) for outcome in over_fa2] == [
        ("torch_flash_no_split", 5.0, "more"),
        ("fa2", 1.8, "less"),
    ]
    # Of the two pairs one alone is whole: there is no fixed_split.
    [of_both] = [outcome for outcome in outcomes if outcome.claim.words == "FD over FA2 at 512k"]
    assert (of_both.baselines.fd, value(of_both)) == ("torch_flash", pytest.approx(500 / 120))
    # A claim that was not measured appears once.
    [none] = [outcome for outcome in outcomes if outcome.claim.words == "LA over FA2 at 64 heads"]
    assert (none.baselines.fa2, none.figure) == ("fa2", None)


def test_flashinfer_is_judged_beside_the_other_baselines(write_run: WriteRun) -> None:
    context = {512: 100.0, 256: 50.0, 128: 30.0}
    rows = [
        row(problem(k * 1024), name, us, energy_mj=factor * us)
        for k, us in context.items()
        for name, factor in (("lean", 1.0), ("flashinfer_best", 1.2 if k == 512 else 1.1))
    ]
    outcomes = claims_of(write_run(rows))
    energy = outcomes["13: energy of LA over FlashInfer at 512k"]
    assert (value(energy), energy.verdict) == (pytest.approx(1 / 1.2), "holds")
    assert energy.baselines.others(energy.claim) == ("flashinfer_best",)
    gap = next(claim for name, claim in outcomes.items() if "the gap to FlashInfer" in name)
    assert (value(gap), gap.verdict) == (pytest.approx(1.1 / 1.2), "holds")
    # Nine of the ten contexts are missing.
    mean = outcomes["7a: LA over FlashInfer, mean of 1k to 512k"]
    assert (mean.figure, mean.baselines.names) == (None, ("flashinfer_best",))


def test_means_are_geometric_and_name_the_arithmetic(write_run: WriteRun) -> None:
    problems = [problem(1024 * (1 + i), 8) for i in range(SAMPLES)]
    rows = [row(shape, "lean", 10.0) for shape in problems]
    rows += [row(shape, "fa2", 80.0 if i % 2 else 20.0) for i, shape in enumerate(problems)]
    outcome = claims_of(write_run(rows))[f"text: LA over FA2, mean of {SAMPLES} samples"]
    assert (value(outcome), outcome.arithmetic) == (pytest.approx(4), pytest.approx(5))
    assert outcome.words == "4.00x (3.92 to 4.08), arithmetic 5.00x"
