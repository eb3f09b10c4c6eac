"""What a sweep asked for, in the words of flags and sweep files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from leanbench.core.axes import AXES
from leanbench.core.axis import Axis
from leanbench.core.lengths import is_explicit
from leanbench.report.document import Block, Sentence, Sentences, sentences, table

#: Keys of a sweep with what they are called, in the order shown.
_SCALARS = {"name": "sweep", "description": "description", "configs": "launch settings"}


def sweep_blocks(sweep: Any) -> tuple[Block, ...]:
    """The request of a manifest: its facts, then its axes, but those that are at their defaults in
    every grid.
    """
    if not isinstance(sweep, dict):
        return (sentences(_shown(sweep)),)
    grids = sweep.get("grids")
    rows = {
        name: _said(row)
        for name, row in [
            *enumerate(grids if isinstance(grids, list) else [], 1),
            ("drawn", sweep.get("draw")),
        ]
        if isinstance(row, dict)
    }
    names = [
        name for name, axis in AXES.items() if any(_differs(axis, row) for row in rows.values())
    ]
    values = [
        [str(called), *(_values(AXES[name], row.get(name)) for name in names)]
        for called, row in rows.items()
    ]
    facts = Sentences(tuple(Sentence(words, name) for name, words in _facts(sweep)), "facts")
    return (facts, table(["grid", *names], values)) if values else (facts,)


def _said(row: Mapping[str, Any]) -> dict[str, Any]:
    """The axes that hold: models say heads and head_dim, lengths that are given one by one batch
    and context, shares of a capacity that are drawn the context.
    """
    silent = ["heads", "head_dim"] if row.get("model") else ["model", "tp"]
    lengths = row.get("lengths")
    if isinstance(lengths, list) and all(isinstance(own, str) for own in lengths):
        silent += ["batch", "context"] if lengths and all(map(is_explicit, lengths)) else []
    silent += ["context"] if "fill" in row else []
    return {name: values for name, values in row.items() if name not in silent}


def _facts(sweep: Mapping[str, Any]) -> list[tuple[str, str]]:
    kernels = sweep.get("kernels")
    facts = {called: _shown(sweep.get(key)) for key, called in _SCALARS.items()}
    facts["kernels"] = ", ".join(map(_shown, kernels)) if isinstance(kernels, list) else ""
    facts["settings given"] = _overrides(sweep.get("config"))
    facts["drawn"] = _drawn(sweep.get("draw")) or _drawn(sweep.get("sample"))
    return [(name, words) for name, words in facts.items() if words]


def _drawn(draw: Any) -> str:
    """``94 problems, seed 22533, capacities filled 1% to 100%``."""
    if not isinstance(draw, dict):
        return ""
    words = f"{_shown(draw.get('count'))} problems, seed {_shown(draw.get('seed'))}"
    match draw.get("fill"):
        case [int() | float() as low, int() | float() as high]:
            return f"{words}, capacities filled {100 * low:.3g}% to {100 * high:.3g}%"
        case _:
            return words


def _overrides(configs: Any) -> str:
    """``lean:tile_tokens=128,num_warps=4``, as --config takes them."""
    if not isinstance(configs, dict):
        return ""
    return "; ".join(
        f"{kernel}:{','.join(f'{name}={_shown(value)}' for name, value in config.items())}"
        for kernel, config in configs.items()
        if isinstance(config, dict)
    )


def _differs(axis: Axis, row: Mapping[str, Any]) -> bool:
    """Whether the axis has to be named: it has no default, or other values."""
    values = row.get(axis.name)
    if not isinstance(values, list) or not values:
        return False
    return axis.is_required or values != [axis.default]


def _values(axis: Axis, values: Any) -> str:
    return ", ".join(_word(axis, value) for value in values) if isinstance(values, list) else ""


def _word(axis: Axis, value: Any) -> str:
    """The value as a flag has it; of another version of leanbench perhaps as JSON."""
    try:
        return axis.write(value)
    except (TypeError, ValueError):
        return _shown(value)


def _shown(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value)
