"""Whole models: what a config.json says of layers, weights and the KV cache of one GPU."""

import json
from pathlib import Path

import pytest

from leanbench.core.errors import InvalidValue, Reason
from leanbench.core.llm.errors import UnknownModel
from leanbench.core.llm.layers import Layer
from leanbench.core.llm.model import read_model
from leanbench.core.llm.weights import UnknownWeights
from leanbench.core.memory import shortage
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel

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
        ("llama-3-8b", {(None, None): 32}),
        ("gemma-3-27b", {(None, None): 10, (1024, None): 52}),
        ("gpt-oss-20b:layers=5", {(None, None): 2, (128, None): 3}),
        ("glm-5", {(None, 2048): 78}),
        ("minimax-m3:layers=5", {(None, None): 3, (None, 2048): 2}),
    ],
)
def test_layers_by_how_far_they_see(model, kinds):
    if model.startswith(("glm-5", "minimax-m3")):
        pytest.importorskip("transformers")
    own = read_model(model).layer_kinds
    assert {(layer.window, layer.selected): count for layer, count in own.items()} == kinds


def test_names_come_back_and_others_are_not_known():
    assert str(read_model("OPT-6.7B:positions=128k")) == "opt-6.7b:positions=131072"
    assert str(read_model("llama-3-70b:layers=16:tp=8")) == "llama-3-70b:tp=8:layers=16"
    assert read_model("llama-3-70b:tp=8").heads == (8, 1, 128)
    with pytest.raises(UnknownModel) as unknown:
        read_model("llama3")
    assert (unknown.value.name, unknown.value.hint) == ("llama3", "did you mean 'llama-3-8b'?")
    with pytest.raises(UnknownWeights) as weights:
        read_model("llama-2-7b")
    assert weights.value.fix == "give the path of the config.json of meta-llama/Llama-2-7b-hf"


@pytest.mark.parametrize(
    ("model", "value", "reason", "limit"),
    [
        ("qwen3-32b:tp=3", 3, Reason.CONFLICT, "query/KV heads 64/8"),
        ("llama-3.2-3b:tp=24", 24, Reason.CONFLICT, "intermediate_size 8192 of llama-3.2-3b"),
        ("qwen3-30b-a3b:tp=32:tp=4", "tp=4", Reason.CONFLICT, "tp=32"),
        ("opt-1.3b:layers=25", 25, Reason.ABOVE_MAXIMUM, 24),
        ("opt-1.3b:heads=8", "heads=8", Reason.SYNTAX, None),
        ("opt-1.3b:layers=x", "x", Reason.SYNTAX, None),
    ],
)
def test_invalid_options(model, value, reason, limit):
    with pytest.raises(InvalidValue) as caught:
        read_model(model)
    error = caught.value
    assert (error.value, error.reason, error.limit) == (value, reason, limit)


def test_a_share_of_opt_is_predicted_alone():
    part, whole = read_model("opt-6.7b:tp=2"), read_model("opt-6.7b")
    # Norms, two biases and positions are on both.
    both = 32 * (4 + 2) * 4096 + 2 * 4096 + 2050 * 4096
    assert 2 * part.weights == whole.weights + both
    assert "does not share out" in str(part.only_predicted)


def _written(path: Path, **keys) -> str:
    sizes = ("hidden_size", "intermediate_size", "vocab_size", "max_position_embeddings")
    tiny = {"model_type": "llama", **dict.fromkeys(sizes, 64)}
    tiny |= {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**tiny, **keys}))
    return str(path)


def test_kv_heads_are_replicated_and_head_dim_is_that_of_the_whole(tmp_path):
    path = _written(tmp_path / "config.json")
    whole, part = read_model(path), read_model(f"{path}:tp=4")
    assert (whole.heads, part.heads) == ((8, 2, 8), (2, 1, 8))
    # Of 4 layers: Q and O of 2 heads, K and V of one, an MLP of a fourth, and two norms.
    layer = 2 * 64 * 16 + 2 * 64 * 8 + 3 * 64 * 16 + 2 * 64
    assert part.weights == 4 * layer + 2 * 16 * 64 + 64
    assert (part.config["head_dim"], part.config["num_key_value_heads"]) == (8, 1)


@pytest.mark.parametrize("name", ["a:b", "a,b", "a:tp=8", "a, b:layers=1,c"])
def test_a_path_that_exists_wins_over_syntax(tmp_path, name):
    path = _written(tmp_path / name / "config.json").removesuffix("/config.json")
    assert read_model(path).tp == 1
    assert str(read_model(f"{path}:tp=2")) == f"{path}:tp=2"
    axis = AttentionProblem.__dataclass_fields__["whole_model"].metadata["axis"]
    assert axis.parse(f"{path}:tp=2,opt-1.3b") == (f"{path}:tp=2", "opt-1.3b")


def test_bytes_are_of_all_layers_as_far_as_they_see():
    token = 2 * 2 * 128
    assert problem("llama-3-8b").kv_bytes == 32 * 4096 * 8 * token
    assert problem("gemma-3-27b").kv_bytes == (10 * 4096 + 52 * 1024) * 16 * token
    roomy = problem("gemma-3-27b", 512, batch=2, capacity=2048)
    assert roomy.kv_bytes == 62 * 2 * 512 * 16 * token
    assert roomy.kv_allocated_bytes == 2 * (10 * 2048 + 52 * 1024) * 16 * token
    pytest.importorskip("transformers")
    # Layers with other heads, latent ones, and those that select tokens.
    gemma = problem("gemma-4-26b-a4b", 4096)
    assert gemma.kv_bytes == 2 * 2 * (5 * 4096 * 2 * 512 + 25 * 1024 * 8 * 256)
    assert gemma.model is not None
    assert "different heads" in str(gemma.model.only_predicted)
    dense, sparse = problem("deepseek-v3", 8192), problem("deepseek-v3.2", 8192)
    assert dense.kv_bytes == 61 * 8192 * 576 * 2
    assert sparse.kv_bytes == 61 * 2048 * 576 * 2
    assert sparse.kv_allocated_bytes == dense.kv_allocated_bytes == dense.kv_bytes


def test_notes_tell_what_is_counted_otherwise():
    pytest.importorskip("transformers")
    nemotron, llama = read_model("nemotron-3-nano-30b-a3b"), read_model("llama-3-8b")
    assert (llama.notes, llama.prediction_notes, llama.only_predicted) == ([], [], None)
    assert "(fp8)" in read_model("deepseek-v3").notes[0]
    assert "23 of linear_attention, 23 of moe" in nemotron.prediction_notes[0]
    assert "linear_attention, moe" in str(nemotron.only_predicted)


def test_steps_have_lengths_on_the_device_and_windows_are_short_caches():
    whole = problem("opt-6.7b:positions=131072", 65536)
    assert whole.lengths_on == "device"
    assert whole.label == "b1 h32 n65536 d128 model=opt-6.7b:positions=131072 fp16 HND"
    assert AttentionProblem.from_dict(whole.to_dict()) == whole
    layer = whole.layer_problem(Layer(32, 32, 128))
    assert (layer.whole_model, layer.lengths_on, layer.context) == (None, "device", 65536)
    whole = problem("gpt-oss-20b", 4096, batch=2)
    sliding = Layer(64, 8, 64, (("window_left", 127), ("sinks", True)))
    layer = whole.layer_problem(sliding)
    assert (layer.context, layer.capacity, layer.sinks) == (128, None, True)
    ragged = AttentionProblem(2, 64, 8, (50, 4096), 64, whole_model="gpt-oss-20b")
    assert ragged.layer_problem(sliding).context == (50, 128)


def test_heads_and_kinds_are_the_models_own_and_kernels_refuse_by_layer():
    with pytest.raises(InvalidValue) as heads:
        AttentionProblem(1, 8, 8, 1024, 128, whole_model="opt-6.7b")
    assert heads.value.limit == "heads 32/32 and head_dim 128"
    with pytest.raises(InvalidValue) as softcap:
        problem("opt-6.7b", softcap=30.0)
    assert (softcap.value.name, softcap.value.reason) == ("softcap", Reason.CONFLICT)
    sdpa, fa2_triton, lean = kernel("sdpa"), kernel("fa2_triton"), kernel("lean")
    assert lean.unsupported_reason(problem("llama-3-8b")) is None
    assert "no_attention" in str(kernel("torch_flex").unsupported_reason(problem("llama-3-8b")))
    for other in (sdpa, fa2_triton):
        assert "has no sinks" in str(other.unsupported_reason(problem("gpt-oss-20b")))
    reason = str(lean.unsupported_reason(problem("llama-3-8b", 16384)))
    assert reason.startswith("16384 tokens are above the 8192 positions of llama-3-8b: ")
    assert "--positions 16384" in reason
    alone = AttentionProblem(1, 32, 8, 1024, 128)
    assert "alone: run `leanbench decode`" in str(sdpa.unsupported_reason(alone))


def test_what_does_not_fit_says_what_would():
    reason = shortage(problem("llama-3-70b"), 80e9, "the GPU", "free")
    assert str(reason).startswith("needs 143.0 GB (weights 141.1 GB, K and V 1.3 GB, the rest")
    assert str(reason).endswith("or measure a part of it with --layers 43")
    part = problem("llama-3-70b:layers=43")
    assert shortage(part, 80e9, "the GPU") is None
    assert shortage(problem("llama-3-70b:layers=44"), 80e9, "the GPU") is not None
