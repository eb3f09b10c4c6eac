"""FlashDecoding's decomposition in Triton: equal splits, merged by a second kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from leanbench.kernels.events import BEGIN, REDUCTION, TILES, end_events, record_event, start_events
from leanbench.kernels.fa2.triton import launches as fa2_launches
from leanbench.kernels.launch import (
    PARTIAL_ROW_EXTRA,
    LaunchShape,
    TritonLaunch,
    block_table,
    cache_strides,
    constants,
    padded,
    qk_scale,
    row_strides,
    run_all,
)
from leanbench.kernels.tile import (
    first_lean_tile,
    lean_tiles,
    load_query,
    merge_partials,
    row_offsets,
    sequence_tiles,
    store_partial,
    write_output,
)

if TYPE_CHECKING:
    from leanbench.kernels.fixed_split.configs import FixedSplitTritonConfig

    from leanbench.core.inputs import AttentionInputs


#: Smallest row maximum, in units of log2, with which a unified maximum of 0 keeps its precision.
#: 2^15 is the last power of two below fp16's largest number. With a largest weight of 2^-8, weights
#: of 2^-16 relative to it are still distinct: fp16's smallest number is 2^-24.
LEAST_UNIFIED = tl.constexpr(-8.0)
MOST_UNIFIED = tl.constexpr(15.0)


@triton.jit(
    do_not_specialize=[
        "stride_table",
        "stride_table_head",
        "kv_heads",
        "row_tiles",
        "context",
        "splits",
    ]
)
def split_kernel(
    q,  # (batch, Q_LEN, q_heads, D) through q_strides
    k,  # see lean_tiles
    v,
    partials,  # (output tiles x splits) slots, see store_partial
    cache_seqlens,  # (batch,), int32; read when RAGGED
    block_table,  # see lean_tiles
    stride_table,
    stride_table_head,
    context,
    kv_heads,
    row_tiles,
    splits,
    qk_scale,
    q_strides,  # (batch, head, query position)
    k_strides,  # (batch or page, head, token)
    v_strides,
    GROUP_SIZE: tl.constexpr,
    Q_LEN: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    ROW_COUNT: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    RAGGED: tl.constexpr,
    WINDOW_LEFT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    UNIFIED: tl.constexpr,  # see lean_tiles
    MAX_EVENTS: tl.constexpr = 0,
    events=None,  # see leanbench.kernels.events
):
    recorded = start_events(events, MAX_EVENTS)
    slot = tl.program_id(0)
    output_tile = slot // splits
    split = slot % splits
    per_sequence = kv_heads * row_tiles
    sequence = (output_tile // per_sequence).to(tl.int64)
    kv_head = (output_tile % per_sequence) // row_tiles
    local_rows = tl.arange(0, TILE_ROWS)
    rows = (output_tile % row_tiles) * TILE_ROWS + local_rows
    valid_rows = rows < GROUP_SIZE * Q_LEN

    tokens, tiles = sequence_tiles(cache_seqlens, sequence, context, TILE_TOKENS, RAGGED)
    seen_from = first_lean_tile(tokens, TILE_TOKENS, Q_LEN, WINDOW_LEFT)
    share = (tiles - seen_from + splits - 1) // splits
    first = tl.minimum(seen_from + split * share, tiles)
    last = tl.minimum(first + share, tiles)
    if first < last:
        recorded = record_event(events, recorded, BEGIN, output_tile, MAX_EVENTS)
        q_rows = load_query(
            q + sequence * q_strides[0] + kv_head * GROUP_SIZE * q_strides[1],
            row_offsets(rows, q_strides[1], q_strides[2], GROUP_SIZE, Q_LEN),
            valid_rows,
            HEAD_DIM,
            HEAD_DIM_PADDED,
        )
        walk = (
            q_rows,
            k,
            v,
            block_table,
            stride_table,
            stride_table_head,
            sequence,
            kv_head,
            k_strides,
            v_strides,
            rows,
            first,
            last,
            tokens,
            qk_scale,
        )
        acc, m, l = lean_tiles(  # noqa: E741
            *walk,
            GROUP_SIZE,
            Q_LEN,
            PAGE_SIZE,
            TILE_ROWS,
            TILE_TOKENS,
            HEAD_DIM,
            HEAD_DIM_PADDED,
            NUM_STAGES,
            WINDOW_LEFT,
            SOFTCAP,
            UNIFIED,
        )
        if UNIFIED:
            unseen = m == float("-inf")
            largest = tl.where(valid_rows & ~unseen, m, 0.0)
            m = tl.where(unseen, m, 0.0)
            if (tl.max(largest, 0) > MOST_UNIFIED) | (tl.min(largest, 0) < LEAST_UNIFIED):
                acc, m, l = lean_tiles(  # noqa: E741
                    *walk,
                    GROUP_SIZE,
                    Q_LEN,
                    PAGE_SIZE,
                    TILE_ROWS,
                    TILE_TOKENS,
                    HEAD_DIM,
                    HEAD_DIM_PADDED,
                    NUM_STAGES,
                    WINDOW_LEFT,
                    SOFTCAP,
                )
        store_partial(acc, m, l, partials, slot, None, ROW_COUNT, local_rows, valid_rows, HEAD_DIM)
        recorded = record_event(events, recorded, TILES, output_tile, MAX_EVENTS)
    end_events(events, recorded, MAX_EVENTS)


@triton.jit(do_not_specialize=["kv_heads", "row_tiles", "context", "splits"])
def merge_kernel(
    partials,
    out,  # (batch, Q_LEN, q_heads, D) through out_strides
    lse,  # (batch, q_heads, Q_LEN), fp32
    cache_seqlens,
    context,
    kv_heads,
    row_tiles,
    splits,
    out_strides,
    GROUP_SIZE: tl.constexpr,
    Q_LEN: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    ROW_COUNT: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    PARTIALS_AT_ONCE: tl.constexpr,
    RAGGED: tl.constexpr,
    WINDOW_LEFT: tl.constexpr,
    MAX_EVENTS: tl.constexpr = 0,
    events=None,  # see leanbench.kernels.events
):
    recorded = start_events(events, MAX_EVENTS)
    # One CTA per query head and query position.
    per_sequence = kv_heads * GROUP_SIZE * Q_LEN
    sequence = (tl.program_id(0) // per_sequence).to(tl.int64)
    q_head = tl.program_id(0) % per_sequence // Q_LEN
    position = tl.program_id(0) % Q_LEN
    row = position * GROUP_SIZE + q_head % GROUP_SIZE
    output_tile = (sequence * kv_heads + q_head // GROUP_SIZE) * row_tiles + row // TILE_ROWS
    rows = row % TILE_ROWS + tl.arange(0, 1)
    valid_rows = rows >= 0

    tokens, tiles = sequence_tiles(cache_seqlens, sequence, context, TILE_TOKENS, RAGGED)
    tiles -= first_lean_tile(tokens, TILE_TOKENS, Q_LEN, WINDOW_LEFT)
    share = (tiles + splits - 1) // splits
    used = (tiles + share - 1) // share
    recorded = record_event(events, recorded, BEGIN, output_tile, MAX_EVENTS)
    acc, m, l = merge_partials(  # noqa: E741
        partials,
        output_tile * splits,
        used,
        ROW_COUNT,
        rows,
        valid_rows,
        PARTIALS_AT_ONCE,
        HEAD_DIM,
        HEAD_DIM_PADDED,
    )
    out += sequence * out_strides[0] + q_head * out_strides[1]
    if Q_LEN > 1:
        out += position * out_strides[2]
    only = tl.arange(0, 1)
    write_output(acc, m, l, out, lse + tl.program_id(0), only, only, valid_rows, HEAD_DIM)
    recorded = record_event(events, recorded, REDUCTION, output_tile, MAX_EVENTS)
    end_events(events, recorded, MAX_EVENTS)


#: Numbers in registers per merge step: 32 per thread of 128 threads.
_MERGED_NUMBERS = 4096

_workspaces: dict[tuple[torch.device, int], torch.Tensor] = {}


def _partials(device: torch.device, count: int) -> torch.Tensor:
    """Return the partials buffer of the current stream.

    Launches share it, as in serving, so it stays in the L2.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        # Within a capture the graph owns the allocation.
        return torch.empty(count, dtype=torch.float32, device=device)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    workspace = _workspaces.get((device, stream))
    if workspace is None or workspace.numel() < count:
        workspace = torch.empty(count, dtype=torch.float32, device=device)
        _workspaces[device, stream] = workspace
    return workspace


def launches(inputs: AttentionInputs, config: FixedSplitTritonConfig) -> tuple[TritonLaunch, ...]:
    """Return the launches of `split_kernel` and `merge_kernel`.

    A single split is a launch of FlashAttention-2's kernel.
    """
    if config.splits == 1:
        return fa2_launches(inputs, config)
    return split_launches(inputs, config)


def split_launches(
    inputs: AttentionInputs, config: FixedSplitTritonConfig, unified: bool = False
) -> tuple[TritonLaunch, ...]:
    """Return the launches of `split_kernel` and `merge_kernel` for any number of splits.

    Args:
        unified: use FlashDecoding++'s softmax.
    """
    shape = LaunchShape.of(inputs)
    slots = shape.output_tiles * config.splits
    partials = _partials(
        inputs.q.device, slots * shape.row_count * (shape.head_dim + PARTIAL_ROW_EXTRA)
    )
    sizes = (inputs.context, shape.kv_heads, shape.row_tiles, config.splits)
    split_arguments = (
        inputs.q,
        inputs.k_cache,
        inputs.v_cache,
        partials,
        inputs.cache_seqlens,
        *block_table(inputs),
        *sizes,
        qk_scale(inputs),
        row_strides(inputs.q),
        cache_strides(inputs, "k_cache", config.tile_tokens),
        cache_strides(inputs, "v_cache", config.tile_tokens),
    )
    merge_arguments = (
        partials,
        inputs.out,
        inputs.lse,
        inputs.cache_seqlens,
        *sizes,
        row_strides(inputs.out),
    )
    shared = {
        **constants(inputs, config),
        "ROW_COUNT": shape.row_count,
        "WINDOW_LEFT": inputs.window_left,
    }
    split_options = {
        **shared,
        "PAGE_SIZE": inputs.page_size or 0,
        "SOFTCAP": inputs.softcap,
        "UNIFIED": unified,
        "NUM_STAGES": config.num_stages,
        "num_warps": config.num_warps,
    }
    # A power of two that covers the splits, so most merges take one step.
    at_once = min(_MERGED_NUMBERS // padded(shape.head_dim), padded(config.splits))
    merge_options = {**shared, "PARTIALS_AT_ONCE": at_once, "num_warps": 4}
    return (
        TritonLaunch(split_kernel, slots, split_arguments, split_options),
        TritonLaunch(merge_kernel, inputs.lse.numel(), merge_arguments, merge_options),
    )


def prepare(inputs: AttentionInputs, config: FixedSplitTritonConfig) -> Callable[[], None]:
    return run_all(launches(inputs, config))
