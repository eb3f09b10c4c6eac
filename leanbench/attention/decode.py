"""`lean_attn_with_kvcache`: LeanAttention with flash-attn's arguments and shapes."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from leanbench.attention import fast
from leanbench.attention.call import (
    NO_WINDOW,
    NOT_A_NUMBER,
    Call,
    cap_from,
    check_splits,
    check_types,
    chunk_from,
    effective_max_seqlen_q,
    effective_window,
    expand_scales,
    flag,
    host_length,
    is_fp8,
    short_repr,
)
from leanbench.attention.prefix import attend_with_prefix, prefix_tokens
from leanbench.attention.qv import attend_with_qv
from leanbench.attention.run import run
from leanbench.core.extras import Extras
from leanbench.kernels.lean.configs import LeanConfig

#: Arguments of FlashAttention-3 that do not change the result: accepted and ignored.
_HINTS = ("scheduler_metadata", "pack_gqa", "sm_margin")
#: The default of `num_splits`, `attention_chunk` and `shared_prefix`.
_NONE = 0


@fast.known_first(ignored=_HINTS)
def lean_attn_with_kvcache(
    learns: int,
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
    num_splits: int = _NONE,
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
    attention_chunk: int = _NONE,
    sinks: torch.Tensor | None = None,
    learnable_sink: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    shared_prefix: int = _NONE,
    out: torch.Tensor | None = None,
    batch_invariant: bool = False,
    config: LeanConfig | None = None,
    **flash_attn_arguments: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute decode attention of the last query tokens of each sequence over its cached tokens.

    The kernel is LeanAttention (arXiv 2405.10480). Arguments, their positions and meanings are
    those of flash-attn's `flash_attn_with_kvcache`; FlashAttention-3's further arguments are
    keywords. docs/calling.md lists errors, slow paths and host times.

    The reduction order is fixed: the same inputs give the same bits. There is no gradient.
    `torch.compile` captures a call as one operator, `torch.ops.leanbench.lean_attn_with_kvcache`,
    or `lean_attn_with_kvcache_append`, which changes the caches.

    Nothing is copied to or read from the host, so CUDA graphs can capture calls. One graph serves a
    whole generation: make the call once before the capture, which compiles. Capture it with
    `cache_seqlens` and `block_table` as tensors, and `copy_` new lengths and pages into these
    between replays. The captured caches bound the lengths.

    The contents of device tensors are not checked unless LEANBENCH_CHECK_CALLS=1 is set, which
    synchronizes. Lengths below 0 or past the cache are clamped. The caller guarantees that pages of
    `block_table` and rows of `cache_batch_idx` lie in the caches; that `cu_seqlens_q` and
    `cu_seqlens_k_new` do not decrease and end within q and k; that `cache_leftpad` is between 0 and
    the length; that rotary rows of new tokens lie in the tables; and that no two sequences append
    to one page.

    Tokens that no query token of a sequence sees may hold anything, NaN included. Values of tokens
    that only some of them see must be finite: the others give NaN and infinities in V a weight of
    0, and the product is NaN, as in a masked softmax of PyTorch. K has no such limit.

    Empty batches, queries and caches are accepted outside of `torch.compile` unless tokens are
    appended. Nothing is launched; the output is 0 and the LSE -inf, or the sink's logit.

    Partial results go through a workspace of the stream, or of the graph that captures the call.
    Streams, and graphs with their own memory pools, may run at the same time.

    Args:
        q: (batch, q_len, q_heads, head_dim), fp16 or bf16, or fp8 with fp8 caches. The query tokens
            are the last ones of the sequence. With `cu_seqlens_q`: (query tokens, q_heads,
            head_dim).
        k_cache: (batch, tokens, kv_heads, head_dim), any strides but a contiguous head_dim; in the
            dtype of `q`, torch.float8_e4m3fn or float8_e5m2. `q_heads` is a multiple of `kv_heads`.
            Pass `cache.transpose(1, 2)` for a cache stored as (batch, kv_heads, tokens, head_dim).
            Rows past the batch are not read. With a `block_table`: (pages, page_size, kv_heads,
            head_dim).
        v_cache: Like `k_cache`; may have another head_dim, which the output then has.
        k: (batch, new tokens, kv_heads, head_dim), in the dtype of the caches: written into
            `k_cache`, after the `cache_seqlens` tokens of each sequence, and attended to.
            Tokens past the capacity are dropped if lengths are on the device.
        v: Like `k`, for `v_cache`.
        rotary_cos: (positions, rotary_dim / 2), in the dtype of `q`. Needs a position for every
            token, with a `block_table` for the whole capacity. Rotates `k` by rows `cache_seqlens`,
            `cache_seqlens` + 1 and so on, and likewise `q` with a causal mask, a window or chunks;
            otherwise all of `q` by row `cache_seqlens`. Queries past the last row use that row.
            Both are rounded to their dtype again.
        rotary_sin: Like `rotary_cos`.
        cache_seqlens: Tokens of each sequence without those of `k`; without `k`, including the
            query tokens. An int, or (batch,) int32 on the device of `q`. None: the whole cache. A
            sequence of length 0 gets output 0 and LSE -inf.
        cache_batch_idx: (batch,) int32: the row of each sequence in the caches, or in the
            `block_table`, which may then have any number of rows.
        cache_leftpad: (batch,) int32: the first token of each sequence.
        block_table: (batch, pages of a sequence), int32, any row stride: the number of each page.
            Entries past the end of a sequence are not read. Or (batch, kv_heads, pages): each KV
            head attends to its own pages, such as blocks that it has chosen. `cache_seqlens` then
            counts the chosen tokens of a sequence, the same of all its heads: all pages are full
            but the last one listed. The query tokens are the last of them. Chosen tokens have no
            positions: `window_size`, `attention_chunk`, `alibi_slopes`, `cache_leftpad` and `k`
            with `v` are not supported.
        softmax_scale: Default head_dim ** -0.5, of `q` as passed; see `qv`.
        causal: True: the last query token sees the whole sequence, each earlier one a token less.
            Without any token the output is 0 and the LSE -inf. False: all see the whole sequence.
            No difference for a single query token. 0 and 1 are accepted.
        window_size: (left, right): a query token at position p sees the tokens p - left to
            p + right; -1 or None: no limit.
        softcap: Scores s become softcap x tanh(s / softcap); at most 10,000; 0: off.
        rotary_interleaved: True: rotates columns 0 and 1, 2 and 3, and so on. False: 0 and
            rotary_dim / 2 (GPT-NeoX).
        alibi_slopes: (q_heads,) or (batch, q_heads), fp32: subtracts slope x distance from scores.
            flash-attn's causal LSE is larger by slope x the position of the query token, because it
            adds slope x the position of the token instead.
        num_splits: A whole number, ignored.
        return_softmax_lse: Also return the logarithm of the sum of exponentials, (batch, q_heads,
            q_len), fp32; with `cu_seqlens_q`, (q_heads, query tokens).
        page_table: FlashAttention-3's name of `block_table`.
        q_descale: (batch, kv_heads) or a shape that expands to it, fp32, any strides: scales of an
            fp8 `q`, by KV head. Default 1. Ignored unless `q` is fp8, as in FlashAttention-3.
        k_descale: Like `q_descale`, for `k_cache` and `k`.
        v_descale: Like `q_descale`, for `v_cache` and `v`.
        k_page_descale: (pages,) or (pages, kv_heads), fp32, any strides: scales of the pages of an
            fp8 `k_cache`, multiplied with `k_descale`. `k` is written unchanged and scaled by its
            page. Default 1. Needs a `block_table`, fp8 caches and `v_page_descale`.
        v_page_descale: Like `k_page_descale`, for `v_cache` and `v`.
        cu_seqlens_q: (batch + 1,) int32: the start of each sequence's query tokens in `q`, and
            their number. New tokens of a sequence without query tokens may not be written.
        max_seqlen_q: Maximum number of query tokens of a sequence; outputs of further ones are left
            unwritten. None: all of `q`, which is slower for many short sequences. Ignored without
            `cu_seqlens_q`.
        cu_seqlens_k_new: (batch + 1,) int32: the start of each sequence's new tokens in `k` and
            `v`, and their number; these are then (new tokens, kv_heads, head_dim).
        rotary_seqlens: (batch,) int32: first rows of the rotary tables, instead of `cache_seqlens`.
        attention_chunk: A query token at position p sees only tokens of its chunk, which starts at
            p - p % attention_chunk (Llama 4); 0: off.
        sinks: (q_heads,), fp32, fp16 or bf16: an additional logit in the denominator of each row,
            without a value (gpt-oss). The LSE includes it.
        learnable_sink: Another name of `sinks`.
        qv: Like `q`, with the columns of `v_cache`, in 16 bits, at most 576 columns together:
            scores are q k + qv v. `softmax_scale` defaults to (columns of `q` and `qv`) ** -0.5.
            With 64 and 512 columns over two views of one cache, the call is one of
            `leanbench.lean_mla_with_kvcache` on Hopper GPUs, unless it has other extras. Otherwise
            both caches are copied into one in every call. Windows, chunks, `cache_leftpad`, and
            `k` with `v` are not supported.
        shared_prefix: Tokens in pages that all rows of the `block_table` begin with: a multiple of
            the page size, and at most what every query token of every sequence sees. They are read
            once for all sequences, in a launch of its own, unless the plain call is predicted to be
            faster. 0: none. See `leanbench.shared_prefix`. Windows, chunks, `alibi_slopes`,
            `cache_leftpad`, `cache_batch_idx`, `k` with `v`, rotary embedding, `qv`,
            `batch_invariant` and scales of each sequence are not supported. A `config` is that of
            the other launch.
        out: Receives the output, head_dim contiguous; must not overlap the inputs. None: a new
            tensor.
        batch_invariant: True: the bits of a sequence's output depend only on its own query, cache
            and length, not on other sequences or the number of SMs. The workspace grows by a
            partial per 128 to 1024 tokens of each KV head of the capacity. With `cu_seqlens_q` the
            bits also depend on `max_seqlen_q`, and torch operators unpack `q` and pack the output:
            for compatibility, not for speed.
        config: Launch settings, see leanbench.kernels.lean.configs. Default: the settings tuned for
            this GPU (`leanbench tune`) where they are better than the kernel's heuristic for these
            sizes, else the heuristic's; with a `cache_seqlens` tensor, those for any length up to
            the capacity. See leanbench.configs.lookup.
        **flash_attn_arguments: `scheduler_metadata`, `pack_gqa` and `sm_margin`, which are ignored.
            Launches keep their schedules themselves: kernels/lean/kept.cuh.

    Returns:
        (batch, q_len, q_heads, head_dim of V) in the dtype of `q`, bf16 for fp8; and the LSE if
        requested.

    Raises:
        NotImplementedError: An unsupported argument, or a tensor with a gradient or a tangent.
        TypeError: An unknown argument, or an argument that must be a tensor and is not.
        ValueError: Inconsistent shapes, dtypes or devices, or `batch_invariant` with a `config`
            without `fixed_run_tiles`.
        UserError: The tensors are not on a GPU and Triton's interpreter is off, or the workspace of
            `batch_invariant` would be too large.
        RuntimeError: A CUDA graph is captured before the first call on this GPU.
    """
    if flash_attn_arguments:
        for name in flash_attn_arguments:
            if name not in _HINTS:
                raise TypeError(f"lean_attn_with_kvcache has no argument {name!r}")
    if not (
        isinstance(q, torch.Tensor)
        and isinstance(k_cache, torch.Tensor)
        and isinstance(v_cache, torch.Tensor)
        and (block_table is None or isinstance(block_table, torch.Tensor))
        and (out is None or isinstance(out, torch.Tensor))
        and (config is None or isinstance(config, LeanConfig))
    ):
        _raise_type_error(q, k_cache, v_cache, config, block_table=block_table, out=out)
    # An identity check costs a plain call 4 ns, a type check 20.
    if num_splits is not _NONE and type(num_splits) is not int:
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
    on_device = isinstance(cache_seqlens, torch.Tensor)
    lengths = cache_seqlens if on_device else None
    length = None if on_device else host_length(cache_seqlens)
    if page_table is not None:
        block_table = _one_of("block_table", block_table, "page_table", page_table)
        check_types(page_table=page_table)
    extras = None
    # One by one: each check costs a plain call 10 ns, in a loop twice that.
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
        or attention_chunk is not _NONE
        or type(softcap) not in (int, float)
        or softcap
    ):
        if learnable_sink is not None:
            sinks = _one_of("sinks", sinks, "learnable_sink", learnable_sink)
        max_seqlen_q = effective_max_seqlen_q(q, cu_seqlens_q, max_seqlen_q)
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
            None if q_descale is None or not is_fp8(q) else expand_scales(q_descale, *sizes),
            None if k_descale is None or not is_fp8(k_cache) else expand_scales(k_descale, *sizes),
            None if v_descale is None or not is_fp8(v_cache) else expand_scales(v_descale, *sizes),
            k_page_descale,
            v_page_descale,
            cu_seqlens_q,
            # FlashAttention-3 reads these only with `k` and with rotary embedding.
            None if k is None else cu_seqlens_k_new,
            None if rotary_cos is None else rotary_seqlens,
            None,
            None,
            max_seqlen_q,
            *effective_window(window_size, causal, q, max_seqlen_q, k_cache, block_table),
            chunk_from(attention_chunk),
            cap_from(softcap),
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
    except NOT_A_NUMBER:
        raise ValueError(
            f"softmax_scale is {short_repr(softmax_scale)}: expected a number, or None for"
            " head_dim ** -0.5"
        ) from None
    if shared_prefix is not _NONE:
        shared_prefix = prefix_tokens(shared_prefix)
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
        learns=0 if shared_prefix or qv is not None else learns,
    )
    if shared_prefix:
        if qv is not None:
            raise NotImplementedError(
                "lean_attn_with_kvcache does not support shared_prefix with qv: leave one of them"
                " out"
            )
        result, lse = attend_with_prefix(call, shared_prefix, return_softmax_lse)
    elif qv is not None:
        result, lse = attend_with_qv(call, qv, return_softmax_lse)
    else:
        result, lse = run(call, return_softmax_lse)
    return result if lse is None else (result, lse)


def get_scheduler_metadata(*arguments: Any, **options: Any) -> None:
    """Return None, for callers of FlashAttention-3's function of this name.

    They pass the result as `scheduler_metadata`, which `lean_attn_with_kvcache` ignores.
    """


def _raise_type_error(q: Any, k_cache: Any, v_cache: Any, config: Any, **optional: Any) -> NoReturn:
    """Raise TypeError for the first argument of another type."""
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
