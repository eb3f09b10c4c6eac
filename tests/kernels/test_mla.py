"""lean_mla without a GPU: its compiled code, unsupported problems, and errors of
`lean_mla_with_kvcache` for wrong tensors.
"""

from __future__ import annotations

import math
import pickle
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_calls import sentences
from every_kind import take_latent_calls
from forms import assert_form, gapped, misaligned, numbers, pages_of, plain_form
from leanbench.kernels.lean.cuda_build import HOPPER
from leanbench.kernels.mla import LEAN_MLA
from leanbench.kernels.mla.build import MlaBuild
from leanbench.kernels.mla.configs import MlaConfig
from leanbench.kernels.mla.launch import _aligned, _descale
from leanbench.kernels.reference.torch import attend_all
from library_stand_ins import LATENT
from torch.fx.experimental.proxy_tensor import make_fx

from leanbench import lean_attn_with_kvcache, lean_mla_with_kvcache
from leanbench.attention.call import Call
from leanbench.attention.compat import launch_after_steps, non_contiguous
from leanbench.attention.mla_launch import as_attention, check_latent
from leanbench.core.errors import DoesNotFit, UserError
from leanbench.core.problem import AttentionProblem
from leanbench.core.row_scales import decode_rows, encode_rows
from leanbench.gpu.catalogue import find

H200 = find("h200")
#: A latent cache.
PROBLEM = replace(LATENT, q_heads=128, context=4096, page_size=64)


@pytest.mark.deep
def test_a_cta_fits_an_h200():
    [cta] = LEAN_MLA.compile(PROBLEM, LEAN_MLA.default_config(PROBLEM, H200), HOPPER)
    # Three warpgroups, two of which take registers of the third.
    assert (cta.num_warps, cta.registers_per_thread) == (12, 168)
    assert cta.shared_bytes <= H200.shared_kb_per_cta * 1024
    assert cta.ctas == 2


@pytest.mark.deep
@pytest.mark.parametrize(("context", "groups"), [(4096, 4), (8192, 2)])
def test_builds_of_column_groups_have_no_more_of_an_sm(context, groups):
    problem = replace(PROBLEM, batch=1, context=context)
    config = LEAN_MLA.default_config(problem, H200)
    assert config.column_groups == groups
    [cta] = LEAN_MLA.compile(problem, config, HOPPER)
    [whole] = LEAN_MLA.compile(problem, replace(config, column_groups=1), HOPPER)
    assert (cta.registers_per_thread, cta.shared_bytes) == (168, whole.shared_bytes)
    assert cta.spilled_registers == 0
    build = MlaBuild.of_shape(128, 1, True, True, False, 64, column_groups=groups)
    # 64 rows' share of 512 columns, their (m, l), and a line with the epoch.
    assert build.partial_bytes == 65_536 // groups + 1024 + 128


def test_column_groups_of_an_fp8_cache_are_refused():
    config = MlaConfig(1, align_grid=True, column_groups=2)
    with pytest.raises(DoesNotFit, match=r"column_groups up to 1 .* e4m3 with 512 .* is 2"):
        LEAN_MLA.compile(replace(PROBLEM, kv_dtype="e4m3"), config, HOPPER)
    fewer = replace(PROBLEM, head_dim=320, v_head_dim=256)
    with pytest.raises(DoesNotFit, match="column_groups up to 2"):
        LEAN_MLA.compile(fewer, replace(config, column_groups=4), HOPPER)


def test_configs_leave_one_column_group_out():
    assert "column_groups" not in MlaConfig(2, align_grid=True).to_dict()
    four = {"min_tiles_per_cta": 2, "align_grid": True, "column_groups": 4}
    assert MlaConfig(2, True, 4).to_dict() == four
    with pytest.raises(UserError, match=r"^column_groups 3 is not a power of two from 1 to 4$"):
        MlaConfig(2, True, 3)


# NVRTC takes several seconds for each; tests/kernels/test_mla_on_cpu.py computes with both dtypes.
@pytest.mark.deep
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("kv_dtype", ["e4m3", "e5m2"])
def test_a_cta_of_an_fp8_cache_fits_an_h200(kv_dtype, heads):
    problem = replace(PROBLEM, q_heads=heads, kv_dtype=kv_dtype)
    [cta] = LEAN_MLA.compile(problem, LEAN_MLA.default_config(problem, H200), HOPPER)
    assert (cta.num_warps, cta.registers_per_thread) == (12, 168)
    # 4 KB for each stage's bytes, and divisors of rows of Q, in addition to 16 bits.
    assert cta.shared_bytes == 223_952 - 12 * 8 + 2 * 4096 + 4 * 64
    assert cta.shared_bytes <= H200.shared_kb_per_cta * 1024


@pytest.mark.parametrize("dim", [1, 2])
def test_the_scale_of_a_cache_is_one_number_or_one_a_sequence(dim):
    scale = torch.ones(3, 1)[:, 0][:1] if dim == 1 else torch.ones(1, 1).expand(3, 1)
    descale = _descale(scale)
    assert (descale.at, descale.stride_batch) == (scale.data_ptr(), 0)


def test_other_gpus_are_refused_in_a_sentence():
    build = MlaBuild.of_shape(128, 1, bf16=True, causal=True, ragged=False, page=64)
    with pytest.raises(DoesNotFit, match=r"^lean_mla is written for compute capability 9.0, this"):
        build.source((10, 0))


@pytest.mark.parametrize(
    ("heads", "q_len", "page", "cluster", "row_tiles"),
    [(16, 1, 0, 1, 1), (16, 5, 64, 2, 1), (128, 3, 0, 2, 3), (128, 1, 1, 1, 2), (16, 5, 96, 1, 2)],
)
def test_two_ctas_share_bulk_copies(heads, q_len, page, cluster, row_tiles):
    build = MlaBuild.of_shape(heads, q_len, bf16=True, causal=True, ragged=False, page=page)
    assert (build.cluster, build.row_tiles(q_len)) == (cluster, row_tiles)


@pytest.mark.parametrize(
    ("axes", "sentence"),
    [
        ({}, None),
        ({"latent": False}, "lean_mla takes latent caches of head_dim 576 with v_head_dim 512 al"),
        ({"head_dim": 512, "v_head_dim": None}, None),
        ({"head_dim": 320, "v_head_dim": 256}, None),
        ({"head_dim": 320, "v_head_dim": 128}, "lean_mla takes latent caches of head_dim 320 with"),
        (
            {"head_dim": 288, "v_head_dim": 256, "kv_dtype": "e4m3"},
            "lean_mla takes fp8 with v_head_dim 512 alone",
        ),
        ({"page_size": 1}, None),
        ({"head_dim": 128, "v_head_dim": None}, "lean_mla does not take head_dim 128"),
        ({"kv_dtype": "e4m3"}, None),
        ({"kv_dtype": "e5m2", "scaled": False}, None),
        ({"kv_dtype": "e4m3", "q_dtype": "e4m3"}, "lean_mla takes no Q of another dtype than"),
    ],
)
def test_what_it_takes(axes, sentence):
    reason = LEAN_MLA.unsupported_reason(replace(PROBLEM, **axes))
    assert str(reason).startswith(str(sentence))


Q, CACHE = torch.zeros(2, 1, 16, 576).bfloat16(), torch.zeros(2, 128, 576).bfloat16()
TABLE, FP8 = torch.zeros(2, 2, dtype=torch.int32), torch.float8_e4m3fn
OF_HEADS, OUT = torch.zeros(2, 128, 2, 576).bfloat16(), torch.zeros(2, 1, 18, 512).bfloat16()
FP8_CACHE = CACHE.to(FP8)
SCALED_ROWS = torch.zeros(2, 1, 1, 656).to(FP8)
#: Arguments, and the argument and values that a message names.
WRONG: list[dict[str, Any]] = [
    {"q": Q[..., :512]},
    {"kv_cache": CACHE[:1]},
    {"block_table": TABLE, "kv_cache": CACHE[0]},
    {"block_table": TABLE, "kv_cache": CACHE[..., :512]},
    {"kv_cache": OF_HEADS[..., :500]},
    {"q": Q[..., :512], "kv_cache": OF_HEADS},
    {"kv_cache": OF_HEADS, "out": OUT},
    {"kv_cache": CACHE.to_sparse()},
    {"kv_cache": OF_HEADS.to_sparse()},
    {"block_table": TABLE.to_sparse()},
    {"softmax_scale": 0.0},
    {"softmax_scale": math.inf},
    {"softmax_scale": "a"},
    {"head_dim_v": 256},
    {"kv_cache": CACHE.float()},
    {"q": Q.to(FP8)},
    {"q": Q.to(FP8), "kv_cache": FP8_CACHE, "q_descale": torch.ones(3, 1)},
    {"kv_cache": OF_HEADS[:, :, :1].expand(2, 128, 3, 576)},
    {"kv_cache": SCALED_ROWS.half(), "block_table": TABLE},
    {"kv_cache": SCALED_ROWS, "block_table": TABLE, "q": Q[..., :512]},
    {"kv_cache": torch.zeros(2, 1, 584, dtype=torch.uint8), "block_table": TABLE},
    {"kv_cache": SCALED_ROWS},
    {"kv_cache": SCALED_ROWS, "block_table": TABLE, "q": Q.half()},
    {"kv_cache": SCALED_ROWS, "block_table": TABLE, "k_descale": torch.ones(1)},
    {"q": Q[..., :320].contiguous(), "kv_cache": CACHE[..., :320].contiguous().to(FP8)},
    {"kv_cache": FP8_CACHE, "k_descale": 0.5},
    {"kv_cache": FP8_CACHE, "q_descale": 0.5, "k_descale": 0.5},
    {"kv_cache": FP8_CACHE, "k_descale": torch.ones(2)},
    {"kv_cache": FP8_CACHE, "k_descale": torch.ones(1).half()},
    {"kv_cache": FP8_CACHE, "k_descale": torch.ones(1).to("meta")},
    {"kv_cache": FP8_CACHE, "k_descale": torch.ones(1, 1).to_sparse()},
    {"q": torch.nested.nested_tensor([*Q])},
    {"causal": None},
]
SCALE = torch.ones(1, requires_grad=True)
UNSUPPORTED: list[dict[str, Any]] = [
    {"causal": torch.tensor([True, False])},
    {"kv_cache": FP8_CACHE, "k_descale": SCALE},
    {"q": Q.to(FP8), "kv_cache": FP8_CACHE, "q_descale": SCALE},
    {"q": Q.clone().requires_grad_()},
]
NO_TENSOR: list[dict[str, Any]] = [
    {"q": None},
    {"kv_cache": [1.0]},
    {"block_table": [[0, 1]]},
    {"out": "out"},
]


def test_wrong_arguments(snapshot):
    """The snapshot has the sentence of each."""
    of_error: dict[type[Exception], list[dict[str, Any]]] = {
        ValueError: WRONG,
        TypeError: NO_TENSOR,
        NotImplementedError: UNSUPPORTED,
        UserError: [{}],
    }
    for error, cases in of_error.items():
        calls = [{"q": Q, "kv_cache": CACHE, **arguments} for arguments in cases]
        assert sentences(error, calls, lean_mla_with_kvcache) == snapshot


def test_tensors_with_gradients_are_taken_without_them():
    with torch.no_grad(), pytest.raises(UserError, match="Hopper"):
        lean_mla_with_kvcache(Q.clone().requires_grad_(), CACHE)


WIDE = torch.zeros(2, 1, 16, 520).bfloat16()


@pytest.mark.parametrize(
    ("out", "words"),
    [
        (WIDE[..., :512], None),
        (WIDE, r"^out is \(2, 1, 16, 520\) .*: expected \(2, 1, 16, 512\) torch.bfloat16, the"),
        (WIDE[..., :514].contiguous()[..., :512], "^out has strides .*: it must step by multiples"),
        (WIDE[:, :, :1, :512].expand(2, 1, 16, 512), "^out has strides .*, and not be expanded$"),
        (
            WIDE.to("meta").as_strided((2, 1, 16, 512), (2**31, 512, 512, 1)),
            "^out has strides .*: one is above 2147483647, pass an output with smaller ones$",
        ),
    ],
    ids=["steps of 1040 bytes", "columns", "steps of 1028 bytes", "expanded", "large steps"],
)
def test_an_output_that_is_not_written_16_bytes_at_a_time_is_refused(out, words):
    with nullcontext() if words is None else pytest.raises(ValueError, match=words):
        check_latent(Call(Q, CACHE, CACHE, out=out, latent=True))


def traced(call: Any, *tensors: torch.Tensor) -> tuple[Any, Any]:
    """Return the graph of a call, and the operator's node."""
    graph = make_fx(call, tracing_mode="fake", _allow_non_fake_inputs=True)(*tensors).graph
    [node] = [n for n in graph.nodes if "lean_mla" in str(n.target)]
    return graph, node


@pytest.mark.parametrize("block_table", [None, TABLE], ids=["contiguous", "pages"])
@pytest.mark.parametrize("lengths", [100, numbers(100, 3)])
def test_torch_traces_a_call_as_one_operator(block_table, lengths):
    cache = CACHE if block_table is None else CACHE.clone().view(4, 64, 1, 576)
    options = {"block_table": block_table, "return_softmax_lse": True}

    def call(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = lean_mla_with_kvcache(2 * q, cache, lengths, **options)
        return out + 1, lse

    _, node = traced(call, Q)
    out, lse = node.meta["val"]
    assert (out.shape, out.dtype) == ((2, 1, 16, 512), torch.bfloat16)
    assert (lse.shape, lse.dtype) == ((2, 16, 1), torch.float32)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_torch_traces_sizes_that_are_symbols(kv_heads):
    def call(q: torch.Tensor, cache: torch.Tensor) -> Any:
        return lean_mla_with_kvcache(q, cache, 100)

    cache = torch.zeros(2, 128, kv_heads, 576).bfloat16()
    graph = make_fx(call, tracing_mode="symbolic")(Q, cache).graph
    assert sum("lean_mla" in str(node.target) for node in graph.nodes) == kv_heads


def test_torch_traces_the_scale_of_an_fp8_cache():
    def call(q: torch.Tensor, scale: torch.Tensor) -> Any:
        return lean_mla_with_kvcache(2 * q, FP8_CACHE, 100, k_descale=scale)

    graph, node = traced(call, Q, torch.ones(1))
    assert node.args[-1] in [n for n in graph.nodes if n.op == "placeholder"]
    assert (node.meta["val"][0].shape, node.meta["val"][0].dtype) == ((2, 1, 16, 512), Q.dtype)


@pytest.mark.parametrize(
    ("output_tiles", "stages", "ranges"),
    # Splits; whole output tiles of 64 stages and of 512; an odd number of them.
    [(3, 64, 66), (32, 64, 64), (48, 64, 66), (128, 64, 64), (64, 512, 66), (67, 64, 66)],
)
def test_ranges_end_with_output_tiles_unless_too_many_sms_have_no_work(
    output_tiles, stages, ranges
):
    assert _aligned(66, output_tiles, stages) == ranges


def test_column_groups_follow_from_what_the_host_knows():
    """For lengths on the device, it is the capacity; a launch takes groups if they are short."""
    problem = replace(PROBLEM, batch=1, context=100, lengths_on="device", capacity=4096)
    problem = replace(problem, page_size=None)
    expected = MlaConfig(2, align_grid=True, column_groups=4)
    assert LEAN_MLA.default_config(problem, H200) == expected
    longer = replace(problem, capacity=16_384)
    assert LEAN_MLA.default_config(longer, H200) == expected
    assert LEAN_MLA.default_config(replace(longer, q_heads=16), H200).column_groups == 1
    for batch, groups in ((16, 4), (17, 2), (33, 2), (34, 1)):
        many = LEAN_MLA.default_config(replace(longer, batch=batch), H200)
        assert many.column_groups == groups
    short = replace(problem, lengths_on="host")
    assert LEAN_MLA.default_config(short, H200) == replace(expected, min_tiles_per_cta=1)


def test_column_groups_are_candidates_of_16_bit_caches():
    def groups(problem: AttentionProblem) -> list[int]:
        return [config.column_groups for config in LEAN_MLA.tuning_space(problem, H200)]

    assert groups(PROBLEM) == [1] * 8 + [2] * 3 + [4] * 3
    assert groups(replace(PROBLEM, kv_dtype="e4m3")) == [1] * 8


@pytest.mark.parametrize(
    ("context", "stages", "on_device"),
    [(64, 1, 1), (2048, 1, 1), (2049, 2, 2), (4096, 2, 2), (32_768, 8, 2), (1 << 20, 64, 2)],
)
def test_no_more_splits_than_merge_well(context, stages, on_device):
    # In fp8, without column groups.
    problem = replace(PROBLEM, batch=1, context=context, kv_dtype="e4m3", page_size=None)
    for lengths_on, expected in (("host", stages), ("device", on_device)):
        config = LEAN_MLA.default_config(replace(problem, lengths_on=lengths_on), H200)
        assert config.min_tiles_per_cta == expected


@pytest.fixture
def launched(monkeypatch):
    """Return the calls that reach the kernel."""
    return take_latent_calls(monkeypatch)


def latent_rows(*shape):
    return torch.randn(*shape, 576).bfloat16()


@pytest.mark.parametrize("q_len", [1, 2])
@pytest.mark.parametrize("paged", [False, True])
def test_several_kv_heads_are_a_launch_each(q_len, paged, launched):
    q, cache = latent_rows(2, q_len, 6), latent_rows(2, 128, 3)
    lengths = numbers(100, 128)
    options = {"cache_seqlens": lengths, "return_softmax_lse": True}
    given, table = cache, None
    if paged:
        order = torch.tensor([[3, 0], [1, 2]], dtype=torch.int32)
        given, table = torch.empty(4, 64, 3, 576).bfloat16(), order
        given[order.long()] = cache.unflatten(1, (2, 64))
    out = torch.full((2, q_len, 6, 512), math.nan).bfloat16()
    result, lse = lean_mla_with_kvcache(q, given, block_table=table, out=out, **options)
    assert result is out
    assert len(launched) == 3
    for head in range(3):
        own = slice(2 * head, 2 * head + 2)
        alone = lean_mla_with_kvcache(q[:, :, own].contiguous(), cache[:, :, head], **options)
        torch.testing.assert_close(out[:, :, own], alone[0])
        torch.testing.assert_close(lse[:, own], alone[1])
    new: Any = lean_mla_with_kvcache(q, given, lengths, block_table=table)
    assert new.equal(out)


@pytest.mark.parametrize("page_size", [1, 16, 80])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_pages_have_any_size(page_size, dtype, launched):
    pages = 160 // page_size
    q, cache = latent_rows(2, 2, 16), latent_rows(2, 160).to(dtype)
    order = torch.randperm(2 * pages, dtype=torch.int32).view(2, pages)
    given = torch.empty(2 * pages, page_size, 1, 576, dtype=dtype)
    as_bits = given.view(torch.int8 if dtype.itemsize == 1 else torch.int16)
    as_bits[order.long()] = cache.view(as_bits.dtype).view(2, pages, page_size, 1, 576)
    lengths = numbers(65, 160 - page_size)
    # Invalid pages past the sequences' ends.
    order[1, -1] = 2**31 - 1
    options = {"cache_seqlens": lengths, "return_softmax_lse": True}
    out, lse = lean_mla_with_kvcache(q, given, block_table=order, **options)
    alone, alone_lse = lean_mla_with_kvcache(q, cache, **options)
    assert out.equal(alone)
    assert lse.equal(alone_lse)


@pytest.mark.parametrize(("columns", "value_dim"), [(512, 512), (320, 256), (160, 128)])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_rows_of_other_columns(columns, value_dim, kv_heads, launched):
    q, cache = latent_rows(2, 1, 4)[..., :columns], latent_rows(2, 64, kv_heads)[..., :columns]
    inputs = plain_form(q, cache, cache[..., :value_dim], causal=True)
    given = cache.contiguous()
    for head_dim_v in (None, value_dim):
        result = lean_mla_with_kvcache(
            q.contiguous(), given, head_dim_v=head_dim_v, causal=True, return_softmax_lse=True
        )
        assert_form(inputs, result)
    with pytest.raises(ValueError, match=f"head_dim_v is 64: only {value_dim} is supported"):
        lean_mla_with_kvcache(q, given, head_dim_v=64)
    empty = lean_mla_with_kvcache(q[:0], given[:0])
    assert isinstance(empty, torch.Tensor)
    assert empty.shape == (0, 1, 4, value_dim)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn])
def test_rows_with_scales_inside(dtype, launched):
    q, rows = latent_rows(2, 1, 16), latent_rows(10, 1, 1)
    chosen, lengths = numbers(3, -1, 7, 0, 9, 3, 3, 99).view(2, 4), numbers(4, 3)
    pool, options = encode_rows(rows, 512), {"block_table": chosen, "return_softmax_lse": True}
    out, lse = lean_mla_with_kvcache(q, pool.view(dtype), lengths, **options)
    plain = decode_rows(pool, 512)
    torch.testing.assert_close(plain, rows, atol=1e-2, rtol=0.07)
    alone, alone_lse = lean_mla_with_kvcache(q, plain, lengths, **options)
    assert out.equal(alone)
    assert lse.equal(alone_lse)


def test_scales_beside_16_bits_are_ignored(launched):
    q, cache = latent_rows(2, 1, 16), latent_rows(2, 128)
    plain: Any = lean_mla_with_kvcache(q, cache)
    for scale in (0.5, torch.ones(1, requires_grad=True), torch.ones(7).half()):
        options: dict[str, Any] = {"q_descale": scale, "k_descale": scale}
        assert plain.equal(lean_mla_with_kvcache(q, cache, **options))


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize(
    "shape", [None, (), (1,), (1, 1, 1), (2, 1), (1, "kv_heads"), (2, "kv_heads")], ids=str
)
def test_queries_and_caches_in_fp8(shape, kv_heads, launched):
    rows = latent_rows(2, 2, 6), latent_rows(2, 128, kv_heads)
    q, cache = (own.to(torch.float8_e4m3fn) for own in rows)
    scales: dict[str, Any] = {}
    whole: dict[str, Any] = {}
    if shape is not None:
        sizes = [kv_heads if size == "kv_heads" else size for size in shape]
        # Their products with fp8 numbers are exact in bf16.
        powers = [torch.randint(-3, 3, sizes) for _ in range(2)]
        q_scale, k_scale = (2.0**own for own in powers)
        scales = {"q_descale": q_scale, "k_descale": k_scale}
        fitted = [
            own.reshape(1, 1) if own.numel() == 1 else own for own in (q_scale, k_scale, k_scale)
        ]
        names = ("q_descale", "k_descale", "v_descale")
        whole = {name: own.expand(2, kv_heads) for name, own in zip(names, fitted, strict=True)}
    inputs = plain_form(q, cache, cache[..., :512], causal=True, **whole)
    out, lse = lean_mla_with_kvcache(q, cache, causal=True, return_softmax_lse=True, **scales)
    assert out.dtype == torch.bfloat16
    assert_form(inputs, (out, lse))


@pytest.mark.parametrize(("batch", "q_len", "tokens"), [(0, 1, 64), (2, 0, 64), (2, 3, 0)], ids=str)
def test_sizes_of_none(batch, q_len, tokens):
    q, cache = latent_rows(batch, q_len, 16), latent_rows(batch, tokens)
    out = torch.full((batch, q_len, 16, 512), math.nan).bfloat16()
    result, lse = lean_mla_with_kvcache(q, cache, out=out, return_softmax_lse=True)
    assert result is out
    assert out.eq(0).all()
    assert lse.equal(torch.full((batch, 16, q_len), -math.inf))


@pytest.mark.parametrize(("batch", "tokens"), [(0, 64), (2, 0)])
def test_rows_with_scales_of_none(batch, tokens):
    q, rows = latent_rows(batch, 1, 16), torch.zeros(tokens, 1, 656, dtype=torch.uint8)
    table = torch.zeros(batch, 4, dtype=torch.int32)
    out, lse = lean_mla_with_kvcache(q, rows, block_table=table, return_softmax_lse=True)
    assert out.equal(torch.zeros(batch, 1, 16, 512).bfloat16())
    assert lse.equal(torch.full((batch, 16, 1), -math.inf))


def test_an_error_of_shapes_is_pickled():
    with pytest.raises(ValueError, match="kv_cache") as caught:
        lean_mla_with_kvcache(Q, CACHE[:1])
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize("packed", [False, True])
def test_qv_is_a_call_over_the_latent_cache(packed, launched):
    cache = latent_rows(4, 64, 1)
    table = torch.tensor([[3, 0], [1, 2]], dtype=torch.int32)
    lengths = numbers(100, 128)
    v, k = cache[..., :512], cache[..., 512:]
    q = latent_rows(2, 3, 16)
    options = {"cache_seqlens": lengths, "return_softmax_lse": True, "softmax_scale": 0.1}
    right, right_lse = lean_mla_with_kvcache(q, cache, block_table=table, **options)
    asked = {"k_cache": k, "v_cache": v, "page_table": table, **options}
    if not packed:
        out = torch.full((2, 3, 16, 512), math.nan).bfloat16()
        result, lse = lean_attn_with_kvcache(q[..., 512:], qv=q[..., :512], out=out, **asked)
        assert result is out
        assert out.equal(right)
        assert lse.equal(right_lse)
    else:
        # One token of the first sequence, three of the second.
        rows = torch.cat([q[0, 2:], q[1]])
        packed_queries = {"cu_seqlens_q": numbers(0, 1, 4), "max_seqlen_q": 3}
        result, lse = lean_attn_with_kvcache(
            rows[..., 512:], qv=rows[..., :512], **packed_queries, **asked
        )
        assert result.equal(torch.cat([right[0, 2:], right[1]]))
        assert lse.equal(torch.cat([right_lse[0, :, 2:], right_lse[1]], dim=1))
    assert launched[-1].k_cache.data_ptr() == cache.data_ptr()


class Relaunched:
    """A launch of the reference over contiguous tensors."""

    tile_tokens = 64
    any_capacity = False

    def __init__(self, inputs):
        self._inputs = inputs

    def __call__(self, q, k, v, lengths, context, table, out, lse, extras=None):
        own = {"q": q, "k_cache": k, "v_cache": v, "cache_seqlens": lengths, "out": out}
        inputs = replace(self._inputs, **own, lse=lse, context=context, block_table=table)
        assert not non_contiguous(Call(q, k, v, lengths, None, table, latent=True))
        attend_all(inputs)


@pytest.mark.parametrize("page_size", [None, 64])
@pytest.mark.parametrize("change", ["gaps", "positions apart", "misaligned"])
def test_queries_lengths_and_pages_are_copied_where_they_do_not_lie_in_a_row(change, page_size):
    for _ in range(2):
        cache, table = latent_rows(2, 128, 1), None
        if page_size is not None:
            cache, table = pages_of(cache, page_size)
        q, lengths = latent_rows(2, 3, 4), numbers(100, 128)
        if change == "gaps":
            q, lengths = gapped(q), gapped(lengths)
            table = None if table is None else gapped(table)
        elif change == "positions apart":
            q = latent_rows(2, 3, 8)[:, :, ::2].transpose(1, 2).contiguous().transpose(1, 2)
        else:
            q = misaligned(q)
        options = {"cache_seqlens": lengths, "block_table": table, "causal": True}
        inputs = plain_form(q, cache, cache[..., :512], **options)
        call = Call(q, cache, cache, lengths, None, table, causal=True, latent=True)
        check_latent(call)
        relaunch = launch_after_steps(as_attention(call), inputs.out, inputs.lse, launched_once)
        inputs.poison()
        relaunch(*inputs_of(inputs))
        assert_form(inputs, (inputs.out, inputs.lse))


def launched_once(inputs):
    relaunch = Relaunched(inputs)
    relaunch(*inputs_of(inputs))
    return relaunch


def inputs_of(inputs):
    """Return the arguments of a launch."""
    names = ("q", "k_cache", "v_cache", "cache_seqlens", "context", "block_table", "out", "lse")
    return [getattr(inputs, name) for name in names]


def test_a_list_that_is_no_window_goes_with_qv(launched):
    q, cache = latent_rows(2, 1, 16), latent_rows(2, 128, 1)
    options: dict[str, Any] = {"window_size": [-1, -1], "return_softmax_lse": True}
    k, v = cache[..., 512:], cache[..., :512]
    out, lse = lean_attn_with_kvcache(q[..., 512:], k, v, qv=q[..., :512], **options)
    alone, alone_lse = lean_mla_with_kvcache(q, cache, return_softmax_lse=True)
    assert out.equal(alone)
    assert lse.equal(alone_lse)
