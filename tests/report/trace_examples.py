"""Timelines made by hand, on a GPU of four SMs, in microseconds that are easy to add."""

from functools import partial
from typing import Any

from leanbench.core.problem import AttentionProblem
from leanbench.core.timeline import CtaTimeline, Span, Timeline

PROBLEM = AttentionProblem(1, 2, 2, 4096, 64)


tiles, wait, reduction = (partial(Span, kind) for kind in ("tiles", "wait", "reduction"))


def cta(
    number: int, sm: int, *spans: Span, launch: str = "lean_kernel", end_us: float | None = None
) -> CtaTimeline:
    """Make a CTA that lasts from its first span to its last, unless given."""
    return CtaTimeline(launch, number, sm, spans[0].start_us, end_us or spans[-1].end_us, spans)


def timeline(*ctas: CtaTimeline, **fields: Any) -> Timeline:
    given: dict[str, Any] = {
        "kernel": "lean",
        "problem": PROBLEM,
        "config": {"tile_tokens": 128, "num_warps": 4},
        "source": "measured",
        "gpu": "NVIDIA H200",
        "sms": 4,
        "output_tiles": 2,
        "ctas": ctas,
        "latency_us": 41.0,
        "traced_latency_us": 42.025,
        "tick_ns": 32,
    }
    return Timeline(**{**given, **fields})


def lean(**fields: Any) -> Timeline:
    """Take three of four SMs for 40 us. CTA 1, a host block, waits from 20 us, merges from 30."""
    return timeline(
        cta(0, 2, tiles(1, 0, 20)),
        cta(1, 0, tiles(0, 0, 10), tiles(1, 10, 20), wait(1, 20, 30), reduction(1, 30, 40)),
        cta(2, 3, tiles(0, 0, 30)),
        **fields,
    )


def fixed_split(**fields: Any) -> Timeline:
    """Two CTAs to an SM for 10 us, and a second launch from 12 to 16."""
    given: dict[str, Any] = {"kernel": "fixed_split", "latency_us": 17.0, "traced_latency_us": None}
    splits = [cta(n, n % 4, tiles(n // 4, 0, 10), launch="split_kernel") for n in range(8)]
    merges = [cta(n, n, reduction(n, 12, 16), launch="merge_kernel") for n in range(2)]
    return timeline(*splits, *merges, **{**given, **fields})
