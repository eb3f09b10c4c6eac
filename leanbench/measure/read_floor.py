"""The read floor: the fastest kernel that only reads as many bytes as the problem's K and V."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from leanbench.inputs import AttentionInputs
from leanbench.measure.timing import Timing, fastest, time_launches

if TYPE_CHECKING:
    import torch

#: (32-bit words per CTA and step, warps, CTAs per SM; 0 for one CTA per block). Which wins depends on the bytes.
_CANDIDATES = (
    (2048, 4, 0),
    (4096, 8, 0),
    (8192, 8, 0),
    (2048, 4, 8),
    (4096, 8, 4),
    (4096, 4, 4),
    (8192, 16, 2),
    (8192, 8, 2),
)


def measure_read_floor(buffers: Sequence[AttentionInputs], kv_bytes: int) -> Timing:
    """Reads `kv_bytes`, half from each K cache and half from each V cache, rotating as the attention launches do."""
    import torch

    sms = torch.cuda.get_device_properties(buffers[0].q.device).multi_processor_count
    words = kv_bytes // 8
    prepared: dict[object, Sequence[Callable[[], object]]] = {}

    def prepare(block: int, warps: int, per_sm: int) -> Sequence[Callable[[], object]]:
        launches = [_launch(inputs, words, block, warps, per_sm * sms) for inputs in buffers]
        prepared[block, warps, per_sm] = launches
        return launches

    best, _ = fastest({key: lambda key=key: prepare(*key) for key in _CANDIDATES})
    return time_launches(prepared[best])


def _launch(inputs: AttentionInputs, words: int, block: int, warps: int, grid: int) -> Callable[[], object]:
    import torch

    from leanbench.measure.read_floor_kernel import read_kernel

    blocks = -(-words // block)
    one_block = grid == 0
    grid = blocks if one_block else min(grid, blocks)
    sums = torch.empty(grid, dtype=torch.int32, device=inputs.q.device)
    arguments = (_words(inputs.k_cache), _words(inputs.v_cache), sums, words)
    options = {"BLOCK": block, "ONE_BLOCK": one_block, "num_warps": warps}
    return lambda: read_kernel[(grid,)](*arguments, **options)


def _words(cache: torch.Tensor) -> torch.Tensor:
    """The cache's memory as 32-bit words, in the order it is stored."""
    import torch

    stored = cache if cache.is_contiguous() else cache.transpose(1, 2)
    return stored.view(-1).view(torch.int32)
