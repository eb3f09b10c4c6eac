"""Signature of a call: what its settings depend on, as far as the caller's host knows it."""

from __future__ import annotations

import math

from leanbench.core.problem import AttentionProblem

#: Classes of a length in an octave, if the host knows it.
_STEPS = 8
#: Pages of a multiple of this many tokens are copied alike.
_WHOLE_PAGE = 128
#: Axes that select another build: their names are parts of the signature.
_FEATURES = (
    *("sinks", "alibi", "leftpad", "batch_idx", "rotary_dim", "page_scales", "append"),
    *("softcap", "q_lens", "latent", "whole_model"),
)


def signature_of(problem: AttentionProblem) -> str:
    """Return the signature: ``32 tiles d128 g4 2 B NHD p16, up to 4096``.

    Lengths on the device are in it by their bound, in powers of 4, lengths on the host in eighths
    of an octave. Output tiles are (sequence, KV head) pairs.
    """
    return signed(problem, words_of(problem), problem.batch, problem.max_context)


def signed(problem: AttentionProblem, words: str, batch: int, tokens: int) -> str:
    """Return the signature of a problem with another batch and longest length.

    Args:
        words: `words_of` the problem.
    """
    if problem.most_behind >= 0:
        tokens = min(tokens, problem.most_behind + problem.q_len)
    start = f"{batch * problem.kv_heads} tiles {words}"
    if problem.lengths_on == "device" or problem.leftpad:
        return f"{start}, up to {4 ** math.ceil(math.log(tokens, 4) - 1e-9)}"
    step = math.ceil(math.log2(tokens) * _STEPS - 1e-9)
    return f"{start}, {2 ** (step / _STEPS):.0f} tokens"


def words_of(problem: AttentionProblem) -> str:
    """Return the part of the signature that the batch and the length do not change."""
    special = problem.special
    number_bytes = problem.token_bytes / (
        problem.head_dim + problem.value_dim * (not problem.latent)
    )
    words = [f"d{problem.head_dim}"]
    if problem.value_dim != problem.head_dim:
        words.append(f"v{problem.value_dim}")
    words.append(f"g{problem.group_size}")
    if problem.q_len > 1:
        words.append(f"q{problem.q_len}")
    words.append(f"{number_bytes:.0f} B")
    if "q_dtype" in special:
        words.append("fp8 q")
    words.append(problem.kv_layout if problem.kv_heads > 1 else "HND")
    if problem.page_size is not None:
        words.append(f"p{math.gcd(problem.page_size, _WHOLE_PAGE)}")
    words += [name for name in _FEATURES if special.get(name)]
    return " ".join(words)


def kind_of(call: AttentionProblem) -> str:
    """Return what a call's builds depend on."""
    words = signature_of(call).partition(" ")[2].partition(",")[0]
    masks = call.most_behind >= 0, call.attention_chunk > 0, call.causal
    return f"{words} {call.dtype} {call.kv_dtype} {call.page_size} {masks} {call.lengths_on}"
