"""The trace file: events have what the format asks, those of a thread nest, none is lost."""

import json
from itertools import combinations, pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from trace_examples import cta, fixed_split, lean, tiles, timeline

from leanbench.core.timeline import CtaTimeline, Timeline
from leanbench.report.trace.perfetto import perfetto_text
from leanbench.report.trace.picture import Panel


def read(*timelines: Timeline) -> dict[str, Any]:
    return json.loads(perfetto_text([Panel(timeline) for timeline in timelines]))


def events(*timelines: Timeline) -> list[dict[str, Any]]:
    return [event for event in read(*timelines)["traceEvents"] if event["ph"] == "X"]


def test_an_event_says_who_when_and_what() -> None:
    drawn = events(lean())
    recorded = {(event["args"]["cta"], event["cat"], event["ts"]): event for event in drawn}
    event = recorded[1, "reduction", 30.0]
    assert event.pop("args") == {"launch": "lean_kernel", "cta": 1, "sm": 0, "output_tile": 1}
    assert (event.pop("name"), event.pop("cat")) == ("reduction, output tile 1", "reduction")
    assert event == {"ph": "X", "pid": 1, "tid": 1, "ts": 30.0, "dur": 10.0, "cname": "black"}
    assert recorded[1, "wait", 20.0]["name"] == "wait, output tile 1"
    assert recorded[2, "tiles", 0.0]["name"] == "output tile 0"
    assert recorded[2, "cta", 0.0]["name"] == "CTA 2"
    assert len(recorded) == 3 + 6


def test_kernels_are_processes_and_lanes_of_sms_are_threads() -> None:
    named = {
        (event["pid"], event.get("tid"), event["name"]): event["args"]
        for event in read(lean(), fixed_split(source="predicted"))["traceEvents"]
        if event["ph"] == "M"
    }
    assert named[1, None, "process_name"] == {"name": "lean (measured)"}
    assert named[2, None, "process_name"] == {"name": "fixed_split (predicted)"}
    threads = [
        args["name"] for (pid, _, name), args in named.items() if pid == 2 and name == "thread_name"
    ]
    assert threads == [name for sm in range(4) for name in (f"SM {sm}", f"SM {sm}, CTA 2")]
    used = {(event["pid"], event["tid"]) for event in events(lean(), fixed_split())}
    assert used == {(pid, tid) for pid, tid, name in named if name == "thread_name"}


def test_the_file_says_what_it_shows() -> None:
    about = read(lean(), fixed_split())["otherData"]
    assert about["problem"] == "b1 h2 n4096 d64 fp16 HND"
    assert about["source"] == "measured on NVIDIA H200"
    assert about["latency_us"] == {"lean": 41.0, "fixed_split": 17.0}
    assert about["configs"]["lean"] == {"tile_tokens": 128, "num_warps": 4}


@st.composite
def any_ctas(draw: st.DrawFn) -> list[CtaTimeline]:
    ctas = []
    for number in range(draw(st.integers(1, 25))):
        times = sorted(draw(st.lists(st.floats(0, 50), min_size=2, max_size=6)))
        spans = [
            tiles(n, a, b)
            for n, (a, b) in enumerate(pairwise(times))
            if draw(st.booleans()) or n == 0
        ]
        ctas.append(cta(number, draw(st.integers(0, 3)), *spans, end_us=times[-1] + 0.001))
    return ctas


@given(any_ctas())
def test_events_of_a_thread_nest(ctas: list[CtaTimeline]) -> None:
    by_thread: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in events(timeline(*ctas)):
        assert event["dur"] >= 0
        start_ns = round(event["ts"] * 1000)
        by_thread.setdefault((event["pid"], event["tid"]), []).append(
            (start_ns, start_ns + round(event["dur"] * 1000))
        )
    for times in by_thread.values():
        for (one_start, one_end), (other_start, other_end) in combinations(times, 2):
            apart = one_end <= other_start or other_end <= one_start
            within = (one_start >= other_start and one_end <= other_end) or (
                one_start <= other_start and one_end >= other_end
            )
            assert apart or within
    assert sum(map(len, by_thread.values())) == sum(1 + len(cta.spans) for cta in ctas)
