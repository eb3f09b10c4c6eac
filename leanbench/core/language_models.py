"""Language models by name, and the decode attention shapes that they have on each GPU of a
tensor-parallel group.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from leanbench.core.axis_values import HeadPairs
from leanbench.core.errors import UserError, nearest
from leanbench.core.syntax import parse_names

_FILE = Path(__file__).with_suffix(".toml")

#: (q_heads, kv_heads, head_dim) of one GPU.
Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Layer:
    """Decode attention of some layers of a model, on one GPU."""

    q_heads: int
    kv_heads: int
    head_dim: int
    #: Fields of AttentionProblem in which it is not plain, with their values.
    kinds: tuple[tuple[str, Any], ...] = ()

    @property
    def words(self) -> str:
        """As in the labels of problems: ``h64/8 d64 window_left 127 sinks``."""
        kinds = [name if value is True else f"{name} {value:g}" for name, value in self.kinds]
        return " ".join([f"h{self.q_heads}/{self.kv_heads} d{self.head_dim}", *kinds])


@dataclass(frozen=True)
class Model:
    """What decode attention needs to know of a language model."""

    name: str
    q_heads: int
    kv_heads: int
    head_dim: int
    layers: int
    #: Repository of the Hugging Face hub whose config.json says the above.
    config: str
    #: Names of models with the same figures.
    also: tuple[str, ...] = ()
    #: Tokens that `sliding_layers` of the layers attend to at most, the last ones or those of the
    #: query's chunk; None: every layer attends to the whole context.
    sliding_window: int | None = None
    attention_chunk: int | None = None
    sliding_layers: int = 0
    #: Of every layer: a logit for each query head in the softmax's denominator, a soft cap of
    #: scores (0: none), and a latent cache of which V is the first `v_head_dim` columns.
    sinks: bool = False
    softcap: float = 0.0
    v_head_dim: int | None = None

    def layer_kinds(self, tp: int) -> dict[Layer, int]:
        """Layers of each kind, those with a window or chunks first.

        Raises:
            UserError: as `shape`.
        """
        kinds: list[tuple[str, Any]] = []
        kinds += [("sinks", True)] if self.sinks else []
        kinds += [("softcap", self.softcap)] if self.softcap else []
        if self.v_head_dim is not None:
            kinds += [("v_head_dim", self.v_head_dim), ("latent", True)]
        layers: dict[Layer, int] = {}
        if self.sliding_layers:
            layers[Layer(*self.shape(tp), (self._local, *kinds))] = self.sliding_layers
        if full := self.layers - self.sliding_layers:
            layers[Layer(*self.shape(tp), tuple(kinds))] = full
        return layers

    @property
    def _local(self) -> tuple[str, Any]:
        """What the layers have that do not attend to the whole context."""
        if self.attention_chunk is not None:
            return "attention_chunk", self.attention_chunk
        assert self.sliding_window is not None
        # The window has the query token itself.
        return "window_left", self.sliding_window - 1

    def shape(self, tp: int) -> Shape:
        """The heads that one of `tp` GPUs has, with head_dim.

        Query heads are shared out evenly, and so are KV heads while there are enough of them; with
        more GPUs than KV heads every GPU has one, the same one on several.

        Raises:
            UserError: the heads cannot be shared out so.
        """
        if not self._divides(tp):
            can = ", ".join(
                str(number) for number in range(1, self.q_heads + 1) if self._divides(number)
            )
            raise UserError(
                f"tp {tp} does not share out the heads of {self.name},"
                f" {self.q_heads}/{self.kv_heads} (query/KV), evenly: choose tp from {can}"
            )
        return self.q_heads // tp, max(1, self.kv_heads // tp), self.head_dim

    def _divides(self, tp: int) -> bool:
        return self.q_heads % tp == 0 and (self.kv_heads % tp == 0 or tp % self.kv_heads == 0)


@cache
def models() -> Mapping[str, Model]:
    """Every model of the data file by its name, in the file's order."""
    return {
        name: _read(name, fields)
        for name, fields in tomllib.loads(_FILE.read_text(encoding="utf-8")).items()
    }


def _read(name: str, fields: dict[str, Any]) -> Model:
    ((q_heads, kv_heads),) = HeadPairs().parse("heads", fields.pop("heads"))
    return Model(name, q_heads, kv_heads, also=tuple(fields.pop("also", ())), **fields)


def parse_models(text: str) -> tuple[str, ...]:
    """The models' own names from comma-separated ones, whatever their case; other names of the same
    figures too.

    Raises:
        UserError: there is no such model; the nearest name is suggested.
    """
    names = dict.fromkeys(_own(name) for name in parse_names("model", text))
    return tuple(names)


def own_name(name: str) -> str | None:
    """The name here of a model that `leanbench list models` has under this or another one, whatever
    its case.
    """
    name = name.lower()
    for model in models().values():
        if name in (model.name, *model.also, model.config.lower()):
            return model.name
    return None


def _own(name: str) -> str:
    own = own_name(name)
    if own is None:
        known = [known for model in models().values() for known in (model.name, *model.also)]
        there_is = nearest(name.lower(), known, "`leanbench list models`")
        raise UserError(f"there is no model {name!r}, {there_is}")
    return own


def by_layer(names: Iterable[str], tps: Sequence[int]) -> dict[Layer, list[str]]:
    """The kinds of layers on one of `tps` GPUs, and the models that have each: ``{Layer(8, 1, 128):
    ["llama-3-70b tp 8"]}``, with the number of layers where a model has several kinds.

    Raises:
        UserError: as Model.shape.
    """
    layers: dict[Layer, list[str]] = {}
    for name in names:
        model = models()[name]
        for tp in tps:
            label = name if tp == 1 else f"{name} tp {tp}"
            kinds = model.layer_kinds(tp)
            for layer, count in kinds.items():
                of_them = f" ({count} of {model.layers} layers)" if len(kinds) > 1 else ""
                layers.setdefault(layer, []).append(label + of_them)
    return layers
