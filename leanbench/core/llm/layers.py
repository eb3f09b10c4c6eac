"""Layers of a language model: decode attention, or the name of another kind."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from leanbench.core.errors import InvalidValue, Reason, UserError
from leanbench.core.kinds import Choice
from leanbench.core.llm.config import READ_KEYS, ModelConfig, size_of_layer
from leanbench.core.llm.errors import InvalidKey, NoDecodeAttention

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
SPARSE, LINEAR = "sparse_attention", "linear_attention"
#: Other names of these kinds, in config.json and in transformers.
_KINDS = {
    **{name: name for name in (FULL, SLIDING, CHUNKED, SPARSE)},
    "attention": FULL,
    # Mamba layers with an attention that several of them share.
    "hybrid": FULL,
    "deepseek_sparse_attention": SPARSE,
    "minimax_m3_sparse": SPARSE,
    "compressed_sparse_attention": SPARSE,
}
#: Publishers' names of kinds that transformers names otherwise.
_NAMES = {"mamba": LINEAR, "mamba2": LINEAR}
#: Keys that can change the attention of a layer.
_CHANGES_LAYERS = re.compile(
    r"sparse|window|local|(^|_)kv|group|head|^(?!.*dropout|.*bias|.*impl).*(attn|attention)_"
)
#: Without the window, which is that of types with a rule.
_READ_KEYS = frozenset(READ_KEYS) - {"sliding_window"}
#: Letters of Nemotron-H's hybrid_override_pattern.
_LETTERS = {"*": FULL, "M": LINEAR, "-": "mlp", "E": "moe"}
#: Every n-th layer is full, the others slide: n for configs without it.
_PATTERNS = {
    **dict.fromkeys(("gemma2", "gpt_oss", "vaultgemma"), 2),
    **dict.fromkeys(("afmoe", "cohere2", "exaone4", "olmo3"), 4),
    "gemma3_text": 6,
    "gemma3n_text": 5,
}
#: Types with a sink in every layer.
_WITH_SINKS = ("gpt_oss", "deepseek_v4")


def _types(names: str) -> frozenset[str]:
    return frozenset(names.split())


#: Types with full attention in every layer.
_FULL_TYPES = _types(
    "apertus arcee aria_text baichuan biogpt bitnet bloom chatglm codegen cohere dbrx deepseek"
    " deepseek_v2 deepseek_v3 ernie4_5 ernie4_5_moe falcon falcon_h1 flex_olmo gemma glm glm4"
    " glm4_moe glm4_moe_lite gpt2 gpt_bigcode gpt_neox gptj granite granitemoe granitemoeshared"
    " grok-1 helium hunyuan_v1_dense hunyuan_v1_moe internlm internlm2 internlm3 jetmoe llama"
    " minicpm minimax_m2 mllama_text_model mpt nanochat nemotron olmo olmo2 olmoe opt persimmon phi"
    " qwen3_vl_moe_text qwen3_vl_text RefinedWeb RefinedWebModel seed_oss smollm3 solar_open"
    " stablelm step3_text xglm xverse youtu"
)
#: Types with a window in every layer, if the config has one.
_WINDOW_TYPES = _types(
    "ministral3 mistral mixtral phi3 phi4_multimodal phimoe qwen3_moe recurrent_gemma starcoder2"
)
#: Types with a window from layer max_window_layers on, if use_sliding_window is true.
_LAST_WINDOW_TYPES = _types(
    "qwen2 qwen3 qwen2_vl qwen2_vl_text qwen2_5_vl qwen2_5_vl_text qwen2_5_omni_text"
    " qwen3_omni_moe_text"
)


@dataclass(eq=False)
class UnknownLayers(UserError):
    """A type whose layers are read by no rule."""

    #: Name or path.
    model: str
    model_type: str

    def __str__(self) -> str:
        return (
            f"the layers of {self.model} are not known without transformers (model_type"
            f" {self.model_type!r}): pip install transformers, or add layer_types to the"
            " config.json"
        )


@dataclass(frozen=True)
class Layer:
    """Decode attention of some layers of a model, on one GPU."""

    q_heads: int
    kv_heads: int
    head_dim: int
    #: Fields of AttentionProblem off their defaults, with their values.
    kinds: tuple[tuple[str, Any], ...] = ()
    #: Tokens selected from the context (top-k sparse attention), as the axis `select` has them;
    #: None for all.
    select: int | str | None = None

    @property
    def selected(self) -> int | None:
        """Number of selected tokens; None for all."""
        return None if self.select is None else Choice.of(self.select).tokens

    @property
    def window(self) -> int | None:
        """Maximum number of tokens it attends to, the query's own included; None for the whole
        context.
        """
        left = dict(self.kinds).get("window_left")
        return None if left is None else left + 1

    @property
    def is_plain(self) -> bool:
        """True if it differs from full attention only by a window or sinks."""
        return self.select is None and dict(self.kinds).keys() <= {"window_left", "sinks"}

    @property
    def words(self) -> str:
        """Describe it as labels of problems do: ``h64/8 d64 window_left 127 sinks``."""
        kinds = [name if value is True else f"{name} {value:g}" for name, value in self.kinds]
        kinds += [] if self.select is None else [f"{self.select} selected tokens"]
        return " ".join([f"h{self.q_heads}/{self.kv_heads} d{self.head_dim}", *kinds])

    def divides(self, tp: int) -> bool:
        return self.q_heads % tp == 0 and (self.kv_heads % tp == 0 or tp % self.kv_heads == 0)

    def share(self, tp: int, name: str) -> Layer:
        """Return the part of one of `tp` GPUs.

        Query heads are divided evenly, and so are KV heads if there are enough of them. With more
        GPUs than KV heads every GPU has one, the same one on several.

        Raises:
            InvalidValue: The heads of the model `name` do not divide.
        """
        if not self.divides(tp):
            can = [str(number) for number in range(1, self.q_heads + 1) if self.divides(number)]
            fix = f"choose tp from {', '.join(can)} for the heads of {name}"
            limit = f"query/KV heads {self.q_heads}/{self.kv_heads}"
            raise InvalidValue("tp", tp, Reason.CONFLICT, fix, limit)
        return replace(self, q_heads=self.q_heads // tp, kv_heads=max(1, self.kv_heads // tp))


def layers_of(config: ModelConfig) -> tuple[Layer | str, ...]:
    """Return each layer of a model in order: its attention, or a name such as linear_attention.

    Raises:
        UserError: The model has no attention that decodes.
    """
    keys = config.keys
    names = _names(config)
    made: dict[tuple[str, int, int, int], Layer | str] = {}
    layers = []
    for index, name in enumerate(names):
        kind = _KINDS.get(name, "")
        if kind == FULL and config.model_type == "recurrent_gemma":
            kind = SLIDING
        q_heads = size_of_layer(keys, "num_attention_heads", index)
        kv_heads = _kv_heads(keys, index, q_heads)
        if not kind or not kv_heads:
            layers.append(name if kv_heads else "no_op")
            continue
        one = kind, q_heads, kv_heads, _rotary_columns(keys, index)
        if one not in made:
            made[one] = _layer(config, *one)
        layers.append(made[one])
    if not any(isinstance(layer, Layer) for layer in layers):
        raise NoDecodeAttention(config.name, tuple(dict.fromkeys(names)))
    return tuple(layers)


def notes_on_layers(config: ModelConfig) -> list[str]:
    """Return what the layers leave out or assume, for a terminal or a row."""
    notes = []
    if _rule(config) is None and not _is_known(config):
        unread = [
            key
            for key, value in config.published.items()
            if value and _CHANGES_LAYERS.search(key) and key not in _READ_KEYS
        ]
        also = f" (not read: {', '.join(unread[:4])})" if unread else ""
        notes.append(
            f"model_type {config.model_type!r} is not known: every layer of {config.name} counts"
            f" as full attention{also}"
        )
    if config.keys.get("use_cla") is True:
        notes.append(
            f"layers of {config.name} share K and V (use_cla); each counts as if it had its own"
        )
    return notes


def _names(config: ModelConfig) -> Sequence[str]:
    """Return the kind of each layer, as transformers' layer_types name them."""
    count = config.keys["num_hidden_layers"]
    rule = _rule(config)
    if rule is None and not _is_known(config) and not config.has_transformers:
        raise UnknownLayers(config.name, config.model_type)
    crossed = config.keys.get("cross_attention_layers", ())
    names = [FULL if rule is None else rule(index) for index in range(count)]
    return ["cross_attention" if index in crossed else name for index, name in enumerate(names)]


def _is_known(config: ModelConfig) -> bool:
    """Return True if a type without a rule has full attention."""
    types = _FULL_TYPES | _WINDOW_TYPES | _LAST_WINDOW_TYPES | _PATTERNS.keys()
    has_no_window = config.keys.get("use_sliding_window") is False
    return bool(config.hub) or config.has_defaults or has_no_window or config.model_type in types


def _rule(config: ModelConfig) -> Callable[[int], str] | None:
    """Return the function of a layer's index that names its kind; None for full attention."""
    keys = config.keys
    given = keys.get("layer_types") or keys.get("layers_block_type")
    if given:
        return lambda index: _NAMES.get(str(given[index]), str(given[index]))
    if isinstance(pattern := keys.get("hybrid_override_pattern"), str):
        return lambda index: _LETTERS.get(pattern[index], pattern[index])
    rules = (_compressed_names, _mixed_names, _block_names, _sparse_names, _window_names)
    return next(filter(None, (rule(config) for rule in rules)), None)


def _compressed_names(config: ModelConfig) -> Callable[[int], str] | None:
    ratios = config.keys.get("compress_ratios")
    if ratios is None:
        return None
    names = {0: SLIDING, 4: "compressed_sparse_attention"}
    return lambda index: names.get(ratios[index], "heavily_compressed_attention")


def _mixed_names(config: ModelConfig) -> Callable[[int], str] | None:
    """Return the kinds of a model with layers that are not attention."""
    keys = config.keys
    full = keys.get("linear_attn_config", {}).get("full_attn_layers")
    if isinstance(full, list):
        return lambda index: FULL if index + 1 in full else LINEAR
    if interval := keys.get("full_attention_interval"):
        return lambda index: LINEAR if (index + 1) % interval else FULL
    if period := keys.get("attn_layer_period"):
        offset = keys.get("attn_layer_offset", 0)
        return lambda index: FULL if index % period == offset else LINEAR
    if "attn_layer_indices" in keys:
        return lambda index: FULL if index in keys["attn_layer_indices"] else LINEAR
    if "full_attn_idxs" in keys:
        return lambda index: FULL if index in keys["full_attn_idxs"] else "conv"
    return None


def _block_names(config: ModelConfig) -> Callable[[int], str] | None:
    """Return the kinds of a model that repeats a block of layers."""
    keys = config.keys
    if blocks := keys.get("block_types"):
        return lambda index: str(blocks[index % len(blocks)])
    if "attention_types" in keys:
        kinds = [kind for block, times in keys["attention_types"] for kind in block * times]
        names = [SLIDING if kind == "local" else FULL for kind in kinds]
        if len(names) < keys["num_hidden_layers"]:
            must = f"an entry for each of {keys['num_hidden_layers']} layers"
            raise InvalidKey(config.name, "attention_types", keys["attention_types"], must)
        return lambda index: names[index]
    if interval := keys.get("dense_attention_every_n_layers"):
        return lambda index: "block_sparse_attention" if (index + 1) % interval else FULL
    if "block_configs" in keys:
        return lambda index: FULL
    return None


def _sparse_names(config: ModelConfig) -> Callable[[int], str] | None:
    """Return the kinds of a model that selects tokens."""
    keys = config.keys
    table = keys.get("sparse_attention_config", {})
    layers = table.get("sparse_attention_freq")
    if table.get("use_sparse_attention") and isinstance(layers, list):
        return lambda index: SPARSE if layers[index : index + 1] == [1] else FULL
    return None if "index_topk" not in keys else lambda index: SPARSE


def _window_names(config: ModelConfig) -> Callable[[int], str] | None:
    """Return the kinds of a model with windows or chunks."""
    keys = config.keys
    if config.model_type.startswith("llama4") and "attention_chunk_size" in keys:
        rotary = keys.get("no_rope_layers") or [
            int((index + 1) % 4 > 0) for index in range(keys["num_hidden_layers"])
        ]
        return lambda index: CHUNKED if rotary[index : index + 1] == [1] else FULL
    if "sliding_window" not in keys or keys.get("use_sliding_window") is False:
        return None
    if config.model_type in _FULL_TYPES:
        return None
    if types := keys.get("hybrid_layer_pattern"):
        return lambda index: SLIDING if types[index] else FULL
    pattern = keys.get("sliding_window_pattern", _PATTERNS.get(config.model_type))
    if pattern:
        return lambda index: SLIDING if (index + 1) % pattern else FULL
    if config.model_type in _LAST_WINDOW_TYPES:
        if not keys.get("use_sliding_window"):
            return None
        first = keys.get("max_window_layers", 28)
        return lambda index: SLIDING if index >= first else FULL
    # Layers of other types can alternate.
    is_known = config.model_type in _WINDOW_TYPES or config.has_defaults or config.hub
    return (lambda index: SLIDING) if is_known else None


def _kv_heads(keys: Mapping[str, Any], index: int, q_heads: int) -> int:
    """Return the KV heads of a layer; 0 if it has no attention."""
    blocks = keys.get("block_configs")
    if blocks:
        block = blocks[index] if index < len(blocks) else {}
        attention = block.get("attention") if isinstance(block, dict) else None
        group = attention.get("n_heads_in_group") if isinstance(attention, dict) else None
        return q_heads // group if type(group) is int and 0 < group <= q_heads else 0
    if keys.get("multi_query") and not keys.get("new_decoder_architecture"):
        return 1
    return size_of_layer(keys, "num_key_value_heads", index) or q_heads


def _rotary_columns(keys: Mapping[str, Any], index: int) -> int:
    """Return the columns of a latent row beyond V; some layers rotate none (Mistral Large 4)."""
    rotates = keys.get("no_rope_layers", ())[index : index + 1] != [0]
    return keys.get("qk_rope_head_dim", 0) if rotates else 0


def _layer(config: ModelConfig, kind: str, q_heads: int, kv_heads: int, rotary: int) -> Layer:
    keys = config.keys
    head_dim = keys.get("head_dim") or keys["hidden_size"] // q_heads
    v_head_dim = keys.get("v_head_dim", head_dim)
    kinds: list[tuple[str, Any]] = []
    if kind == SLIDING:
        kinds.append(("window_left", _needed(config, "sliding_window") - 1))
        # MiMo-V2: other heads in layers with a window.
        q_heads = keys.get("swa_num_attention_heads", q_heads)
        kv_heads = keys.get("swa_num_key_value_heads", kv_heads)
        head_dim = keys.get("swa_head_dim", head_dim)
        v_head_dim = keys.get("swa_v_head_dim", keys.get("v_head_dim", head_dim))
    elif "global_head_dim" in keys:
        # Gemma 4: other heads in layers without.
        head_dim = v_head_dim = keys["global_head_dim"]
        if keys.get("attention_k_eq_v"):
            kv_heads = keys.get("num_global_key_value_heads", kv_heads)
    if kind == CHUNKED:
        kinds.append(("attention_chunk", _needed(config, "attention_chunk_size")))
    has_sinks = config.model_type in _WITH_SINKS or keys.get(
        "add_swa_attention_sink_bias" if kind == SLIDING else "add_full_attention_sink_bias"
    )
    kinds += [("sinks", True)] if has_sinks else []
    softcap = keys.get("attn_logit_softcapping")
    kinds += [("softcap", float(softcap))] if softcap else []
    kinds += [("alibi", True)] if keys.get("alibi") or config.model_type == "bloom" else []
    if "kv_lora_rank" in keys:
        latent = keys["kv_lora_rank"]
        kinds += [("v_head_dim", latent), ("latent", True)]
        kv_heads, head_dim = 1, latent + rotary
    elif config.model_type == "deepseek_v4":
        kinds.append(("latent", True))
    elif v_head_dim != head_dim:
        kinds.append(("v_head_dim", v_head_dim))
    return Layer(q_heads, kv_heads, head_dim, tuple(kinds), _select(config, kind))


def _select(config: ModelConfig, kind: str) -> int | str | None:
    if kind != SPARSE:
        return None
    keys = config.keys
    table = keys.get("sparse_attention_config", {})
    blocks = keys.get("index_topk_blocks", table.get("sparse_topk_blocks"))
    block = keys.get("index_block_size", table.get("sparse_block_size"))
    if type(blocks) is int and type(block) is int and blocks * block > 0:
        return f"{blocks}x{block}"
    if "compress_ratios" in keys or config.model_type == "deepseek_v4":
        # Compressed rows and those of a window, in one softmax.
        return _needed(config, "index_topk") + _needed(config, "sliding_window")
    return keys.get("index_topk")


def _needed(config: ModelConfig, key: str) -> int:
    if key not in config.keys and config.published.get(key):
        types = config.published.get("layer_types")
        must = f"without windows, as transformers' code of {config.model_type!r} has none"
        raise InvalidKey(config.name, "layer_types", types, must)
    if key not in config.keys:
        raise InvalidKey(config.name, key, None, "its layers have a window, chunks or a selection")
    return config.keys[key]
