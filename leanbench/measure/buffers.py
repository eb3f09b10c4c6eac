"""The inputs that launches rotate over."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from leanbench.core.errors import OutOfMemory
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.inputs import AttentionInputs, make_windows, windows_in_cache
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
    """Enough inputs that none is in the L2 when its turn comes again; one for a warm L2.

    A cache with more room than its sequences take holds several inputs, window by window, so that
    capacity costs no more memory than it must.
    """
    import torch

    if cache == "warm":
        return make_windows(problem, device, 1)
    windows = windows_in_cache(problem)
    wanted = cold_copies(problem, spec)
    # A pool of several windows ends a sequence's room behind one of a single cache at most.
    rows = problem.batch + (windows > 1)
    pool_bytes = problem.kv_allocated_bytes * rows / problem.batch
    free, _ = torch.cuda.mem_get_info(device)
    pools = max(1, min(math.ceil(wanted / windows), int(0.8 * free / pool_bytes)))
    inputs: list[AttentionInputs] = []
    for _ in range(pools):
        inputs += make_windows(problem, device, min(windows, wanted - len(inputs)))
    return inputs


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


def refuse_shortage(problem: AttentionProblem, device: torch.device, held_bytes: int = 0) -> None:
    """Looks whether the problem and its check fit into the GPU's free memory.

    Args:
        held_bytes: of the problem, which it has already.

    Raises:
        OutOfMemory: they do not.
    """
    import torch

    free_bytes, _ = torch.cuda.mem_get_info(device)
    reason = shortage(problem, free_bytes + held_bytes, "the GPU", "free")
    if reason:
        raise OutOfMemory(reason)
