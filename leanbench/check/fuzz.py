"""Random problems for `leanbench check --fuzz`: what nobody thought of putting into the grid."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import NamedTuple

from leanbench.check.fuzz_kinds import (
    GROUP_SIZES,
    Family,
    draw_family,
    draw_latent_family,
    draw_member,
)
from leanbench.check.grid import CheckCase, wild_case
from leanbench.core.lengths import Context, draw_context, traces
from leanbench.core.problem import (
    DTYPES,
    HEAD_DIMS,
    KV_LAYOUTS,
    LENGTHS_ON,
    PAGE_SIZES,
    AttentionProblem,
)

#: Of one seed: they are all drawn before the first one runs.
MOST_CASES = 100_000
#: Cases that share compiled kernels and launch settings: compiling takes longer than running.
_FAMILY, _KIND_FAMILY = 50, 20
#: Of families that are not plain.
_LATENT_SHARE = 0.06
_SHARPNESS = (0.1, 1.0, 1.0, 4.0, 12.0)
#: Of a cache over its longest sequence.
_ROOM = (None, None, "1.01x", "2x", "4x")


class _Limits(NamedTuple):
    #: Contexts are spread evenly over their logarithm.
    longest: int
    #: Of a case: the fp64 reference costs time, and Triton's interpreter much more.
    tokens: int
    pairs: int


_ON_GPU, _INTERPRETED = _Limits(20_000, 60_000, 24), _Limits(150, 600, 8)


def fuzz_cases(count: int, seed: int, *, interpreted: bool = False) -> list[CheckCase]:
    """`count` random cases, always the same ones for a seed; their inputs are drawn afresh. Half of
    them are plain decode, the others have any kinds that go together, and any sizes.

    Args:
        interpreted: for Triton's interpreter, whose kernels take few kinds: all are plain and
            small.
    """
    limits = _INTERPRETED if interpreted else _ON_GPU
    draw = random.Random(seed)
    cases: list[CheckCase] = []
    while len(cases) < count:
        # As many cases of both.
        is_plain = interpreted or draw.random() < _KIND_FAMILY / (_FAMILY + _KIND_FAMILY)
        is_latent = not is_plain and draw.random() < _LATENT_SHARE
        draw_one = draw_latent_family if is_latent else draw_family
        family = _plain_family(draw) if is_plain else draw_one(draw)
        settings = draw.randrange(1 << 30)
        # The interpreter compiles nothing.
        members = 1 if interpreted else _FAMILY if is_plain else _KIND_FAMILY
        for _ in range(min(members, count - len(cases))):
            problem = draw_member(draw, family, _problem(draw, family, limits))
            cases.append(_case(draw, problem, settings))
    return cases


def _plain_family(draw: random.Random) -> Family:
    head_dim, dtype = draw.choice(HEAD_DIMS), draw.choice(DTYPES)
    group_size = draw.choice(GROUP_SIZES)
    q_len = draw.choice((1, 1, 1, draw.randint(2, 16)))
    page_size = draw.choice((None, None, draw.choice(PAGE_SIZES)))
    return Family(head_dim, dtype, group_size, q_len, page_size)


def _case(draw: random.Random, problem: AttentionProblem, settings: int) -> CheckCase:
    sharpness, variant = draw.choice(_SHARPNESS), draw.randrange(1 << 20)
    # A batch that says what no cache has grows by five sequences, two of them full.
    if draw.random() < 0.1 and problem.kv_heads * problem.cache_capacity < _ON_GPU.tokens // 4:
        return replace(wild_case(problem, sharpness, variant), settings=settings)
    return CheckCase(problem, sharpness, variant, settings)


def _problem(draw: random.Random, family: Family, limits: _Limits) -> AttentionProblem:
    """A plain problem of the family's sizes."""
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
    """Lengths alike, each of its own, or of a distribution that sweeps have."""
    kind = draw.random()
    if kind < 0.5:
        return round(longest ** draw.random())
    if kind < 0.75 and batch > 1:
        return tuple(round(longest ** draw.random()) for _ in range(batch))
    return draw_context(draw.choice(("one-long", "zipf", *traces())), batch, longest, draw)
