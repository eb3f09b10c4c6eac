"""Calls in forms that no kernel supports directly, on a GPU, against the fp64 reference."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from forms import INT32, assert_form, gapped, pages_of, plain_form

from leanbench import lean_attn_with_kvcache, lean_mla_with_kvcache
from leanbench.core.inputs import AttentionInputs

# The thread method ends the process, because a kernel that never ends cannot be interrupted.
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180, method="thread")]
hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="lean_mla is for Hopper",
)
LENGTHS = (700, 65)
ROOM = 1024


def rand(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def numbers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=INT32, device="cuda")


def assert_right(
    call: Any, inputs: AttentionInputs, *arguments: Any, caches: Any = None, **options: Any
) -> None:
    """Make a call with outputs of NaN, and check what it wrote."""
    out = torch.full_like(inputs.out, math.nan)
    result, lse = call(*arguments, out=out, return_softmax_lse=True, **options)
    assert result is out
    assert_form(inputs, (out, lse), caches)


def maybe_pages(*caches: torch.Tensor, page_size: int | None) -> tuple[Any, ...]:
    """Return caches over pages and their block table, or as they are and None."""
    if page_size is None:
        return *caches, None
    both, table = pages_of(caches[0] if len(caches) == 1 else torch.cat(caches, -1), page_size)
    dims = [cache.shape[-1] for cache in caches]
    return *(part.contiguous() for part in both.split(dims, -1)), table


def latent_views(cache: torch.Tensor, views: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V of a cache of 576 columns: views of it, or separate tensors."""
    k, v = cache[..., 512:], cache[..., :512]
    return (k, v) if views else (k.contiguous(), v.contiguous())


@hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("page_size", [None, 16, 64])
@pytest.mark.parametrize("views", [True, False])
@pytest.mark.parametrize("q_len", [1, 2, 3, 4])
def test_qv(q_len, views, page_size, dtype):
    cache, table = maybe_pages(rand(2, ROOM, 1, 576, dtype=dtype), page_size=page_size)
    k, v = latent_views(cache, views)
    q, qv = rand(2, q_len, 16, 64, dtype=dtype), rand(2, q_len, 16, 512, dtype=dtype)
    options: dict[str, Any] = {"cache_seqlens": numbers(*LENGTHS), "block_table": table}
    for causal in (False, True):
        inputs = plain_form(q, k, v, qv, causal=causal, **options)
        assert_right(lean_attn_with_kvcache, inputs, q, k, v, qv=qv, causal=causal, **options)


@hopper
@pytest.mark.parametrize("page_size", [None, 16, 64])
@pytest.mark.parametrize("most", [4, None])
def test_packed_queries_with_qv(most, page_size):
    cache, table = maybe_pages(rand(3, ROOM, 1, 576), page_size=page_size)
    k, v = latent_views(cache, views=True)
    q, qv = rand(7, 128, 64), rand(7, 128, 512)
    options: dict[str, Any] = {
        "cache_seqlens": numbers(*LENGTHS, 1),
        "cu_seqlens_q": numbers(0, 4, 6, 7),
        "block_table": table,
        "causal": True,
    }
    inputs = plain_form(q, k, v, qv, max_seqlen_q=4, **options)
    assert_right(lean_attn_with_kvcache, inputs, q, k, v, qv=qv, max_seqlen_q=most, **options)


@hopper
def test_a_captured_call_with_qv_follows_its_tensors():
    cache, table = pages_of(rand(2, ROOM, 1, 576), 64, spare=0)
    k, v = latent_views(cache, views=True)
    q, qv, lengths = rand(2, 2, 16, 64), rand(2, 2, 16, 512), numbers(*LENGTHS)
    options: dict[str, Any] = {"cache_seqlens": lengths, "block_table": table, "causal": True}

    def call() -> Any:
        return lean_attn_with_kvcache(q, k, v, qv=qv, return_softmax_lse=True, **options)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = call()
    for tokens in (LENGTHS, (2, ROOM), (64, 63)):
        lengths.copy_(torch.tensor(tokens))
        table.copy_(torch.randperm(table.numel()).view(table.shape))
        q.normal_()
        qv.normal_()
        inputs = plain_form(q, k, v, qv, **options)
        out.fill_(math.nan)
        lse.fill_(math.nan)
        graph.replay()
        assert_form(inputs, (out, lse))


@hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("page_size", [None, 1, 16, 64, 80])
@pytest.mark.parametrize(("q_heads", "kv_heads", "q_len"), [(16, 1, 1), (32, 2, 1), (24, 3, 2)])
def test_latent_caches_of_any_heads_and_pages(q_heads, kv_heads, q_len, page_size, dtype):
    room = 1040 if page_size == 80 else ROOM
    cache, table = maybe_pages(rand(2, room, kv_heads, 576, dtype=dtype), page_size=page_size)
    q, is_fp8 = rand(2, q_len, q_heads, 576), cache.element_size() == 1
    lengths, scale = numbers(*LENGTHS), torch.tensor([0.5], device="cuda")
    scales: dict[str, Any] = {}
    if is_fp8:
        scales = dict.fromkeys(("k_descale", "v_descale"), scale.expand(2, kv_heads))
    inputs = plain_form(
        q, cache, cache[..., :512], cache_seqlens=lengths, block_table=table, causal=True, **scales
    )
    assert_right(
        lean_mla_with_kvcache,
        inputs,
        q,
        cache,
        lengths,
        block_table=table,
        k_descale=scale if is_fp8 else None,
        causal=True,
    )


@hopper
@pytest.mark.parametrize("q_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("page_size", [None, 16, 64])
def test_latent_queries_in_fp8(page_size, q_dtype):
    cache, table = maybe_pages(
        rand(2, ROOM, 1, 576, dtype=torch.float8_e4m3fn), page_size=page_size
    )
    q, lengths = rand(2, 2, 16, 576, dtype=q_dtype), numbers(*LENGTHS)
    # Powers of two, and 1.5 times that: q times either is exact in bf16.
    q_scale, k_scale = torch.tensor([[0.25], [1.5]], device="cuda")
    inputs = plain_form(
        q,
        cache,
        cache[..., :512],
        cache_seqlens=lengths,
        block_table=table,
        q_descale=q_scale.expand(2, 1),
        k_descale=k_scale.expand(2, 1),
        v_descale=k_scale.expand(2, 1),
    )
    assert_right(
        lean_mla_with_kvcache,
        inputs,
        q,
        cache,
        lengths,
        block_table=table,
        q_descale=q_scale,
        k_descale=k_scale,
    )


@hopper
def test_torch_compile_takes_several_kv_heads_and_any_pages():
    cache, table = pages_of(rand(2, ROOM, 2, 576), 16)
    q, lengths = rand(2, 1, 32, 576), numbers(*LENGTHS)

    def call(q: torch.Tensor) -> Any:
        out, lse = lean_mla_with_kvcache(
            q + 0, cache, lengths, block_table=table, return_softmax_lse=True
        )
        return out * 2, lse

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    out, lse = compiled(q)
    inputs = plain_form(q, cache, cache[..., :512], cache_seqlens=lengths, block_table=table)
    assert_form(inputs, (out / 2, lse))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (2, 1), (1, 2), (2,), (2, 2)], ids=str)
def test_scales_that_expand(shape):
    dtype = torch.float8_e4m3fn
    q, k, v = (rand(2, *own, 128, dtype=dtype) for own in ((2, 8), (ROOM, 2), (ROOM, 2)))
    lengths, scales = numbers(*LENGTHS), torch.rand((3, *shape), device="cuda") + 0.5
    names = ("q_descale", "k_descale", "v_descale")
    given: dict[str, Any] = dict(zip(names, scales, strict=True))
    whole: dict[str, Any] = {name: own.expand(2, 2) for name, own in given.items()}
    inputs = plain_form(q, k, v, cache_seqlens=lengths, causal=True, **whole)
    assert_right(
        lean_attn_with_kvcache, inputs, q, k, v, cache_seqlens=lengths, causal=True, **given
    )


@pytest.mark.parametrize("window", [None, (None, None), (-1, None), (100, None), (100, 0)])
def test_windows_of_none(window):
    q, k, v = rand(2, 3, 8, 64), rand(2, ROOM, 2, 64), rand(2, ROOM, 2, 64)
    left = -1 if window is None or window[0] is None else window[0]
    for causal in (False, True):
        right = 0 if window == (100, 0) and not causal else -1
        lengths = numbers(*LENGTHS)
        inputs = plain_form(
            q, k, v, cache_seqlens=lengths, causal=causal, window_left=left, window_right=right
        )
        assert_right(
            lean_attn_with_kvcache,
            inputs,
            q,
            k,
            v,
            cache_seqlens=lengths,
            causal=causal,
            window_size=window,
        )


@pytest.mark.parametrize("most", [None, 4, 5, 100])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_the_most_query_tokens(most, batch_invariant):
    q, k, v = rand(7, 8, 128), rand(3, ROOM, 2, 128), rand(3, ROOM, 2, 128)
    options: dict[str, Any] = {
        "cache_seqlens": numbers(*LENGTHS, 1),
        "cu_seqlens_q": numbers(0, 4, 6, 7),
        "causal": True,
    }
    inputs = plain_form(q, k, v, max_seqlen_q=4, **options)
    assert_right(
        lean_attn_with_kvcache,
        inputs,
        q,
        k,
        v,
        max_seqlen_q=most,
        batch_invariant=batch_invariant,
        **options,
    )


@pytest.mark.parametrize(("batch", "q_len", "tokens"), [(0, 1, 64), (2, 0, 64), (2, 3, 0)], ids=str)
def test_sizes_of_none(batch, q_len, tokens):
    q, cache = rand(batch, q_len, 8, 64), rand(batch, tokens, 2, 64)
    sinks = torch.arange(8.0, device="cuda")
    for own in (None, sinks):
        out = torch.full_like(q, math.nan)
        result, lse = lean_attn_with_kvcache(
            q, cache, cache, cache_seqlens=0, out=out, sinks=own, return_softmax_lse=True
        )
        assert result is out
        assert out.eq(0).all()
        expected = torch.full_like(sinks, -math.inf) if own is None else own
        assert lse.equal(expected[:, None].expand(batch, 8, q_len))


def test_block_tables_at_any_distance():
    k, table = pages_of(rand(3, ROOM, 2, 128), 64)
    v = torch.randn_like(k).where(k.isnan().logical_not(), torch.nan)
    wide = torch.full((3, 40), 2**31 - 1, dtype=INT32, device="cuda")
    wide[:, 5 : 5 + table.shape[1]] = table
    q, lengths = rand(3, 1, 8, 128), numbers(*LENGTHS, 0)
    for own in (wide[:, 5 : 5 + table.shape[1]], table[:1].expand(3, -1)):
        inputs = plain_form(q, k, v, cache_seqlens=lengths, block_table=own)
        assert_right(
            lean_attn_with_kvcache, inputs, q, k, v, cache_seqlens=lengths, block_table=own
        )


@hopper
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("v_dim", [512, 256])
@pytest.mark.parametrize("q_len", [1, 3, 64])
@pytest.mark.parametrize(
    ("kv_heads", "page_size", "picked"), [(1, None, False), (2, 1, True), (6, 128, True)]
)
def test_qv_over_copies(kv_heads, page_size, picked, q_len, v_dim, causal):
    rows, table = 4 if picked else 2, None
    both = rand(rows, ROOM, kv_heads, 64 + v_dim)
    if page_size is not None:
        both, table = pages_of(both, page_size)
    k, v = both[..., :64].contiguous(), both[..., 64:].contiguous()
    q, qv = rand(2, q_len, 6, 64), rand(2, q_len, 6, v_dim)
    options: dict[str, Any] = {
        "cache_seqlens": numbers(*LENGTHS),
        "block_table": table,
        "cache_batch_idx": numbers(3, 0) if picked else None,
        "causal": causal,
    }
    inputs = plain_form(q, k, v, qv, **options)
    assert_right(lean_attn_with_kvcache, inputs, q, k, v, qv=qv, **options)


@pytest.mark.parametrize("v_dim", [512, 256])
@pytest.mark.parametrize("q_len", [1, 3, 64])
@pytest.mark.parametrize("kind", ["softcap", "sinks", "alibi_slopes"])
def test_qv_beside_scores_of_other_kinds(kind, q_len, v_dim):
    """64 and 512 columns are included, which have their own kernel without these features."""
    k, v = rand(2, ROOM, 2, 64), rand(2, ROOM, 2, v_dim)
    q, qv, lengths = rand(2, q_len, 6, 64), rand(2, q_len, 6, v_dim), numbers(*LENGTHS)
    numbers_of_heads = torch.linspace(0.1, 0.9, 6, device="cuda")
    options: dict[str, Any] = {kind: 15.0 if kind == "softcap" else numbers_of_heads}
    inputs = plain_form(q, k, v, qv, cache_seqlens=lengths, causal=True, **options)
    assert_right(
        lean_attn_with_kvcache,
        inputs,
        q,
        k,
        v,
        cache_seqlens=lengths,
        causal=True,
        qv=qv,
        **options,
    )


@hopper
@pytest.mark.parametrize("v_dim", [512, 256])
def test_torch_compile_takes_a_call_with_qv(v_dim):
    torch._dynamo.reset()
    k, v = rand(2, ROOM, 1, 64), rand(2, ROOM, 1, v_dim)
    q, qv, lengths = rand(2, 2, 16, 64), rand(2, 2, 16, v_dim), numbers(*LENGTHS)
    options: dict[str, Any] = {"cache_seqlens": lengths, "causal": True}

    def call(q: torch.Tensor) -> Any:
        out, lse = lean_attn_with_kvcache(q + 0, k, v, qv=qv, return_softmax_lse=True, **options)
        return out * 2, lse

    out, lse = torch.compile(call, fullgraph=True, backend="aot_eager")(q)
    assert_form(plain_form(q, k, v, qv, **options), (out / 2, lse))


@pytest.mark.parametrize(
    ("k_dim", "v_dim"),
    [
        *((64, 256), (64, 512), (32, 512), (32, 256), (192, 128), (160, 128), (512, 256)),
        *((320, 256), (264, 264), (64, 320), (504, 72), (59, 300), (576, 512), (576, 128)),
    ],
)
@pytest.mark.parametrize(("q_len", "page_size"), [(1, None), (1, 1), (4, 16), (64, 1)])
def test_pairs_of_head_dims(q_len, page_size, k_dim, v_dim):
    k, v, table = maybe_pages(rand(2, ROOM, 2, k_dim), rand(2, ROOM, 2, v_dim), page_size=page_size)
    q, lengths = rand(2, q_len, 6, k_dim), numbers(*LENGTHS)
    new = rand(2, q_len, 2, k_dim), rand(2, q_len, 2, v_dim)
    inputs = plain_form(q, k, v, cache_seqlens=lengths, block_table=table, causal=True)
    options: dict[str, Any] = {"cache_seqlens": lengths, "block_table": table, "causal": True}
    assert_right(lean_attn_with_kvcache, inputs, q, k, v, **options)
    own: dict[str, Any] = {"k_new": new[0], "v_new": new[1], **options}
    inputs = plain_form(q, k.clone(), v.clone(), **own)
    assert_right(lean_attn_with_kvcache, inputs, q, k, v, *new, **options, caches=(k, v))


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("append", [False, True])
def test_numbers_between_numbers(append, packed, page_size):
    k, v, table = maybe_pages(rand(3, ROOM, 2, 128), rand(3, ROOM, 2, 128), page_size=page_size)
    table = None if table is None else gapped(table)
    q = gapped(rand(5, 8, 128) if packed else rand(2, 3, 8, 128))
    shared: dict[str, Any] = {
        "cache_seqlens": gapped(numbers(*LENGTHS)),
        "cache_batch_idx": gapped(numbers(2, 0)),
        "cache_leftpad": gapped(numbers(33, 64)),
        "block_table": table,
        "sinks": gapped(torch.linspace(-1, 1, 8, device="cuda")),
        "causal": True,
    }
    if packed:
        shared |= {"cu_seqlens_q": gapped(numbers(0, 2, 5)), "max_seqlen_q": 3}
    else:
        shared |= {"alibi_slopes": gapped(torch.rand(2, 8, device="cuda"))}
    own = dict(shared)
    new: Any = ()
    if append:
        angles = torch.rand(ROOM, 32, device="cuda") * 2 * math.pi
        shared["rotary_cos"] = own["rotary_cos"] = gapped(angles.cos().bfloat16())
        shared["rotary_sin"] = own["rotary_sin"] = gapped(angles.sin().bfloat16())
        new = gapped(rand(2, 2, 2, 128)), gapped(rand(2, 2, 2, 128))
        own |= {"k_new": new[0], "v_new": new[1], "rotary_interleaved": True}
    inputs = plain_form(q, k.clone(), v.clone(), **own)
    for _ in range(2):
        assert_right(lean_attn_with_kvcache, inputs, q, k, v, *new, **shared, caches=(k, v))


@hopper
@pytest.mark.parametrize("page_size", [None, 64])
@pytest.mark.parametrize("change", ["gaps", "positions apart", "misaligned"])
def test_latent_queries_that_do_not_lie_in_a_row(change, page_size):
    cache, table = maybe_pages(rand(2, ROOM, 1, 576), page_size=page_size)
    for _ in range(2):
        q, lengths = rand(2, 3, 16, 576), numbers(*LENGTHS)
        if change == "gaps":
            q, lengths = gapped(q), gapped(lengths)
            table = None if table is None else gapped(table)
        elif change == "positions apart":
            q = rand(2, 16, 3, 576).transpose(1, 2)
        else:
            q = torch.empty(q.numel() + 1, device="cuda").bfloat16()[1:].view(q.shape).copy_(q)
        options: dict[str, Any] = {"block_table": table, "causal": True}
        inputs = plain_form(q, cache, cache[..., :512], cache_seqlens=lengths, **options)
        assert_right(lean_mla_with_kvcache, inputs, q, cache, lengths, **options)


@hopper
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_scales_of_sequences_of_a_latent_cache(kv_heads):
    dtype = torch.float8_e4m3fn
    q, cache = rand(2, 2, 16, 576, dtype=dtype), rand(2, ROOM, kv_heads, 576, dtype=dtype)
    lengths = numbers(*LENGTHS)
    for _ in range(2):
        q_scale, k_scale = 2.0 ** torch.randint(-3, 3, (2, 2, kv_heads), device="cuda")
        scales: dict[str, Any] = {"q_descale": q_scale, "k_descale": k_scale}
        inputs = plain_form(
            q, cache, cache[..., :512], cache_seqlens=lengths, v_descale=k_scale, **scales
        )
        assert_right(lean_mla_with_kvcache, inputs, q, cache, lengths, **scales)


@hopper
@pytest.mark.parametrize("page_size", [16, 64])
def test_latent_pages_without_a_dimension_for_the_kv_head(page_size):
    cache, table = pages_of(rand(2, ROOM, 1, 576), page_size)
    q, lengths = rand(2, 2, 16, 576), numbers(*LENGTHS)
    options: dict[str, Any] = {"block_table": table, "causal": True}
    inputs = plain_form(q, cache, cache[..., :512], cache_seqlens=lengths, **options)
    for _ in range(2):
        assert_right(lean_mla_with_kvcache, inputs, q, cache[:, :, 0], lengths, **options)
