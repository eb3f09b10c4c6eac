"""Timelines measured on the GPU: real times, SMs and waits, and builds that differ only in timeline
events.
"""

from __future__ import annotations

import pytest
import torch

from leanbench.core.inputs import make_inputs
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel
from leanbench.core.timeline import Timeline
from leanbench.gpu.local import spec_of_device
from leanbench.gpu.occupancy import theoretical_occupancy
from leanbench.measure.timeline import record_timeline, timer_tick_ns

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180, method="thread")]

NAMES = ["lean_cuda", "lean_triton", "fa2", "fixed_split"]
PROBLEMS = [
    AttentionProblem(1, 56, 56, 16384, 64),
    AttentionProblem(1, 32, 8, 4096, 128, "bf16", "NHD"),
    AttentionProblem(4, 16, 4, (5000, 1, 129, 2047), 128),
    # One CTA, or cluster, has all the short ones.
    AttentionProblem(8, 16, 1, (65_536, *[100] * 7), 128),
]


def recorded(name: str, problem: AttentionProblem) -> Timeline:
    spec = spec_of_device(0)
    buffers = [make_inputs(problem, "cuda") for _ in range(3)]
    config = kernel(name).default_config(problem, spec)
    timeline = record_timeline(problem, kernel(name), config, buffers, spec)
    assert timeline is not None
    return timeline


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.label)
@pytest.mark.parametrize("name", NAMES)
def test_times_sms_and_coverage(name, problem):
    timeline = recorded(name, problem)
    assert timeline.traced_latency_us is not None
    # The events lie within a launch; between launches the GPU needs a few microseconds.
    assert 0 < timeline.duration_us < timeline.traced_latency_us + 5
    assert 0 < timeline.sm_busy_share <= 1
    assert {cta.sm for cta in timeline.ctas} <= set(range(timeline.sms))
    walked = {
        span.output_tile for cta in timeline.ctas for span in cta.spans if span.kind == "tiles"
    }
    assert walked == set(range(timeline.output_tiles))
    for cta in timeline.ctas:
        at = cta.start_us
        for span in cta.spans:
            assert at <= span.start_us <= span.end_us
            at = span.end_us
        assert at <= cta.end_us


def test_a_host_block_waits_until_the_other_parts_are_there():
    """A reduction begins after the last of the output tile's parts has been walked."""
    timeline = recorded("lean_triton", PROBLEMS[1])
    tick_us = (timeline.tick_ns or 0) / 1e3
    walked = walked_us(timeline)
    reductions = [span for cta in timeline.ctas for span in cta.spans if span.kind == "reduction"]
    assert len(reductions) == timeline.output_tiles
    for span in reductions:
        # A part arrives a moment before its CTA records it.
        assert span.start_us >= walked[span.output_tile] - max(1.0, 2 * tick_us)


def test_a_cluster_reduces_once_all_of_it_has_walked():
    """All its CTAs reduce, and waiting counts as part of it."""
    timeline = recorded("lean_cuda", PROBLEMS[1])
    tick_us = (timeline.tick_ns or 0) / 1e3
    walked = walked_us(timeline)
    reductions = [span for cta in timeline.ctas for span in cta.spans if span.kind == "reduction"]
    assert len(reductions) == len(timeline.ctas) > timeline.output_tiles
    for span in reductions:
        assert span.end_us >= walked[span.output_tile] - tick_us


def walked_us(timeline: Timeline) -> dict[int, float]:
    """Return the end of the last part's walk for each output tile."""
    ends_us: dict[int, float] = {}
    for cta in timeline.ctas:
        for span in cta.spans:
            if span.kind == "tiles":
                ends_us[span.output_tile] = max(ends_us.get(span.output_tile, 0.0), span.end_us)
    return ends_us


def test_merges_start_after_all_splits_have_ended():
    timeline = recorded("fixed_split_triton", PROBLEMS[1])
    splits = [cta for cta in timeline.ctas if cta.launch == "split_kernel"]
    merges = [cta for cta in timeline.ctas if cta.launch == "merge_kernel"]
    assert len(merges) == 32
    assert min(cta.start_us for cta in merges) >= max(cta.end_us for cta in splits)


def test_the_timer_ticks():
    assert 1 <= timer_tick_ns(torch.device("cuda")) <= 2000


@pytest.mark.parametrize("name", NAMES)
def test_resources(name):
    problem, spec = PROBLEMS[0], spec_of_device(0)
    inputs = make_inputs(problem, "cuda")
    config = kernel(name).default_config(problem, spec)
    assert config is not None
    taken = kernel(name).resources(inputs, config)
    assert len(taken) == (2 if name == "fixed_split" and config.splits != 1 else 1)
    assert taken[0].num_warps == config.num_warps
    for resources in taken:
        assert 16 <= resources.registers_per_thread <= 255
        assert 0 <= resources.shared_bytes <= spec.shared_kb_per_cta * 1024
        assert resources.ctas >= 1
        assert 0 < theoretical_occupancy(resources, spec).share <= 1
