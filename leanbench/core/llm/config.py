"""config.json of language models: those that ship with leanbench, and any other by its path.

Keys that a file leaves out are the defaults of transformers' config class, where transformers is
installed and knows the model_type. Common types are read without it. No code of a publisher runs,
and nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from logging import CRITICAL
from pathlib import Path
from typing import Any

from leanbench.core.errors import nearest
from leanbench.core.files import parse_foreign_json, printable_json, read_file, short_json
from leanbench.core.llm.errors import InvalidKey, NoDecodeAttention, NotAConfig, UnknownModel
from leanbench.core.syntax import MAX_NUMBER

_REGISTRY = Path(__file__).with_name("registry.toml")
#: Words of a name whose models have the layers of the model without them.
_SAME_SHAPE = re.compile(r"-(?:base|chat|fp8|hf|instruct|it|pt)(?![^-])|(?<![^/])meta-(?=llama-\d)")
#: Keys of the registry in addition to those of a config.json.
_ABOUT = ("config", "also", "quantization")
#: Keys of the decoder's config in multimodal models, or of the part that has it.
_TEXT_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")
#: Publishers' types, with the equal type of transformers.
_SAME_TYPE = {
    "deepseek_ref": "deepseek_v4",
    "kimi_k2": "deepseek_v3",
    "mimo": "qwen2",
    "minimax_m3": "minimax_m3_vl_text",
    "mistral3": "mistral",
}
#: Names of keys in older files.
_OLD_NAMES = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
    "num_kv_heads": "num_key_value_heads",
    "num_experts_per_token": "num_experts_per_tok",
}
_KV_NAMES = (
    *("multi_query_group_num", "num_attention_groups", "kv_n_heads", "n_head_kv", "n_kv_head"),
    *("n_kv_heads", "num_query_groups", "num_key_value_heads_per_layer"),
)
_POSITIONS_NAMES = ("seq_length", "max_seq_len", "max_position_embedding")
#: Names of other code, used where neither the file nor the class has a value. The last one wins.
_OTHER_NAMES = {
    **dict.fromkeys(("d_model", "n_embed"), "hidden_size"),
    **dict.fromkeys(("num_heads", "n_heads"), "num_attention_heads"),
    **dict.fromkeys(("num_layers", "n_layers"), "num_hidden_layers"),
    **dict.fromkeys(_KV_NAMES, "num_key_value_heads"),
    **dict.fromkeys(("kv_channels", "attention_head_dim"), "head_dim"),
    **dict.fromkeys(("window_size", "attention_window_size"), "sliding_window"),
    **dict.fromkeys(_POSITIONS_NAMES, "max_position_embeddings"),
    **dict.fromkeys(("moe_topk", "moe_top_k"), "num_experts_per_tok"),
    "moe_num_experts": "num_experts",
}
_QUANTIZATION_KEYS = ("quantization_config", "compression_config")
#: Bits of a weight by the names of formats; of formats with scales of few weights, theirs included.
_WEIGHT_BITS = {"fp8": 8.0, "fbgemm_fp8": 8.0, "mxfp4": 4.25, "nvfp4": 4.5}
#: Bits of a weight as loaded here, or in a format without known bits.
_PLAIN_BITS = 16.0
#: Types without attention.
_RECURRENT_TYPES = re.compile(
    r"(falcon_)?mamba2?$|rwkv|xlstm$|retnet$|gla$|(gated_)?delta_?net$|hgrn2?$"
)
#: A step of 1,000 layers is predicted within seconds.
_MAX_LAYERS = 1000
_MOST_MB = 10
_MOST_REJECTED, _MOST_TRIED = 4, 200

#: Sizes of every model.
REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads")
#: Optional sizes, absent or null.
_SIZES = (
    *("vocab_size", "max_position_embeddings", "num_key_value_heads", "head_dim"),
    *("intermediate_size", "ffn_dim", "word_embed_proj_dim", "moe_intermediate_size"),
    *("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"),
    *("global_head_dim", "num_global_key_value_heads", "attention_chunk_size", "sliding_window"),
    *("swa_num_attention_heads", "swa_num_key_value_heads", "swa_head_dim", "swa_v_head_dim"),
    *("index_topk", "index_topk_blocks", "index_block_size", "index_n_heads", "index_head_dim"),
    *("num_local_experts", "num_experts", "n_routed_experts", "num_experts_per_tok"),
    *("full_attention_interval", "decoder_sparse_step", "attn_layer_period"),
    "dense_attention_every_n_layers",
)
_PLAIN_SIZES = ("vocab_size", "max_position_embeddings", "intermediate_size")
#: Sizes that 0 turns off.
_OFF_AT_0 = (
    *("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "moe_intermediate_size", "ffn_dim"),
    *("qk_nope_head_dim", "v_head_dim", "num_local_experts", "num_experts", "n_routed_experts"),
    *("num_experts_per_tok", "sliding_window", "attention_chunk_size", "index_topk"),
    *("index_topk_blocks", "dense_attention_every_n_layers"),
)
#: Names of the number of experts.
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
#: Sizes that can differ between layers.
_SIZES_BY_LAYER = (
    *("num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size"),
)
_COUNTS = ("first_k_dense_replace", "max_window_layers", "n_shared_experts", "attn_layer_offset")
#: Lists with an entry for each layer, and a string with a letter for each.
PER_LAYER = (
    *("layer_types", "layers_block_type", "attn_type_list", "no_rope_layers", "mlp_layer_types"),
    *("hybrid_layer_pattern", "compress_ratios", "block_configs", "indexer_types"),
    "hybrid_override_pattern",
)
#: Keys that name the kind of every layer.
_NAMES_BY_LAYER = (
    *("attn_type_list", "layer_types", "layers_block_type", "hybrid_layer_pattern"),
    *("compress_ratios", "hybrid_override_pattern"),
)
#: Lists of the numbers of some layers.
_INDICES = ("mlp_only_layers", "attn_layer_indices", "full_attn_idxs", "cross_attention_layers")
_LISTS = (*PER_LAYER[:-1], *_INDICES, "attention_types", "block_types")
_TABLES = ("linear_attn_config", "sparse_attention_config", "rope_parameters")
_FLAGS = (
    *("attention_bias", "mlp_bias", "tie_word_embeddings", "use_sliding_window", "use_qk_norm"),
    *("do_layer_norm_before", "attention_k_eq_v", "multi_query", "new_decoder_architecture"),
    *("add_swa_attention_sink_bias", "add_full_attention_sink_bias", "is_encoder_decoder", "alibi"),
    *("layer_norm_elementwise_affine", "enable_bias", "_remove_final_layer_norm"),
)
_OTHERS = ("sliding_window_pattern", "hybrid_override_pattern", "attn_logit_softcapping")
#: Every key that is read.
READ_KEYS = (
    *(*REQUIRED, *_SIZES, *_COUNTS, *_LISTS, *_TABLES, *_FLAGS, *_OTHERS, *_OTHER_NAMES),
    *_OLD_NAMES,
)

_QWEN = "num_key_value_heads sliding_window use_sliding_window max_window_layers"
#: Types that need no class of transformers, whose import takes seconds: the class's defaults of
#: `_PLAIN_SIZES`, and keys that the file must have.
_PLAIN_TYPES = {
    "llama": ((32000, 2048, 11008), ""),
    "mistral": ((32000, 131072, 14336), "num_key_value_heads sliding_window"),
    "mixtral": (
        (32000, 131072, 14336),
        "num_key_value_heads sliding_window num_local_experts num_experts_per_tok",
    ),
    "phi3": ((32064, 4096, 8192), "sliding_window"),
    "qwen2": ((151936, 32768, 22016), _QWEN),
    "qwen3": ((151936, 32768, 22016), f"{_QWEN} head_dim"),
    "qwen3_moe": (
        (151936, 32768, 6144),
        f"{_QWEN} head_dim decoder_sparse_step mlp_only_layers moe_intermediate_size num_experts"
        " num_experts_per_tok",
    ),
}
#: Other keys that these files can have.
_ALSO = {
    *("num_key_value_heads", "head_dim", "layer_types", "attention_bias", "mlp_bias"),
    *("tie_word_embeddings", "rope_parameters"),
}


@dataclass(frozen=True)
class ModelConfig:
    """Config of the decoder of a language model."""

    #: Registry name, or path as given.
    name: str
    #: Type in transformers, or the publisher's.
    model_type: str
    #: Keys as published.
    published: Mapping[str, Any]
    #: The same keys, with defaults for those that are absent.
    keys: Mapping[str, Any]
    #: Format of the checkpoint's weights, such as fp8; None: not quantised.
    quantization: str | None = None
    #: Bits of a published weight.
    weight_bits: float = _PLAIN_BITS
    #: Names of models with the same attention.
    also: tuple[str, ...] = ()
    #: Repository of the Hugging Face hub with the config.json of a registry entry.
    hub: str = ""
    #: True if transformers' class has filled in the defaults.
    has_defaults: bool = False
    #: True if transformers was imported to know its type.
    has_transformers: bool = True

    @property
    def is_whole(self) -> bool:
        """True if more than the attention is known."""
        return "vocab_size" in self.keys


@cache
def registry() -> Mapping[str, ModelConfig]:
    """Return the models that ship with leanbench by name, in the file's order."""
    entries: dict[str, dict[str, Any]] = tomllib.loads(_REGISTRY.read_text(encoding="utf-8"))
    configs = {}
    for name, entry in entries.items():
        published = {key: value for key, value in entry.items() if key not in _ABOUT}
        model_type: str = published["model_type"]
        configs[name] = ModelConfig(
            name,
            _SAME_TYPE.get(model_type, model_type),
            published,
            _with_new_names(published),
            entry.get("quantization"),
            _WEIGHT_BITS.get(entry.get("quantization", ""), _PLAIN_BITS),
            tuple(entry.get("also", ())),
            entry["config"],
        )
    return configs


def own_name(name: str) -> str | None:
    """Return the registry name of a model, given by any of its names in any case.

    The words of `_SAME_SHAPE` make no difference, nor does the owner of its repository.
    """
    owner, _, name = _plain(name).rpartition("/")
    for config in registry().values():
        own, _, repository = _plain(config.hub).partition("/")
        if owner in ("", own) and name in map(_plain, (config.name, *config.also, repository)):
            return config.name
    return None


def _plain(name: str) -> str:
    return _SAME_SHAPE.sub("", name.lower())


def hint_for(name: str, known: Iterable[str]) -> str:
    """Say what an unknown name can be."""
    model, _, options = name.partition(":")
    if options and own_name(model):
        return f"options follow no name here: write {model}, and --tp N for a part of it"
    if name.endswith(".json") or name.startswith(("/", "./", "../", "~")):
        return "and no file is there: correct the path (the shell replaces no ~ inside quotes)"
    return nearest(_plain(name).rpartition("/")[2], known, "`leanbench list models`")


def existing_path(text: str) -> str:
    """Return the longest part of ``PATH:option:option`` that exists, or an empty string."""
    while text and not os.path.lexists(text):
        text = text.rpartition(":")[0]
    return text


def split_models(text: str) -> list[str]:
    """Split a list of models at its commas, except those inside a path that exists."""
    parts = text.split(",")
    models = []
    while parts:
        # Paths have at most 15 commas.
        ends = range(min(len(parts), 16), 1, -1)
        end = next((end for end in ends if _is_one_path(",".join(parts[:end]))), 1)
        models.append(",".join(parts[:end]))
        del parts[:end]
    return models


def _is_one_path(text: str) -> bool:
    path = existing_path(text.strip())
    return bool(path) and "," not in text.strip()[len(path) :]


@cache
def read_config(name: str) -> ModelConfig:
    """Return the config of a registry name, of a file or of a folder.

    Raises:
        UserError: It does not exist, cannot be read or is invalid.
    """
    if (known := registry().get(name.lower())) is not None:
        return known
    # A link that leads nowhere has its own message.
    if not os.path.lexists(name):
        raise UnknownModel(name, hint_for(name, registry()))
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    whole = _read_table(path)
    parts = _parts(path, whole)
    published = dict(parts[-1])
    quantization, weight_bits = _quantization(path, whole, published)
    for key in _QUANTIZATION_KEYS:
        published.pop(key, None)
    published = _with_new_names(published)
    _check(path, _with_other_names(published))
    types = [part.get("model_type") for part in reversed(parts)]
    model_type = next(filter(None, types), None)
    if not isinstance(model_type, str):
        raise InvalidKey(path, "model_type", model_type, "the name of a type, such as llama")
    plain = _plain_defaults(parts, published)
    mapping = _class_mapping() if plain is None else None
    config_class, tied = _config_class(mapping, types)
    if config_class is not None:
        model_type = str(config_class.model_type)
    tied = whole.get("tie_word_embeddings", None if len(parts) == 1 else tied)
    if tied is not None:
        published.setdefault("tie_word_embeddings", tied)
    model_type = _SAME_TYPE.get(model_type, model_type)
    if _RECURRENT_TYPES.match(model_type):
        raise NoDecodeAttention(name, (f"layers of {model_type}",))
    used = dict(published)
    if config_class is not None and not hasattr(config_class, "sliding_window"):
        # The code has no window, or its own, regardless of the file.
        used.pop("sliding_window", None)
    own = used.get("head_dim") or getattr(config_class, "head_dim", None)
    _check_fit(path, {key: value for key, value in used.items() if value} | {"head_dim": own})
    defaults = {**(plain or {}), **_defaults(path, config_class, used)}
    if not used.get("kv_lora_rank", True) or used.get("use_mla") is False:
        # Plain heads in a class that has latent ones.
        rotary = defaults.pop("qk_rope_head_dim", None)
        for key in ("kv_lora_rank", "head_dim") if defaults.get("head_dim") == rotary else ():
            defaults.pop(key, None)
    keys = {key: value for key, value in used.items() if value is not None} | defaults
    keys = _with_other_names(keys)
    keys = {key: value for key, value in keys.items() if not (value == 0 and key in _OFF_AT_0)}
    _check_decodes(name, model_type, keys, config_class if len(parts) == 1 else None)
    for key in REQUIRED:
        if key not in keys:
            hint = "" if find_spec("transformers") else " (transformers may have one: install it)"
            raise InvalidKey(path, key, None, f"no default of {model_type!r} is known{hint}")
    _check(path, keys)
    keys = _check_together(path, keys)
    return ModelConfig(
        name,
        model_type,
        published,
        keys,
        quantization,
        weight_bits,
        has_defaults=bool(defaults),
        has_transformers=mapping is not None,
    )


def _parts(path: Path, whole: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a config and those that it nests, down to the decoder's."""
    parts = [whole]
    while key := next((key for key in _TEXT_PARTS if parts[-1].get(key) is not None), None):
        if not isinstance(parts[-1][key], dict):
            raise InvalidKey(path, key, parts[-1][key], "a table with the keys of the decoder")
        parts.append(parts[-1][key])
    return parts


def _check_decodes(name: str, model_type: str, keys: Mapping[str, Any], whole_class: Any) -> None:
    """Check that a model is a decoder with attention.

    Args:
        whole_class: transformers' class of a model that is all decoder.
    """
    if keys.get("is_encoder_decoder"):
        raise NoDecodeAttention(name, ("layers of an encoder and its decoder",))
    if _is_encoder(model_type, keys, whole_class):
        raise NoDecodeAttention(name, ("encoder layers",))


def _is_encoder(model_type: str, keys: Mapping[str, Any], whole_class: Any) -> bool:
    if keys.get("is_decoder") is True or "decoder" in model_type:
        return False
    names = keys.get("architectures")
    names = names if isinstance(names, list) else []
    if "bert" in model_type or any(str(name).endswith("MaskedLM") for name in names):
        return True
    if whole_class is not None and not hasattr(whole_class, "use_cache"):
        # Only decoders have a KV cache. GPT of 2018 has none yet.
        return model_type != "openai-gpt"
    # Classes of encoders that can also decode have both.
    return getattr(whole_class, "is_decoder", None) is False and hasattr(
        whole_class, "add_cross_attention"
    )


def _read_table(path: Path) -> dict[str, Any]:
    try:
        # Names of layers and formats reach terminals and reports.
        return _table(path, printable_json(parse_foreign_json(read_file(path, _MOST_MB))))
    except ValueError as error:
        raise NotAConfig(path, str(error)) from None


def _table(path: Path, content: Any) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise NotAConfig(path, f"{short_json(content)} instead of keys and values")
    return content


def _check(path: Path, keys: Mapping[str, Any]) -> None:
    """Check the types and ranges of the keys that are read."""
    keys = {key: value for key, value in keys.items() if value is not None}
    for key, value in keys.items():
        if key == "num_hidden_layers":
            fault = _size_fault(value, 1, _MAX_LAYERS)
        elif key in REQUIRED or key in _SIZES:
            least = 0 if key in _OFF_AT_0 else 1
            # Lists have a size for each layer.
            sizes = value if isinstance(value, list) and value and _is_size(key) else [value]
            fault = next(filter(None, (_size_fault(size, least, MAX_NUMBER) for size in sizes)), "")
        elif key in _COUNTS:
            fault = _size_fault(value, 0, MAX_NUMBER)
        elif key in _FLAGS:
            fault = "" if isinstance(value, bool) else "true or false"
        elif key == "sliding_window_pattern":
            fault = _size_fault(value, 1, MAX_NUMBER) and "a whole number from 1, or letters L, G"
        elif key == "attn_logit_softcapping":
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            fits = is_number and 0 <= value < math.inf
            fault = "" if fits else "a number above 0, or null"
        elif key == "hybrid_override_pattern":
            fits = isinstance(value, list) or re.fullmatch(r"[*ME-]*", str(value))
            fault = "" if fits else "letters M, E, - and *"
        elif key in _INDICES:
            fits = isinstance(value, list) and not any(_size_fault(i, 0, MAX_NUMBER) for i in value)
            fault = "" if fits else "a list of layers, whole numbers from 0"
        elif key == "attention_types":
            fault = _repeats_fault(value)
        elif key in _LISTS:
            fault = "" if isinstance(value, list) else "a list, one entry for each layer"
        elif key in _TABLES:
            fault = "" if isinstance(value, dict) else "a table"
        else:
            continue
        if fault:
            raise InvalidKey(path, key, value, fault)


def _check_together(path: Path, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Check that keys fit each other. Return them with one size for those that no layer changes."""
    _check_fit(path, keys)
    layers = keys["num_hidden_layers"]
    result = dict(keys)
    for key, sizes in keys.items():
        if not _is_size(key) or not isinstance(sizes, list):
            continue
        if len(sizes) < layers and key in (*EXPERTS, "moe_intermediate_size"):
            # Experts of text and of images, say. Attention does not need them.
            continue
        if len(sizes) < layers:
            raise InvalidKey(path, key, sizes, f"an entry for each of {layers} layers")
        if len(set(sizes[:layers])) == 1:
            result[key] = sizes[0]
        elif key not in _SIZES_BY_LAYER:
            raise InvalidKey(path, key, sizes, "one size for all layers")
    for layer in range(layers if _heads_differ(result) else 1):
        heads = size_of_layer(result, "num_attention_heads", layer)
        kv_heads = size_of_layer(result, "num_key_value_heads", layer) or heads
        if heads % kv_heads and "kv_lora_rank" not in result:
            must = f"a multiple of num_key_value_heads {kv_heads}"
            raise InvalidKey(path, "num_attention_heads", heads, must)
    if isinstance(result["num_attention_heads"], list) and "head_dim" not in result:
        raise InvalidKey(path, "head_dim", None, "the number of heads differs between layers")
    experts = [result[key] for key in EXPERTS if type(result.get(key)) is int]
    chosen = result.get("num_experts_per_tok")
    if experts and type(chosen) is int and chosen > max(experts):
        must = f"at most the number of experts, {max(experts)}"
        raise InvalidKey(path, "num_experts_per_tok", chosen, must)
    return result


def _check_fit(path: Path, keys: Mapping[str, Any]) -> None:
    """Check that the keys that are there fit each other."""
    hidden, layers, heads = (keys.get(key, 0) for key in REQUIRED)
    for key in _NAMES_BY_LAYER:
        names = keys.get(key)
        if names and isinstance(names, list | str) and len(names) < layers:
            raise InvalidKey(path, key, keys[key], f"an entry for each of {layers} layers")
    has_own = keys.get("head_dim") or keys.get("kv_lora_rank")
    if not has_own and type(heads) is int and heads and hidden % heads:
        raise InvalidKey(path, "hidden_size", hidden, f"a multiple of num_attention_heads {heads}")


def _heads_differ(keys: Mapping[str, Any]) -> bool:
    names = ("num_attention_heads", "num_key_value_heads")
    return any(isinstance(keys.get(name), list) for name in names)


def size_of_layer(keys: Mapping[str, Any], key: str, layer: int) -> Any:
    """Return a size of one layer, or None."""
    value = keys.get(key)
    return value[layer] if isinstance(value, list) else value


def _is_size(key: str) -> bool:
    return key in _SIZES or key == "num_attention_heads"


def _repeats_fault(value: Any) -> str:
    """Return what is wrong with kinds and their number of repeats, as GPT-Neo has them."""
    layers = 0
    for entry in value if isinstance(value, list) else [None]:
        match entry:
            case [[*block], int(times)] if 0 < times <= _MAX_LAYERS:
                layers += len(block) * times
            case _:
                return 'a list such as [[["global", "local"], 12]]'
    # A short file can repeat a long block, and transformers' class writes all repeats down.
    return "" if layers <= _MAX_LAYERS else f"a list of at most {_MAX_LAYERS} layers in all"


def _size_fault(value: Any, least: int, most: int) -> str:
    fits = type(value) is int and least <= value <= most
    return "" if fits else f"a whole number from {least} to {most}"


def _with_new_names(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Add keys by the names that are read here, and in the form of transformers' classes."""
    named = {new: keys[old] for old, new in _OLD_NAMES.items() if keys.get(old) is not None}
    for each in ("layer_types", "layers_block_type", "hybrid_override_pattern"):
        if isinstance(keys.get(each), list | str) and keys[each]:
            named.setdefault("num_hidden_layers", len(keys[each]))
    named |= keys
    layers = named.get("num_hidden_layers")
    kinds, pattern = named.get("attn_type_list"), named.get("sliding_window_pattern")
    if isinstance(pattern, str) and re.fullmatch("[LG]+", pattern) and type(layers) is int:
        # The number of layers is checked later.
        kinds = [pattern[index % len(pattern)] for index in range(min(layers, _MAX_LAYERS))]
        del named["sliding_window_pattern"]
    if isinstance(kinds, list) and kinds and not named.get("layer_types"):
        names = {"L": "sliding_attention", "G": "full_attention"}
        others = ("linear_attention", "full_attention")
        named["layer_types"] = [names.get(str(kind), others[bool(kind)]) for kind in kinds]
    for key in PER_LAYER if type(layers) is int and layers > 0 else ():
        # Further entries are of layers that predict more tokens.
        if isinstance(named.get(key), list | str):
            named[key] = named[key][:layers]
    return named


def _with_other_names(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Add the keys of other code that have no value yet."""
    parts = [keys.get(key) for key in ("attn_config", "ffn_config")]
    every = dict(item for part in parts if isinstance(part, dict) for item in part.items())
    every |= keys
    if every.get("multi_query_attention") is False:
        every.pop("multi_query_group_num", None)
    named = {new: every[old] for old, new in _OTHER_NAMES.items() if every.get(old) is not None}
    if isinstance(every.get("alibi"), bool):
        named["alibi"] = every["alibi"]
    other = keys.get("attention_other_setting")
    if isinstance(other, dict) and other.get("attention_type") == "sliding_attention":
        other = _with_other_names(other)
        names = ("num_attention_heads", "num_key_value_heads", "head_dim")
        named |= {f"swa_{name}": other[name] for name in names if name in other}
    return named | {key: value for key, value in keys.items() if value is not None}


def _quantization(path: Path, *configs: Mapping[str, Any]) -> tuple[str | None, float]:
    """Name the format of quantised weights and return their bits, from the config or a file next to
    it.
    """
    tables = [config.get(key) for config in configs for key in _QUANTIZATION_KEYS]
    beside = path.with_name("hf_quant_config.json")
    if beside.exists():
        tables.append(_read_table(beside).get("quantization"))
    given = next(filter(None, tables), None)
    if given is None:
        return None, _PLAIN_BITS
    table = given if isinstance(given, dict) else {}
    names = [table.get(key) for key in ("quant_algo", "quant_method", "format")]
    name = next((name for name in names if isinstance(name, str) and name), "quantised")
    return name[:40], _WEIGHT_BITS.get(name.lower()) or max(_bits_of(table), default=_PLAIN_BITS)


def _bits_of(table: Mapping[str, Any]) -> list[int]:
    """Return the bits of weights that a quantisation names, of compressed-tensors by group."""
    groups = table.get("config_groups")
    groups = [*groups.values()] if isinstance(groups, dict) else []
    weights = [group.get("weights") for group in groups if isinstance(group, dict)]
    named = [
        table.get("bits"),
        *(each.get("num_bits") for each in weights if isinstance(each, dict)),
    ]
    return [bits for bits in named if type(bits) is int and 0 < bits < _PLAIN_BITS]


def _plain_defaults(parts: Sequence[Any], published: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the defaults of a file that needs no class of transformers; None for others."""
    model_type = str(parts[0].get("model_type"))
    if len(parts) > 1 or model_type not in _PLAIN_TYPES:
        return None
    sizes, needed = _PLAIN_TYPES[model_type]
    defaults = dict(zip(_PLAIN_SIZES, sizes, strict=True))
    needed = {*REQUIRED, *needed.split()}
    # A window of null is none; what another null means, the class says.
    given = {key for key in published if published[key] is not None or key == "sliding_window"}
    others = given & {*READ_KEYS} - needed - defaults.keys() - _ALSO
    if others or not needed <= given or (defaults.keys() - given) & published.keys():
        return None
    return {key: size for key, size in defaults.items() if key not in given}


def _class_mapping() -> Any:
    """Return transformers' classes by type, or None if they cannot be imported."""
    if find_spec("transformers") is None:
        return None
    try:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    except Exception:
        # A broken installation can raise anything.
        return None
    return CONFIG_MAPPING


def _config_class(mapping: Any, types: Sequence[Any]) -> tuple[Any, bool | None]:
    """Return transformers' class for the decoder of a model, or None if it knows none; and whether
    the whole model ties its embeddings by default.

    Args:
        mapping: Classes by type, or None.
        types: Type of the decoder, then those of the parts that it is in.
    """
    if mapping is None:
        return None, None
    try:
        known_types = [name for name in types if isinstance(name, str)]
        names = [_SAME_TYPE.get(name, name) + end for name in known_types for end in ("_text", "")]
        # The mapping is lazy: only `in` and an index load what it names.
        classes: dict[str, Any] = {name: mapping[name] for name in names if name in mapping}
        tied = getattr(classes.get(types[-1]), "tie_word_embeddings", None)
        for known in classes.values():
            text: Any = known
            while parts := list(filter(None, map(text.sub_configs.get, _TEXT_PARTS))):
                text = parts[0]
            # AutoConfig stands for any type.
            if getattr(text, "model_type", ""):
                return text, tied if isinstance(tied, bool) else None
    except Exception:
        # A broken installation can raise anything. The file's own keys are read then.
        return None, None
    return None, None


def _defaults(path: Path, config_class: Any, published: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that are read, as the class has them."""
    if config_class is None:
        return {}
    config, rejected = parsed_config(path, config_class, published)
    values = {key: _attribute(config, key) for key in READ_KEYS if key not in rejected}
    # Some classes write 0 where there is none.
    return {
        key: value
        for key, value in values.items()
        if value is not None and (value != 0 or key not in (*_SIZES, "sliding_window_pattern"))
    }


def parsed_config(
    path: Path | str, config_class: Any, published: Mapping[str, Any]
) -> tuple[Any, list[str]]:
    """Return transformers' config of these keys, without those that its class rejects, and these.

    Raises:
        InvalidKey: It rejects a key that is read, or a key that cannot be told.
    """
    keys, rejected = dict(published), []
    config, fault = _parsed(config_class, keys)
    while fault:
        # The key without which there is no error, or another. Most messages name it.
        order = sorted(keys, key=lambda key: (f"'{key}'" not in fault, keys[key] is not None))
        for key in order[: _MOST_TRIED if len(rejected) < _MOST_REJECTED else 0]:
            rest = {name: value for name, value in keys.items() if name != key}
            config, other = _parsed(config_class, rest)
            if other != fault:
                break
        else:
            must = f"a config that {config_class.__name__} of transformers takes ({fault[:200]})"
            raise InvalidKey(path, "model_type", config_class.model_type, must)
        rejected.append(key)
        keys, fault = rest, other
    for key in rejected:
        value = published[key]
        # Kinds and KV heads by layer are the file's.
        is_kept = key in (*PER_LAYER, *_TABLES, "num_key_value_heads" * isinstance(value, list))
        if key in READ_KEYS and not is_kept and value not in (None, _attribute(config, key)):
            must = f"a value that {config_class.__name__} of transformers takes"
            raise InvalidKey(path, key, value, must)
    return config, rejected


def _parsed(config_class: Any, keys: Mapping[str, Any]) -> tuple[Any, str]:
    """Return transformers' config, or what its class raises in one line."""
    try:
        with quiet_transformers():
            return config_class.from_dict(dict(keys)), ""
    except Exception as error:
        # A class can reject unused keys, or those of a later version.
        return None, " ".join(str(error).split()) or type(error).__name__


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence what transformers prints about keys: errors are raised, too."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity(CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def _attribute(config: Any, key: str) -> Any:
    try:
        return getattr(config, key, None)
    except Exception:
        # A size that differs between layers (Gemma 4): the published keys decide.
        return None
