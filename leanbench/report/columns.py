"""The columns of the page's table: headings, units, and what each means in one line."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Column:
    """A column of the frame as the page shows it."""

    name: str
    heading: str
    unit: str = ""
    #: How the page writes it (`formats` in report_table.js).
    kind: str = "text"
    #: One line for who hovers over the heading; empty where the heading says it.
    meaning: str = ""


#: In the table's order. A column without any value is not shown.
SHOWN = (
    Column("command", "repeat", "", "command", "copies the command that measures this row again"),
    Column(
        "max_context",
        "context",
        "tokens",
        "tokens",
        "cached tokens; of the longest sequence in a ragged batch",
    ),
    Column("batch", "batch", "", "int"),
    Column("q_heads", "query heads", "", "int"),
    Column("kv_heads", "KV heads", "", "int"),
    Column("head_dim", "head_dim", "", "int"),
    Column("q_len", "q_len", "", "int", "new tokens per sequence"),
    Column("ragged", "batch lengths"),
    Column("dtype", "dtype"),
    Column(
        "kv_layout",
        "layout",
        meaning="of K and V: HND is heads, tokens, head_dim; NHD is tokens, heads, head_dim",
    ),
    Column(
        "page_size",
        "page size",
        meaning="tokens of a page of K and V; none: a sequence's tokens lie in a row",
    ),
    Column("run", "run"),
    Column("gpu", "GPU"),
    Column("source", "source", meaning="measured on a GPU, or predicted by the performance model"),
    Column(
        "cache",
        "L2",
        meaning=(
            "when a launch starts: cold (buffers rotate, as K and V come in serving) or warm (one"
            " buffer again and again)"
        ),
    ),
    Column("kernel", "kernel"),
    Column("status", "status"),
    Column(
        "latency_us",
        "latency",
        "µs",
        "figures",
        "one launch; when measured, in bursts of milliseconds, median of the samples",
    ),
    Column("bandwidth_tb_s", "bandwidth", "TB/s", "fixed", "bytes of K and V over latency"),
    Column(
        "read_floor_us",
        "read floor",
        "µs",
        "figures",
        "the fastest kernel that only reads the same bytes, same timing method",
    ),
    Column(
        "read_floor_share",
        "of the floor",
        "%",
        "percent",
        "read floor over latency: 100% is the physical limit",
    ),
    Column("lean_speedup", "speedup of lean", "×", "fixed", "this row's latency over that of lean"),
    Column(
        "energy_mj",
        "energy",
        "mJ",
        "figures",
        "of one launch over the sustained window: where measured, by NVML's counter",
    ),
    Column(
        "energy_above_idle_mj",
        "above idle",
        "mJ",
        "figures",
        "energy of one launch above the idle power",
    ),
    Column(
        "energy_by_power_mj",
        "by power",
        "mJ",
        "figures",
        "energy by the second reading, the instantaneous power integrated over the same window",
    ),
    Column(
        "energy_floor_mj",
        "energy floor",
        "mJ",
        "figures",
        "energy of a kernel that only reads the same bytes",
    ),
    Column("energy_over_floor", "over the floor", "×", "fixed", "energy over the energy floor"),
    Column(
        "lean_energy_ratio", "energy over lean", "×", "fixed", "this row's energy over that of lean"
    ),
    Column(
        "energy_delay_mj_us", "energy × delay", "mJ µs", "figures", "energy times sustained latency"
    ),
    Column(
        "sustained_us",
        "sustained",
        "µs",
        "figures",
        "one launch, back to back for seconds after a second of the same: under power and heat",
    ),
    Column(
        "sustained_slowdown",
        "sustained over burst",
        "%",
        "signed",
        "sustained over burst latency, less 1",
    ),
    Column(
        "sustained_clock_mhz", "sustained clock", "MHz", "int", "SM clock over the sustained window"
    ),
    Column("sustained_power_w", "mean power", "W", "figures", "over the sustained window"),
    Column("idle_power_w", "idle power", "W", "figures", "of the idle GPU before the sweep"),
    Column("latency_p25_us", "p25", "µs", "figures", "a quarter of the samples are below"),
    Column("latency_p75_us", "p75", "µs", "figures", "a quarter of the samples are above"),
    Column(
        "crosscheck_us",
        "cross-check",
        "µs",
        "figures",
        "the same launches in a graph under torch's profiler: from one launch's first kernel to the"
        " next one's, by CUPTI's time stamps",
    ),
    Column(
        "crosscheck_difference",
        "cross-check off by",
        "%",
        "signed",
        "cross-check over latency, less 1",
    ),
    Column(
        "plan_us",
        "plan",
        "µs",
        "figures",
        "what must run once for a step's lengths before its launches, wall time waited for; not"
        " part of the latency",
    ),
    Column("kv_bytes", "K and V", "MB", "mega", "bytes of K and V that must be read"),
    Column(
        "quantisation_efficiency",
        "schedule efficiency",
        "%",
        "percent",
        "quantisation efficiency: share of CTA slots × time that the schedule gives work, if all"
        " LeanTiles took equally long",
    ),
    Column(
        "sm_busy_share",
        "SM busy",
        "%",
        "percent",
        "share of SM time, from the first CTA's start to the last one's end, in which an SM had a"
        " CTA that was not waiting; one of several is enough, so it can exceed the schedule"
        " efficiency",
    ),
    Column(
        "instrumentation_cost",
        "stamps cost",
        "×",
        "fixed3",
        "what the stamps behind the SM busy share cost: instrumented latency over plain latency",
    ),
    Column(
        "theoretical_warp_occupancy",
        "warps that fit",
        "%",
        "percent",
        "theoretical occupancy: warps that registers and shared memory let an SM hold, over the"
        " most it can hold",
    ),
    Column(
        "counted_warp_occupancy",
        "warps active",
        "%",
        "percent",
        "counted by Nsight Compute: warps active over the most an SM can hold, while it was active",
    ),
    Column(
        "counted_dram_bytes",
        "DRAM",
        "MB",
        "mega",
        "counted by Nsight Compute: read and written by one launch",
    ),
    Column(
        "counted_dram_tb_s",
        "DRAM rate",
        "TB/s",
        "fixed",
        "those bytes over the launch's time in that pass",
    ),
    Column(
        "registers_per_thread", "registers", "per thread", "int", "of the launch that reads K and V"
    ),
    Column("spilled_registers", "spilled", "registers", "int", "of the launch that reads K and V"),
    Column(
        "shared_kb_per_cta",
        "shared memory",
        "KB per CTA",
        "figures",
        "of the launch that reads K and V",
    ),
    Column(
        "relative_error",
        "relative error",
        "",
        "exponent",
        "‖out − reference‖ over ‖reference‖, the worst head",
    ),
    Column("sm_clock_mhz", "SM clock", "MHz", "int", "median, read after each sample"),
    Column("power_w", "power", "W", "figures", "median, read after each sample"),
    Column("temperature_c", "temperature", "°C", "int", "highest, read after each sample"),
    Column(
        "throttled_samples",
        "repeated",
        "samples",
        "int",
        "thrown away because the GPU had lowered its clocks",
    ),
    Column(
        "throttle_reasons",
        "throttled by",
        meaning="why clocks were lowered in samples that were kept, by NVML",
    ),
    Column(
        "gpu_kernels", "GPU kernels", meaning="of one launch in order, as the profiler names them"
    ),
    Column("config", "config", meaning="launch settings"),
    Column(
        "config_choice",
        "config choice",
        meaning="kept, heuristic, best of so many candidates, or given",
    ),
    Column("config_reason", "why this config", "", "sentence"),
    Column("warnings", "warnings", "", "sentence", "what a reader must know beside the figures"),
)
#: Stated in the page's header when the same in every row.
HIDDEN_WHEN_CONSTANT = {
    *(
        "batch",
        "q_heads",
        "kv_heads",
        "head_dim",
        "q_len",
        "ragged",
        "dtype",
        "kv_layout",
        "page_size",
    ),
    *("run", "gpu", "source", "cache"),
}
#: What fits a sheet of paper; the others are in the CSV.
ON_PAPER = {
    *("max_context", *HIDDEN_WHEN_CONSTANT),
    *(
        "kernel",
        "status",
        "latency_us",
        "bandwidth_tb_s",
        "read_floor_share",
        "lean_speedup",
        "energy_mj",
    ),
}
#: For the charts only.
DATA = ("problem", "group_size", "latency_ci_low_us", "latency_ci_high_us", "read_floor_tb_s")
#: In the CSV, and of no use here.
LEFT_OUT = {
    *("cell", "decomposition", "reason", "context", "mean_context", "is_ragged", "samples"),
    *("launches_per_sample", "lse_error", "checked_heads", "total_heads", "sustained_s"),
    *("wall_s", "time", "environment"),
}
