"""Problems timed by a tuning, spread over all sizes: any number of first ones covers the range."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain, count, islice

from leanbench.configs.space import FamilyKey
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.problem import ELEMENT_BYTES, AttentionProblem

#: (sequence, KV head) pairs: those of models, times batch sizes.
OUTPUT_TILES = (
    4,
    8,
    12,
    16,
    20,
    24,
    32,
    40,
    48,
    56,
    64,
    80,
    96,
    112,
    128,
    160,
    192,
    200,
    256,
    320,
    384,
    512,
)
#: The most common problems come first, a sequence on 8 KV heads: merging takes a large share of
#: their time.
_COMMON = tuple((8, context) for context in (1024, 4096, 16384, 65536))
#: Soon after: lookups do not use the formula beyond the KV heads that it was fitted to.
_MANY = (OUTPUT_TILES[-1], 1024)
#: K and V on a GPU of 1 TB/s: from dominated by the launch to limited only by bandwidth.
_LEAST_BYTES, _MOST_BYTES = 0.4e6, 160e6
_LEAST_CONTEXT, _MOST_CONTEXT = 256, 1 << 20
#: Rounding of every other problem's context: prompts are often padded, decode reaches every length.
_ROUND_CONTEXT = 1024
#: Powers of the plastic number: steps of these fractions fill a square evenly (the R2 sequence of
#: M. Roberts, 2018, "The unreasonable effectiveness of quasirandom sequences").
_PLASTIC = 1.32471795724474602596


def problems(
    family: FamilyKey, spec: GpuSpec, most_bytes: float = math.inf
) -> Iterator[AttentionProblem]:
    """Generate distinct problems without end.

    Args:
        most_bytes: maximum of K and V of a problem.
    """
    low, high = (
        _LEAST_BYTES * spec.bandwidth_tb_s,
        min(most_bytes, _MOST_BYTES * spec.bandwidth_tb_s),
    )
    spread = _spread(family, low, high)
    seen: set[tuple[int, int]] = set()
    for output_tiles, context in chain(_COMMON, islice(spread, 1), [_MANY], spread):
        problem = family.problem(output_tiles, context)
        if problem.kv_bytes <= most_bytes and (output_tiles, context) not in seen:
            seen.add((output_tiles, context))
            yield problem


def _spread(family: FamilyKey, low: float, high: float) -> Iterator[tuple[int, int]]:
    """Generate output tiles and contexts, evenly over both on logarithmic scales."""
    for number in count(1):
        across, along = (0.5 + number / _PLASTIC) % 1, (0.5 + number / _PLASTIC**2) % 1
        output_tiles = OUTPUT_TILES[int(across * len(OUTPUT_TILES))]
        kv_bytes = low * (high / low) ** along
        context = int(kv_bytes / (2 * ELEMENT_BYTES * family.head_dim * output_tiles))
        if number % 2 and context > _ROUND_CONTEXT:
            context -= context % _ROUND_CONTEXT
        if _LEAST_CONTEXT <= context <= _MOST_CONTEXT:
            yield output_tiles, context
