"""Parts of a launch's time."""

from dataclasses import astuple, replace
from typing import Any

import pytest

from leanbench.core.config import TileConfig
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel
from leanbench.core.timeline import CtaTimeline, Span, Timeline
from leanbench.gpu.catalogue import find
from leanbench.model.calibration import calibration_for
from leanbench.model.parts import Parts, parts_of, predict_parts
from leanbench.model.predict import predict_cell
from leanbench.model.timeline import predict_timeline
from leanbench.model.workspace import workspace_bytes

H200 = find("h200")
LONG, SHORT = AttentionProblem(1, 56, 56, 65_536, 64), AttentionProblem(1, 56, 56, 1024, 64)
TRITON = TileConfig(tile_tokens=128, num_warps=4, num_stages=3)


def predicted(problem: AttentionProblem, name: str = "lean") -> tuple[Parts, float]:
    row = predict_cell(problem, kernel(name), "default", H200)
    parts = predict_parts(problem, kernel(name), kernel(name).read_config(row["config"]), H200)
    assert parts is not None
    return parts, row["latency_us"]


@pytest.mark.parametrize("name", ["lean", "lean_triton", "fa2_triton", "fixed_split_triton"])
@pytest.mark.parametrize("problem", [LONG, SHORT], ids=["long", "short"])
def test_parts_add_up_to_the_predicted_latency(problem: AttentionProblem, name: str) -> None:
    parts, latency_us = predicted(problem, name)
    assert parts.latency_us == pytest.approx(latency_us, rel=0.01)
    assert min(astuple(parts)) >= 0
    assert parts.launch_us == pytest.approx(calibration_for(H200).constants.launch_us)


def test_a_short_launch_is_mostly_not_reading() -> None:
    (long, _), (short, _) = predicted(LONG), predicted(SHORT)
    assert long.read_us > 0.9 * long.latency_us
    assert short.read_us < 0.6 * short.latency_us
    # The ramp depends on the GPU more than on the bytes.
    assert short.ramp_us > 0.7 * long.ramp_us


def test_equal_splits_end_with_a_second_launch() -> None:
    parts, _ = predicted(LONG, "fixed_split_triton")
    assert parts.merge_us > calibration_for(H200).constants.merge_launch_us
    assert predicted(LONG, "fa2_triton")[0].merge_us == 0


def test_scaled_parts_keep_their_shares() -> None:
    parts, _ = predicted(LONG)
    double = parts.scaled(2 * parts.latency_us)
    assert astuple(double) == pytest.approx([2 * part for part in astuple(parts)])


def test_a_predicted_timeline_has_the_same_parts_but_the_ramp() -> None:
    parts, _ = predicted(LONG)
    timeline = predict_timeline(LONG, kernel("lean"), "default", H200)
    assert isinstance(timeline, Timeline)
    cut = parts_of(timeline)
    assert cut is not None
    whole = parts.launch_us, 0.0, parts.ramp_us + parts.read_us, parts.tail_us, parts.merge_us
    assert astuple(cut) == pytest.approx(whole)


def test_a_measured_timeline_is_cut_at_its_events() -> None:
    def cta(number: int, end_us: float, *more: Span) -> CtaTimeline:
        spans = (Span("tiles", 0, 0.0, end_us), *more)
        return CtaTimeline("lean", number, number, 0.0, spans[-1].end_us, spans)

    ctas = cta(0, 10.0, Span("wait", 0, 10.0, 14.0), Span("reduction", 0, 14.0, 15.0)), cta(1, 14.0)
    about: dict[str, Any] = {"source": "measured", "gpu": "NVIDIA H200", "sms": 132, "config": None}
    timeline = Timeline("lean", LONG, output_tiles=1, ctas=ctas, latency_us=17.0, **about)
    parts = parts_of(timeline)
    assert parts is not None
    assert astuple(parts) == (2.0, 0.0, 12.0, 2.0, 1.0)
    assert parts_of(replace(timeline, ctas=())) is None


@pytest.mark.parametrize(
    "problem",
    [
        AttentionProblem(1, 32, 8, 4096, 128, q_len=64),
        AttentionProblem(1, 32, 8, 4096, 128, parallel="cp:2"),
        AttentionProblem(1, 32, 8, 4096, 128, append=1),
    ],
    ids=["chunk", "shared", "append"],
)
def test_what_the_model_does_not_know_has_no_parts(problem: AttentionProblem) -> None:
    lean = kernel("lean")
    assert predict_parts(problem, lean, lean.default_config(problem, H200), H200) is None


def test_the_workspace_holds_the_partials_that_others_merge() -> None:
    """A host block keeps its own, unless a second launch merges."""
    for name, kept in (("lean_triton", 1), ("fixed_split_triton", 0)):
        config = kernel(name).default_config(LONG, H200)
        schedule = kernel(name).schedule(LONG, config, H200)
        assert schedule is not None
        split = {part.output_tile for part in schedule.segments if not part.is_whole}
        partials = schedule.partials - kept * len(split)
        held = workspace_bytes(LONG, config, schedule)
        assert held is not None
        assert (partials > 0, held % partials) == (True, 0)
    whole = kernel("fa2_triton").schedule(LONG, TRITON, H200)
    assert whole is not None
    assert workspace_bytes(LONG, TRITON, whole) == 0
    assert workspace_bytes(LONG, None, whole) is None
