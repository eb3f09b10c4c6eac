"""The report as Markdown: the summary, the paper's claims, and every row folded away."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from leanbench.report.claims_table import claims_of_runs
from leanbench.report.frame import SUBJECT, gpu_name, has_values
from leanbench.report.headline import Overview, headline, overview, parts_of, title
from leanbench.report.markdown_words import code, plain, table
from leanbench.report.series import add_series_columns
from leanbench.report.side_by_side import beside
from leanbench.report.summary import Summary

if TYPE_CHECKING:
    from pandas import DataFrame

    from leanbench.records.reading import Run

#: Columns of the table of every row: heading, and how a number is written; those without any value
#: are left out.
ROWS = {
    "run": ("run", ""),
    "gpu": ("GPU", ""),
    "source": ("source", ""),
    "problem": ("problem", ""),
    "cache": ("L2", ""),
    "kernel": ("kernel", ""),
    "status": ("status", ""),
    "latency_us": ("latency µs:", ".4g"),
    "bandwidth_tb_s": ("TB/s:", ".2f"),
    "read_floor_share": ("of the floor:", ".1%"),
    "lean_speedup": (f"speedup of {SUBJECT}:", ".2f"),
    "energy_mj": ("energy mJ:", ".4g"),
    "config": ("config", ""),
}
#: Left out where all rows have the same.
TOLD_APART = ("run", "gpu", "source", "cache")


def markdown_text(runs: Sequence[Run], frame: DataFrame) -> str:
    """GitHub's Markdown. `frame` comes from `leanbench.report.frame.results_frame`."""
    frame = add_series_columns(frame)
    parts = parts_of(frame)
    found = overview(parts)
    lines = [
        f"# {plain(title([run.name for run in runs], found))}",
        "",
        *(_overview(found) if found else []),
    ]
    for run in runs:
        lines += [*_about(run), *(f"Note: {plain(note)}.\n" for note in run.notes)]
    for part in parts:
        each = part.summary
        if len(parts) > 1:
            lines += [f"## {plain(f'{each.run}: {each.source}, {each.gpu}, {each.cache} L2')}", ""]
        said = headline(part)
        lines += [
            *(f"- **{name}:** {plain(text)}" for name, text in said),
            "",
            *_speedups(each, part.short),
        ]
    if len(runs) > 1:
        lines += _beside(frame)
    return "\n".join([*lines, *_claims(runs), *_rows(frame)]).rstrip("\n") + "\n"


def _overview(found: Overview) -> list[str]:
    headings = [
        "run",
        f"{SUBJECT} fastest or near:",
        "over the fastest other:",
        "lowest:",
        "at",
        "highest:",
        "at",
        "beware",
    ]
    lines = []
    for name, part in found.parts:
        over = part.summary.over_best
        figures = ["", "", "", "", "", ""]
        if over is not None:
            low, high = (plain(part.short[label]) for label in (over.lowest_at, over.highest_at))
            near = f"{part.near} of {over.problems}"
            figures = [
                near,
                _times(over.geomean),
                _times(over.lowest),
                low,
                _times(over.highest),
                high,
            ]
        lines.append([plain(name), *figures, plain(" ".join(part.caveats))])
    return [
        *(f"- **{plain(name)}:** {plain(text)}" for name, text in found.sentences),
        "",
        *table(headings, lines),
        "",
    ]


def _about(run: Run) -> list[str]:
    sources = list(dict.fromkeys(row.source for row, _ in run.results)) or [
        str(run.manifest.get("source", "measured"))
    ]
    gpus = dict.fromkeys(gpu_name(run.manifest, row.environment) for row, _ in run.results)
    words = f"{run.name}: {' and '.join(sources)}, {' and '.join(gpus) or gpu_name(run.manifest)}"
    command = run.manifest.get("command")
    return [f"{plain(words)}{f', {code(str(command))}' if command else ''}", ""]


def _speedups(summary: Summary, short: Mapping[str, str]) -> list[str]:
    if not summary.speedups:
        return []
    headings = [
        f"{SUBJECT} over",
        "problems:",
        "geometric mean:",
        "lowest:",
        "at",
        "highest:",
        "at",
        "energy:",
    ]
    lines = []
    for each in summary.speedups:
        energy = summary.energies.get(each.baseline)
        low, high = (plain(short[label]) for label in (each.lowest_at, each.highest_at))
        figures = [
            str(each.problems),
            _times(each.geomean),
            _times(each.lowest),
            low,
            _times(each.highest),
            high,
        ]
        lines.append([plain(each.baseline), *figures, _times(energy.geomean) if energy else ""])
    return [*table(headings, lines), ""]


def _beside(frame: DataFrame) -> list[str]:
    headings = [
        "kernel",
        "run",
        "over",
        "problems:",
        "latency, geometric mean:",
        "lowest:",
        "highest:",
        "energy:",
    ]
    lines = [
        [
            *map(plain, (each.kernel, each.other.name, each.base.name)),
            *(str(each.problems), _times(each.geomean), _times(each.lowest), _times(each.highest)),
            _times(each.energy) if each.energy else "",
        ]
        for each in beside(frame)
    ]
    return ["## Runs side by side", "", *table(headings, lines), ""] if lines else []


def _claims(runs: Sequence[Run]) -> list[str]:
    lines = []
    several = len(runs) > 1
    for name, is_predicted, claims in claims_of_runs(runs):
        word = "predicted" if is_predicted else "measured"
        lacking = f"not {word} in {'these runs' if several else 'this run'}"
        cells = [
            [
                *(each.claim.figure, plain(each.claim.words), each.claim.paper_words, each.words),
                *(
                    each.verdict or lacking,
                    *([plain(each.run)] if several else []),
                    plain(each.cell),
                ),
            ]
            for each in claims
        ]
        headings = [
            "figure",
            "claim",
            "paper:",
            f"{word}:",
            "verdict",
            *(["run"] if several else []),
            "cell",
        ]
        lines += [f"## The paper's claims ({plain(name)}, {word})", "", *table(headings, cells), ""]
    return lines


def _rows(frame: DataFrame) -> list[str]:
    if frame.empty:
        return ["This run has no rows yet."]
    shown = [name for name in ROWS if has_values(frame, name)]
    shown = [name for name in shown if name not in TOLD_APART or len({*frame[name]}) > 1]
    rows = ([_cell(row[name], ROWS[name][1]) for name in shown] for row in frame.to_dict("records"))
    lines = table([ROWS[name][0] for name in shown], rows)
    return [f"<details><summary>Every row ({len(frame)})</summary>", "", *lines, "", "</details>"]


def _cell(value: Any, form: str) -> str:
    import pandas as pd

    if pd.isna(value):
        return ""
    return format(value, form) if form else plain(str(value))


def _times(value: float) -> str:
    return f"{value:.2f}×"
