"""The inputs that launches rotate over."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from leanbench.core.errors import OutOfMemory
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.inputs import AttentionInputs, make_inputs
from leanbench.core.memory import shortage
from leanbench.core.problem import AttentionProblem
from leanbench.measure.options import CacheState

if TYPE_CHECKING:
    import torch

#: A cold launch comes after at least this many bytes of others, and after this many times the L2.
COLD_BYTES = 400_000_000
COLD_L2_MULTIPLE = 6
#: The driver clears freed memory at this share of the memory's bandwidth at least; 9% on an H200.
_CLEARING_SHARE = 0.07


def cold_bytes(spec: GpuSpec) -> int:
    """Bytes of K and V that launches rotate over for a cold L2."""
    return max(COLD_BYTES, COLD_L2_MULTIPLE * spec.l2_bytes)


def cold_copies(problem: AttentionProblem, spec: GpuSpec) -> int:
    """Copies of a problem's inputs for a cold L2, memory permitting; at least 1."""
    return math.ceil(cold_bytes(spec) / problem.kv_bytes)


def rotating_inputs(
    problem: AttentionProblem, device: torch.device, spec: GpuSpec, cache: CacheState
) -> list[AttentionInputs]:
    """Enough inputs that none is in the L2 when its turn comes again; one for a warm L2."""
    import torch

    copies = 1
    if cache == "cold":
        free, _ = torch.cuda.mem_get_info(device)
        room = int(0.8 * free / problem.kv_allocated_bytes)
        copies = max(1, min(cold_copies(problem, spec), room))
    return [make_inputs(problem, device, seed=None) for _ in range(copies)]


def free_memory(spec: GpuSpec) -> None:
    """Hands unused memory back to the driver, and waits until the driver has cleared it.

    It does so in the background, and takes bandwidth from whatever runs: on an H200, 137 GB take
    0.32 s, in which reads are 13% slower.
    """
    import torch

    before = torch.cuda.memory_reserved()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    freed = before - torch.cuda.memory_reserved()
    time.sleep(freed / (_CLEARING_SHARE * spec.bandwidth_tb_s * 1e12))


def refuse_shortage(problem: AttentionProblem, device: torch.device) -> None:
    """Looks whether the problem and its check fit into the GPU's free memory.

    Raises:
        OutOfMemory: they do not.
    """
    import torch

    free_bytes, _ = torch.cuda.mem_get_info(device)
    reason = shortage(problem, free_bytes, "the GPU", "free")
    if reason:
        raise OutOfMemory(reason)
