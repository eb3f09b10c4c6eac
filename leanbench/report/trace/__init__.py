"""Pictures of timelines: in the terminal, as one offline HTML page, and as a Perfetto trace."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from leanbench.core.syntax import choose
from leanbench.report import check_writable, write_whole
from leanbench.report.trace.picture import Panel

FORMATS = ("html", "json")


def write_trace(
    panels: Sequence[Panel], out_dir: Path, formats: Sequence[str] = FORMATS
) -> list[Path]:
    """Write a file `trace.<format>` for each format and return the paths.

    Args:
        panels: one or more of the same problem and GPU, all measured or all predicted.

    Raises:
        UserError: an unknown format, or an `out_dir` that cannot be written.
    """
    from leanbench.report.trace.html import html_text
    from leanbench.report.trace.perfetto import perfetto_text

    targets = trace_files(out_dir, formats)
    for format_, target in targets.items():
        write_whole(target, html_text(panels) if format_ == "html" else perfetto_text(panels))
    return list(targets.values())


def trace_files(out_dir: Path, formats: Sequence[str]) -> dict[str, Path]:
    """Return each format's file, and create `out_dir`: a trace fails before it measures.

    Raises:
        UserError: as `write_trace`.
    """
    targets = {
        choose("format", format_, FORMATS): out_dir / f"trace.{format_}" for format_ in formats
    }
    check_writable(out_dir, targets.values())
    return targets
