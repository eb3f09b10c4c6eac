"""Language models: layers of `sweep --model`, and whole models of `decode` on one GPU.

A whole model is written as ``NAME`` or ``NAME:tp=8:layers=16:positions=131072``, where NAME is a
registry name or the path of a config.json.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from leanbench.core.axis import Values
from leanbench.core.errors import InvalidValue, Reason
from leanbench.core.llm.config import (
    PER_LAYER,
    ModelConfig,
    existing_path,
    hint_for,
    own_name,
    read_config,
    registry,
    split_models,
)
from leanbench.core.llm.errors import InvalidKey, UnknownModel
from leanbench.core.llm.layers import Layer, layers_of, notes_on_layers
from leanbench.core.llm.weights import Weights, registered_weights, weights_of
from leanbench.core.syntax import parse_list, parse_number

#: (q_heads, kv_heads, head_dim) of one GPU.
Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Model:
    """Layers of a language model."""

    config: ModelConfig

    @property
    def name(self) -> str:
        return self.config.name

    @cached_property
    def every_layer(self) -> tuple[Layer | str, ...]:
        return layers_of(self.config)

    @property
    def layers(self) -> int:
        return len(self.every_layer)

    @property
    def main_layer(self) -> Layer:
        """First layer that attends to the whole context; the first with attention if none does."""
        attention = [layer for layer in self.every_layer if isinstance(layer, Layer)]
        return next((layer for layer in attention if not _is_local(layer)), attention[0])

    @property
    def other_layers(self) -> Mapping[str, int]:
        """Layers that are not attention: ``{"linear_attention": 36}``."""
        return Counter(layer for layer in self.every_layer if isinstance(layer, str))

    def layer_kinds(self, tp: int) -> dict[Layer, int]:
        """Count the attention layers of each kind, those with a window or chunks first.

        Raises:
            UserError: `tp` does not share out their heads.
        """
        counts = Counter(layer for layer in self.every_layer if isinstance(layer, Layer))
        kinds = sorted(counts, key=lambda layer: not _is_local(layer))
        return {kind.share(tp, self.name): counts[kind] for kind in kinds}

    def shape(self, tp: int) -> Shape:
        """Return the heads and head_dim of the main layer on one of `tp` GPUs.

        Raises:
            UserError: `tp` does not share out its heads.
        """
        layer = self.main_layer.share(tp, self.name)
        return layer.q_heads, layer.kv_heads, layer.head_dim


def _is_local(layer: Layer) -> bool:
    return layer.window is not None or "attention_chunk" in dict(layer.kinds)


@cache
def models() -> Mapping[str, Model]:
    """Return the models of the registry by name, in its order."""
    return {name: Model(config) for name, config in registry().items()}


@cache
def model_named(name: str) -> Model:
    """Return the model of a registry name or a path, as `parse_models` returns them."""
    return models().get(name) or Model(read_config(name))


def parse_models(text: str) -> tuple[str, ...]:
    """Parse comma-separated names, in any case, and paths. An existing path wins over a name.

    Raises:
        UserError: There is no such model; the nearest name is suggested.
    """
    return parse_list("model", text, lambda item: [_parse_model(item)], split_models)


def _parse_model(item: str) -> str:
    registered = own_name(item)
    if existing_path(item) == item and (registered is None or "/" in item):
        _ = model_named(item).every_layer
        return item
    if registered is None:
        known = [known for config in registry().values() for known in (config.name, *config.also)]
        raise UnknownModel(item, hint_for(item, known))
    return registered


def by_layer(names: Iterable[str], tps: Sequence[int]) -> dict[Layer, list[str]]:
    """Group models by the layers that one of `tps` GPUs runs.

    Returns ``{Layer(8, 1, 128): ["llama-3-70b tp 8"]}``, with the number of layers if a model has
    several kinds.

    Raises:
        UserError: `tps` does not share out the heads of a model.
    """
    layers: dict[Layer, list[str]] = {}
    for name in names:
        model = model_named(name)
        for tp in tps:
            label = name if tp == 1 else f"{name} tp {tp}"
            kinds = model.layer_kinds(tp)
            for layer, count in kinds.items():
                of_them = f" ({count} of {model.layers} layers)" if count < model.layers else ""
                layers.setdefault(layer, []).append(label + of_them)
    return layers


#: Sizes that a tensor-parallel group divides.
_SHARED = (
    *("num_attention_heads", "swa_num_attention_heads", "linear_num_key_heads"),
    *("linear_num_value_heads", "mamba_num_heads", "n_groups", "vocab_size", "intermediate_size"),
    *("dense_intermediate_size", "intermediate_size_mlp", "moe_intermediate_size", "ffn_dim"),
    *("moe_shared_expert_intermediate_size", "shared_expert_intermediate_size"),
    "shared_intermediate_size",
)
#: Heads that it divides while there are enough of them.
_SHARED_KV = ("num_key_value_heads", "swa_num_key_value_heads", "num_global_key_value_heads")
_OPTIONS = ("tp", "layers", "positions")
#: Bytes of a weight in both dtypes.
WEIGHT_BYTES = 2


@dataclass(frozen=True)
class WholeModel:
    """A language model, or the part of it that one GPU runs.

    Raises:
        UserError: An indivisible tp, more layers than the model has, or unknown weights.
    """

    source: ModelConfig
    #: GPUs that share every layer. This is one of them, without communication.
    tp: int = 1
    #: Number of layers, the first ones; None for all.
    layers: int | None = None
    #: Positions; None for the config's.
    positions: int | None = None

    def __post_init__(self) -> None:
        most = self.source.keys["num_hidden_layers"]
        if self.layers is not None and self.layers > most:
            fix = f"leave layers out for all of {self.name}"
            raise InvalidValue("layers", self.layers, Reason.ABOVE_MAXIMUM, fix, most)
        if self.tp > 1:
            self._check_tp()
        if "max_position_embeddings" not in self.source.keys and self.positions is None:
            _ = self.all_weights  # Other missing keys come first.
            must = "or give the positions: --positions 8k"
            raise InvalidKey(self.name, "max_position_embeddings", None, must)

    def _check_tp(self) -> None:
        for layer in self.model.layer_kinds(1):
            layer.share(self.tp, self.name)
        for key in _SHARED:
            sizes = self.source.keys.get(key, self.tp)
            if any(size % self.tp for size in (sizes if isinstance(sizes, list) else [sizes])):
                fix, limit = "choose a divisor", f"{key} {self.source.keys[key]} of {self.name}"
                raise InvalidValue("tp", self.tp, Reason.CONFLICT, fix, limit)

    def __str__(self) -> str:
        tp = None if self.tp == 1 else self.tp
        options = {"tp": tp, "layers": self.layers, "positions": self.positions}
        given = [f"{key}={value}" for key, value in options.items() if value is not None]
        return ":".join([self.name, *given])

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def model_type(self) -> str:
        return self.source.model_type

    @cached_property
    def model(self) -> Model:
        return Model(self.source)

    @cached_property
    def config(self) -> dict[str, Any]:
        """Published keys of this part, for transformers' model."""
        part = self._shared(self.source.published)
        part["num_hidden_layers"] = self.layer_count
        for key in PER_LAYER:
            if part.get(key):
                part[key] = part[key][: self.layer_count]
        if self.positions is not None:
            part["max_position_embeddings"] = self.positions
        if all(layer.window is None for layer in self.layer_kinds):
            # transformers' class can have a default.
            part["sliding_window"] = None
        return part

    def _shared(self, keys: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys of one GPU."""
        part = dict(keys)
        if self.tp == 1:
            return part
        heads = self.source.keys["num_attention_heads"]
        part["num_key_value_heads"] = part.get("num_key_value_heads") or heads
        if "kv_lora_rank" not in keys:
            part["head_dim"] = part.get("head_dim") or self.source.keys["hidden_size"] // heads
        for key in (*_SHARED, *_SHARED_KV):
            if isinstance(sizes := part.get(key), list):
                part[key] = [max(1, size // self.tp) for size in sizes]
            elif sizes:
                part[key] = max(1, sizes // self.tp)
        # The token can be in another GPU's part of the vocabulary.
        part["pad_token_id"] = None
        return part

    @property
    def heads(self) -> tuple[int, int, int]:
        """(q_heads, kv_heads, head_dim) of one GPU, of the layers with full attention if there are
        any.
        """
        return self.model.shape(self.tp)

    @property
    def max_positions(self) -> int:
        return self.positions or self.source.keys["max_position_embeddings"]

    @property
    def layer_count(self) -> int:
        return self.layers or self.source.keys["num_hidden_layers"]

    @cached_property
    def every_layer(self) -> tuple[Layer | str, ...]:
        """Each layer of this part, on one GPU."""
        shares = {
            layer: layer.share(self.tp, self.name) if isinstance(layer, Layer) else layer
            for layer in set(self.model.every_layer)
        }
        return tuple(shares[layer] for layer in self.model.every_layer[: self.layer_count])

    @cached_property
    def layer_kinds(self) -> Mapping[Layer, int]:
        """Number of attention layers of each kind, those with full attention first."""
        counts = Counter(layer for layer in self.every_layer if isinstance(layer, Layer))
        kinds = sorted(counts, key=lambda layer: (layer.window is not None, layer.window or 0))
        return {kind: counts[kind] for kind in kinds}

    @property
    def only_predicted(self) -> str | None:
        """Reason why a step can be predicted but not measured, or None."""
        kinds = sorted({layer for layer in self.every_layer if isinstance(layer, str)})
        if kinds:
            why = f"has layers of {', '.join(kinds)}, whose state a measured step does not keep"
        elif not all(layer.is_plain for layer in self.layer_kinds):
            why = "has attention of a kind that no measured step supports"
        elif len({(kind.q_heads, kind.kv_heads, kind.head_dim) for kind in self.layer_kinds}) > 1:
            why = "has layers with different heads, which a measured step has no cache for"
        elif not self.all_weights.is_built:
            why = f"has sizes that transformers' code does not share out among {self.tp} GPUs"
        else:
            return None
        return f"{self.name} {why}: predict it, with --gpu for a GPU that is not here"

    @property
    def all_weights(self) -> Weights:
        """Weights of all layers on one of `tp` GPUs."""
        return _weights(self.name, self.tp)

    @property
    def weights(self) -> int:
        """Weights of this part, a shared tensor counted once."""
        return self.all_weights.total(self.layer_count) + self._more_positions

    def weights_read(self, batch: int) -> float:
        """Return the expected number of weights that a step of `batch` sequences reads."""
        return self.all_weights.read(self.layer_count, batch)

    @property
    def _more_positions(self) -> int:
        """Weights of the positions beyond the config's."""
        if self.positions is None or self.model_type != "opt":
            return 0
        more = self.positions - self.source.keys["max_position_embeddings"]
        return more * self.source.keys["hidden_size"]

    @property
    def notes(self) -> list[str]:
        """Notes for a row of this model, measured or predicted."""
        if self.source.quantization is None:
            return []
        return [
            f"the published weights of {self.name} are quantised ({self.source.quantization}); here"
            " they have 16 bits, so a step reads more bytes than a server's"
        ]

    @property
    def prediction_notes(self) -> list[str]:
        """Additional notes for a predicted row."""
        notes = notes_on_layers(self.source)
        kinds = Counter(layer for layer in self.every_layer if isinstance(layer, str))
        if kinds:
            named = ", ".join(f"{count} of {name}" for name, count in kinds.items())
            notes.append(
                f"layers without an attention that leanbench has ({named}) count as their weights"
            )
        if any(kind.selected for kind in self.layer_kinds):
            notes.append(
                "sparse layers read the tokens that they select; selecting counts as its weights"
            )
        if any(layer.experts for layer in self.all_weights.layers):
            notes.append(
                "a step reads the experts that its tokens go to:"
                f" {self.all_weights.expert_share:.1%} for each token, drawn evenly"
            )
        return notes


@cache
def _weights(name: str, tp: int) -> Weights:
    return (name in registry() and registered_weights(name, tp)) or count_weights(name, tp)


def count_weights(name: str, tp: int) -> Weights:
    """Count the weights of one of `tp` GPUs.

    Raises:
        UserError: They are unknown, or `tp` does not share them out.
    """
    source = read_config(name)
    whole = WholeModel(source, tp, positions=1)
    return weights_of(source, whole._shared(source.published), whole._shared(source.keys), tp)


@cache
def read_model(text: str) -> WholeModel:
    """Return the model of ``NAME`` or ``NAME:tp=8:layers=16:positions=128k``. An existing path wins
    over options.

    Raises:
        UserError: An unknown model, an invalid config.json, unknown weights, or an invalid option.
    """
    name = first = text.partition(":")[0]
    if first.lower() not in registry():
        name = existing_path(text) or first
    parsed: dict[str, int] = {}
    options = text[len(name) + 1 :]
    source = _source(name)
    for option in options.split(":") if options else ():
        key, equals, value = option.partition("=")
        if key not in _OPTIONS or not equals:
            fix = "write tp=, layers= or positions= and a number, as in llama-3-70b:tp=8"
            raise InvalidValue(f"option of {text}", option, Reason.SYNTAX, fix)
        if key in parsed:
            fix, limit = "give it once", f"{key}={parsed[key]}"
            raise InvalidValue(f"option of {text}", option, Reason.CONFLICT, fix, limit)
        parsed[key] = parse_number(key, value)
    model = WholeModel(source, **parsed)
    _ = model.weights
    return model


def _source(name: str) -> ModelConfig:
    registered = own_name(name)
    if registered is not None and registered != name.lower() and not existing_path(name):
        raise UnknownModel(
            name, f"give its path, or name {registered}, which has the same attention"
        )
    return read_config(name)


class WholeModels(Values):
    """Models as `read_model` reads them; None: attention alone."""

    or_none = "attention alone"

    def parse(self, name: str, text: str) -> tuple[str | None, ...]:
        def parse_item(item: str) -> list[str | None]:
            return [None if item.lower() == "none" else str(read_model(item))]

        return parse_list(name, text, parse_item, split_models)

    def check(self, name: str, value: str | None) -> None:
        if value is not None:
            read_model(value)

    def reads(self, text: str) -> bool:
        return True
