"""Figures of a row: what a measurement or a prediction fills in, each declared once.

A figure that was not measured is null, never 0, and is not written. To add one, add a line here and
set it where it is measured: CONTRIBUTING.md has the steps.
"""

from __future__ import annotations

import math
from typing import Any

from pydantic import BaseModel, ConfigDict, field_validator

from leanbench.core.quantities import EVERY_STATUS, Status, quantity


class Figures(BaseModel):
    """The optional fields of a row. A name that is not declared here is an error."""

    model_config = ConfigDict(extra="forbid")

    @field_validator("*", mode="before")
    @classmethod
    def _infinite_is_not_measured(cls, value: Any) -> Any:
        return None if isinstance(value, float) and not math.isfinite(value) else value

    latency_us: float | None = quantity(
        "latency",
        "us",
        group="latency",
        kind="figure",
        shown="paper",
        notes="warnings",
        meaning="one launch; when measured, in bursts of milliseconds, median of the samples",
    )
    bandwidth_tb_s: float | None = quantity(
        "bandwidth",
        "tb_s",
        group="latency",
        kind="fixed",
        shown="paper",
        meaning="bytes of K and V over latency",
    )
    read_floor_us: float | None = quantity(
        "read floor",
        "us",
        group="latency",
        kind="figure",
        meaning="the fastest kernel that only reads the same bytes, same timing method",
    )
    read_floor_share: float | None = quantity(
        "of the floor",
        group="latency",
        kind="share",
        shown="paper",
        meaning="read floor over latency: 100% is the physical limit",
    )

    shard_us: float | None = quantity(
        "shards",
        "us",
        group="latency",
        kind="figure",
        meaning="attention over each GPU's tokens alone, where GPUs share them: the slowest GPU",
    )
    exchange_us: float | None = quantity(
        "exchange",
        "us",
        group="latency",
        kind="figure",
        meaning="latency above that: what exchanging and merging partials of GPUs adds",
    )
    from_barrier_us: float | None = quantity(
        "from a barrier",
        "us",
        group="latency",
        kind="figure",
        meaning="one launch from a common barrier of the GPUs to the end of the slowest, where they"
        " share tokens",
    )
    tokens_per_s: float | None = quantity(
        "tokens",
        "per_s",
        group="whole model",
        kind="figure",
        shown="paper",
        meaning="of all sequences together: batch over the time of a step",
    )
    no_attention_us: float | None = quantity(
        "no attention",
        "us",
        group="whole model",
        kind="figure",
        meaning="the same step without attention, timed in the same rounds; of a prediction, the"
        " weights over the memory's bandwidth",
    )
    attention_share: float | None = quantity(
        "attention",
        group="whole model",
        kind="share",
        shown="paper",
        meaning="share of the step's time: what it takes less the step without attention",
    )
    gemm_us: float | None = quantity(
        "GEMMs",
        "us",
        group="whole model",
        kind="figure",
        meaning="the model's linear layers and experts alone, in the same rounds",
    )
    prefill_us: float | None = quantity(
        "first token",
        "us",
        group="whole model",
        kind="figure",
        meaning="the prompt of all sequences through the model, as long as the context; torch's own"
        " FlashAttention, no CUDA graph",
    )
    weight_bytes: int | None = quantity(
        "weights",
        "bytes",
        group="memory",
        kind="bytes",
        shown="data",
        meaning="of the model's weights, or of the part of it that runs here",
    )
    memory_bytes: int | None = quantity(
        "memory",
        "bytes",
        group="memory",
        kind="bytes",
        meaning="most that was allocated during a step: weights, KV cache and what lies between the"
        " layers",
    )
    energy_per_token_j: float | None = quantity(
        "energy per token",
        "j",
        group="whole model",
        kind="figure",
        shown="paper",
        meaning="energy of a step over its batch",
    )

    energy_mj: float | None = quantity(
        "energy",
        "mj",
        group="energy",
        kind="figure",
        shown="paper",
        compared=True,
        meaning="of one launch over the sustained window: where measured, by NVML's counter",
    )
    energy_above_idle_mj: float | None = quantity(
        "above idle",
        "mj",
        group="energy",
        kind="figure",
        meaning="energy of one launch above the idle power",
    )
    energy_by_power_mj: float | None = quantity(
        "by power",
        "mj",
        group="energy",
        kind="figure",
        meaning="energy by the second reading, the instantaneous power integrated over the same"
        " window",
    )
    energy_floor_mj: float | None = quantity(
        "energy floor",
        "mj",
        group="energy",
        kind="figure",
        meaning="energy of a kernel that only reads the same bytes",
    )
    energy_delay_mj_us: float | None = quantity(
        "energy × delay",
        "mj_us",
        group="energy",
        kind="figure",
        meaning="energy times sustained latency",
    )

    sustained_us: float | None = quantity(
        "sustained",
        "us",
        group="sustained",
        kind="figure",
        meaning="one launch, back to back for seconds after a second of the same: under power and"
        " heat",
    )
    sustained_s: float | None = quantity(
        "sustained window",
        "s",
        group="sustained",
        kind="figure",
        shown="data",
        meaning="how long launches ran back to back",
    )
    sustained_clock_mhz: int | None = quantity(
        "sustained clock",
        "mhz",
        group="sustained",
        kind="count",
        meaning="SM clock over the sustained window",
    )
    sustained_power_w: float | None = quantity(
        "mean power", "w", group="sustained", kind="figure", meaning="over the sustained window"
    )
    idle_power_w: float | None = quantity(
        "idle power",
        "w",
        group="sustained",
        kind="figure",
        meaning="of the idle GPU before the sweep",
    )

    latency_p25_us: float | None = quantity(
        "p25", "us", group="samples", kind="figure", meaning="a quarter of the samples are below"
    )
    latency_p75_us: float | None = quantity(
        "p75", "us", group="samples", kind="figure", meaning="a quarter of the samples are above"
    )
    latency_ci_low_us: float | None = quantity(
        "lower end",
        "us",
        group="samples",
        kind="figure",
        shown="data",
        meaning="of the 95% confidence interval of the median latency",
    )
    latency_ci_high_us: float | None = quantity(
        "upper end",
        "us",
        group="samples",
        kind="figure",
        shown="data",
        meaning="of the 95% confidence interval of the median latency",
    )
    samples: int | None = quantity(
        "samples", group="samples", kind="count", shown="data", meaning="behind the latency"
    )
    launches_per_sample: int | None = quantity(
        "launches",
        "per sample",
        group="samples",
        kind="count",
        shown="data",
        meaning="of the CUDA graph whose replay is one sample",
    )
    crosscheck_us: float | None = quantity(
        "cross-check",
        "us",
        group="samples",
        kind="figure",
        meaning="the same launches in a graph between two readings of the GPU's own clock"
        " (%globaltimer); until 2026-11-23 under torch's profiler, by CUPTI's time stamps",
    )
    plan_us: float | None = quantity(
        "plan",
        "us",
        group="samples",
        kind="figure",
        meaning="what must run once for a step's lengths before its launches, wall time waited"
        " for; not part of the latency",
    )
    host_us: float | None = quantity(
        "host",
        "us",
        group="samples",
        kind="figure",
        shown="markdown",
        compared=True,
        meaning="host time of an eager call, without waiting for the GPU, median; not part of the"
        " latency, which a CUDA graph frees of it",
    )

    quantisation_efficiency: float | None = quantity(
        "schedule efficiency",
        group="occupancy",
        kind="share",
        meaning="quantisation efficiency: share of CTA slots × time that the schedule gives work,"
        " if all LeanTiles took equally long",
    )
    sm_busy_share: float | None = quantity(
        "SM busy",
        group="occupancy",
        kind="share",
        meaning="share of SM time, from the first CTA's start to the last one's end, in which an"
        " SM had a CTA that was not waiting; one of several is enough, so it can exceed the"
        " schedule efficiency",
    )
    instrumentation_cost: float | None = quantity(
        "instrumentation",
        "x",
        group="occupancy",
        kind="fixed3",
        meaning="what the timeline events behind the SM busy share cost: instrumented latency over"
        " plain latency",
    )
    theoretical_warp_occupancy: float | None = quantity(
        "warps that fit",
        group="occupancy",
        kind="share",
        meaning="theoretical occupancy: warps that registers and shared memory let an SM hold,"
        " over the most it can hold",
    )
    counted_warp_occupancy: float | None = quantity(
        "warps active",
        group="occupancy",
        kind="share",
        meaning="counted by Nsight Compute: warps active over the most an SM can hold, while it"
        " was active",
    )
    counted_dram_bytes: int | None = quantity(
        "DRAM",
        "bytes",
        group="occupancy",
        kind="bytes",
        meaning="counted by Nsight Compute: read and written by one launch",
    )
    counted_dram_tb_s: float | None = quantity(
        "DRAM rate",
        "tb_s",
        group="occupancy",
        kind="fixed",
        meaning="bytes that DRAM moved over the launch's time, both by Nsight Compute",
    )
    registers_per_thread: int | None = quantity(
        "registers",
        "per thread",
        group="occupancy",
        kind="count",
        meaning="of the launch that reads K and V",
    )
    spilled_registers: int | None = quantity(
        "spilled",
        "registers",
        group="occupancy",
        kind="count",
        meaning="of the launch that reads K and V",
    )
    shared_kb_per_cta: float | None = quantity(
        "shared memory",
        "KB per CTA",
        group="occupancy",
        kind="figure",
        meaning="of the launch that reads K and V",
    )

    relative_error: float | None = quantity(
        "relative error",
        group="correctness",
        kind="exponent",
        meaning="‖out − reference‖ over ‖reference‖, the worst of the checked pairs of sequence and"
        " KV head; numbers of the reference below the dtype's smallest normal one count as that",
    )
    lse_error: float | None = quantity(
        "LSE error",
        group="correctness",
        kind="exponent",
        shown="data",
        meaning="worst |difference| of the LSE over max(1, |reference|)",
    )
    checked_heads: int | None = quantity(
        "checked heads",
        group="correctness",
        kind="count",
        shown="data",
        meaning="pairs of sequence and KV head that were compared with the fp64 reference",
    )
    total_heads: int | None = quantity(
        "total heads",
        group="correctness",
        kind="count",
        shown="data",
        meaning="pairs of sequence and KV head that there are",
    )

    sm_clock_mhz: int | None = quantity(
        "SM clock", "mhz", group="GPU state", kind="count", meaning="median, read after each sample"
    )
    power_w: float | None = quantity(
        "power", "w", group="GPU state", kind="figure", meaning="median, read after each sample"
    )
    temperature_c: int | None = quantity(
        "temperature",
        "c",
        group="GPU state",
        kind="count",
        meaning="highest, read after each sample",
    )
    throttled_samples: int | None = quantity(
        "repeated",
        "samples",
        group="GPU state",
        kind="count",
        meaning="thrown away because the GPU had lowered its clocks",
    )
    throttle_reasons: list[str] | None = quantity(
        "throttled by",
        group="GPU state",
        kind="text",
        meaning="why clocks were lowered in samples that count, by NVML",
    )

    gpu_kernels: list[str] | None = quantity(
        "GPU kernels",
        group="settings",
        kind="text",
        meaning="of one launch, as the nodes of its CUDA graph name them",
    )
    library: str | None = quantity(
        "library",
        group="settings",
        kind="text",
        statuses=EVERY_STATUS,
        meaning="package and version whose code ran; none: this project's own kernels",
    )
    schedule: str | None = quantity(
        "schedule",
        group="settings",
        kind="text",
        shown="markdown",
        meaning="what its schedule comes to on this problem: stream-K (crosses from one output tile"
        " to the next), equal splits, splits by length, fixed runs, one CTA or cluster a tile,"
        " several tiles a CTA or cluster; empty where a kernel's inside is not known",
    )
    config: dict[str, Any] | None = quantity(
        "config", group="settings", kind="text", shown="markdown", meaning="launch settings"
    )
    config_choice: str | None = quantity(
        "config choice",
        group="settings",
        kind="text",
        meaning="tuned, heuristic, best of so many candidates, or given",
    )
    config_reason: str | None = quantity(
        "why this config",
        group="settings",
        kind="sentence",
        meaning="one sentence; of kernels that had a choice",
    )
    warnings: list[str] | None = quantity(
        "warnings",
        group="settings",
        kind="sentence",
        meaning="what a reader must know about the figures",
    )


class Outcome(Figures):
    """The fields of a row that only running or predicting its kernel fills in.

    `a | b` has the fields of both, those of `b` where both have one.
    """

    status: Status | None = None
    reason: str | None = None
    #: Fields of `leanbench.records.samples.Samples` but the cell.
    raw_samples: dict[str, Any] | None = None

    def __or__(self, other: Outcome) -> Outcome:
        return Outcome(**self.fields() | other.fields())

    def fields(self) -> dict[str, Any]:
        """Those that were set, by name."""
        return self.model_dump(exclude_unset=True)
