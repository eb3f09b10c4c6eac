"""Sweeps as grids of axes, and their cells."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, product
from math import prod
from typing import Any

from leanbench.core.axes import AXES
from leanbench.core.config import KernelConfig
from leanbench.core.errors import InvalidValue, Reason, UserError
from leanbench.core.kinds import Choice
from leanbench.core.lengths import Context, as_context, draw_context, is_explicit, read_lengths
from leanbench.core.llm.layers import Layer
from leanbench.core.llm.model import by_layer, read_model
from leanbench.core.problem import PLAIN_AXES, AttentionProblem
from leanbench.measure.options import CacheState, MeasureOptions
from leanbench.run.draw import Draw, Sample

#: Cells of one sweep; more than this is a typo in an axis.
MAX_CELLS = 100_000

DEFAULT_KERNELS = ("lean", "fa2", "fixed_split")
MOST_SHARDS = 1000
CONFIG_CHOICES = ("default", "heuristic", "best", "energy", "edp")


@dataclass(frozen=True, init=False)
class Grid:
    """Values of every axis; each combination is a problem."""

    #: Values by axis, in the order of AXES. Models set heads and head_dim, explicit lengths set
    #: batch and context.
    values: Mapping[str, tuple[Any, ...]]

    def __init__(self, **values: tuple[Any, ...]) -> None:
        if unknown := values.keys() - AXES.keys():
            raise TypeError(f"no axis is called {', '.join(sorted(unknown))}")
        filled = {name: values.get(name, axis.grid) for name, axis in AXES.items()}
        object.__setattr__(self, "values", filled)

    def __getitem__(self, axis: str) -> tuple[Any, ...]:
        return self.values[axis]

    @property
    def layers(self) -> Sequence[Layer]:
        """Return the layers of the models, or heads and head_dim, without repeats.

        Raises:
            UserError: A model cannot be split by a tp.
        """
        if self["model"]:
            return list(by_layer(self["model"], self["tp"]))
        return [
            Layer(q_heads, kv_heads, head_dim)
            for head_dim, (q_heads, kv_heads) in product(self["head_dim"], self["heads"])
        ]

    def _layers_of(self, whole_model: str | None) -> Sequence[Layer]:
        """Return the only layer of a whole model, or `layers`."""
        return self.layers if whole_model is None else [Layer(*read_model(whole_model).heads)]

    @property
    def combinations(self) -> int:
        layers = [layer for name in self["whole_model"] for layer in self._layers_of(name)]
        in_layers = ("head_dim", "whole_model")
        plain = [self[axis.name] for axis in PLAIN_AXES if axis.name not in in_layers]
        lengths = [self[name] for name in ("batch", "lengths", "context")]
        return prod(map(len, [layers, *plain, *lengths]))

    def problems(self) -> Iterator[AttentionProblem]:
        """Yield every combination. The x axis of charts varies fastest, context last.

        Raises:
            UserError: A combination is no problem, or as `layers`.
        """
        plain = [axis for axis in PLAIN_AXES if axis.name != "head_dim"]
        outer = self._combined([axis.name for axis in plain if not axis.is_number])
        inner = self._combined([axis.name for axis in plain if axis.is_number])
        for words in outer:
            for layer, numbers in product(self._layers_of(words["whole_model"]), inner):
                for batch, full in self._lengths():
                    fields = {**words, **numbers}
                    context = _selected(layer, fields, full)
                    fields |= _kinds_of(layer, fields, context)
                    yield AttentionProblem(
                        batch, layer.q_heads, layer.kv_heads, context, layer.head_dim, **fields
                    )

    def _combined(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Return the fields of every combination of these axes."""
        combinations = product(*(self[name] for name in names))
        return [dict(zip(names, values, strict=True)) for values in combinations]

    def _lengths(self) -> Iterator[tuple[int, Context]]:
        """Yield (batch, context) of every batch."""
        drawn = [lengths for lengths in self["lengths"] if not is_explicit(lengths)]
        for batch, lengths, longest in product(self["batch"], drawn, self["context"]):
            yield batch, draw_context(lengths, batch, longest)
        for lengths in self["lengths"]:
            if is_explicit(lengths):
                given = read_lengths("lengths", lengths)
                yield len(given), as_context(given)

    def to_dict(self) -> dict[str, Any]:
        """Return the axes that hold, in JSON types."""
        by_model = self["model"] or None not in self["whole_model"]
        unused = ("heads", "head_dim") if by_model else ("model", "tp")
        return {name: _plain(values) for name, values in self.values.items() if name not in unused}


def _is_choice(layer: Layer, fields: Mapping[str, Any]) -> bool:
    """Return True if a layer's selection is the axis `select`: of single tokens of a latent cache,
    or of blocks for each KV head of another, unless other axes are given that exclude it.
    """
    if layer.select is None:
        return False
    free = all(fields[name] == AXES[name].default for name in ("page_size", "capacity", "q_len"))
    return free and dict(layer.kinds).get("latent", False) != Choice.of(layer.select).by_head


def _selected(layer: Layer, fields: Mapping[str, Any], context: Context) -> Context:
    """Return the context of a layer: with a selection that is no `select`, the tokens it leaves."""
    if layer.selected is None or _is_choice(layer, fields):
        return context
    if isinstance(context, int):
        return min(context, layer.selected)
    return tuple(min(length, layer.selected) for length in context)


def _kinds_of(layer: Layer, fields: Mapping[str, Any], context: Context) -> dict[str, Any]:
    """Return a model's kinds that the grid does not set. Windows, chunks and blocks that hide no
    token are left out.
    """
    longest = context if isinstance(context, int) else max(context)
    kinds = {name: value for name, value in layer.kinds if fields[name] == AXES[name].default}
    if _is_choice(layer, fields) and fields["select"] is None:
        kinds["select"] = layer.select
    if isinstance(layer.select, str) and (layer.selected or 0) >= longest:
        kinds.pop("select", None)
    if kinds.get("window_left", -1) + 1 >= longest:
        del kinds["window_left"]
    if kinds.get("attention_chunk", 0) >= longest:
        del kinds["attention_chunk"]
    return kinds


@dataclass(frozen=True)
class Sweep:
    """Every kernel on every problem of the grids and of the draw."""

    name: str
    grids: tuple[Grid, ...] = (Grid(),)
    kernels: tuple[str, ...] = DEFAULT_KERNELS
    #: `default`: tuned configs or the heuristic, see leanbench.configs.lookup. `best`: the fastest
    #: candidate of the kernel, searched in each cell.
    configs: str = "default"
    description: str = ""
    measure: MeasureOptions = field(default_factory=MeasureOptions)
    #: Launch settings by kernel, instead of those by `configs`.
    overrides: Mapping[str, KernelConfig] = field(default_factory=dict)
    draw: Draw | None = None
    #: Sample of the grids' problems; None for all.
    sample: Sample | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return JSON types for the manifest."""
        overrides = (
            {"config": {name: config.to_dict() for name, config in self.overrides.items()}}
            if self.overrides
            else {}
        )
        return {
            "name": self.name,
            "description": self.description,
            "kernels": list(self.kernels),
            "configs": self.configs,
            **overrides,
            "grids": [grid.to_dict() for grid in self.grids],
            **({"draw": self.draw.to_dict()} if self.draw else {}),
            **({"sample": self.sample.to_dict()} if self.sample else {}),
        }


@dataclass(frozen=True)
class Cell:
    """One problem for one kernel."""

    problem: AttentionProblem
    kernel: str
    configs: str = "default"
    cache: CacheState = "cold"
    #: Launch settings instead of those by `configs`.
    override: KernelConfig | None = None

    @property
    def request(self) -> str:
        """Return the choice of its launch settings: `given`, or else `configs`."""
        return self.configs if self.override is None else "given"

    @cached_property
    def key(self) -> str:
        """Return the name of the cell in every run, with a hash of all that identifies it.

        For example ``lean-b1-h32-8-n4096-d128-fp16-HND-default-3f9a01c2``.
        """
        identity: dict[str, Any] = {
            "problem": self.problem.to_dict(),
            "kernel": self.kernel,
            "configs": self.request,
        }
        words = f"{self.kernel} {self.problem.label} {self.request}"
        if self.override is not None:
            identity["config"] = self.override.to_dict()
        if self.cache != "cold":
            identity["cache"] = self.cache
            words += f" {self.cache}"
        canonical = json.dumps(identity, sort_keys=True, separators=(",", ":"))
        readable = re.sub(r"[^A-Za-z0-9_]+", "-", words)
        return f"{readable}-{hashlib.sha256(canonical.encode()).hexdigest()[:8]}"

    @property
    def label(self) -> str:
        return f"{self.kernel} · {self.problem.label}"


@dataclass(frozen=True)
class Shard:
    """Part `index` of `count` of a sweep, from 1. `leanbench merge` combines the parts."""

    index: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Parse ``2/8``.

        Raises:
            InvalidValue: It is no such pair, or out of range.
        """
        fix = "write I/N, as in 1/4 for the first of four"
        match = re.fullmatch(r"(\d{1,18})/(\d{1,18})", text.strip(), re.ASCII)
        if match is None:
            raise InvalidValue("--shard", text, Reason.SYNTAX, fix)
        index, count = int(match[1]), int(match[2])
        if min(index, count) < 1:
            raise InvalidValue("--shard", text, Reason.BELOW_MINIMUM, fix, "1/1")
        most = min(count, MOST_SHARDS)
        if index > most or count > MOST_SHARDS:
            raise InvalidValue("--shard", text, Reason.ABOVE_MAXIMUM, fix, f"{most}/{most}")
        return cls(index, count)

    def of(self, cells: Sequence[Cell]) -> list[Cell]:
        """Return every `count`-th problem's cells.

        Raises:
            UserError: There are none.
        """
        problems = [list(together) for _, together in groupby(cells, lambda cell: cell.problem)]
        chosen = problems[self.index - 1 :: self.count]
        if not chosen:
            raise UserError(
                f"--shard {self} is empty, the sweep has {len(problems)} problems: choose"
                f" {len(problems)} shards at most"
            )
        return [cell for cells in chosen for cell in cells]

    def to_manifest(self, cells: Sequence[Cell]) -> dict[str, Any]:
        """Return the shard and the cells of the whole sweep for the manifest."""
        return {"index": self.index, "count": self.count, "cells": [cell.key for cell in cells]}

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


def expand(sweep: Sweep) -> list[Cell]:
    """Return the cells of a sweep without repeats, sorted by problem.

    Raises:
        UserError: There are more than MAX_CELLS cells, or fewer problems than a sample needs, or an
            axis value makes no problem.
    """
    combinations = sum(grid.combinations for grid in sweep.grids)
    combinations += sweep.draw.count if sweep.draw else 0
    chosen = min(combinations, sweep.sample.count) if sweep.sample else combinations
    if chosen * len(sweep.kernels) > MAX_CELLS:
        raise UserError(
            f"sweep {sweep.name!r} has {chosen * len(sweep.kernels)} cells, the limit is"
            f" {MAX_CELLS}: shorten an axis"
        )
    if combinations > MAX_CELLS:
        raise UserError(
            f"sweep {sweep.name!r} has {combinations} problems to draw from, the limit is"
            f" {MAX_CELLS}: shorten an axis"
        )
    problems = dict.fromkeys(problem for grid in sweep.grids for problem in grid.problems())
    if sweep.sample:
        problems = dict.fromkeys(sweep.sample.of(problems))
    if sweep.draw:
        problems |= dict.fromkeys(sweep.draw.problems())
    kernels = dict.fromkeys(sweep.kernels)
    return [
        Cell(problem, kernel, sweep.configs, sweep.measure.cache, sweep.overrides.get(kernel))
        for problem in problems
        for kernel in kernels
    ]


def _plain(values: tuple[Any, ...]) -> list[Any]:
    return [list(value) if isinstance(value, tuple) else value for value in values]
