"""Two KV heads with rows copied as one: the calls that take them, and their settings."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from depth import deep, diagonal, label
from lean_on_cpu import launch_on
from leanbench.kernels.fixed_split.cuda_configs import FixedSplitCudaConfig
from leanbench.kernels.lean import cuda_driver
from leanbench.kernels.lean.cuda import build_of
from leanbench.kernels.lean.cuda_build import CudaBuild, takes_head_pairs
from leanbench.kernels.lean.cuda_schedule import cuda_schedule
from leanbench.kernels.lean.cuda_settings import cuda_config

from leanbench.compile.nvrtc import compile_cuda
from leanbench.core.errors import DoesNotFit
from leanbench.core.inputs import make_inputs
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel
from leanbench.gpu.catalogue import find

H200, LEAN = find("h200"), kernel("lean_cuda")
PLAIN = AttentionProblem(8, 64, 8, 16_384, 64, "bf16", "NHD", kv_dtype="e4m3")
PAIRS = cuda_config(32, 8, 2, 1, 1, 16, "bulk", 1, True)
#: In 16 bits, rows of 160 bytes.
PLAIN_16 = AttentionProblem(32, 32, 32, 1000, 80, "fp16", "NHD", page_size=64)
#: The same with few tokens.
SMALL = AttentionProblem(2, 32, 4, 100, 64, "bf16", "NHD", kv_dtype="e4m3")
SMALL_16 = AttentionProblem(2, 4, 4, 100, 80, "bf16", "NHD")
#: Supported features, computed by tests/kernels/test_head_pairs_on_cpu.py.
TAKEN: list[dict[str, Any]] = [
    {},
    {"dtype": "fp16"},
    {"page_size": 16},
    {"page_size": 64},
    {"page_size": 1},
    {"lengths_on": "device"},
    {"context": (100, 7), "lengths_on": "device"},
    {"sinks": True},
    {"alibi": True},
    {"softcap": 30.0},
    {"window_left": 20},
    {"attention_chunk": 32},
    {"leftpad": True},
    {"batch_idx": True},
]
TAKEN_IN_8_BITS = [{"kv_dtype": "e5m2"}, {"scaled": False}, {"q_dtype": "e4m3"}]
TAKEN_IN_16_BITS = [
    *({"q_heads": 4 * group} for group in (2, 3, 4, 8)),
    *({"head_dim": dim} for dim in (16, 32, 48, 96, 112)),
]
SCALED_PAGES = {"page_size": 16, "page_scales": "page"}
NOT_TAKEN: list[dict[str, Any]] = [
    {"kv_layout": "HND"},
    {"q_heads": 64},
    {"q_heads": 24, "kv_heads": 3},
    {"head_dim": 128},
    {"q_len": 2},
    {"q_lens": (1, 1)},
    {"append": 1},
]
NOT_TAKEN_IN_8_BITS = [
    *({"kv_dtype": "same"}, {"v_head_dim": 32}, {"q_heads": 16}),
    *(SCALED_PAGES, {**SCALED_PAGES, "page_scales": "page-head"}),
]
NOT_TAKEN_IN_16_BITS = [
    *({"kv_dtype": "e4m3"}, {"v_head_dim": 96}, {"parallel": "cp:2"}),
    *({"head_dim": dim} for dim in (8, 64, 72, 120, 160, 256)),
    {"append": 1, "rotary_dim": 32},
]


def kinds_of(
    both: list[dict[str, Any]], eight_bits: list[dict[str, Any]], sixteen_bits: list[dict[str, Any]]
) -> pytest.MarkDecorator:
    """Return a parametrization by changes of `SMALL` and of `SMALL_16`."""
    problems = [replace(SMALL, **axes) for axes in both + eight_bits]
    problems += [replace(SMALL_16, **axes) for axes in both + sixteen_bits]
    return pytest.mark.parametrize("problem", problems, ids=label)


@kinds_of(TAKEN, TAKEN_IN_8_BITS, TAKEN_IN_16_BITS)
def test_calls_that_take_pairs_of_heads(problem: AttentionProblem) -> None:
    assert takes_head_pairs(problem)
    config = replace(LEAN.default_config(problem, H200), tile_rows=16)
    expected, group = CudaBuild.of(problem, config), 2 * problem.group_size
    assert (expected.heads_of_row, expected.group_size, expected.rows) == (2, group, 16)
    assert (expected.row_count, expected.row_tiles(1)) == (group, 1)
    inputs = make_inputs(problem, "cpu")
    # Sinks of tensors are fp32.
    assert replace(build_of(inputs, config), sinks=expected.sinks) == expected
    # Fewer rows select one head per row.
    single = build_of(inputs, replace(config, tile_rows=8))
    assert (single.heads_of_row, single.group_size, single.rows) == (1, problem.group_size, 8)


@kinds_of(NOT_TAKEN, NOT_TAKEN_IN_8_BITS, NOT_TAKEN_IN_16_BITS)
def test_calls_that_keep_one_head_to_a_row(problem: AttentionProblem) -> None:
    assert not takes_head_pairs(problem)
    config = replace(PAIRS, copy="async") if problem.kv_dtype == "same" else PAIRS
    build = CudaBuild.of(problem, config)
    assert build.heads_of_row == 1
    if problem.gpus.context == 1:
        assert build_of(make_inputs(problem, "cpu"), config) == build
    if problem.kv_dtype != "same" and problem.group_size == 8 and problem.q_len == 1:
        assert build.rows == LEAN.default_config(problem, H200).tile_rows == 8


def test_heads_that_do_not_lie_side_by_side() -> None:
    """Rows of K, of V, or of both are not adjacent; or GPUs share sequences."""
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
    # Half of the heads of a larger cache are adjacent.
    half = {name: getattr(wide, name)[:, :, 2:6] for name in ("k_cache", "v_cache")}
    assert build_of(replace(inputs, **half), PAIRS).heads_of_row == 2


def test_equal_splits_and_fixed_runs_keep_one_head_to_a_row() -> None:
    left_out = ("implementation", "min_tiles_per_cta", "align_grid")
    settings = {name: own for name, own in PAIRS.to_dict().items() if name not in left_out}
    inputs = make_inputs(SMALL, "cpu")
    for config in (
        replace(PAIRS, fixed_run_tiles=4),
        FixedSplitCudaConfig(**settings, splits=2),
        LEAN.batch_invariant_config(SMALL, H200),
    ):
        for build in (build_of(inputs, config), CudaBuild.of(SMALL, config)):
            assert (build.heads_of_row, build.rows) == (1, 8)


@pytest.mark.parametrize(
    ("small", "chunk", "kinds"),
    [
        (SMALL, 32, [{"q_heads": 16}, {"q_len": 2}, {"append": 1}, SCALED_PAGES]),
        (SMALL_16, 16, [{"head_dim": 72}, {"q_len": 2}, {"head_dim": 144}]),
    ],
)
def test_builds_of_pairs_refuse_what_they_do_not_take(small, chunk, kinds) -> None:
    single = replace(PAIRS, tile_rows=8, chunk_tokens=chunk)
    pair = CudaBuild.of(small, replace(single, tile_rows=16))
    assert CudaBuild.of(small, single).of_head_pairs() == pair
    for kind in kinds:
        with pytest.raises(DoesNotFit, match="two KV heads"):
            CudaBuild.of(replace(small, **kind), single).of_head_pairs()


def test_gpus_before_hopper_keep_one_head_to_a_row() -> None:
    for lengths_on in ("host", "device"):
        for plain in (PLAIN, PLAIN_16):
            problem = replace(plain, lengths_on=lengths_on)
            assert LEAN.default_config(problem, find("a100-sxm4-80gb")).tile_rows == 8


def test_both_ways_are_tuned() -> None:
    space = LEAN.tuning_space(PLAIN, H200)
    assert {config.tile_rows for config in space} == {8, 16}
    assert {config.tile_rows for config in LEAN.tuning_space(replace(PLAIN, append=1), H200)} == {8}
    space = LEAN.tuning_space(PLAIN_16, H200)
    assert {(config.tile_rows, config.copy) for config in space} == {(8, "async"), (16, "bulk")}


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


def test_a_tensor_map_of_pairs_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver gets a pair as a head of twice the size, with strides in bytes."""
    monkeypatch.setattr(cuda_driver, "_map_modes", lambda *_: (0, 0, 0, 0, 0))
    monkeypatch.setattr(cuda_driver, "_entry_point", lambda *_: None)
    cache = make_inputs(replace(PLAIN_16, batch=2), "cpu").k_cache
    build = CudaBuild.of(PLAIN_16, replace(PAIRS, chunk_tokens=16))
    cache_map = cuda_driver.CacheMap(build)
    cache_map.resize(cache.shape, cache.stride())
    pages, token_bytes = cache.shape[0], 32 * 160
    assert list(cache_map._layout) == [160, 64, 16, pages, token_bytes, 320, 64 * token_bytes]
    # 64 numbers are a column of 128 bytes; a pair of rows has two and a half.
    assert list(cache_map._box) == [64, 16, 1, 1]


def test_parameters_of_pairs_in_16_bits() -> None:
    inputs = make_inputs(replace(PLAIN_16, batch=2), "cpu")
    launch = launch_on(inputs, replace(PAIRS, chunk_tokens=16), 132)
    params = launch.params
    assert params.kv_heads == 16
    assert params.stride_k_head == params.stride_v_head == 160
    assert params.stride_k_token == params.stride_v_token == 32 * 80
    # Address, sizes, strides, and boxes of the fake tensor map.
    assert list(params.k_map.words[1:9]) == [160, 64, 16, 32, 1, 2560, 160, 64 * 2560]
    assert list(params.k_map.words[9:12]) == [16, 2, 128]
    # Several CTAs for each pair of heads of a sequence; their partials have two rows.
    assert launch.build.partial_bytes == 8 * 2 * 80
    assert launch.slots_bytes == launch.grid * launch.build.partial_bytes
    assert launch.grid == 128


@pytest.mark.parametrize(
    "problem",
    [
        *diagonal(
            [
                replace(PLAIN_16, lengths_on=lengths_on, **axes)
                for axes in ({}, {"head_dim": 96}, {"head_dim": 112}, {"kv_heads": 8})
                for lengths_on in ("host", "device")
            ],
            keep=4,
        ),
        replace(PLAIN, context=8192),
        deep(replace(PLAIN, batch=16)),
    ],
    ids=label,
)
def test_builds_that_are_chosen_spill_nothing(problem: AttentionProblem) -> None:
    chosen = LEAN.default_config(problem, H200)
    binary = compile_cuda(CudaBuild.of(problem, chosen).source((9, 0)))
    assert binary.spilled_registers == 0
