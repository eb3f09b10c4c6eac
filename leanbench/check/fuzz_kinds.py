"""Kinds of attention for random problems: what goes together, drawn at once."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

from leanbench.core.kinds import FP8_DTYPES, SAME
from leanbench.core.problem import DTYPES, HEAD_DIMS, PAGE_SIZES, AttentionProblem

GROUP_SIZES = (1, 1, 2, 3, 4, 4, 5, 6, 7, 8, 8, 12, 16, 24, 32, 48)
#: Rows of a KV head's queries at most: the fp64 reference has a score for each and every token.
_MOST_ROWS = 512
_MOST_QUERIES = 100
_MOST_APPENDED = 9


@dataclass(frozen=True)
class Family:
    """What decides which kernels are compiled."""

    head_dim: int
    dtype: str
    group_size: int
    q_len: int
    page_size: int | None
    #: Kinds that are on; their numbers are each problem's own.
    kinds: frozenset[str] = frozenset()
    #: Fields of AttentionProblem.
    fields: dict[str, Any] = field(default_factory=dict)


def draw_family(draw: random.Random) -> Family:
    """A family with any kinds, each on in one of four."""
    head_dim = draw.choice((*HEAD_DIMS, *HEAD_DIMS, 8 * draw.randint(1, 32), 512, 576))
    group_size = draw.choice(GROUP_SIZES)
    most = min(_MOST_QUERIES, _MOST_ROWS // group_size)
    q_len = draw.choice((1, 1, draw.randint(2, min(16, most)), draw.randint(2, most)))
    page_size = draw.choice(
        (None, None, draw.choice(PAGE_SIZES), draw.choice((1, draw.randint(2, 600))))
    )
    names = ("window_left", "window_right", "attention_chunk", "softcap", "append", "q_lens")
    kinds = frozenset(name for name in names if draw.random() < 0.25)
    fields: dict[str, Any] = {
        name: draw.random() < 0.25 for name in ("sinks", "alibi", "leftpad", "batch_idx")
    }
    if page_size is not None:
        fields["batch_idx"] = False
    fields["causal"] = draw.random() < 0.7
    if draw.random() < 0.25:
        fields["kv_dtype"] = draw.choice(FP8_DTYPES)
        fields["q_dtype"] = draw.choice((SAME, SAME, *FP8_DTYPES))
        fields["scaled"] = draw.random() < 0.7
        if page_size is not None and draw.random() < 0.5:
            fields["page_scales"] = draw.choice(("page", "page-head"))
    elif "append" in kinds and head_dim >= 16 and draw.random() < 0.5:
        fields["rotary_dim"] = 16 * draw.randint(1, head_dim // 16)
        fields["rotary_interleaved"] = draw.random() < 0.5
    if draw.random() < 0.1 or head_dim > 512:
        fields["v_head_dim"] = 8 * draw.randint(1, 32)
    dtype = draw.choice(DTYPES)
    if fields.get("q_dtype", SAME) != SAME:
        # The output of fp8 queries.
        dtype = "bf16"
    return Family(head_dim, dtype, group_size, q_len, page_size, kinds, fields)


def draw_latent_family(draw: random.Random) -> Family:
    """A family over a latent cache, which one KV head has for all query heads."""
    heads = draw.choice((1, 8, 16, 16, 24, 64, 96, 128, 128))
    q_len = draw.choice((1, 1, 1, draw.randint(2, max(2, min(16, _MOST_ROWS // heads)))))
    page_size = draw.choice((None, 64, 64 * draw.randint(2, 9)))
    fields: dict[str, Any] = {
        "q_heads": heads,
        "kv_heads": 1,
        "latent": True,
        "v_head_dim": 512,
        "causal": draw.random() < 0.7,
    }
    if draw.random() < 0.4:
        fields |= {"kv_dtype": draw.choice(FP8_DTYPES), "scaled": draw.random() < 0.7}
    return Family(576, draw.choice(DTYPES), heads, q_len, page_size, frozenset(), fields)


def draw_member(draw: random.Random, family: Family, plain: AttentionProblem) -> AttentionProblem:
    """The plain problem with the family's kinds."""
    own = dict(family.fields)
    for name in ("window_left", "window_right"):
        if name in family.kinds:
            own[name] = round(plain.max_context ** draw.random()) - 1
    if "attention_chunk" in family.kinds:
        own["attention_chunk"] = round(plain.max_context ** draw.random())
    if "softcap" in family.kinds:
        own["softcap"] = draw.choice((1.0, 5.0, 30.0, 50.0))
    if "q_lens" in family.kinds:
        lengths = [draw.randint(1, family.q_len) for _ in range(plain.batch)]
        lengths[draw.randrange(plain.batch)] = family.q_len
        own["q_lens"] = tuple(lengths)
    if "append" in family.kinds:
        own["append"] = draw.randint(1, _MOST_APPENDED)
        own["context"] = _at_least(plain, own["append"])
        if isinstance(plain.capacity, int) and plain.capacity < own["append"]:
            own["capacity"] = None
    return replace(plain, **own)


def _at_least(problem: AttentionProblem, tokens: int) -> int | tuple[int, ...]:
    """The context, with as many tokens in every sequence."""
    if isinstance(problem.context, int):
        return max(problem.context, tokens)
    return tuple(max(context, tokens) for context in problem.context)
