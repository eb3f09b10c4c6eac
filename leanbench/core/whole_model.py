"""Whole language models: the config.json of one, the part of it that a GPU runs, and the layers,
weights and KV cache of that part.

A model is written as ``NAME`` or ``NAME:tp=8:layers=16:positions=131072``, where NAME is that of a
shipped config or the path of a config.json.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from leanbench.core.axis_values import Values
from leanbench.core.errors import UserError
from leanbench.core.model_config import read_config, shipped_models
from leanbench.core.syntax import parse_list, parse_number

#: What a model's share of tensor parallelism divides, where its config has them.
_SHARED = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
#: Whose output weights are those of the embedding, unless their config says otherwise.
_TIED = ("gemma3_text", "opt")
#: Bytes of a weight: both dtypes.
WEIGHT_BYTES = 2


@dataclass(frozen=True)
class Layers:
    """Layers of a model that attend alike."""

    count: int
    #: Tokens that they attend to at most; None: the whole context.
    window: int | None


@dataclass(frozen=True)
class WholeModel:
    """A language model, or the part of it that one GPU runs.

    Raises:
        UserError: a tp that does not share out its sizes, or more layers than it has.
    """

    name: str
    #: Keys of config.json as its publisher wrote them.
    published: Mapping[str, Any]
    #: GPUs that share out every layer; this is one of them, without their communication.
    tp: int = 1
    #: The first so many layers; None: all of them.
    layers: int | None = None
    #: Positions in place of the config's; None: its own.
    positions: int | None = None

    def __post_init__(self) -> None:
        own = self.published["num_hidden_layers"]
        if self.layers is not None and self.layers > own:
            raise UserError(
                f"layers {self.layers} is above the {own} layers of {self.name}: choose at most"
                f" {own}, or leave layers out"
            )
        if self.tp == 1:
            return
        if "head_dim" not in self.published:
            raise UserError(
                f"tp {self.tp} cannot share out {self.name}: its config.json has no head_dim, so"
                " its heads follow from hidden_size; leave tp out"
            )
        for key in _SHARED:
            if self.published.get(key, self.tp) % self.tp:
                raise UserError(
                    f"tp {self.tp} does not divide {key} {self.published[key]} of {self.name}:"
                    " choose a tp that does"
                )

    def __str__(self) -> str:
        parts = {"tp": self.tp, "layers": self.layers, "positions": self.positions}
        own = {"tp": 1, "layers": None, "positions": None}
        return ":".join(
            [self.name, *(f"{key}={value}" for key, value in parts.items() if value != own[key])]
        )

    @cached_property
    def config(self) -> dict[str, Any]:
        """Keys of config.json of the part that runs here."""
        shared = {key: self.published[key] // self.tp for key in _SHARED if key in self.published}
        part = {**self.published, **shared, "num_hidden_layers": self.layer_count}
        if part.get("layer_types"):
            part["layer_types"] = part["layer_types"][: self.layer_count]
        if self.positions is not None:
            part["max_position_embeddings"] = self.positions
        return part

    @property
    def model_type(self) -> str:
        return self.published["model_type"]

    @property
    def heads(self) -> tuple[int, int, int]:
        """(q_heads, kv_heads, head_dim) of one GPU."""
        q_heads = self.published["num_attention_heads"]
        kv_heads = self.published.get("num_key_value_heads", q_heads)
        head_dim = self.published.get("head_dim", self.published["hidden_size"] // q_heads)
        return q_heads // self.tp, kv_heads // self.tp, head_dim

    @property
    def has_sinks(self) -> bool:
        return self.model_type == "gpt_oss"

    @property
    def max_positions(self) -> int:
        return self.positions or self.published["max_position_embeddings"]

    @property
    def layer_kinds(self) -> tuple[Layers, ...]:
        """Its layers by how far they see, those that see everything first."""
        kinds = [Layers(count, window) for window, count in self._layer_windows.items()]
        return tuple(sorted(kinds, key=lambda kind: (kind.window is not None, kind.window)))

    @cached_property
    def _layer_windows(self) -> Counter[int | None]:
        return Counter(self.window_of(layer) for layer in range(self.layer_count))

    @property
    def layer_count(self) -> int:
        return self.layers or self.published["num_hidden_layers"]

    def window_of(self, layer: int) -> int | None:
        """Tokens that a layer attends to at most; None: the whole context."""
        types = self.published.get("layer_types")
        if types:
            slides = types[layer] == "sliding_attention"
        elif self.model_type == "gemma3_text":
            slides = (layer + 1) % self.published.get("sliding_window_pattern", 6) != 0
        elif self.model_type == "gpt_oss":
            slides = layer % 2 == 0
        else:
            slides = self.model_type == "mistral" and self.published.get("sliding_window")
        return self.published["sliding_window"] if slides else None

    def cached_tokens(self, context: int) -> int:
        """Tokens of a sequence of `context` tokens that its layers attend to, all layers
        together.
        """
        return sum(kind.count * min(context, kind.window or context) for kind in self.layer_kinds)

    @property
    def weights(self) -> int:
        """Weights of this part, the same tensor counted once."""
        embeddings = self._embedding_weights + self._position_weights
        is_tied = self.config.get("tie_word_embeddings", self.model_type in _TIED)
        head = 0 if is_tied else self._embedding_weights
        return embeddings + head + self.layer_count * sum(self._layer_weights) + self._norm_weights

    def weights_read(self, batch: int) -> float:
        """Weights that a step of `batch` sequences reads at least once: all but the tables of
        embeddings, a row of which is read, and experts that no token goes to (in the mean, if each
        token's experts were drawn evenly).
        """
        dense, experts = self._layer_weights
        reached = 1.0
        if experts:
            share = self.config["num_experts_per_tok"] / self.config["num_local_experts"]
            reached = 1 - (1 - share) ** batch
        of_layers = self.layer_count * (dense + experts * reached)
        return self._embedding_weights + of_layers + self._norm_weights

    @property
    def _embedding_weights(self) -> int:
        return self.config["vocab_size"] * self.config["hidden_size"]

    @property
    def _position_weights(self) -> int:
        # OPT's table of positions begins with two that stand for padding.
        is_table = self.model_type == "opt"
        return (self.max_positions + 2) * self.config["hidden_size"] if is_table else 0

    @property
    def _norm_weights(self) -> int:
        """Of the norm after the last layer."""
        return self.config["hidden_size"] * (2 if self.model_type == "opt" else 1)

    @property
    def _layer_weights(self) -> tuple[int, int]:
        """Weights of a layer, (all but its experts, its experts)."""
        hidden = self.config["hidden_size"]
        q_heads, kv_heads, head_dim = self.heads
        q_columns, kv_columns = q_heads * head_dim, kv_heads * head_dim
        attention = 2 * hidden * (q_columns + kv_columns)
        biases = q_columns + 2 * kv_columns + hidden
        if self.model_type == "opt":
            inner = self.config["ffn_dim"]
            return attention + biases + 2 * hidden * inner + inner + hidden + 4 * hidden, 0
        inner = self.config["intermediate_size"]
        attention += (
            biases if self.config.get("attention_bias", self.model_type == "gpt_oss") else 0
        )
        if self.model_type == "gpt_oss":
            experts = self.config["num_local_experts"]
            router = experts * (hidden + 1)
            expert = 3 * hidden * inner + 2 * inner + hidden
            return attention + q_heads + router + 2 * hidden, experts * expert
        norms = {"qwen3": 2 * hidden + 2 * head_dim, "gemma3_text": 4 * hidden + 2 * head_dim}
        return attention + 3 * hidden * inner + norms.get(self.model_type, 2 * hidden), 0


@cache
def read_model(text: str) -> WholeModel:
    """The model of ``NAME`` or ``NAME:tp=8:layers=16:positions=128k``.

    Raises:
        UserError: there is no such model, its config.json is not understood, or an option is none.
    """
    name, *options = text.split(":")
    given: dict[str, int] = {}
    for option in options:
        key, equals, value = option.partition("=")
        if key not in ("tp", "layers", "positions") or not equals:
            raise UserError(
                f"whole_model {text!r} has the option {option!r}: write tp=, layers= or positions="
                " and a number, as in llama-3-70b:tp=8"
            )
        if key in given:
            raise UserError(
                f"whole_model {text!r} has {key} twice, {given[key]} and {value}: give it once"
            )
        given[key] = parse_number(key, value)
    shipped = {known.lower(): known for known in shipped_models()}
    name = shipped.get(name.lower(), name)
    return WholeModel(name, read_config(name), **given)


class WholeModels(Values):
    """Models as `read_model` reads them; None: attention alone."""

    or_none = "attention alone"

    def parse(self, name: str, text: str) -> tuple[str | None, ...]:
        return parse_list(
            name, text, lambda item: [None if item.lower() == "none" else str(read_model(item))]
        )

    def check(self, name: str, value: str | None) -> None:
        if value is not None:
            read_model(value)

    def reads(self, text: str) -> bool:
        return True
