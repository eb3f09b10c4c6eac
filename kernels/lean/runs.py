"""Which LeanTiles a CTA's run holds: leanbench.core.decomposition.stream_k's arithmetic, inside the
kernel.
"""

import triton
import triton.language as tl


@triton.jit
def start_of(run, share, longer):
    """First LeanTile of a run: leanbench.core.decomposition.stream_k_start."""
    return run * share + tl.minimum(run, longer)


@triton.jit
def run_of(lean_tile, share, longer):
    """The run that holds a LeanTile: leanbench.core.decomposition.stream_k_run."""
    border = longer * (share + 1)
    return tl.where(
        lean_tile < border, lean_tile // (share + 1), longer + (lean_tile - border) // share
    )


@triton.jit
def _tiles_of(cache_seqlens, sequences, batch, TILE_TOKENS: tl.constexpr):
    """LeanTiles per output tile for a block of sequences, 0 past the batch."""
    tokens = tl.load(cache_seqlens + sequences, mask=sequences < batch, other=0)
    tiles = tl.maximum(1, (tokens + TILE_TOKENS - 1) // TILE_TOKENS)
    return tl.where(sequences < batch, tiles, 0)


@triton.jit
def total_tiles(cache_seqlens, batch, TILE_TOKENS: tl.constexpr, SEQUENCES_AT_ONCE: tl.constexpr):
    total = 0
    for first in range(0, batch, SEQUENCES_AT_ONCE):
        sequences = first + tl.arange(0, SEQUENCES_AT_ONCE)
        total += tl.sum(_tiles_of(cache_seqlens, sequences, batch, TILE_TOKENS))
    return total


@triton.jit
def find_sequence(
    cache_seqlens,
    batch,
    per_sequence,
    lean_tile,
    TILE_TOKENS: tl.constexpr,
    SEQUENCES_AT_ONCE: tl.constexpr,
):
    """(sequence that holds a LeanTile, its first LeanTile)."""
    sequence = 0
    sequence_start = 0
    seen = 0
    for first in range(0, batch, SEQUENCES_AT_ONCE):
        sequences = first + tl.arange(0, SEQUENCES_AT_ONCE)
        tiles = _tiles_of(cache_seqlens, sequences, batch, TILE_TOKENS) * per_sequence
        ends = seen + tl.cumsum(tiles)
        before = (ends <= lean_tile) & (sequences < batch)
        sequence += tl.sum(before.to(tl.int32))
        sequence_start = tl.maximum(sequence_start, tl.max(tl.where(before, ends, 0)))
        seen += tl.sum(tiles)
    return sequence, sequence_start
