"""Whole models: what a config.json says of layers, weights and the KV cache of one GPU."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from leanbench.core.errors import UserError
from leanbench.core.memory import shortage
from leanbench.core.model_config import shipped_models
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel
from leanbench.core.whole_model import Layers, read_model

#: Parameters of the models that transformers 5.17 makes of the same configs.
WEIGHTS = {
    "gemma-3-27b": 27_009_346_304,
    "gpt-oss-20b": 20_914_757_184,
    "llama-3-70b": 70_553_706_496,
    "llama-3-70b:tp=8:layers=16": 1_974_214_656,
    "llama-3-8b": 8_030_261_248,
    "opt-1.3b": 1_315_758_080,
    "opt-6.7b": 6_658_473_984,
    "qwen3-32b": 32_762_123_264,
    "gemma-3-27b:layers=7": 4_299_925_504,
    "gpt-oss-20b:tp=4": 5_232_165_312,
}


def problem(model: str, context: int = 4096, batch: int = 1, **axes) -> AttentionProblem:
    q_heads, kv_heads, head_dim = read_model(model).heads
    return AttentionProblem(batch, q_heads, kv_heads, context, head_dim, whole_model=model, **axes)


@pytest.mark.parametrize("model", WEIGHTS)
def test_weights_are_those_of_the_model(model):
    assert read_model(model).weights == WEIGHTS[model]


def test_every_shipped_model_is_held_against_transformers():
    assert set(shipped_models()) <= set(WEIGHTS)


def test_a_step_reads_no_table_and_only_the_experts_that_tokens_go_to():
    llama, gpt = read_model("llama-3-8b"), read_model("gpt-oss-20b")
    assert llama.weights_read(1) == llama.weights_read(64) == WEIGHTS["llama-3-8b"] - 128256 * 4096
    experts = 24 * 32 * (3 * 2880 * 2880 + 3 * 2880)
    others = WEIGHTS["gpt-oss-20b"] - 201088 * 2880 - experts
    assert gpt.weights_read(1) == others + experts / 8
    assert gpt.weights_read(2) == pytest.approx(others + experts * (1 - (7 / 8) ** 2))


@pytest.mark.parametrize(
    ("model", "kinds"),
    [
        ("llama-3-8b", (Layers(32, None),)),
        ("gemma-3-27b", (Layers(10, None), Layers(52, 1024))),
        ("gpt-oss-20b:layers=5", (Layers(2, None), Layers(3, 128))),
    ],
)
def test_layers_by_how_far_they_see(model, kinds):
    assert read_model(model).layer_kinds == kinds


def test_a_name_comes_back_as_it_is_written():
    assert str(read_model("OPT-6.7B:positions=128k")) == "opt-6.7b:positions=131072"
    assert str(read_model("llama-3-70b:layers=16:tp=8")) == "llama-3-70b:tp=8:layers=16"
    assert read_model("llama-3-70b:tp=8").heads == (8, 1, 128)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("llama3", "there is no model 'llama3' and no config.json at that path, did you mean"),
        ("opt-6.7b:tp=8", "tp 8 cannot share out opt-6.7b: its config.json has no head_dim"),
        ("qwen3-32b:tp=3", "tp 3 does not divide num_attention_heads 64 of qwen3-32b"),
        ("opt-1.3b:layers=25", "layers 25 is above the 24 layers of opt-1.3b: choose at most 24"),
        ("opt-1.3b:heads=8", "has the option 'heads=8': write tp=, layers= or positions="),
        ("opt-1.3b:layers=x", "layers"),
    ],
)
def test_bad_models_are_one_sentence(model, words):
    with pytest.raises(UserError, match=words):
        read_model(model)


_TINY = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 8,
    "max_position_embeddings": 8,
}


def _written(path: Path, content: Any) -> str:
    text = content if isinstance(content, (str, bytes)) else json.dumps(content)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            "{",
            r"is no config.json of a model \(no JSON at column \d+\): name the one that came",
        ),
        (" \n", r"of a model \(it is empty\): name the one that came"),
        (b"\xff\xfe\x00", r"of a model \(it is not UTF-8 text\): name the one that came"),
        ("[" * 100_000, r"of a model \(it is nested too deep\): name the one that came"),
        ("[]", r"is no config.json of a model: it has \[\] where keys and values should"),
        ({"text_config": None}, "is no config.json of a model: it has null where keys and values"),
        (
            {**_TINY, "model_type": ["llama"]},
            r"is of model_type \['llama'\], which leanbench",
        ),
        ({**_TINY, "layer_types": 3}, "has layer_types 3: it must be a list, one for each layer"),
        ({"model_type": "llama"}, "it has no key 'hidden_size'"),
        (
            {"model_type": "mamba", "d_model": 8},
            "is of model_type 'mamba', which leanbench does not know: choose a model of gemma3",
        ),
        ({**_TINY, "num_hidden_layers": -1}, "num_hidden_layers -1: it must be a whole number"),
        ({**_TINY, "intermediate_size": None}, "intermediate_size None: it must be a whole number"),
        ({**_TINY, "num_key_value_heads": "2"}, "num_key_value_heads '2': it must be a whole"),
        ({**_TINY, "model_type": "opt"}, "it has no key 'ffn_dim'"),
        ({**_TINY, "model_type": "gpt_oss"}, "it has no key 'sliding_window'"),
        ({**_TINY, "model_type": "mistral", "sliding_window": "all"}, "has sliding_window 'all'"),
        ({**_TINY, "layer_types": ["sliding_attention"] * 2}, "it has no key 'sliding_window'"),
        ({**_TINY, "layer_types": ["full_attention"]}, "layer_types of 1 layers and num_hidden_"),
    ],
)
def test_a_config_that_is_none_is_one_sentence(tmp_path, content, words):
    with pytest.raises(UserError, match=words):
        read_model(_written(tmp_path / "config.json", content))


def test_a_config_that_cannot_be_read_is_one_sentence(tmp_path, monkeypatch):
    path = _written(tmp_path / "config.json", _TINY)

    def refuse(path: Path) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(UserError) as refused:
        read_model(path)
    sentence = f"cannot read {path[:80]} (permission denied): name a config.json that can be read"
    assert str(refused.value) == sentence
    with pytest.raises(
        UserError, match=r"^cannot read xxx.* \(file name too long\): name a config"
    ):
        read_model("x" * 300)


def test_heads_and_head_dim_that_are_null_are_those_of_transformers(tmp_path):
    nulls = {**_TINY, "num_key_value_heads": None, "head_dim": None, "sliding_window": None}
    assert read_model(_written(tmp_path / "config.json", nulls)).heads == (2, 2, 4)


def test_a_folder_of_a_model_is_its_config(tmp_path):
    text = shipped_models()["opt-1.3b"].read_text()
    (tmp_path / "config.json").write_text(text)
    assert read_model(str(tmp_path)).weights == WEIGHTS["opt-1.3b"]


def test_bytes_are_of_all_layers_as_far_as_they_see():
    token = 2 * 2 * 128
    assert problem("llama-3-8b").kv_bytes == 32 * 4096 * 8 * token
    assert problem("gemma-3-27b").kv_bytes == (10 * 4096 + 52 * 1024) * 16 * token
    roomy = problem("gemma-3-27b", 512, batch=2, capacity=2048)
    assert roomy.kv_bytes == 62 * 2 * 512 * 16 * token
    assert roomy.kv_allocated_bytes == 2 * (10 * 2048 + 52 * 1024) * 16 * token


def test_a_step_has_its_lengths_on_the_device_and_names_its_model():
    whole = problem("opt-6.7b:positions=131072", 65536)
    assert whole.lengths_on == "device"
    assert whole.label == "b1 h32 n65536 d128 model=opt-6.7b:positions=131072 fp16 HND"
    assert AttentionProblem.from_dict(whole.to_dict()) == whole
    layer = whole.layer_problem(None)
    assert (layer.whole_model, layer.lengths_on, layer.context) == (None, "device", 65536)


def test_a_layer_with_a_window_is_a_short_cache():
    whole = problem("gpt-oss-20b", 4096, batch=2)
    layer = whole.layer_problem(128)
    assert (layer.context, layer.capacity, layer.sinks) == (128, None, True)
    ragged = AttentionProblem(2, 64, 8, (50, 4096), 64, whole_model="gpt-oss-20b")
    assert ragged.layer_problem(128).context == (50, 128)


def test_heads_and_kinds_are_the_models_own():
    with pytest.raises(UserError, match=r"opt-6.7b has 32/32 heads x 128, the problem 8/8 x 128"):
        AttentionProblem(1, 8, 8, 1024, 128, whole_model="opt-6.7b")
    with pytest.raises(UserError, match="a whole model says softcap itself: leave softcap out"):
        problem("opt-6.7b", softcap=30.0)


def test_kernels_refuse_by_layer_and_by_position():
    sdpa, fa2_triton, lean = kernel("sdpa"), kernel("fa2_triton"), kernel("lean")
    assert lean.unsupported_reason(problem("llama-3-8b")) is None
    assert "no_attention" in str(kernel("torch_flex").unsupported_reason(problem("llama-3-8b")))
    for other in (sdpa, fa2_triton):
        assert "has no sinks" in str(other.unsupported_reason(problem("gpt-oss-20b")))
    assert lean.unsupported_reason(problem("llama-3-8b", 16384)) == (
        "16384 tokens are above the 8192 positions of llama-3-8b: choose a shorter context, or"
        " --positions 16384 for more of them than it was trained with"
    )
    alone = AttentionProblem(1, 32, 8, 1024, 128)
    assert "alone: run `leanbench decode`" in str(sdpa.unsupported_reason(alone))


def test_what_does_not_fit_says_what_would():
    reason = shortage(problem("llama-3-70b"), 80e9, "the GPU", "free")
    assert reason is not None
    assert reason.startswith("needs 143.0 GB (weights 141.1 GB, K and V 1.3 GB, the rest")
    assert reason.endswith(
        "share the model out with --tp, choose a smaller context or batch, or measure a part of it"
        " with --layers 43"
    )
    part = problem("llama-3-70b:layers=43")
    assert shortage(part, 80e9, "the GPU") is None
    assert shortage(problem("llama-3-70b:layers=44"), 80e9, "the GPU") is not None
