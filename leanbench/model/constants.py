"""Constants of the performance model, with unit, meaning, and the fit that moves them."""

from __future__ import annotations

import math
from dataclasses import Field, dataclass, field, fields
from typing import Any

from leanbench.core.gpu_spec import SM_BYTES_PER_CLOCK


def _constant(default: float, unit: str, meaning: str, *, fitted: str = "latency") -> Any:
    return field(default=default, metadata={"unit": unit, "meaning": meaning, "fitted": fitted})


@dataclass(frozen=True)
class LeanCudaConstants:
    """Constants of lean.cu on a GPU. The defaults are the start of a first fit."""

    bandwidth_share: float = _constant(
        0.96, "of the datasheet", "bandwidth that its copies get from DRAM on large buffers"
    )
    line_share: float = _constant(
        0.3, "", "of lines of 128 bytes that a token's row fills in part: what is read in vain"
    )
    warm_up_us: float = _constant(
        1.7, "us", "time constant with which its copies reach full bandwidth"
    )
    start_us: float = _constant(
        0.35, "us", "before a launch's first segment: work range, query rows, first loads"
    )
    lengths_us: float = _constant(
        1.0, "us", "and where CTAs read the lengths before they know what to copy"
    )
    lengths_batch_us: float = _constant(0.1, "us", "and for every further 32 sequences")
    segment_us: float = _constant(0.25, "us", "one more segment of a work range")
    end_number_us: float = _constant(
        1.3e-3, "us", "for each number of a segment's rows: its warps merge them"
    )
    cluster_us: float = _constant(
        0.7, "us", "a segment of a cluster: its CTAs wait for each other and merge"
    )
    dram_latency_us: float = _constant(
        0.4, "us", "a chunk of K and V, from its copy's issue to its arrival"
    )
    chunk_us: float = _constant(0.35, "us", "a warp's arithmetic for a chunk of 8 rows")
    chunk_depth_us: float = _constant(
        0.02, "us", "and for each 16 numbers of head_dim, whose products are added one by one"
    )
    chunk_rows_us: float = _constant(
        0.06, "us", "and for each 16 tokens x 64 numbers of every further 8 rows", fitted="held"
    )
    page_us: float = _constant(0.2, "us", "and where the cache is paged")
    warp_share: float = _constant(
        0.09,
        "of an SM",
        "its arithmetic that one warp keeps busy: more warps take turns",
        fitted="held",
    )
    sm_bytes_per_clock: float = _constant(66.0, "bytes/clock", "the most that one SM reads")
    l2_bandwidth_ratio: float = _constant(
        15.0, "of DRAM", "the L2's bandwidth, from which output tiles of one KV head read it again"
    )
    reread_share: float = _constant(
        0.3,
        "",
        "and from DRAM, where they are not at the same tokens and K and V exceed the L2",
        fitted="held",
    )
    merge_us: float = _constant(0.33, "us", "a partial's way to the CTA that merges it")
    merge_level_us: float = _constant(0.6, "us", "for each level of the tree of partials")
    merge_number_us: float = _constant(
        4.5e-4, "us x warps", "for each number of a partial, shared by the warps of a cluster"
    )

    def __post_init__(self) -> None:
        _check(self, divisors=tuple(values_of(self)))


@dataclass(frozen=True)
class Constants:
    """Constants of a GPU beyond its datasheet. Rates are bytes per microsecond.

    The defaults are the start of a fit; `leanbench predict show` prints the values in use. `fitted`
    in a field's metadata names the data: `floor` (the read floor), `latency`, `energy`, or `held`
    if no run here can determine it.
    """

    launch_us: float = _constant(
        0.6, "us", "one node of a CUDA graph: an empty kernel", fitted="held"
    )
    first_read_us: float = _constant(
        0.6, "us", "from a kernel's start to its first byte", fitted="floor"
    )
    warm_up_us: float = _constant(
        1.2,
        "us",
        "time constant with which DRAM and address translation reach full bandwidth",
        fitted="floor",
    )
    bandwidth_share: float = _constant(
        0.98,
        "of the datasheet",
        "bandwidth that a kernel which only reads gets on large buffers",
        fitted="floor",
    )
    segment_us: float = _constant(
        1.0,
        "us",
        "lengths, pointers and query tile before a segment's first byte, its stores after the last",
    )
    dram_latency_us: float = _constant(
        0.65, "us", "a DRAM read, from issue to arrival in shared memory", fitted="held"
    )
    tile_us: float = _constant(0.59, "us", "one CTA's arithmetic for a LeanTile, whatever its size")
    token_warp_us: float = _constant(
        0.0056, "us x warps", "and for each token of 16 rows (softmax), shared by 4 warps"
    )
    warp_bytes_per_us: float = _constant(
        34_000.0, "bytes/us", "and its bytes from shared memory through a warp's MMA"
    )
    row_share: float = _constant(
        0.8, "", "what every further 16 rows add to the parts by token and by byte"
    )
    sm_bytes_per_clock: float = _constant(
        SM_BYTES_PER_CLOCK,
        "bytes/clock",
        "the most that one SM reads, whatever runs on it",
        fitted="held",
    )
    sm_spread: float = _constant(
        0.05,
        "",
        "full memory: the luckiest SM gets this much more than the mean, the unluckiest less",
        fitted="held",
    )
    merge_us: float = _constant(
        1.6, "us", "a partial's way to the merging CTA, the last loads and the stores"
    )
    merge_partial_us: float = _constant(0.01, "us", "for each partial of a merge")
    merge_number_warp_us: float = _constant(
        0.001,
        "us x warps",
        "and for each of its numbers that one CTA reads or empties, shared by its warps",
    )
    merge_launch_us: float = _constant(
        0.5, "us", "fixed_split: the second kernel's node, waiting for the first to end"
    )
    idle_power_w: float = _constant(
        126.0, "W", "the GPU with a CUDA context and nothing running", fitted="energy"
    )
    sm_power_w: float = _constant(
        1.0, "W", "an SM that runs a CTA, beside the bytes it reads", fitted="energy"
    )
    byte_pj: float = _constant(
        120.0, "pJ/byte", "a byte from DRAM through the arithmetic", fitted="energy"
    )
    power_cap_share: float = _constant(
        0.996, "of the limit", "highest power seen under the GPU's limit", fitted="energy"
    )
    reference_clock_mhz: float = _constant(
        1980.0, "MHz", "SM clock of the runs behind these figures", fitted="held"
    )

    #: Constants of lean.cu; None if it is not calibrated.
    lean_cuda: LeanCudaConstants | None = None

    def __post_init__(self) -> None:
        _check(self, _DIVISORS)


#: Constants that the model divides by.
_DIVISORS = (
    "warm_up_us",
    "bandwidth_share",
    "warp_bytes_per_us",
    "sm_bytes_per_clock",
    "reference_clock_mhz",
)


Calibrated = Constants | LeanCudaConstants


def declared(of: Calibrated | type[Calibrated]) -> tuple[Field[Any], ...]:
    """Return the constants of a class in order. Their metadata has `unit`, `meaning` and
    `fitted`.
    """
    return tuple(constant for constant in fields(of) if constant.metadata)


def values_of(constants: Calibrated) -> dict[str, float]:
    return {constant.name: getattr(constants, constant.name) for constant in declared(constants)}


def names(of: Calibrated | type[Calibrated], fitted: str) -> tuple[str, ...]:
    """Return the constants that a fit of this kind changes."""
    return tuple(
        constant.name for constant in declared(of) if constant.metadata["fitted"] == fitted
    )


def _check(constants: Calibrated, divisors: tuple[str, ...]) -> None:
    for name, value in values_of(constants).items():
        if not math.isfinite(value) or value < 0 or (value == 0 and name in divisors):
            raise ValueError(f"{name} is {value}")
