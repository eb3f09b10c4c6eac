"""FlashAttention-2's decomposition in Triton: one CTA per output tile walks the whole context."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import triton
import triton.language as tl
from leanbench.kernels.events import BEGIN, TILES, end_events, record_event, start_events
from leanbench.kernels.launch import (
    LaunchShape,
    TritonLaunch,
    block_table,
    cache_strides,
    constants,
    qk_scale,
    row_strides,
    run_all,
)
from leanbench.kernels.tile import (
    first_lean_tile,
    lean_tiles,
    load_query,
    row_offsets,
    sequence_tiles,
    write_output,
)

if TYPE_CHECKING:
    from leanbench.core.config import KernelConfig
    from leanbench.core.inputs import AttentionInputs


@triton.jit(
    do_not_specialize=["stride_table", "stride_table_head", "kv_heads", "row_tiles", "context"]
)
def fa2_kernel(
    q,  # (batch, Q_LEN, q_heads, D) through q_strides
    k,  # see lean_tiles
    v,
    out,  # (batch, Q_LEN, q_heads, D) through out_strides
    lse,  # (batch, q_heads, Q_LEN), fp32
    cache_seqlens,  # (batch,), int32; read when RAGGED
    block_table,  # see lean_tiles
    stride_table,
    stride_table_head,
    context,
    kv_heads,
    row_tiles,
    qk_scale,
    q_strides,  # (batch, head, query position)
    k_strides,  # (batch or page, head, token)
    v_strides,
    out_strides,
    GROUP_SIZE: tl.constexpr,
    Q_LEN: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    RAGGED: tl.constexpr,
    WINDOW_LEFT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MAX_EVENTS: tl.constexpr = 0,
    events=None,  # see leanbench.kernels.events
):
    recorded = start_events(events, MAX_EVENTS)
    output_tile = tl.program_id(0)
    per_sequence = kv_heads * row_tiles
    sequence = (output_tile // per_sequence).to(tl.int64)
    kv_head = (output_tile % per_sequence) // row_tiles
    rows = (output_tile % row_tiles) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    valid_rows = rows < GROUP_SIZE * Q_LEN
    q_head = kv_head * GROUP_SIZE
    q_heads = kv_heads * GROUP_SIZE

    tokens, tiles = sequence_tiles(cache_seqlens, sequence, context, TILE_TOKENS, RAGGED)
    recorded = record_event(events, recorded, BEGIN, output_tile, MAX_EVENTS)
    q_rows = load_query(
        q + sequence * q_strides[0] + q_head * q_strides[1],
        row_offsets(rows, q_strides[1], q_strides[2], GROUP_SIZE, Q_LEN),
        valid_rows,
        HEAD_DIM,
        HEAD_DIM_PADDED,
    )
    acc, m, l = lean_tiles(  # noqa: E741
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
        first_lean_tile(tokens, TILE_TOKENS, Q_LEN, WINDOW_LEFT),
        tiles,
        tokens,
        qk_scale,
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
    write_output(
        acc,
        m,
        l,
        out + sequence * out_strides[0] + q_head * out_strides[1],
        lse + (sequence * q_heads + q_head) * Q_LEN,
        row_offsets(rows, out_strides[1], out_strides[2], GROUP_SIZE, Q_LEN),
        row_offsets(rows, Q_LEN, 1, GROUP_SIZE, Q_LEN),
        valid_rows,
        HEAD_DIM,
    )
    recorded = record_event(events, recorded, TILES, output_tile, MAX_EVENTS)
    end_events(events, recorded, MAX_EVENTS)


def launches(inputs: AttentionInputs, config: KernelConfig) -> tuple[TritonLaunch, ...]:
    """Return the launch of `fa2_kernel` over these tensors."""
    shape = LaunchShape.of(inputs)
    arguments = (
        inputs.q,
        inputs.k_cache,
        inputs.v_cache,
        inputs.out,
        inputs.lse,
        inputs.cache_seqlens,
        *block_table(inputs),
        inputs.context,
        shape.kv_heads,
        shape.row_tiles,
        qk_scale(inputs),
        row_strides(inputs.q),
        cache_strides(inputs, "k_cache", config.tile_tokens),
        cache_strides(inputs, "v_cache", config.tile_tokens),
        row_strides(inputs.out),
    )
    options = {
        **constants(inputs, config),
        "PAGE_SIZE": inputs.page_size or 0,
        "WINDOW_LEFT": inputs.window_left,
        "SOFTCAP": inputs.softcap,
        "NUM_STAGES": config.num_stages,
        "num_warps": config.num_warps,
    }
    return (TritonLaunch(fa2_kernel, shape.output_tiles, arguments, options),)


def prepare(inputs: AttentionInputs, config: KernelConfig) -> Callable[[], None]:
    return run_all(launches(inputs, config))
