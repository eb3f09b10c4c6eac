"""Layers of a language model: decode attention, or the name of another kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from leanbench.core.errors import InvalidValue, Reason, UserError
from leanbench.core.llm.config import InvalidKey, ModelConfig, positive_number

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
}
#: Letters of Nemotron-H's hybrid_override_pattern.
_LETTERS = {"*": FULL, "M": LINEAR, "-": "mlp", "E": "moe"}
#: Every n-th layer is full, the others slide: n for configs without it.
_PATTERNS = {"cohere2": 4, "exaone4": 4, "gemma2": 2, "gemma3_text": 6, "gpt_oss": 2}
#: Types without a window, regardless of their config.
_WITHOUT_WINDOW = ("gemma", "llama", "opt")
#: Types with a sink in every layer.
_WITH_SINKS = ("gpt_oss", "deepseek_v4")


@dataclass(eq=False)
class NoDecodeAttention(UserError):
    """A model without an attention layer that leanbench has."""

    #: Name or path.
    model: str
    #: Kinds of its layers.
    layers: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"{self.model} has no decode attention that leanbench knows, only"
            f" {', '.join(self.layers)}: name another model"
        )


@dataclass(frozen=True)
class Layer:
    """Decode attention of some layers of a model, on one GPU."""

    q_heads: int
    kv_heads: int
    head_dim: int
    #: Fields of AttentionProblem off their defaults, with their values.
    kinds: tuple[tuple[str, Any], ...] = ()
    #: Tokens selected from the context (top-k sparse attention); None for all.
    selected: int | None = None

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
        return self.selected is None and dict(self.kinds).keys() <= {"window_left", "sinks"}

    @property
    def words(self) -> str:
        """Describe it as labels of problems do: ``h64/8 d64 window_left 127 sinks``."""
        kinds = [name if value is True else f"{name} {value:g}" for name, value in self.kinds]
        kinds += [] if self.selected is None else [f"{self.selected} selected tokens"]
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
    if keys.get("is_encoder_decoder"):
        raise NoDecodeAttention(config.name, ("encoder layers",))
    names = _names(config)
    made: dict[tuple[str, int], Layer | str] = {}
    layers = []
    for index, name in enumerate(names):
        kind = _KINDS.get(name, "")
        heads = _block_kv_heads(keys, index)
        if not kind or not heads:
            layers.append(name if heads else "no_op")
            continue
        if (kind, heads) not in made:
            made[kind, heads] = _layer(config, kind, heads)
        layers.append(made[kind, heads])
    if not any(isinstance(layer, Layer) for layer in layers):
        raise NoDecodeAttention(config.name, tuple(dict.fromkeys(names)))
    return tuple(layers)


def _names(config: ModelConfig) -> Sequence[str]:
    """Return the kind of each layer, as transformers' layer_types name them."""
    keys, count = config.keys, config.keys["num_hidden_layers"]
    given = keys.get("layer_types") or keys.get("layers_block_type")
    if given:
        return [str(name) for name in given[:count]]
    if "compress_ratios" in keys:
        names = {0: SLIDING, 4: "compressed_sparse_attention"}
        ratios = keys["compress_ratios"][:count]
        return [names.get(ratio, "heavily_compressed_attention") for ratio in ratios]
    if isinstance(pattern := keys.get("hybrid_override_pattern"), str):
        return [_LETTERS.get(letter, letter) for letter in pattern[:count]]
    for rule in (_mixed_names, _sparse_names, _window_names):
        if (kind := rule(config)) is not None:
            return [kind(index) for index in range(count)]
    return [FULL] * count


def _mixed_names(config: ModelConfig) -> Callable[[int], str] | None:
    """Return the kinds of a model with layers that are not attention."""
    keys = config.keys
    full = keys.get("linear_attn_config", {}).get("full_attn_layers")
    if isinstance(full, list):
        return lambda index: FULL if index + 1 in full else LINEAR
    if types := keys.get("attn_type_list"):
        return lambda index: FULL if types[index] else LINEAR
    if interval := keys.get("full_attention_interval"):
        return lambda index: LINEAR if (index + 1) % interval else FULL
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
    if config.model_type in _WITHOUT_WINDOW:
        return None
    if types := keys.get("hybrid_layer_pattern"):
        return lambda index: SLIDING if types[index] else FULL
    pattern = keys.get("sliding_window_pattern", _PATTERNS.get(config.model_type))
    if isinstance(pattern, str) and pattern:
        return lambda index: SLIDING if pattern[index % len(pattern)] == "L" else FULL
    if type(pattern) is int and pattern > 0:
        return lambda index: SLIDING if (index + 1) % pattern else FULL
    first = 0
    if config.model_type in ("qwen2", "qwen3"):
        if not keys.get("use_sliding_window"):
            return None
        first = keys.get("max_window_layers", 28)
    return lambda index: SLIDING if index >= first else FULL


def _block_kv_heads(keys: Mapping[str, Any], index: int) -> int:
    """Return the KV heads of a layer; 0 if it has no attention."""
    q_heads = keys["num_attention_heads"]
    blocks = keys.get("block_configs")
    if blocks:
        block = blocks[index] if index < len(blocks) else {}
        attention = block.get("attention") if isinstance(block, dict) else None
        group = attention.get("n_heads_in_group") if isinstance(attention, dict) else None
        return q_heads // group if type(group) is int and 0 < group <= q_heads else 0
    if keys.get("multi_query") and not keys.get("new_decoder_architecture"):
        return 1
    return keys.get("num_key_value_heads", q_heads)


def _layer(config: ModelConfig, kind: str, kv_heads: int) -> Layer:
    keys = config.keys
    q_heads = keys["num_attention_heads"]
    head_dim = keys.get("head_dim") or keys["hidden_size"] // q_heads
    v_head_dim = keys.get("v_head_dim", head_dim)
    kinds: list[tuple[str, Any]] = []
    if kind == SLIDING:
        kinds.append(("window_left", _needed(config, "sliding_window") - 1))
        # MiMo-V2: other heads in layers with a window.
        q_heads = keys.get("swa_num_attention_heads", q_heads)
        kv_heads = keys.get("swa_num_key_value_heads", kv_heads)
        head_dim = keys.get("swa_head_dim", head_dim)
        v_head_dim = keys.get("swa_v_head_dim", v_head_dim)
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
    softcap = positive_number(keys.get("attn_logit_softcapping"))
    kinds += [("softcap", softcap)] if softcap else []
    kinds += [("alibi", True)] if keys.get("alibi") or config.model_type == "bloom" else []
    if "kv_lora_rank" in keys:
        latent = keys["kv_lora_rank"]
        kinds += [("v_head_dim", latent), ("latent", True)]
        kv_heads, head_dim = 1, latent + keys.get("qk_rope_head_dim", 0)
    elif config.model_type == "deepseek_v4":
        kinds.append(("latent", True))
    elif v_head_dim != head_dim:
        kinds.append(("v_head_dim", v_head_dim))
    return Layer(q_heads, kv_heads, head_dim, tuple(kinds), _selected(keys, kind))


def _selected(keys: Mapping[str, Any], kind: str) -> int | None:
    if kind != SPARSE:
        return None
    table = keys.get("sparse_attention_config", {})
    blocks = keys.get("index_topk_blocks", table.get("sparse_topk_blocks"))
    block = keys.get("index_block_size", table.get("sparse_block_size"))
    if type(blocks) is int and type(block) is int and blocks * block > 0:
        return blocks * block
    return keys.get("index_topk")


def _needed(config: ModelConfig, key: str) -> int:
    if key not in config.keys:
        raise InvalidKey(config.name, key, None, "its layers have a window or chunks")
    return config.keys[key]
