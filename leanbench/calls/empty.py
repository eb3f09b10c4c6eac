"""Calls without query tokens or without cached ones, which launch nothing."""

from __future__ import annotations

import math

import torch

from leanbench.calls.call import Call, check_numbers
from leanbench.calls.extra_checks import FLOATS


def attend_nothing(call: Call, with_lse: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Output 0, and LSE -inf or the sink's logit, where the batch, the query tokens or the caches'
    tokens are none.

    Raises:
        ValueError: what is none is something else, tokens are appended, or the tensors do not fit
            together.
    """
    q, k_cache, v_cache, extras = call.q, call.k_cache, call.v_cache, call.all_extras
    has_own_rows = call.block_table is None and extras.cache_batch_idx is None
    if (
        q.dim() != (3 if extras.cu_seqlens_q is not None else 4)
        or k_cache.dim() != 4
        or v_cache.shape[:-1] != k_cache.shape[:-1]
        or 0 in (*q.shape[-2:], *k_cache.shape[2:], *v_cache.shape[3:])
        or q.shape[-1] != k_cache.shape[3]
        or q.shape[-2] % k_cache.shape[2]
        or (has_own_rows and call.batch != k_cache.shape[0])
        or extras.k_new is not None
    ):
        # Refuses every size 0.
        call.check()
    call.check_length()
    out = call.out
    if out is None:
        out = q.new_empty(call.out_shape, dtype=call.out_dtype)
    else:
        call.check_out(out)
    out.zero_()
    if not with_lse:
        return out, None
    lse = q.new_full(call.lse_shape, -math.inf, dtype=torch.float32)
    if extras.sinks is not None:
        check_numbers("sinks", extras.sinks, q, (q.shape[-2],), dtypes=FLOATS)
        lse.copy_(extras.sinks.float()[:, None].expand(call.lse_shape))
    return out, lse
