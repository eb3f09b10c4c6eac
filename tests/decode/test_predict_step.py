"""A predicted step: attention of every layer, and its weights over the memory's bandwidth."""

import pytest
from decode.tiny_models import problem_of

from leanbench.core.llm.layers import Layer
from leanbench.core.registry import kernel
from leanbench.decode.predict import predict_step
from leanbench.gpu.catalogue import find
from leanbench.model.predict import predict_cell

H200 = find("h200")


def test_a_step_is_its_layers_and_its_weights():
    problem = problem_of("gemma-3-27b", 8192, 8192)
    whole = predict_step(problem, kernel("fa2"), "default", H200)
    bound = predict_step(problem, kernel("no_attention"), "default", H200)

    def layer_us(window: tuple[tuple[str, int], ...]) -> float:
        layer = problem.layer_problem(Layer(32, 16, 128, window))
        return predict_cell(layer, kernel("fa2"), "default", H200)["latency_us"]

    full, sliding = layer_us(()), layer_us((("window_left", 1023),))
    assert whole["latency_us"] == pytest.approx(bound["latency_us"] + 10 * full + 52 * sliding)
    assert whole["no_attention_us"] == bound["latency_us"] == bound["no_attention_us"]
    assert whole["attention_share"] == pytest.approx(1 - bound["latency_us"] / whole["latency_us"])
    assert whole["tokens_per_s"] == pytest.approx(2e6 / whole["latency_us"])
    # 54 GB at nearly the 4.8 TB/s of the datasheet.
    assert 27.0e9 * 2 / 4.8e6 < bound["latency_us"] < 27.0e9 * 2 / 4.3e6
    assert bound["attention_share"] == 0


def test_what_cannot_be_predicted_says_so():
    problem = problem_of("opt-6.7b", 2048)
    assert predict_step(problem, kernel("sdpa"), "default", H200)["reason"] == (
        "sdpa has no schedule to predict from: measure it, or leave it out"
    )
    large = predict_step(problem_of("llama-3-70b", 1024), kernel("lean"), "default", H200)
    assert large["status"] == "out_of_memory"
    assert "--layers" in large["reason"]
    (warning,) = predict_step(problem, kernel("fa2"), "default", H200)["warnings"]
    assert "the time in which its weights are read" in warning
    assert "GPU kernels (1,400 in a step of Llama-3-8B, some hundred in OPT's)" in warning


def test_models_with_other_or_latent_layers_have_warnings_and_a_bound():
    pytest.importorskip("transformers")
    problem = problem_of("qwen3.5-35b-a3b", 65536)
    row = predict_step(problem, kernel("lean"), "default", H200)
    _, others, experts = row["warnings"]
    assert "30 of linear_attention" in others
    assert "3.1% for each token" in experts
    layer = predict_cell(problem.layer_problem(Layer(16, 2, 256)), kernel("lean"), "default", H200)
    assert row["latency_us"] == pytest.approx(row["no_attention_us"] + 10 * layer["latency_us"])
    pytest.importorskip("transformers")
    problem = problem_of("deepseek-v3:tp=16", 4096)
    assert predict_step(problem, kernel("lean"), "default", H200)["status"] == "unsupported"
    bound = predict_step(problem, kernel("no_attention"), "default", H200)
    assert (bound["status"], bound["attention_share"]) == ("ok", 0)
    assert any("(fp8)" in warning for warning in bound["warnings"])
    large = predict_step(problem_of("deepseek-v3", 4096), kernel("no_attention"), "default", H200)
    assert large["status"] == "out_of_memory"
