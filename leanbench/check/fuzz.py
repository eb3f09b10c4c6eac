"""Random problems for `leanbench check --fuzz`."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from leanbench.check.grid import CheckCase, wild_case
from leanbench.core.kinds import FP8_DTYPES, NO_PAGE_SCALES, SAME
from leanbench.core.lengths import Context, draw_context, traces
from leanbench.core.problem import (
    DTYPES,
    HEAD_DIMS,
    KV_LAYOUTS,
    LENGTHS_ON,
    PAGE_SIZES,
    AttentionProblem,
)
from leanbench.kernels.mla.build import LATENT_DIM, LATENTS, VALUE_DIM, gathers

#: Of one seed: they are all drawn before the first one runs.
MOST_CASES = 100_000
#: Cases that share compiled kernels and launch settings: compiling takes longer than running.
_FAMILY, _KIND_FAMILY = 50, 20
#: Of families that are not plain.
_LATENT_SHARE, _CHOSEN_SHARE, _PREFIX_SHARE = 0.06, 0.06, 0.06
_SHARPNESS = (0.1, 1.0, 1.0, 4.0, 12.0)
#: Of a cache over its longest sequence.
_ROOM = (None, None, "1.01x", "2x", "4x")

_GROUP_SIZES = (1, 1, 2, 3, 4, 4, 5, 6, 7, 8, 8, 12, 16, 24, 32, 48)
#: Rows of a KV head's queries at most: the fp64 reference has a score for each and every token.
_MOST_ROWS = 512
_MOST_QUERIES = 100
_MOST_APPENDED = 9


class _Limits(NamedTuple):
    #: Contexts are spread evenly over their logarithm.
    longest: int
    #: Of a case: the fp64 reference costs time, and Triton's interpreter much more.
    tokens: int
    pairs: int


_ON_GPU, _INTERPRETED = _Limits(20_000, 60_000, 24), _Limits(150, 600, 8)


def fuzz_cases(count: int, seed: int, *, interpreted: bool = False) -> list[CheckCase]:
    """Draw `count` random cases, the same ones for a seed; their inputs differ.

    About half of them are plain decode. The others combine any kinds and sizes.

    Args:
        interpreted: True for Triton's interpreter, which supports few kinds: all cases are plain
            and small.
    """
    limits = _INTERPRETED if interpreted else _ON_GPU
    draw = random.Random(seed)
    cases: list[CheckCase] = []
    while len(cases) < count:
        # Equally many cases of both.
        is_plain = interpreted or draw.random() < _KIND_FAMILY / (_FAMILY + _KIND_FAMILY)
        is_latent = not is_plain and draw.random() < _LATENT_SHARE
        is_chosen = not is_plain and not is_latent and draw.random() < _CHOSEN_SHARE
        draw_one = _draw_latent_family if is_latent else _draw_family
        draw_one = _draw_chosen_family if is_chosen else draw_one
        if draw_one is _draw_family and not is_plain and draw.random() < _PREFIX_SHARE:
            draw_one = _draw_prefix_family
        family = _plain_family(draw) if is_plain else draw_one(draw)
        settings = draw.randrange(1 << 30)
        # The interpreter compiles nothing.
        members = 1 if interpreted else _FAMILY if is_plain else _KIND_FAMILY
        for _ in range(min(members, count - len(cases))):
            problem = _draw_member(draw, family, _problem(draw, family, limits))
            cases.append(_case(draw, problem, settings))
    return cases


def _plain_family(draw: random.Random) -> _Family:
    head_dim, dtype = draw.choice(HEAD_DIMS), draw.choice(DTYPES)
    group_size = draw.choice(_GROUP_SIZES)
    q_len = draw.choice((1, 1, 1, draw.randint(2, 16)))
    page_size = draw.choice((None, None, draw.choice(PAGE_SIZES)))
    return _Family(head_dim, dtype, group_size, q_len, page_size)


def _case(draw: random.Random, problem: AttentionProblem, settings: int) -> CheckCase:
    sharpness, variant = draw.choice(_SHARPNESS), draw.randrange(1 << 20)
    # A batch that says what no cache has grows by five sequences, two of them full.
    if draw.random() < 0.1 and problem.kv_heads * problem.cache_capacity < _ON_GPU.tokens // 4:
        return replace(wild_case(problem, sharpness, variant), settings=settings)
    return CheckCase(problem, sharpness, variant, settings)


def _problem(draw: random.Random, family: _Family, limits: _Limits) -> AttentionProblem:
    """Draw a plain problem with the sizes of a family."""
    kv_heads = draw.choice((1, 1, 2, 3, 4, 8))
    batch = draw.randint(1, max(1, limits.pairs // kv_heads)) if draw.random() < 0.5 else 1
    longest = min(limits.longest, limits.tokens // (batch * kv_heads))
    return AttentionProblem(
        batch,
        kv_heads * family.group_size,
        kv_heads,
        _context(draw, batch, longest),
        family.head_dim,
        family.dtype,
        draw.choice(KV_LAYOUTS),
        family.q_len,
        family.page_size,
        draw.choice(_ROOM),
        draw.choice(LENGTHS_ON),
    )


def _context(draw: random.Random, batch: int, longest: int) -> Context:
    """Draw equal lengths, one per sequence, or a distribution of sweeps."""
    kind = draw.random()
    if kind < 0.5:
        return round(longest ** draw.random())
    if kind < 0.75 and batch > 1:
        return tuple(round(longest ** draw.random()) for _ in range(batch))
    return draw_context(draw.choice(("one-long", "zipf", *traces())), batch, longest, draw)


@dataclass(frozen=True)
class _Family:
    """Properties that decide which kernels are compiled."""

    head_dim: int
    dtype: str
    group_size: int
    q_len: int
    page_size: int | None
    #: Kinds that are on; their numbers are each problem's values.
    kinds: frozenset[str] = frozenset()
    #: Fields of AttentionProblem.
    fields: dict[str, Any] = field(default_factory=dict)


def _draw_family(draw: random.Random) -> _Family:
    """Draw a family in which each kind is on with a probability of one in four."""
    head_dim = draw.choice((*HEAD_DIMS, *HEAD_DIMS, 8 * draw.randint(1, 32), 512, 576))
    group_size = draw.choice(_GROUP_SIZES)
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
    return _Family(head_dim, dtype, group_size, q_len, page_size, kinds, fields)


def _draw_chosen_family(draw: random.Random) -> _Family:
    """Draw a family in which each KV head has chosen its own blocks, of a page each."""
    head_dim = draw.choice((*HEAD_DIMS, *HEAD_DIMS, 8 * draw.randint(1, 32), 512))
    page_size = draw.choice((*PAGE_SIZES, draw.randint(1, 600)))
    kinds = frozenset({"select", draw.choice(("select", "select", "softcap"))})
    fields: dict[str, Any] = {"sinks": draw.random() < 0.25}
    if draw.random() < 0.25:
        fields["kv_dtype"] = draw.choice(FP8_DTYPES)
        fields["page_scales"] = draw.choice((NO_PAGE_SCALES, "page", "page-head"))
    group_size, dtype = draw.choice(_GROUP_SIZES), draw.choice(DTYPES)
    return _Family(head_dim, dtype, group_size, 1, page_size, kinds, fields)


def _draw_prefix_family(draw: random.Random) -> _Family:
    """Draw a family in which sequences begin with the same pages."""
    head_dim = draw.choice((*HEAD_DIMS, *HEAD_DIMS, 8 * draw.randint(1, 32), 512))
    group_size = draw.choice(_GROUP_SIZES)
    q_len = draw.choice((1, 1, draw.randint(2, min(16, _MOST_ROWS // group_size))))
    page_size = draw.choice((*PAGE_SIZES, draw.randint(1, 600)))
    names = ("softcap", "q_lens")
    kinds = {"shared_prefix", *(name for name in names if draw.random() < 0.25)}
    fields: dict[str, Any] = {"sinks": draw.random() < 0.25, "causal": draw.random() < 0.7}
    if draw.random() < 0.25:
        fields["kv_dtype"] = draw.choice(FP8_DTYPES)
        fields["page_scales"] = draw.choice((NO_PAGE_SCALES, "page", "page-head"))
        fields["scaled"] = draw.random() < 0.7
    dtype = draw.choice(DTYPES)
    return _Family(head_dim, dtype, group_size, q_len, page_size, frozenset(kinds), fields)


def _draw_latent_family(draw: random.Random) -> _Family:
    """Draw a family over a latent cache, with one KV head."""
    heads = draw.choice((1, 8, 16, 16, 24, 64, 96, 128, 128))
    q_len = draw.choice((1, 1, 1, draw.randint(2, max(2, min(16, _MOST_ROWS // heads)))))
    page_size = draw.choice((None, 64, 64 * draw.randint(2, 9), 1, draw.randint(2, 100)))
    head_dim = draw.choice((*[LATENT_DIM] * 6, *LATENTS))
    fields: dict[str, Any] = {
        "q_heads": heads,
        "kv_heads": 1,
        "latent": True,
        "v_head_dim": LATENTS[head_dim],
        "causal": draw.random() < 0.7,
    }
    if LATENTS[head_dim] == VALUE_DIM and draw.random() < 0.4:
        fields |= {"kv_dtype": draw.choice(FP8_DTYPES), "scaled": draw.random() < 0.7}
    kinds = frozenset(["select"] if page_size == q_len == 1 and draw.random() < 0.5 else ())
    dtype = draw.choice(DTYPES)
    is_e4m3 = fields.get("kv_dtype") == "e4m3" and head_dim == LATENT_DIM
    if gathers(page_size) and is_e4m3 and draw.random() < 0.5:
        dtype, fields["row_scales"] = "bf16", True
    return _Family(head_dim, dtype, heads, q_len, page_size, kinds, fields)


def _draw_member(draw: random.Random, family: _Family, plain: AttentionProblem) -> AttentionProblem:
    """Add the kinds of a family to a plain problem."""
    values = dict(family.fields)
    for name in ("window_left", "window_right"):
        if name in family.kinds:
            values[name] = round(plain.max_context ** draw.random()) - 1
    if "attention_chunk" in family.kinds:
        values["attention_chunk"] = round(plain.max_context ** draw.random())
    if "softcap" in family.kinds:
        values["softcap"] = draw.choice((1.0, 5.0, 30.0, 50.0))
    if "q_lens" in family.kinds:
        lengths = [draw.randint(1, family.q_len) for _ in range(plain.batch)]
        lengths[draw.randrange(plain.batch)] = family.q_len
        values["q_lens"] = tuple(lengths)
    if "select" in family.kinds:
        most = plain.max_context if "latent" in values else max(plain.page_counts)
        number = round(most ** draw.random())
        values["select"] = number if "latent" in values else f"{number}x{family.page_size}"
        values["capacity"] = None
    if "shared_prefix" in family.kinds:
        page_size = family.page_size or 1
        prefix = page_size * round(max(1, plain.max_context // page_size) ** draw.random())
        # The shortest sequence may have no other tokens.
        more = prefix + family.q_len - 2
        contexts = tuple(context + more for context in plain.contexts)
        values["shared_prefix"] = prefix
        values["context"] = contexts if plain.is_ragged else contexts[0]
        values["capacity"] = None if plain.capacity is None else plain.cache_capacity + more
    if "append" in family.kinds:
        values["append"] = draw.randint(1, _MOST_APPENDED)
        values["context"] = _at_least(plain, values["append"])
        if isinstance(plain.capacity, int) and plain.capacity < values["append"]:
            values["capacity"] = None
    return replace(plain, **values)


def _at_least(problem: AttentionProblem, tokens: int) -> int | tuple[int, ...]:
    """Return the context with at least `tokens` in every sequence."""
    if isinstance(problem.context, int):
        return max(problem.context, tokens)
    return tuple(max(context, tokens) for context in problem.context)
