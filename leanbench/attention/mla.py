"""Multi-head latent attention: `lean_mla_with_kvcache`."""

from __future__ import annotations

import math
from typing import Any

import torch

from leanbench.attention import fast
from leanbench.attention.call import (
    NOT_A_NUMBER,
    WHOLE_NUMBERS,
    Call,
    as_int,
    check_types,
    flag,
    host_length,
    is_fp8,
    short_repr,
)
from leanbench.attention.checks import check_device, check_layouts
from leanbench.attention.mla_launch import (
    LatentShapes,
    as_attention,
    check_latent,
    check_latent_out,
)
from leanbench.attention.prepared import attend
from leanbench.attention.run import attend_nothing, check_no_derivatives, is_traced
from leanbench.core.extras import Extras
from leanbench.kernels.mla.build import LATENT_DIM, LATENTS, SCALED_ROW_BYTES, VALUE_DIM


@fast.known_first(latent=True)
def lean_mla_with_kvcache(
    learns: int,
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    cache_seqlens: torch.Tensor | int | None = None,
    *,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    head_dim_v: int | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    causal: bool = False,
    return_softmax_lse: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute decode attention over a latent cache (MLA) on Hopper GPUs.

    All query heads attend to one row of 576 numbers per token. The row is K; its first 512 numbers
    are V. Shapes are those of FlashMLA. In the same way, rows have 512 numbers, all of them V, 320
    or 288, of which 256 are V, or 160, of which 128 are V; fp8 is for rows of 576 and 512.

    Pages can have a single token, so that a `block_table` of chosen tokens is sparse attention: row
    i has the numbers of the tokens that sequence i sees, in any order, its first `cache_seqlens`
    are read, and a token counts as often as its number stands there. With pages of other than a
    multiple of 64 tokens, a number outside of `kv_cache`, such as -1, stands for no token: it is
    skipped wherever it stands. All query tokens of a sequence see one choice; query tokens with
    choices of their own are sequences of one query token.

    The kernel does not support `q` in fp8 or several KV heads. Such calls convert `q` to bf16 and
    launch once per KV head: for compatibility, not for speed.

    Empty batches, queries and caches are handled as by `lean_attn_with_kvcache`, and so are NaN and
    infinities in a token that only some query tokens see: its row is K and V.

    Args:
        q: (batch, q_len, q_heads, 576), bf16 or fp16, or fp8 with an fp8 cache. Copied in every
            call unless positions and heads are contiguous.
        kv_cache: (batch, tokens, 576) or (batch, tokens, kv_heads, 576); with a `block_table`
            (pages, page_size, kv_heads, 576) or (pages, page_size, 576). In the dtype of `q`, or
            all 576 numbers in torch.float8_e4m3fn or float8_e5m2; with pages of other than a
            multiple of 64 tokens also rows of 656 bytes, as DeepSeek's, in torch.uint8 or
            float8_e4m3fn. Fastest with one KV head, and
            dense caches with a page_size that is a multiple of 64.
        cache_seqlens: Number of tokens: an int, or (batch,) int32 on the device of `q`. None: all.
            A sequence of length 0 gets output 0 and LSE -inf.
        block_table: (batch, pages of a sequence), int32: the number of each page.
        softmax_scale: Positive; 576 ** -0.5 by default.
        head_dim_v: Columns of V, which follow from those of `q`: 512 of 576.
        q_descale: One number, or (batch, kv_heads), fp32, on the device of `q`: scale of an fp8
            `q`. Default 1. Ignored unless `q` is fp8.
        k_descale: Like `q_descale`, positive, for an fp8 `kv_cache` as K and V.
        causal: True: the last query token sees the whole sequence, each earlier one a token less.
            False: all query tokens see all tokens.
        return_softmax_lse: Also return the LSE, (batch, q_heads, q_len), fp32.
        out: (batch, q_len, q_heads, 512), receives the output; None: a new tensor.

    Raises:
        NotImplementedError: A tensor requires a gradient or carries a tangent.
        TypeError: An argument that must be a tensor is not.
        ValueError: Shapes, dtypes, strides or devices are inconsistent.
        UserError: The tensors are not on a Hopper GPU, or NVRTC is missing.
    """
    check_types(q=q, kv_cache=kv_cache)
    optional = {"block_table": block_table, "out": out}
    check_types(**{name: tensor for name, tensor in optional.items() if tensor is not None})
    if q.is_nested:
        check_layouts(Call(q, kv_cache, kv_cache, latent=True))
    # A tracer's symbol has no hash.
    columns = int(q.shape[-1]) if q.dim() else 0
    value_dim, head_dim_v = LATENTS.get(columns, VALUE_DIM), as_int(head_dim_v)
    if head_dim_v is not None and (
        not isinstance(head_dim_v, WHOLE_NUMBERS) or head_dim_v != value_dim
    ):
        raise ValueError(
            f"head_dim_v is {short_repr(head_dim_v)}: only {value_dim} is supported, pass that"
        )
    try:
        scale = None if softmax_scale is None else float(softmax_scale)
    except NOT_A_NUMBER:
        scale = math.nan
    if scale is not None and not 0 < scale < math.inf:
        raise ValueError(f"softmax_scale is {short_repr(softmax_scale)}: pass a number above 0")
    if not isinstance(causal, bool):
        causal = flag("causal", causal, "lean_mla_with_kvcache")
    if not isinstance(return_softmax_lse, bool):
        return_softmax_lse = flag("return_softmax_lse", return_softmax_lse, "lean_mla_with_kvcache")
    if kv_cache.dtype == torch.uint8 and kv_cache.shape[-1:] == (SCALED_ROW_BYTES,):
        kv_cache = kv_cache.view(torch.float8_e4m3fn)
    cache = kv_cache
    if block_table is not None and kv_cache.dim() == 3:
        cache = kv_cache.unsqueeze(2)
    lengths, length = cache_seqlens, None
    if not isinstance(lengths, torch.Tensor):
        lengths, length = None, host_length(cache_seqlens)
    q_is_fp8, cache_is_fp8 = is_fp8(q), is_fp8(kv_cache)
    fields = (q, cache, cache, lengths, length, block_table, out, scale, causal)
    call = Call(*fields, latent=True, learns=learns)
    if cache_is_fp8 and k_descale is not None:
        call = call._replace(extras=Extras(k_descale=_checked_scales("k_descale", k_descale, call)))
    q_scales = None
    if cache_is_fp8 and q_is_fp8 and q_descale is not None:
        q_scales = _checked_scales("q_descale", q_descale, call)
    check_no_derivatives(call, *(() if q_scales is None else (q_scales,)))
    if cache_is_fp8 and q_is_fp8:
        call = call._replace(q=_in_bf16(q, q_scales))
    is_empty = q.numel() == 0 or kv_cache.numel() == 0
    rows = (columns, SCALED_ROW_BYTES) if columns == LATENT_DIM else (columns,)
    try:
        if is_empty and columns in LATENTS and kv_cache.dim() and kv_cache.shape[-1] in rows:
            nothing = call._replace(k_cache=cache[..., :columns])
            result, lse = attend_nothing(as_attention(nothing), return_softmax_lse)
        else:
            result, lse = _attend_by_head(call, return_softmax_lse)
    except LatentShapes:
        # Report the tensors as passed, not those of one KV head.
        raise LatentShapes.of(q, kv_cache, block_table) from None
    except RuntimeError:
        check_layouts(call)
        raise
    return result if lse is None else (result, lse)


def _group_size(q: torch.Tensor, kv_heads: int) -> int:
    if not kv_heads or q.shape[2] % kv_heads:
        raise ValueError(
            f"q has {q.shape[2]} heads, kv_cache {kv_heads}: expected a multiple of those"
        )
    return q.shape[2] // kv_heads


def _kv_heads(cache: torch.Tensor) -> int:
    return cache.shape[2] if cache.dim() == 4 else 1


def _checked_scales(name: str, scales: Any, call: Call) -> torch.Tensor:
    """Return scales as (1,) or (batch, kv_heads), with any strides."""
    if not isinstance(scales, torch.Tensor):
        raise ValueError(
            f"{name} is {scales!r}, on the host: pass a torch.float32 tensor of one number on the"
            " device of q"
        )
    check_device(name, scales, call.q)
    if scales.layout is not torch.strided:
        check_layouts(call, **{name: scales})
    shape = (*call.q.shape[:1], _kv_heads(call.k_cache))
    fits = scales.dim() == 2 and all(
        size in (1, full) for size, full in zip(scales.shape, shape, strict=False)
    )
    if scales.dtype != torch.float32 or not (scales.numel() == 1 or fits):
        raise ValueError(
            f"{name} is {tuple(scales.shape)} {scales.dtype}: expected one number, or {shape}, in"
            " torch.float32"
        )
    if scales.numel() == 1:
        return scales if scales.dim() == 1 else scales.reshape(1)
    return scales.expand(shape)


def _in_bf16(q: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """Convert an fp8 `q`, multiplied by the scales of its KV heads."""
    # Other shapes than (batch, q_len, q_heads, head_dim) are rejected later.
    if scales is None or (scales.dim() == 2 and q.dim() != 4):
        return q.to(torch.bfloat16)
    if scales.dim() == 2:
        group = _group_size(q, scales.shape[1])
        scales = scales.repeat_interleave(group, dim=1)[:, None, :, None]
    return (q.float() * scales).to(torch.bfloat16)


def _attend_by_head(call: Call, with_lse: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Launch once per KV head."""
    q, cache = call.q, call.k_cache
    kv_heads = _kv_heads(cache)
    if kv_heads < 2 or q.dim() != 4:
        return _attend(call, with_lse)
    if cache.shape[3] != q.shape[3] or int(q.shape[3]) not in LATENTS:
        raise LatentShapes.of(q, cache, call.block_table)
    group = _group_size(q, kv_heads)
    if cache.element_size() * cache.stride(2) % 16:
        raise ValueError(
            "kv_cache steps by no multiple of 16 bytes from head to head: pass an aligned tensor"
        )
    out = call.out
    if out is None:
        out = q.new_empty((*q.shape[:3], LATENTS[int(q.shape[3])]))
    else:
        check_latent_out(call, out)
    lses = []
    for head in range(kv_heads):
        heads = slice(head * group, (head + 1) * group)
        # The kernel reads positions and heads as one dimension.
        rows = q[:, :, heads].contiguous() if q.shape[1] > 1 else q[:, :, heads]
        latent = cache[:, :, head : head + 1]
        one = call._replace(q=rows, k_cache=latent, v_cache=latent, out=out[:, :, heads])
        one = one._replace(learns=0)
        scale = call.all_extras.k_descale
        if scale is not None and scale.dim() == 2:
            one = one._replace(extras=Extras(k_descale=scale[:, head : head + 1]))
        lses.append(_attend(one, with_lse)[1])
    return out, torch.cat(lses, dim=1) if with_lse else None


def _attend(call: Call, with_lse: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    if not is_traced(call.q, call.k_cache, call.k_cache):
        return attend(call, with_lse)
    check_layouts(call)
    result, lse = torch.ops.leanbench.lean_mla_with_kvcache.default(
        call.q,
        call.k_cache,
        call.cache_seqlens,
        call.length,
        call.block_table,
        call.softmax_scale,
        call.causal,
        call.all_extras.k_descale,
    )
    if call.out is not None:
        check_latent_out(call, call.out)
        result = call.out.copy_(result)
    return result, lse if with_lse else None


def _operator_call(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    cache_seqlens: torch.Tensor | None,
    length: int | None,
    block_table: torch.Tensor | None,
    softmax_scale: float | None,
    causal: bool,
    k_descale: torch.Tensor | None,
) -> Call:
    extras = None if k_descale is None else Extras(k_descale=k_descale)
    fields = (q, kv_cache, kv_cache, cache_seqlens, length, block_table, None, softmax_scale)
    return Call(*fields, causal, extras=extras, latent=True)


def _operator(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = attend(_operator_call(*arguments), with_lse=True)
    assert lse is not None
    return out, lse


def _shapes(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call = _operator_call(*arguments)
    check_latent(call)
    call = as_attention(call)
    q = call.q
    return q.new_empty(call.out_shape), q.new_empty(call.lse_shape, dtype=torch.float32)


_LIBRARY = torch.library.Library("leanbench", "FRAGMENT")
_LIBRARY.define(
    "lean_mla_with_kvcache(Tensor q, Tensor kv_cache, Tensor? cache_seqlens, SymInt? length,"
    " Tensor? block_table, float? softmax_scale, bool causal,"
    " Tensor? k_descale) -> (Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
_LIBRARY.impl("lean_mla_with_kvcache", _operator, "CompositeExplicitAutograd")
torch.library.register_fake("leanbench::lean_mla_with_kvcache", _shapes, lib=_LIBRARY)
