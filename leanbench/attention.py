"""LeanAttention for your own code, with flash-attn's arguments and shapes."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from leanbench.calls.arguments import (
    NO_NUMBER,
    cap_of,
    check_splits,
    check_types,
    expanded,
    flag,
    most_query_tokens,
    said,
    tokens_of,
)
from leanbench.calls.call import Call, whole_number
from leanbench.calls.run import run
from leanbench.calls.window import NO_WINDOW, window_of
from leanbench.core.extras import Extras
from leanbench.kernels.lean.configs import LeanConfig
from leanbench.query_values import attend_with_qv

#: Arguments of FlashAttention-3 that change how it is computed and not what: taken and ignored.
_HINTS = ("scheduler_metadata", "pack_gqa", "sm_margin")
#: The default of `num_splits`.
_NO_HINT = 0


def lean_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] | None = NO_WINDOW,
    softcap: float = 0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = _NO_HINT,
    return_softmax_lse: bool = False,
    *,
    page_table: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    k_page_descale: torch.Tensor | None = None,
    v_page_descale: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    rotary_seqlens: torch.Tensor | None = None,
    attention_chunk: int = 0,
    sinks: torch.Tensor | None = None,
    learnable_sink: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    batch_invariant: bool = False,
    config: LeanConfig | None = None,
    **flash_attn_arguments: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Decode attention of a sequence's last query tokens over its cached tokens, by LeanAttention
    (arXiv 2405.10480).

    Arguments, their positions and meanings are those of flash-attn's `flash_attn_with_kvcache`;
    FlashAttention-3's further ones go by keyword. What no kernel here takes is refused by name
    (`leanbench list kernels` says what `lean` takes).

    The reduction runs in a fixed order: the same inputs give the same bits. For inference: there is
    no gradient. `torch.compile` takes a call whole, as the operator
    `torch.ops.leanbench.lean_attn_with_kvcache`, or `lean_attn_with_kvcache_append`, which changes
    the caches.

    Nothing is copied to or read from the host, so calls can be captured in a CUDA graph. One graph
    serves a whole generation: make the call once before the capture, which compiles, capture it
    with `cache_seqlens` and `block_table` as tensors, and between replays write new lengths and
    pages into those two with `copy_`. The caches as captured bound the lengths.

    What tensors on the device say cannot be checked without waiting for it. Lengths below 0 or past
    the cache count as the nearest ones that it has. The rest is the caller's: pages of
    `block_table` and rows of `cache_batch_idx` lie in the caches, `cu_seqlens_q` does not fall or
    pass q, nor `cu_seqlens_k_new` k, `cache_leftpad` is between 0 and the length, rows of
    `rotary_seqlens` and those of new tokens lie in the tables. With LEANBENCH_CHECK_CALLS=1 in the
    environment every call outside of a capture waits and is checked for these. No two sequences
    append to one page.

    A head_dim that is no multiple of 8, of 16 in fp8 caches, is padded, as by flash-attn, one
    between 256 and 512 to 512, of K above that to 576, and tensors that start at or step by no
    multiple of 16 bytes are copied where no kernel reads them. What does not lie in a row of any
    tensor but a cache, `out` and scales of fp8 numbers is copied, too. Such calls copy the tensors,
    caches whole, every time. torch's operators append, some twenty small kernels a call, where
    caches are copied, with `cu_seqlens_k_new` or `rotary_seqlens`, for rotary in fp8, and with
    tables shorter than the cache. Both are for compatibility, not speed.

    A batch, query tokens or a cache of none are taken outside of `torch.compile`, unless tokens are
    appended: nothing is launched, the output is 0 and the LSE -inf, or the sink's logit.

    Partials travel through a workspace that belongs to the stream, or to the graph that captures
    the call: streams, and graphs with memory pools of their own, may run at the same time.

    Args:
        q: (batch, q_len, q_heads, head_dim), fp16 or bf16, or fp8 where the caches are. The query
            tokens are the sequence's last. With `cu_seqlens_q`: (query tokens, q_heads, head_dim).
        k_cache: (batch, tokens, kv_heads, head_dim); any strides, head_dim contiguous; of the dtype
            of `q`, or torch.float8_e4m3fn or float8_e5m2. `q_heads` is a multiple of `kv_heads`. A
            cache stored as (batch, kv_heads, tokens, head_dim) is passed as
            `cache.transpose(1, 2)`. Rows past the batch, as of a cache for a larger one, are not
            read. With a `block_table`: (pages, page_size, kv_heads, head_dim).
        v_cache: like `k_cache`; may have another head_dim, which the output then has.
        k: (batch, new tokens, kv_heads, head_dim), in the caches' dtype: written into `k_cache` in
            place, from each sequence's `cache_seqlens` on, then attended to. What is past the
            cache's capacity, which the host cannot see of lengths on the device, is left out.
        v: like `k`, for `v_cache`.
        rotary_cos: (positions, rotary_dim / 2), in the dtype of `q`, with a position for every
            token in use, with a `block_table` for every token of the cache's capacity: `k` is
            rotated by rows `cache_seqlens`, `cache_seqlens` + 1 and so on, and so is `q` with a
            causal mask, a window or chunks; without, all of `q` by row `cache_seqlens`; queries
            past the last row by that. Both are rounded to their dtype again.
        rotary_sin: like `rotary_cos`.
        cache_seqlens: tokens in use, those of `k` not included, the query tokens otherwise
            included: one number, or (batch,) int32 on the same device. None: all of them, with a
            `block_table` all of its pages. A sequence of length 0 gives output 0 and LSE -inf.
        cache_batch_idx: (batch,) int32: the row of the caches, or of the `block_table`, that each
            sequence has; they may then have any number of rows.
        cache_leftpad: (batch,) int32: the token that each sequence begins with.
        block_table: (batch, pages of a sequence), int32, rows at any distance, on the same device:
            where each page of a sequence is in the caches. Entries past a sequence's end are not
            followed.
        softmax_scale: defaults to head_dim ** -0.5, of `q` as passed; see `qv`.
        causal: the last query token sees the whole sequence and each one before it a token less;
            one that sees none gives output 0 and LSE -inf. False: all see the whole sequence. Makes
            no difference to a single one. 0 and 1 are taken for False and True.
        window_size: (left, right): a query token at position p sees the tokens p - left to
            p + right; -1 or None: no limit.
        softcap: scores s become softcap x tanh(s / softcap), at most 10,000; 0: they stay.
        rotary_interleaved: True: columns 0 and 1 are rotated together, 2 and 3, and so on; False: 0
            and rotary_dim / 2 (GPT-NeoX).
        alibi_slopes: (q_heads,) or (batch, q_heads), fp32: scores less slope x distance. The LSE is
            of these scores; flash-attn's causal one is above by slope x the query token's position,
            because it adds slope x the token's position in place of the distance.
        num_splits: a whole number, a hint that is ignored: work is not split into so many parts of
            a sequence.
        return_softmax_lse: also return the logarithm of the sum of exponentials, (batch, q_heads,
            q_len), fp32; with `cu_seqlens_q`, (q_heads, query tokens).
        page_table: FlashAttention-3's name of `block_table`.
        q_descale: (batch, kv_heads) or what expands to it, such as one number in a tensor, fp32,
            any strides: what fp8 numbers of `q` are multiplied by, those of a KV head's group;
            None: 1. Ignored, as by FlashAttention-3, where `q` is not fp8.
        k_descale: like `q_descale`, for `k_cache` and `k`.
        v_descale: like `q_descale`, for `v_cache` and `v`.
        k_page_descale: (pages,) or (pages, kv_heads), fp32, any strides: what fp8 numbers of each
            page of `k_cache` are multiplied by, and by `k_descale` where that is given, too. `k` is
            written as it is: its numbers are multiplied by the scale of the page that they go to.
            None: 1. With a `block_table` and fp8 caches, and together with `v_page_descale`.
        v_page_descale: like `k_page_descale`, for `v_cache` and `v`.
        cu_seqlens_q: (batch + 1,) int32: where each sequence's query tokens begin in `q`, and their
            number. Of a sequence that has none, new tokens may be left unwritten.
        max_seqlen_q: with `cu_seqlens_q`: the most query tokens of a sequence; of one that has
            more, outputs are left unwritten. None: all of `q`, for which a call of many short
            sequences has too many CTAs and takes longer. Ignored without `cu_seqlens_q`.
        cu_seqlens_k_new: (batch + 1,) int32: where each sequence's new tokens begin in `k` and `v`,
            and their number; `k` and `v` are then (new tokens, kv_heads, head_dim).
        rotary_seqlens: (batch,) int32: rows of the rotary tables in place of those that begin at
            `cache_seqlens`.
        attention_chunk: a query token at position p sees the tokens from p - p % attention_chunk
            to before attention_chunk further (Llama 4); 0: no limit.
        sinks: (q_heads,), fp32, fp16 or bf16: a logit more in each row's denominator, with no value
            (gpt-oss); the LSE includes it.
        learnable_sink: another name of `sinks`.
        qv: like `q`, with the columns of `v_cache`: scores are q k + qv v, as FlashAttention-3
            attends over a latent cache whose two views `k_cache` and `v_cache` are; `softmax_scale`
            defaults to (columns of `q` and of `qv`) ** -0.5. In 16 bits. 64 and 512 columns are a
            call of `leanbench.lean_mla_with_kvcache` on Hopper GPUs, without `softcap`,
            `alibi_slopes`, `sinks`, `batch_invariant`, `config` and scales of 0 and less; others,
            up to 576 together, are a plain call. Both caches are copied into one in every call, but
            for 64 and 512 columns that are views of one; windows, chunks and paddings over these
            copy what each query token sees, tokens are appended by torch's operators: for
            compatibility, not for speed.
        out: where the output is written, shaped as it, head_dim contiguous; not a part of the
            inputs. None: a new tensor.
        batch_invariant: True: the bits of a sequence's output depend on its own query, cache and
            length alone, not on the other sequences, how many there are, or the GPU's SMs. The
            workspace then grows, by a partial for every 128 to 1024 tokens of each KV head of the
            caches' capacity. With `cu_seqlens_q` they depend on `max_seqlen_q`, too, and torch's
            operators unpack `q` and pack the output, for compatibility and not for speed.
        config: launch settings, see leanbench.kernels.lean.configs. By default those that were
            tuned for this GPU (`leanbench tune`), where there are better ones than the kernel's
            heuristic for these sizes, or else the heuristic's, as for several query tokens and
            pages; with a `cache_seqlens` tensor, the heuristic's for any length up to the
            cache's capacity. See leanbench.configs.lookup.
        **flash_attn_arguments: `scheduler_metadata`, `pack_gqa` and `sm_margin`, which are ignored.
            `get_scheduler_metadata` is there for callers that make the first of them.

    Returns:
        (batch, q_len, q_heads, head_dim of V) like `q`, bf16 where that is fp8, and the LSE if
        asked for.

    Raises:
        NotImplementedError: an argument asks for what this version does not have, or a tensor for a
            gradient or a tangent.
        TypeError: flash-attn has no such argument either, or one that is to be a tensor is none.
        ValueError: shapes, dtypes or devices do not fit together, or a `config` without
            `fixed_run_tiles` and `batch_invariant` do not.
        UserError: the tensors are not on a GPU, and Triton's interpreter was not asked for; or the
            workspace of `batch_invariant` would be too large.
        RuntimeError: a CUDA graph is captured, and no call was made on this GPU before.
    """
    if flash_attn_arguments:
        _refuse_unsupported(flash_attn_arguments)
    if not (
        isinstance(q, torch.Tensor)
        and isinstance(k_cache, torch.Tensor)
        and isinstance(v_cache, torch.Tensor)
        and (block_table is None or isinstance(block_table, torch.Tensor))
        and (out is None or isinstance(out, torch.Tensor))
        and (config is None or isinstance(config, LeanConfig))
    ):
        _refuse_types(q, k_cache, v_cache, config, block_table=block_table, out=out)
    # Identity costs a plain call 4 ns, a type 20.
    if num_splits is not _NO_HINT and type(num_splits) is not int:
        check_splits(num_splits)
    if batch_invariant is not False and batch_invariant is not True:
        batch_invariant = flag("batch_invariant", batch_invariant)
    if return_softmax_lse is not False and return_softmax_lse is not True:
        return_softmax_lse = flag("return_softmax_lse", return_softmax_lse)
    if batch_invariant and config is not None and not config.fixed_run_tiles:
        raise ValueError(
            "batch_invariant needs a config with fixed_run_tiles: set it, or leave config out"
        )
    if not isinstance(causal, bool):
        causal = flag("causal", causal)
    in_tensor = isinstance(cache_seqlens, torch.Tensor)
    lengths = cache_seqlens if in_tensor else None
    length = None if in_tensor else whole_number(cache_seqlens)
    if page_table is not None:
        block_table = _one_of("block_table", block_table, "page_table", page_table)
        check_types(page_table=page_table)
    extras = None
    # One by one: each of these costs a plain call 10 ns, a loop or a chain twice that.
    if (
        k is not None
        or v is not None
        or rotary_cos is not None
        or rotary_sin is not None
        or cache_batch_idx is not None
        or cache_leftpad is not None
        or alibi_slopes is not None
        or q_descale is not None
        or k_descale is not None
        or v_descale is not None
        or k_page_descale is not None
        or v_page_descale is not None
        or cu_seqlens_q is not None
        or max_seqlen_q is not None
        or sinks is not None
        or learnable_sink is not None
        or (type(window_size) is not tuple or window_size != NO_WINDOW)
        or attention_chunk
        or type(softcap) not in (int, float)
        or softcap
    ):
        if learnable_sink is not None:
            sinks = _one_of("sinks", sinks, "learnable_sink", learnable_sink)
        max_seqlen_q = most_query_tokens(q, cu_seqlens_q, max_seqlen_q)
        sizes = q, k_cache, cu_seqlens_q
        extras = Extras(
            k,
            v,
            rotary_cos,
            rotary_sin,
            cache_batch_idx,
            cache_leftpad,
            alibi_slopes,
            sinks,
            None if q_descale is None or not _is_fp8(q) else expanded(q_descale, *sizes),
            None if k_descale is None or not _is_fp8(k_cache) else expanded(k_descale, *sizes),
            None if v_descale is None or not _is_fp8(v_cache) else expanded(v_descale, *sizes),
            k_page_descale,
            v_page_descale,
            cu_seqlens_q,
            # FlashAttention-3 reads these two with `k` and with rotary embedding alone.
            None if k is None else cu_seqlens_k_new,
            None if rotary_cos is None else rotary_seqlens,
            max_seqlen_q,
            *window_of(window_size, causal, q, max_seqlen_q, k_cache, block_table),
            tokens_of(attention_chunk),
            cap_of(softcap),
            rotary_cos is not None and flag("rotary_interleaved", rotary_interleaved),
        )
        if extras.asks_nothing:
            extras = None
        elif (
            isinstance(k, torch.Tensor)
            and length is not None
            and k.dim() == 4
            and cu_seqlens_k_new is None
        ):
            length += k.shape[1]
    try:
        scale = None if softmax_scale is None else float(softmax_scale)
    except NO_NUMBER:
        raise ValueError(
            f"softmax_scale is {said(softmax_scale)}: expected a number, or None for"
            " head_dim ** -0.5"
        ) from None
    call = Call(
        q,
        k_cache,
        v_cache,
        lengths,
        length,
        block_table,
        out,
        scale,
        causal,
        batch_invariant,
        config,
        extras,
    )
    if qv is not None:
        result, lse = attend_with_qv(call, qv, return_softmax_lse)
    else:
        result, lse = run(call, return_softmax_lse)
    return result if lse is None else (result, lse)


def get_scheduler_metadata(*arguments: Any, **options: Any) -> None:
    """None, in the place of FlashAttention-3's function of this name, whose callers pass what it
    returns as `scheduler_metadata`: `lean_attn_with_kvcache` ignores that, and plans nothing ahead
    of a call.
    """


def _refuse_types(q: Any, k_cache: Any, v_cache: Any, config: Any, **optional: Any) -> NoReturn:
    """Raises TypeError: the first argument that is of another type."""
    check_types(q=q, k_cache=k_cache, v_cache=v_cache)
    check_types(**{name: value for name, value in optional.items() if value is not None})
    raise TypeError(
        f"config is of type {type(config).__name__}: expected settings of lean"
        " (leanbench.kernels.lean.configs), or None for those of this GPU"
    )


def _one_of(name: str, value: Any, other: str, alias: Any) -> Any:
    if value is not None:
        raise ValueError(f"{name} and {other} are two names of one argument: pass one of them")
    return alias


def _is_fp8(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)


def _refuse_unsupported(flash_attn_arguments: dict[str, Any]) -> None:
    for name in flash_attn_arguments:
        if name not in _HINTS:
            raise TypeError(f"lean_attn_with_kvcache has no argument {name!r}")
