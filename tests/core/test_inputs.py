from dataclasses import replace
from typing import Any

import pytest
import torch

from leanbench.core.inputs import AttentionInputs, make_inputs, shape_only, torch_dtype
from leanbench.core.problem import AttentionProblem
from leanbench.core.row_scales import decode_rows, encode_rows, negate_rows

PROBLEM = AttentionProblem(2, 8, 4, 300, 64)
TENSORS = ("q", "k_cache", "v_cache")


def test_shapes_are_flash_attns_and_outputs_are_poisoned():
    inputs: Any = make_inputs(replace(PROBLEM, q_len=3), "cpu")
    assert inputs.q.shape == inputs.out.shape == (2, 3, 8, 64)
    assert inputs.k_cache.shape == inputs.v_cache.shape == (2, 300, 4, 64)
    assert (inputs.lse.shape, inputs.lse.dtype) == ((2, 8, 3), torch.float32)
    assert (inputs.block_table, inputs.page_size) == (None, None)
    assert inputs.out.isnan().all()
    assert inputs.lse.isnan().all()
    assert (inputs.group_size, inputs.head_dim, inputs.context) == (2, 64, 300)
    assert inputs.softmax_scale == 0.125
    assert inputs.cache_seqlens is None


@pytest.mark.parametrize(
    ("layout", "strides"),
    [("HND", (4 * 300 * 64, 64, 300 * 64, 1)), ("NHD", (300 * 4 * 64, 4 * 64, 64, 1))],
)
@pytest.mark.parametrize(("name", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_the_layout_is_in_the_strides(layout, strides, name, dtype):
    assert torch_dtype(name) == dtype
    inputs = make_inputs(replace(PROBLEM, kv_layout=layout, dtype=name), "cpu")
    assert inputs.k_cache.stride() == inputs.v_cache.stride() == strides
    assert {inputs.q.dtype, inputs.k_cache.dtype, inputs.v_cache.dtype, inputs.out.dtype} == {dtype}


def test_chosen_tokens_are_any_of_their_sequence():
    inputs: Any = make_inputs(AttentionProblem(3, 4, 2, (7, 300, 40), 64, select=40), "cpu")
    assert inputs.k_cache.shape == (347, 1, 2, 64)
    assert (inputs.context, inputs.cache_seqlens.tolist()) == (40, [7, 40, 40])
    assert inputs.block_table.shape == (3, 40)
    chosen = [*inputs.block_table[0, :7].tolist(), *inputs.block_table[1:].flatten().tolist()]
    assert len({*chosen}) == len(chosen) == 87
    assert max(chosen) > 87


def test_chosen_blocks_are_each_heads_own():
    problem = AttentionProblem(3, 4, 2, (7, 300, 70), 64, select="4x16")
    inputs: Any = make_inputs(problem, "cpu", seed=1)
    assert inputs.k_cache.shape == (1 + 19 + 5, 16, 2, 64)
    assert (inputs.context, inputs.cache_seqlens.tolist()) == (64, [7, 64, 64])
    assert inputs.block_table.shape == (3, 2, 4)
    short, long, middle = inputs.block_table
    assert short[:, 0].unique().numel() == 1
    assert not long[0].equal(long[1])
    for row in (*long, *middle):
        assert row.unique().numel() == 4
    # The fifth page of 70 tokens has 6: no head chooses it.
    assert middle[0].sort().values.equal(middle[1].sort().values)
    whole: Any = make_inputs(replace(problem, select="5x16"), "cpu", seed=1)
    assert whole.block_table[2, 0, 4] == whole.block_table[2, 1, 4]


def test_rows_with_scales_inside():
    problem = AttentionProblem(2, 4, 1, 100, 576, "bf16", v_head_dim=512, latent=True)
    problem = replace(problem, kv_dtype="e4m3", select=30, row_scales=True)
    inputs = make_inputs(problem, "cpu")
    assert inputs.k_cache.shape == (200, 1, 1, 656)
    assert (inputs.head_dim, inputs.value_dim, inputs.k_descale) == (576, 512, None)
    rows = 100 * torch.randn(7, 576).bfloat16()
    rows[3] = 0
    decoded = decode_rows(encode_rows(rows, 512), 512)
    torch.testing.assert_close(decoded, rows, atol=1, rtol=0.07)
    assert decoded[:, 512:].equal(rows[:, 512:])
    assert not decoded[3].any()
    encoded = encode_rows(rows, 512)
    negate_rows(encoded, 512, 656)
    assert decode_rows(encoded, 512).equal(-decoded)


def test_pages_of_a_shared_prefix_are_the_same_and_all_others_are_not():
    problem = AttentionProblem(
        3, 4, 2, (33, 16, 47), 64, page_size=16, shared_prefix=16, kv_dtype="e4m3"
    )
    inputs: Any = make_inputs(problem, "cpu")
    assert (inputs.shared_prefix, inputs.k_cache.shape[0]) == (16, 5)
    table = inputs.block_table
    assert table[:, 0].unique().numel() == 1
    used = [int(table[0, 0]), *table[0, 1:].tolist(), *table[2, 1:].tolist()]
    assert sorted(used) == [0, 1, 2, 3, 4]
    assert inputs.k_descale.stride() == (0, 1)


def test_ragged_lengths_are_on_the_device_and_clamped_to_the_cache():
    inputs: Any = make_inputs(AttentionProblem(3, 4, 4, (7, 300, 1), 64), "cpu")
    assert (inputs.cache_seqlens.dtype, inputs.cache_seqlens.tolist()) == (torch.int32, [7, 300, 1])
    assert (inputs.context, inputs.k_cache.shape[1]) == (300, 300)
    inputs: Any = make_inputs(AttentionProblem(3, 4, 4, (7, 300, 1), 64), "cpu")
    inputs.cache_seqlens.copy_(torch.tensor([-5, 2**30, 0]))
    assert inputs.read_lengths() == (0, 300, 0)


PAGED = AttentionProblem(3, 4, 2, (33, 300, 1), 64, page_size=16)


@pytest.mark.parametrize(
    ("layout", "strides"),
    [("HND", (2 * 16 * 64, 64, 16 * 64, 1)), ("NHD", (16 * 2 * 64, 2 * 64, 64, 1))],
)
def test_a_paged_cache_is_a_pool_of_pages(layout, strides):
    inputs: Any = make_inputs(replace(PAGED, kv_layout=layout), "cpu")
    # 3, 19 and 1 pages.
    assert inputs.k_cache.shape == inputs.v_cache.shape == (23, 16, 2, 64)
    assert inputs.k_cache.stride() == inputs.v_cache.stride() == strides
    assert (inputs.page_size, inputs.kv_heads, inputs.group_size, inputs.context) == (16, 2, 2, 304)
    # What no token fills is random like the rest.
    assert inputs.k_cache.isfinite().all()
    assert (inputs.k_cache == 0).float().mean() < 0.01


@pytest.mark.parametrize("page_size", [None, 16])
def test_a_capacity_is_room_in_the_cache_and_what_the_host_knows(page_size):
    problem = replace(PROBLEM, capacity="4x", page_size=page_size, lengths_on="device")
    inputs: Any = make_inputs(problem, "cpu")
    assert (inputs.context, inputs.read_lengths()) == (1200, (300, 300))
    if inputs.block_table is None:
        assert inputs.k_cache.shape == (2, 1200, 4, 64)
    else:
        # 19 pages of a sequence are in use, and the pool has no others.
        assert inputs.block_table.shape == (2, 75)
        assert inputs.k_cache.shape == (38, 16, 4, 64)
    known = make_inputs(replace(problem, lengths_on="host"), "cpu")
    assert (known.context, known.cache_seqlens) == (300, None)


def test_every_page_belongs_to_one_sequence_in_random_order():
    table: Any = make_inputs(PAGED, "cpu").block_table
    assert (table.shape, table.dtype, table.is_contiguous()) == ((3, 19), torch.int32, True)
    used = [*table[0, :3].tolist(), *table[1].tolist(), *table[2, :1].tolist()]
    assert sorted(used) == list(range(23))
    assert used != list(range(23))
    assert (table[0, 3:] == 0).all()
    assert (table[2, 1:] == 0).all()
    tables: list[Any] = [make_inputs(PAGED, "cpu", seed).block_table for seed in (1, 1, 2)]
    assert torch.equal(tables[0], tables[1])
    assert not torch.equal(tables[0], tables[2])


def same(left: AttentionInputs, right: AttentionInputs) -> list[bool]:
    return [torch.equal(getattr(left, name), getattr(right, name)) for name in TENSORS]


def test_values_are_standard_normal_and_repeat_with_their_seed():
    first, again, other = (make_inputs(PROBLEM, "cpu", seed=seed) for seed in (1, 1, 2))
    assert same(first, again) == [True] * 3
    assert same(first, other) == [False] * 3
    assert same(make_inputs(PROBLEM, "cpu"), make_inputs(PROBLEM, "cpu")) == [False] * 3
    inputs: Any = make_inputs(PROBLEM, "cpu", seed=3)
    for name in TENSORS:
        values = getattr(inputs, name).double()
        # 1024 numbers of Q at least: five standard errors.
        assert abs(values.mean().item()) < 0.16
        assert values.std().item() == pytest.approx(1, abs=0.12)
    assert not torch.equal(inputs.k_cache, inputs.v_cache)


def test_score_scale_multiplies_q_alone():
    first = make_inputs(PROBLEM, "cpu", seed=4, score_scale=1.0)
    ten = make_inputs(PROBLEM, "cpu", seed=4, score_scale=10.0)
    torch.testing.assert_close(ten.q, first.q * 10)
    assert same(first, ten) == [False, True, True]
    q, k = first.q[:, :, ::2].double(), first.k_cache.double()
    scores = torch.einsum("bqhd,bnhd->bhqn", q, k) * first.softmax_scale
    assert scores.std().item() == pytest.approx(1, abs=0.1)


def test_kinds_are_drawn_and_lengths_are_those_before_the_append():
    problem = replace(PROBLEM, context=(40, 300), append=2, rotary_dim=32, leftpad=True)
    problem = replace(problem, batch_idx=True, sinks=True, alibi=True, softcap=30.0, window_left=7)
    inputs: Any = make_inputs(problem, "cpu")
    assert inputs.cache_seqlens.tolist() == [38, 298]
    assert (inputs.read_lengths(), inputs.context, inputs.new_tokens) == ((40, 300), 300, 2)
    assert inputs.cache_leftpad.tolist() == [7, 111]
    # A row more than sequences.
    assert inputs.k_cache.shape == (3, 300, 4, 64)
    assert set(inputs.cache_batch_idx.tolist()) < {0, 1, 2}
    assert all(row != sequence for sequence, row in enumerate(inputs.cache_batch_idx.tolist()))
    assert inputs.k_new.shape == inputs.v_new.shape == (2, 2, 4, 64)
    assert not torch.equal(inputs.k_new, inputs.v_new)
    squares = inputs.rotary_cos.double() ** 2 + inputs.rotary_sin.double() ** 2
    torch.testing.assert_close(squares, torch.ones(301, 16, dtype=torch.float64), rtol=0, atol=2e-3)
    assert inputs.sinks.shape == (8,)
    assert (inputs.alibi_slopes.shape, inputs.alibi_slopes.dtype) == ((2, 8), torch.float32)
    assert (inputs.softcap, inputs.window_left, inputs.window_right) == (30.0, 7, -1)
    inputs.cache_seqlens.fill_(2**30)
    assert inputs.read_lengths() == (300, 300)


def test_fp8_caches_have_scales_and_latent_ones_one():
    problem = replace(PROBLEM, kv_dtype="e4m3", q_dtype="e4m3", v_head_dim=32)
    inputs: Any = make_inputs(problem, "cpu")
    assert inputs.k_cache.dtype == inputs.q.dtype == torch.float8_e4m3fn
    assert (inputs.out.dtype, inputs.out.shape) == (torch.float16, (2, 1, 8, 32))
    assert inputs.v_cache.shape == (2, 300, 4, 32)
    assert inputs.k_cache.double().std().item() == pytest.approx(1, abs=0.05)
    for scales in (inputs.q_descale, inputs.k_descale, inputs.v_descale):
        assert scales.shape == (2, 4)
        assert scales.min() >= 0.5
        assert scales.max() <= 1.5
    problem = replace(PROBLEM, kv_heads=1, v_head_dim=48, latent=True, kv_dtype="e5m2")
    inputs: Any = make_inputs(problem, "cpu")
    assert inputs.k_cache.dtype == torch.float8_e5m2
    assert inputs.v_descale is inputs.k_descale
    assert (inputs.k_descale.shape, inputs.k_descale.stride(0)) == ((2, 1), 0)
    assert make_inputs(replace(problem, scaled=False), "cpu").k_descale is None


@pytest.mark.parametrize("page_size", [None, 16])
def test_a_latent_cache_has_v_in_its_first_columns(page_size):
    problem = replace(PROBLEM, kv_heads=1, v_head_dim=48, latent=True, page_size=page_size)
    inputs: Any = make_inputs(problem, "cpu")
    assert inputs.latent
    assert inputs.v_cache.shape == (*inputs.k_cache.shape[:3], 48)
    assert inputs.v_cache.data_ptr() == inputs.k_cache.data_ptr()
    assert inputs.v_cache.stride() == inputs.k_cache.stride()


def test_query_lengths_are_packed():
    inputs: Any = make_inputs(replace(PROBLEM, q_lens=(5, 1)), "cpu")
    assert (inputs.q.shape, inputs.out.shape, inputs.lse.shape) == ((6, 8, 64), (6, 8, 64), (8, 6))
    assert inputs.read_query_starts() == (0, 5, 6)
    assert (inputs.batch, inputs.q_len, inputs.q_heads, inputs.group_size) == (2, 5, 8, 2)


@pytest.mark.parametrize(
    "kinds",
    [
        {},
        {"q_len": 3, "causal": False},
        {"append": 1, "rotary_dim": 16, "leftpad": True, "batch_idx": True},
        {"q_lens": (5, 1), "page_size": 16, "kv_dtype": "e5m2"},
        {"latent": True, "kv_heads": 1, "v_head_dim": 48},
    ],
)
def test_inputs_without_memory_are_alike(kinds):
    problem = replace(PROBLEM, **kinds)
    inputs, shapes = make_inputs(problem, "cpu"), shape_only(problem)
    for name, value in vars(inputs).items():
        shape = getattr(shapes, name)
        if isinstance(value, torch.Tensor):
            assert (shape.shape, shape.stride()) == (value.shape, value.stride())
            assert (shape.dtype, shape.device.type) == (value.dtype, "meta")
        else:
            assert shape == value
