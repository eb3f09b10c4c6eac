"""Latency of `lean_mla`: its longest work range, beside the read floor, and the merge.

128 query heads of one row compute for as long as it is read, so a stage's arithmetic counts, in
proportion to the columns of K and V. Fitted to published rows of 576 numbers on H100 and H200, with
lengths on the device to those of an H200 alone; calibrations have the errors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.kinds import SAME
from leanbench.core.problem import AttentionProblem
from leanbench.kernels.mla.build import (
    MERGED_ROWS,
    ONE_ROUND,
    TILE,
    VALUE_DIM,
    cluster_of,
    gathers,
)
from leanbench.kernels.mla.configs import MlaConfig
from leanbench.model.calibration import calibration_for
from leanbench.model.rates import floor_us

#: Axes of latent caches that the model knows, beside those of all.
LATENT_AXES = frozenset({"latent", "v_head_dim", "row_scales"})
#: Time of a stage of 64 tokens of 576 numbers, and of the end of an output tile.
_STAGE_US, _END_US = 1.66, 4.6
#: Time of a merge of 64 rows with all columns, and of a second round.
_MERGE_US, _ROUND_US = 8.3, 1.06
#: Time to read and deal lengths on the device, and the factor of stages in such a launch.
_LENGTHS_US, _LENGTHS = 4.4, 1.1
#: Factors of a stage in fp8, which is converted, and of a launch that copies single rows
#: (reports/h200/chosen).
_FP8, _SINGLE_ROWS = 1.6, 1.12
#: Sharpness of the transition between arithmetic and memory as the limit.
_SHARPNESS = 3.4


def latent_us(problem: AttentionProblem, config: MlaConfig, spec: GpuSpec) -> float:
    """Predict a launch of `lean_mla`."""
    choices = {config.column_groups}
    if problem.lengths_on == "device":
        # The launch has one column group if that is faster.
        choices.add(1)
    return min(_us_of(problem, config, spec, groups) for groups in choices)


@dataclass(frozen=True)
class _Longest:
    """The work range that ends last."""

    stages: float
    #: Output tiles that end in it.
    ends: float
    #: Largest number of splits of an output tile.
    splits: int


def _us_of(problem: AttentionProblem, config: MlaConfig, spec: GpuSpec, groups: int) -> float:
    """Predict a launch that has `groups` column groups."""
    constants = calibration_for(spec).constants
    rows = problem.q_heads * problem.q_len
    cluster = cluster_of(rows, problem.page_size)
    slots = spec.sms // cluster
    of_sequence = -(-rows // (TILE * cluster)) * groups
    stages = [-(-tokens // TILE) for tokens in problem.visible_lengths]
    start_us = constants.launch_us + constants.first_read_us
    if problem.lengths_on == "device":
        merge_stages = -(-min(rows, TILE) // MERGED_ROWS) / groups
        longest = _dealt_by_length(stages, of_sequence, slots, merge_stages)
    else:
        longest = _dealt_by_count(stages, of_sequence, slots, config.min_tiles_per_cta)
    columns = problem.value_dim + TILE + problem.value_dim / groups
    computed_us = longest.stages * _STAGE_US * columns / (VALUE_DIM + TILE + VALUE_DIM)
    computed_us *= constants.reference_clock_mhz / spec.boost_clock_mhz
    computed_us *= _FP8 if problem.kv_dtype != SAME else 1
    read_us = floor_us(problem.kv_bytes, spec, constants) - start_us
    limits = computed_us, read_us
    streamed_us = sum(limit**_SHARPNESS for limit in limits) ** (1 / _SHARPNESS)
    if problem.lengths_on == "device":
        start_us, streamed_us = start_us + _LENGTHS_US, streamed_us * _LENGTHS
    merge_us = 0.0
    if longest.splits > 1:
        merge_us = _MERGE_US * min(rows, TILE) / TILE / groups
        merge_us += _ROUND_US * (longest.splits > ONE_ROUND)
    total_us = start_us + streamed_us + longest.ends * _END_US + merge_us
    return total_us * (_SINGLE_ROWS if gathers(problem.page_size) else 1)


def _dealt_by_count(stages: list[int], of_sequence: int, slots: int, least: int) -> _Longest:
    """Deal the stages of lengths on the host to slots; `of_sequence` output tiles each."""
    output_tiles = of_sequence * len(stages)
    if output_tiles <= slots:
        longest = -(-max(stages) // (slots // output_tiles))
    else:
        longest = -(-of_sequence * sum(stages) // slots)
    longest = max(longest, least)
    return _Longest(longest, -(-output_tiles // slots), -(-max(stages) // longest))


def _dealt_by_length(
    stages: list[int], of_sequence: int, slots: int, merge_stages: float
) -> _Longest:
    """Deal lengths on the device: sequences that a merge would take longer than stay whole."""
    end = _END_US / _STAGE_US
    whole = [count for count in stages if count <= merge_stages]
    split = [count for count in stages if count > merge_stages]
    ends = max(1.0, of_sequence * len(stages) / slots)
    longest = max(1.0, of_sequence * sum(stages) / slots, *whole)
    splits = 1
    if split:
        busy = of_sequence * sum(count + end for count in whole) / max(stages)
        longest = max(longest, min(of_sequence * sum(split) / max(1.0, slots - busy), max(split)))
        splits = math.ceil(max(split) / math.ceil(longest))
    return _Longest(longest, ends, splits)
