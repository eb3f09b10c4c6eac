"""The problems that a tuning times: spread over all sizes, so that any number of them, from the
first on, covers the range.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain, count, islice

from leanbench.configs.space import FamilyKey
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.problem import ELEMENT_BYTES, AttentionProblem

#: (sequence, KV head) pairs: what models have, times batch sizes.
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
#: First come what most people run, one sequence on 8 KV heads: a step of the merge's cost there is
#: a large share.
_COMMON = tuple((8, context) for context in (1024, 4096, 16384, 65536))
#: Soon after: the formula is not asked for more KV heads than it has seen.
_MANY = (OUTPUT_TILES[-1], 1024)
#: K and V on a GPU of 1 TB/s: from what the launch dominates to where only the bandwidth counts.
_LEAST_BYTES, _MOST_BYTES = 0.4e6, 160e6
_LEAST_CONTEXT, _MOST_CONTEXT = 256, 1 << 20
#: Contexts of every other problem are rounded to these: prompts are often padded, decode passes
#: every length.
_ROUND_CONTEXT = 1024
#: The plastic number's powers: steps of these fractions fill a square evenly (the R2 sequence of M.
#: Roberts, 2018, "The unreasonable effectiveness of quasirandom sequences").
_PLASTIC = 1.32471795724474602596


def problems(
    family: FamilyKey, spec: GpuSpec, most_bytes: float = math.inf
) -> Iterator[AttentionProblem]:
    """Endless; no two alike.

    Args:
        most_bytes: K and V of a problem at most.
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
    """Output tiles and contexts, evenly over both on logarithmic scales."""
    for number in count(1):
        across, along = (0.5 + number / _PLASTIC) % 1, (0.5 + number / _PLASTIC**2) % 1
        output_tiles = OUTPUT_TILES[int(across * len(OUTPUT_TILES))]
        kv_bytes = low * (high / low) ** along
        context = int(kv_bytes / (2 * ELEMENT_BYTES * family.head_dim * output_tiles))
        if number % 2 and context > _ROUND_CONTEXT:
            context -= context % _ROUND_CONTEXT
        if _LEAST_CONTEXT <= context <= _MOST_CONTEXT:
            yield output_tiles, context
