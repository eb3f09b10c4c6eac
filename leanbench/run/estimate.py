"""What is known of a sweep before it starts, for `--dry-run`: how long it takes, and the cells that
cannot be.
"""

from __future__ import annotations

from dataclasses import replace

from leanbench.core.config import TileConfig
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.kernel import Kernel
from leanbench.core.parallel import NONE
from leanbench.core.problem import MAX_Q_LEN, AttentionProblem
from leanbench.core.registry import kernel
from leanbench.decode import BOUND
from leanbench.measure.options import MeasureOptions
from leanbench.model.predict import AXES, refusal
from leanbench.run.cells import Cell

#: Of a problem whose settings a dry run chooses.
MOST_SEQUENCES = 4096
#: Seconds of one measured cell besides its candidates: its part of inputs, check and read floor;
#: samples, cross-check.
MEASURED_CELL_S = 0.3
#: Seconds until clocks and power have settled before a sustained window, and between its ends and
#: the counter's ticks.
AROUND_WINDOW_S = 1.2
#: Seconds to compile and record an instrumented build, and for a pass of Nsight Compute.
OCCUPANCY_S = 2.0
COUNTERS_S = 15.0
#: Seconds to compile one candidate and rank it.
MEASURED_CANDIDATE_S = 0.2
#: Seconds to predict one config.
PREDICTED_CONFIG_S = 0.01


def estimated_seconds(
    cell: Cell, gpu: GpuSpec, predicted: bool, options: MeasureOptions | None = None
) -> float:
    """A rough figure: constants, and the traffic of a cell whose caches are large."""
    options = options or MeasureOptions()
    candidates = (
        len(kernel(cell.kernel).candidate_configs(cell.problem, gpu))
        if cell.request == "best"
        else 0
    )
    if predicted:
        return max(1, candidates) * PREDICTED_CONFIG_S
    # Inputs are read by kernels and the reference in some hundred passes; all of the caches is
    # written once, and cleared by the driver at a fifteenth of the bandwidth.
    used, allocated = cell.problem.kv_bytes, cell.problem.kv_allocated_bytes
    traffic = (100 * used + 16 * (allocated - used)) / (gpu.bandwidth_tb_s * 1e12)
    sustained = options.window_s + AROUND_WINDOW_S if options.sustained or options.energy else 0.0
    # The read floor has a window of its own, shared by the kernels of a problem: three as a rule.
    sustained *= 4 / 3 if options.energy else 1.0
    extras = OCCUPANCY_S * options.occupancy + COUNTERS_S * options.counters
    return MEASURED_CELL_S + candidates * MEASURED_CANDIDATE_S + traffic + sustained + extras


def is_unsupported(cell: Cell, gpu: GpuSpec, predicted: bool) -> bool:
    """Whether the cell's row will say so, as far as that needs no launch and no simulation."""
    asked, problem = kernel(cell.kernel), cell.problem
    if asked.unsupported_reason(problem) is not None:
        return True
    if not predicted or asked.name == BOUND:
        return False
    if type(asked).schedule is Kernel.schedule:
        # A library's: nobody knows who does what.
        return True
    if problem.whole_model is not None:
        return False
    one = problem if problem.parallel == NONE else problem.shard(0)
    if not one.special.keys() <= AXES or one.q_len > MAX_Q_LEN:
        return True
    # Settings for more sequences take long to choose; one sequence has the same implementation.
    chosen_for = one if one.batch <= MOST_SEQUENCES else _of_one_sequence(one)
    config = cell.override or asked.default_config(chosen_for, gpu)
    return isinstance(config, TileConfig) and refusal(asked, config, gpu) is not None


def _of_one_sequence(problem: AttentionProblem) -> AttentionProblem:
    return replace(problem, batch=1, context=problem.max_context, q_lens=None)
