"""Timelines of GPUs that share a problem: the same launch of a chain on each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from leanbench.core.kernel import Kernel, TracedCall
from leanbench.core.problem import AttentionProblem
from leanbench.core.timeline import Timeline
from leanbench.measure.instruments import Instruments
from leanbench.measure.ranks import Ranks
from leanbench.measure.shard import Shard, load_shard
from leanbench.measure.shared import Requests, Shared, SharedReplay, lead, prepare_shared
from leanbench.measure.timeline import (
    check_same_output,
    ends_us,
    median_launch,
    recorded_launches,
    timeline_of,
    traced_calls,
)
from leanbench.measure.timing import Launches


def trace_shared(
    instruments: Instruments, problem: AttentionProblem, kernel: Kernel, configs: str
) -> list[Timeline] | str:
    """Timelines of one launch of a chain, by rank; a sentence where there can be none.

    Raises:
        UserError, GpuUnusable: as leanbench.measure.shared.lead.
    """
    return lead(trace_on_ranks, instruments, problem, [kernel], {kernel.name: configs})


def trace_on_ranks(
    ranks: Ranks,
    instruments: Instruments,
    problem: AttentionProblem,
    kernels: Sequence[Kernel],
    requests: Requests,
) -> list[Timeline] | str:
    """What every rank does for `trace_shared`. Of the launches recorded, the one is kept in which
    the slowest GPU took the median.
    """
    (kernel,) = kernels
    shard = load_shard(ranks, instruments, problem)
    own = prepare_shared(ranks, instruments, shard, kernel, requests[kernel.name])
    if own.outcome.status is not None:
        return own.outcome.reason or ""
    calls = ranks.together(lambda: traced_calls(kernel, own.config, shard.buffers))
    if calls is None:
        return f"{kernel.name} has no instrumented build"
    ranks.together(
        lambda: check_same_output(kernel, own.config, shard.buffers[0], calls[0]), waits=True
    )
    return ranks.of_all(_recorded(ranks, instruments, problem, shard, own, calls))


def _recorded(
    ranks: Ranks,
    instruments: Instruments,
    problem: AttentionProblem,
    shard: Shard,
    own: Shared,
    calls: Sequence[TracedCall],
) -> Timeline:
    """This rank's timeline."""
    sample_ms = instruments.options.effort.sample_ms

    def latency_us(name: str, launches: Launches) -> float:
        return SharedReplay(name, ranks, launches, sample_ms).median_us()

    plain_us = latency_us("plain", own.launches)
    traced_us = latency_us("traced", [call.launch for call in calls])
    ranks.barrier()
    recorded = ranks.together(lambda: recorded_launches(calls), waits=True)
    slowest_us = [max(ends) for ends in zip(*ranks.of_all(ends_us(recorded)), strict=True)]
    ctas = median_launch(recorded, slowest_us)
    timeline = ranks.together(
        lambda: timeline_of(
            shard.problem,
            own.kernel,
            own.config,
            shard.buffers[0],
            instruments.spec,
            ctas,
            plain_us,
            traced_us,
        )
    )
    return replace(timeline, problem=problem, rank=ranks.rank)
