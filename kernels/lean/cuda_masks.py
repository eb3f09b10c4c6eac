"""Parameters of lean.cu for windows, biases, sinks and paddings, and the tokens distributed if
query tokens do not see all of them.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from leanbench.kernels.lean.cuda_build import CudaBuild
from leanbench.kernels.lean.cuda_params import INT32_MAX, Divisor, Params

from leanbench.core.problem import AttentionProblem

if TYPE_CHECKING:
    from leanbench.core.inputs import AttentionInputs

#: `Build::sinks`, by dtype.
_SINKS = {"float32": 1, "float16": 2, "bfloat16": 3}


def with_masks(build: CudaBuild, inputs: AttentionInputs) -> CudaBuild:
    """Return the build with the features of these tensors."""
    macros = {
        "window_left": inputs.most_behind >= 0,
        "window_right": inputs.q_len > 1 and not inputs.causal,
        "attention_chunk": inputs.attention_chunk > 0,
        "softcap": inputs.softcap > 0,
        "alibi": inputs.alibi_slopes is not None,
        "sinks": 0 if inputs.sinks is None else _SINKS[str(inputs.sinks.dtype).partition(".")[2]],
        "prior": inputs.prior is not None,
        "leftpad": inputs.cache_leftpad is not None,
        "batch_idx": inputs.cache_batch_idx is not None,
    }
    if not any(macros.values()):
        return build
    ragged = bool(build.ragged) or inputs.cache_leftpad is not None
    return replace(build, ragged=int(ragged), **{name: int(on) for name, on in macros.items()})


def pass_masks(params: Params, inputs: AttentionInputs, build: CudaBuild) -> None:
    """Set the parameters of `with_masks`, except pointers."""
    params.window_left = min(inputs.most_behind, INT32_MAX - inputs.q_len)
    params.window_tokens = _window_tokens(
        build, dealt_window(inputs.most_behind, inputs.new_tokens), inputs.q_len
    )
    if inputs.attention_chunk:
        params.attention_chunk = min(inputs.attention_chunk, INT32_MAX // 2)
        params.by_attention_chunk = Divisor.of(params.attention_chunk)
    # A wider window would show no more tokens to the first query token.
    widest = inputs.q_len - 1
    params.window_right = widest if inputs.window_right < 0 else min(inputs.window_right, widest)
    if inputs.softcap:
        params.softcap = inputs.softcap * math.log2(math.e)
        params.qk_scale *= 2 / inputs.softcap
    params.prior_tokens = inputs.prior_tokens
    slopes = inputs.alibi_slopes
    params.stride_slopes_batch = slopes.stride(0) if slopes is not None and slopes.ndim == 2 else 0


def dealt_window(window_left: int, new_tokens: int) -> int:
    """Return the preceding tokens for which LeanTiles are distributed; -1: all.

    Appended tokens are included even if unseen: the CTA with their chunk writes them.
    """
    return window_left if window_left < 0 else max(window_left, new_tokens)


def dealt_tokens(
    build: CudaBuild, tokens: int, q_len: int, window_left: int, leftpad: int = 0
) -> int:
    """Return the tokens of a sequence in its LeanTiles: `dealt_tokens` in tiles.cuh.

    Args:
        tokens: in the cache, up to the sequence's end.
        window_left: from `dealt_window`.
    """
    used = tokens - (leftpad and leftpad // build.start_step * build.start_step)
    return used if window_left < 0 else min(used, _window_tokens(build, window_left, q_len) + q_len)


def dealt_lengths(build: CudaBuild, problem: AttentionProblem) -> tuple[int, ...]:
    """Return `dealt_tokens` of each sequence."""
    window = dealt_window(problem.most_behind, problem.append)
    return tuple(
        dealt_tokens(build, tokens, q_len, window, leftpad)
        for tokens, q_len, leftpad in zip(
            problem.contexts, problem.query_lengths, problem.leftpads, strict=True
        )
    )


def read_dealt_lengths(build: CudaBuild, inputs: AttentionInputs) -> tuple[int, ...]:
    """Return `dealt_tokens` of each sequence, read from the device.

    For planners, not for launches.
    """
    lengths = inputs.read_lengths()
    leftpads: list[int] = [0] * len(lengths)
    if inputs.cache_leftpad is not None:
        leftpads = inputs.cache_leftpad.tolist()
    window = dealt_window(inputs.most_behind, inputs.new_tokens)
    return tuple(
        dealt_tokens(build, tokens, inputs.q_len, window, min(max(leftpad, 0), tokens))
        for tokens, leftpad in zip(lengths, leftpads, strict=True)
    )


def as_seen(problem: AttentionProblem) -> AttentionProblem:
    """Return an equivalent problem without a window, over the visible tokens.

    Settings depend on the visible tokens.
    """
    if problem.most_behind < 0:
        return problem
    most = most_seen(problem)
    seen = tuple(min(context, most) for context in problem.contexts)
    context = seen if problem.is_ragged else seen[0]
    return replace(problem, context=context, window_left=-1, attention_chunk=0)


def most_seen(problem: AttentionProblem) -> int:
    """Return the most tokens of a sequence that a window's query tokens see, or that are new."""
    return max(problem.q_len + problem.most_behind, problem.append)


def _window_tokens(build: CudaBuild, window_left: int, q_len: int) -> int:
    """Return a window's tokens, less its query tokens, from where copies may start."""
    return min(window_left + build.start_step - 1, INT32_MAX - q_len)
