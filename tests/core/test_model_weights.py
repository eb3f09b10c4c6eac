"""Weights and windows of tiny models against those that transformers builds."""

import json
from collections import Counter
from typing import Any

import pytest
import torch

from leanbench.core.llm.model import WholeModel, count_weights, read_model
from leanbench.core.llm.weights import _COMMON, UnknownWeights, registered_weights
from tools import weights as tool

transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed")

TINY = {"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 6, "vocab_size": 96}
TINY |= {"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 128}
TINY |= {"pad_token_id": 0, "sliding_window": 16}
HEADS = {"head_dim": 16}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LOCAL_MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16}
LATENT |= {"v_head_dim": 16, "num_key_value_heads": 8, "n_routed_experts": 4, "n_group": 1}
LATENT |= {"topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT |= {"first_k_dense_replace": 1}
TIED = [{"tie_word_embeddings": True}, {"tie_word_embeddings": False}]
BIAS = [{"attention_bias": True}, {"attention_bias": False}]
WINDOWS = [{"use_sliding_window": True, "max_window_layers": 2}, {"use_sliding_window": False}]
OPT_SWITCHES = "do_layer_norm_before enable_bias layer_norm_elementwise_affine tie_word_embeddings"
OPT_OFF = [{switch: False} for switch in OPT_SWITCHES.split()]
OPT = {"ffn_dim": 48, "num_key_value_heads": None, "sliding_window": None}
#: By type: keys that it needs, and its optional keys.
CASES: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "gemma": (HEADS, [*BIAS, *TIED]),
    "gemma2": (HEADS, [*BIAS, *TIED, {"sliding_window": 8}]),
    "gemma3_text": (HEADS, [*BIAS, *TIED, {"sliding_window_pattern": 3}]),
    "gpt_oss": ({**HEADS, **LOCAL_MOE}, [*BIAS, *TIED]),
    "llama": ({}, [*BIAS, *TIED, HEADS, {"mlp_bias": True}, {"num_key_value_heads": None}]),
    "mistral": ({}, [*TIED, HEADS, {"sliding_window": None}]),
    "mixtral": (LOCAL_MOE, [*TIED, HEADS, {"sliding_window": None}]),
    "opt": (OPT, [{"word_embed_proj_dim": 32}, {"_remove_final_layer_norm": True}, *OPT_OFF]),
    "phi3": ({}, [*TIED, {"sliding_window": None}]),
    "qwen2": ({}, [*TIED, *WINDOWS]),
    "qwen3": (HEADS, [*BIAS, *TIED, *WINDOWS, {"use_sliding_window": True}]),
    "qwen3_moe": (
        {**HEADS, **MOE},
        [*BIAS, *TIED, {"mlp_only_layers": [1, 2]}, {"decoder_sparse_step": 2}, WINDOWS[1]],
    ),
    # Counted by transformers.
    "cohere2": (HEADS, [{"sliding_window_pattern": 3}]),
    "deepseek_v3": (LATENT, [{"q_lora_rank": None}]),
    "gemma4_text": (
        {**HEADS, "global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
        [{"attention_k_eq_v": False}, {"hidden_size_per_layer_input": 8}],
    ),
    "glm4_moe": (
        {**HEADS, **LATENT, "kv_lora_rank": None, "v_head_dim": None},
        [{"use_qk_norm": True}],
    ),
    "olmo2": ({}, []),
    "starcoder2": ({}, [{"sliding_window": None}]),
    "qwen3_next": (
        {**HEADS, **MOE, "shared_expert_intermediate_size": 24, "full_attention_interval": 3},
        [],
    ),
}
VARIANTS = [
    pytest.param(model_type, {**needed, **optional}, id=f"{model_type} {number}")
    for model_type, (needed, options) in CASES.items()
    for number, optional in enumerate([{}, *options])
]


def built(tmp_path, model_type: str, keys: dict[str, Any]) -> tuple[WholeModel, Any]:
    """The model as leanbench reads it, and transformers' own on the meta device."""
    fields = {**TINY, **keys}
    fields.pop("model_type", None)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": model_type, **fields}))
    config = transformers.AutoConfig.for_model(model_type, **fields)
    with torch.device("meta"):
        return read_model(str(path)), transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(("model_type", "keys"), VARIANTS)
def test_weights_and_windows_are_those_of_transformers(tmp_path, model_type, keys):
    own, model = built(tmp_path, model_type, keys)
    assert own.weights == sum(weight.numel() for weight in model.parameters())
    windows: Counter[int | None] = Counter()
    for layer, count in own.layer_kinds.items():
        windows[layer.window] += count
    attentions = [
        module
        for name, module in model.named_modules()
        if name.endswith(("self_attn", "attention", "attn")) and "linear" not in name
    ]
    assert windows == Counter(getattr(module, "sliding_window", None) for module in attentions) or (
        # Modules of these types take the window from the config.
        model_type in ("mixtral", "mistral", "phi3", "starcoder2")
        and windows == {keys.get("sliding_window", 16): 6}
    )


def test_every_common_type_is_compared():
    others = {"qwen3_vl_text", "qwen3_vl_moe_text"}
    assert set(_COMMON) - others <= set(CASES)


@pytest.mark.parametrize("model_type", ["qwen3_vl_text", "qwen3_vl_moe_text"])
def test_decoders_of_models_that_see(tmp_path, model_type):
    keys = {**TINY, **HEADS, **(MOE if "moe" in model_type else {}), "model_type": model_type}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": model_type[:-5], "text_config": keys}))
    fields = {key: value for key, value in keys.items() if key != "model_type"}
    with torch.device("meta"):
        config = transformers.AutoConfig.for_model(model_type, **fields)
        decoder = transformers.AutoModel.from_config(config)
    weights = sum(weight.numel() for weight in decoder.parameters())
    assert read_model(str(path)).weights == weights + 96 * 64


@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize(
    "model_type", ["llama", "gpt_oss", "qwen3_moe", "qwen2", "phi3", "gemma3_text", "starcoder2"]
)
def test_a_share_is_the_model_that_is_built_of_it(tmp_path, model_type, tp):
    own, _ = built(tmp_path, model_type, CASES[model_type][0])
    part = WholeModel(own.source, tp)
    (tmp_path / "part").mkdir()
    _, model = built(tmp_path / "part", model_type, dict(part.config))
    assert part.weights == sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize("model_type", ["deepseek_v3", "gpt_oss", "qwen3_moe"])
def test_a_step_reads_what_tokens_reach(tmp_path, model_type):
    own, model = built(tmp_path, model_type, CASES[model_type][0])
    names = dict(model.named_parameters())
    experts = sum(own.numel() for name, own in names.items() if ".experts." in name)
    tables = sum(
        module.weight.numel() for module in model.modules() if type(module).__name__ == "Embedding"
    )
    others = own.weights - experts - tables
    for tokens in (1, 3):
        assert own.weights_read(tokens) == pytest.approx(others + experts * (1 - 0.5**tokens))


def test_experts_without_weights_are_not_counted(tmp_path):
    keys = {**LATENT, "num_layers": 2, "num_hidden_layers": 4, "moe_topk": 3, "zero_expert_num": 2}
    sizes = {"ffn_hidden_size": 48, "expert_ffn_hidden_size": 24, "num_experts_per_tok": None}
    own, model = built(tmp_path, "longcat_flash", {**keys, **sizes})
    names = dict(model.named_parameters())
    gates = [own for name, own in names.items() if name.endswith("experts.gate_up_proj")]
    assert [len(gate) for gate in gates] == [6, 6]
    unused = sum(gate[4:].numel() for gate in gates)
    assert own.weights == sum(weight.numel() for weight in model.parameters()) - unused
    assert own.all_weights.expert_share == 0.5


def test_tables_of_each_layer_are_read_by_the_row(tmp_path):
    """Gemma 4's embeddings of each layer; the table of the output matrix is read whole."""
    keys = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 512}
    own, model = built(tmp_path, "gemma4_text", {**CASES["gemma4_text"][0], **keys})
    assert own.weights == sum(weight.numel() for weight in model.parameters())
    assert own.weights_read(1) == own.weights - 512 * 8 * 6


GPT = {"n_embd": 64, "n_head": 8, "n_layer": 6, "n_positions": 128, "n_inner": 256}
DBRX = {
    "d_model": 64,
    "n_heads": 8,
    "n_layers": 6,
    "max_seq_len": 128,
    "attn_config": {"kv_n_heads": 2, "rope_theta": 10000},
    "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 1},
}
#: Types with classes that find sizes in keys of their own.
OWN_KEYS = [("dbrx", DBRX), ("gpt_bigcode", GPT), ("gptj", {**GPT, "rotary_dim": 4})]
OWN_KEYS += [("gpt_neox", {}), ("stablelm", {}), ("persimmon", {}), ("qwen2_5_vl_text", {})]


def own_keys(tmp_path, model_type: str, keys: dict[str, Any]) -> WholeModel:
    """A model of these keys, without those that they rename."""
    pytest.importorskip("transformers")
    fields = {"vocab_size": 96, **keys} if keys else TINY
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**fields, "model_type": model_type}))
    return read_model(str(path))


@pytest.mark.parametrize(("model_type", "keys"), OWN_KEYS)
def test_layers_and_shares_of_any_type(tmp_path, model_type, keys):
    """Each of 6 equal layers counts, and so does each of 2 GPUs."""
    whole = own_keys(tmp_path, model_type, keys)
    layers = [whole.all_weights.total(number) for number in range(7)]
    assert layers[6] - layers[5] == layers[1] - layers[0] > 0.8 * layers[6] / 7
    part = WholeModel(whole.source, 2)
    # Norms, biases, routers, positions and one KV head for all queries are on both.
    assert part.weights == pytest.approx(whole.weights / 2, rel=0.07)
    assert "does not share out" in str(part.only_predicted)


def test_experts_of_a_type_with_keys_of_its_own(tmp_path):
    weights = own_keys(tmp_path, "dbrx", DBRX).all_weights
    assert weights.expert_share == 1 / 4
    assert {layer.experts for layer in weights.layers} == {4 * 3 * 64 * 48}


@pytest.mark.parametrize(
    ("model_type", "keys", "word"),
    [
        ("deepseek_v2", {**LATENT, "kv_lora_rank": 0}, "kv_lora_rank"),
        ("jamba", {"layers_block_type": ["mamba", "attention"] * 3}, "layers_block_type"),
    ],
)
def test_weights_of_keys_that_the_class_does_not_take(tmp_path, capfd, model_type, keys, word):
    pytest.importorskip("transformers")
    with pytest.raises(UnknownWeights, match=f"does not use its {word}"):
        own_keys(tmp_path, model_type, {**TINY, **keys})
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("name", "tp"), [("llama-4-maverick", 1), ("nemotron-3-nano-30b-a3b", 2)])
def test_counts_that_come_with_leanbench_are_those_of_transformers(name: str, tp: int):
    assert registered_weights(name, tp) == count_weights(name, tp)


@pytest.mark.deep
def test_the_file_of_counts_is_what_its_tool_makes():
    assert tool.main([]) == 0


def test_models_without_counts_have_none():
    assert registered_weights("llama-3-8b", 1) is None
    assert registered_weights("llama-4-scout", 3) is None
