"""Where a run was taken: software, the GPU's figures, and the sweep."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from leanbench.gpu.topology import Pair, pairs_in_words
from leanbench.report.document import Block, Section, Sentence, Sentences, sentences, table
from leanbench.report.facts.sweep_request import sweep_blocks
from leanbench.report.series import listed

if TYPE_CHECKING:
    from leanbench.records.reading import Run
    from leanbench.report.facts.results import Results

#: Field of environments: pairs of the GPUs that shared problems, by rank.
_LINKS = "gpu_links"


def environment_section(results: Results) -> Section:
    """The environments of all runs, their GPUs' figures and their sweeps; equal ones once."""
    blocks = [*_environments(results), *_gpu_figures(results)]
    sweeps = [
        Section("", run.name if results.are_several else "Sweep", sweep_blocks(sweep), "closed")
        for run in results.runs
        if (sweep := run.manifest.get("sweep"))
    ]
    blocks += [Section("", "Sweeps", tuple(sweeps), "closed")] if len(sweeps) > 1 else sweeps
    # What computed a prediction is no prediction.
    return Section("environment", "Environment", tuple(blocks), tagged=False)


def _environments(results: Results) -> list[Block]:
    """A table of what all environments share, and one of what differs."""
    runs_of: dict[tuple[str, str], list[str]] = {}
    fields_of: dict[tuple[str, str], dict[str, str]] = {}
    for run in results.runs:
        for key, fields in environments_of(run).items():
            alike = (key, json.dumps(fields, sort_keys=True))
            runs_of.setdefault(alike, []).append(run.name)
            fields_of[alike] = fields
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
                key,
                ", ".join(runs_of[key, text]) if results.are_several else "",
                *(fields.get(name, "") for name in differing),
            ]
            for (key, text), fields in fields_of.items()
        ]
        blocks.append(table(["environment", "runs", *differing], rows))
    return blocks


def _gpu_figures(results: Results) -> list[Block]:
    """A closed table for each GPU."""
    figures = [
        {name: _words(value) for name, value in mapping(run.manifest.get("gpu")).items()}
        for run in results.runs
    ]
    different = [gpu for place, gpu in enumerate(figures) if gpu and gpu not in figures[:place]]
    heading = "GPU figures used for schedules and predictions"
    return [
        Section("", heading, (table(["figure", "value"], list(gpu.items())),), "closed")
        for gpu in different
    ]


def links_section(results: Results) -> Section:
    """Sentences on how GPUs that shared problems reach one another."""
    runs_of: dict[str, list[str]] = {}
    for run in results.runs:
        for words in _links_of(run):
            runs_of.setdefault(words, []).append(run.name)
    said = [
        Sentence(words, listed(runs) if results.are_several else "")
        for words, runs in runs_of.items()
    ]
    return Section("links", "", (Sentences(tuple(said)),) if said else ())


def _links_of(run: Run) -> list[str]:
    """A sentence for each environment of several GPUs, counted by rank."""
    said = []
    for fields in mapping(run.manifest.get("environments")).values():
        links = mapping(fields).get(_LINKS)
        with suppress(TypeError, KeyError, ValueError):
            # As it was written, which may be something else.
            said += [pairs_in_words(Pair(**link) for link in links or ())]
    return [f"{words[0].upper()}{words[1:]}." for words in dict.fromkeys(said) if words]


def environments_of(run: Run) -> dict[str, dict[str, str]]:
    """The manifest's environments as text; what is not measured is left out, and what `_links_of`
    says.
    """
    return {
        str(key): {
            name: _words(value)
            for name, value in mapping(fields).items()
            if value is not None and name != _LINKS
        }
        for key, fields in mapping(run.manifest.get("environments")).items()
    }


def _words(value: Any) -> str:
    return ", ".join(map(_words, value)) if isinstance(value, (list, tuple)) else str(value)


def mapping(value: Any) -> dict[str, Any]:
    """A part of a manifest, which is read as it was written: it may be missing, or something
    else.
    """
    return value if isinstance(value, dict) else {}
