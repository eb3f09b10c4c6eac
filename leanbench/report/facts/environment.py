"""Where a run was taken: software, the GPU's figures, and the sweep."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from leanbench.report.document import Block, Section, sentences, table
from leanbench.report.facts.sweep_request import sweep_blocks

if TYPE_CHECKING:
    from leanbench.records.reading import Run
    from leanbench.report.facts.results import Results


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


def environments_of(run: Run) -> dict[str, dict[str, str]]:
    """The manifest's environments as text; what is not measured is left out."""
    return {
        str(key): {
            name: _words(value) for name, value in mapping(fields).items() if value is not None
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
