"""Where a run was taken: software, the GPU's figures, and the sweep."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from leanbench.gpu.topology import Pair, pairs_in_words
from leanbench.report.document import Block, Section, Sentence, Sentences, sentences, table
from leanbench.report.facts.sweep_request import sweep_blocks

if TYPE_CHECKING:
    from leanbench.records.reading import Run
    from leanbench.report.facts.results import Results

#: Field of environments: pairs of the GPUs that shared problems, by rank.
_LINKS = "gpu_links"


def environment_section(results: Results) -> Section:
    """A part for each run."""
    blocks: list[Block] = []
    for run in results.runs:
        of_run = _blocks(run)
        blocks += [Section("", run.name, of_run)] if results.are_several else of_run
    # What computed a prediction is no prediction.
    return Section("environment", "Environment", tuple(blocks), tagged=False)


def _blocks(run: Run) -> tuple[Block, ...]:
    blocks: list[Block] = [sentences("The manifest names no environment.", layout="empty")]
    if fields := environments_of(run):
        names = dict.fromkeys(name for of_key in fields.values() for name in of_key)
        rows = [[name, *(of_key.get(name, "") for of_key in fields.values())] for name in names]
        blocks = [table(["", *fields], rows)]
    if gpu := mapping(run.manifest.get("gpu")):
        figures = table(["figure", "value"], [[name, _words(gpu[name])] for name in gpu])
        heading = "GPU figures used for schedules and predictions"
        blocks.append(Section("", heading, (figures,), "closed"))
    if sweep := run.manifest.get("sweep"):
        blocks.append(Section("", "Sweep", sweep_blocks(sweep), "closed"))
    return tuple(blocks)


def links_section(results: Results) -> Section:
    """Sentences on how GPUs that shared problems reach one another."""
    said = [
        Sentence(words, run.name if results.are_several else "")
        for run in results.runs
        for words in _links_of(run)
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
