"""Language models of `--model`: registry names and config.json files, and the decode attention of
their layers on each GPU of a tensor-parallel group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from leanbench.core.errors import nearest
from leanbench.core.model_config import (
    ModelConfig,
    UnknownModel,
    existing_path,
    own_name,
    read_config,
    registry,
    split_models,
)
from leanbench.core.model_layers import Layer, layers_of
from leanbench.core.syntax import parse_list

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
        own = [layer for layer in self.every_layer if isinstance(layer, Layer)]
        return next((layer for layer in own if not _is_local(layer)), own[0])

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
    own = own_name(item)
    if existing_path(item) == item and (own is None or "/" in item):
        _ = model_named(item).every_layer
        return item
    if own is None:
        known = [known for config in registry().values() for known in (config.name, *config.also)]
        there_is = nearest(item.lower(), known, "`leanbench list models`")
        raise UnknownModel(item, there_is)
    return own


def by_layer(names: Iterable[str], tps: Sequence[int]) -> dict[Layer, list[str]]:
    """The kinds of layers on one of `tps` GPUs, and the models that have each: ``{Layer(8, 1, 128):
    ["llama-3-70b tp 8"]}``, with the number of layers where a model has several kinds.

    Raises:
        UserError: as Model.shape.
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
