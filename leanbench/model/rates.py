"""Read rates of a GPU's memory, one SM and one CTA, for one problem and config.

Rates are bytes per microsecond. The constants come from a calibration
(leanbench.model.calibration): the GPU's own, or the nearest GPU's with this GPU's bandwidth, clock
and SMs.

Not modelled: spilled registers, bank conflicts, the L2 as a cache (K and V are read once; row tiles
of one KV head count separately), ECC, and clocks lowered by power or heat.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from leanbench.core.config import TileConfig
from leanbench.core.decomposition import tile_rows
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.problem import ELEMENT_BYTES, AttentionProblem
from leanbench.model.constants import Constants

#: One warp for each of an SM's four partitions, which have their own scheduler and tensor core.
MAX_USEFUL_WARPS = 4
#: Query tile, barriers, layout conversions and CUDA's 1 KB, in addition to the K and V stages.
SHARED_RESERVE_KB = 12
#: Registers of Triton's decode loop up to head_dim 128; above, all 255.
REGISTERS_PER_THREAD = 128
MAX_CTAS_PER_SM = 16
#: Classes of SMs with different luck, dealt in turn, so that they do not pause in step.
SM_CLASSES = 6
#: Ends of the steps of the warm-up, in multiples of its time constant.
WARM_UP_STEPS = (0.25, 0.5, 1.0, 1.5, 2.5, 4.0)


@dataclass(frozen=True)
class Merge:
    """Microseconds of merging the partials of an output tile after their arrival."""

    #: Arrival of the last partial at the merging CTA, last loads and stores.
    once_us: float
    #: One more partial merged at once.
    partial_us: float
    #: Partials that a CTA merges at once, and time of a level of the tree for more; None for all.
    at_once: int | None = None
    level_us: float = 0.0

    def end_us(self, arrived_us: float, partials: int) -> float:
        """Return the end of an output tile whose `partials` arrived at `arrived_us`."""
        if self.at_once is None:
            return arrived_us + self.once_us + self.partial_us * partials
        levels = tree_levels(partials, self.at_once) * self.level_us
        return arrived_us + self.once_us + levels + self.partial_us * min(partials, self.at_once)


def tree_levels(partials: int, at_once: int) -> int:
    """Return the levels of a tree in which each CTA merges up to `at_once` partials."""
    levels = 0
    while partials > 1:
        partials = -(-partials // at_once)
        levels += 1
    return levels


@dataclass(frozen=True)
class Rates:
    """Rates of one launch on one GPU.

    A cluster of CTAs is played as one CTA, on a GPU with SMs combined accordingly.
    """

    constants: Constants
    sms: int
    #: CTAs that an SM holds at once.
    resident: int
    #: K and V of one full LeanTile, and one CTA's arithmetic for it.
    tile_bytes: int
    compute_us: float
    #: Time before a segment's first byte, including the end of the previous segment.
    segment_us: float
    #: Time from the launch to the first CTAs' first byte.
    first_byte_us: float
    #: Time constant of the memory's warm-up.
    warm_up_us: float
    #: Maximum that one CTA alone, one SM, and all together read.
    cta_bytes_per_us: float
    sm_bytes_per_us: float
    gpu_bytes_per_us: float
    #: Stream-K merge, in the same launch.
    merge: Merge

    @property
    def slots(self) -> int:
        return self.sms * self.resident

    @property
    def start_us(self) -> float:
        """Time from the launch to the first CTAs' start."""
        return self.constants.launch_us

    def weight(self, sm: int) -> float:
        """Return an SM's share of saturated memory, over the mean."""
        luck = 2 * (sm % SM_CLASSES) / (SM_CLASSES - 1) - 1
        return 1 + self.constants.sm_spread * luck

    def demand(self, streaming: int) -> float:
        """Return the demand of an SM with this many streaming CTAs."""
        return min(streaming * self.cta_bytes_per_us, self.sm_bytes_per_us)

    def drain_us(self, reach: float) -> float:
        """Return the time from a segment's last byte, as `cta_bytes_per_us` counts it, to the end
        of its arithmetic.

        A CTA that waits for memory computes its last LeanTile after its arrival. A CTA limited by
        arithmetic has loaded ahead: it waited only for its first LeanTile, at the rate `reach`.
        """
        return min(self.compute_us, self.tile_bytes / reach)

    def warm_up_ends(self) -> list[float]:
        """Return the times at which the memory's rate changes, microseconds from the launch."""
        return [self.first_byte_us + step * self.warm_up_us for step in WARM_UP_STEPS]

    def memory_bytes_per_us(self, now_us: float) -> float:
        """Return the DRAM bandwidth at a time from the launch: the mean of `1 - exp(-t / warm_up)`
        over each step.
        """
        since = (now_us - self.first_byte_us) / self.warm_up_us
        begin = 0.0
        for end in WARM_UP_STEPS:
            if since < end - 1e-9:
                missing = (math.exp(-begin) - math.exp(-end)) / (end - begin)
                return self.gpu_bytes_per_us * (1 - missing)
            begin = end
        return self.gpu_bytes_per_us

    def warm_up_loss_us(self, until_us: float) -> float:
        """Return the time that reading up to `until_us` would have saved in warm memory."""
        since = max(0.0, until_us - self.first_byte_us)
        return self.warm_up_us * (1 - math.exp(-since / self.warm_up_us))


def rates_for(
    problem: AttentionProblem,
    config: TileConfig,
    spec: GpuSpec,
    constants: Constants,
    resident: int | None = None,
) -> Rates:
    """Return the rates of a launch.

    Args:
        resident: CTAs per SM, from the compiled kernel's registers and shared memory; estimated by
            default.
    """
    # One CTA reads each number of a partial, and empties its slot for the next launch.
    numbers = 2 * partial_rows(problem) * problem.head_dim
    return Rates(
        constants=constants,
        sms=spec.sms,
        resident=resident_ctas(problem, config, spec) if resident is None else resident,
        tile_bytes=tile_bytes(problem, config),
        compute_us=tile_compute_us(problem, config, spec, constants),
        segment_us=constants.segment_us,
        first_byte_us=constants.launch_us + constants.first_read_us + constants.segment_us,
        warm_up_us=constants.warm_up_us,
        cta_bytes_per_us=cta_bytes_per_us(problem, config, spec, constants),
        sm_bytes_per_us=sm_bytes_per_us(spec, constants),
        gpu_bytes_per_us=achievable_bytes_per_us(spec, constants),
        merge=Merge(constants.merge_us, merge_partial_us(constants, numbers, config.num_warps)),
    )


def achievable_bytes_per_us(spec: GpuSpec, constants: Constants) -> float:
    """Return the DRAM bandwidth that a kernel gets with all SMs."""
    return constants.bandwidth_share * spec.bandwidth_tb_s * 1e6


def floor_us(kv_bytes: int, spec: GpuSpec, constants: Constants) -> float:
    """Return the time of a kernel that only reads `kv_bytes`: launch, first byte, and bandwidth
    that warms up.

    Solves `streaming = t - warm_up (1 - exp(-t / warm_up))` for t by Newton's method.
    """
    streaming_us = kv_bytes / achievable_bytes_per_us(spec, constants)
    warm_up_us = constants.warm_up_us
    at_us = streaming_us + warm_up_us
    for _ in range(20):
        cold = math.exp(-at_us / warm_up_us)
        step_us = (at_us - warm_up_us * (1 - cold) - streaming_us) / (1 - cold)
        at_us -= step_us
        if abs(step_us) < 1e-9:
            break
    return constants.launch_us + constants.first_read_us + at_us


def sm_bytes_per_us(spec: GpuSpec, constants: Constants) -> float:
    """Return the maximum that one SM can read."""
    return constants.sm_bytes_per_clock * spec.boost_clock_mhz


def tile_bytes(problem: AttentionProblem, config: TileConfig) -> int:
    """Return the bytes of K and V of one full LeanTile."""
    return config.tile_tokens * problem.token_bytes


def tile_compute_us(
    problem: AttentionProblem, config: TileConfig, spec: GpuSpec, constants: Constants
) -> float:
    """Return one CTA's arithmetic for one LeanTile in shared memory."""
    warps = min(config.num_warps, MAX_USEFUL_WARPS)
    token_us = config.tile_tokens * constants.token_warp_us / warps
    byte_us = tile_bytes(problem, config) / (warps * constants.warp_bytes_per_us)
    more_rows = tile_rows(problem.group_size, problem.head_dim, problem.q_len) / 16 - 1
    tile_us = constants.tile_us + (token_us + byte_us) * (1 + constants.row_share * more_rows)
    return tile_us * constants.reference_clock_mhz / spec.boost_clock_mhz


def cta_bytes_per_us(
    problem: AttentionProblem, config: TileConfig, spec: GpuSpec, constants: Constants
) -> float:
    """Return the maximum that one CTA alone can read.

    With one stage it loads, then computes. With more, the next `num_stages - 1` LeanTiles are in
    flight meanwhile (Little's law: bytes in flight over latency).
    """
    compute_us = tile_compute_us(problem, config, spec, constants)
    if config.num_stages == 1:
        period_us = constants.dram_latency_us + compute_us
    else:
        period_us = max(compute_us, constants.dram_latency_us / (config.num_stages - 1))
    return tile_bytes(problem, config) / period_us


def partial_rows(problem: AttentionProblem) -> int:
    """Return the nonempty rows of a partial, in Triton."""
    rows = tile_rows(problem.group_size, problem.head_dim, problem.q_len)
    return min(problem.group_size * problem.q_len, rows)


def split_bytes(problem: AttentionProblem) -> int:
    """Return the bytes of a second launch's partial: fp32, with two softmax statistics a row."""
    return 4 * partial_rows(problem) * (problem.head_dim + 2)


def merge_waves(output_tiles: int, sms: int) -> int:
    """Return the waves of CTAs of fixed_split's second kernel."""
    return -(-output_tiles // (sms * MAX_CTAS_PER_SM))


def merge_partial_us(constants: Constants, numbers: int, warps: int) -> float:
    """Return the time that one more partial adds to a merge in which a CTA of so many warps moves
    `numbers` of its numbers.
    """
    return constants.merge_partial_us + constants.merge_number_warp_us * numbers / warps


def resident_ctas(problem: AttentionProblem, config: TileConfig, spec: GpuSpec) -> int:
    """Estimate the CTAs that one SM holds at once, by shared memory and registers; 0 if none
    fits.
    """
    # Triton pads head_dim to a power of two, and keeps `num_stages - 1` LeanTiles in shared memory.
    padded = 1 << (problem.head_dim - 1).bit_length()
    stages = max(1, config.num_stages - 1)
    shared_kb = SHARED_RESERVE_KB + stages * 2 * config.tile_tokens * padded * ELEMENT_BYTES / 1024
    if shared_kb > spec.shared_kb_per_cta:
        return 0
    registers = REGISTERS_PER_THREAD if problem.head_dim <= 128 else 255
    by_registers = spec.registers_per_sm // (registers * 32 * config.num_warps)
    return max(1, min(int(spec.shared_kb_per_sm / shared_kb), by_registers, MAX_CTAS_PER_SM))
