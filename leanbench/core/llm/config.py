"""config.json of language models: those that ship with leanbench, and any other by its path.

Keys that a file leaves out are the defaults of transformers' config class, where transformers is
installed and knows the model_type. No code of a publisher runs, and nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import math
import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from leanbench.core.errors import UserError, nearest
from leanbench.core.files import parse_foreign_json, read_file, short_json
from leanbench.core.syntax import MAX_NUMBER

_REGISTRY = Path(__file__).with_name("registry.toml")
#: Keys of the registry in addition to those of a config.json.
_ABOUT = ("config", "also", "quantization")
#: Keys of the decoder's config in multimodal models.
_TEXT_PARTS = ("text_config", "llm_config", "language_config")
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
_QUANTIZATION_KEYS = ("quantization_config", "compression_config")
_MAX_LAYERS = 10_000
_MOST_MB = 10

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
    *("full_attention_interval", "decoder_sparse_step"),
)
_COUNTS = ("first_k_dense_replace", "max_window_layers", "n_shared_experts")
#: Lists with an entry for each layer, and a string with a letter for each.
PER_LAYER = (
    *("layer_types", "layers_block_type", "attn_type_list", "no_rope_layers", "mlp_layer_types"),
    *("hybrid_layer_pattern", "compress_ratios", "block_configs", "indexer_types"),
    "hybrid_override_pattern",
)
_LISTS = (*PER_LAYER[:-1], "mlp_only_layers")
_TABLES = ("linear_attn_config", "sparse_attention_config", "rope_parameters")
_FLAGS = (
    *("attention_bias", "mlp_bias", "tie_word_embeddings", "use_sliding_window", "use_qk_norm"),
    *("do_layer_norm_before", "attention_k_eq_v", "multi_query", "new_decoder_architecture"),
    *("add_swa_attention_sink_bias", "add_full_attention_sink_bias", "is_encoder_decoder", "alibi"),
    *("layer_norm_elementwise_affine", "enable_bias", "_remove_final_layer_norm"),
)
_OTHERS = ("sliding_window_pattern", "hybrid_override_pattern", "attn_logit_softcapping")
_KEYS = (*REQUIRED, *_SIZES, *_COUNTS, *_LISTS, *_TABLES, *_FLAGS, *_OTHERS)


@dataclass(eq=False)
class UnknownModel(UserError):
    """A name that is neither in the registry nor a path."""

    #: Name, as given.
    name: str
    #: Nearest known name, or the known names.
    hint: str

    def __str__(self) -> str:
        return f"there is no model or config.json {self.name[:80]!r}, {self.hint}"


@dataclass(eq=False)
class NotAConfig(UserError):
    """A file that is no config.json of a language model."""

    path: Path
    reason: str

    def __str__(self) -> str:
        return (
            f"{self.path} is no config.json of a language model ({self.reason}): name the one that"
            " came with the weights"
        )


@dataclass(eq=False)
class InvalidKey(UserError):
    """A key of a config.json that is absent or out of range."""

    path: Path | str
    key: str
    #: Value; None if it is absent.
    value: Any
    #: Valid values.
    must: str

    def __str__(self) -> str:
        if self.value is None:
            return f"{self.path} has no {self.key}: add it, {self.must}"
        return f"{self.path} has {self.key} {short_json(self.value)}: it must be {self.must}"


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
    #: Names of models with the same attention.
    also: tuple[str, ...] = ()
    #: Repository of the Hugging Face hub with the config.json of a registry entry.
    hub: str = ""

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
            tuple(entry.get("also", ())),
            entry["config"],
        )
    return configs


def own_name(name: str) -> str | None:
    """Return the registry name of a model, given by any of its names in any case."""
    name = name.lower()
    for config in registry().values():
        if name in (config.name, *config.also, config.hub.lower()):
            return config.name
    return None


def existing_path(text: str) -> str:
    """Return the longest part of ``PATH:option:option`` that exists, or an empty string."""
    while text and not os.path.exists(text):
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
    if not os.path.exists(name):
        there_is = nearest(name.lower(), registry(), "`leanbench list models`")
        raise UnknownModel(name, there_is)
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    whole = _read_table(path)
    part = next((key for key in _TEXT_PARTS if key in whole), None)
    published = dict(whole if part is None else _table(path, whole[part]))
    quantization = _quantization(path, whole, published)
    for key in _QUANTIZATION_KEYS:
        published.pop(key, None)
    published = _with_new_names(published)
    _check(path, published)
    model_type = published.get("model_type") or whole.get("model_type")
    config_class, tied = _config_class(whole.get("model_type"), published.get("model_type"))
    if config_class is not None:
        model_type = str(config_class.model_type)
    tied = whole.get("tie_word_embeddings", None if part is None else tied)
    if tied is not None:
        published.setdefault("tie_word_embeddings", tied)
    if not isinstance(model_type, str):
        raise InvalidKey(path, "model_type", model_type, "the name of a type, such as llama")
    keys = {key: value for key, value in published.items() if value is not None}
    keys |= _defaults(config_class, published)
    if config_class is not None and not hasattr(config_class, "sliding_window"):
        # The code has no window, regardless of the file.
        keys.pop("sliding_window", None)
    for key in REQUIRED:
        if key not in keys:
            hint = "" if find_spec("transformers") else " (transformers may have one: install it)"
            raise InvalidKey(path, key, None, f"no default of {model_type!r} is known{hint}")
    _check(path, keys)
    return ModelConfig(name, _SAME_TYPE.get(model_type, model_type), published, keys, quantization)


def _read_table(path: Path) -> dict[str, Any]:
    try:
        return _table(path, parse_foreign_json(read_file(path, _MOST_MB)))
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
            fault = _size_fault(value, 1, MAX_NUMBER)
        elif key in _COUNTS:
            fault = _size_fault(value, 0, MAX_NUMBER)
        elif key in _FLAGS:
            fault = "" if isinstance(value, bool) else "true or false"
        elif key in _LISTS:
            fault = "" if isinstance(value, list) else "a list, one entry for each layer"
        elif key in _TABLES:
            fault = "" if isinstance(value, dict) else "a table"
        else:
            continue
        if fault:
            raise InvalidKey(path, key, value, fault)
    layers = keys.get("num_hidden_layers", 0)
    for key in ("layer_types", "layers_block_type", "attn_type_list", "hybrid_layer_pattern"):
        if keys.get(key) and len(keys[key]) < layers:
            raise InvalidKey(path, key, keys[key], f"an entry for each of {layers} layers")
    heads = keys.get("num_attention_heads", 1)
    if heads % keys.get("num_key_value_heads", heads) and "kv_lora_rank" not in keys:
        must = f"a multiple of num_key_value_heads {keys['num_key_value_heads']}"
        raise InvalidKey(path, "num_attention_heads", heads, must)


def _size_fault(value: Any, least: int, most: int) -> str:
    fits = type(value) is int and least <= value <= most
    return "" if fits else f"a whole number from {least} to {most}"


def _with_new_names(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Add keys by the names that are read here."""
    named = {new: keys[old] for old, new in _OLD_NAMES.items() if keys.get(old) is not None}
    for each in ("layer_types", "layers_block_type", "hybrid_override_pattern"):
        if isinstance(keys.get(each), list | str) and keys[each]:
            named.setdefault("num_hidden_layers", len(keys[each]))
    return named | dict(keys)


def _quantization(path: Path, *configs: Mapping[str, Any]) -> str | None:
    """Name the format of quantised weights, from the config or a file next to it."""
    tables = [config.get(key) for config in configs for key in _QUANTIZATION_KEYS]
    beside = path.with_name("hf_quant_config.json")
    if beside.exists():
        tables.append(_read_table(beside).get("quantization"))
    for table in filter(None, tables):
        names = (
            [table.get(key) for key in ("quant_algo", "quant_method", "format")]
            if isinstance(table, dict)
            else []
        )
        return next((name for name in names if isinstance(name, str) and name), "quantised")[:40]
    return None


def _config_class(whole_type: Any, text_type: Any) -> tuple[Any, bool | None]:
    """Return transformers' class for the decoder of a model, or None if it knows none; and whether
    the whole model ties its embeddings by default.
    """
    if find_spec("transformers") is None:
        return None, None
    try:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        types = [name for name in (text_type, whole_type) if isinstance(name, str)]
        names = [_SAME_TYPE.get(name, name) + end for name in types for end in ("_text", "")]
        # The mapping is lazy: only `in` and an index load what it names.
        classes: dict[str, Any] = {
            name: CONFIG_MAPPING[name] for name in names if name in CONFIG_MAPPING
        }
        tied = getattr(classes.get(whole_type), "tie_word_embeddings", None)
        for known in classes.values():
            parts = [known.sub_configs.get(part) for part in _TEXT_PARTS]
            text = next(filter(None, parts), known)
            # AutoConfig stands for any type.
            if getattr(text, "model_type", ""):
                return text, tied if isinstance(tied, bool) else None
    except Exception:
        # A broken installation can raise anything. The file's own keys are read then.
        return None, None
    return None, None


def _defaults(config_class: Any, published: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that are read, as the class has them."""
    if config_class is None:
        return {}
    try:
        with quiet_transformers():
            config = config_class.from_dict(dict(published))
    except Exception:
        # A class can reject unused keys, or those of a later version.
        return {}
    values = {key: _attribute(config, key) for key in _KEYS}
    # Some classes write 0 where there is none.
    return {
        key: value
        for key, value in values.items()
        if value is not None and (value != 0 or key not in _SIZES)
    }


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence warnings about keys that change no layer, such as a token's number."""
    import transformers

    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(verbosity)


def _attribute(config: Any, key: str) -> Any:
    try:
        return getattr(config, key, None)
    except Exception:
        # A size that differs between layers (Gemma 4): the published keys decide.
        return None


def positive_number(value: Any) -> float | None:
    """Return a finite number above 0, such as a soft cap, or None."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) and value > 0 else None
