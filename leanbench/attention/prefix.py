"""Calls over sequences that begin with the same pages: a launch reads these once for all sequences,
the next one reads the rest of each sequence and merges the first one's results into its own. Where
the model predicts that this takes longer, the call is a plain one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from leanbench.attention.call import WHOLE_NUMBERS, Call, as_int, short_repr
from leanbench.attention.checks import (
    check_call,
    check_layouts,
    check_tensors,
    check_values,
    reads_values,
)
from leanbench.attention.run import is_traced, run
from leanbench.core.extras import Extras
from leanbench.core.inputs import AttentionInputs
from leanbench.kernels.launch import spec_of
from leanbench.kernels.lean.cuda_settings import shares_prefix


def attend_with_prefix(
    call: Call, prefix: int, with_lse: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the output, and the LSE if requested.

    Args:
        prefix: Tokens of every sequence in the same pages, the first of the `block_table`.

    Raises:
        NotImplementedError: The call is unsupported.
        ValueError: The tensors, or they and the prefix, are inconsistent.
    """
    check_layouts(call)
    _check(call, prefix)
    q, table, extras = call.q, call.block_table, call.all_extras
    assert table is not None
    pages = prefix // call.k_cache.shape[1]
    if q.numel() == 0 or not _is_shared(call, pages):
        return run(call, with_lse)
    # All queries are those of one sequence, and see all its tokens.
    queries = q.flatten(0, 1) if q.dim() == 4 else q
    results = None
    if call.out is not None and call.out.dtype != call.out_dtype:
        results = call.out.new_empty((1, *queries.shape[:2], call.v_cache.shape[3]))
    of_all = call._replace(
        q=queries[None],
        cache_seqlens=None,
        length=prefix,
        block_table=table[:1, :pages],
        out=results,
        causal=False,
        config=None,
        extras=_of_all(extras),
    )
    out, lse = run(of_all, with_lse=True)
    assert lse is not None
    on_device = call.cache_seqlens is not None
    own = call._replace(
        length=None if on_device else call.context - prefix,
        block_table=_own_pages(table, pages),
        extras=extras._replace(
            prior=out[0], prior_lse=lse.flatten(), prior_tokens=prefix if on_device else 0
        ),
    )
    return run(own, with_lse)


def _is_shared(call: Call, pages: int) -> bool:
    """Return True if the prefix gets a launch of its own.

    A given config is that of the other launch. Sizes of a traced call can be symbols.
    """
    k_cache, v_cache = call.k_cache, call.v_cache
    if call.config is not None or is_traced(call.q, k_cache, v_cache):
        return True
    return _is_faster(k_cache, v_cache, pages, call.batch)


def _is_faster(k_cache: torch.Tensor, v_cache: torch.Tensor, pages: int, batch: int) -> bool:
    page_bytes = (k_cache.nbytes + v_cache.nbytes) // max(1, k_cache.shape[0])
    return shares_prefix(page_bytes * pages, batch, spec_of(k_cache.device))


def _own_pages(table: torch.Tensor, pages: int) -> torch.Tensor:
    """Return the table after a prefix.

    No row may be empty. Without tokens, its page is not read.
    """
    return table[:, pages:] if table.shape[1] > pages else table[:, :1]


def last_launch(inputs: AttentionInputs) -> AttentionInputs:
    """Return the tensors of the last launch of a call without a config: the tokens after a shared
    prefix that has a launch of its own, else all of them. Results of the first launch are any.
    """
    table, page_size = inputs.block_table, inputs.page_size
    if not inputs.shared_prefix or table is None or page_size is None:
        return inputs
    pages, plain = inputs.shared_prefix // page_size, replace(inputs, shared_prefix=0)
    if not _is_faster(inputs.k_cache, inputs.v_cache, pages, inputs.batch):
        return plain
    own, is_on_device = _own_pages(table, pages), inputs.cache_seqlens is not None
    return replace(
        plain,
        block_table=own,
        context=own.shape[1] * page_size if is_on_device else inputs.context - inputs.shared_prefix,
        prior=inputs.out,
        prior_tokens=inputs.shared_prefix if is_on_device else 0,
    )


def _of_all(extras: Extras) -> Extras | None:
    """Return the extras of the launch over the prefix; sinks count once, in the other launch."""
    whole = Extras(
        softcap=extras.softcap,
        q_descale=_first(extras.q_descale),
        k_descale=_first(extras.k_descale),
        v_descale=_first(extras.v_descale),
        k_page_descale=extras.k_page_descale,
        v_page_descale=extras.v_page_descale,
    )
    return None if whole.asks_nothing else whole


def _first(scales: torch.Tensor | None) -> torch.Tensor | None:
    return None if scales is None else scales[:1]


def _check(call: Call, prefix: int) -> None:
    """Check a call; errors as in `attend_with_prefix`."""
    table = call.block_table
    if table is None:
        raise ValueError(
            f"shared_prefix is {prefix} and there is no block_table: pass one, with rows that begin"
            " with the same pages"
        )
    if call.extras is not None:
        check_tensors(call)
    _check_supported(call, table)
    is_packed = call.all_extras.cu_seqlens_q is not None
    if call.k_cache.dim() != 4 or table.dim() != 2 or call.q.dim() != (3 if is_packed else 4):
        check_call(call)
    _check_length(call, prefix)
    if reads_values(call.q) and not is_traced(call.q, call.k_cache, call.v_cache):
        check_call(call)
        check_values(call)
        _check_values(call, table, prefix)


def prefix_tokens(shared_prefix: Any) -> int:
    """Return a number of tokens, or the symbol of a tracer.

    Raises:
        ValueError: It is neither.
    """
    prefix = as_int(shared_prefix)
    if isinstance(prefix, bool) or not isinstance(prefix, WHOLE_NUMBERS) or prefix < 0:
        raise ValueError(
            f"shared_prefix is {short_repr(shared_prefix)}: expected a number of tokens, or 0 for"
            " no shared pages"
        )
    return prefix  # pyright: ignore[reportReturnType]


def _check_supported(call: Call, table: torch.Tensor) -> None:
    """Raise NotImplementedError for what the two launches cannot share."""
    extras, config = call.all_extras, call.config
    features = {
        "a block_table of each KV head": table.dim() == 3,
        "k and v": extras.k_new is not None or extras.v_new is not None,
        "rotary_cos": extras.rotary_cos is not None,
        "cache_batch_idx": extras.cache_batch_idx is not None,
        "cache_leftpad": extras.cache_leftpad is not None,
        "alibi_slopes": extras.alibi_slopes is not None,
        "window_size": max(extras.window_left, extras.window_right) >= 0,
        "attention_chunk": extras.attention_chunk > 0,
        "batch_invariant": call.batch_invariant or (config is not None and config.fixed_run_tiles),
        "a config of Triton": config is not None and config.implementation != "cuda",
    }
    unsupported = [name for name, is_set in features.items() if is_set]
    if unsupported:
        raise NotImplementedError(
            f"lean_attn_with_kvcache does not support shared_prefix with {unsupported[0]}: leave"
            " one of them out"
        )
    for name in ("q_descale", "k_descale", "v_descale"):
        scale = getattr(extras, name)
        if scale is not None and scale.dim() == 2 and scale.shape[0] > 1 and scale.stride(0):
            raise NotImplementedError(
                f"{name} is {tuple(scale.shape)}, of each sequence, and a shared prefix is read"
                " once for all: pass (1, kv_heads), or leave shared_prefix out"
            )


def _check_length(call: Call, prefix: int) -> None:
    """Check the prefix against the pages, the capacity and a length on the host."""
    most, page_size = call.capacity, call.k_cache.shape[1]
    if call.cache_seqlens is None:
        most = min(most, call.context)
        if call.causal and call.all_extras.cu_seqlens_q is None:
            most -= call.q_len - 1
    if prefix > most:
        raise ValueError(
            f"shared_prefix is {prefix}: expected at most the {most} tokens of a sequence that all"
            " of its query tokens see"
        )
    if prefix % page_size:
        raise ValueError(
            f"shared_prefix is {prefix}: expected a multiple of the page size, {page_size}"
        )


def _check_values(call: Call, table: torch.Tensor, prefix: int) -> None:
    """Check the lengths and pages of all sequences against the prefix.

    Raises:
        ValueError: A sequence is shorter, or begins with other pages.
    """
    starts = call.all_extras.cu_seqlens_q
    lengths = [call.context] * call.batch
    if call.cache_seqlens is not None:
        lengths = call.cache_seqlens.tolist()
    queries = [call.q_len] * call.batch if starts is None else starts.diff().tolist()
    for sequence, (length, count) in enumerate(zip(lengths, queries, strict=True)):
        seen = length - (max(count, 1) - 1 if call.causal else 0)
        if seen < prefix:
            raise ValueError(
                f"shared_prefix is {prefix}: expected at most {seen}, the tokens that all query"
                f" tokens of sequence {sequence} see"
            )
    shared = table[:, : prefix // call.k_cache.shape[1]]
    same = (shared == shared[:1]).all(dim=1).tolist()
    if not all(same):
        raise ValueError(
            f"block_table[{same.index(False)}] does not begin with the pages of block_table[0]:"
            f" pass rows that share the {prefix} tokens of shared_prefix"
        )


def shared_prefix(block_table: Any, lengths: Any, page_size: int, q_len: int = 1) -> int:
    """Return the tokens that all sequences have in the same pages: `shared_prefix` of a call.

    It runs on the host, for a server's own tables.

    Args:
        block_table: (batch, pages), as an array of numpy or a tensor on the CPU.
        lengths: Tokens of the sequences: (batch,), or one number.
        page_size: Tokens of a page.
        q_len: Query tokens of a sequence, which must see the whole prefix.

    Returns:
        A multiple of `page_size`; 0 for a single sequence.

    Raises:
        ValueError: The table and the lengths are inconsistent, or a size is below 1.
    """
    table, lengths = torch.as_tensor(block_table), torch.as_tensor(lengths)
    if table.dim() != 2 or lengths.shape not in ((), (1,), table.shape[:1]):
        raise ValueError(
            f"block_table is {tuple(table.shape)}, lengths {tuple(lengths.shape)}: expected (batch,"
            " pages) and (batch,), or one number"
        )
    for name, size in (("page_size", page_size), ("q_len", q_len)):
        if not isinstance(as_int(size), int) or size < 1:
            raise ValueError(f"{name} is {short_repr(size)}: expected a whole number above 0")
    if len(table) < 2:
        return 0
    shortest = int(lengths.min()) - (q_len - 1)
    columns = table[:, : max(shortest, 0) // page_size]
    same = (columns == columns[:1]).all(dim=0)
    return int(same.long().cumprod(dim=0).sum()) * page_size
