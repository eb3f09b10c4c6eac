"""Problems of every kind and size beyond plain decode, for the grid of `leanbench check`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from leanbench.core.problem import DTYPES, KV_LAYOUTS, AttentionProblem

#: One at a time, then with others that share code in a kernel.
KINDS: tuple[dict[str, Any], ...] = (
    {"q_len": 5, "causal": False},
    {"window_left": 100},
    {"attention_chunk": 100},
    {"q_len": 5, "attention_chunk": 64, "causal": False, "leftpad": True},
    {"q_len": 4, "window_left": 0},
    {"q_len": 4, "window_left": 33, "window_right": 2, "causal": False},
    {"softcap": 20.0},
    {"sinks": True},
    {"q_len": 3, "sinks": True, "window_left": 128},
    {"alibi": True},
    {"q_len": 6, "alibi": True, "causal": False},
    {"leftpad": True},
    {"leftpad": True, "window_left": 60, "q_len": 2},
    {"batch_idx": True},
    {"append": 1},
    {"append": 5, "q_len": 5},
    {"append": 1, "rotary_dim": 64},
    {"append": 3, "q_len": 3, "rotary_dim": 32, "rotary_interleaved": True},
    {"append": 2, "q_len": 4, "rotary_dim": 64, "causal": False},
    {"kv_dtype": "e4m3"},
    {"kv_dtype": "e4m3", "scaled": False},
    {"kv_dtype": "e5m2", "q_len": 4},
    {"kv_dtype": "e4m3", "q_dtype": "e4m3", "dtype": "bf16"},
    {"kv_dtype": "e4m3", "append": 1, "sinks": True},
    {"v_head_dim": 128, "head_dim": 192},
    {"q_lens": (1, 40, 3)},
    {"q_lens": (17, 1, 2), "window_left": 64, "sinks": True},
    {"softcap": 30.0, "alibi": True, "sinks": True, "window_left": 200, "q_len": 2},
    {"append": 2, "rotary_dim": 64, "leftpad": True, "batch_idx": True, "window_left": 90},
)
#: Sizes that not every kernel takes.
SIZES: tuple[dict[str, Any], ...] = (
    *({"head_dim": head_dim} for head_dim in (8, 40, 72, 112, 160, 192, 512)),
    *({"page_size": page_size} for page_size in (1, 3, 48, 544)),
    *({"q_len": q_len} for q_len in (17, 40, 130)),
)
#: Those that only a paged cache has.
PAGED: tuple[dict[str, Any], ...] = (
    {"kv_dtype": "e4m3", "page_scales": "page-head", "page_size": 64},
    {"kv_dtype": "e4m3", "page_scales": "page", "page_size": 16, "scaled": False},
    {"kv_dtype": "e5m2", "page_scales": "page-head", "page_size": 1, "q_len": 4},
    {
        "kv_dtype": "e4m3",
        "page_scales": "page-head",
        "page_size": 48,
        "append": 3,
        "leftpad": True,
        "window_left": 200,
        "sinks": True,
        "softcap": 20.0,
    },
    {"kv_dtype": "e4m3", "page_scales": "page", "page_size": 128, "q_len": 64},
)
_CONTEXTS = (700, (129, 700, 45))
#: Query heads, query tokens and what else differs of latent problems: rows of part of a CTA, of a
#: pair of CTAs, of two pairs.
LATENT_KINDS: tuple[dict[str, Any], ...] = (
    {"q_heads": 128},
    {"q_heads": 16, "page_size": 64},
    {"q_heads": 24, "q_len": 3, "page_size": 128},
    {"q_heads": 128, "q_len": 2, "causal": False},
    {"q_heads": 16, "page_size": 64, "kv_dtype": "e5m2", "scaled": False},
    {"q_heads": 128, "kv_dtype": "e4m3"},
)


def kind_problems() -> Iterator[AttentionProblem]:
    """Those of caches with K and V, then latent ones."""
    yield from _kind_problems()
    yield from _latent_problems()


def _latent_problems() -> Iterator[AttentionProblem]:
    """Each with lengths that the host knows, short and of many splits, and with others on the
    device.
    """
    for number, kinds in enumerate(LATENT_KINDS):
        dtype = DTYPES[number % 2]
        plain = AttentionProblem(2, 128, 1, 700, 576, dtype, v_head_dim=512, latent=True)
        problem = replace(plain, **kinds)
        yield from (problem, replace(problem, batch=1, context=9000))
        yield replace(problem, batch=3, context=(129, 700, 1), lengths_on="device", capacity="2x")


def _kind_problems() -> Iterator[AttentionProblem]:
    """Each kind with lengths that the host knows and with others on the device in a larger cache,
    contiguous and in pages; dtypes, layouts and groups in turn.
    """
    numbers = itertools.count()
    for kinds, context in itertools.product((*KINDS, *SIZES, *PAGED), _CONTEXTS):
        number = next(numbers)
        heads, kv_heads = ((8, 2), (6, 6), (14, 1))[number % 3]
        plain = AttentionProblem(3, heads, kv_heads, context, (64, 128)[number // 2 % 2])
        plain = replace(plain, dtype=DTYPES[number % 2], kv_layout=KV_LAYOUTS[number // 2 % 2])
        problem = replace(plain, **kinds)
        yield problem
        on_device = replace(problem, lengths_on="device", capacity="2x")
        yield on_device
        if not problem.batch_idx and "page_size" not in kinds:
            yield replace(on_device, page_size=(16, 64, 1)[number % 3])
