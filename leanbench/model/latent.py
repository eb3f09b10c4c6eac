"""Latency of `lean_mla`: its longest work range, beside the read floor, and the merge.

128 query heads of one row compute for as long as it is read, so a stage's arithmetic counts, in
proportion to the columns of K and V. Fitted to the 46 published rows of H100 and H200, of 576
numbers in 16 bits; calibrations have the errors.
"""

from __future__ import annotations

from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.kinds import SAME
from leanbench.core.problem import AttentionProblem
from leanbench.kernels.mla.build import ONE_ROUND, TILE, VALUE_DIM, cluster_of, gathers
from leanbench.kernels.mla.configs import MlaConfig
from leanbench.model.calibration import calibration_for
from leanbench.model.rates import floor_us

#: Axes of latent caches that the model knows, beside those of all.
LATENT_AXES = frozenset({"latent", "v_head_dim", "row_scales"})
#: Time of a stage of 64 tokens of 576 numbers, and of the end of an output tile.
_STAGE_US, _END_US = 1.66, 4.6
#: Time of a merge of 64 rows with all columns, and of a second round.
_MERGE_US, _ROUND_US = 8.3, 1.06
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


def _us_of(problem: AttentionProblem, config: MlaConfig, spec: GpuSpec, groups: int) -> float:
    """Predict a launch that has `groups` column groups."""
    constants = calibration_for(spec).constants
    rows = problem.q_heads * problem.q_len
    cluster = cluster_of(rows, problem.page_size)
    slots = spec.sms // cluster
    of_sequence = -(-rows // (TILE * cluster)) * groups
    output_tiles = of_sequence * problem.batch
    stages = [-(-tokens // TILE) for tokens in problem.visible_lengths]
    if output_tiles <= slots:
        longest = -(-max(stages) // (slots // output_tiles))
    else:
        longest = -(-of_sequence * sum(stages) // slots)
    longest = max(longest, config.min_tiles_per_cta)
    splits = -(-max(stages) // longest)
    columns = problem.value_dim + TILE + problem.value_dim / groups
    computed_us = longest * _STAGE_US * columns / (VALUE_DIM + TILE + VALUE_DIM)
    computed_us *= constants.reference_clock_mhz / spec.boost_clock_mhz
    computed_us *= _FP8 if problem.kv_dtype != SAME else 1
    start_us = constants.launch_us + constants.first_read_us
    read_us = floor_us(problem.kv_bytes, spec, constants) - start_us
    limits = computed_us, read_us
    streamed_us = sum(limit**_SHARPNESS for limit in limits) ** (1 / _SHARPNESS)
    merge_us = 0.0
    if splits > 1:
        merge_us = _MERGE_US * min(rows, TILE) / TILE / groups
        merge_us += _ROUND_US * (splits > ONE_ROUND)
    total_us = start_us + streamed_us + -(-output_tiles // slots) * _END_US + merge_us
    return total_us * (_SINGLE_ROWS if gathers(problem.page_size) else 1)
