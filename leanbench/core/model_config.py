"""The config.json of a language model, as its publisher wrote it: those that ship, and how one is
read and checked.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from leanbench.core.errors import UserError, nearest
from leanbench.core.language_models import own_name
from leanbench.core.strict_json import parse

_CONFIGS = Path(__file__).with_name("model_configs")
_EXPERTS = ("num_local_experts", "num_experts_per_tok")
#: Values of `model_type` whose layers are known here, and the sizes that each needs besides those
#: that all need.
MODEL_TYPES = {
    "gemma3_text": ("intermediate_size", "sliding_window"),
    "gpt_oss": ("intermediate_size", "sliding_window", *_EXPERTS),
    "llama": ("intermediate_size",),
    "mistral": ("intermediate_size",),
    "opt": ("ffn_dim",),
    "qwen3": ("intermediate_size",),
}
_SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
)
#: Sizes that may be missing, or null.
_OPTIONAL = ("num_key_value_heads", "head_dim", "sliding_window", "sliding_window_pattern")


@cache
def shipped_models() -> dict[str, Path]:
    """The config.json files that come with leanbench, by the model's name."""
    return {path.stem: path for path in sorted(_CONFIGS.glob("*.json"))}


def _missing(name: str) -> str:
    """Why there is no config of a model, and what there is."""
    model = own_name(name)
    if model in shipped_models():
        return (
            f"there is no config.json of {name!r} here: give its path, or name {model}, whose heads"
            " are the same"
        )
    if model is not None:
        return (
            f"of {name} only the heads are known here, for `leanbench sweep --model {model}`: give"
            f" the path of its config.json, or choose from {', '.join(shipped_models())}"
        )
    there_is = nearest(name, shipped_models())
    return f"there is no model {name!r} and no config.json at that path, {there_is}"


def read_config(name: str) -> dict[str, Any]:
    """Keys of the config.json of a shipped model, of a path, or of a folder.

    Raises:
        UserError: there is none, or what it says is not understood.
    """
    path = shipped_models().get(name) or Path(name)
    try:
        if path.is_dir():
            path = path / "config.json"
        if not path.is_file():
            raise UserError(_missing(name))
        config = _table(path, parse(path.read_bytes()))
        # Of a model that also sees images.
        config = _table(path, config.get("text_config", config))
        _check(path, config)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UserError(
            f"cannot read {str(path)[:80]} ({reason}): name a config.json that can be read"
        ) from None
    except ValueError as error:
        raise UserError(
            f"{path} is no config.json of a model ({error}): name the one that came with the"
            " weights"
        ) from None
    except KeyError as error:
        raise UserError(
            f"{path} is no config.json of a model: it has no key {error}, name the one that came"
            " with the weights"
        ) from None
    return _without_nulls(config)


def _table(path: Path, content: Any) -> dict[str, Any]:
    """What the file says, by key."""
    if not isinstance(content, dict):
        raise UserError(
            f"{path} is no config.json of a model: it has {json.dumps(content)[:20]} where keys and"
            " values should be, name the one that came with the weights"
        )
    return content


def _check(path: Path, config: dict[str, Any]) -> None:
    model_type = config["model_type"]
    if not isinstance(model_type, str) or model_type not in MODEL_TYPES:
        raise UserError(
            f"{path} is of model_type {model_type!r}, which leanbench does not know: choose a model"
            f" of {', '.join(MODEL_TYPES)}"
        )
    types = config.get("layer_types") or []
    if not isinstance(types, list):
        raise UserError(f"{path} has layer_types {types!r}: it must be a list, one for each layer")
    slides = ("sliding_window",) if "sliding_attention" in types else ()
    sizes = {key: config[key] for key in (*_SIZES, *MODEL_TYPES[model_type], *slides)}
    sizes |= {key: config[key] for key in _OPTIONAL if config.get(key) is not None}
    if bad := [key for key, size in sizes.items() if type(size) is not int or size < 1]:
        raise UserError(f"{path} has {bad[0]} {sizes[bad[0]]!r}: it must be a whole number above 0")
    layers = config["num_hidden_layers"]
    if types and len(types) < layers:
        raise UserError(
            f"{path} has layer_types of {len(types)} layers and num_hidden_layers {layers}: it must"
            " have one for each layer"
        )


def _without_nulls(config: dict[str, Any]) -> dict[str, Any]:
    """Heads and head_dim that are null, as those that transformers takes in their place."""
    heads = config["num_attention_heads"]
    filled = {"num_key_value_heads": heads, "head_dim": config["hidden_size"] // heads}
    nulls = {key: size for key, size in filled.items() if config.get(key, size) is None}
    return {**config, **nulls}
