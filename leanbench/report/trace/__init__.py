"""From timelines to pictures: a terminal's text, one offline HTML page, an SVG, and a trace file
for Perfetto.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from leanbench.core.syntax import choose
from leanbench.report import check_writable, write_whole
from leanbench.report.trace.picture import Panel

FORMATS = ("html", "svg", "json")


def write_trace(
    panels: Sequence[Panel], out_dir: Path, formats: Sequence[str] = FORMATS
) -> list[Path]:
    """Paths of the files `trace.<format>` that it writes into `out_dir`, one for each format.

    Args:
        panels: at least one; one problem on one GPU, all measured or all predicted.

    Raises:
        UserError: an unknown format, or an `out_dir` that cannot be written.
    """
    targets = trace_files(out_dir, formats)
    for format_, target in targets.items():
        write_whole(target, _render(format_, panels))
    return list(targets.values())


def trace_files(out_dir: Path, formats: Sequence[str]) -> dict[str, Path]:
    """Where each format goes; makes `out_dir`, so that what cannot be written is said before
    anything is measured.

    Raises:
        UserError: as `write_trace`.
    """
    targets = {
        choose("format", format_, FORMATS): out_dir / f"trace.{format_}" for format_ in formats
    }
    check_writable(out_dir, targets.values())
    return targets


def _render(format_: str, panels: Sequence[Panel]) -> str:
    if format_ == "html":
        from leanbench.report.trace.html import html_text

        return html_text(panels)
    if format_ == "svg":
        from leanbench.report.trace.svg import svg_text

        return svg_text(panels)
    from leanbench.report.trace.perfetto import perfetto_text

    return perfetto_text(panels)
