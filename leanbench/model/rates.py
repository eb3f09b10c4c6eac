"""How fast a GPU's memory, one SM and one CTA can read, from its datasheet figures.

Rates are bytes per microsecond. The constants were fitted to 39 medians of this project's kernels on an NVIDIA H200,
fp16, each kernel with its best config: 56 heads of head_dim 64 at batch 1 from 1k to 512k, and three problems of 32
query on 8 KV heads of head_dim 128. Over these same figures (tests/model/test_measured.py) the error is 1.3% in the
median and 10.5% at most, at the shortest context; lean 2.0% and 5.9%, fa2 0.4% and 10.5%, fixed_split 1.8% and 7.3%.
Nothing else has been compared: larger groups, other head_dims and ragged batches are extrapolated. On another GPU the
constants are scaled by its bandwidth and clock, and nothing has checked them there yet.

Not modelled: tensor-core throughput (decode with at most 64 query rows a tile stays below it), register spills, bank
conflicts, the L2 as a cache (K and V are read once; row tiles that share a KV head count their reads apart), ECC, and
clocks lowered by power or heat.
"""

from __future__ import annotations

from leanbench.gpu.spec import GpuSpec
from leanbench.problem import ELEMENT_BYTES, AttentionProblem
from leanbench.registry import KernelConfig

#: One node of a CUDA graph: an empty kernel takes as long on the H200.
LAUNCH_US = 0.6
#: From a kernel's start to full bandwidth, and from the last byte to its end: launching CTAs, address translation, the
#: first DRAM access. With LAUNCH_US it is what remains of the read floor at zero bytes.
RAMP_US = 1.6
#: Share of the datasheet's bandwidth that a kernel which only reads gets on large buffers. Measured: H200 (2.1 GB in
#: 468 us). For the others an assumption, in the middle of the 0.90 to 0.95 usual for HBM and GDDR6.
ACHIEVABLE_SHARE = {"h200": 0.965}
DEFAULT_ACHIEVABLE_SHARE = 0.92

#: A DRAM read under load, from issue to arrival in shared memory.
DRAM_LATENCY_US = 0.65
#: One CTA's arithmetic for a LeanTile: a part for each tile (barriers, reductions across warps), one for each token
#: (softmax), one for each byte (shared memory to tensor cores). Warps share the last two. From fa2, whose CTAs have an
#: SM each: 46 GB/s at head_dim 64, 52 GB/s at 128.
TILE_US = 0.23
TOKEN_WARP_US = 0.0022
WARP_BYTES_PER_US = 15_600.0
#: An SM has four partitions, each with its own scheduler and tensor core: with a warp on each, more do not help.
MAX_USEFUL_WARPS = 4
#: The clock at which these figures hold.
REFERENCE_CLOCK_MHZ = 1980
#: An SM's port to the L2 is 64 bytes wide. The most that a kernel with one CTA to an SM was seen to use: 68 GB/s,
#: FlashAttention-3.
SM_BYTES_PER_CLOCK = 35

#: Query tile, barriers and layout conversions beside the K and V stages, with the 1 KB that CUDA takes.
SHARED_RESERVE_KB = 12
#: What Triton's decode loop takes up to head_dim 128; the whole 255 above.
REGISTERS_PER_THREAD = 128
MAX_CTAS_PER_SM = 16


def achievable_bytes_per_us(spec: GpuSpec) -> float:
    """DRAM bandwidth that a kernel gets, all SMs together."""
    share = ACHIEVABLE_SHARE.get(spec.name, DEFAULT_ACHIEVABLE_SHARE)
    return share * spec.bandwidth_tb_s * 1e6


def read_floor_us(kv_bytes: int, spec: GpuSpec) -> float:
    """The fastest kernel that only reads `kv_bytes`."""
    return LAUNCH_US + RAMP_US + kv_bytes / achievable_bytes_per_us(spec)


def sm_bytes_per_us(spec: GpuSpec) -> float:
    """The most that one SM can read, whatever runs on it."""
    return SM_BYTES_PER_CLOCK * spec.boost_clock_mhz


def tile_bytes(problem: AttentionProblem, config: KernelConfig) -> int:
    """K and V of one full LeanTile."""
    return 2 * config.tile_tokens * problem.head_dim * ELEMENT_BYTES


def tile_compute_us(problem: AttentionProblem, config: KernelConfig, spec: GpuSpec) -> float:
    """One CTA's arithmetic for one LeanTile that is in shared memory already."""
    warps = min(config.num_warps, MAX_USEFUL_WARPS)
    token_us = config.tile_tokens * TOKEN_WARP_US / warps
    byte_us = tile_bytes(problem, config) / (warps * WARP_BYTES_PER_US)
    return (TILE_US + token_us + byte_us) * REFERENCE_CLOCK_MHZ / spec.boost_clock_mhz


def cta_bytes_per_us(problem: AttentionProblem, config: KernelConfig, spec: GpuSpec) -> float:
    """The most that one CTA can read when it is alone.

    With one stage it loads, then computes. With more, the next `num_stages - 1` LeanTiles are on their way meanwhile
    (Little's law: bytes in flight over latency).
    """
    compute_us = tile_compute_us(problem, config, spec)
    if config.num_stages == 1:
        period_us = DRAM_LATENCY_US + compute_us
    else:
        period_us = max(compute_us, DRAM_LATENCY_US / (config.num_stages - 1))
    return tile_bytes(problem, config) / period_us


def resident_ctas(problem: AttentionProblem, config: KernelConfig, spec: GpuSpec) -> int:
    """CTAs that one SM holds at once, by shared memory and registers; 0 if not even one fits."""
    # Triton pads head_dim to a power of two, and keeps `num_stages - 1` LeanTiles in shared memory.
    padded = 1 << (problem.head_dim - 1).bit_length()
    stages = max(1, config.num_stages - 1)
    shared_kb = SHARED_RESERVE_KB + stages * 2 * config.tile_tokens * padded * ELEMENT_BYTES / 1024
    if shared_kb > spec.shared_kb_per_cta:
        return 0
    registers = REGISTERS_PER_THREAD if problem.head_dim <= 128 else 255
    by_registers = spec.registers_per_sm // (registers * 32 * config.num_warps)
    return max(1, min(int(spec.shared_kb_per_sm / shared_kb), by_registers, MAX_CTAS_PER_SM))
