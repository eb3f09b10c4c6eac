"""The tables of `leanbench configs`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from leanbench.cli import output

if TYPE_CHECKING:
    from rich.table import Table

    from leanbench.tune.kept import Candidate, Family, TunedProblem
    from leanbench.tune.store import File

#: Settings, with headings that fit above numbers of one or two digits.
_SETTINGS = {
    "tile_tokens": "tile\ntokens",
    "num_warps": "warps",
    "num_stages": "stages",
    "ctas_per_sm": "CTAs\nper SM",
    "min_tiles_per_cta": "least\ntiles",
    "align_grid": "align",
}
#: Those of CUDA C++ alone; tables of families without any have no such columns.
_CUDA_SETTINGS = {"chunk_tokens": "chunk\ntokens", "tile_rows": "tile\nrows", "cluster_size": "cluster", "copy": "copy"}


def files_table(files: Sequence[File]) -> Table:
    """A line for each readable file."""
    table = output.table()
    table.add_column("GPU", no_wrap=True)
    for column in ("whose", "kernel", "source", "newest"):
        table.add_column(column)
    for column in ("families", "problems", "candidates"):
        table.add_column(column, justify="right")
    table.add_column("file", overflow="fold")
    for file in files:
        families = file.kept.families
        table.add_row(
            file.kept.gpu.name,
            file.where,
            file.kept.kernel,
            ", ".join(dict.fromkeys(family.source for family in families)) or "-",
            max((family.time[:10] for family in families), default="-"),
            str(len(families)),
            str(sum(len(family.problems) for family in families)),
            str(sum(len(family.candidates) for family in families)),
            str(file.path),
        )
    return table


def family_lines(file: File, family: Family) -> list[str]:
    """What a family is about and how it was found."""
    timed = sum(candidate.build is not None for candidate in family.candidates)
    how = "timed" if family.source == "measured" else "predicted"
    versions = ", ".join(f"{name} {version}" for name, version in family.versions.items())
    return [
        f"{file.kept.gpu.product} ({file.where}) · {family.label}",
        f"{family.source} {family.time} with {versions or 'unknown versions'}",
        f"{len(family.problems)} problems, {timed} of {len(family.candidates)} candidates {how}",
        f"stopped: {family.stopped}",
    ]


def shortlist_table(family: Family) -> Table:
    """The candidates that other problems choose from, with the error of their formulas."""
    table = output.table("shortlist")
    settings = _settings(family)
    for heading in (*settings.values(), "registers", "shared KB", "timings", "median error"):
        table.add_column(heading, justify="right")
    for index in family.shortlist:
        candidate = family.candidates[index]
        assert candidate.build is not None
        build = family.builds[candidate.build]
        registers = "-" if candidate.registers_per_thread is None else str(candidate.registers_per_thread)
        shared = "-" if candidate.shared_bytes is None else f"{candidate.shared_bytes / 1024:.0f}"
        table.add_row(*_values(candidate, settings), registers, shared, str(build.points), f"{build.median_error:.1%}")
    return table


def problems_table(family: Family) -> Table:
    """Each tuned problem's choice."""
    table = output.table("tuned problems")
    settings = _settings(family)
    for heading in ("batch", "KV heads", "context", *settings.values(), "µs", "ties", "gain over\nheuristic"):
        table.add_column(heading, justify="right")
    for problem in sorted(family.problems, key=lambda each: (each.batch * each.kv_heads, each.context)):
        times_us = {timed.candidate: timed.latency_us for timed in problem.timed}
        chosen_us = times_us.get(problem.chosen)
        table.add_row(
            *(str(size) for size in (problem.batch, problem.kv_heads, problem.context)),
            *_values(family.candidates[problem.chosen], settings),
            "-" if chosen_us is None else f"{chosen_us:.2f}",
            str(len(problem.ties)),
            _gain(problem, chosen_us, times_us.get(problem.heuristic)),
        )
    return table


def _gain(problem: TunedProblem, chosen_us: float | None, heuristic_us: float | None) -> str:
    if problem.chosen == problem.heuristic:
        return "same"
    return "-" if chosen_us is None or heuristic_us is None else f"{1 - chosen_us / heuristic_us:.1%}"


def _settings(family: Family) -> dict[str, str]:
    has_cuda = any(candidate.implementation is not None for candidate in family.candidates)
    return {**_SETTINGS, **_CUDA_SETTINGS} if has_cuda else _SETTINGS


def _values(candidate: Candidate, settings: Mapping[str, str]) -> list[str]:
    values = candidate.config.to_dict()
    words = {True: "yes", False: "no"}
    found = (values.get(name, "-") for name in settings)
    return [words[value] if isinstance(value, bool) else str(value) for value in found]
