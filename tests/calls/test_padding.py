"""Calls over tensors that no kernel reads as they are, as by flash-attn: right, for the price of
copies.
"""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from attention_calls import assert_right, attend, compiled
from depth import label
from every_kind import CONFIG, called
from forms import misaligned
from torch._subclasses.fake_tensor import FakeTensorMode

from leanbench.attention import lean_attn_with_kvcache
from leanbench.core.inputs import AttentionInputs, make_inputs
from leanbench.core.problem import AttentionProblem

PLAIN = AttentionProblem(2, 4, 2, 40, 64, q_len=3, kv_layout="HND")
CACHES = ("k_cache", "v_cache")
#: Tensors with as many columns as K, and as V.
K_SIDE, V_SIDE = ("q", "k_cache", "k_new"), ("v_cache", "v_new", "out")
ALL = K_SIDE + V_SIDE
#: A head_dim of flash-attn's own tests.
FIRST_59 = slice(59)
APPENDS = {
    "one cache": {"append": 2},
    "pages": {"append": 2, "page_size": 16, "context": (40, 17)},
    "rows of the cache": {"append": 2, "batch_idx": True, "lengths_on": "device"},
}


def cut(inputs: AttentionInputs, columns: slice, names: tuple[str, ...] = ALL) -> AttentionInputs:
    """The inputs with some columns of these tensors."""
    own = {name: getattr(inputs, name) for name in names}
    own = {name: tensor[..., columns] for name, tensor in own.items() if tensor is not None}
    return replace(inputs, **own)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes in memory, NaN too."""
    return tensor.contiguous().view(torch.int16 if tensor.element_size() == 2 else torch.uint8)


def appended(inputs: AttentionInputs) -> list[torch.Tensor]:
    """K and V caches after the call; nothing is rotated."""
    rows = inputs.cache_batch_idx
    if rows is None:
        rows = torch.arange(inputs.batch)
    caches = []
    for cache, new in ((inputs.k_cache, inputs.k_new), (inputs.v_cache, inputs.v_new)):
        after = cache.clone()
        assert new is not None
        for sequence, length in enumerate(inputs.read_cached()):
            for step, at in enumerate(range(length, length + new.shape[1])):
                row = rows[sequence]
                if inputs.block_table is not None:
                    page, at = divmod(at, cache.shape[1])
                    row = inputs.block_table[sequence, page]
                after[row, at] = new[sequence, step]
        caches.append(after)
    return caches


@pytest.mark.parametrize(
    "problem",
    [
        AttentionProblem(2, 4, 2, 70, 64),
        AttentionProblem(2, 6, 2, (70, 33), 64, "bf16", "NHD", q_len=2),
        AttentionProblem(3, 4, 1, (48, 1, 20), 64, "fp16", "HND", 3, 16),
    ],
    ids=label,
)
def test_a_head_dim_of_59(problem, device):
    """Pad as flash-attn's own tests do; `softmax_scale` is by default that of 59."""
    inputs = cut(make_inputs(problem, device), FIRST_59)
    caches = {name: getattr(inputs, name).contiguous() for name in CACHES}
    inputs = replace(inputs, **caches, softmax_scale=59**-0.5)
    for options in ({}, {"config": CONFIG}, {"out": inputs.out}):
        out, lse = attend(inputs, **options)
        assert (out.shape, out.dtype) == (inputs.q.shape, inputs.q.dtype)
        assert_right(inputs, out, lse)
        assert out is options.get("out", out)


@pytest.mark.parametrize("head_dim", [64, 59])
def test_caches_that_are_not_aligned(head_dim, device):
    """A number past a multiple of 16 bytes, and a number more from row to row."""
    inputs = make_inputs(AttentionProblem(2, 4, 2, 70, 64), device)
    memory = torch.randn(2, 70, 4, head_dim + 1, dtype=torch.float16, device=device)
    k_cache, v_cache = memory[..., 1:].split(2, dim=2)
    inputs = cut(inputs, slice(head_dim), ("q", "out"))
    inputs = replace(inputs, k_cache=k_cache, v_cache=v_cache, softmax_scale=head_dim**-0.5)
    before = memory.clone()
    for length in (70, 37):
        out, lse = attend(inputs, cache_seqlens=length)
        assert_right(replace(inputs, context=length), out, lse)
    assert torch.equal(memory, before)


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [slice(59), slice(5, 61)], ids=["head_dim 59", "misaligned"])
@pytest.mark.parametrize(
    "kinds",
    [{}, {"append": 2, "rotary_dim": 16}, {"sinks": True}],
    ids=["plain", "append", "sinks"],
)
def test_copies_for_the_cuda_kernel(kinds, columns, device):
    inputs = make_inputs(AttentionProblem(2, 8, 2, 300, 64, q_len=2, **kinds), device)
    inputs = cut(inputs, columns)
    for _ in range(2):
        assert_right(inputs, *called(inputs, config=None))


@pytest.mark.parametrize("out_is_given", [False, True])
@pytest.mark.parametrize(
    ("kinds", "names"),
    [
        ({}, ALL),
        ({"append": 2, "rotary_dim": 16}, ALL),
        ({"v_head_dim": 64}, K_SIDE),
        ({"v_head_dim": 64, "append": 1}, V_SIDE),
        ({"q_lens": (1, 4)}, ALL),
    ],
)
def test_a_head_dim_that_is_no_multiple_of_8_is_padded(kinds, names, out_is_given, prepared_for):
    inputs = cut(make_inputs(replace(PLAIN, **kinds), "cpu"), FIRST_59, names)
    for _ in range(2):
        given = {"out": torch.empty_like(inputs.out)} if out_is_given else {}
        out, lse = called(inputs, **given)
        assert out is given.get("out", out)
        assert out.shape == inputs.out.shape
        assert_right(inputs, out, lse)
    assert [(own.q.shape[-1], own.out.shape[-1]) for own in prepared_for] == [(64, 64)]
    assert prepared_for[0].softmax_scale == inputs.softmax_scale


def test_the_scale_is_that_of_the_head_dim_before_padding(prepared_for):
    inputs = cut(make_inputs(PLAIN, "cpu"), FIRST_59)
    out, lse = called(inputs, softmax_scale=None)
    assert_right(replace(inputs, softmax_scale=59**-0.5), out, lse)
    assert prepared_for[0].softmax_scale == 59**-0.5


def test_an_fp8_cache_is_padded_to_a_multiple_of_16(prepared_for):
    inputs = cut(make_inputs(replace(PLAIN, kv_dtype="e4m3"), "cpu"), slice(40))
    assert_right(inputs, *called(inputs))
    assert prepared_for[0].k_cache.shape[-1] == prepared_for[0].q.shape[-1] == 48


@pytest.mark.parametrize(
    ("k_dim", "v_dim"),
    [
        *((264, 264), (320, 256), (64, 264), (504, 512), (323, 64), (192, 381)),
        *((576, 512), (513, 128), (570, 300)),
    ],
)
@pytest.mark.parametrize("kinds", [{}, {"append": 2, "rotary_dim": 32}, {"kv_dtype": "e4m3"}])
def test_head_dims_above_256_are_padded(kinds, k_dim, v_dim, prepared_for):
    inputs = make_inputs(replace(PLAIN, head_dim=576, v_head_dim=512, **kinds), "cpu")
    inputs = cut(cut(inputs, slice(k_dim), K_SIDE), slice(v_dim), V_SIDE)
    for _ in range(2):
        expected = appended(inputs) if "append" in kinds else None
        out, lse = called(inputs)
        assert out.shape == inputs.out.shape
        assert_right(inputs, out, lse)
        if expected is not None:
            # Rotated, which `appended` is not.
            assert torch.equal(bits(inputs.v_cache), bits(expected[1]))
            assert not torch.equal(bits(inputs.k_cache), bits(expected[0]))
    (own,) = prepared_for
    dims = tuple(dim if dim <= 256 else 512 if dim <= 512 else 576 for dim in (k_dim, v_dim))
    assert (own.k_cache.shape[-1], own.v_cache.shape[-1]) == dims


@pytest.mark.parametrize(
    ("k_dim", "v_dim", "sentence"),
    [
        (64, 520, "a v_cache of head_dim 520 yet: choose 512 at most"),
        (576, 576, "a v_cache of head_dim 576 yet: choose 512 at most"),
        (577, 64, "head_dim 577 yet: choose 576 at most$"),
    ],
)
def test_larger_head_dims_are_refused(k_dim, v_dim, sentence):
    q, k, v = (torch.zeros(1, 40, 2, dim).half() for dim in (k_dim, k_dim, v_dim))
    with pytest.raises(NotImplementedError, match=sentence):
        lean_attn_with_kvcache(q, k, v)


@pytest.mark.parametrize("kinds", APPENDS.values(), ids=APPENDS)
@pytest.mark.parametrize("change", ["a head_dim of 59", "misaligned"])
def test_what_is_appended_is_written_to_the_callers_caches_and_nothing_else(
    kinds, change, prepared_for
):
    whole = make_inputs(replace(PLAIN, **kinds), "cpu")
    inputs = cut(whole, FIRST_59)
    if change == "misaligned":
        inputs = replace(whole, **{name: misaligned(getattr(whole, name)) for name in CACHES})
    past_end = [bits(cache[..., 59:]).clone() for cache in (whole.k_cache, whole.v_cache)]
    for _ in range(2):
        expected = appended(inputs)
        out, lse = called(inputs)
        for cache, after in zip((inputs.k_cache, inputs.v_cache), expected, strict=True):
            assert torch.equal(bits(cache), bits(after))
        assert_right(inputs, out, lse)
        assert inputs.k_new is not None
        inputs.k_new.neg_()
    # The launch is over copies, and appends to none.
    assert [own.k_new for own in prepared_for] == [None]
    for cache, before in zip((whole.k_cache, whole.v_cache), past_end, strict=True):
        assert torch.equal(bits(cache[..., 59:]), before)


@pytest.mark.parametrize("name", ["q", "k_new", "rotary_sin", "out"])
def test_caches_are_copied_only_where_they_need_it(name, prepared_for):
    inputs = make_inputs(replace(PLAIN, append=2, rotary_dim=16), "cpu")
    inputs = replace(inputs, **{name: misaligned(getattr(inputs, name))})
    for _ in range(2):
        out, lse = called(inputs, out=inputs.out)
        assert out is inputs.out
        assert_right(inputs, out, lse)
    (own,) = prepared_for
    assert own.k_cache is inputs.k_cache
    assert getattr(own, name).data_ptr() % 16 == 0


def test_either_cache_may_be_the_misaligned_one(prepared_for):
    """A signature has the alignment of the two together."""
    for name in (*CACHES, "k_cache"):
        inputs = make_inputs(replace(PLAIN, sinks=True), "cpu")
        inputs = replace(inputs, **{name: misaligned(getattr(inputs, name))})
        assert_right(inputs, *called(inputs))
    assert [own.k_cache.is_contiguous() for own in prepared_for] == [True]


def test_strides_that_are_no_multiple_of_16_bytes(prepared_for):
    wide = make_inputs(replace(PLAIN, head_dim=72, sinks=True, kv_layout="NHD"), "cpu")
    rows = {
        name: getattr(wide, name).flatten(-2)[..., : 2 * 67].unflatten(-1, (2, 67))[..., :64]
        for name in CACHES
    }
    inputs = replace(cut(wide, slice(64), ("q", "out")), **rows)
    assert inputs.k_cache.stride(2) * 2 % 16
    for _ in range(2):
        assert_right(inputs, *called(inputs))
    assert [own.k_cache.is_contiguous() for own in prepared_for] == [True]


@pytest.mark.parametrize("kinds", [{}, {"page_size": 16}])
def test_what_tritons_kernel_takes_is_not_copied(kinds, prepared_for):
    inputs = make_inputs(replace(PLAIN, **kinds), "cpu")
    inputs = replace(inputs, k_cache=misaligned(inputs.k_cache))
    assert_right(inputs, *called(inputs))
    assert prepared_for[0].k_cache is inputs.k_cache
    assert prepared_for[0].v_cache is inputs.v_cache


@pytest.mark.parametrize("kinds", [{}, {"append": 2}])
def test_torch_compile_sees_the_shapes_of_the_call(kinds, prepared_for):
    inputs = cut(make_inputs(replace(PLAIN, **kinds), "cpu"), FIRST_59)
    expected = appended(inputs) if kinds else [inputs.k_cache.clone(), inputs.v_cache.clone()]
    assert_right(inputs, *compiled(called)(inputs))
    for cache, after in zip((inputs.k_cache, inputs.v_cache), expected, strict=True):
        assert torch.equal(bits(cache), bits(after))


def test_fake_tensors_give_the_shapes_of_the_call(prepared_for):
    with FakeTensorMode():
        q = torch.empty(3, 5, 8, 59, dtype=torch.bfloat16, device="cuda")
        cache = torch.empty(3, 90, 2, 59, dtype=torch.bfloat16, device="cuda")
        out, lse = lean_attn_with_kvcache(q, cache, cache, return_softmax_lse=True)
        assert (out.shape, out.stride()) == (q.shape, q.stride())
        assert lse.shape == (3, 8, 5)
    assert prepared_for == []


def test_copies_are_not_kept(prepared_for):
    inputs = cut(make_inputs(PLAIN, "cpu"), FIRST_59)
    assert_right(inputs, *called(inputs))
    first = weakref.ref(prepared_for.pop().k_cache)
    gc.collect()
    assert first() is None
