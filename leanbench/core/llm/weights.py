"""Number of weights of a language model.

Common types are counted from the keys of the config, others from transformers' model, built without
memory for its weights. Of registered models, the latter counts come with leanbench.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from leanbench.core.errors import UserError
from leanbench.core.llm.config import (
    EXPERTS,
    PER_LAYER,
    ModelConfig,
    parsed_config,
    quiet_transformers,
    size_of_layer,
)
from leanbench.core.llm.errors import InvalidKey

#: Counts of registered models by name and tp, made by tools/weights.py.
COUNTED = Path(__file__).with_name("weights.json.gz")
#: Keys of a common type's weights.
_NEEDED = ("hidden_size", "vocab_size", "num_attention_heads")
#: Keys of a common type that differ in no layer.
_ONE_SIZE = ("num_attention_heads", "num_key_value_heads", "moe_intermediate_size")
#: Keys that change weights. A model is unsupported if transformers' class lacks one of them.
_SIZE_KEY = re.compile(r"(hidden|intermediate|latent)_size$|lora_rank$")
#: Weights that every GPU has whole: routers, and projections to what is shared by all heads.
_ON_EACH = re.compile(r"router|\bgate\.weight|expert_gate|_a_proj|indexer|wpe|position")
_KV_MATRIX = re.compile(r"^(?!.*linear).*\b(k|v|key|value)(_proj)?\.weight")


@dataclass(eq=False)
class UnknownWeights(UserError):
    """A model with unknown weights."""

    #: Name or path.
    model: str
    reason: str
    #: Fix; None for a comparison of its attention alone.
    fix: str | None = None

    def __str__(self) -> str:
        fix = self.fix or f"compare its attention alone, `leanbench sweep --model {self.model}`"
        return f"the weights of {self.model} are not known, {self.reason}: {fix}"


@dataclass(frozen=True)
class LayerWeights:
    dense: int
    #: All experts together; a token goes to some of them.
    experts: int = 0


@dataclass(frozen=True)
class Weights:
    """Numbers of weights, a shared tensor counted once."""

    #: Tables with one row read per sequence and step.
    tables: int
    #: Output matrix and last norm, read in every step.
    rest: int
    layers: tuple[LayerWeights, ...]
    #: Share of the experts that a token goes to.
    expert_share: float = 1.0
    #: False if transformers builds another model of the keys of one of several GPUs.
    is_built: bool = True

    def total(self, layers: int) -> int:
        """Return the weights of the model with its first layers alone."""
        part = self.layers[:layers]
        return self.tables + self.rest + sum(layer.dense + layer.experts for layer in part)

    def read(self, layers: int, tokens: int) -> float:
        """Return the expected number of weights that a step of `tokens` tokens reads.

        Each token's experts count as drawn evenly: of E experts, k for each token, a step reads
        E * (1 - (1 - k / E) ** tokens).
        """
        reached = 1 - (1 - self.expert_share) ** tokens
        part = self.layers[:layers]
        return self.rest + sum(layer.dense + layer.experts * reached for layer in part)


@dataclass(frozen=True)
class _Common:
    """Sizes of a type with plain decoder layers."""

    norms: int = 2
    #: Norms of head_dim over Q and K.
    head_norms: int = 0
    #: Default of attention_bias; None without biases.
    bias: bool | None = None
    is_tied: bool = False
    #: Names of the sizes of experts: number, width. Empty: one MLP.
    experts: tuple[str, ...] = ()


_COMMON = {
    "gemma": _Common(bias=False, is_tied=True),
    "gemma2": _Common(norms=4, bias=False, is_tied=True),
    "gemma3_text": _Common(norms=4, head_norms=2, bias=False, is_tied=True),
    "gpt_oss": _Common(bias=True, experts=("num_local_experts", "intermediate_size")),
    "llama": _Common(bias=False),
    "mistral": _Common(),
    "mixtral": _Common(experts=("num_local_experts", "intermediate_size")),
    "opt": _Common(is_tied=True),
    "phi3": _Common(),
    "qwen2": _Common(),
    "qwen3": _Common(head_norms=2, bias=False),
    "qwen3_moe": _Common(
        head_norms=2, bias=False, experts=("num_experts", "moe_intermediate_size")
    ),
}
# The decoders of Qwen3-VL, which transformers builds only with the part that sees.
_COMMON["qwen3_vl_text"] = _COMMON["qwen3"]
_COMMON["qwen3_vl_moe_text"] = _COMMON["qwen3_moe"]


def is_common(config: ModelConfig) -> bool:
    """Return True if the weights follow from the keys."""
    return config.model_type in _COMMON


def registered_weights(name: str, tp: int) -> Weights | None:
    """Return the counts that come with leanbench, or None."""
    fields = _registered().get(name, {}).get(str(tp))
    if fields is None:
        return None
    runs = (((dense, experts), count) for count, dense, experts in fields["layers"])
    layers = tuple(LayerWeights(*sizes) for sizes, count in runs for _ in range(count))
    return Weights(**fields | {"layers": layers})


@cache
def _registered() -> dict[str, dict[str, Any]]:
    return json.loads(gzip.decompress(COUNTED.read_bytes()))


def weights_of(
    config: ModelConfig, published: Mapping[str, Any], keys: Mapping[str, Any], tp: int
) -> Weights:
    """Count the weights of the part of a model that one GPU has.

    Args:
        published: Keys of that part as transformers' class takes them.
        keys: The same with defaults.
        tp: GPUs that share the model.

    Raises:
        UserError: They do not follow from the keys, and transformers does not know the type.
    """
    if config.hub and not config.is_whole:
        fix = f"give the path of the config.json of {config.hub}"
        raise UnknownWeights(config.name, "only its attention is", fix)
    if not is_common(config):
        return _counted(config, published, keys, tp)
    for key in (*_NEEDED, *_widths(config.model_type, keys)):
        if key not in keys:
            raise InvalidKey(config.name, key, None, f"weights of {config.model_type!r} need it")
    for key in _ONE_SIZE:
        if isinstance(keys.get(key), list):
            must = f"one size for all layers of {config.model_type!r}"
            raise InvalidKey(config.name, key, keys[key], must)
    return _opt(keys) if config.model_type == "opt" else _common(config.model_type, keys)


def _widths(model_type: str, keys: Mapping[str, Any]) -> tuple[str, ...]:
    if model_type == "opt":
        return ("ffn_dim", "max_position_embeddings")
    experts = _COMMON[model_type].experts
    has_dense = keys.get("mlp_only_layers") or keys.get("decoder_sparse_step", 1) > 1
    dense = ("intermediate_size",) * bool(not experts or has_dense)
    return (*experts, "num_experts_per_tok", *dense) if experts else dense


def _common(model_type: str, keys: Mapping[str, Any]) -> Weights:
    kind = _COMMON[model_type]
    hidden, q_heads = keys["hidden_size"], keys["num_attention_heads"]
    head_dim = keys.get("head_dim", hidden // q_heads)
    q_columns = q_heads * head_dim
    kv_columns = keys.get("num_key_value_heads", q_heads) * head_dim
    dense = 2 * hidden * (q_columns + kv_columns) + kind.norms * hidden
    dense += kind.head_norms * head_dim
    if model_type == "qwen2":
        dense += q_columns + 2 * kv_columns
    elif kind.bias is not None and keys.get("attention_bias", kind.bias):
        dense += q_columns + 2 * kv_columns + hidden
    if model_type == "gpt_oss":
        # A sink for each head, and biases of the router and the experts.
        dense += q_heads + keys["num_local_experts"]
    table = keys["vocab_size"] * hidden
    is_tied = keys.get("tie_word_embeddings", kind.is_tied)
    layers = tuple(
        _mlp(model_type, keys, dense, layer) for layer in range(keys["num_hidden_layers"])
    )
    share = keys["num_experts_per_tok"] / keys[kind.experts[0]] if kind.experts else 1.0
    return Weights(0 if is_tied else table, table + hidden, layers, min(1.0, share))


def _mlp(model_type: str, keys: Mapping[str, Any], dense: int, layer: int) -> LayerWeights:
    """Add a layer's MLP or experts to the weights of its attention and norms."""
    hidden, kind = keys["hidden_size"], _COMMON[model_type]
    is_dense = layer in keys.get("mlp_only_layers", ()) or (layer + 1) % keys.get(
        "decoder_sparse_step", 1
    )
    if not kind.experts or is_dense:
        inner = size_of_layer(keys, "intermediate_size", layer)
        bias = 2 * inner + hidden if model_type == "llama" and keys.get("mlp_bias") else 0
        return LayerWeights(dense + 3 * hidden * inner + bias)
    number, inner = (keys[key] for key in kind.experts)
    expert = 3 * hidden * inner + (2 * inner + hidden if model_type == "gpt_oss" else 0)
    return LayerWeights(dense + number * hidden, number * expert)


def _opt(keys: Mapping[str, Any]) -> Weights:
    hidden, inner = keys["hidden_size"], keys["ffn_dim"]
    words = keys.get("word_embed_proj_dim", hidden)
    columns = keys["num_attention_heads"] * keys["head_dim"] if "head_dim" in keys else hidden
    has_bias = keys.get("enable_bias", True)
    norm = 2 * hidden if keys.get("layer_norm_elementwise_affine", True) else 0
    layer = 4 * hidden * columns + 2 * hidden * inner + 2 * norm
    layer += 3 * columns + 2 * hidden + inner if has_bias else 0
    table = keys["vocab_size"] * words
    # Models with norms behind their layers have none at the end.
    has_last = keys.get("do_layer_norm_before", True) and not keys.get("_remove_final_layer_norm")
    rest = table + (norm if has_last else 0) + (2 * words * hidden if words != hidden else 0)
    # Its table of positions begins with two that stand for padding.
    tables = (keys["max_position_embeddings"] + 2) * hidden
    tables += 0 if keys.get("tie_word_embeddings", True) else table
    layers = (LayerWeights(layer),) * keys["num_hidden_layers"]
    # transformers' heads follow from hidden_size.
    return Weights(tables, rest, layers, is_built=columns == hidden)


def _counted(
    config: ModelConfig, published: Mapping[str, Any], keys: Mapping[str, Any], tp: int
) -> Weights:
    """Count the weights of transformers' model of this config.

    The model of a part's keys counts if its matrices are those of the whole, shared out: many
    classes have sizes that follow from others. Where they are not, the whole's are divided.
    """
    if find_spec("transformers") is None:
        reason = f"transformers counts those of {config.model_type!r} and is not installed"
        raise UnknownWeights(config.name, reason, "pip install transformers")
    kv_heads = size_of_layer(config.keys, "num_key_value_heads", 0) or tp
    share = partial(_share, tp=tp, kv_heads=kv_heads)
    try:
        whole = _empty_model(config, config.published)
        with contextlib.suppress(Exception):
            part = whole if tp == 1 else _empty_model(config, published)
            sizes = {name: weight.numel() for name, weight in part.named_parameters()}
            if tp == 1 or all(
                math.isclose(sizes[name], share(name, weight), rel_tol=0.02)
                for name, weight in whole.named_parameters()
                if weight.dim() > 1 and not _KV_MATRIX.search(name)
            ):
                return _walked(config, part, keys, partial(_share, tp=1, kv_heads=1))
        return replace(_walked(config, whole, config.keys, share), is_built=False)
    except UserError:
        raise
    except Exception as error:
        words = " ".join(str(error).split())[:200]
        reason = f"transformers cannot build {config.model_type!r} with its keys ({words})"
        raise UnknownWeights(config.name, reason) from None


def _share(name: str, weight: Any, tp: int, kv_heads: int) -> int:
    """Return how much of a weight one of `tp` GPUs has."""
    if weight.dim() < 2 or _ON_EACH.search(name):
        return weight.numel()
    return weight.numel() // (min(tp, kv_heads) if _KV_MATRIX.search(name) else tp)


def _walked(
    config: ModelConfig, model: Any, keys: Mapping[str, Any], size: Callable[[str, Any], int]
) -> Weights:
    """Add up the weights of a model by layer, each of a `size`."""
    import torch

    modules = list(model.named_modules())
    embeddings = {id(each.weight) for _, each in modules if isinstance(each, torch.nn.Embedding)}
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    is_tied = head is not None and id(getattr(head, "weight", None)) in embeddings
    if head is None:
        # A decoder without the output matrix of the whole.
        is_tied = bool(keys.get("tie_word_embeddings"))
    if is_tied:
        embeddings.discard(id(model.get_input_embeddings().weight))
    count = keys["num_hidden_layers"]
    # Layers are the largest list. A block of several layers counts as its first.
    lists = [
        (sum(weight.numel() for weight in module.parameters()), name, len(module))
        for name, module in modules
        if isinstance(module, torch.nn.ModuleList) and len(module) and count % len(module) == 0
    ]
    if not lists:
        raise UnknownWeights(config.name, f"its model has no list of {count} layers")
    _, prefix, length = max(lists)
    dense, experts = [0] * count, [0] * count
    tables = rest = number = 0
    named_experts = max(keys.get(key, 0) for key in EXPERTS)
    for name, weight in model.named_parameters():
        weights = size(name, weight)
        if id(weight) in embeddings:
            tables += weights
            continue
        if not name.startswith(f"{prefix}."):
            rest += weights
            continue
        layer = int(name[len(prefix) + 1 :].partition(".")[0]) * count // length
        if ".experts." not in name and (weight.dim() < 3 or len(weight) != named_experts):
            dense[layer] += weights
            continue
        if weight.dim() > 2:
            # Experts that only pass their input on can have a place, but no weights.
            number = max(number, len(weight))
            weights = weights * len(weight[: keys.get("n_routed_experts")]) // len(weight)
        experts[layer] += weights
    if head is None and not is_tied:
        rest += size("", model.get_input_embeddings().weight)
    number = (number or named_experts) if any(experts) else 0
    layers = tuple(map(LayerWeights, dense, experts))
    chosen = keys.get("num_experts_per_tok", keys.get("top_k_experts", number))
    return Weights(tables, rest, layers, min(1.0, chosen / number) if number else 1.0)


def _empty_model(config: ModelConfig, published: Mapping[str, Any]) -> Any:
    from importlib import metadata

    import torch
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import AutoModel, AutoModelForCausalLM

    version = f"transformers {metadata.version('transformers')}"
    if config.model_type not in CONFIG_MAPPING:
        raise UnknownWeights(config.name, f"{version} has no model_type {config.model_type!r}")
    config_class = CONFIG_MAPPING[config.model_type]
    parsed, rejected = parsed_config(config.name, config_class, published)
    unknown = _unknown_sizes(parsed, published)
    unknown += [
        key for key in PER_LAYER if key in rejected and getattr(parsed, key, 0) != published[key]
    ]
    if hasattr(config_class, "kv_lora_rank") and not published.get("kv_lora_rank", True):
        unknown.append("kv_lora_rank")
    if unknown:
        raise UnknownWeights(config.name, f"{version} does not use its {', '.join(unknown)}")
    with torch.device("meta"), quiet_transformers():
        for auto in (AutoModelForCausalLM, AutoModel):
            if type(parsed) in auto._model_mapping:
                return auto.from_config(parsed)
    reason = f"{version} has no decoder of {config.model_type!r} by itself"
    raise UnknownWeights(config.name, reason)


def _unknown_sizes(config: Any, keys: Mapping[str, Any]) -> list[str]:
    """Return sizes that the class does not declare, and which its model cannot have."""
    names = {*type(config)().to_dict(), *type(config).attribute_map}
    # A size that a declared key has too is that one by an older name.
    sizes = {keys[name] for name in names & keys.keys() if type(keys[name]) is int}
    return [
        key
        for key, value in keys.items()
        if key not in names and _SIZE_KEY.search(key) and type(value) is int and value > 0
        if value not in sizes
    ]
