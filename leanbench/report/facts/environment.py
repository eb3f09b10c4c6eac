"""Origin of runs: software, the GPU's figures, and the sweep."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from leanbench.core.axes import AXES
from leanbench.core.axis import Axis
from leanbench.core.lengths import is_explicit
from leanbench.gpu.topology import Pair, pairs_in_words
from leanbench.report.document import Block, Section, Sentence, Sentences, sentences, table
from leanbench.report.series import listed

if TYPE_CHECKING:
    from leanbench.records.reading import Run
    from leanbench.report.facts.results import Results

#: Field of environments: pairs of the GPUs that shared problems, by rank.
_LINKS = "gpu_links"
#: Keys of a sweep with their names, in the order shown.
_SCALARS = {"name": "sweep", "description": "description", "configs": "launch settings"}


def environment_section(results: Results) -> Section:
    """List the distinct environments, GPU figures and sweeps of all runs."""
    blocks = [*_environments(results), *_gpu_figures(results)]
    sweeps = [
        Section("", run.name if results.are_several else "Sweep", sweep_blocks(sweep), "closed")
        for run in results.runs
        if (sweep := run.manifest.get("sweep"))
    ]
    blocks += [Section("", "Sweeps", tuple(sweeps), "closed")] if len(sweeps) > 1 else sweeps
    # The environment that computed a prediction is not predicted.
    return Section("environment", "Environment", tuple(blocks), tagged=False)


def _environments(results: Results) -> list[Block]:
    """Make a table of the fields that all environments share, and one of the others."""
    runs_of: dict[tuple[str, str], list[str]] = {}
    fields_of: dict[tuple[str, str], dict[str, str]] = {}
    for run in results.runs:
        for key, fields in environments_of(run).items():
            identity = (key, json.dumps(fields, sort_keys=True))
            runs_of.setdefault(identity, []).append(run.name)
            fields_of[identity] = fields
    if not fields_of:
        return [sentences("The manifest names no environment.", layout="empty")]
    every = list(fields_of.values())
    names = dict.fromkeys(name for fields in every for name in fields)
    shared = [name for name in names if len({fields.get(name) for fields in every}) == 1]
    heading = next(iter(fields_of))[0] if len(every) == 1 else "in all"
    rows = [[name, every[0][name]] for name in shared]
    blocks: list[Block] = [table(["", heading], rows)] if rows else []
    if differing := [name for name in names if name not in shared]:
        rows = [
            [
                identity[0],
                ", ".join(runs_of[identity]) if results.are_several else "",
                *(fields.get(name, "") for name in differing),
            ]
            for identity, fields in fields_of.items()
        ]
        blocks.append(table(["environment", "runs", *differing], rows))
    return blocks


def _gpu_figures(results: Results) -> list[Block]:
    every = [
        {name: _words(value) for name, value in run.section("gpu").items()} for run in results.runs
    ]
    distinct = [gpu for index, gpu in enumerate(every) if gpu and gpu not in every[:index]]
    heading = "GPU figures used for schedules and predictions"
    return [
        Section("", heading, (table(["figure", "value"], list(gpu.items())),), "closed")
        for gpu in distinct
    ]


def links_section(results: Results) -> Section:
    """Describe the links of GPUs that shared problems."""
    runs_of: dict[str, list[str]] = {}
    for run in results.runs:
        for words in _links_of(run):
            runs_of.setdefault(words, []).append(run.name)
    items = [
        Sentence(words, listed(runs) if results.are_several else "")
        for words, runs in runs_of.items()
    ]
    return Section("links", "", (Sentences(tuple(items)),) if items else ())


def _links_of(run: Run) -> list[str]:
    described = []
    for fields in run.environments.values():
        # Malformed links are left out.
        with suppress(TypeError, KeyError, ValueError):
            described.append(pairs_in_words(Pair(**link) for link in fields.get(_LINKS) or ()))
    return [f"{words[0].upper()}{words[1:]}." for words in dict.fromkeys(described) if words]


def environments_of(run: Run) -> dict[str, dict[str, str]]:
    """Return the environments as text, without missing values and links."""
    return {
        key: {
            name: _words(value)
            for name, value in fields.items()
            if value is not None and name != _LINKS
        }
        for key, fields in run.environments.items()
    }


def _words(value: Any) -> str:
    return ", ".join(map(_words, value)) if isinstance(value, (list, tuple)) else str(value)


def sweep_blocks(sweep: Any) -> tuple[Block, ...]:
    """Describe a manifest's sweep: facts, then the axes that are not at their defaults."""
    if not isinstance(sweep, dict):
        return (sentences(_shown(sweep)),)
    grids = sweep.get("grids")
    rows = {
        name: _effective(row)
        for name, row in [
            *enumerate(grids if isinstance(grids, list) else [], 1),
            ("drawn", sweep.get("draw")),
        ]
        if isinstance(row, dict)
    }
    names = [
        name for name, axis in AXES.items() if any(_is_shown(axis, row) for row in rows.values())
    ]
    cells = [
        [str(title), *(_values(AXES[name], row.get(name)) for name in names)]
        for title, row in rows.items()
    ]
    facts = Sentences(tuple(Sentence(words, name) for name, words in _facts(sweep)), "facts")
    return (facts, table(["grid", *names], cells)) if cells else (facts,)


def _effective(row: Mapping[str, Any]) -> dict[str, Any]:
    """Drop the axes that another axis replaces.

    Models define heads and head_dim, explicit lengths batch and context, drawn shares of a capacity
    the context.
    """
    replaced = ["heads", "head_dim"] if row.get("model") else ["model", "tp"]
    lengths = row.get("lengths")
    if isinstance(lengths, list) and all(isinstance(text, str) for text in lengths):
        replaced += ["batch", "context"] if lengths and all(map(is_explicit, lengths)) else []
    replaced += ["context"] if "fill" in row else []
    return {name: values for name, values in row.items() if name not in replaced}


def _facts(sweep: Mapping[str, Any]) -> list[tuple[str, str]]:
    kernels, configs = sweep.get("kernels"), sweep.get("config")
    facts = {title: _shown(sweep.get(key)) for key, title in _SCALARS.items()}
    facts["kernels"] = ", ".join(map(_shown, kernels)) if isinstance(kernels, list) else ""
    facts["settings given"] = "; ".join(
        f"{kernel}:{','.join(f'{name}={_shown(value)}' for name, value in config.items())}"
        for kernel, config in (configs.items() if isinstance(configs, dict) else ())
        if isinstance(config, dict)
    )
    facts["drawn"] = _drawn(sweep.get("draw")) or _drawn(sweep.get("sample"))
    return [(name, words) for name, words in facts.items() if words]


def _drawn(draw: Any) -> str:
    """Describe drawn problems: ``94 problems, seed 22533, capacities filled 1% to 100%``."""
    if not isinstance(draw, dict):
        return ""
    words = f"{_shown(draw.get('count'))} problems, seed {_shown(draw.get('seed'))}"
    match draw.get("fill"):
        case [int() | float() as low, int() | float() as high]:
            return f"{words}, capacities filled {100 * low:.3g}% to {100 * high:.3g}%"
        case _:
            return words


def _is_shown(axis: Axis, row: Mapping[str, Any]) -> bool:
    """Return True if the axis is required or not at its default."""
    values = row.get(axis.name)
    if not isinstance(values, list) or not values:
        return False
    return axis.is_required or values != [axis.default]


def _values(axis: Axis, values: Any) -> str:
    return ", ".join(_word(axis, value) for value in values) if isinstance(values, list) else ""


def _word(axis: Axis, value: Any) -> str:
    """Format a value as a flag, or as JSON if another version of leanbench wrote it."""
    try:
        return axis.write(value)
    except (TypeError, ValueError):
        return _shown(value)


def _shown(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value)
