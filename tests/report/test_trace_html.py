"""The page's content without a browser: figures, notes, escaping, and how the files are written."""

import json
import re
from pathlib import Path

import pytest
from example_runs import HOSTILE
from trace_examples import cta, fixed_split, lean, tiles, timeline

from leanbench.core.errors import UserError
from leanbench.report.trace import html, write_trace
from leanbench.report.trace.html import html_text, page_context
from leanbench.report.trace.picture import Panel


def test_the_table_has_every_figure() -> None:
    [row, second] = page_context([Panel(lean(), 0.75), Panel(fixed_split())])["rows"]
    assert "; ".join(f"{name} {value}" for name, value in row.items()) == (
        "kernel lean; latency (µs) 41.0;"
        " launch (µs) 1.98; read (µs) 22.8; tail (µs) 6.50; merge (µs) 9.76;"
        " first start to last end (µs) 40.0; SMs busy 50.0%;"
        " of it merging 6.2%; SMs waiting 6.2%; SMs without a CTA 43.8%;"
        " SMs used 3 of 4; CTAs 3; output tiles 2;"
        " quantisation efficiency 75.0%; latency with events 1.025x;"
        " launch settings tile_tokens 128, num_warps 4"
    )
    assert (second["quantisation efficiency"], second["latency with events"]) == ("", "")


def test_the_page_has_every_mark() -> None:
    text = html_text([Panel(lean())])
    data = re.search(r'<script type="application/json" id="data">(.+?)</script>', text, re.DOTALL)
    assert data
    [panel] = json.loads(data[1])["panels"]
    assert panel["sms"] == [2, 0, 3, 1]
    marks = [panel["marks"][at : at + 10] for at in range(0, len(panel["marks"]), 10)]
    assert marks[0] == [0, 0, 0, 1, 0, 20, 0, 0, -1, 1]
    # The reduction: kind 3, row 1, from 30 to 40 us, CTA 1, output tile 1.
    assert [3, 1, 0, 1, 30, 40, 0, 1, 1, 1] in marks
    assert len(marks) == 9


def test_the_page_says_what_was_measured() -> None:
    measured, predicted = html_text([Panel(lean())]), html_text([Panel(lean(source="predicted"))])
    assert "measured on NVIDIA H200" in measured
    assert "nothing was measured" not in measured
    assert "Predicted by the performance model for NVIDIA H200; nothing was measured." in predicted
    assert 'content="default-src &#39;none&#39;' in measured or "default-src 'none'" in measured


def test_names_are_only_text() -> None:
    text = html_text([Panel(lean(kernel=HOSTILE, gpu=HOSTILE, config={HOSTILE: HOSTILE}))])
    assert HOSTILE not in text
    assert text.count("<script") == 2
    assert "<img" not in text


def test_too_many_spans_are_merged_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(html, "MOST_MARKS", 500)
    panel = Panel(timeline(cta(0, 0, *(tiles(n, n / 100, (n + 1) / 100) for n in range(4000)))))
    context = page_context([panel])
    [drawn] = context["page"]["panels"]
    assert len(drawn["marks"]) / 10 <= 500
    [note] = context["notes"]
    assert note.startswith("lean: 4,001 CTAs and spans are drawn as ")
    assert "as one; the trace file for Perfetto has them all" in note
    assert page_context([Panel(lean())])["notes"] == []


def test_files_are_written_whole(tmp_path: Path) -> None:
    panels = [Panel(lean()), Panel(fixed_split())]
    paths = write_trace(panels, tmp_path / "new" / "folder", ["json", "html"])
    assert [path.name for path in paths] == ["trace.json", "trace.html"]
    assert json.loads(paths[0].read_text(encoding="utf-8"))["displayTimeUnit"] == "ns"
    assert paths[1].read_text(encoding="utf-8").startswith("<!doctype html>")
    assert {path.name for path in paths[0].parent.iterdir()} == {"trace.html", "trace.json"}


def test_bad_formats_and_folders_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"format 'png' .* html, json"):
        write_trace([Panel(lean())], tmp_path, ["png"])
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"write .*file .*: choose another folder with --out"):
        write_trace([Panel(lean())], tmp_path / "file")
