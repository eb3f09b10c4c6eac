"""Timelines of the CTAs of a call, recorded by an instrumented build."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from leanbench.core.config import KernelConfig
from leanbench.core.decomposition import TileGrid
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.inputs import AttentionInputs
from leanbench.core.kernel import Kernel, TracedCall
from leanbench.core.problem import AttentionProblem
from leanbench.core.timeline import CtaTimeline, Timeline
from leanbench.measure.timing import capture, time_launches

if TYPE_CHECKING:
    import torch

#: Number of recorded launches. The one of median duration is returned.
_RECORDED = 9
#: Minimum launches per replay, and recorded ones at its end. These start as in the middle of a
#: sequence: the GPU is awake, and their buffer is not in the L2 if buffers rotate.
_LAUNCHES_PER_REPLAY = 8
_RECORDED_PER_REPLAY = 3
#: Limits of ||traced - plain|| / ||plain||. The two builds may round at different places.
_SAME_OUTPUT = 1e-3
_SAME_LSE = 1e-5
#: Reads of the timer that determine its step. They take many microseconds, steps one at most.
_TIMER_READS = 16384


def record_timeline(
    problem: AttentionProblem,
    kernel: Kernel,
    config: KernelConfig | None,
    buffers: Sequence[AttentionInputs],
    spec: GpuSpec,
    latency_us: float | None = None,
) -> Timeline | None:
    """Record several launches in the middle of a sequence. Return the one of median duration, or
    None if the kernel has no instrumented build.

    Args:
        buffers: Inputs to rotate over, enough for a cold L2.
        latency_us: Latency of the plain kernel, for the timeline.

    Raises:
        RuntimeError: The instrumented build has other outputs than the plain one.
    """
    calls = traced_calls(kernel, config, buffers)
    if calls is None:
        return None
    check_same_output(kernel, config, buffers[0], calls[0])
    traced_us = time_launches([call.launch for call in calls]).median_us
    recorded = recorded_launches(calls)
    ctas = median_launch(recorded, ends_us(recorded))
    return timeline_of(problem, kernel, config, buffers[0], spec, ctas, latency_us, traced_us)


def timeline_of(
    problem: AttentionProblem,
    kernel: Kernel,
    config: KernelConfig | None,
    inputs: AttentionInputs,
    spec: GpuSpec,
    ctas: tuple[CtaTimeline, ...],
    latency_us: float | None,
    traced_us: float,
) -> Timeline:
    """Make the timeline of a launch that was recorded on the GPU of `inputs`."""
    return Timeline(
        kernel=kernel.name,
        problem=problem,
        config=config.to_dict() if config else None,
        source="measured",
        gpu=spec.product,
        sms=spec.sms,
        output_tiles=TileGrid.of(problem, problem.max_context).output_tiles,
        ctas=ctas,
        latency_us=latency_us,
        traced_latency_us=traced_us,
        tick_ns=timer_tick_ns(inputs.q.device),
    )


def traced_calls(
    kernel: Kernel, config: KernelConfig | None, buffers: Sequence[AttentionInputs]
) -> list[TracedCall] | None:
    """Prepare a call of the instrumented build for each buffer; None if there is no such build."""
    calls: list[TracedCall] = []
    for inputs in buffers:
        call = kernel.prepare_traced(inputs, config)
        if call is None:
            return None
        calls.append(call)
    return calls


def timer_tick_ns(device: torch.device) -> int:
    """Return the smallest step of the timer of timeline events, in nanoseconds.

    Raises:
        RuntimeError: The timer stands still.
    """
    import torch

    from leanbench.kernels.events import timer_kernel

    times = torch.zeros(_TIMER_READS, dtype=torch.int64, device=device)
    with torch.cuda.device_of(times):
        timer_kernel[(1,)](times, _TIMER_READS, num_warps=1)
    steps = times.diff()
    steps = steps[steps > 0]
    if not len(steps):
        raise RuntimeError(f"the GPU's timer did not step during {_TIMER_READS} reads of it")
    return int(steps.min())


def recorded_launches(calls: Sequence[TracedCall]) -> list[tuple[CtaTimeline, ...]]:
    """Record the CTAs of several launches, each in the middle of a sequence."""
    graph = capture(
        [call.launch for call in calls], len(calls) * -(-_LAUNCHES_PER_REPLAY // len(calls))
    )
    recorded: list[tuple[CtaTimeline, ...]] = []
    while len(recorded) < _RECORDED:
        graph.replay()
        recorded += [call.read() for call in calls[-_RECORDED_PER_REPLAY:]]
    return recorded


def ends_us(recorded: Sequence[tuple[CtaTimeline, ...]]) -> list[float]:
    """Return the end of the last CTA of each launch."""
    return [max(cta.end_us for cta in ctas) for ctas in recorded]


def median_launch(
    recorded: Sequence[tuple[CtaTimeline, ...]], durations_us: Sequence[float]
) -> tuple[CtaTimeline, ...]:
    """Return the CTAs of the launch of median duration."""
    order = sorted(range(len(recorded)), key=durations_us.__getitem__)
    return recorded[order[len(order) // 2]]


def check_same_output(
    kernel: Kernel, config: KernelConfig | None, inputs: AttentionInputs, traced: TracedCall
) -> None:
    """Compare the outputs of the instrumented build with those of the plain one.

    Raises:
        RuntimeError: They differ.
    """
    import torch

    launch = kernel.prepare(inputs, config)
    inputs.poison()
    launch()
    out, lse = inputs.out.double(), inputs.lse.clone()
    inputs.poison()
    traced.launch()
    difference = (inputs.out.double() - out).norm() / out.norm()
    # Not `>`: a NaN in an unwritten output must fail.
    if not difference.item() <= _SAME_OUTPUT or not torch.allclose(
        inputs.lse, lse, rtol=_SAME_LSE, atol=_SAME_LSE
    ):
        raise RuntimeError(
            f"the instrumented build of {kernel.name} differs from the plain one by a relative"
            f" {difference.item():.1e} in the output, or in the LSE: its timeline would not be that"
            " kernel's"
        )
