"""Estimates for `--dry-run`: time of a sweep, and cells that are unsupported."""

from __future__ import annotations

from dataclasses import replace

from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.parallel import NONE
from leanbench.core.problem import MAX_Q_LEN
from leanbench.core.registry import kernel
from leanbench.decode import BOUND
from leanbench.measure.options import MeasureOptions
from leanbench.model.error import is_modelled
from leanbench.model.predict import axes_of, refusal
from leanbench.run.cells import Cell

#: Largest batch for which a dry run chooses settings.
MOST_SEQUENCES = 4096
#: Seconds of one measured cell: inputs, check, read floor, samples and cross-check.
MEASURED_CELL_S = 0.3
#: Seconds around a sustained window, for clocks to settle and the counter to tick.
AROUND_WINDOW_S = 1.2
#: Seconds for an instrumented build, and for a pass of Nsight Compute.
OCCUPANCY_S = 2.0
COUNTERS_S = 15.0
#: Seconds to compile one candidate and rank it.
MEASURED_CANDIDATE_S = 0.2
#: Seconds to predict one config.
PREDICTED_CONFIG_S = 0.01


def estimated_seconds(
    cell: Cell, gpu: GpuSpec, predicted: bool, options: MeasureOptions | None = None
) -> float:
    """Return a rough time: constants, and the memory traffic of large caches."""
    options = options or MeasureOptions()
    candidates = (
        len(kernel(cell.kernel).candidate_configs(cell.problem, gpu))
        if cell.request == "best"
        else 0
    )
    if predicted:
        return max(1, candidates) * PREDICTED_CONFIG_S
    # Kernels and the reference read the inputs some hundred times. All caches are written once, and
    # cleared by the driver at a fifteenth of the bandwidth.
    used, allocated = cell.problem.kv_bytes, cell.problem.kv_allocated_bytes
    traffic = (100 * used + 16 * (allocated - used)) / (gpu.bandwidth_tb_s * 1e12)
    sustained = options.window_s + AROUND_WINDOW_S if options.sustained or options.energy else 0.0
    # The window of the read floor is shared by the kernels of a problem, usually three.
    sustained *= 4 / 3 if options.energy else 1.0
    extras = OCCUPANCY_S * options.occupancy + COUNTERS_S * options.counters
    once = MEASURED_CELL_S + candidates * MEASURED_CANDIDATE_S + traffic + sustained + extras
    return once * options.repeat


def is_unsupported(cell: Cell, gpu: GpuSpec, predicted: bool) -> bool:
    """Return True if the cell's row will be unsupported, without launch or simulation."""
    used, problem = kernel(cell.kernel), cell.problem
    if used.unsupported_reason(problem) is not None:
        return True
    if not predicted or used.name == BOUND:
        return False
    if not is_modelled(used):
        # The schedule of a library is unknown.
        return True
    if problem.whole_model is not None:
        return False
    one = problem if problem.parallel == NONE else problem.shard(0)
    if not one.seen.special.keys() <= axes_of(used) or one.q_len > MAX_Q_LEN:
        return True
    # Settings of large batches take long to choose; one sequence has the same implementation.
    chosen_for = one
    if one.batch > MOST_SEQUENCES:
        chosen_for = replace(one, batch=1, context=one.max_context, q_lens=None)
    config = cell.override or used.default_config(chosen_for, gpu)
    return refusal(used, config, gpu) is not None
