"""Figures of a row: results of a measurement or a prediction, each declared once.

A figure that was not measured is null, never 0, and is not written. CONTRIBUTING.md has the steps
to add one.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from pydantic import BaseModel, ConfigDict, field_validator

from leanbench.core.quantities import EVERY_STATUS, quantity

#: Declarations by the group of their column.
_latency = partial(quantity, group="latency", kind="figure")
_model = partial(quantity, group="whole model", kind="figure")
_memory = partial(quantity, group="memory", kind="bytes")
_energy = partial(quantity, group="energy", kind="figure")
_sustained = partial(quantity, group="sustained", kind="figure")
_samples = partial(quantity, group="samples", kind="figure")
_occupancy = partial(quantity, group="occupancy", kind="share")
_correctness = partial(quantity, group="correctness", kind="exponent")
_gpu = partial(quantity, group="GPU state", kind="count")
_settings = partial(quantity, group="settings", kind="text")


class Figures(BaseModel):
    """The optional fields of a row. A name that is not declared here is an error."""

    model_config = ConfigDict(extra="forbid")

    @field_validator("*", mode="before")
    @classmethod
    def _infinite_is_not_measured(cls, value: Any) -> Any:
        return None if isinstance(value, float) and not math.isfinite(value) else value

    latency_us: float | None = _latency(
        "latency",
        "us",
        "one launch; when measured, in bursts of milliseconds, median of the samples",
        shown="paper",
        notes="warnings",
    )
    bandwidth_tb_s: float | None = _latency(
        "bandwidth", "tb_s", "bytes of K and V over latency", kind="fixed", shown="paper"
    )
    read_floor_us: float | None = _latency(
        "read floor", "us", "the fastest kernel that only reads the same bytes, same timing method"
    )
    read_floor_share: float | None = _latency(
        "of the floor",
        "",
        "read floor over latency: 100% is the physical limit",
        kind="share",
        shown="paper",
    )

    fixed_runs_us: float | None = _latency(
        "fixed runs",
        "us",
        "what batch-invariant mode adds at least to the read floor, by its schedule: reads at the "
        "end by too few CTAs, and a trip through memory for each level of the merge",
    )
    shard_us: float | None = _latency(
        "shards",
        "us",
        "attention over each GPU's tokens alone, where GPUs share them: the slowest GPU",
    )
    exchange_us: float | None = _latency(
        "exchange", "us", "latency above that: what exchanging and merging partials of GPUs adds"
    )
    from_barrier_us: float | None = _latency(
        "from a barrier",
        "us",
        "one launch from a common barrier of the GPUs to the end of the slowest, where they "
        "share tokens",
    )
    tokens_per_s: float | None = _model(
        "tokens", "per_s", "of all sequences together: batch over the time of a step", shown="paper"
    )
    no_attention_us: float | None = _model(
        "no attention",
        "us",
        "the same step without attention and appending, timed in the same rounds; of a prediction, "
        "the weights over the memory's bandwidth",
    )
    attention_share: float | None = _model(
        "attention",
        "",
        "share of the step's time: what it takes less the step without attention",
        kind="share",
        shown="paper",
    )
    gemm_us: float | None = _model(
        "GEMMs", "us", "the model's linear layers and experts alone, in the same rounds"
    )
    prefill_us: float | None = _model(
        "first token",
        "us",
        "the prompt of all sequences through the model, as long as the context; torch's own "
        "FlashAttention, no CUDA graph",
    )
    weight_bytes: int | None = _memory(
        "weights",
        "bytes",
        "of the model's weights, or of the part of it that runs here",
        shown="data",
    )
    memory_bytes: int | None = _memory(
        "memory",
        "bytes",
        "most that was allocated during a step: weights, KV cache and what lies between the layers",
    )
    workspace_bytes: int | None = _memory(
        "workspace",
        "bytes",
        "partials that CTAs of a launch write for one another, by the schedule",
    )
    energy_per_token_j: float | None = _model(
        "energy per token", "j", "energy of a step over its batch", shown="paper"
    )

    energy_mj: float | None = _energy(
        "energy",
        "mj",
        "of one launch over the sustained window: where measured, by NVML's counter",
        shown="paper",
        compared=True,
    )
    energy_above_idle_mj: float | None = _energy(
        "above idle", "mj", "energy of one launch above the idle power"
    )
    energy_by_power_mj: float | None = _energy(
        "by power",
        "mj",
        "energy by the second reading, the instantaneous power integrated over the same window",
    )
    energy_floor_mj: float | None = _energy(
        "energy floor", "mj", "energy of a kernel that only reads the same bytes"
    )
    energy_delay_mj_us: float | None = _energy(
        "energy × delay", "mj_us", "energy times sustained latency"
    )

    sustained_us: float | None = _sustained(
        "sustained",
        "us",
        "one launch, back to back for seconds after a second of the same: under power and heat",
    )
    sustained_s: float | None = _sustained(
        "sustained window", "s", "how long launches ran back to back", shown="data"
    )
    sustained_clock_mhz: int | None = _sustained(
        "sustained clock", "mhz", "SM clock over the sustained window", kind="count"
    )
    sustained_power_w: float | None = _sustained("mean power", "w", "over the sustained window")
    idle_power_w: float | None = _sustained("idle power", "w", "of the idle GPU before the sweep")

    latency_p25_us: float | None = _samples("p25", "us", "a quarter of the samples are below")
    latency_p75_us: float | None = _samples("p75", "us", "a quarter of the samples are above")
    latency_ci_low_us: float | None = _samples(
        "lower end", "us", "of the 95% confidence interval of the median latency", shown="data"
    )
    latency_ci_high_us: float | None = _samples(
        "upper end", "us", "of the 95% confidence interval of the median latency", shown="data"
    )
    samples: int | None = _samples("samples", "", "behind the latency", kind="count", shown="data")
    launches_per_sample: int | None = _samples(
        "launches",
        "per sample",
        "of the CUDA graph whose replay is one sample",
        kind="count",
        shown="data",
    )
    processes: int | None = _samples(
        "processes",
        "",
        "fresh processes behind the latency and its interval (--repeat); the row is that of the "
        "one with the median latency",
        kind="count",
        shown="data",
    )
    process_spread: float | None = _samples(
        "spread",
        "",
        "half the range of the processes' latencies over their median",
        kind="share",
        shown="data",
    )
    crosscheck_us: float | None = _samples(
        "cross-check",
        "us",
        "the same launches in a graph between two readings of the GPU's own clock "
        "(%globaltimer); until 2026-11-23 under torch's profiler, by CUPTI's time stamps",
    )
    plan_us: float | None = _samples(
        "plan",
        "us",
        "what must run once for a step's lengths before its launches, wall time waited for; "
        "not part of the latency",
    )
    host_us: float | None = _samples(
        "host",
        "us",
        "host time of an eager call, without waiting for the GPU, median; not part of the "
        "latency, which a CUDA graph frees of it",
        shown="markdown",
        compared=True,
    )

    quantisation_efficiency: float | None = _occupancy(
        "schedule efficiency",
        "",
        "quantisation efficiency: share of CTA slots × time that the schedule gives work, if "
        "all LeanTiles took equally long",
    )
    sm_busy_share: float | None = _occupancy(
        "SM busy",
        "",
        "share of SM time, from the first CTA's start to the last one's end, in which an SM "
        "had a CTA that was not waiting; one of several is enough, so it can exceed the "
        "schedule efficiency",
    )
    instrumentation_cost: float | None = _occupancy(
        "instrumentation",
        "x",
        "what the timeline events behind the SM busy share cost: instrumented latency over "
        "plain latency",
        kind="fixed3",
    )
    theoretical_warp_occupancy: float | None = _occupancy(
        "warps that fit",
        "",
        "theoretical occupancy: warps that registers and shared memory let an SM hold, over "
        "the most it can hold",
    )
    counted_warp_occupancy: float | None = _occupancy(
        "warps active",
        "",
        "counted by Nsight Compute: warps active over the most an SM can hold, while it was active",
    )
    counted_dram_bytes: int | None = _occupancy(
        "DRAM", "bytes", "counted by Nsight Compute: read and written by one launch", kind="bytes"
    )
    counted_dram_tb_s: float | None = _occupancy(
        "DRAM rate",
        "tb_s",
        "bytes that DRAM moved over the launch's time, both by Nsight Compute",
        kind="fixed",
    )
    registers_per_thread: int | None = _occupancy(
        "registers", "per thread", "of the launch that reads K and V", kind="count"
    )
    spilled_registers: int | None = _occupancy(
        "spilled", "registers", "of the launch that reads K and V", kind="count"
    )
    shared_kb_per_cta: float | None = _occupancy(
        "shared memory", "KB per CTA", "of the launch that reads K and V", kind="figure"
    )

    relative_error: float | None = _correctness(
        "relative error",
        "",
        "‖out − reference‖ over ‖reference‖, the worst of the checked pairs of sequence and "
        "KV head; numbers of the reference below the dtype's smallest normal one count as "
        "that",
    )
    lse_error: float | None = _correctness(
        "LSE error", "", "worst |difference| of the LSE over max(1, |reference|)", shown="data"
    )
    checked_heads: int | None = _correctness(
        "checked heads",
        "",
        "pairs of sequence and KV head that were compared with the fp64 reference",
        kind="count",
        shown="data",
    )
    total_heads: int | None = _correctness(
        "total heads",
        "",
        "pairs of sequence and KV head that there are",
        kind="count",
        shown="data",
    )

    sm_clock_mhz: int | None = _gpu("SM clock", "mhz", "median, read after each sample")
    crosscheck_clock_mhz: int | None = _gpu(
        "counted clock",
        "mhz",
        "cycles that an SM counted (clock64) over the GPU's own time (%globaltimer) of the "
        "cross-check's launches",
    )
    power_w: float | None = _gpu("power", "w", "median, read after each sample", kind="figure")
    temperature_c: int | None = _gpu("temperature", "c", "highest, read after each sample")
    throttled_samples: int | None = _gpu(
        "repeated", "samples", "thrown away because the GPU had lowered its clocks"
    )
    throttle_reasons: list[str] | None = _gpu(
        "throttled by", "", "why clocks were lowered in samples that count, by NVML", kind="text"
    )

    gpu_kernels: list[str] | None = _settings(
        "GPU kernels", "", "of one launch, as the nodes of its CUDA graph name them"
    )
    library: str | None = _settings(
        "library",
        "",
        "package and version whose code ran; none: this project's own kernels",
        statuses=EVERY_STATUS,
    )
    schedule: str | None = _settings(
        "schedule",
        "",
        "what its schedule comes to on this problem: stream-K (crosses from one output tile "
        "to the next), equal splits, splits by length, fixed runs, one CTA or cluster a "
        "tile, several tiles a CTA or cluster; empty where a kernel's inside is not known",
        shown="markdown",
    )
    config: dict[str, Any] | None = _settings("config", "", "launch settings", shown="markdown")
    config_choice: str | None = _settings(
        "config choice", "", "tuned, heuristic, best of so many candidates, or given"
    )
    config_reason: str | None = _settings(
        "why this config", "", "one sentence; of kernels that had a choice", kind="sentence"
    )
    warnings: list[str] | None = _settings(
        "warnings", "", "what a reader must know about the figures", kind="sentence"
    )
