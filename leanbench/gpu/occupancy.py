"""Theoretical warp occupancy of a compiled kernel.

It limits the loads in flight, not how busy an SM is. The rules of allocation are those of NVIDIA's
occupancy calculator; the limits are from the CUDA C++ Programming Guide, table "Technical
Specifications per Compute Capability".
"""

from __future__ import annotations

from dataclasses import dataclass

from leanbench.core.errors import UserError
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.kernel import LaunchResources

#: Maximum warps and CTAs of an SM, by compute capability.
_MOST_PER_SM = {
    (8, 0): (64, 32),
    (8, 6): (48, 16),
    (8, 9): (48, 24),
    (9, 0): (64, 32),
    (10, 0): (64, 32),
    (12, 0): (48, 24),
}
_WARP_THREADS = 32
#: Registers are allocated to a warp in units of this size, from its quarter of the SM.
_REGISTERS_AT_ONCE = 256
_SM_PARTITIONS = 4
#: Shared memory is allocated to a CTA in units of this size; the system takes 1 KB of each CTA.
_SHARED_BYTES_AT_ONCE = 128
_SYSTEM_SHARED_BYTES = 1024


@dataclass(frozen=True)
class Occupancy:
    """CTAs of one kernel that fit an SM at once, whatever its grid."""

    ctas_per_sm: int
    warps_per_sm: int
    #: warps_per_sm over the most that the SM holds: 0 to 1.
    share: float


def theoretical_occupancy(resources: LaunchResources, spec: GpuSpec) -> Occupancy:
    """Return the share of an SM of `spec` that the kernel's CTAs can fill.

    Raises:
        UserError: The limits of this compute capability are unknown.
    """
    most_warps, most_ctas = _most_per_sm(spec)
    registers = max(1, resources.registers_per_thread) * _WARP_THREADS
    warp_registers = _rounded_up(registers, _REGISTERS_AT_ONCE)
    warps_by_registers = spec.registers_per_sm // _SM_PARTITIONS // warp_registers * _SM_PARTITIONS
    shared = resources.shared_bytes + _SYSTEM_SHARED_BYTES
    ctas = min(
        most_warps // resources.num_warps,
        most_ctas,
        warps_by_registers // resources.num_warps,
        spec.shared_kb_per_sm * 1024 // _rounded_up(shared, _SHARED_BYTES_AT_ONCE),
    )
    warps = ctas * resources.num_warps
    return Occupancy(ctas, warps, warps / most_warps)


def _rounded_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def _most_per_sm(spec: GpuSpec) -> tuple[int, int]:
    """Return the limits of the compute capability, or of the nearest lower one of its
    generation.
    """
    major, _ = spec.compute_capability
    known = [key for key in _MOST_PER_SM if key[0] == major and key <= spec.compute_capability]
    if not known:
        name = ".".join(map(str, spec.compute_capability))
        raise UserError(
            f"how many warps an SM of compute capability {name} ({spec.product}) holds is not known"
            " here: add it to leanbench/gpu/occupancy.py"
        )
    return _MOST_PER_SM[max(known)]
