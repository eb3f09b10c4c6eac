"""One line of `results.jsonl`: what was asked, what ran, what came out. A field not measured is null, never 0."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

#: Raised when a field changes its meaning or goes; a new optional field does not raise it.
SCHEMA_VERSION = 1

Status = Literal["ok", "unsupported", "incorrect", "out_of_memory", "timeout", "crashed", "noisy"]


class Row(BaseModel):
    """One cell's result."""

    model_config = ConfigDict(extra="ignore")

    #: Identifies problem, kernel and config request within a run; resume skips keys that have a row.
    cell: str
    problem: dict[str, Any]
    kernel: str
    decomposition: str
    #: The launch settings that ran; null where there are none or nothing ran.
    config: dict[str, Any] | None = None
    #: `default`, `best of N` (all of the kernel's candidates were timed in this cell) or `given`.
    config_choice: str | None = None
    #: A real GPU, or the performance model.
    source: Literal["measured", "predicted"]
    status: Status
    #: One sentence for every status but `ok`.
    reason: str | None = None

    #: One launch: median over `samples`, quartiles, 95% confidence interval of the median.
    latency_us: float | None = None
    latency_p25_us: float | None = None
    latency_p75_us: float | None = None
    latency_ci_low_us: float | None = None
    latency_ci_high_us: float | None = None
    samples: int | None = None
    #: Launches behind one sample.
    launches_per_sample: int | None = None

    #: Bytes of K and V that must be read.
    kv_bytes: int
    #: kv_bytes over latency.
    bandwidth_tb_s: float | None = None
    #: The fastest kernel that only reads the same bytes, same timing method.
    read_floor_us: float | None = None
    #: read_floor_us over latency_us: 1.0 is the physical limit.
    read_floor_share: float | None = None

    #: ||out - reference|| / ||reference||, the worst of the checked (sequence, KV head) pairs; LSE: the worst
    #: |difference| over max(1, |reference|).
    relative_error: float | None = None
    lse_error: float | None = None
    #: (sequence, KV head) pairs compared with the fp64 reference, of how many.
    checked_heads: int | None = None
    total_heads: int | None = None

    #: The schedule's own ceiling, see leanbench.decomposition.quantisation_efficiency.
    quantisation_efficiency: float | None = None

    sm_clock_mhz: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    #: Reasons NVML gave for lowered clocks during the cell, e.g. ["sw_power_cap"].
    throttle_reasons: list[str] | None = None

    #: Seconds this cell took, everything included.
    wall_s: float
    #: UTC, ISO 8601.
    time: str
    #: Key of the manifest's environment this row was taken in.
    environment: str
