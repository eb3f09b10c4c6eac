"""`leanbench recommend`: what it prints, from what, and what it refuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli.running import invoke, printed, refusal
from example_rows import row

from leanbench.advice.recommend import Recommendation, Request
from leanbench.core.llm.config import registry
from leanbench.core.llm.model import read_model
from leanbench.core.registry import kernels
from leanbench.gpu.catalogue import find
from leanbench.gpu.local import Target
from leanbench.records.reading import Run
from leanbench.run.cells import Sweep, expand
from leanbench.run.estimate import estimated_seconds
from leanbench.run.sweep_file import requested_sweep

pytestmark = pytest.mark.usefixtures("no_gpu")

LLAMA = "llama-3-70b --gpu h100 --gpus 4 --batch 32 --context 16k --usd-per-hour 2.5"


def lines(words: str) -> dict[str, str]:
    """Return the sentences by their headings."""
    text = printed("recommend", *words.split())
    return dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)


def data(words: str) -> Any:
    return json.loads(printed("recommend", *words.split(), "--json"))


@pytest.mark.parametrize(
    "words",
    [LLAMA, "llama-3-8b --gpu h200 --context 32k", "--shape 64/8x128 --gpu a100 --batch 8"],
    ids=["near shapes", "measured", "model"],
)
def test_what_it_prints(words: str, snapshot: Any):
    text = printed("recommend", *words.split())
    assert "\n".join(line.rstrip() for line in text.splitlines()) == snapshot


def test_json_has_the_figures_of_the_sentences():
    found = data(LLAMA)
    assert (found["kernel"], found["source"], found["tp"], found["cp"]) == (
        ("lean", "neighbours", 4, 1)
    )
    assert found["layer_us"] == pytest.approx(178.3, abs=0.1)
    assert found["attention_us"] == pytest.approx(80 * found["layer_us"])
    step_us = found["attention_us"] + found["without_attention_us"]
    assert found["tokens_per_s"] == pytest.approx(32e6 / step_us)
    dollars = 4 * 2.5 / 3600 / found["tokens_per_s"] * 1e6
    assert found["usd_per_million_tokens"] == pytest.approx(dollars)
    assert found["memory"]["kv_bytes"] == 80 * 2 * 2 * 128 * 2 * 16384 * 32
    assert found["kv_bytes"] == 2 * 2 * 128 * 2 * 16384 * 32
    assert {*found["others"]} == {
        *("tp 2 x cp 2", "cp 4", "pages of 16", "pages of 64", "e4m3 cache")
    }
    assert found["command"].startswith("leanbench sweep --model llama-3-70b --batch 32")


def test_the_command_sweeps_the_choice():
    found = data("llama-3-70b --gpu h100 --gpus 4 --batch 32 --context 16k --page-size 16")
    words = found["command"].split()
    assert words[words.index("--tp") + 1] == "4"
    assert words[words.index("--page-size") + 1] == "16"
    assert words[words.index("--kernels") + 1].split(",")[0] == found["kernel"]


def test_options_take_one_value():
    assert "LIST" not in printed("recommend", "--help").replace("--backends LIST", "")


def test_measured_rows_win_over_estimates():
    found = data("--shape 32/8x128 --gpu h200 --batch 8 --context 4k")
    assert (found["kernel"], found["source"]) == ("lean", "measured")
    sources = {option["kernel"]: option["source"] for option in found["options"]}
    assert (sources["flash_attn_3_best"], sources["cudnn_best"]) == ("measured", "neighbours")
    assert found["is_clear"]
    assert found["layer_error"] == pytest.approx(0.021, abs=0.003)  # GPUs of a product differ


def test_without_trials_there_is_no_estimate_from_neighbours():
    found = data("llama-3-8b --gpu h100 --backends fa2")
    assert found["source"] == "model"
    # Rows of fa2 were measured there.
    assert "nothing was measured" not in found["sentences"]["From"]
    assert found["layer_us"] == pytest.approx(42.0, abs=0.1)
    assert found["layer_error"] < 0.05


def test_errors_are_those_of_the_same_kind_of_call():
    """Ragged and paged calls are estimated worse than even contiguous ones."""
    even, ragged = (
        data(f"--shape 32/8x128 --gpu h200 {words}")
        for words in ("--batch 16 --context 5000", "--lengths 64k+1kx15 --backends lean,flashinfer")
    )
    assert (even["kernel"], ragged["kernel"]) == ("lean", "lean")
    assert even["layer_error"] < 0.1 < ragged["layer_error"] < 0.2
    assert ragged["lead_error"] > 0.2


def test_a_scaled_prediction_has_no_interval():
    assert data("--shape 64/8x128 --gpu a100 --batch 8")["layer_error"] is None
    assert lines("--shape 64/8x128 --gpu a100 --batch 8")["Attention"] == "146 µs a layer."


@pytest.mark.parametrize(
    ("lead", "error", "is_clear", "is_even"),
    [
        *((1.12, 0.342, False, False), (1.12, 0.02, True, False), (1.05, 0.08, False, True)),
        *((1.02, None, False, True), (1.2, None, False, False)),
    ],
)
def test_either_will_do_only_where_the_lead_is_small(
    lead: float, error: float | None, is_clear: bool, is_even: bool, monkeypatch: Any
):
    monkeypatch.setattr(Recommendation, "lead", lead)
    monkeypatch.setattr(Recommendation, "lead_error", error)
    found = data("--shape 32/8x128 --gpu h200 --batch 8 --context 4k")
    assert found["is_clear"] is is_clear
    assert ("Either will do" in found["sentences"]["Lead"]) is is_even


@pytest.mark.parametrize(
    "words", ["falcon-180b --gpu l4 --context 4k", "opt-13b --gpu h100 --gpus 2"]
)
def test_unknown_weights_are_no_zero(words: str):
    found = lines(words)
    assert found["Memory"].startswith("KV cache alone ")
    assert data(words)["memory"]["weights_bytes"] is None
    assert "whether they fit is not" in found["Note"]
    assert "Step" not in found
    fixes = refusal(*"recommend falcon-180b --gpu l4 --batch 64 --context 16k".split())
    assert "would hold the cache" in fixes


def test_what_a_kernel_refuses_is_not_listed():
    words = "--shape 32/8x128 --gpu h100 --batch 32 --context 8k"
    fp8 = f"recommend {words} --kv-dtype e4m3 --backends flashinfer"
    assert "has no scales for each KV head" in refusal(*fp8.split())
    e5m2 = {each["kernel"] for each in data(f"{words} --kv-dtype e5m2")["options"]}
    assert "lean" in e5m2
    assert not any(name.startswith("flash_attn_3") for name in e5m2)
    grouped = {each["kernel"] for each in data(words)["options"]}
    assert {"lean", "cudnn_best", "flash_attn_3_best", "flashinfer_best"} <= grouped
    assert "torch_flash_no_split" not in grouped


def test_a_model_whose_layer_alone_does_not_fit_is_counted_whole():
    words = "llama-2-7b --gpu l40s --gpus 4 --batch 64 --context 1m"
    kv_bytes = 64 * 2**20 * 32 * 8 * 2 * 128  # fp8, on each GPU
    assert f"KV cache {kv_bytes / 1e9:.1f} GB" in refusal("recommend", *words.split())


def test_pages_smaller_than_any_measured_are_noted():
    note = data("llama-3-8b --gpu h200 --page-size 1")["sentences"]["Note"]
    assert "pages of less than 16 tokens" in note
    assert "Note" not in data("llama-3-8b --gpu h200 --page-size 16")["sentences"]


def test_other_forms_of_several_kinds_of_layers_are_compared_by_the_step():
    found = data("gpt-oss-120b --gpu h200 --gpus 4 --batch 4")
    step_ms = found["others"]["pages of 16"]["attention_us"] / 1e3
    assert f"pages of 16 {step_ms:.3g} ms a step" in found["sentences"]["Else"]


def test_chunked_layers_keep_a_chunk():
    found = data("llama-4-scout --gpu h100 --gpus 8 --batch 4 --context 1m")
    assert (found["kernel"], found["kv_dtype"]) == ("lean", "same")
    assert found["memory"]["kv_bytes"] == 4 * 2 * 2 * 128 * (12 * 2**20 + 36 * 8192)


def test_a_head_dim_without_kernels_has_the_true_reason(tmp_path: Path):
    path = tmp_path / "config.json"
    sizes = {"hidden_size": 3200, "num_hidden_layers": 2, "num_attention_heads": 32}
    path.write_text(json.dumps({"model_type": "llama", **sizes}))
    assert "head_dim 100 is not a multiple of 8" in refusal("recommend", str(path), "--gpu", "h200")


def test_an_alias_has_its_own_positions():
    found = lines("llama-3.1-70b --gpu h100 --gpus 4 --batch 8 --context 16k")
    assert found["Note"].startswith("the weights of llama-3.1-70b count as those of llama-3-70b")
    assert "positions" not in found["Note"]
    assert "positions" in lines("llama-3-70b --gpu h100 --gpus 4 --batch 8 --context 16k")["Note"]


def test_backends_by_family():
    found = data("llama-3-8b --gpu h100 --context 8k --backends flashinfer,cudnn")
    names = {option["kernel"].partition("_")[0] for option in found["options"]}
    assert names == {"flashinfer", "cudnn"}


def test_layers_of_several_kinds_are_summed():
    found = data("gpt-oss-120b --gpu h100 --gpus 8 --batch 64 --context 8k")
    assert found["attention_us"] > 18 * found["layer_us"]
    words = "gpt-oss-120b --gpu h100 --gpus 8 --batch 64 --context 8k"
    layers = re.findall(r"18 x \S+ µs over (\S+) tokens", lines(words)["Attention"])
    assert layers == ["128", "8,192"]
    table = printed("recommend", *words.split())
    assert f"{found['attention_us']:.4g}" in next(
        line for line in table.splitlines() if line.startswith("lean ")
    )
    assert "weights count as published (mxfp4)" in lines(words)["Note"]


def test_an_fp8_cache_where_16_bits_do_not_fit():
    found = data("qwen3-8b --gpu h100 --batch 26 --context 32k")
    assert (found["kv_dtype"], found["kernel"]) == ("e4m3", "lean")
    assert "a 16-bit cache does not fit" in found["sentences"]["Note"]
    fixed = refusal(*"recommend qwen3-8b --gpu h100 --batch 26 --context 32k".split(), *KV_SAME)
    assert "would fit" in fixed


KV_SAME = ("--kv-dtype", "same")


def test_tokens_are_split_where_heads_cannot_be():
    found = data("--shape 32/8x128 --gpu h200 --gpus 3 --context 128k")
    assert (found["tp"], found["cp"], found["lead"]) == (1, 3, None)


def requested(name: str, gpu: str, gpus: int, batch: str, context: str) -> Request:
    axes = {"model": name, "batch": batch, "context": context, "dtype": "bf16"}
    return Request(name, requested_sweep(None, axes, None, None).grids[0], find(gpu), gpus)


def test_chosen_tokens_are_not_split():
    assert requested("deepseek-v4-flash", "h100", 4, "64", "32k").splits == [(4, 1)]
    assert requested("deepseek-v3", "h100", 4, "64", "32k").splits == [(4, 1), (2, 2), (1, 4)]
    words = "recommend deepseek-v4-flash --gpu h100 --gpus 4 --batch 64 --context 32k"
    assert "too little was measured" in refusal(*words.split())


ON_8 = "--gpus 8 --batch"


@pytest.mark.parametrize(
    ("model", "words", "fix", "fits", "exceeds"),
    [
        (
            "llama-3-70b --gpu a100 --kv-dtype same",
            "--batch 64 --context 128k",
            "with --gpus 8, a batch of 11 or contexts up to 23k",
            [f"{ON_8} 11 --context 128k", f"{ON_8} 64 --context 23k"],
            [f"{ON_8} 12 --context 128k", f"{ON_8} 64 --context 24k"],
        ),
        ("glm-5 --gpu h200", "--gpus 4", "with --gpus 8, glm-5-fp8", [], ["--gpus 8"]),
        ("glm-5-fp8 --gpu h200", "--gpus 4", "--gpus 8", ["--gpus 8"], []),
        (
            "glm-5 --gpu h200",
            "--gpus 4 --batch 64 --context 128k",
            "with --gpus 8 and glm-5-fp8, a batch of 7 or contexts up to 15k",
            [],
            ["--gpus 8 --batch 7 --context 128k"],
        ),
        (
            "glm-5-fp8 --gpu h200",
            "--gpus 8 --batch 64 --context 128k",
            "a batch of 7 or contexts up to 15k",
            [f"{ON_8} 7 --context 128k", f"{ON_8} 64 --context 15k"],
            [f"{ON_8} 8 --context 128k", f"{ON_8} 64 --context 16k"],
        ),
        (
            # Layers with windows keep 1,024 tokens of any longer context.
            "gemma-3-27b --gpu a100",
            "--batch 64 --context 32k",
            "a batch of 8 or --gpus 4",
            ["--batch 8 --context 32k", "--gpus 4 --batch 64 --context 32k"],
            ["--batch 9 --context 32k", "--batch 64 --context 1k"],
        ),
    ],
    ids=["GPUs and batch", "GPUs and 8 bits", "GPUs", "all three", "batch", "windows"],
)
def test_what_would_fit_fits(model: str, words: str, fix: str, fits: list[str], exceeds: list[str]):
    assert refusal("recommend", *f"{model} {words}".split()).endswith(f": {fix} would fit")
    for changed in fits:
        assert data(f"{model} {changed}")["memory"]["kv_bytes"] > 0
    for changed in exceeds:
        assert refusal("recommend", *f"{model} {changed}".split()).endswith(" would fit")


def test_lengths_of_a_file(tmp_path: Path):
    file = tmp_path / "lengths.txt"
    file.write_text("3000\n4000\n123\n8000\n")
    found = data(f"llama-3-8b --gpu h200 --batch 4 --lengths {file} --page-size 16")
    assert len(found["contexts"]) == 4
    assert max(found["contexts"]) <= 8000
    assert found["page_size"] == 16
    assert {*found["others"]} == {"e4m3 cache"}


def test_a_config_json(tmp_path: Path):
    config = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 1000}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config | {"intermediate_size": 8192, "torch_dtype": "bfloat16"}))
    assert data(f"{path} --gpu h200")["tokens_per_s"] > 0


@pytest.mark.parametrize("name", ["glm-5-fp8", "zai-org/GLM-5-FP8"])
def test_an_fp8_checkpoint_has_half_the_bytes(name: str):
    found = data(f"{name} --gpu h200 --gpus 8")
    assert (found["kernel"], found["source"]) == ("lean_mla", "neighbours")
    assert found["memory"]["weights_bytes"] == read_model("glm-5:tp=8").weights
    assert found["sentences"]["Note"].startswith("weights count as published (fp8); ")
    assert f"--model {name} " in found["command"]


def test_weights_of_a_config_json_have_its_bits(tmp_path: Path):
    keys = registry()["llama-3-70b"].published
    # The name of a folder says nothing.
    for name, quantization in (("whole-fp8", None), ("half", {"quant_method": "gptq", "bits": 8})):
        (tmp_path / name).mkdir()
        config = json.dumps({**keys, "quantization_config": quantization})
        (tmp_path / name / "config.json").write_text(config)
    half = data(f"{tmp_path / 'half'} --gpu h200")
    assert half["memory"]["weights_bytes"] == read_model("llama-3-70b").weights
    assert "weights count as published (gptq)" in half["sentences"]["Note"]
    whole = refusal("recommend", str(tmp_path / "whole-fp8"), "--gpu", "h200")
    assert whole.endswith("h200 has 141 GB: --gpus 2 would fit")


def test_without_arguments_and_without_a_gpu_it_shows_two_examples():
    text = printed("recommend")
    assert text.startswith("No GPU is here to measure. Name a model or a shape, and a GPU:")
    assert text.count("  leanbench recommend ") == 2


@pytest.fixture
def h200_here(monkeypatch: Any) -> None:
    """Pretend that an H200 is here, with no library but cuDNN."""

    def choose(name: str | None, require_gpu: bool) -> Target:
        return Target(find(name or "h200"), 0 if name in (None, "h200") else None)

    monkeypatch.setattr("leanbench.gpu.local.choose", choose)
    for each in kernels().values():
        reason = None if each.name.startswith(("lean", "cudnn")) else "not installed"
        monkeypatch.setattr(each, "unavailable_reason", lambda reason=reason: reason)


@pytest.mark.usefixtures("h200_here")
def test_without_arguments_on_a_gpu_it_measures_what_is_installed(monkeypatch: Any):
    swept: list[tuple[Any, Any, list[str]]] = []
    monkeypatch.setattr(
        "leanbench.cli.sweep_run.run_sweep", lambda *arguments: swept.append(arguments)
    )
    installed, missing = printed("recommend").splitlines()
    assert installed.startswith("Installed: lean (this project), ")
    assert "cudnn_best" in installed
    assert "Not installed: " in missing
    assert "flash_attn_3_best" in missing
    [(sweep, flags, command)] = swept
    assert (sweep.name, sweep.kernels) == ("tour", tuple(command[-1].split(",")))
    assert {"lean", "cudnn_best"} <= {*sweep.kernels} <= {*kernels()}
    assert (flags.budget, flags.require_gpu) == ("2m", True)
    # At least four kinds of calls, in about two minutes.
    seconds = sum(
        estimated_seconds(cell, find("h200"), False, sweep.measure) for cell in expand(sweep)
    )
    assert len({cell.problem for cell in expand(sweep)}) >= 6
    assert seconds < 60


def timed(sweep: Sweep) -> Run:
    """Return a measured run of a sweep, in which cuDNN takes half as long."""
    results = []
    for cell in expand(sweep):
        us = 10.0 if cell.kernel == "cudnn_best" else 20.0
        fields = {"problem": cell.problem.to_dict(), "kernel": cell.kernel, "latency_us": us}
        ends = {"latency_ci_low_us": us * 0.99, "latency_ci_high_us": us * 1.01}
        results.append((row(cell.key, **fields, **ends, source="measured"), cell.problem))
    manifest = {"gpu": {"name": "h200"}, "created": "2026-11-28T00:00:00", "environments": {}}
    return Run(Path("runs/here"), manifest, tuple(results))


@pytest.mark.usefixtures("h200_here")
def test_layers_without_an_estimate_can_be_measured(monkeypatch: Any):
    monkeypatch.setattr("leanbench.cli.sweep_run.rows_of_sweep", lambda sweep, *_: timed(sweep))
    words = "recommend deepseek-v4 --measure".split()
    found = json.loads(printed(*words, "--gpus", "4", "--json"))
    assert (found["kernel"], found["source"]) == ("lean", "measured")
    # The other layers are named.
    assert found["attention_us"] == (2 + 21) * 20.0
    assert "(20 of heavily_compressed_attention)" in found["sentences"]["Note"]
    assert refusal(*words).endswith("--gpus 4 would fit")


@pytest.mark.usefixtures("h200_here")
@pytest.mark.parametrize(
    "words", ["--shape 32/8x128 --batch 8 --context 5k", "llama-3-8b --batch 4 --context 5k"]
)
def test_measure_answers_from_rows_taken_here(monkeypatch: Any, tmp_path: Path, words: str):
    took: list[Any] = []

    def rows_of_sweep(sweep: Any, flags: Any, command: list[str]) -> Run:
        took.append((sweep, flags, command))
        return timed(sweep)

    monkeypatch.setattr("leanbench.cli.sweep_run.rows_of_sweep", rows_of_sweep)
    found = json.loads(printed("recommend", *words.split(), "--measure", "--json"))
    assert (found["kernel"], found["source"], found["layer_us"]) == ("cudnn_best", "measured", 10.0)
    assert found["layer_error"] == pytest.approx(0.01)
    # Both were measured here: they differ by what processes differ.
    assert (found["lead"], found["lead_error"], found["is_clear"]) == (2.0, 0.01, True)
    assert "runs/here (2026-11-28)" in found["sentences"]["From"]
    assert "(9.9 to 10.1: 95% interval)" in found["sentences"]["Attention"]
    [(sweep, flags, command)] = took
    assert {"lean", "cudnn_best"} <= {*sweep.kernels}
    assert not any(name.startswith("flashinfer") for name in sweep.kernels)
    assert (flags.require_gpu, flags.budget) == (True, "2m")
    assert command[:2] == ["leanbench", "sweep"]
    text = printed("recommend", *words.split(), "--measure")
    assert "Measure " not in text
    assert "Measure here with --measure, or with:" in printed("recommend", *words.split())


@pytest.mark.usefixtures("h200_here")
def test_measure_needs_that_gpu_and_something_to_measure(monkeypatch: Any):
    words = ["recommend", "--shape", "32/8x128", "--measure"]
    assert refusal(*words, "--gpu", "b200") == (
        "--measure needs the GPU, and no b200 is here: leave --measure out, or run it where one is"
    )
    nothing = Run(Path("runs/here"), {}, ())
    monkeypatch.setattr("leanbench.cli.sweep_run.rows_of_sweep", lambda *_: nothing)
    failed = invoke(*words)
    assert failed.exit_code == 2
    assert "Error: nothing was timed, see runs/here" in failed.output
    assert "is installed: `leanbench doctor`" in refusal(*words, "--backends", "flashinfer")


def test_windows_and_chunks_are_estimated_where_nothing_was_measured():
    """Count them as plain attention over the tokens that they read."""
    found = data("gpt-oss-20b --gpu a100 --batch 4 --context 16k")
    assert (found["source"], found["layer_error"]) == ("model", None)
    assert "count as plain attention over the tokens that they read" in found["sentences"]["Note"]
    short = data("--shape 64/8x64 --gpu a100 --batch 4 --context 128")
    long = data("--shape 64/8x64 --gpu a100 --batch 4 --context 16k")
    expected_us = 12 * (short["layer_us"] + long["layer_us"])
    assert found["attention_us"] == pytest.approx(expected_us, rel=0.02)
    chunked = data("llama-4-scout --gpu b200 --gpus 8 --batch 4 --context 16k")
    assert chunked["attention_us"] > 0
    # On a GPU with rows of windows nothing changes.
    assert "plain attention" not in data("gpt-oss-20b --gpu h100 --batch 4 --context 16k")[
        "sentences"
    ].get("Note", "")


@pytest.mark.parametrize("model", ["deepseek-v3.2", "minimax-m3"])
def test_times_of_chosen_tokens_are_those_of_tokens_side_by_side(model: str):
    note = data(f"{model} --gpu h200 --gpus 8")["sentences"]["Note"]
    assert "nothing was measured with chosen tokens" in note
    assert "chosen tokens" not in data("deepseek-v3 --gpu h200 --gpus 8")["sentences"]["Note"]


def test_maverick_has_its_own_weights():
    scout = data("llama-4-scout --gpu b300 --gpus 8 --context 16k")
    maverick = data("llama-4-maverick --gpu b300 --gpus 8 --context 16k")
    assert maverick["memory"]["weights_bytes"] * 8 / 2e9 == pytest.approx(400.7, abs=1)
    assert scout["memory"]["weights_bytes"] * 8 / 2e9 == pytest.approx(107.8, abs=1)
    assert "count as those of" not in maverick["sentences"]["Note"]


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_a_latent_cache_with_few_heads_has_an_estimate(gpus: int):
    """A tile has 16 rows at least, so fewer heads take as long."""
    found = data(f"kimi-linear-48b-a3b --gpu h100 --gpus {gpus} --batch 4 --context 16k")
    assert (found["kernel"], found["source"]) == ("lean_mla", "neighbours")
    assert "this is 10.0: run it on a Hopper GPU" in refusal(
        *"recommend kimi-linear-48b-a3b --gpu b200 --gpus 8".split()
    )


@pytest.mark.parametrize("gpu", ["h100", "h200"])
def test_an_fp8_latent_cache_is_predicted(gpu: str):
    """Nothing was measured near it."""
    found = data(f"kimi-linear-48b-a3b --gpu {gpu} --gpus 8 --kv-dtype e4m3")
    assert (found["kernel"], found["source"]) == ("lean_mla", "model")


@pytest.mark.parametrize("name", ["deepseek-v3", "config.json"])
def test_common_models_need_no_transformers(tmp_path: Path, name: str):
    """Importing it takes five seconds."""
    if name == "config.json":
        name = str(tmp_path / name)
        Path(name).write_text(json.dumps(registry()["llama-3-70b"].published))
    script = (
        "import sys; from leanbench.cli.main import main\n"
        f"sys.argv = [*'leanbench recommend --gpu h200 --gpus 8 --json'.split(), {name!r}]\n"
        "try: main()\nfinally: print({'torch', 'transformers'} & {*sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.endswith("set()\n")


def test_long_times_have_all_their_digits():
    text = printed(*"recommend --shape 128/64x128 --gpu gb10 --batch 64 --context 32k".split())
    assert "a call reads 68,719 MB a layer" in text
    assert "e+0" not in text


REFUSED = (
    "--gpu h100; llama-3-8b; llama-9 --gpu h100; llama-3-8b --gpu z900; llama-3-8b --shape 8x64"
    " --gpu h100; --shape 8/3x64 --gpu h100; --shape 8 --gpu h100; 32/8x128 --gpu h100; --shape"
    " 8x100 --gpu h100; llama-3-8b --gpu h100 --gpus 3; llama-3-8b --gpu h100 --gpus 9; llama-3-8b"
    " --gpu h100 --context 1k,2k; llama-3-8b,opt-6.7b --gpu h100; llama-3-8b --gpu h100 --lengths"
    " 64k+1k --batch 3; llama-3-8b --gpu h100 --lengths zipf; llama-3-8b --gpu h100 --lengths"
    " nowhere; llama-3-8b --gpu h100 --kv-dtype fp4; llama-3-8b --gpu h100 --backends laen;"
    " llama-3-8b --gpu a100 --backends flashinfer; llama-3-8b --gpu h100 --usd-per-hour 0;"
    " llama-3-8b --gpu h100 --usd-per-hour 1e308; --shape 32/8x128 --gpu h100 --usd-per-hour 2;"
    " llama-3-405b --gpu h100 --gpus 8; deepseek-v4 --gpu"
    " h200 --gpus 8; deepseek-v4 --gpu h100; deepseek-v4 --gpu h100 --gpus 8 --kv-dtype e4m3;"
    " glm-5 --gpu h200 --gpus 8; mimo-v2-flash --gpu h100 --gpus 8; deepseek-r1 --gpu h200 --gpus"
    " 8 --batch 160 --context 16k; llama-3-8b --gpu a100-40gb --batch 32 --context 8k; qwen3-8b"
    " --gpu h100 --batch 64 --context 32k; --shape 64/64x128 --gpu a100 --batch 5000 --context"
    " 100; gemma-3-1b --gpu h200 --gpus 8; --shape 32/8x128 --gpu h200 --context 64m; --shape"
    " 128/1x576 --gpu h100"
)


def test_refusals(snapshot):
    messages = []
    for command in (f"recommend {words}" for words in REFUSED.split("; ")):
        messages += [f"$ leanbench {command}", refusal(*command.split())]
    assert "\n".join(messages) == snapshot
