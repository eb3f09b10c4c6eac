"""Two KV heads whose rows are copied as one: which calls take them, and with which settings."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from leanbench.kernels.fixed_split.cuda_configs import FixedSplitCudaConfig
from leanbench.kernels.lean.cuda import build_of
from leanbench.kernels.lean.cuda_build import CudaBuild, takes_head_pairs
from leanbench.kernels.lean.cuda_heuristic import cuda_config
from leanbench.kernels.lean.cuda_schedule import cuda_schedule

from leanbench.compile.nvrtc import compile_cuda
from leanbench.core.errors import DoesNotFit
from leanbench.core.inputs import make_inputs
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel
from leanbench.gpu.catalogue import find

H200, LEAN = find("h200"), kernel("lean_cuda")
PLAIN = AttentionProblem(8, 64, 8, 16_384, 64, "bf16", "NHD", kv_dtype="e4m3")
#: Of a few tokens.
SMALL = AttentionProblem(2, 32, 4, 100, 64, "bf16", "NHD", kv_dtype="e4m3")
PAIRS = cuda_config(32, 8, 2, 1, 1, 16, "bulk", 1, True)
#: Kinds that it is right with, which tests/kernels/test_head_pairs_on_cpu.py computes.
TAKEN: dict[str, dict[str, Any]] = {
    "e4m3": {},
    "e5m2": {"kv_dtype": "e5m2"},
    "fp16": {"dtype": "fp16"},
    "no scales": {"scaled": False},
    "fp8 queries": {"q_dtype": "e4m3"},
    "pages of 16": {"page_size": 16},
    "pages of 64": {"page_size": 64},
    "pages of 1": {"page_size": 1},
    "lengths on the device": {"lengths_on": "device"},
    "ragged": {"context": (100, 7), "lengths_on": "device"},
    "sinks": {"sinks": True},
    "ALiBi": {"alibi": True},
    "soft cap": {"softcap": 30.0},
    "window": {"window_left": 20},
    "attention chunk": {"attention_chunk": 32},
    "left padding": {"leftpad": True},
    "rows of the cache": {"batch_idx": True},
}
NOT_TAKEN: dict[str, dict[str, Any]] = {
    "16 bits": {"kv_dtype": "same"},
    "head-major": {"kv_layout": "HND"},
    "head_dim 128": {"head_dim": 128},
    "V of another head_dim": {"v_head_dim": 32},
    "groups of 4": {"q_heads": 16},
    "groups of 16": {"q_heads": 64},
    "an odd number of KV heads": {"q_heads": 24, "kv_heads": 3},
    "two query tokens": {"q_len": 2},
    "packed queries": {"q_lens": (1, 1)},
    "appended tokens": {"append": 1},
    "scales of pages": {"page_size": 16, "page_scales": "page"},
    "scales of pages and heads": {"page_size": 16, "page_scales": "page-head"},
}


@pytest.mark.parametrize("kind", TAKEN)
def test_calls_that_take_pairs_of_heads(kind: str) -> None:
    problem = replace(SMALL, **TAKEN[kind])
    assert takes_head_pairs(problem)
    config = replace(LEAN.default_config(problem, H200), tile_rows=16)
    expected = CudaBuild.of(problem, config)
    assert (expected.heads_of_row, expected.group_size, expected.rows) == (2, 16, 16)
    inputs = make_inputs(problem, "cpu")
    # Sinks of tensors are fp32.
    assert replace(build_of(inputs, config), sinks=expected.sinks) == expected
    # Fewer rows, which is how one head to a row is asked for.
    single = build_of(inputs, replace(config, tile_rows=8))
    assert (single.heads_of_row, single.group_size, single.rows) == (1, 8, 8)


@pytest.mark.parametrize("kind", NOT_TAKEN)
def test_calls_that_keep_one_head_to_a_row(kind: str) -> None:
    problem = replace(SMALL, **NOT_TAKEN[kind])
    assert not takes_head_pairs(problem)
    build = build_of(make_inputs(problem, "cpu"), PAIRS)
    assert build.heads_of_row == 1
    assert build == CudaBuild.of(problem, PAIRS)
    if problem.group_size == 8 and problem.q_len == 1:
        assert build.rows == LEAN.default_config(problem, H200).tile_rows == 8


def test_heads_that_do_not_lie_side_by_side() -> None:
    """Of K, of V, or both; and GPUs that share sequences."""
    inputs = make_inputs(SMALL, "cpu")
    assert build_of(inputs, PAIRS).heads_of_row == 2
    wide = make_inputs(replace(SMALL, kv_heads=8, q_heads=64), "cpu")
    every_other = {name: getattr(wide, name)[:, :, ::2] for name in ("k_cache", "v_cache")}
    for names in (("k_cache",), ("v_cache",), ("k_cache", "v_cache")):
        apart = replace(inputs, **{name: every_other[name] for name in names})
        assert apart.k_cache.shape == inputs.k_cache.shape
        build = build_of(apart, PAIRS)
        assert (build.heads_of_row, build.group_size, build.rows) == (1, 8, 8)
    shared: Any = SimpleNamespace(ranks=2)
    build = build_of(replace(inputs, peers=shared), PAIRS)
    assert (build.heads_of_row, build.peers) == (1, 2)
    assert not takes_head_pairs(replace(SMALL, parallel="cp:2"))
    # Half of the heads of a larger cache lie side by side.
    half = {name: getattr(wide, name)[:, :, 2:6] for name in ("k_cache", "v_cache")}
    assert build_of(replace(inputs, **half), PAIRS).heads_of_row == 2


def test_equal_splits_and_fixed_runs_keep_one_head_to_a_row() -> None:
    settings = {
        name: value
        for name, value in PAIRS.to_dict().items()
        if name not in ("implementation", "min_tiles_per_cta", "align_grid")
    }
    inputs = make_inputs(SMALL, "cpu")
    for config in (
        replace(PAIRS, fixed_run_tiles=4),
        FixedSplitCudaConfig(**settings, splits=2),
        LEAN.batch_invariant_config(SMALL, H200),
    ):
        for build in (build_of(inputs, config), CudaBuild.of(SMALL, config)):
            assert (build.heads_of_row, build.rows) == (1, 8)


def test_builds_of_pairs_refuse_what_they_do_not_take() -> None:
    single = replace(PAIRS, tile_rows=8)
    assert CudaBuild.of(SMALL, single).of_head_pairs() == CudaBuild.of(SMALL, PAIRS)
    for kind in (
        {"q_heads": 16},
        {"kv_dtype": "same"},
        {"append": 1},
        NOT_TAKEN["scales of pages"],
    ):
        with pytest.raises(DoesNotFit, match="two KV heads"):
            CudaBuild.of(replace(SMALL, **kind), single).of_head_pairs()


@pytest.mark.parametrize(
    ("batch", "context", "axes", "settings"),
    [
        # Chunk, warps, stages, CTAs of an SM and of a cluster, rows.
        (8, 16_384, {}, (64, 4, 3, 1, 2, 16)),
        (16, 16_384, {}, (64, 4, 3, 1, 2, 16)),
        (8, 16_384, {"kv_dtype": "e5m2", "page_size": 64}, (64, 4, 3, 1, 2, 16)),
        (8, 4096, {}, (32, 8, 2, 1, 1, 16)),
        (8, 4096, {"page_size": 16}, (32, 8, 2, 1, 1, 16)),
        # Too few bytes, with too few output tiles.
        (8, 1024, {}, (32, 8, 2, 1, 1, 8)),
        # 64 output tiles of 67 MB: not half of the SMs.
        (16, 4096, {}, (64, 4, 3, 1, 2, 16)),
        (64, 2048, {}, (32, 4, 2, 2, 1, 16)),
        (64, 300, {}, (32, 4, 2, 2, 1, 16)),
        (64, 16_384, {"window_left": 127, "sinks": True}, (32, 4, 2, 2, 1, 16)),
        (16, 8192, {"q_heads": 16, "kv_heads": 2}, (32, 8, 2, 1, 1, 16)),
        # Four output tiles.
        (1, 8192, {}, (32, 8, 2, 1, 1, 8)),
        (1, 65_536, {}, (64, 4, 3, 1, 2, 16)),
        (1, 8192, {"lengths_on": "device"}, (64, 4, 3, 1, 2, 16)),
        (8, 16_384, {"lengths_on": "device"}, (32, 8, 2, 1, 1, 16)),
        (29, 2048, {"lengths_on": "device"}, (32, 8, 2, 1, 1, 16)),
        (30, 2048, {"lengths_on": "device"}, (32, 4, 2, 2, 1, 16)),
        (64, 2048, {"lengths_on": "device"}, (32, 4, 2, 2, 1, 16)),
        (8, 4096, {"page_size": 1}, (32, 8, 2, 1, 1, 16)),
        (64, 4096, {"page_size": 1}, (32, 4, 2, 2, 1, 16)),
        # A context or a window of one LeanTile, and where pairs are not taken.
        (8, 128, {}, (32, 4, 2, 2, 1, 8)),
        (64, 128, {}, (32, 4, 2, 2, 1, 16)),
        (8, 16_384, {"window_left": 127, "sinks": True}, (32, 4, 2, 2, 1, 8)),
        (8, 900, {"window_left": 127, "lengths_on": "device"}, (32, 4, 2, 2, 1, 8)),
        (8, 900, {"window_left": 128, "lengths_on": "device"}, (32, 8, 2, 1, 1, 16)),
        (8, 16_384, {"kv_layout": "HND"}, (64, 4, 3, 1, 2, 8)),
        (8, 16_384, {"lengths_on": "device", "append": 1}, (32, 4, 2, 2, 1, 8)),
        (8, 16_384, {"page_size": 64, "page_scales": "page"}, (64, 4, 3, 1, 2, 8)),
    ],
)
def test_settings(
    batch: int, context: int, axes: dict[str, Any], settings: tuple[int, ...]
) -> None:
    problem = replace(PLAIN, batch=batch, context=context, **axes)
    chosen = LEAN.default_config(problem, H200)
    build = chosen.chunk_tokens, chosen.num_warps, chosen.num_stages, chosen.ctas_per_sm
    assert (*build, chosen.cluster_size, chosen.tile_rows) == settings
    assert CudaBuild.of(problem, chosen).fits(H200)
    assert CudaBuild.of(problem, chosen).heads_of_row == chosen.tile_rows // 8
    assert chosen in LEAN.candidate_configs(problem, H200)


def test_gpus_before_hopper_keep_one_head_to_a_row() -> None:
    for lengths_on in ("host", "device"):
        problem = replace(PLAIN, lengths_on=lengths_on)
        assert LEAN.default_config(problem, find("a100-sxm4-80gb")).tile_rows == 8


def test_both_ways_are_tuned() -> None:
    space = LEAN.tuning_space(PLAIN, H200)
    assert {config.tile_rows for config in space} == {8, 16}
    assert {config.tile_rows for config in LEAN.tuning_space(replace(PLAIN, append=1), H200)} == {8}


@pytest.mark.parametrize("lengths_on", ["host", "device"])
def test_a_schedule_of_half_as_many_output_tiles(lengths_on: str) -> None:
    problem = replace(PLAIN, lengths_on=lengths_on)
    schedule = cuda_schedule(problem, LEAN.default_config(problem, H200), H200)
    assert schedule is not None
    walked = [(each.output_tile, each.last - each.first) for each in schedule.segments]
    # 8 sequences x 4 pairs of heads, 128 LeanTiles each.
    for output_tile in range(32):
        assert sum(count for tile, count in walked if tile == output_tile) == 128
    assert max(tile for tile, _ in walked) == 31


@pytest.mark.parametrize("context", [8192, 16_384])
def test_builds_that_are_chosen_spill_nothing(context: int) -> None:
    problem = replace(PLAIN, context=context, batch=16 if context > 8192 else 8)
    chosen = LEAN.default_config(problem, H200)
    binary = compile_cuda(CudaBuild.of(problem, chosen).source((9, 0)))
    assert binary.spilled_registers == 0
