"""Text next to a timeline, the same in every format."""

from __future__ import annotations

from leanbench.core.timeline import Timeline
from leanbench.report.trace.picture import Panel

#: Smaller shares round to 0.0%.
_VISIBLE = 0.0005


def source_words(timeline: Timeline) -> str:
    """``measured on NVIDIA H200``, or that nothing was measured."""
    if timeline.source == "measured":
        return f"measured on {timeline.gpu}"
    return f"predicted for {timeline.gpu}, nothing was measured"


def figure_words(panel: Panel) -> list[str]:
    """One phrase a figure, what is not at hand left out."""
    figures, timeline = panel.figures, panel.timeline
    words = (
        [] if timeline.latency_us is None else [f"latency {microseconds(timeline.latency_us)} µs"]
    )
    words.append(f"SMs busy {percent(figures.busy_share)}")
    if figures.waiting_share >= _VISIBLE:
        words.append(f"waiting {percent(figures.waiting_share)}")
    if figures.reduction_share >= _VISIBLE:
        words.append(f"merging {percent(figures.reduction_share)}")
    first, last = microseconds(figures.first_end_us), microseconds(figures.last_end_us)
    words.append(f"SMs end at {first} µs" if first == last else f"SMs end at {first} to {last} µs")
    if figures.working_sms < timeline.sms:
        words.append(f"{timeline.sms - figures.working_sms} of {timeline.sms} SMs without a CTA")
    if panel.quantisation_efficiency is not None:
        words.append(f"quantisation efficiency {percent(panel.quantisation_efficiency)}")
    cost = instrumentation_cost(timeline)
    if cost is not None:
        words.append(f"latency with events {cost:.3f}x")
    return words


def figure_lines(panel: Panel, length: int, taken: int = 0) -> list[str]:
    """The phrases of `figure_words` in lines of at most `length`, of which the first has `taken`
    already.
    """
    lines = [""]
    for phrase in figure_words(panel):
        if (
            lines[-1]
            and len(lines[-1]) + len(phrase) + 3 + (taken if len(lines) == 1 else 0) > length
        ):
            lines[-1] += ","
            lines.append(phrase)
        else:
            lines[-1] += f", {phrase}" if lines[-1] else phrase
    return lines


def instrumentation_cost(timeline: Timeline) -> float | None:
    """Latency of the build with timeline events over the plain one's."""
    if timeline.traced_latency_us is None or not timeline.latency_us:
        return None
    return timeline.traced_latency_us / timeline.latency_us


def config_words(timeline: Timeline) -> str:
    """``tile_tokens 128, num_warps 4``; empty without launch settings."""
    return ", ".join(f"{name} {value}" for name, value in (timeline.config or {}).items())


def microseconds(value: float) -> str:
    """Three or four digits: ``0.83``, ``57.5``, ``1610``."""
    return (
        f"{value:.0f}" if value >= 999.5 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
    )


def percent(share: float) -> str:
    return f"{100 * share:.1f}%"
