"""Timelines as Chrome trace events for https://ui.perfetto.dev, with every CTA and span.

A kernel is a process, and each lane of an SM a thread, because events of a thread must nest. The
format: "Trace Event Format", the Catapult project.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from leanbench.report.trace.picture import Mark, Panel, source_words

_NAMES = {
    "tiles": "output tile {}",
    "wait": "wait, output tile {}",
    "reduction": "reduction, output tile {}",
}
#: Colours of chrome://tracing for spans without an output tile's colour. Perfetto chooses its own.
_COLOR_NAMES = {"wait": "grey", "reduction": "black"}


def perfetto_text(panels: Sequence[Panel]) -> str:
    """Render the file, one event per line."""
    events = ",\n".join(json.dumps(event, separators=(",", ":")) for event in _events(panels))
    first = panels[0].timeline
    about = {
        "problem": first.problem.label,
        "source": source_words(first),
        "configs": {panel.timeline.name: panel.timeline.config for panel in panels},
        "latency_us": {panel.timeline.name: panel.timeline.latency_us for panel in panels},
    }
    return (
        f'{{"displayTimeUnit":"ns","otherData":{json.dumps(about)},"traceEvents":[\n{events}\n]}}\n'
    )


def _events(panels: Sequence[Panel]) -> Iterator[dict[str, Any]]:
    for pid, panel in enumerate(panels, 1):
        lanes = panel.lanes
        timeline = panel.timeline
        name = f"{timeline.name} ({timeline.source})"
        yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}
        yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}}
        threads = sorted({(panel.sm_order[mark.row], mark.lane) for mark in panel.marks})
        for sm, lane in threads:
            about = {"pid": pid, "tid": _thread(sm, lane, lanes)}
            thread_name = f"SM {sm}" if lane == 0 else f"SM {sm}, CTA {lane + 1}"
            yield {"ph": "M", **about, "name": "thread_name", "args": {"name": thread_name}}
            index = {"sort_index": about["tid"]}
            yield {"ph": "M", **about, "name": "thread_sort_index", "args": index}
        for mark in panel.marks:
            sm = panel.sm_order[mark.row]
            yield _event(mark, sm, pid, _thread(sm, mark.lane, lanes))


def _thread(sm: int, lane: int, lanes: int) -> int:
    """Number threads from 1: some readers take thread 0 for the idle one."""
    return 1 + sm * lanes + lane


def _event(mark: Mark, sm: int, pid: int, tid: int) -> dict[str, Any]:
    """Make a complete event, in microseconds with three decimals."""
    start_ns, end_ns = round(mark.start_us * 1000), round(mark.end_us * 1000)
    is_cta = mark.kind == "cta"
    event: dict[str, Any] = {
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "ts": start_ns / 1000,
        "dur": (end_ns - start_ns) / 1000,
        "cat": mark.kind,
        "name": f"CTA {mark.cta}" if is_cta else _NAMES[mark.kind].format(mark.output_tile),
        "args": {"launch": mark.launch, "cta": mark.cta, "sm": sm},
    }
    if mark.output_tile is not None:
        event["args"]["output_tile"] = mark.output_tile
    if mark.kind in _COLOR_NAMES:
        event["cname"] = _COLOR_NAMES[mark.kind]
    return event
