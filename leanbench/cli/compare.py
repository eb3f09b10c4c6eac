"""`leanbench compare`: differences of two runs, cell by cell."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from leanbench.cli import output
from leanbench.cli.completion import kernel_names, run_names
from leanbench.cli.options import argument, option, switch

if TYPE_CHECKING:
    from leanbench.report.compare.core import Comparison

FORMATS = ("table", "markdown", "json", "csv")


def compare(
    base: Annotated[
        str,
        argument(
            "BASE", "RUN or RUN:KERNEL; a path or a name under runs/.", autocompletion=run_names
        ),
    ],
    new: Annotated[
        str, argument("NEW", "The same, for what is compared with BASE.", autocompletion=run_names)
    ],
    kernels: Annotated[
        str | None,
        option(
            "--kernels",
            "LIST",
            "These kernels only.",
            show_default="all that both ran",
            autocompletion=kernel_names,
        ),
    ] = None,
    margin: Annotated[
        str, option("--margin", "PERCENT", "Differences within this count as none.")
    ] = "1%",
    fail_above: Annotated[
        str | None,
        option("--fail-above", "PERCENT", "Exit with 1 if a cell is slower by more than this."),
    ] = None,
    format_: Annotated[str, option("--format", "|".join(FORMATS), "How to print.")] = "table",
    all_: Annotated[bool, switch("--all", "Every cell in the table, not the first 30.")] = False,
) -> None:
    """Say for every cell of two runs whether its latency differs.

    `leanbench compare before after` pairs rows of the same kernel, problem, configs and cache
    state; `leanbench compare run:lean run:fa2` pairs two kernels. The 95% interval of new over base
    comes from the ranks of the raw samples (Hodges and Lehmann). Within the margin it is the same,
    wholly beyond it slower or faster, else ambiguous; a noisy or suspect row is ambiguous at best.

    With --fail-above, exit code 1 means that a cell is slower by more than that and significantly
    so, or worked (ok or noisy) and does so no longer. PERCENT is written with its sign: 5%.
    """
    from leanbench.core.syntax import choose, parse_names, parse_percent
    from leanbench.report.compare import core

    choose("--format", format_, FORMATS)
    names = [] if kernels is None else list(parse_names("--kernels", kernels))
    same_within = parse_percent("--margin", margin, most=99)
    threshold = None if fail_above is None else parse_percent("--fail-above", fail_above, most=1000)
    comparison = core.compare(base, new, margin=same_within, kernels=names)
    for run in (comparison.base.run, comparison.new.run):
        for note in run.notes:
            output.say(f"{run.directory}: {note}")
    _show(comparison, format_, all_)
    if threshold is not None and _print_failures(comparison, threshold, fail_above or ""):
        raise typer.Exit(1)


def _show(comparison: Comparison, format_: str, all_: bool) -> None:
    from leanbench.report.compare.document import comparison_document, csv_text, json_text

    if format_ == "table":
        from leanbench.cli.document import show_document

        # The most important part is printed last, above the prompt.
        document = comparison_document(comparison, every=all_)
        show_document(document.only("sides", "cells", "outcome", "statistics"))
    elif format_ == "markdown":
        from leanbench.report.markdown import markdown_text

        output.show_whole(markdown_text(comparison_document(comparison)).rstrip("\n"))
    else:
        output.show_whole((json_text if format_ == "json" else csv_text)(comparison).rstrip("\n"))


def _print_failures(comparison: Comparison, above: float, given: str) -> bool:
    """Print the cells that fail. Return True if there are any."""
    from leanbench.report.compare.sentences import change

    if comparison.only_in_base:
        count = len(comparison.only_in_base)
        output.say(
            f"--fail-above {given} does not judge what NEW did not run: cells in BASE alone,"
            f" {count}"
        )
    failures = comparison.failures(above)
    if failures:
        output.say(f"--fail-above {given}: {len(failures)} of {len(comparison.pairs)} cells fail")
    for pair in failures:
        output.say(
            f"  {pair.label}: {f'{pair.statuses}, {pair.reason}' if pair.broken else change(pair)}"
        )
    return bool(failures)
