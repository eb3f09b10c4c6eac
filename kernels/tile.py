"""The LeanTile loop and the softmax re-scaling, shared by lean, fa2 and fixed_split.

All three call the same code, so a comparison shows only their decompositions.

Notation: R = `TILE_ROWS` rows of an output tile (a KV head's query heads, once for each of `Q_LEN`
query positions: row = position x `GROUP_SIZE` + head), D = `HEAD_DIM`, DP = D rounded up to a power
of two (Triton's tile sides are powers of two; columns past D are masked and cause no memory
traffic). A partial is (acc, m, l): the un-scaled output, the running maximum of the scores in units
of log2, and the sum of exponentials.
"""

import os

import triton
import triton.language as tl
from leanbench.kernels.launch import PARTIAL_ROW_EXTRA

#: Triton's interpreter multiplies the bit patterns of bf16 operands, so they are widened first.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")

#: `PARTIAL_ROW_EXTRA` for use inside kernels.
SLOT_PADDING = tl.constexpr(PARTIAL_ROW_EXTRA)


@triton.jit
def _dot(a, b, acc):
    """Return acc + a @ b with fp32 accumulation."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc)


@triton.jit
def row_offsets(rows, stride_head, stride_position, GROUP_SIZE: tl.constexpr, Q_LEN: tl.constexpr):
    """Return offsets of an output tile's rows from the KV head's first query head at position 0."""
    if Q_LEN == 1:
        offsets = rows * stride_head
    else:
        offsets = rows // GROUP_SIZE * stride_position + rows % GROUP_SIZE * stride_head
    return offsets


@triton.jit
def _pages(table, start, context, TILE_TOKENS: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """Return the page of the LeanTile at token `start`, or each token's page if it has several."""
    if PAGE_SIZE >= TILE_TOKENS:
        pages = tl.load(table + start // PAGE_SIZE, mask=start < context, other=0)
    else:
        tokens = start + tl.arange(0, TILE_TOKENS)
        pages = tl.load(table + tokens // PAGE_SIZE, mask=tokens < context, other=0)
    return pages


@triton.jit
def lean_tiles(
    q,  # (R, DP) query rows
    k,  # (batch, tokens, kv_heads, D), or (pages, PAGE_SIZE, kv_heads, D), through k_strides
    v,
    block_table,  # (batch, pages of a sequence), int32; None without a PAGE_SIZE
    stride_table,
    stride_table_head,  # from KV head to KV head; None: they have the same pages
    sequence,  # int64
    kv_head,
    k_strides,  # (batch, or page in a paged cache; head; token)
    v_strides,
    rows,  # (R,), see row_offsets
    first,  # LeanTiles [first, last) to walk
    last,
    context,  # tokens of this sequence
    qk_scale,  # softmax scale x log2(e)
    GROUP_SIZE: tl.constexpr,
    Q_LEN: tl.constexpr,
    PAGE_SIZE: tl.constexpr,  # 0: contiguous cache
    TILE_ROWS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    WINDOW_LEFT: tl.constexpr = -1,  # preceding tokens visible to a row; -1: all
    SOFTCAP: tl.constexpr = 0.0,  # 0: none
    UNIFIED: tl.constexpr = False,  # exponentials of the scores without maximum, never re-scaled
):
    """Compute online softmax over LeanTiles `[first, last)` of an output tile; return (acc, m, l).

    This is the loop of FlashAttention-2 (Dao 2023, Algorithm 1). LeanAttention (section III) uses
    its re-scaling as an associative reduction. A row of query position i sees the tokens up to
    context - Q_LEN + i. With UNIFIED it is FlashDecoding++'s loop: acc and l are relative to a
    maximum of 0, and m is the largest score.
    """
    tokens = tl.arange(0, TILE_TOKENS)
    columns = tl.arange(0, HEAD_DIM_PADDED)
    lines = tokens
    # 64-bit: in HND layout, a head of a long context is more than 2^31 elements from its sequence.
    kv_head64 = tl.cast(kv_head, tl.int64)
    if PAGE_SIZE == 0:
        k += sequence * k_strides[0] + kv_head64 * k_strides[1]
        v += sequence * v_strides[0] + kv_head64 * v_strides[1]
    else:
        k += kv_head64 * k_strides[1]
        v += kv_head64 * v_strides[1]
        lines = tokens % PAGE_SIZE
        table = block_table + sequence * stride_table
        if stride_table_head is not None:
            table += kv_head64 * stride_table_head
        next_pages = _pages(table, first * TILE_TOKENS, context, TILE_TOKENS, PAGE_SIZE)
    k_offsets = columns[:, None] + lines[None, :] * k_strides[2]
    v_offsets = lines[:, None] * v_strides[2] + columns[None, :]
    if Q_LEN > 1:
        seen = context - Q_LEN + 1 + rows // GROUP_SIZE
    elif WINDOW_LEFT >= 0:
        seen = context + rows * 0

    acc = tl.zeros((TILE_ROWS, HEAD_DIM_PADDED), tl.float32)
    if UNIFIED:
        # No step waits for a sum or a maximum over its tokens.
        m = tl.full((TILE_ROWS, TILE_TOKENS), float("-inf"), tl.float32)
        l = tl.zeros((TILE_ROWS, TILE_TOKENS), tl.float32)  # noqa: E741
    else:
        m = tl.full((TILE_ROWS,), float("-inf"), tl.float32)
        l = tl.zeros((TILE_ROWS,), tl.float32)  # noqa: E741 (the papers' name)
    for tile in tl.range(first, last, num_stages=NUM_STAGES):
        start = tile * TILE_TOKENS
        valid = start + tokens < context
        if WINDOW_LEFT >= 0:
            # Tokens before every row's window can have any value, even NaN.
            valid &= start + tokens >= context - Q_LEN - WINDOW_LEFT
        # 64-bit: in NHD layout, a long context extends more than 2^31 elements from its head's
        # start, and so do pages.
        if PAGE_SIZE == 0:
            k_tile = k + start.to(tl.int64) * k_strides[2]
            v_tile = v + start.to(tl.int64) * v_strides[2]
        else:
            pages = next_pages.to(tl.int64)
            # Read one step ahead. Otherwise loads of K and V would wait for it and not be in flight
            # together.
            next_pages = _pages(table, start + TILE_TOKENS, context, TILE_TOKENS, PAGE_SIZE)
            k_tile = k + pages * k_strides[0]
            v_tile = v + pages * v_strides[0]
            if PAGE_SIZE >= TILE_TOKENS:
                k_tile += start % PAGE_SIZE * k_strides[2]
                v_tile += start % PAGE_SIZE * v_strides[2]
            else:
                k_tile = k_tile[None, :]
                v_tile = v_tile[:, None]
        if HEAD_DIM == HEAD_DIM_PADDED:
            k_mask = valid[None, :]
            v_mask = valid[:, None]
        else:
            k_mask = valid[None, :] & (columns[:, None] < HEAD_DIM)
            v_mask = valid[:, None] & (columns[None, :] < HEAD_DIM)
        k_block = tl.load(k_tile + k_offsets, mask=k_mask, other=0.0)
        scores = _dot(q, k_block, tl.zeros((TILE_ROWS, TILE_TOKENS), tl.float32)) * qk_scale
        if SOFTCAP > 0:
            scores = _capped(scores, SOFTCAP)
        if Q_LEN == 1:
            scores = tl.where(valid[None, :], scores, float("-inf"))
        else:
            scores = tl.where((start + tokens)[None, :] < seen[:, None], scores, float("-inf"))
        if WINDOW_LEFT >= 0:
            in_window = (start + tokens)[None, :] >= (seen - 1 - WINDOW_LEFT)[:, None]
            scores = tl.where(in_window, scores, float("-inf"))
        if UNIFIED:
            p = tl.exp2(scores)
            l += p  # noqa: E741
            m = tl.maximum(m, scores)
        else:
            m_new = tl.maximum(m, tl.max(scores, 1))
            # A row that sees nothing has no finite score: -inf - -inf would be NaN.
            m_finite = tl.where(m_new == float("-inf"), 0.0, m_new)
            p = tl.exp2(scores - m_finite[:, None])
            rescale = tl.exp2(m - m_finite)
            l = l * rescale + tl.sum(p, 1)  # noqa: E741
            acc = acc * rescale[:, None]
            m = m_new
        v_block = tl.load(v_tile + v_offsets, mask=v_mask, other=0.0)
        acc = _dot(p.to(v_block.dtype), v_block, acc)
    if UNIFIED:
        m = tl.max(m, 1)
        l = tl.sum(l, 1)  # noqa: E741
    return acc, m, l


@triton.jit
def _capped(scores, SOFTCAP: tl.constexpr):
    """Return softcap x tanh(score / softcap) for scores in units of log2."""
    cap = SOFTCAP * 1.4426950408889634
    # tanh(x) = 2 / (1 + exp(-2x)) - 1
    return cap * (2.0 / (1.0 + tl.exp2(scores * (-2.0 / SOFTCAP))) - 1.0)


@triton.jit
def first_lean_tile(
    tokens, TILE_TOKENS: tl.constexpr, Q_LEN: tl.constexpr, WINDOW_LEFT: tl.constexpr
):
    """Return the first LeanTile of a sequence of `tokens` that any query position sees."""
    first = 0
    if WINDOW_LEFT >= 0:
        first = tl.maximum(tokens - Q_LEN - WINDOW_LEFT, 0) // TILE_TOKENS
    return first


@triton.jit
def write_output(acc, m, l, out, lse, out_offsets, lse_offsets, valid_rows, HEAD_DIM: tl.constexpr):  # noqa: E741
    """Scale a complete (acc, m, l) and write its valid rows.

    O = acc / l, LSE = ln(sum of exponentials).
    """
    columns = tl.arange(0, acc.shape[1])
    # l is 0 only for a row that sees nothing: output 0 and LSE -inf. NaN is kept.
    divisor = tl.where(l == 0.0, 1.0, l)
    scaled = acc / divisor[:, None]
    mask = valid_rows[:, None] & (columns[None, :] < HEAD_DIM)
    tl.store(
        out + out_offsets[:, None] + columns[None, :], scaled.to(out.dtype.element_ty), mask=mask
    )
    tl.store(lse + lse_offsets, (m + tl.log2(divisor)) * 0.6931471805599453, mask=valid_rows)


@triton.jit
def store_partial(
    acc,  # (R, DP)
    m,
    l,  # noqa: E741
    partials,  # fp32, or int64 where there is an epoch
    slot,
    epoch,  # None: the partial is for a later launch
    row_count,
    rows,
    valid_rows,
    HEAD_DIM: tl.constexpr,
):
    """Store acc, l and m in `slot`: `row_count` rows of D, then the sums, then the maxima.

    One logarithm m + log2(l) would lose l if m is large.
    """
    columns = tl.arange(0, acc.shape[1])
    base = partials + slot * (row_count * (HEAD_DIM + SLOT_PADDING))
    mask = valid_rows[:, None] & (columns[None, :] < HEAD_DIM)
    # .cg: to the L2, read by the merging CTA.
    tl.store(
        base + rows[:, None] * HEAD_DIM + columns[None, :],
        _tagged(acc, epoch),
        mask=mask,
        cache_modifier=".cg",
    )
    tl.store(
        base + row_count * HEAD_DIM + rows,
        _tagged(l, epoch),
        mask=valid_rows,
        cache_modifier=".cg",
    )
    tl.store(
        base + row_count * (HEAD_DIM + 1) + rows,
        _tagged(m, epoch),
        mask=valid_rows,
        cache_modifier=".cg",
    )


@triton.jit
def _tagged(x, epoch):
    """Return numbers of a slot: fp32 bits below, the epoch above; without an epoch `x`."""
    if epoch is not None:
        bits = x.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
        x = bits | (epoch.to(tl.int64) << 32)
    return x


@triton.jit
def merge_partials(
    partials,
    first_slot,
    count,  # consecutive slots
    row_count,
    rows,
    valid_rows,
    PARTIALS_AT_ONCE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
):
    """Merge `count` partials of an earlier launch; return (acc, m, l)."""
    columns = tl.arange(0, HEAD_DIM_PADDED)
    # 32-bit offsets from a single pointer: a pointer per element would double the registers of a
    # merge.
    slot_size = row_count * (HEAD_DIM + SLOT_PADDING)
    acc_offsets = rows[:, None] * HEAD_DIM + columns[None, :]
    acc = tl.zeros((rows.shape[0], HEAD_DIM_PADDED), tl.float32)
    m = tl.full((rows.shape[0],), float("-inf"), tl.float32)
    l = tl.zeros((rows.shape[0],), tl.float32)  # noqa: E741
    for first in range(0, count, PARTIALS_AT_ONCE):
        p = first + tl.arange(0, PARTIALS_AT_ONCE)
        mask = (p < count)[:, None] & valid_rows[None, :]
        offsets = (first_slot + p) * slot_size
        row_sums = offsets[:, None] + (row_count * HEAD_DIM + rows)[None, :]
        sums = tl.load(partials + row_sums, mask=mask, other=0.0)
        maxima = tl.load(partials + (row_sums + row_count), mask=mask, other=float("-inf"))
        parts = tl.load(
            partials + (offsets[:, None, None] + acc_offsets[None, :, :]),
            mask=mask[:, :, None] & (columns[None, None, :] < HEAD_DIM),
            other=0.0,
        )
        m_new = tl.maximum(m, tl.max(maxima, 0))
        m_finite = tl.where(m_new == float("-inf"), 0.0, m_new)
        rescale = tl.exp2(m - m_finite)
        weight = tl.exp2(maxima - m_finite[None, :])
        l = l * rescale + tl.sum(sums * weight, 0)  # noqa: E741
        acc = acc * rescale[:, None] + tl.sum(parts * weight[:, :, None], 0)
        m = m_new
    return acc, m, l


@triton.jit
def load_query(q, offsets, valid_rows, HEAD_DIM: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr):
    """Return the query rows of an output tile, (R, DP), padded with zeros."""
    columns = tl.arange(0, HEAD_DIM_PADDED)
    mask = valid_rows[:, None] & (columns[None, :] < HEAD_DIM)
    return tl.load(q + offsets[:, None] + columns[None, :], mask=mask, other=0.0)


@triton.jit
def sequence_tiles(
    cache_seqlens, sequence, context, TILE_TOKENS: tl.constexpr, RAGGED: tl.constexpr
):
    """Return (tokens, LeanTiles per output tile) of a sequence.

    At least one LeanTile, so that its output is written. The length is clamped to the cache.
    """
    tokens = context
    if RAGGED:
        tokens = tl.minimum(tl.maximum(tl.load(cache_seqlens + sequence), 0), context)
    return tokens, tl.maximum(1, (tokens + TILE_TOKENS - 1) // TILE_TOKENS)
