"""LeanTiles of a CTA's work range: leanbench.core.decomposition.stream_k inside the kernel."""

import triton
import triton.language as tl


@triton.jit
def range_start(work_range, share, longer):
    """Return the first LeanTile of a work range: leanbench.core.decomposition.stream_k_start."""
    return work_range * share + tl.minimum(work_range, longer)


@triton.jit
def range_of(lean_tile, share, longer):
    """Return the work range of a LeanTile: the inverse of `range_start`."""
    boundary = longer * (share + 1)
    return tl.where(
        lean_tile < boundary, lean_tile // (share + 1), longer + (lean_tile - boundary) // share
    )


@triton.jit
def _tiles_of(cache_seqlens, sequences, batch, context, TILE_TOKENS: tl.constexpr):
    """Return LeanTiles per output tile for a block of sequences, 0 past the batch.

    Lengths are as in `sequence_tiles`.
    """
    tokens = tl.load(cache_seqlens + sequences, mask=sequences < batch, other=0)
    tokens = tl.minimum(tl.maximum(tokens, 0), context)
    tiles = tl.maximum(1, (tokens + TILE_TOKENS - 1) // TILE_TOKENS)
    return tl.where(sequences < batch, tiles, 0)


@triton.jit
def total_tiles(
    cache_seqlens, batch, context, TILE_TOKENS: tl.constexpr, SEQUENCES_AT_ONCE: tl.constexpr
):
    total = 0
    for first in range(0, batch, SEQUENCES_AT_ONCE):
        sequences = first + tl.arange(0, SEQUENCES_AT_ONCE)
        total += tl.sum(_tiles_of(cache_seqlens, sequences, batch, context, TILE_TOKENS))
    return total


@triton.jit
def find_sequence(
    cache_seqlens,
    batch,
    context,
    per_sequence,
    lean_tile,
    TILE_TOKENS: tl.constexpr,
    SEQUENCES_AT_ONCE: tl.constexpr,
):
    """Return the sequence of a LeanTile, and that sequence's first LeanTile."""
    sequence = 0
    sequence_start = 0
    seen = 0
    for first in range(0, batch, SEQUENCES_AT_ONCE):
        sequences = first + tl.arange(0, SEQUENCES_AT_ONCE)
        tiles = _tiles_of(cache_seqlens, sequences, batch, context, TILE_TOKENS) * per_sequence
        ends = seen + tl.cumsum(tiles)
        before = (ends <= lean_tile) & (sequences < batch)
        sequence += tl.sum(before.to(tl.int32))
        sequence_start = tl.maximum(sequence_start, tl.max(tl.where(before, ends, 0)))
        seen += tl.sum(tiles)
    return sequence, sequence_start
