"""`leanbench decode`: its sweep, bad input, and a predicted run from end to end."""

from pathlib import Path

import pytest
from cli.running import invoke, printed

from leanbench.records.reading import Run, read_run

pytestmark = pytest.mark.usefixtures("no_gpu")


def decoded(out: Path, words: str) -> Run:
    """Predict a sweep for an H200, without a report. Return its run."""
    command = f"decode {words} --gpu h200 --out {out} --name one --no-report"
    printed(*command.split())
    return read_run(out / "one")


def test_a_prediction_is_a_run_with_a_report(tmp_path):
    command = (
        f"decode opt-6.7b --positions 64k --context 2k,64k,128k --kernels lean,fa2,sdpa"
        f" --gpu h200 --out {tmp_path} --name one --quiet"
    )
    printed(*command.split())
    run = read_run(tmp_path / "one")
    by_cell = {(row.kernel, problem.context): row for row, problem in run.results}
    assert len(by_cell) == 9
    assert {by_cell["sdpa", 2048].status, by_cell["lean", 131072].status} == {"unsupported"}
    lean, fa2 = by_cell["lean", 65536], by_cell["fa2", 65536]
    assert lean.source == "predicted"
    assert (lean.weight_bytes or 0) > 13e9
    assert lean.no_attention_us == fa2.no_attention_us
    assert (lean.attention_share or 0) > 0.5
    assert (lean.latency_us or 0) < (fa2.latency_us or 0)
    assert run.manifest["command"].startswith("leanbench decode opt-6.7b --context 2k")
    printed(*command.split(), "--resume")
    assert len(read_run(tmp_path / "one").results) == 9
    assert "tokens" in (tmp_path / "one" / "report.html").read_text()


@pytest.mark.deep
def test_the_bound_is_marked_and_compared_nowhere(tmp_path):
    command = (
        "decode llama-3-8b --context 4k --kernels lean,fa2,no_attention --gpu h200"
        f" --out {tmp_path} --name one --no-report"
    )
    shown = printed(*command.split())
    run = read_run(tmp_path / "one")
    us = {row.kernel: row.latency_us or 0 for row, _ in run.results}
    assert us["no_attention"] < us["lean"] < us["fa2"]
    (line,) = [line for line in shown.splitlines() if "* !" in line]
    assert f"* ! {us['lean']:.1f}" in line
    assert f"* ! {us['no_attention']:.1f}" not in line
    assert "lean vs fa2" in shown
    assert "vs no_attention" not in shown
    over = f"{us['fa2'] / us['lean']:.2f}×"
    assert "Fastest: lean" in shown
    assert f"lean is {over} as fast as the fastest other kernel" in " ".join(shown.split())


def test_the_models_of_a_list_have_the_options(tmp_path):
    command = "decode llama-3-70b,qwen3-32b --tp 8 --layers 4 --context 1k --gpu h200 --dry-run"
    shown = printed(*command.split())
    assert "model=llama-3-70b:tp=8:layers=4" in shown
    assert "model=qwen3-32b:tp=8:layers=4" in shown


@pytest.mark.deep
def test_default_contexts_end_at_the_models_positions(tmp_path):
    models = "opt-1.3b,gemma-3-27b,llama-3-8b"
    command = f"decode {models} --kernels fa2 --gpu h200 --out {tmp_path} --name one"
    result = invoke(*command.split(), "--no-report")
    assert result.exit_code == 0
    contexts: dict[str | None, list[int]] = {}
    for row, problem in read_run(tmp_path / "one").results:
        assert row.status == "ok"
        contexts.setdefault(problem.whole_model, []).append(problem.max_context)
    assert contexts == {
        "opt-1.3b": [1024, 2048],
        "gemma-3-27b": [1024, 4096, 16384, 65536],
        "llama-3-8b": [1024, 4096, 8192],
    }
    said = " ".join(result.stderr.split())
    assert (
        "opt-1.3b has 2048 positions: contexts are 1024, 2048 in place of 1024, 4096, 16384, 65536;"
        " --positions 65536 asks for all of them."
    ) in said
    assert "gemma-3-27b has" not in said


def test_a_quiet_run_says_nothing_of_contexts_and_given_ones_are_not_cut():
    command = "decode opt-1.3b --kernels fa2 --gpu h200 --dry-run"
    for words in ("", "--quiet", "--context 4k"):
        result = invoke(*command.split(), *words.split())
        assert result.exit_code == 0
        assert ("positions: contexts" in " ".join(result.stderr.split())) is not bool(words)
    assert "n4096" in result.stdout
    assert "1 cell (1 unsupported)" in result.stdout


def test_a_model_that_fits_nowhere_ends_with_1(tmp_path):
    command = f"decode llama-3-70b --context 1k --kernels fa2 --gpu h200 --out {tmp_path}"
    result = invoke(*command.split(), "--no-report")
    assert result.exit_code == 1
    assert "Nothing to compare: the only cell is out of memory: needs 142.0 GB" in result.stderr


def test_what_a_prediction_leaves_out_is_said(tmp_path):
    command = f"decode opt-6.7b --context 1k --kernels fa2 --gpu h200 --out {tmp_path} --name one"
    said = invoke(*command.split(), "--energy", "--prefill", "1k", "--no-report", "--quiet").stderr
    assert "Only a GPU can measure energy, prefill: left out." in said
    [(row, _)] = read_run(tmp_path / "one").results
    assert row.latency_us is not None
    assert (row.energy_per_token_j, row.prefill_us) == (None, None)


def test_batches_are_drawn_as_those_of_sweeps_and_the_manifest_has_the_request(tmp_path):
    words = "gpt-oss-20b --batch 4 --context 8k --lengths azure-code --kernels lean"
    run = decoded(tmp_path, words)
    [(row, problem)] = run.results
    assert problem.is_ragged
    assert row.tokens_per_s == pytest.approx(4e6 / (row.latency_us or 0))
    [grid] = run.manifest["sweep"]["grids"]
    assert grid["whole_model"] == ["gpt-oss-20b"]
    assert "heads" not in grid
