"""Triton kernels that merge the partial results of GPUs."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def merge_parts(
    addresses,  # int64, one per rank: a part of `rows` x HEAD_DIM numbers, then `rows` LSEs
    out,
    lse,
    lse_at,  # offset of the LSEs in a part, in bytes
    together,  # consecutive rows of a part that are consecutive in the output
    stride,  # rows of the output between two such runs
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    RANKS: tl.constexpr,
):
    """Merge row `program_id(0)` of all parts in the order of ranks."""
    row = tl.program_id(0)
    columns = tl.arange(0, HEAD_DIM_PADDED)
    valid = columns < HEAD_DIM
    most = float("-inf")
    for rank in tl.static_range(RANKS):
        part = tl.load(addresses + rank)
        most = tl.maximum(most, tl.load((part + lse_at).to(tl.pointer_type(tl.float32)) + row))
    reference = tl.where(most == float("-inf"), 0.0, most)
    numerator = tl.zeros((HEAD_DIM_PADDED,), tl.float32)
    denominator = 0.0
    for rank in tl.static_range(RANKS):
        part = tl.load(addresses + rank)
        weight = tl.exp(tl.load((part + lse_at).to(tl.pointer_type(tl.float32)) + row) - reference)
        numbers = part.to(tl.pointer_type(out.dtype.element_ty)) + row * HEAD_DIM + columns
        numerator += weight * tl.load(numbers, mask=valid, other=0.0).to(tl.float32)
        denominator += weight
    scale = tl.where(denominator > 0, 1.0 / denominator, 0.0)
    to = row // together * stride + row % together
    tl.store(out + to * HEAD_DIM + columns, (numerator * scale).to(out.dtype.element_ty), valid)
    tl.store(lse + to, reference + tl.log(denominator))


@triton.jit
def deal_heads(
    part_out,
    part_lse,
    shares,  # a part for each rank: its heads of all sequences, then their LSEs
    share_bytes,
    lse_at,
    heads,
    heads_each,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
):
    """Copy row `program_id(0)` of a shard's output to the share of the rank that merges it."""
    row = tl.program_id(0)
    sequence, head = row // heads, row % heads
    columns = tl.arange(0, HEAD_DIM_PADDED)
    valid = columns < HEAD_DIM
    share = shares + (head // heads_each).to(tl.int64) * share_bytes
    to = sequence * heads_each + head % heads_each
    numbers = tl.load(part_out + row * HEAD_DIM + columns, mask=valid)
    at = share.to(tl.pointer_type(part_out.dtype.element_ty)) + to * HEAD_DIM + columns
    tl.store(at, numbers, valid)
    tl.store((share + lse_at).to(tl.pointer_type(tl.float32)) + to, tl.load(part_lse + row))


@triton.jit
def deal_entries(
    part_out,
    part_lse,
    numbers,  # (sequences x heads of a share, ranks, HEAD_DIM)
    stats,  # one pair per entry, fp32: the LSE and an unused number
    heads,
    heads_each,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    RANKS: tl.constexpr,
):
    """Copy row `program_id(0)` of a shard's output to its entry, grouped by receiving rank."""
    row = tl.program_id(0)
    sequence, head = row // heads, row % heads
    columns = tl.arange(0, HEAD_DIM_PADDED)
    valid = columns < HEAD_DIM
    entry = sequence * heads_each + head % heads_each
    to = entry * RANKS + head // heads_each
    values = tl.load(part_out + row * HEAD_DIM + columns, mask=valid)
    tl.store(numbers + to * HEAD_DIM + columns, values, valid)
    tl.store(stats + 2 * to, tl.load(part_lse + row))


@triton.jit
def merge_entries(
    numbers,
    stats,
    out,
    lse,
    heads,
    heads_each,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    RANKS: tl.constexpr,
    RANKS_PADDED: tl.constexpr,
):
    """Merge entry `program_id(0)` of all ranks into its output row.

    Entries are laid out as in `deal_entries`. The output begins at the share's first head.
    """
    entry = tl.program_id(0)
    columns = tl.arange(0, HEAD_DIM_PADDED)
    ranks = tl.arange(0, RANKS_PADDED)
    valid = columns < HEAD_DIM
    entries = entry * RANKS + ranks
    lses = tl.load(stats + 2 * entries, mask=ranks < RANKS, other=float("-inf"))
    most = tl.max(lses, 0)
    reference = tl.where(most == float("-inf"), 0.0, most)
    weights = tl.exp(lses - reference)
    parts = tl.load(
        numbers + entries[:, None] * HEAD_DIM + columns[None, :],
        mask=(ranks < RANKS)[:, None] & valid[None, :],
        other=0.0,
    )
    numerator = tl.sum(weights[:, None] * parts.to(tl.float32), 0)
    denominator = tl.sum(weights, 0)
    scale = tl.where(denominator > 0, 1.0 / denominator, 0.0)
    to = entry // heads_each * heads + entry % heads_each
    tl.store(out + to * HEAD_DIM + columns, (numerator * scale).to(out.dtype.element_ty), valid)
    tl.store(lse + to, reference + tl.log(denominator))


@triton.jit
def weigh(
    part_out,
    part_lse,
    most,  # maximum LSE of each row over all ranks
    numerator,  # fp32
    denominator,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
):
    """Scale row `program_id(0)` of a shard's numerator and denominator to the common maximum."""
    row = tl.program_id(0)
    columns = tl.arange(0, HEAD_DIM_PADDED)
    valid = columns < HEAD_DIM
    reference = tl.load(most + row)
    reference = tl.where(reference == float("-inf"), 0.0, reference)
    weight = tl.exp(tl.load(part_lse + row) - reference)
    numbers = tl.load(part_out + row * HEAD_DIM + columns, mask=valid, other=0.0).to(tl.float32)
    tl.store(numerator + row * HEAD_DIM + columns, weight * numbers, valid)
    tl.store(denominator + row, weight)


@triton.jit
def divide(
    numerator,
    denominator,
    most,
    out,
    lse,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
):
    """Write row `program_id(0)` of the output and its LSE."""
    row = tl.program_id(0)
    columns = tl.arange(0, HEAD_DIM_PADDED)
    valid = columns < HEAD_DIM
    sum_of_weights = tl.load(denominator + row)
    scale = tl.where(sum_of_weights > 0, 1.0 / sum_of_weights, 0.0)
    numbers = tl.load(numerator + row * HEAD_DIM + columns, mask=valid, other=0.0)
    tl.store(out + row * HEAD_DIM + columns, (numbers * scale).to(out.dtype.element_ty), valid)
    tl.store(lse + row, tl.load(most + row) + tl.log(sum_of_weights))
