"""Read floor: the fastest kernel that only reads the bytes of a problem's K and V."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from leanbench.core.inputs import AttentionInputs
from leanbench.measure.timing import Launches, Timing, fastest, time_launches

if TYPE_CHECKING:
    import torch

#: (32-bit words per CTA and step, warps, CTAs per SM; 0 for one CTA per block). The fastest depends
#: on the bytes.
Variant = tuple[int, int, int]
_VARIANTS: tuple[Variant, ...] = (
    (2048, 4, 0),
    (4096, 8, 0),
    (8192, 8, 0),
    (2048, 4, 8),
    (4096, 8, 4),
    (4096, 4, 4),
    (8192, 16, 2),
    (8192, 8, 2),
)


class ReadFloor:
    """Fastest variant by size. Sizes within a factor of 1.4 share a ranking."""

    def __init__(self) -> None:
        self._variants: dict[tuple[int, bool], Variant] = {}

    def launches(
        self, buffers: Sequence[AttentionInputs], kv_bytes: int, again: bool = False
    ) -> Launches:
        """Return launches that read `kv_bytes`, half from each K cache and half from each V cache,
        over the same rotation as attention.

        Args:
            again: Rank the variants for exactly this size.
        """
        # A single buffer stays in the L2 if it fits.
        key = (round(2 * math.log2(kv_bytes)), len(buffers) == 1)
        if again or key not in self._variants:
            self._variants[key] = self._rank(buffers, kv_bytes)
        return _launches(buffers, kv_bytes, self._variants[key])

    @staticmethod
    def _rank(buffers: Sequence[AttentionInputs], kv_bytes: int) -> Variant:
        best, _ = fastest(
            {
                variant: lambda variant=variant: _launches(buffers, kv_bytes, variant)
                for variant in _VARIANTS
            }
        )
        return best


def measure_read_floor(buffers: Sequence[AttentionInputs], kv_bytes: int) -> Timing:
    """Time the fastest read of `kv_bytes`."""
    return time_launches(ReadFloor().launches(buffers, kv_bytes))


def fingerprint(inputs: AttentionInputs) -> list[torch.Tensor]:
    """Return values that change with the inputs: Q, lengths, block table, and sums over K and V.

    A call that appends to K and V has no sums.
    """
    import torch

    sms = torch.cuda.get_device_properties(inputs.q.device).multi_processor_count
    sums = []
    caches = (inputs.k_cache,) if inputs.latent else (inputs.k_cache, inputs.v_cache)
    for cache in () if inputs.new_tokens else caches:
        words = _words(cache)
        half = words.numel() // 2
        of_cache, launch = _read((words[:half], words[half:]), 8192, 8, 2 * sms)
        launch()
        sums.append(of_cache)
    whole = (inputs.q, inputs.cache_seqlens, inputs.block_table)
    return [*sums, *(tensor.clone() for tensor in whole if tensor is not None)]


def _launches(buffers: Sequence[AttentionInputs], kv_bytes: int, variant: Variant) -> Launches:
    import torch

    block, warps, per_sm = variant
    sms = torch.cuda.get_device_properties(buffers[0].q.device).multi_processor_count
    return [
        _read(places, block, warps, per_sm * sms)[1]
        for places in read_places(buffers, kv_bytes // 4)
    ]


def read_places(
    buffers: Sequence[AttentionInputs], words: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the 32-bit words of K and of V that the launch of each buffer reads, in memory order.

    Launches read disjoint words, also if buffers are windows of one pool. A latent cache is read in
    two halves.

    Args:
        words: Words of K and V together.
    """
    in_pool: dict[int, int] = defaultdict(int)

    def following(cache: torch.Tensor, count: int) -> torch.Tensor:
        memory = _words(cache)
        pool = memory.untyped_storage().data_ptr()
        first = in_pool[pool]
        in_pool[pool] += count
        return memory.as_strided((count,), (1,), first)

    places = []
    for inputs in buffers:
        of_k = words * inputs.head_dim // (inputs.head_dim + inputs.value_dim)
        if inputs.latent:
            of_k = words // 2
        v_cache = inputs.k_cache if inputs.latent else inputs.v_cache
        places.append((following(inputs.k_cache, of_k), following(v_cache, words - of_k)))
    return places


def _read(
    places: tuple[torch.Tensor, torch.Tensor], block: int, warps: int, grid: int
) -> tuple[torch.Tensor, Callable[[], object]]:
    """(one sum per CTA, the launch that reads these 32-bit words)."""
    import torch

    from leanbench.measure.read_floor_kernel import read_kernel

    longer, shorter = sorted(places, key=len, reverse=True)
    fewer = len(shorter) if len(shorter) < len(longer) else None
    blocks = -(-len(longer) // block)
    one_block = grid == 0
    grid = blocks if one_block else min(grid, blocks)
    sums = torch.empty(grid, dtype=torch.int32, device=places[0].device)
    arguments = (longer, shorter, sums, len(longer), fewer)
    options = {"BLOCK": block, "ONE_BLOCK": one_block, "num_warps": warps}
    return sums, lambda: read_kernel[(grid,)](*arguments, **options)


def _words(cache: torch.Tensor) -> torch.Tensor:
    """Return the memory of a cache as 32-bit words."""
    import torch

    stored = cache if cache.is_contiguous() else cache.transpose(1, 2)
    return stored.view(-1).view(torch.int32)
