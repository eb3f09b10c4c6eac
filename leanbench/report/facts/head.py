"""Head of a report: which runs these are, and what all their figures share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from leanbench.core.quantities import TIMED
from leanbench.model import known_error
from leanbench.report.document import Block, Section, Sentence, Sentences, Text, sentences
from leanbench.report.facts.environment import environments_of
from leanbench.report.facts.headline import overview_of
from leanbench.report.frame import PROBLEM_COLUMNS, gpu_name, kernel_order
from leanbench.report.series import fixed_words, listed

if TYPE_CHECKING:
    from leanbench.records.reading import Run
    from leanbench.report.facts.results import Results


def banner_section(results: Results) -> Section:
    """Sentences on what is predicted, each with the runs that it is about."""
    runs_of: dict[tuple[str, str], list[str]] = {}
    for run in results.runs:
        for banner in _banner(run):
            runs_of.setdefault(banner, []).append(run.name)
    banners = [
        Sentence(Text(words, "strong"), listed(runs) if results.are_several else "", note)
        for (words, note), runs in runs_of.items()
    ]
    return Section("banner", "", (Sentences(tuple(banners), "banner"),) if banners else ())


def _banner(run: Run) -> list[tuple[str, str]]:
    sources = _sources(run)
    if sources == ["predicted"]:
        gpus = listed(_gpus(run))
        words = f"Predicted by the performance model for {gpus}; nothing was measured."
        # A row without a latency has no error either.
        kernels = dict.fromkeys(row.kernel for row, _ in run.results if row.status in TIMED)
        return [(words, known_error(gpu_name(run.manifest), kernels) if kernels else "")]
    if "predicted" in sources:
        words = "Some rows are measured, some predicted by the performance model."
        return [(words, "They are never mixed in one figure.")]
    return []


def head_section(results: Results) -> Section:
    """The runs with their commands, versions and notes, and the problems in one line."""
    versions = [_versions(run) for run in results.runs]
    # What several runs have in common stands once.
    alike = results.are_several and versions.count(versions[0]) == len(versions)
    shared = versions[0] if alike else []
    about: list[Sentence] = []
    for run, of_run in zip(results.runs, versions, strict=True):
        words = " · ".join([_on(run), *([] if shared else of_run), *_created(run)])
        about.append(Sentence(words, run.name if results.are_several else ""))
        if command := run.manifest.get("command"):
            about.append(Sentence(Text(str(command), "code")))
    runs: Block = Sentences(tuple(about))
    if overview_of(results.parts):
        runs = Section("", "The runs and their commands", (runs,), "closed")
    lines = [" · ".join(shared)] if shared else []
    notes = [f"Note: {note}." for run in results.runs for note in run.notes]
    blocks = [runs, sentences(*lines, _problems(results))]
    blocks += [sentences(*notes, layout="note")] if notes else []
    return Section("head", "", tuple(blocks))


def _on(run: Run) -> str:
    sources = _sources(run)
    on = "for" if sources == ["predicted"] else "on"
    return f"{' and '.join(sources).capitalize()} {on} {' and '.join(_gpus(run))}"


def _sources(run: Run) -> list[str]:
    return list(dict.fromkeys(row.source for row, _ in run.results)) or [
        str(run.manifest.get("source", "measured"))
    ]


def _gpus(run: Run) -> list[str]:
    return list(
        dict.fromkeys(gpu_name(run.manifest, row.environment) for row, _ in run.results)
    ) or [gpu_name(run.manifest)]


def _versions(run: Run) -> list[str]:
    """``torch 2.11.0`` and the like, each value once."""
    environments = environments_of(run).values()
    words = []
    for field in ("driver", "torch", "triton", "leanbench", "kernels"):
        values = dict.fromkeys(
            environment[field] for environment in environments if environment.get(field)
        )
        words += [f"{field} {', '.join(values)}"] if values else []
    return words


def _created(run: Run) -> list[str]:
    created = str(run.manifest.get("created") or "")
    return [f"{created[:16].replace('T', ' ')} UTC"] if created else []


def _problems(results: Results) -> str:
    frame = results.frame
    problems = len(frame.drop_duplicates([*PROBLEM_COLUMNS]))
    kernels = len(kernel_order(frame))
    counts = (
        f"{problems} {'problem' if problems == 1 else 'problems'},"
        f" {kernels} {'kernel' if kernels == 1 else 'kernels'}"
    )
    fixed = fixed_words(frame)
    return f"{counts}: {fixed}" if fixed else counts
