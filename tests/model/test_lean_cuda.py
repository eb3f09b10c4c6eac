"""What the model knows of lean.cu, by hand and against the runs that it was not fitted to."""

from dataclasses import replace
from pathlib import Path

import pytest
from leanbench.kernels.lean import cuda_build
from leanbench.kernels.lean.cuda_schedule import MERGE_AT_ONCE
from leanbench.kernels.lean.cuda_settings import cuda_config

from leanbench.core.config import TileConfig
from leanbench.core.decomposition import Schedule, Segment
from leanbench.core.errors import UserError
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernels
from leanbench.gpu.catalogue import find
from leanbench.model import lean_cuda
from leanbench.model.constants import Constants, LeanCudaConstants
from leanbench.model.engine import Packing, work_of
from leanbench.model.predict import predict_cell, predict_latency_us
from leanbench.model.rates import Merge, Rates, tree_levels

H200, A100 = find("h200"), find("a100")
LEAN_CUDA = kernels()["lean_cuda"]
BUILD = (Path(cuda_build.__file__).parent / "build.cuh").read_text(encoding="utf-8")
#: Round figures, so that what follows from them can be worked out by hand.
COSTS = LeanCudaConstants(
    bandwidth_share=1.0,
    line_share=0.5,
    start_us=0.5,
    lengths_us=0.6,
    lengths_batch_us=0.05,
    segment_us=0.25,
    end_number_us=0.001,
    cluster_us=0.75,
    dram_latency_us=0.5,
    # 0.4 at head_dim 128.
    chunk_us=0.24,
    chunk_depth_us=0.02,
    chunk_rows_us=0.05,
    page_us=0.1,
    warp_share=0.2,
    # 10^15 bytes a second: no limit.
    sm_bytes_per_clock=1e9 / 1980,
    l2_bandwidth_ratio=10.0,
    reread_share=0.5,
    merge_number_us=0.008,
)
CONSTANTS = Constants(launch_us=0.6, first_read_us=0.4, lean_cuda=COSTS)


def config(**settings: int | bool) -> TileConfig:
    made = cuda_config(32, 4, 2, 1, 1, 8, "bulk", 1, True)
    return replace(made, **settings)


def scheduled(problem: AttentionProblem, settings: TileConfig) -> Schedule:
    schedule = LEAN_CUDA.schedule(problem, settings, H200)
    assert schedule is not None
    return schedule


def rates(problem: AttentionProblem, settings: TileConfig) -> Rates:
    return lean_cuda.lean_cuda_rates(
        problem, settings, scheduled(problem, settings), H200, CONSTANTS
    )


def heads(count: int, context: int = 65_536, group: int = 1) -> AttentionProblem:
    return AttentionProblem(1, count * group, count, context, 128)


def test_reads_rows_pages_and_warps_of_a_cta():
    # Two chunks of 32 x 128 x 2 numbers for each of 4 warps, in (0.5 + 0.4) us.
    chunks = 4 * 32 * 128 * 2 * 2
    # With more of them on their way the arithmetic is the limit.
    for stages, bytes_per_us in ((2, 2 * chunks / 0.9), (3, chunks / 0.4)):
        own = rates(heads(8), config(num_stages=stages))
        assert own.cta_bytes_per_us == pytest.approx(bytes_per_us, rel=1e-6)
    of_8, of_16 = (rates(heads(8, group=rows), config(tile_rows=rows)) for rows in (8, 16))
    # 8 rows more: 2 blocks of 16 tokens x 2 columns of 64 numbers.
    assert (of_8.compute_us, of_16.compute_us) == pytest.approx((0.4, 0.4 + 4 * 0.05))
    paged = replace(heads(8), page_size=64)
    assert rates(paged, config()).compute_us == pytest.approx(0.5)
    # 8 warps want 1.6 of an SM.
    many = config(chunk_tokens=16, num_warps=8)
    assert rates(heads(8), many).compute_us == pytest.approx(0.4 * 1.6)


def test_a_cluster_is_one_cta_of_as_many_sms():
    alone, pair = rates(heads(8), config()), rates(heads(8), config(cluster_size=2))
    assert (alone.sms, pair.sms) == (132, 66)
    assert rates(heads(8), config(cluster_size=8)).sms == 15
    for name in ("cta_bytes_per_us", "sm_bytes_per_us", "tile_bytes"):
        assert getattr(pair, name) == pytest.approx(2 * getattr(alone, name))
    assert pair.gpu_bytes_per_us == alone.gpu_bytes_per_us == pytest.approx(4.8e6)
    # The end of a segment: 128 numbers of one row, and the cluster's wait.
    assert (alone.segment_us, pair.segment_us) == pytest.approx((0.378, 1.128))
    assert alone.first_byte_us == pytest.approx(0.6 + 0.4 + 0.5 + 0.378)
    # A partial's 128 numbers are shared by 4 and by 8 warps.
    assert (alone.merge.partial_us, pair.merge.partial_us) == pytest.approx((0.256, 0.128))
    assert lean_cuda.step_tokens(heads(8), config(cluster_size=2)) == 2 * 4 * 32


def test_partials_go_through_a_tree_and_fixed_runs_merge_more_at_once():
    assert [tree_levels(parts, 16) for parts in (1, 2, 16, 17, 256, 257)] == [0, 1, 1, 2, 2, 3]
    merge = Merge(once_us=0.5, partial_us=0.01, at_once=16, level_us=1.0)
    assert merge.end_us(10.0, 4) == pytest.approx(10 + 0.5 + 1 + 0.04)
    assert merge.end_us(10.0, 40) == pytest.approx(10 + 0.5 + 2 + 0.16)
    assert Merge(0.5, 0.01).end_us(10.0, 40) == pytest.approx(10 + 0.5 + 0.4)
    fixed = config(fixed_run_tiles=8)
    assert rates(heads(8), config()).merge.at_once == MERGE_AT_ONCE == 8
    assert rates(heads(8), fixed).merge.at_once == lean_cuda.MERGE_FIXED_RUNS_AT_ONCE == 16
    assert "MERGE_BITS = Build::fixed_runs ? 4 : 3;" in BUILD


def test_lengths_are_read_before_the_first_copy():
    """Half a microsecond and more, but for clusters: they copy first."""
    plain = replace(heads(8), batch=33)
    problem = replace(plain, lengths_on="device", capacity=65_536)
    for settings, added_us in ((config(), 0.65), (config(cluster_size=2), 0.0)):
        more_us = rates(problem, settings).first_byte_us - rates(plain, settings).first_byte_us
        assert more_us == pytest.approx(added_us)


def test_short_output_tiles_are_a_warp_s_each():
    """Turns of two warps have 17 and 3 tokens, then 40; both walk 70, and split tiles."""
    tokens = [17, 3, 40, 70, 20, 20]
    segments = [Segment(0, tile, 0, 1, 1) for tile in range(5)] + [Segment(0, 5, 0, 1, 2)]
    steps = Packing(tokens=64, chunk=16, warps=2).steps(segments, tokens, [1, 1, 2, 3, 1, 1])
    assert steps == [2, 0, 3, 3, 2, 1]


def test_who_packs_is_the_kernel_s_choice():
    assert "PACKED_TOKENS = 64, PACKED_TOKENS_OF_MANY = 128" in BUILD
    settings = config(chunk_tokens=16, ctas_per_sm=2)
    for batch, most in ((64, 64), (256, 128)):
        problem = AttentionProblem(batch, 32, 8, 16, 128, lengths_on="device", capacity=4096)
        schedule = scheduled(problem, settings)
        packing = lean_cuda.packing_of(problem, settings, schedule)
        assert packing == Packing(most, 16, 4)
        # As many bytes as the kernel reads where turns are full, of a chunk each.
        work = work_of(schedule, problem, 128, lean_cuda.step_tokens(problem, settings), 1, packing)
        read = sum(sum(cta.read_bytes) for cta in work)
        full = {64: 2.0, 256: 1.05}[batch]
        assert problem.kv_bytes <= read < 1.05 * full * problem.kv_bytes
        on_host = replace(problem, lengths_on="host", capacity=None)
        assert lean_cuda.packing_of(on_host, settings, schedule) is None
    alone = AttentionProblem(8, 32, 8, 16, 128, lengths_on="device", capacity=4096)
    assert lean_cuda.packing_of(alone, settings, scheduled(alone, settings)) is None


def test_output_tiles_of_one_kv_head_read_it_again_from_the_l2():
    """Group 16 in tiles of 8 rows: twice the K and V, half of it at ten times DRAM's rate where
    both tiles are split alike; elsewhere half of what exceeds the L2 comes from DRAM again.
    """
    problem = heads(8, context=8192, group=16)
    in_step = rates(problem, config()).gpu_bytes_per_us
    assert in_step == pytest.approx(4.8e6 * 2 / 1.1)
    apart = rates(problem, config(align_grid=False)).gpu_bytes_per_us
    misses = 0.5 * problem.kv_bytes / (problem.kv_bytes + 60e6)
    assert 4.8e6 * 2 / (1.1 + misses) - 1 < apart < in_step


@pytest.mark.parametrize(
    ("head_dim", "layout", "kv_heads", "lines"),
    # Two lines of 128 bytes for 160 and for 192, wherever they start; one for 128.
    [
        (80, "NHD", 4, 256 / 160),
        (96, "NHD", 4, 256 / 192),
        (64, "NHD", 4, 1.0),
        (80, "HND", 4, 1.0),
        (80, "NHD", 1, 1.0),
    ],
)
def test_rows_that_fill_lines_in_part_are_read_with_the_rest(head_dim, layout, kv_heads, lines):
    problem = AttentionProblem(1, kv_heads, kv_heads, 4096, head_dim, kv_layout=layout)
    in_vain = lines - 1
    assert rates(problem, config()).gpu_bytes_per_us == pytest.approx(4.8e6 / (1 + 0.5 * in_vain))


def test_two_kv_heads_of_a_row_are_read_together():
    """Rows of 128 bytes fill their lines; a chunk has two heads' bytes and arithmetic."""
    problem = AttentionProblem(8, 64, 8, 4096, 64, kv_layout="NHD", kv_dtype="e4m3")
    apart, together = (rates(problem, config(tile_rows=rows)) for rows in (8, 16))
    assert apart.gpu_bytes_per_us == pytest.approx(together.gpu_bytes_per_us / 1.5)
    assert (apart.tile_bytes, together.tile_bytes) == (4 * 32 * 128, 4 * 32 * 256)
    assert together.compute_us == pytest.approx(2 * apart.compute_us)


@pytest.mark.parametrize("kv_dtype", ["same", "e4m3"])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_no_call_reads_faster_than_the_memory(kv_dtype, kv_layout, head_dim):
    """With the settings that a call gets, more bytes than the L2 holds."""
    problem = AttentionProblem(16, 64, 8, 16384, head_dim, kv_layout=kv_layout, kv_dtype=kv_dtype)
    config = LEAN_CUDA.default_config(problem, H200)
    latency_us = predict_latency_us(problem, LEAN_CUDA, config, H200)
    assert problem.kv_bytes / latency_us < 1e6 * H200.bandwidth_tb_s


def test_a_ragged_batch_counts_its_ends():
    """Eight runs of 8 or 9 counted LeanTiles; two of all are ends with nothing to read."""
    problem = AttentionProblem(2, 1, 1, (1152, 7040), 128)
    schedule = scheduled(problem, config(min_tiles_per_cta=8))
    assert schedule.segments[-1].of == 10
    assert sum(segment.last - segment.first for segment in schedule.segments) == 64 + 2
    us = predict_latency_us(problem, LEAN_CUDA, config(min_tiles_per_cta=8), H200)
    assert 5 < us < 12


def test_it_is_predicted_as_itself():
    """16/1 heads x 64k x 128 was measured at 15.9 us (reports/h200/groups)."""
    problem = AttentionProblem(1, 16, 1, 65_536, 128)
    fields = predict_cell(problem, kernels()["lean"], "default", H200)
    assert fields["config"]["implementation"] == "cuda"
    assert fields["latency_us"] == pytest.approx(15.9, rel=0.15)
    again = predict_cell(problem, LEAN_CUDA, "default", H200)
    assert again["latency_us"] == fields["latency_us"]
    on_a100 = predict_cell(problem, kernels()["lean"], "default", A100)
    assert on_a100["config"]["implementation"] == "triton"


def test_where_it_is_not_calibrated_it_is_refused():
    problem = heads(8)
    fields = predict_cell(problem, LEAN_CUDA, "default", A100)
    assert fields["status"] == "unsupported"
    only = "lean_cuda is predicted for compute capability 9.0 only, a100-80gb has 8.0: "
    assert fields["reason"].startswith(f"{only}add --gpu h200, or choose lean_triton if ")
    # Triton's has no pages of 17 tokens.
    paged = AttentionProblem(1, 32, 8, 1024, 128, page_size=17)
    reason = predict_cell(paged, kernels()["fa2"], "default", A100)["reason"]
    assert reason.startswith("fa2_cuda is predicted for compute capability 9.0 only, ")
    assert reason.endswith(", or choose fa2_triton if it supports the problem")
    with pytest.raises(UserError, match=r"compute capability 9\.0 only"):
        predict_latency_us(problem, LEAN_CUDA, config(), A100)
    schedule = scheduled(problem, config())
    with pytest.raises(UserError, match="does not know lean_cuda: fit it to a run"):
        lean_cuda.lean_cuda_rates(problem, config(), schedule, H200, Constants())
    with pytest.raises(UserError, match="do not fit the shared memory of an SM of h200"):
        lean_cuda.lean_cuda_rates(problem, config(num_warps=16), schedule, H200, CONSTANTS)
