"""The tables of `leanbench configs`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from leanbench.cli import output
from leanbench.kernels.lean.configs import LeanCudaConfig

if TYPE_CHECKING:
    from rich.table import Table

    from leanbench.configs.store import File
    from leanbench.configs.tuned import Candidate, Family, TunedProblem

#: Settings, with headings that fit above numbers of one or two digits.
_SETTINGS = {
    "tile_tokens": "tile\ntokens",
    "num_warps": "warps",
    "num_stages": "stages",
    "ctas_per_sm": "CTAs\nper SM",
    "min_tiles_per_cta": "least\ntiles",
    "align_grid": "align",
}
#: So many of them are shown again where a shortlist takes several tables.
_LABELS = 3
#: Those of CUDA C++ alone; tables of families without any have no such columns.
_CUDA_SETTINGS = {
    "chunk_tokens": "chunk\ntokens",
    "tile_rows": "tile\nrows",
    "cluster_size": "cluster",
    "copy": "copy",
}


def files_table(files: Sequence[File]) -> Table:
    """A line for each readable file."""
    table = output.table()
    table.add_column("GPU", no_wrap=True)
    for column in ("whose", "kernel", "source", "newest"):
        table.add_column(column)
    for column in ("families", "problems", "candidates"):
        table.add_column(column, justify="right")
    for file in files:
        families = file.tuned.families
        name = file.tuned.gpu.name
        table.add_row(
            # A namesake's file has another name.
            name if file.path.stem == name else f"{name} in {file.path.name}",
            file.where,
            file.tuned.kernel,
            ", ".join(dict.fromkeys(family.source for family in families)) or "-",
            max((family.time[:10] for family in families), default="-"),
            str(len(families)),
            str(sum(len(family.problems) for family in families)),
            str(sum(len(family.candidates) for family in families)),
        )
    return table


def folder_lines(files: Sequence[File]) -> list[str]:
    """Where the files are, each with its GPU's name; paths are too long for a column."""
    return list(dict.fromkeys(f"{file.where}: {file.path.parent}" for file in files))


def family_lines(file: File, family: Family) -> list[str]:
    """Lines that describe a family and its search."""
    how = "timed" if family.source == "measured" else "predicted"
    versions = ", ".join(f"{name} {version}" for name, version in family.versions.items())
    return [
        f"{file.tuned.gpu.product} ({file.where}) · {family.label}",
        f"{family.source} {family.time} with {versions or 'unknown versions'}",
        f"{len(family.problems)} problems {how}, {len(family.candidates)} candidates",
        f"stopped: {family.stopped}",
    ]


def show_shortlist(family: Family) -> None:
    """The candidates that other problems choose from, with the error of their formulas."""
    candidates = [family.candidates[index] for index in family.shortlist]
    builds = [
        family.builds[candidate.build] for candidate in candidates if candidate.build is not None
    ]
    settings = _settings_columns(family, candidates)
    output.show_columns(
        "shortlist",
        settings[:_LABELS],
        [
            *settings[_LABELS:],
            (
                "shared\nKiB",
                [_or_dash(_kib(candidate.shared_bytes), ".0f") for candidate in candidates],
            ),
            ("timings", [str(build.points) for build in builds]),
            ("median\nerror", [f"{build.median_error:.1%}" for build in builds]),
        ],
    )


def show_problems(family: Family) -> None:
    """Each tuned problem's choice."""
    problems = sorted(
        family.problems, key=lambda problem: (problem.batch * problem.kv_heads, problem.context)
    )
    times_us = [
        {timed.candidate: timed.latency_us for timed in problem.timed} for problem in problems
    ]
    both = list(zip(problems, times_us, strict=True))
    output.show_columns(
        "tuned problems",
        [
            ("batch", [str(problem.batch) for problem in problems]),
            ("KV\nheads", [str(problem.kv_heads) for problem in problems]),
            ("context", [str(problem.context) for problem in problems]),
        ],
        [
            *_settings_columns(family, [family.candidates[problem.chosen] for problem in problems]),
            ("µs", [_or_dash(of.get(problem.chosen), ".2f") for problem, of in both]),
            ("ties", [str(len(problem.ties)) for problem in problems]),
            (
                "gain over\nheuristic",
                [
                    _gain(problem, of.get(problem.chosen), of.get(problem.heuristic))
                    for problem, of in both
                ],
            ),
        ],
    )


def _gain(problem: TunedProblem, chosen_us: float | None, heuristic_us: float | None) -> str:
    if problem.chosen == problem.heuristic:
        return "same"
    return (
        "-" if chosen_us is None or heuristic_us is None else f"{1 - chosen_us / heuristic_us:.1%}"
    )


def _settings_columns(family: Family, candidates: Sequence[Candidate]) -> list[output.Column]:
    has_cuda = any(isinstance(candidate.config, LeanCudaConfig) for candidate in family.candidates)
    values = [candidate.config.to_dict() for candidate in candidates]
    settings = {**_SETTINGS, **_CUDA_SETTINGS} if has_cuda else _SETTINGS
    return [
        (heading, [_word(of.get(name, "-")) for of in values]) for name, heading in settings.items()
    ]


def _word(value: int | bool | str) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _kib(count: int | None) -> float | None:
    return None if count is None else count / 1024


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
