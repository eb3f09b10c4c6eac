"""Parts of a launch's time: of a timeline, measured or predicted, and of a row by the model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields

from leanbench.core.config import KernelConfig, TileConfig
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.kernel import Kernel
from leanbench.core.parallel import NONE
from leanbench.core.problem import MAX_Q_LEN, AttentionProblem
from leanbench.core.timeline import Span, Timeline
from leanbench.model.predict import AXES, refusal
from leanbench.model.simulate import fits, simulate

#: Segments above which a play takes longer than a picture is worth.
_MOST_SEGMENTS = 20_000


@dataclass(frozen=True)
class Parts:
    """Parts of a launch in the order of time. They add up to its latency."""

    #: Before the first CTA starts, and after the last one ends.
    launch_us: float
    #: The first bytes are on their way, and memory is not at its full rate yet. 0 in a measured
    #: timeline, where it is a part of `read_us`.
    ramp_us: float
    #: Reading K and V, with the arithmetic behind it.
    read_us: float
    #: Mean time in which an SM with work has read all of it, and another still reads.
    tail_us: float
    #: After the last byte: partials that are waited for and merged, and a second launch.
    merge_us: float

    @property
    def latency_us(self) -> float:
        return sum(astuple(self))

    @property
    def by_name(self) -> dict[str, float]:
        """Parts that are not 0 to one decimal: ``{"launch": 0.6, "read": 7.6}``."""
        named = {
            field.name.removesuffix("_us"): getattr(self, field.name) for field in fields(self)
        }
        return {name: us for name, us in named.items() if us >= 0.05}

    def scaled(self, latency_us: float) -> Parts:
        """Return the same shares of another latency."""
        factor = latency_us / self.latency_us
        return Parts(*(part * factor for part in astuple(self)))


def parts_of(timeline: Timeline) -> Parts | None:
    """Cut a timeline; None without a latency or without work.

    A measured one is that of the instrumented kernel, whose launch takes as long.
    """
    latency_us = timeline.traced_latency_us or timeline.latency_us
    spans = [(cta.sm, span) for cta in timeline.ctas for span in cta.spans]
    if latency_us is None or not any(span.kind == "tiles" for _, span in spans):
        return None
    return _cut(spans, 0.0, max(latency_us, timeline.duration_us), timeline.duration_us)


def predict_parts(
    problem: AttentionProblem, kernel: Kernel, config: KernelConfig | None, spec: GpuSpec
) -> Parts | None:
    """Cut the model's latency of a launch; None if the model cannot play it."""
    known = not problem.special.keys() - AXES and problem.q_len <= MAX_Q_LEN
    if not known or problem.parallel != NONE or not isinstance(config, TileConfig):
        return None
    schedule = kernel.schedule(problem, config, spec)
    if schedule is None or len(schedule.segments) > _MOST_SEGMENTS:
        return None
    if refusal(kernel, config, spec) is not None or not fits(problem, config, spec):
        return None
    played: list[tuple[int, Span]] = []
    simulation = simulate(schedule, problem, config, spec, played)
    sms = {cta.cta: cta.sm for cta in simulation.ctas}
    spans = [(sms[cta], span) for cta, span in played]
    if not any(span.kind == "tiles" for _, span in spans):
        return None
    start_us = min(cta.start_us for cta in simulation.ctas)
    cut = _cut(spans, start_us, simulation.latency_us, simulation.latency_us)
    ramp_us = min(cut.read_us, simulation.ramp_us)
    return Parts(cut.launch_us, ramp_us, cut.read_us - ramp_us, cut.tail_us, cut.merge_us)


def _cut(
    spans: Iterable[tuple[int, Span]], start_us: float, latency_us: float, end_us: float
) -> Parts:
    """Cut the time of a launch.

    Args:
        spans: Spans with their SMs.
        start_us: Start of the first CTA.
        end_us: End of the last one, or of the launch.
    """
    read_by_sm: dict[int, float] = {}
    for sm, span in spans:
        if span.kind == "tiles":
            read_by_sm[sm] = max(span.end_us, read_by_sm.get(sm, 0.0))
    last_us = max(read_by_sm.values())
    # Rounding of the mean makes no negative time.
    tail_us = max(0.0, last_us - sum(read_by_sm.values()) / len(read_by_sm))
    return Parts(
        launch_us=latency_us - end_us + start_us,
        ramp_us=0.0,
        read_us=last_us - start_us - tail_us,
        tail_us=tail_us,
        merge_us=end_us - last_us,
    )
