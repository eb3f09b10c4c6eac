"""Inputs that launches rotate over."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from leanbench.core.errors import OutOfMemory
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.inputs import AttentionInputs, make_windows, windows_in_cache
from leanbench.core.memory import shortage
from leanbench.core.problem import AttentionProblem
from leanbench.core.row_scales import negate_rows
from leanbench.measure.options import CacheState

if TYPE_CHECKING:
    import torch

#: Minimum bytes that other launches read before a cold one, and the same as a multiple of the L2.
COLD_BYTES = 400_000_000
COLD_L2_MULTIPLE = 6
_ANY_NUMBER = 1 << 30
#: Minimum rate at which the driver clears freed memory, as a share of the bandwidth; 9% on an H200.
_CLEARING_SHARE = 0.07


def cold_bytes(spec: GpuSpec) -> int:
    """Return the bytes of K and V to rotate over for a cold L2."""
    return max(COLD_BYTES, COLD_L2_MULTIPLE * spec.l2_bytes)


def cold_copies(problem: AttentionProblem, spec: GpuSpec) -> int:
    """Return the copies of a problem's inputs for a cold L2, without regard to memory."""
    return math.ceil(cold_bytes(spec) / problem.kv_bytes)


def rotating_inputs(
    problem: AttentionProblem,
    device: torch.device,
    spec: GpuSpec,
    cache: CacheState,
    most_copies: int = _ANY_NUMBER,
) -> list[AttentionInputs]:
    """Allocate enough inputs for a cold L2 in every launch, or one for a warm L2.

    A cache with more capacity than its sequences need holds several inputs, window by window, to
    save memory.

    Args:
        most_copies: Limit of the copies. The L2 then keeps a part of small caches.
    """
    import torch

    if cache == "warm":
        return make_windows(problem, device, 1)
    windows = windows_in_cache(problem)
    wanted = min(cold_copies(problem, spec), most_copies)
    # A pool of several windows is at most one sequence larger than a single cache.
    rows = problem.batch + (windows > 1)
    pool_bytes = problem.kv_allocated_bytes * rows / problem.batch
    free, _ = torch.cuda.mem_get_info(device)
    pools = max(1, min(math.ceil(wanted / windows), int(0.8 * free / pool_bytes)))
    inputs: list[AttentionInputs] = []
    for _ in range(pools):
        inputs += make_windows(problem, device, min(windows, wanted - len(inputs)))
    return inputs


def flip_signs(buffers: Sequence[AttentionInputs]) -> None:
    """Negate all K and V in the memory of these buffers, whatever their dtype and layout.

    Windows of one pool are negated once. Values keep their distribution, so that energy and clocks
    do too.
    """
    import torch

    seen: set[int] = set()
    for inputs in buffers:
        for cache in (inputs.k_cache, inputs.v_cache):
            storage = cache.untyped_storage()
            if storage.data_ptr() in seen:
                continue
            seen.add(storage.data_ptr())
            if inputs.row_scales:
                negate_rows(cache.new_empty(0).set_(storage), inputs.value_dim, cache.shape[-1])
                continue
            numbers = storage.nbytes() // cache.element_size()
            bits, sign = (
                (torch.int8, -(1 << 7)) if cache.element_size() == 1 else (torch.int16, -(1 << 15))
            )
            cache.view(bits).as_strided((numbers,), (1,), 0).bitwise_xor_(sign)


def change_tokens(
    inputs: AttentionInputs, pairs: Sequence[tuple[int, int]], least_error: float
) -> None:
    """Negate K and V of random tokens of these (sequence, KV head) pairs, until the output of each
    has moved by a relative error of more than `least_error`.

    The first draw is of one token, each later one of twice as many: a kernel that looks for changes
    finds few. Values keep their distribution, so that energy and clocks do too.
    """
    import torch

    from leanbench.kernels.reference.torch import attend, in_cache

    device = inputs.q.device
    # No kernel can seed it or foresee its numbers.
    generator = torch.Generator(device)
    generator.seed()
    # Views: the row or page, the position in it and the head of each row of numbers in a cache.
    sizes = (torch.arange(size, device=device) for size in inputs.k_cache.shape[:3])
    grids = torch.meshgrid(*sizes, indexing="ij")
    for pair in pairs:
        places = torch.stack([in_cache(inputs, grid, *pair) for grid in grids])
        before, _ = attend(inputs, *pair)
        tokens, count, error = places.shape[1], 1, 0.0
        while count <= tokens and error <= least_error:
            drawn = torch.randint(tokens, (count,), generator=generator, device=device)
            _negate(inputs, places[:, drawn])
            after, _ = attend(inputs, *pair)
            error = float((after - before).norm() / after.norm())
            count *= 2


def _negate(inputs: AttentionInputs, places: torch.Tensor) -> None:
    """Negate the numbers of K and V at these indices of the caches, (3, rows)."""
    import torch

    for cache in (inputs.k_cache,) if inputs.latent else (inputs.k_cache, inputs.v_cache):
        bits, sign = (
            (torch.int8, -(1 << 7)) if cache.element_size() == 1 else (torch.int16, -(1 << 15))
        )
        memory, index = cache.view(bits), tuple(places)
        rows = memory[index]
        if inputs.row_scales:
            negate_rows(rows, inputs.value_dim, rows.shape[-1])
        else:
            rows.bitwise_xor_(sign)
        memory[index] = rows


def free_memory(spec: GpuSpec) -> None:
    """Return unused memory to the driver, and wait until the driver has cleared it.

    Clearing runs in the background and takes bandwidth: on an H200, 137 GB take 0.32 s, in which
    reads are 13% slower.
    """
    import torch

    before = torch.cuda.memory_reserved()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    freed = before - torch.cuda.memory_reserved()
    time.sleep(freed / (_CLEARING_SHARE * spec.bandwidth_tb_s * 1e12))


def refuse_shortage(problem: AttentionProblem, device: torch.device, held_bytes: int = 0) -> None:
    """Check that the problem and its check fit into the GPU's free memory.

    Args:
        held_bytes: Bytes of the problem that are allocated already.

    Raises:
        OutOfMemory: They do not fit.
    """
    import torch

    free_bytes, _ = torch.cuda.mem_get_info(device)
    reason = shortage(problem, free_bytes + held_bytes, "the GPU", "free")
    if reason:
        raise OutOfMemory(reason)
