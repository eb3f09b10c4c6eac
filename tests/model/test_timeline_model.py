"""The predicted timeline is the simulation behind the predicted latency, told CTA by CTA."""

from dataclasses import replace
from typing import Any

import pytest
from depth import examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from leanbench.core.config import TileConfig
from leanbench.core.decomposition import Schedule, Segment
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel
from leanbench.core.timeline import CtaTimeline, Span, Timeline
from leanbench.gpu.catalogue import find
from leanbench.model.calibration import calibration_for
from leanbench.model.constants import Constants
from leanbench.model.predict import predict_cell
from leanbench.model.rates import rates_for
from leanbench.model.simulate import simulate
from leanbench.model.timeline import MAX_CTAS, predict_timeline, schedule_efficiency

H200 = find("h200")
CONFIG = TileConfig(tile_tokens=128, num_warps=4, num_stages=3)
COSTS = calibration_for(H200).constants


def predicted(problem: AttentionProblem, name: str, configs: str = "default") -> Timeline:
    timeline = predict_timeline(problem, kernel(name), configs, H200)
    assert isinstance(timeline, Timeline), timeline
    return timeline


def test_one_cta_has_one_span_with_all_its_time():
    problem = AttentionProblem(1, 1, 1, 4096, 64)
    timeline = predicted(problem, "fa2_triton")
    [cta] = timeline.ctas
    row = predict_cell(problem, kernel("fa2_triton"), "default", H200)
    assert timeline.latency_us == pytest.approx(row["latency_us"])
    assert timeline.latency_us is not None
    assert (cta.launch, cta.cta, cta.sm, cta.start_us) == ("fa2_kernel", 0, 0, 0)
    # The latency counts from the launch, the timeline from the first CTA's start.
    assert cta.end_us == pytest.approx(timeline.latency_us - COSTS.launch_us)
    assert cta.spans == (Span("tiles", 0, 0, cta.end_us),)
    assert (timeline.source, timeline.gpu) == ("predicted", "NVIDIA H200")
    assert (timeline.sms, timeline.output_tiles) == (132, 1)


def test_asking_for_spans_changes_no_figure():
    problem = AttentionProblem(4, 8, 8, (1000, 2000, 4000, 100_000), 64)
    for name in ("lean_triton", "fa2_triton", "fixed_split_triton"):
        config = kernel(name).default_config(problem, H200)
        assert config is not None
        schedule: Any = kernel(name).schedule(problem, config, H200)
        plain = simulate(schedule, problem, config, H200)
        assert simulate(schedule, problem, config, H200, []) == plain


def test_the_second_launch_has_a_cta_per_query_head_and_ends_with_the_call():
    problem = AttentionProblem(2, 32, 8, (2048, 32_768), 128)
    timeline = predicted(problem, "fixed_split_triton")
    split = [cta for cta in timeline.ctas if cta.launch == "split_kernel"]
    merge = [cta for cta in timeline.ctas if cta.launch == "merge_kernel"]
    assert len(merge) == 64
    assert timeline.latency_us is not None
    assert max(cta.end_us for cta in merge) == pytest.approx(timeline.latency_us - COSTS.launch_us)
    assert min(cta.start_us for cta in merge) == pytest.approx(
        max(cta.end_us for cta in split) + COSTS.merge_launch_us
    )
    assert [cta.spans[0].output_tile for cta in merge] == [head // 4 for head in range(64)]
    assert [cta.sm for cta in merge] == list(range(64))
    assert {span.kind for cta in merge for span in cta.spans} == {"reduction"}
    # Sixteen times the context in the same number of splits: no split of it is empty, some of the
    # short one may be.
    assert merge[0].end_us <= merge[-1].end_us


def test_merges_are_by_output_tile_and_one_split_has_none():
    # 80 query heads share a KV head, 64 rows make an output tile.
    timeline = predicted(AttentionProblem(1, 160, 2, 32_768, 128), "fixed_split_triton")
    merge = [cta.spans[0].output_tile for cta in timeline.ctas if cta.launch == "merge_kernel"]
    assert timeline.output_tiles == 4
    assert merge == [0] * 64 + [1] * 16 + [2] * 64 + [3] * 16
    timeline = predicted(AttentionProblem(64, 32, 32, 4096, 64), "fixed_split_triton")
    assert timeline.config is not None
    assert timeline.config["splits"] == 1
    assert {cta.launch for cta in timeline.ctas} == {"fa2_kernel"}


def test_an_sm_is_busy_while_any_of_its_ctas_does_not_wait():
    spans = (Span("tiles", 0, 0, 4), Span("wait", 0, 4, 9), Span("reduction", 0, 9, 10))
    ctas = (CtaTimeline("k", 0, 3, 0.0, 10.0, spans), CtaTimeline("k", 1, 3, 3.0, 5.0, ()))
    timeline = replace(predicted(AttentionProblem(1, 1, 1, 4096, 64), "fa2_triton"), ctas=ctas)
    assert timeline.busy_us == {3: 6.0}
    assert timeline.sm_busy_share == pytest.approx(6 / (132 * 10))


def test_lean_keeps_every_sm_busy_and_the_best_candidate_is_the_rows():
    problem = AttentionProblem(1, 56, 56, 65_536, 64)
    lean, fa2 = predicted(problem, "lean_triton"), predicted(problem, "fa2_triton")
    # Measured: 97% (reports/h200/trace).
    assert lean.sm_busy_share > 0.95
    assert fa2.sm_busy_share == pytest.approx(56 / 132, rel=1e-3)
    assert len({cta.sm for cta in fa2.ctas}) == 56
    spans = [span for cta in lean.ctas for span in cta.spans]
    assert {span.output_tile for span in spans if span.kind == "reduction"} == {*range(56)}
    problem = AttentionProblem(1, 32, 8, 4096, 128)
    row = predict_cell(problem, kernel("lean"), "best", H200)
    timeline = predicted(problem, "lean", "best")
    assert timeline.config == row["config"]
    assert timeline.latency_us == pytest.approx(row["latency_us"], rel=0.015)
    assert schedule_efficiency(timeline, H200) == row["quantisation_efficiency"]


@pytest.mark.parametrize(
    ("problem", "name", "sentence"),
    [
        ((1, 8, 8, 4096, 64), "reference", "reference has no schedule to predict from: measure"),
        ((1, 512, 512, 1 << 21, 128), "lean", "the check) and h200 has 141.0 GB"),
        ((1 << 16, 8, 8, 64, 64), "fa2_triton", f"524288 output tiles, more than the {MAX_CTAS} C"),
    ],
)
def test_why_there_is_none(problem, name, sentence):
    predicted = predict_timeline(AttentionProblem(*problem), kernel(name), "default", H200)
    assert isinstance(predicted, str)
    assert sentence in predicted


problems = st.builds(
    lambda contexts, kv_heads, group, head_dim, q_len: AttentionProblem(
        len(contexts),
        kv_heads * group,
        kv_heads,
        tuple(contexts) if len(contexts) > 1 else contexts[0],
        head_dim,
        q_len=q_len,
    ),
    st.lists(st.integers(1, 20_000), min_size=1, max_size=5),
    st.integers(1, 40),
    st.integers(1, 8),
    st.sampled_from([64, 128]),
    st.sampled_from([1, 1, 2, 16]),
)


@given(problems, st.sampled_from(["lean_cuda", "lean_triton", "fa2_triton", "fixed_split_cuda"]))
@settings(max_examples=examples(60), deadline=None)
def test_every_timeline_is_whole(problem, name):
    """Spans are in order, every output tile is read, and nothing outlives the latency."""
    timeline = predict_timeline(problem, kernel(name), "default", H200)
    # The model does not know lean_cuda's warpgroups, which take many rows.
    assume(isinstance(timeline, Timeline) or "warpgroups" not in timeline)
    assert isinstance(timeline, Timeline), timeline
    assert timeline.latency_us is not None
    assert min(cta.start_us for cta in timeline.ctas) == 0
    assert timeline.duration_us == pytest.approx(timeline.latency_us - COSTS.launch_us)
    assert len({(cta.launch, cta.cta) for cta in timeline.ctas}) == len(timeline.ctas)
    for cta in timeline.ctas:
        times = [time for span in cta.spans for time in (span.start_us, span.end_us)]
        assert times
        times = [cta.start_us, *times, cta.end_us]
        assert times == sorted(times)
        assert 0 <= cta.sm < H200.sms
    read = {span.output_tile for cta in timeline.ctas for span in cta.spans if span.kind == "tiles"}
    assert read == set(range(timeline.output_tiles))
    assert 0 < timeline.sm_busy_share <= 1


def test_a_host_block_waits_and_merges() -> None:
    """The host block has one LeanTile of ten, so it waits for the other part."""
    problem = AttentionProblem(1, 1, 1, 1280, 64)
    segments = (Segment(0, 0, 1, 10, 10), Segment(1, 0, 0, 1, 10))
    played: list[tuple[int, Span]] = []
    even = Constants(sm_spread=0.0, warm_up_us=1e-6)
    schedule = Schedule("stream_k", 2, segments)
    result = simulate(schedule, problem, CONFIG, H200, played, constants=even)
    rates = rates_for(problem, CONFIG, H200, even)
    tile_us = rates.tile_bytes / rates.cta_bytes_per_us
    beside_us = rates.first_byte_us + rates.drain_us(rates.sm_bytes_per_us)
    host_us, other_us = beside_us + tile_us, beside_us + 9 * tile_us
    merged_us = other_us + even.merge_us + 2 * rates.merge.partial_us
    by_cta = {number: [span for cta, span in played if cta == number] for number in (0, 1)}
    assert [span.kind for span in by_cta[0]] == ["tiles"]
    assert [span.kind for span in by_cta[1]] == ["tiles", "wait", "reduction"]
    assert by_cta[0][0].end_us == pytest.approx(other_us)
    times = [by_cta[1][0].start_us, *(span.end_us for span in by_cta[1])]
    assert times == pytest.approx([even.launch_us, host_us, other_us, merged_us])
    assert result.latency_us == pytest.approx(merged_us)
