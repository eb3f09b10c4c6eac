"""LeanAttention in Triton: stream-K over LeanTiles and the reduction, in one launch.

`teaching.py` is the same algorithm in a plain kernel: read it first.

The schedule is `leanbench.core.decomposition.stream_k`. For lengths on the device, every CTA
computes it. Partials are merged in the order of the context, so repeats agree bit for bit.

No grid deadlocks, even if not all CTAs are resident. Work ranges are assigned from the last to the
first, so a host block waits only for CTAs of lower index. The hardware starts CTAs in the order of
their index (decoupled look-back scans rely on it), and a CTA stores its first partial before it
waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl
from leanbench.kernels.events import (
    BEGIN,
    REDUCTION,
    TILES,
    WAIT,
    end_events,
    record_event,
    start_events,
)
from leanbench.kernels.launch import (
    LaunchShape,
    TritonLaunch,
    block_table,
    cache_strides,
    constants,
    merge_rows_at_once,
    qk_scale,
    registers_per_thread,
    row_strides,
    run_all,
    sm_count,
)
from leanbench.kernels.lean.reduce import reduce_partials, wait_for_all
from leanbench.kernels.lean.schedule import find_sequence, range_of, range_start, total_tiles
from leanbench.kernels.lean.workspace import (
    WORKSPACES,
    fixed_run_bytes,
    lean_grid_limit,
    one_number_each,
    partial_bytes,
)
from leanbench.kernels.tile import (
    lean_tiles,
    load_query,
    row_offsets,
    sequence_tiles,
    store_partial,
    write_output,
)

from leanbench.core.decomposition import stream_k_grid

if TYPE_CHECKING:
    import torch
    from leanbench.kernels.lean.configs import LeanTritonConfig

    from leanbench.core.extras import Extras
    from leanbench.core.inputs import AttentionInputs


@triton.jit(
    do_not_specialize=[
        "epoch",
        "replays",  # aligned to 4 bytes in a capture, to 16 in a plain call
        "stride_table",
        "stride_table_head",
        "batch",
        "kv_heads",
        "context",
        "min_tiles_per_cta",
        "share",
        "longer",
    ]
)
def lean_kernel(
    partials,  # int64, a slot per work range, see store_partial
    host_partials,  # int64, a slot per work range; with fixed runs, same as `partials`
    epoch,  # of the launch; see kernels/lean/workspace.py
    replays,  # (1,), int32: added to the epoch
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
    batch,
    kv_heads,
    min_tiles_per_cta,  # RAGGED: the kernel computes the share from the lengths
    share,  # not RAGGED: LeanTiles per CTA, and number of CTAs with one more
    longer,
    qk_scale,
    q_strides,  # (batch, head, query position)
    k_strides,  # (batch or page, head, token)
    v_strides,
    out_strides,
    GROUP_SIZE: tl.constexpr,
    Q_LEN: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROW_TILES: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    ROW_COUNT: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    MERGE_ROWS: tl.constexpr,
    ONE_EACH: tl.constexpr,
    SEQUENCES_AT_ONCE: tl.constexpr,
    RAGGED: tl.constexpr,
    FIXED_RUN_TILES: tl.constexpr,  # 0: work ranges are equal shares of all LeanTiles
    MAX_EVENTS: tl.constexpr = 0,
    events=None,  # see leanbench.kernels.events
):
    recorded = start_events(events, MAX_EVENTS)
    epoch += tl.load(replays)
    per_sequence = kv_heads * ROW_TILES
    # Fixed runs are assigned as if they were LeanTiles of their length, one per CTA. Everything
    # counted below is then a fixed run, except in the loop over LeanTiles.
    UNIT_TOKENS: tl.constexpr = (
        TILE_TOKENS * FIXED_RUN_TILES if FIXED_RUN_TILES > 0 else TILE_TOKENS
    )
    # Work ranges are assigned from the last to the first, so a host block waits for CTAs that
    # started earlier.
    if RAGGED:
        total = (
            total_tiles(cache_seqlens, batch, context, UNIT_TOKENS, SEQUENCES_AT_ONCE)
            * per_sequence
        )
        grid = tl.maximum(1, tl.minimum(tl.num_programs(0), total // min_tiles_per_cta))
        share = total // grid
        longer = total % grid
        work_range = grid - 1 - tl.program_id(0)
        # A CTA past the grid has no work range.
        start = tl.where(work_range < 0, 0, range_start(work_range, share, longer))
        end = tl.where(work_range < 0, 0, range_start(work_range + 1, share, longer))
        sequence, sequence_start = find_sequence(
            cache_seqlens, batch, context, per_sequence, start, UNIT_TOKENS, SEQUENCES_AT_ONCE
        )
    else:
        tokens, tiles = sequence_tiles(cache_seqlens, 0, context, UNIT_TOKENS, RAGGED)
        work_range = tl.num_programs(0) - 1 - tl.program_id(0)
        start = range_start(work_range, share, longer)
        end = range_start(work_range + 1, share, longer)

    recorded = record_event(events, recorded, BEGIN, 0, MAX_EVENTS)
    at = start
    while at < end:
        if RAGGED:
            tokens, tiles = sequence_tiles(cache_seqlens, sequence, context, UNIT_TOKENS, RAGGED)
            head_tile = (at - sequence_start) // tiles
            tile_start = sequence_start + head_tile * tiles
            output_tile = sequence * per_sequence + head_tile
        else:
            output_tile = at // tiles
            tile_start = output_tile * tiles
            sequence = output_tile // per_sequence
            head_tile = output_tile - sequence * per_sequence
        first = at - tile_start
        last = tl.minimum(tiles, end - tile_start)
        first_tile = first
        last_tile = last
        if FIXED_RUN_TILES > 0:
            first_tile = first * FIXED_RUN_TILES
            last_tile = tl.minimum(
                last * FIXED_RUN_TILES, tl.maximum(1, tl.cdiv(tokens, TILE_TOKENS))
            )

        kv_head = head_tile // ROW_TILES
        q_head = kv_head * GROUP_SIZE
        row_offset = (head_tile % ROW_TILES) * TILE_ROWS
        local_rows = tl.arange(0, TILE_ROWS)
        rows = row_offset + local_rows
        valid_rows = rows < GROUP_SIZE * Q_LEN
        sequence64 = tl.cast(sequence, tl.int64)
        out_base = out + sequence64 * out_strides[0] + q_head * out_strides[1]
        lse_base = lse + (sequence64 * (kv_heads * GROUP_SIZE) + q_head) * Q_LEN

        q_rows = load_query(
            q + sequence64 * q_strides[0] + q_head * q_strides[1],
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
            sequence64,
            kv_head,
            k_strides,
            v_strides,
            rows,
            first_tile,
            last_tile,
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
        )
        if last - first == tiles:
            write_output(
                acc,
                m,
                l,
                out_base,
                lse_base,
                row_offsets(rows, out_strides[1], out_strides[2], GROUP_SIZE, Q_LEN),
                row_offsets(rows, Q_LEN, 1, GROUP_SIZE, Q_LEN),
                valid_rows,
                HEAD_DIM,
            )
            recorded = record_event(events, recorded, TILES, output_tile, MAX_EVENTS)
        elif first > 0:
            # A work range has at most one such part, at its start, so its number identifies the
            # slot.
            store_partial(
                acc, m, l, partials, work_range, epoch, ROW_COUNT, local_rows, valid_rows, HEAD_DIM
            )
            recorded = record_event(events, recorded, TILES, output_tile, MAX_EVENTS)
        else:
            # The host block. The other parts belong to the following work ranges, up to the output
            # tile's last LeanTile.
            store_partial(
                acc,
                m,
                l,
                host_partials,
                work_range,
                epoch,
                ROW_COUNT,
                local_rows,
                valid_rows,
                HEAD_DIM,
            )
            if MAX_EVENTS > 0:
                recorded = record_event(events, recorded, TILES, output_tile, MAX_EVENTS)
                others = range_of(tile_start + tiles - 1, share, longer) - work_range
                wait_for_all(partials, work_range + 1, others, epoch, ROW_COUNT, HEAD_DIM)
                recorded = record_event(events, recorded, WAIT, output_tile, MAX_EVENTS)
            reduce_partials(
                host_partials,
                partials,
                work_range,
                range_of(tile_start + tiles - 1, share, longer) - work_range,
                epoch,
                out_base,
                lse_base,
                row_offset,
                out_strides,
                GROUP_SIZE,
                Q_LEN,
                ROW_COUNT,
                MERGE_ROWS,
                ONE_EACH,
                HEAD_DIM,
                HEAD_DIM_PADDED,
            )
            recorded = record_event(events, recorded, REDUCTION, output_tile, MAX_EVENTS)
        at = tile_start + last
        if RAGGED:
            sequence_end = sequence_start + tiles * per_sequence
            if at >= sequence_end:
                sequence += 1
                sequence_start = sequence_end
    end_events(events, recorded, MAX_EVENTS)


#: Lengths of sequences added per step of a CTA.
_SEQUENCES_AT_ONCE = 128


def launches(
    inputs: AttentionInputs, config: LeanTritonConfig, sms: int | None = None
) -> tuple[TritonLaunch, ...]:
    """Return the launch of `lean_kernel` over these tensors.

    Args:
        sms: multiplied by `config.ctas_per_sm` for the grid, except with fixed runs; defaults to
            the device's.

    Raises:
        UserError: the partials of fixed runs are too large.
    """
    device, shape = inputs.q.device, LaunchShape.of(inputs)
    total = shape.lean_tiles(inputs.context, config.tile_tokens * (config.fixed_run_tiles or 1))
    slot_bytes = partial_bytes(shape.row_count, shape.head_dim)
    if config.fixed_run_tiles == 0:
        min_tiles_per_cta = config.min_tiles_per_cta
        max_grid = lean_grid_limit(
            shape.row_count, shape.head_dim, config.ctas_per_sm * (sms or sm_count(device))
        )
        aligned = config.align_grid and inputs.cache_seqlens is None
        grid = stream_k_grid(
            total, max_grid, min_tiles_per_cta, shape.output_tiles if aligned else 1
        )
        slots_bytes = 2 * grid * slot_bytes
    else:
        slots_bytes = fixed_run_bytes(total, slot_bytes)
        min_tiles_per_cta, grid = 1, total

    def lent() -> tuple[Any, ...]:
        slots, epoch, replays, _ = WORKSPACES.lend(device, slots_bytes)
        host = slots if config.fixed_run_tiles else slots[grid * slot_bytes // 8 :]
        return slots, host, epoch, replays

    # For lengths on the device, `total` is an upper bound. The kernel leaves CTAs idle if the
    # actual lengths need fewer.
    share, longer = divmod(total, grid)
    arguments = (
        inputs.q,
        inputs.k_cache,
        inputs.v_cache,
        inputs.out,
        inputs.lse,
        inputs.cache_seqlens,
        *block_table(inputs),
        inputs.context,
        shape.batch,
        shape.kv_heads,
        min_tiles_per_cta,
        share,
        longer,
        qk_scale(inputs),
        row_strides(inputs.q),
        cache_strides(inputs, "k_cache", config.tile_tokens),
        cache_strides(inputs, "v_cache", config.tile_tokens),
        row_strides(inputs.out),
    )
    merge_rows = merge_rows_at_once(shape.row_count, shape.head_dim, config.num_warps)
    options = {
        **constants(inputs, config),
        "ROW_TILES": shape.row_tiles,
        "ROW_COUNT": shape.row_count,
        "PAGE_SIZE": inputs.page_size or 0,
        "NUM_STAGES": config.num_stages,
        "MERGE_ROWS": merge_rows,
        "ONE_EACH": one_number_each(shape.row_count, shape.head_dim, config.num_warps),
        "FIXED_RUN_TILES": config.fixed_run_tiles,
        "SEQUENCES_AT_ONCE": _SEQUENCES_AT_ONCE,
        "num_warps": config.num_warps,
        "maxnreg": registers_per_thread(config.num_warps * config.ctas_per_sm),
    }
    return (TritonLaunch(lean_kernel, grid, arguments, options, lent),)


def prepare(
    inputs: AttentionInputs, config: LeanTritonConfig, sms: int | None = None
) -> Callable[[], None]:
    """Return a function that launches the kernel; arguments as in `launches`."""
    return run_all(launches(inputs, config, sms))


class TritonRelaunch:
    """A launch for other tensors; see leanbench.kernels.launch.Relaunch."""

    any_capacity = False

    def __init__(self, inputs: AttentionInputs, config: LeanTritonConfig) -> None:
        (launch,) = launches(inputs, config)
        self._lent, self._table_strides = launch.lent, launch.arguments[7:9]
        self._sizes, self._options = launch.arguments[10:], launch.options
        self._run = launch.function[(launch.grid,)]
        self.tile_tokens = config.tile_tokens

    def __call__(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        cache_seqlens: torch.Tensor | None,
        context: int,
        block_table: torch.Tensor | None,
        out: torch.Tensor,
        lse: torch.Tensor,
        extras: Extras | None = None,
    ) -> None:
        assert extras is None, "this kernel takes plain calls alone"
        tensors = (q, k_cache, v_cache, out, lse, cache_seqlens, block_table)
        self._run(
            *self._lent(), *tensors, *self._table_strides, context, *self._sizes, **self._options
        )
