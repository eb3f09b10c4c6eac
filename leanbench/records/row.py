"""One line of `results.jsonl`: what was asked, what ran, what came out. A field not measured is
null, never 0.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from leanbench.core.errors import UserError
from leanbench.core.problem import AttentionProblem
from leanbench.core.strict_json import parse

#: Raised when a field changes its meaning or goes; a new optional field does not raise it.
SCHEMA_VERSION = 1

#: `noisy`: the figures are there, but the stopping rule was not met or something else used the GPU.
#: `suspect`: the figures contradict a physical limit, or the launches did something that makes them
#: meaningless. docs/measuring.md explains both.
Status = Literal[
    "ok", "unsupported", "incorrect", "out_of_memory", "timeout", "crashed", "noisy", "suspect"
]


class Row(BaseModel):
    """One cell's result."""

    model_config = ConfigDict(extra="ignore")

    #: Identifies problem, kernel and config request within a run; resume skips keys that have a
    #: row.
    cell: str
    problem: dict[str, Any]
    kernel: str
    decomposition: str
    #: The launch settings that ran; null where there are none or nothing ran.
    config: dict[str, Any] | None = None
    #: `kept` (of leanbench.tune), `heuristic` (the kernel's own), `best of N` (all of the kernel's
    #: candidates were timed in this cell) or `given`. Rows from before there were kept configs say
    #: `default` for `heuristic`.
    config_choice: str | None = None
    #: One sentence why; null where there was nothing to choose from.
    config_reason: str | None = None
    #: A real GPU, or the performance model.
    source: Literal["measured", "predicted"]
    status: Status
    #: One sentence for every status but `ok`.
    reason: str | None = None
    #: What a reader must know beside the figures, a sentence each; empty when there is nothing.
    #: Null: nothing measured.
    warnings: list[str] | None = None

    #: The L2 when a launch starts: `cold` (buffers rotate, as K and V come in serving) or `warm`
    #: (one buffer again and again). Figures of one never stand in a statistic with the other's.
    cache: Literal["cold", "warm"] = "cold"
    #: One launch, in bursts of milliseconds: median over `samples`, quartiles, 95% confidence
    #: interval of the median.
    latency_us: float | None = None
    latency_p25_us: float | None = None
    latency_p75_us: float | None = None
    latency_ci_low_us: float | None = None
    latency_ci_high_us: float | None = None
    samples: int | None = None
    #: Launches behind one sample.
    launches_per_sample: int | None = None
    #: Samples thrown away and repeated because the GPU had lowered its clocks.
    throttled_samples: int | None = None
    #: The same launches in a graph under torch's profiler: from one launch's first kernel to the
    #: next one's, by CUPTI's time stamps.
    crosscheck_us: float | None = None
    #: The GPU kernels of one launch in order, as the profiler names them.
    gpu_kernels: list[str] | None = None
    #: What must run once for a step's lengths before its launches (FlashInfer's plan), waited for:
    #: median wall time, not part of latency_us. Null: there is nothing to plan.
    plan_us: float | None = None

    #: Bytes of K and V that must be read.
    kv_bytes: int
    #: kv_bytes over latency.
    bandwidth_tb_s: float | None = None
    #: The fastest kernel that only reads the same bytes, same timing method.
    read_floor_us: float | None = None
    #: read_floor_us over latency_us: 1.0 is the physical limit.
    read_floor_share: float | None = None

    #: ||out - reference|| / ||reference||, the worst of the checked (sequence, KV head) pairs; LSE:
    #: the worst |difference| over max(1, |reference|).
    relative_error: float | None = None
    lse_error: float | None = None
    #: (sequence, KV head) pairs compared with the fp64 reference, of how many.
    checked_heads: int | None = None
    total_heads: int | None = None

    #: One launch, back to back for `sustained_s` seconds after a second of the same: under power
    #: and heat.
    sustained_us: float | None = None
    sustained_s: float | None = None
    sustained_clock_mhz: int | None = None
    #: Energy of one launch over the sustained window, by NVML's energy counter: gross, and above
    #: the idle power.
    energy_mj: float | None = None
    energy_above_idle_mj: float | None = None
    #: energy_mj by the second reading, the instantaneous power integrated over the same window.
    energy_by_power_mj: float | None = None
    #: Mean power over the sustained window, and of the idle GPU before the sweep.
    sustained_power_w: float | None = None
    idle_power_w: float | None = None
    #: energy_mj x sustained_us.
    energy_delay_mj_us: float | None = None
    #: energy_mj of a kernel that only reads the same bytes.
    energy_floor_mj: float | None = None

    #: Four kinds of occupancy. How evenly the schedule fills the CTA slots: see
    #: quantisation_efficiency in leanbench.core.decomposition.
    quantisation_efficiency: float | None = None
    #: Share of SM time, from the first CTA's start to the last one's end, in which an SM had a CTA
    #: that was not waiting; and what the stamps that it was read from cost: instrumented latency
    #: over plain latency.
    sm_busy_share: float | None = None
    instrumentation_cost: float | None = None
    #: Warps that registers and shared memory let an SM hold, over the most it can; of the launch
    #: that reads K and V.
    theoretical_warp_occupancy: float | None = None
    registers_per_thread: int | None = None
    shared_kb_per_cta: float | None = None
    spilled_registers: int | None = None
    #: Nsight Compute, of a separate pass: warps active over the most an SM can hold, while it was
    #: active; bytes read and written in DRAM by one launch; and those over the launch's time in
    #: that pass.
    counted_warp_occupancy: float | None = None
    counted_dram_bytes: int | None = None
    counted_dram_tb_s: float | None = None

    #: Read after each sample: medians of clock and power, highest temperature.
    sm_clock_mhz: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    #: Reasons NVML gave for lowered clocks during the samples that were kept, e.g.
    #: ["sw_power_cap"].
    throttle_reasons: list[str] | None = None

    #: Seconds this cell took, everything included.
    wall_s: float
    #: UTC, ISO 8601.
    time: str
    #: Key of the manifest's environment this row was taken in.
    environment: str


#: Figures that ratios are made of, and the limits between which ratios are numbers.
_RATIOED = (
    "latency_us",
    "crosscheck_us",
    "read_floor_us",
    "sustained_us",
    "energy_floor_mj",
    "energy_mj",
)
_LEAST, _MOST = 1e-9, 1e18


def read_row(line: bytes | str) -> tuple[Row, AttentionProblem]:
    """A line of `results.jsonl`.

    Raises:
        ValueError: it is no row; the message says in one line why.
    """
    fields = parse(line)
    if not isinstance(fields, dict):
        raise ValueError(f"a row is a JSON object, this is a {type(fields).__name__}")
    version = fields.get("schema_version", SCHEMA_VERSION)
    if version != SCHEMA_VERSION:
        raise ValueError(
            f"it has schema version {version!r}, this leanbench reads {SCHEMA_VERSION}"
        )
    try:
        row = Row.model_validate(fields)
        problem = AttentionProblem.from_dict(row.problem)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except KeyError as error:
        raise ValueError(f"problem.{error.args[0]}: Field required") from None
    except (TypeError, UserError) as error:
        raise ValueError(f"problem: {error}") from None
    for name in _RATIOED:
        value = getattr(row, name)
        # An energy of 0 is a counter that stood still: reports leave it out.
        if (
            value is not None
            and not _LEAST <= value <= _MOST
            and not (name == "energy_mj" and value <= 0)
        ):
            raise ValueError(f"{name}: {value:g} is not between {_LEAST:g} and {_MOST:g}")
    return row, problem
