"""config.json of language models: as published, with defaults, quantised, hostile."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from leanbench.core.files import FileFault, UnreadableFile
from leanbench.core.llm import config as model_config
from leanbench.core.llm.config import own_name, read_config, registry, split_models
from leanbench.core.llm.errors import InvalidKey, NoDecodeAttention, NotAConfig, UnknownModel
from leanbench.core.llm.layers import Layer, UnknownLayers, layers_of, notes_on_layers
from leanbench.core.llm.model import count_weights, parse_models, read_model
from leanbench.core.llm.weights import UnknownWeights

SIZES = ("hidden_size", "intermediate_size", "vocab_size", "max_position_embeddings")
TINY = {"model_type": "llama", "num_hidden_layers": 4, "num_attention_heads": 4}
TINY |= dict.fromkeys(SIZES, 64)


def written(folder: Path, content: Any) -> str:
    path = folder / "config.json"
    text = content if isinstance(content, (str, bytes)) else json.dumps(content)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def kinds(folder: Path, **keys: Any) -> dict[str, int]:
    """Words of the layers of a config, with their number."""
    layers = layers_of(read_config(written(folder, {**TINY, **keys})))
    return dict(Counter(layer if isinstance(layer, str) else layer.words for layer in layers))


@pytest.fixture(params=["defaults of transformers", "keys alone"])
def reader(request, monkeypatch):
    """With transformers, and without."""
    if request.param == "keys alone":
        monkeypatch.setattr(model_config, "find_spec", lambda name: None)
    else:
        pytest.importorskip("transformers")


WINDOW = {"sliding_window": 8}
QWEN = {**WINDOW, "num_key_value_heads": 2, "use_sliding_window": True, "max_window_layers": 3}
GEMMA = {**WINDOW, "head_dim": 8, "num_key_value_heads": 2}
LATENT = {"kv_lora_rank": 32, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16}
BLOCKS = [2, None, 4]
KV = {"num_key_value_heads": 2}
NEO = {"num_hidden_layers": None, "num_attention_heads": None, "num_layers": 4, "num_heads": 2}
MPT = {"d_model": 64, "n_layers": 4, "n_heads": 4, "max_seq_len": 64}
FOUR_FULL = {"layer_types": ["full_attention"] * 4}
CHATGLM = {"num_hidden_layers": None, "num_layers": 3}
CHATGLM |= {"multi_query_group_num": 2, "kv_channels": 32}
SLIDING = {"attention_type": "sliding_attention", "num_attention_heads": 8, "head_dim": 32}
STEP: dict[str, Any] = {"num_attention_groups": 2, "head_dim": 16}
STEP["attention_other_setting"] = {**SLIDING, "num_attention_groups": 4}
MIMO = {"hybrid_layer_pattern": [0, 1, 1, 1], "head_dim": 24, "v_head_dim": 16}
MIMO |= {"swa_num_key_value_heads": 2, "add_swa_attention_sink_bias": True}


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize(
    ("model_type", "keys", "expected"),
    [
        ("llama", {}, "4 h4/4 d16"),
        ("llama", {"num_key_value_heads": None, "head_dim": None}, "4 h4/4 d16"),
        ("mistral", {"num_key_value_heads": 4, **WINDOW}, "4 h4/4 d16 window_left 7"),
        ("llama", WINDOW, "4 h4/4 d16"),
        ("qwen3", {**QWEN, "head_dim": 16}, "3 h4/2 d16, 1 h4/2 d16 window_left 7"),
        ("qwen2", {**QWEN, "use_sliding_window": False}, "4 h4/2 d16"),
        ("qwen2", {**QWEN, "max_window_layers": 0}, "4 h4/2 d16 window_left 7"),
        (
            "gemma3_text",
            {**GEMMA, "sliding_window_pattern": 2},
            "2 h4/2 d8 window_left 7, 2 h4/2 d8",
        ),
        (
            "gemma2",
            {**GEMMA, "attn_logit_softcapping": 30.0},
            "2 h4/2 d8 window_left 7 softcap 30, 2 h4/2 d8 softcap 30",
        ),
        (
            "llama4_text",
            {"head_dim": 8, **KV, "attention_chunk_size": 32},
            "3 h4/2 d8 attention_chunk 32, 1 h4/2 d8",
        ),
        ("deepseek_v3", {**LATENT, "v_head_dim": 16}, "4 h4/1 d40 v_head_dim 32 latent"),
        (
            "qwen3_next",
            {"head_dim": 16, **KV, "full_attention_interval": 2},
            "2 linear_attention, 2 h4/2 d16",
        ),
        # Types that no class knows.
        ("new", {"layer_types": ["conv"] * 3 + ["full_attention"]}, "3 conv, 1 h4/4 d16"),
        (
            "new",
            {"block_configs": [*({"attention": {"n_heads_in_group": n}} for n in BLOCKS), "none"]},
            "1 h4/2 d16, 2 no_op, 1 h4/1 d16",
        ),
        ("new", {"attn_type_list": [0, 0, 1, 0]}, "3 linear_attention, 1 h4/4 d16"),
        (
            "new",
            {"hybrid_override_pattern": "M-*E"},
            "1 linear_attention, 1 mlp, 1 h4/4 d16, 1 moe",
        ),
        (
            "mimo_v2",
            {**MIMO, **WINDOW},
            "1 h4/4 d24 v_head_dim 16, 3 h4/2 d24 window_left 7 sinks v_head_dim 16",
        ),
        # Rules of types, and keys of other code.
        ("RefinedWeb", {"n_head_kv": 2}, "4 h4/2 d16"),
        ("new", {**FOUR_FULL, "num_query_groups": 2}, "4 h4/2 d16"),
        ("new", {**FOUR_FULL, "n_kv_heads": 1}, "4 h4/1 d16"),
        (
            "new",
            {**FOUR_FULL, "num_key_value_heads_per_layer": [4, 2, 1, 1]},
            "1 h4/4 d16, 1 h4/2 d16, 2 h4/1 d16",
        ),
        ("llama", {"text_config": None}, "4 h4/4 d16"),
        ("new", {**FOUR_FULL, "moe_intermediate_size": [32, 16]}, "4 h4/4 d16"),
        ("deepseek_v2", {**dict.fromkeys((*LATENT, "v_head_dim"), 0), **KV}, "4 h4/2 d16"),
        (
            "deepseek_v2",
            {**LATENT, "use_mla": False, "kv_lora_rank": None, "v_head_dim": 16},
            "4 h4/4 d16",
        ),
        ("olmo3", WINDOW, "3 h4/4 d16 window_left 7, 1 h4/4 d16"),
        (
            "jamba",
            {"attn_layer_period": 4, "attn_layer_offset": 2, **KV},
            "3 linear_attention, 1 h4/2 d16",
        ),
        ("bamba", {"attn_layer_indices": [1, 3], **KV}, "2 linear_attention, 2 h4/2 d16"),
        ("lfm2", {"full_attn_idxs": [2], **KV}, "3 conv, 1 h4/2 d16"),
        (
            "recurrent_gemma",
            {"attention_window_size": 8, "block_types": ["recurrent", "attention"]},
            "2 recurrent, 2 h4/4 d16 window_left 7",
        ),
        (
            "gpt_neo",
            {**NEO, "attention_types": [[["global", "local"], 2]], "window_size": 8},
            "2 h2/2 d32, 2 h2/2 d32 window_left 7",
        ),
        (
            "mllama_text_model",
            {"cross_attention_layers": [1], **KV},
            "3 h4/2 d16, 1 cross_attention",
        ),
        (
            "phi3small",
            {"dense_attention_every_n_layers": 2},
            "2 block_sparse_attention, 2 h4/4 d16",
        ),
        ("chatglm", CHATGLM, "3 h4/2 d32"),
        ("chatglm", {**CHATGLM, "multi_query_attention": False}, "3 h4/4 d32"),
        (
            "step3p5",
            {**WINDOW, **STEP, "layer_types": ["full_attention"] + ["sliding_attention"] * 3},
            "1 h4/2 d16, 3 h8/4 d32 window_left 7",
        ),
        (
            "zamba2",
            {"attention_head_dim": 32, "layers_block_type": ["mamba", "hybrid"] * 2},
            "2 linear_attention, 2 h4/4 d32",
        ),
        ("mpt", {**MPT, "attn_config": {"alibi": True}}, "4 h4/4 d16 alibi"),
        # Sizes by layer, and 0 for none.
        (
            "new",
            {**FOUR_FULL, "num_key_value_heads": [4, 2, 1, 1]},
            "1 h4/4 d16, 1 h4/2 d16, 2 h4/1 d16",
        ),
        (
            "gemma3n_text",
            {**WINDOW, **GEMMA, **FOUR_FULL, "intermediate_size": [64] * 4},
            "4 h4/2 d8",
        ),
        (
            "mixtral",
            {"num_local_experts": 0, "num_experts_per_tok": 0, "sliding_window": 0, **KV},
            "4 h4/2 d16",
        ),
    ],
)
def test_layers_are_the_publishers(tmp_path, model_type, keys, expected):
    own = kinds(tmp_path, **{**keys, "model_type": model_type})
    assert {f"{count} {words}" for words, count in own.items()} == {*expected.split(", ")}


@pytest.mark.parametrize("name", [name for name, own in registry().items() if own.is_whole])
def test_the_registry_says_what_the_classes_say(tmp_path, monkeypatch, name):
    """Its entries have every key that transformers has no default for, or another one."""
    pytest.importorskip("transformers")
    monkeypatch.setattr(model_config, "_PLAIN_TYPES", {})
    own = registry()[name]
    again = read_config(written(tmp_path, {"sliding_window": None, **own.published}))
    assert again.model_type == own.model_type
    assert layers_of(again) == layers_of(own)


PLAIN = {"head_dim": 16, "num_key_value_heads": 2, "layer_types": ["full_attention"] * 4}
PLAIN |= {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
EXPERTS |= {"decoder_sparse_step": 2, "mlp_only_layers": [0]}


@pytest.mark.parametrize(
    ("model_type", "keys"),
    [
        ("llama", {}),
        ("mistral", {**WINDOW, **KV}),
        ("mixtral", {**WINDOW, **KV, "num_local_experts": 8, "num_experts_per_tok": 2}),
        ("phi3", WINDOW),
        ("qwen2", QWEN),
        ("qwen3", {**QWEN, "head_dim": 16}),
        ("qwen3_moe", {**QWEN, **EXPERTS, "head_dim": 16}),
    ],
)
def test_files_of_common_types_say_what_the_class_says(tmp_path, monkeypatch, model_type, keys):
    """Also with a key less or more, or another value."""
    pytest.importorskip("transformers")
    whole = {**TINY, "model_type": model_type, **keys}
    files = [whole, *({n: whole[n] for n in whole if n != each} for each in whole)]
    files += [whole | {name: None} for name in whole]
    files += [whole | {name: value} for name, value in PLAIN.items()]
    files += [whole | {"layer_types": ["sliding_attention", *["full_attention"] * 3]}]
    files += [whole | {"use_sliding_window": False}, whole | WINDOW, whole | {"head_dim": 0}]
    files += [whole | {"num_attention_heads": 3}, whole | {"rope_parameters": {"rope_type": "no"}}]

    def outcomes(folder: str) -> list[Any]:
        (tmp_path / folder).mkdir()
        return [_outcome(tmp_path / folder / f"{n}.json", keys) for n, keys in enumerate(files)]

    def imported() -> None:
        raise AssertionError("transformers was imported")

    with monkeypatch.context() as patch:
        patch.setattr(model_config, "_class_mapping", imported)
        assert len(_outcome(tmp_path / "whole.json", whole)) == 3
        few = {name: size for name, size in whole.items() if name not in SIZES[1:]}
        assert len(_outcome(tmp_path / "few.json", few)) == 3
    alone = outcomes("alone")
    monkeypatch.setattr(model_config, "_PLAIN_TYPES", {})
    assert alone == outcomes("class")


def _outcome(path: Path, keys: dict[str, Any]) -> Any:
    """Return what is read of a file, or the key that it is refused for."""
    path.write_text(json.dumps(keys))
    try:
        config = read_config(str(path))
        weights = [count_weights(str(path), tp) for tp in (1, 2)]
    except InvalidKey as fault:
        return fault.key, fault.value
    return layers_of(config), weights, config.keys.get("max_position_embeddings")


def test_absent_keys_are_the_defaults_of_the_class(tmp_path):
    pytest.importorskip("transformers")
    text = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text"}
    text |= {"num_hidden_layers": 34, "sliding_window": 1024}
    whole = {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": -1}}
    model = read_model(written(tmp_path, whole))
    own = {(layer.words, count) for layer, count in model.layer_kinds.items()}
    assert own == {("h8/4 d256", 5), ("h8/4 d256 window_left 1023", 29)}
    assert model.weights == 3_880_263_168


FULL_G3 = {"h8/4 d256": 5, "h8/4 d256 window_left 1023": 29}
ABSENT = {"num_attention_heads": "", "vocab_size": "", "max_position_embeddings": ""}
G3 = {**ABSENT, "hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024}


@pytest.mark.parametrize(
    ("model_type", "keys", "expected"),
    [
        *(
            ("gemma3_text", {**G3, key: value}, FULL_G3)
            for key, value in {
                "rms_norm_eps": "1e-6",
                "use_cache": "yes",
                "hidden_activation": None,
                "dtype": "foo",
                "rope_scaling": "linear",
            }.items()
        ),
        ("deepseek_v3", {**ABSENT, "use_cache": 1}, {"h128/1 d576 v_head_dim 512 latent": 4}),
        (
            "minimax",
            {"attn_type_list": [0, 0, 0, 1], "num_key_value_heads": 2, "use_cache": "x"},
            {"linear_attention": 3, "h4/2 d16": 1},
        ),
        (
            "exaone4",
            {"sliding_window_pattern": "LG", "layer_types": None, **WINDOW, **KV, "head_dim": 16},
            {"h4/2 d16 window_left 7": 2, "h4/2 d16": 2},
        ),
        (
            "gemma2",
            {**GEMMA, "layer_types": ["full_attention"] * 4 + ["x"]},
            {"h4/2 d8 softcap 50": 4},
        ),
    ],
)
def test_a_key_that_the_class_rejects_changes_no_other(tmp_path, model_type, keys, expected):
    pytest.importorskip("transformers")
    keys = {**TINY, **keys, "model_type": model_type}
    path = written(tmp_path, {key: value for key, value in keys.items() if value != ""})
    layers = layers_of(read_config(path))
    assert Counter(getattr(layer, "words", layer) for layer in layers) == expected


def test_a_config_that_the_class_rejects_is_refused(tmp_path, capfd):
    pytest.importorskip("transformers")
    keys = {**TINY, "model_type": "gemma3_text", "bos_token_id": "2", "eos_token_id": "2"}
    keys |= {"rms_norm_eps": "1", "use_cache": "yes", "attention_dropout": "no"}
    with pytest.raises(InvalidKey) as error:
        read_config(written(tmp_path, keys))
    assert error.value.key == "model_type"
    assert capfd.readouterr() == ("", "")


def test_heads_that_are_defaults_divide_into_kv_heads(tmp_path):
    pytest.importorskip("transformers")
    whole = {"model_type": "gemma3", "text_config": {**TINY, "model_type": None}}
    # A part without a type is that of the whole.
    (tmp_path / "part").mkdir()
    assert read_config(written(tmp_path / "part", whole)).model_type == "gemma3_text"
    text = {"model_type": "mistral", "num_key_value_heads": 8, "sliding_window": None}
    [layer] = set(layers_of(read_config(written(tmp_path, {"text_config": text}))))
    assert layer == Layer(32, 8, 128)


@pytest.mark.usefixtures("reader")
def test_the_decoder_of_a_part(tmp_path):
    text = {**TINY, **KV, "model_type": "qwen3_omni_moe_text", "head_dim": 16}
    whole = {"model_type": "qwen3_omni_moe", "thinker_config": {"text_config": text}}
    [layer] = set(layers_of(read_config(written(tmp_path, whole))))
    assert layer == Layer(4, 2, 16)


@pytest.mark.parametrize(
    "keys",
    [
        {"model_type": "new"},
        {"model_type": "qwen2_moe", "use_sliding_window": True, **WINDOW},
        {"model_type": "minimax"},
        {"model_type": "longcat_flash", "num_layers": 2},
    ],
)
def test_layers_of_an_unknown_type(tmp_path, monkeypatch, keys):
    """They are full attention where transformers knows no better, and unknown without it."""
    path = written(tmp_path, {**TINY, **keys})
    monkeypatch.setattr(model_config, "find_spec", lambda name: None)
    with pytest.raises(UnknownLayers) as error:
        layers_of(read_config(path))
    assert (error.value.model, error.value.model_type) == (path, keys["model_type"])


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            {"model_type": "new", "attention_head_dim": 16, "blocksparse_block": 2, **WINDOW},
            ["'new'", "(not read: blocksparse_block, sliding_window)"],
        ),
        ({"model_type": "new", **FOUR_FULL, "use_cla": True}, ["use_cla"]),
        ({"model_type": "new", "n_shared_head": 5, "n_head": 4}, ["(not read: n_shared_head)"]),
        ({"model_type": "new", "layer_group_size": 5}, ["(not read: layer_group_size)"]),
        ({}, []),
    ],
)
def test_notes_on_layers(tmp_path, keys, words):
    notes = notes_on_layers(read_config(written(tmp_path, {**TINY, **keys})))
    assert len(notes) == bool(words)
    assert all(word in note for note in notes for word in words)


def test_keys_that_are_not_read_may_be_anything(tmp_path):
    text = json.dumps({**TINY, "model_type": "new", **FOUR_FULL})
    text = text[:-1] + ', "time_step_limit": [0.0, Infinity], "x": NaN, "y": ' + "9" * 400 + "}"
    assert layers_of(read_config(written(tmp_path, text)))


def _groups(*bits: Any) -> dict[str, Any]:
    """Return the quantisation of a checkpoint by compressed-tensors."""
    groups = {f"group_{place}": {"weights": {"num_bits": of}} for place, of in enumerate(bits)}
    return {"quant_method": "compressed-tensors", "config_groups": groups}


@pytest.mark.parametrize(
    ("table", "beside", "expected", "bits"),
    [
        (None, None, None, 16),
        ({"quant_method": "fp8", "fmt": "e4m3"}, None, "fp8", 8),
        ({"format": "pack-quantized"}, None, "pack-quantized", 16),
        ({"quant_algo": "NVFP4", "quant_method": "modelopt"}, None, "NVFP4", 4.5),
        ([1], None, "quantised", 16),
        ({"quant_method": "a\x1b[31m\n"}, None, r"a\x1b[31m\n", 16),
        (None, {"quantization": {"quant_algo": "FP8"}}, "FP8", 8),
        ({"quant_method": "awq", "bits": 4}, None, "awq", 4),
        ({"quant_method": "gptq", "bits": True}, None, "gptq", 16),
        (_groups(8), None, "compressed-tensors", 8),
        (_groups(8, 4), None, "compressed-tensors", 8),
        (_groups(None, "8", 99, 0), None, "compressed-tensors", 16),
        (_groups(4) | {"config_groups": [4]}, None, "compressed-tensors", 16),
    ],
)
def test_quantised_weights_are_told(tmp_path, table, beside, expected, bits):
    keys = {"compression_config" if expected == "pack-quantized" else "quantization_config": table}
    if beside is not None:
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    model = read_model(written(tmp_path, {**TINY, **keys}))
    assert (model.source.quantization, model.source.weight_bits) == (expected, bits)
    assert len(model.notes) == (expected is not None)


@pytest.mark.parametrize("content", ["{", " \n", b"\xff\xfe\x00", "[" * 100_000, "[]", "NaN"])
def test_what_is_no_config(tmp_path, content):
    path = written(tmp_path, content)
    with pytest.raises(NotAConfig) as error:
        read_config(path)
    assert str(error.value.path) == path


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("num_hidden_layers", value) for value in (-1, 0, 1.5, "2", True, [2], 10**9)),
        *(("hidden_size", value) for value in (float("nan"), 10**400, 2**31, {"a": 1})),
        ("intermediate_size", 0),
        ("num_key_value_heads", "2"),
        ("num_attention_heads", 0),
        ("head_dim", -8),
        ("sliding_window", "all"),
        ("vocab_size", 2**63),
        ("layer_types", 3),
        ("layer_types", ["full_attention"]),
        ("max_window_layers", -1),
        ("full_attention_interval", 0),
        ("mlp_bias", 1),
        ("linear_attn_config", []),
        ("attention_types", [[["global"], 10**9]]),
        ("attention_types", [[["global"] * 600, 2]]),
        ("intermediate_size", [64] * 3),
        ("vocab_size", [64, 64, 64, 32]),
        ("num_attention_heads", [4, "4", 4, 4]),
        ("num_hidden_layers", 1001),
        *(("sliding_window_pattern", value) for value in (0, -6, "xyz", [1])),
        *(("attn_logit_softcapping", value) for value in ("50", -50.0, True)),
        *(("mlp_only_layers", value) for value in ([-1], ["a"], 3)),
        ("cross_attention_layers", ["3"]),
        ("hybrid_override_pattern", "M?*-"),
        ("text_config", [1]),
        ("hidden_size", 65),
    ],
)
def test_a_key_out_of_range_is_one_sentence(tmp_path, key, value):
    with pytest.raises(InvalidKey) as error:
        read_config(written(tmp_path, {**TINY, key: value}))
    assert error.value.key == key
    assert len(str(error.value)) < 300 + len(str(tmp_path))


@pytest.mark.parametrize("model_type", [None, ["llama"]])
def test_a_missing_type_is_found_without_transformers(tmp_path, monkeypatch, model_type):
    monkeypatch.delattr(model_config, "_class_mapping")
    with pytest.raises(InvalidKey) as error:
        read_config(written(tmp_path, {**TINY, "model_type": model_type}))
    assert error.value.key == "model_type"


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({"model_type": "new", "hidden_size": None}, "hidden_size"),
        ({"num_key_value_heads": 3}, "num_attention_heads"),
        ({"hidden_size": 2}, "hidden_size"),
        ({"model_type": "mixtral", **KV, "num_experts_per_tok": 9}, "num_experts_per_tok"),
        ({"model_type": "new", "layer_types": ["sliding_attention"] * 4}, "sliding_window"),
    ],
)
def test_keys_that_are_missing_or_contradict(tmp_path, keys, key):
    with pytest.raises(InvalidKey) as error:
        layers_of(read_config(written(tmp_path, {**TINY, **keys})))
    assert error.value.key == key


@pytest.mark.parametrize(
    "keys",
    [
        {"model_type": "new", "layer_types": ["mamba"] * 4},
        {"model_type": "new", "is_encoder_decoder": True},
        {"model_type": "new", "compress_ratios": [128] * 4},
        {"model_type": "bert"},
        {"model_type": "t5", "is_encoder_decoder": True},
        {"model_type": "gated_deltanet"},
        *({"model_type": name} for name in ("mpnet", "longformer", "clip_text_model", "wav2vec2")),
        {"architectures": ["NewForMaskedLM"]},
        {"model_type": "mamba2", "num_heads": 8, "head_dim": 8},
        {"model_type": "mamba", "num_attention_heads": None},
    ],
)
def test_models_that_have_no_decode_attention(tmp_path, keys):
    with pytest.raises(NoDecodeAttention):
        layers_of(read_config(written(tmp_path, {**TINY, **keys})))


@pytest.mark.parametrize(
    "keys",
    [
        {"model_type": "new", **FOUR_FULL},
        {"model_type": "cohere2", "routed_expert_hidden_size": 33},
    ],
)
def test_weights_that_are_not_known(tmp_path, keys):
    path = written(tmp_path, {**TINY, **keys})
    assert layers_of(read_config(path))
    with pytest.raises(UnknownWeights) as error:
        read_model(path)
    assert error.value.model == path


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3-8b"),
        ("Meta-Llama-3-8B-Instruct", "llama-3-8b"),
        ("google/gemma-3-27b-it", "gemma-3-27b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b"),
        ("Qwen/Qwen3-32B", "qwen3-32b"),
        ("checkpoints/llama-3-8b", None),
        ("./llama-3-8b", None),
        ("zai-org/GLM-5-FP8", "glm-5"),
        ("owner/GLM-5-FP8", None),
    ],
)
def test_names_of_the_hub_with_the_same_layers(name: str, known: str | None) -> None:
    assert own_name(name) == known


def test_unknown_names_suggest_those_that_begin_so() -> None:
    with pytest.raises(UnknownModel, match="'llama-4-maverick' or 'llama-4-scout'"):
        parse_models("llama-4")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("./no/config.json", "no file is there"),
        ("~/config.json", "no file is there"),
        ("llama-3-8b:tp=2", "--tp N"),
        ("lama-3-8b", "did you mean"),
    ],
)
def test_names_that_are_no_model(name, hint):
    with pytest.raises(UnknownModel, match=hint):
        parse_models(name)


def test_files_that_are_not_read(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    faults = {"/dev/zero": FileFault.NOT_REGULAR, str(tmp_path): FileFault.MISSING}
    for path, fault in {**faults, str(tmp_path / "loop"): FileFault.SYSTEM}.items():
        for read in (read_config, read_model, parse_models)[: 3 if path.endswith("loop") else 1]:
            with pytest.raises(UnreadableFile) as error:
                read(path)
            assert error.value.fault == fault


def test_commas_and_colons_of_paths_that_exist(tmp_path):
    for name in ("a,b", "c:d,e"):
        (tmp_path / name).mkdir()
    both = f"{tmp_path}/a,b"
    assert split_models(f"x,{both},y") == ["x", both, "y"]
    third = f"{tmp_path}/c:d,e"
    assert split_models(f"{both}:tp=2,y,{third}") == [f"{both}:tp=2", "y", third]
    assert split_models(f"{tmp_path}/no,b") == [f"{tmp_path}/no", "b"]
    assert split_models("a,,b") == ["a", "", "b"]
