"""Calls that many_rows.cu takes, with its builds and launches."""

from __future__ import annotations

from dataclasses import replace

import pytest
from depth import deep
from leanbench.kernels.lean.cuda import build_of
from leanbench.kernels.lean.cuda_build import CudaBuild, ManyRowsBuild
from leanbench.kernels.lean.cuda_schedule import even_splits, few_idle, split_limits
from leanbench.kernels.lean.cuda_settings import cuda_config, has_many_rows, many_rows_config

from leanbench.compile.nvrtc import compile_cuda
from leanbench.core.axes import parse_problem
from leanbench.core.errors import DoesNotFit, UserError
from leanbench.core.inputs import shape_only
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel
from leanbench.gpu.catalogue import find
from leanbench.model.predict import predict_cell

H200 = find("h200")
CHUNK = AttentionProblem(1, 32, 8, 32_768, 128, "bf16", q_len=128)


@pytest.mark.parametrize(
    ("axes", "rows"),
    [
        ({}, 128),
        ({"q_len": 16}, 64),
        ({"q_len": 17}, 128),
        ({"q_len": 1, "q_heads": 256}, 0),
        ({"q_len": 2}, 0),
        ({"head_dim": 64}, 128),
        ({"head_dim": 256, "page_size": 16}, 128),
        ({"head_dim": 192, "v_head_dim": 128}, 128),
        ({"head_dim": 192}, 0),
        ({"head_dim": 80}, 0),
        ({"page_size": 1}, 128),
        ({"page_size": 24, "q_len": 16}, 64),
        ({"page_size": 8, "head_dim": 80}, 0),
        ({"page_size": 8, "kv_dtype": "e4m3"}, 0),
        ({"kv_dtype": "e4m3"}, 0),
        ({"append": 128}, 0),
        ({"parallel": "cp:2", "causal": False}, 0),
        ({"q_lens": (128,)}, 128),
        ({"window_left": 1000, "sinks": True, "softcap": 20.0, "alibi": True}, 128),
    ],
)
def test_warpgroups_take_many_rows_of_what_they_can(axes, rows):
    for lengths_on in ("host", "device"):
        for build in chosen_builds(replace(CHUNK, **axes, lengths_on=lengths_on)):
            assert isinstance(build, ManyRowsBuild) == (rows > 0)
            assert rows in (0, build.rows)
            assert build.fits(H200)


def chosen_builds(problem: AttentionProblem) -> list[CudaBuild]:
    """Return the builds for lengths known and for any lengths."""
    lean = kernel("lean_cuda")
    choices = (lean.default_config, lean.any_length_config)
    return [CudaBuild.of(problem, choose(problem, H200)) for choose in choices]


@pytest.mark.parametrize(
    ("axes", "many"),
    [
        ({"q_len": 4}, False),
        ({"q_len": 5}, True),
        ({"q_len": 4, "head_dim": 256}, False),
        ({"q_len": 5, "head_dim": 256}, True),
    ],
)
@pytest.mark.parametrize("lengths_on", ["host", "device"])
def test_warpgroups_are_candidates_from_17_rows_on(axes, many, lengths_on):
    problem = replace(CHUNK, **axes, lengths_on=lengths_on)
    assert has_many_rows(problem, H200) == many
    candidates = kernel("lean_cuda").tuning_space(problem, H200)
    assert any(config.of_warpgroups for config in candidates) == many
    assert not all(config.of_warpgroups for config in candidates)


def test_other_gpus_and_batch_invariant_calls_have_rows_of_warps():
    lean = kernel("lean_cuda")
    for config in (
        lean.default_config(CHUNK, find("a100")),
        lean.default_config(CHUNK, find("b200")),
        lean.batch_invariant_config(CHUNK, H200),
    ):
        assert not isinstance(CudaBuild.of(CHUNK, config), ManyRowsBuild)
    build = CudaBuild.of(CHUNK, many_rows_config(CHUNK, H200))
    with pytest.raises(DoesNotFit, match=r"tile_rows 128 for .* 9\.0, this is 8\.0"):
        build.source((8, 0))


@pytest.mark.parametrize("axes", [{"append": 128}, {"head_dim": 80}, {"kv_dtype": "e4m3"}])
def test_settings_of_warpgroups_hold_for_other_kinds_with_rows_of_warps(axes):
    problem, config = replace(CHUNK, **axes), many_rows_config(CHUNK, H200)
    build = CudaBuild.of(problem, config)
    assert not isinstance(build, ManyRowsBuild)
    assert (build.rows, build.fits(H200)) == (32, True)
    assert build_of(shape_only(problem), config) == build


@pytest.mark.parametrize(
    ("q_len", "used", "in_step"), [(128, 128, True), (288, 72, False), (1024, 128, True)]
)
def test_row_tiles_are_in_step_where_few_ctas_idle(q_len, used, in_step):
    """32, 72 and 256 output tiles on 132 SMs."""
    assert few_idle(used, H200.sms) == in_step
    assert many_rows_config(replace(CHUNK, q_len=q_len), H200).align_grid == in_step


@pytest.mark.parametrize(
    ("axes", "ctas_per_sm"),
    [
        ({"batch": 32}, 2),
        ({"batch": 8}, 1),
        ({"batch": 16, "lengths_on": "device"}, 1),
        ({"batch": 17, "lengths_on": "device"}, 2),
        ({"batch": 32, "q_len": 17}, 1),
        ({"batch": 32, "head_dim": 256}, 1),
        ({"batch": 32, "head_dim": 64, "page_size": 16, "lengths_on": "device"}, 2),
    ],
)
def test_two_ctas_share_an_sm_by_its_output_tiles(axes, ctas_per_sm):
    problem = replace(CHUNK, **{"context": 500, "q_len": 16, **axes})
    config = many_rows_config(problem, H200)
    assert config.ctas_per_sm == ctas_per_sm
    assert CudaBuild.of(problem, config).fits(H200)


def test_settings_do_not_depend_on_what_the_host_knows():
    lean, problem = kernel("lean_cuda"), replace(CHUNK, batch=8, context=8192, q_len=16)
    config = lean.any_length_config(problem, H200)
    assert config == lean.default_config(problem, H200) == many_rows_config(problem, H200)
    assert config.cluster_size == 1


@pytest.mark.parametrize(("rows", "merge_tiles"), [(64, 4), (128, 1)])
def test_a_merge_lasts_fewer_lean_tiles_of_two_warpgroups(rows, merge_tiles):
    build = CudaBuild.of(CHUNK, cuda_config(64, rows // 16, 3, 1, 1, rows, "bulk", 1, True))
    assert split_limits(build, 128) == (2, merge_tiles)


@pytest.mark.parametrize(
    ("tiles", "most", "splits"),
    [(256, 16, (16, 16)), (235, 16, (16, 15)), (17, 16, (9, 2)), (3, 16, (3, 1))],
)
def test_splits_are_even(tiles, most, splits):
    assert even_splits(tiles, most) == splits


@pytest.mark.parametrize(("head_dim", "v_head_dim"), [deep(64, None), deep(128, None), (64, 128)])
def test_pairs_of_ctas_merge_in_their_stages(head_dim, v_head_dim):
    problem = AttentionProblem(8, 32, 8, 1500, head_dim, "bf16", q_len=7, v_head_dim=v_head_dim)
    one, two = (
        ManyRowsBuild.of(problem, cuda_config(64, 4, stages, 1, 2, 64, "bulk", 1, True))
        for stages in (1, 2)
    )
    with pytest.raises(DoesNotFit, match=r"in \d+ bytes of its stages, 1 of 64 tokens have"):
        one.source((9, 0))
    compile_cuda(two.source((9, 0)))


@pytest.mark.parametrize("lengths_on", ["host", "device"])
def test_settings_that_may_be_tuned_have_both_kernels(lengths_on):
    problem = replace(CHUNK, q_len=16, lengths_on=lengths_on)
    space = kernel("lean_cuda").tuning_space(problem, H200)
    assert space[0] == many_rows_config(problem, H200)
    assert {config.tile_rows for config in space} == {8, 16, 32, 64}
    of_warpgroups = [config for config in space if config.of_warpgroups]
    assert {config.align_grid for config in of_warpgroups} == {True, False}
    assert {config.ctas_per_sm for config in of_warpgroups} == {1, 2}


def test_shared_memory_and_partials_are_what_the_kernel_lays_out():
    """Computed by hand from rows_layout.cuh."""
    build = CudaBuild.of(CHUNK, cuda_config(128, 8, 2, 1, 1, 128, "bulk", 1, True))
    query, stage = 128 * 128 * 2, 2 * 128 * 128 * 2
    assert build.shared_bytes == query + 2 * (stage + 4 * 8)
    assert build.warps == 8 + 4
    assert CudaBuild.of(CHUNK, cuda_config(64, 4, 3, 2, 1, 64, "bulk", 1, True)).warps == 4 + 1
    # Rows in fp32, with a unit of 16 bytes for (m, l) of each.
    assert build.partial_bytes == 128 * (4 * 128 + 16)


@pytest.mark.parametrize(
    ("rows", "settings"),
    [
        (128, {"num_warps": 4, "chunk_tokens": 32, "ctas_per_sm": 2, "cluster_size": 2}),
        (128, {"fixed_run_tiles": 4}),
        # Pairs of one warpgroup.
        (64, {"cluster_size": 4, "num_warps": 8, "ctas_per_sm": 2, "copy": "async"}),
    ],
)
def test_settings_of_warps_are_refused_for_warpgroups(rows, settings):
    pairs = cuda_config(64, 4, 2, 1, 2, 64, "bulk", 1, True)
    config = many_rows_config(CHUNK, H200) if rows == 128 else pairs
    for name, value in settings.items():
        with pytest.raises(UserError, match=f"tile_rows {rows} is of warpgroups, with num_warps"):
            replace(config, **{name: value})


@pytest.mark.parametrize(("page_size", "copy"), [(1, "async"), (24, "async"), (16, "bulk")])
def test_a_warpgroup_copies_pages_that_bulk_copies_cannot_take(page_size, copy):
    for q_len, warps in ((128, 12), (16, 8 if copy == "async" else 5)):
        problem = replace(CHUNK, page_size=page_size, q_len=q_len)
        config = many_rows_config(problem, H200)
        build = CudaBuild.of(problem, config)
        assert (config.copy, build.bulk, build.warps) == (copy, int(copy == "bulk"), warps)
        bulk = CudaBuild.of(problem, replace(config, copy="bulk"))
        if copy == "async":
            with pytest.raises(DoesNotFit, match=rf"16 tokens, these have {page_size}: choose cop"):
                bulk.source((9, 0))


# Two warpgroups and one, with each mechanism once: a second or two of NVRTC each.
@pytest.mark.parametrize(
    "axes",
    [
        deep({"page_size": 1}),
        deep({"page_size": 1, "q_len": 16, "batch": 32, "context": 500}),
        deep({"page_size": 8, "q_lens": (128,)}),
        deep({"page_size": 1, "q_len": 16, "head_dim": 256}),
        {"page_size": 4, "causal": False, "window_left": 100, "window_right": 14},
    ],
    ids=str,
)
def test_copies_by_lanes_spill_nothing(axes):
    problem = replace(CHUNK, **axes)
    build = CudaBuild.of(problem, many_rows_config(problem, H200))
    resources = build.resources(compile_cuda(build.source((9, 0))), 1)
    assert resources.spilled_registers == 0
    assert 32 * build.warps * build.ctas_per_sm * resources.registers_per_thread <= 2**16


def test_an_sm_holds_two_ctas_of_one_warpgroup():
    config = many_rows_config(replace(CHUNK, q_len=16), H200)
    assert replace(config, ctas_per_sm=2).ctas_per_sm == 2
    with pytest.raises(UserError, match=r"tile_rows 64 is of warpgroups, .* ctas_per_sm up to 2"):
        replace(config, ctas_per_sm=3)


def test_the_model_says_that_it_does_not_know_warpgroups():
    row = predict_cell(replace(CHUNK, q_len=16), kernel("lean_cuda"), "default", H200)
    assert row["status"] == "unsupported"
    assert "does not know the arithmetic of warpgroups" in row["reason"]


@pytest.mark.parametrize(
    ("words", "is_many"),
    [
        # As measured: 184 us against 215 of warps, and 8.0 against 5.8.
        ("b26 h4/1 n28k d256 q8", True),
        ("b48 h56/8 n54210 d256 q8", True),
        ("b5 h16/2 n258 d128 q6 p16", False),
    ],
)
def test_latency_decides_between_warps_and_warpgroups(words, is_many):
    problem = parse_problem(words.split())
    config = kernel("lean_cuda").default_config(problem, find("h200"))
    assert config.of_warpgroups is is_many
