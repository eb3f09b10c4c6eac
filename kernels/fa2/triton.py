"""FlashAttention-2's decomposition in Triton: one CTA walks the whole context of an output tile and never splits it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import triton
import triton.language as tl
from leanbench.kernels.launch import LaunchShape, TritonLaunch, cache_strides, constants, qk_scale, run_all
from leanbench.kernels.stamps import BEGIN, TILES, mark, stamp_end, stamp_start
from leanbench.kernels.tile import lean_tiles, load_query, sequence_tiles, write_output

if TYPE_CHECKING:
    from leanbench.inputs import AttentionInputs
    from leanbench.registry import KernelConfig


@triton.jit(do_not_specialize=["kv_heads", "row_tiles", "context"])
def fa2_kernel(
    q,  # (batch, q_heads, D)
    k,  # (batch, tokens, kv_heads, D) through strides
    v,
    out,  # (batch, q_heads, D)
    lse,  # (batch, q_heads), fp32
    cache_seqlens,  # (batch,), int32; read when RAGGED
    context,
    kv_heads,
    row_tiles,
    qk_scale,
    stride_q_batch: tl.int64,
    stride_q_head,
    stride_k_batch: tl.int64,
    stride_k_head: tl.int64,
    stride_k_token,
    stride_v_batch: tl.int64,
    stride_v_head: tl.int64,
    stride_v_token,
    stride_out_batch: tl.int64,
    stride_out_head,
    GROUP_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    RAGGED: tl.constexpr,
    MARKS: tl.constexpr = 0,
    stamps=None,  # see leanbench.kernels.stamps
):
    marks = stamp_start(stamps, MARKS)
    output_tile = tl.program_id(0)
    per_sequence = kv_heads * row_tiles
    sequence = (output_tile // per_sequence).to(tl.int64)
    kv_head = (output_tile % per_sequence) // row_tiles
    rows = (output_tile % row_tiles) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    valid_rows = rows < GROUP_SIZE
    q_head = kv_head * GROUP_SIZE
    q_heads = kv_heads * GROUP_SIZE

    tokens, tiles = sequence_tiles(cache_seqlens, sequence, context, TILE_TOKENS, RAGGED)
    marks = mark(stamps, marks, BEGIN, output_tile, MARKS)
    q_rows = load_query(
        q + sequence * stride_q_batch + q_head * stride_q_head,
        rows,
        valid_rows,
        stride_q_head,
        HEAD_DIM,
        HEAD_DIM_PADDED,
    )
    acc, m, l = lean_tiles(  # noqa: E741
        q_rows,
        k + sequence * stride_k_batch + kv_head * stride_k_head,
        v + sequence * stride_v_batch + kv_head * stride_v_head,
        stride_k_token,
        stride_v_token,
        0,
        tiles,
        tokens,
        qk_scale,
        TILE_ROWS,
        TILE_TOKENS,
        HEAD_DIM,
        HEAD_DIM_PADDED,
        NUM_STAGES,
    )
    write_output(
        acc,
        m,
        l,
        out + sequence * stride_out_batch + q_head * stride_out_head,
        lse + sequence * q_heads + q_head,
        rows,
        valid_rows,
        stride_out_head,
        HEAD_DIM,
    )
    marks = mark(stamps, marks, TILES, output_tile, MARKS)
    stamp_end(stamps, marks, MARKS)


def launches(inputs: AttentionInputs, config: KernelConfig) -> tuple[TritonLaunch, ...]:
    """The launch of `fa2_kernel` over these tensors."""
    shape = LaunchShape.of(inputs)
    arguments = (
        inputs.q,
        inputs.k_cache,
        inputs.v_cache,
        inputs.out,
        inputs.lse,
        inputs.cache_seqlens,
        inputs.context,
        shape.kv_heads,
        shape.row_tiles,
        qk_scale(inputs),
        inputs.q.stride(0),
        inputs.q.stride(2),
        *cache_strides(inputs),
        inputs.out.stride(0),
        inputs.out.stride(2),
    )
    options = {
        **constants(shape, config, inputs.cache_seqlens is not None),
        "NUM_STAGES": config.num_stages,
        "num_warps": config.num_warps,
    }
    return (TritonLaunch(fa2_kernel, shape.output_tiles, arguments, options),)


def prepare(inputs: AttentionInputs, config: KernelConfig) -> Callable[[], None]:
    """A function that makes the launches."""
    return run_all(launches(inputs, config))
