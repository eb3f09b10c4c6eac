"""Tensors that only some kinds of decode attention have, drawn for a problem."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

from leanbench.core.kinds import NO_PAGE_SCALES, SAME
from leanbench.core.problem import AttentionProblem

if TYPE_CHECKING:
    import torch

#: As flash-attn's tests draw them.
_LARGEST_SLOPE = 0.3


def kind_inputs(
    problem: AttentionProblem, like: torch.Tensor, generator: torch.Generator | None = None
) -> dict[str, Any]:
    """Fields of leanbench.core.inputs.AttentionInputs that are not at their defaults for `problem`.

    Args:
        like: has the device, and the dtype of tensors that have the problem's.
    """
    import torch

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(shape, dtype=torch.float32, device=like.device, generator=generator)

    def int32(numbers: Any) -> torch.Tensor:
        return torch.tensor(tuple(numbers), dtype=torch.int32, device=like.device)

    fields: dict[str, Any] = {
        "causal": problem.causal,
        "window_left": problem.window_left,
        "window_right": problem.window_right,
        "attention_chunk": problem.attention_chunk,
        "softcap": problem.softcap,
        "rotary_interleaved": problem.rotary_interleaved,
        "latent": problem.latent,
    }
    if problem.sinks:
        fields["sinks"] = like.new_empty(problem.q_heads).normal_(generator=generator)
    if problem.alibi:
        fields["alibi_slopes"] = _LARGEST_SLOPE * uniform(problem.batch, problem.q_heads)
    if problem.leftpad:
        fields["cache_leftpad"] = int32(problem.leftpads)
    if problem.batch_idx:
        # One cycle through all rows: no sequence has the row of its own number, so what ignores the
        # index is always wrong.
        order = torch.randperm(problem.batch + 1, device=like.device, generator=generator)
        rows = torch.empty_like(order)
        rows[order] = order.roll(1)
        fields["cache_batch_idx"] = rows[: problem.batch].int()
    if problem.rotary_dim:
        # More queries than appended tokens stand at positions past the cache's end.
        positions = problem.cache_capacity + problem.q_len
        angle = 2 * math.pi * uniform(positions, problem.rotary_dim // 2)
        fields["rotary_cos"] = angle.cos().to(like.dtype)
        fields["rotary_sin"] = angle.sin().to(like.dtype)
    scales = ("q_descale",) if problem.q_dtype != SAME else ()
    scales += ("k_descale", "v_descale") if problem.kv_dtype != SAME else ()
    for name in scales if problem.scaled else ():
        if problem.latent and name == "v_descale":
            fields[name] = fields["k_descale"]
        elif problem.latent and name == "k_descale":
            # One number for the whole cache, of which V is a part.
            fields[name] = (0.5 + uniform(1, 1)).expand(problem.batch, 1)
        else:
            fields[name] = 0.5 + uniform(problem.batch, problem.kv_heads)
    if problem.page_scales != NO_PAGE_SCALES:
        for name in ("k_page_descale", "v_page_descale"):
            per_page = 2.0 ** (4 * uniform(sum(problem.page_counts), problem.kv_heads) - 2)
            of_heads = problem.page_scales == "page-head"
            fields[name] = per_page if of_heads else per_page[:, 0].clone()
    if problem.q_lens is not None:
        fields["cu_seqlens_q"] = int32(itertools.accumulate(problem.q_lens, initial=0))
        fields["max_seqlen_q"] = problem.q_len
    return fields
