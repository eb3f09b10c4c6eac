"""Fallbacks for a family or a GPU without tuned configs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from leanbench.core.decomposition import tile_rows
from leanbench.core.gpu_spec import GpuSpec

if TYPE_CHECKING:
    from leanbench.configs.tuned import Family, TunedGpu

#: head_dim, dtype, group_size, kv_layout, objective.
EntryKey = tuple[int, str, int, str, str]
#: Maximum ratio of the group sizes of a family and its fallback.
MOST_GROUP_RATIO = 2
#: Rank of a fallback with another group size, which merges in other rounds.
NEARBY_GROUP = 2


def rank(family: Family, key: EntryKey) -> tuple[int, float, int] | None:
    """Return how well a family serves `key`, lower is better; None if it does not.

    0: the same. 1: another dtype or layout, which move the same bytes through the same
    instructions. 2: the nearest group size within a factor of 2 and with the same rows of output
    tiles.
    """
    head_dim, dtype, group_size, kv_layout, objective = key
    if (family.head_dim, family.objective) != (head_dim, objective):
        return None
    differences = (family.dtype != dtype) + (family.kv_layout != kv_layout)
    if family.group_size == group_size:
        return min(differences, 1), 0.0, differences
    ratio = max(family.group_size, group_size) / min(family.group_size, group_size)
    same_rows = tile_rows(family.group_size, head_dim) == tile_rows(group_size, head_dim)
    if ratio > MOST_GROUP_RATIO or not same_rows or 1 in (family.group_size, group_size):
        return None
    return NEARBY_GROUP, math.log(ratio), differences


def gpu_distance(gpu: TunedGpu, spec: GpuSpec) -> float | None:
    """Return the distance of two GPUs in SMs and bandwidth, in logarithms.

    None for different architectures.
    """
    if gpu.compute_capability[0] != spec.compute_capability[0]:
        return None
    return math.hypot(
        math.log(gpu.sms / spec.sms), math.log(gpu.bandwidth_tb_s / spec.bandwidth_tb_s)
    )
