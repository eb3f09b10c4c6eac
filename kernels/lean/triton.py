"""LeanAttention in Triton: stream-K over LeanTiles and the reduction, in one launch.

The schedule is `leanbench.decomposition.stream_k`. With the lengths on the device every CTA computes it for itself.

The reduction is the paper's (Algorithm 2): a CTA whose run starts in the middle of an output tile stores that part's
partial and goes on; the host block, which holds the tile's first LeanTile at the end of its own run, waits for the
other partials, merges them in the order of the context, whoever came first, and writes the output. So repeats agree
bit for bit.

No grid deadlocks, whether or not all CTAs fit the GPU at once: runs are dealt from the last to the first, a host
block only waits for CTAs of lower index, the hardware starts CTAs in the order of their index (decoupled look-back
scans rest on the same), and a CTA stores its first partial before it waits. The host block empties the slots it has
read: a launch finds the workspace as the one before it did, and the host never clears it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from leanbench.kernels.launch import (
    PARTIAL_ROW_EXTRA,
    LaunchShape,
    TritonLaunch,
    cache_strides,
    constants,
    merge_rows_at_once,
    padded,
    qk_scale,
    registers_per_thread,
    run_all,
    sm_count,
)
from leanbench.kernels.lean import WORKSPACE_BYTES, lean_grid_limit, one_number_each
from leanbench.kernels.lean.mailbox import clear, collect, wait_for_all
from leanbench.kernels.stamps import BEGIN, REDUCTION, TILES, WAIT, mark, stamp_end, stamp_start
from leanbench.kernels.tile import (
    EMPTY,
    SLOT_PADDING,
    lean_tiles,
    load_query,
    sequence_tiles,
    write_output,
    write_partial,
)

from leanbench.decomposition import stream_k_grid

if TYPE_CHECKING:
    from leanbench.inputs import AttentionInputs
    from leanbench.registry import KernelConfig


@triton.jit
def _start_of(run, share, longer):
    """First LeanTile of a run: leanbench.decomposition.stream_k_start."""
    return run * share + tl.minimum(run, longer)


@triton.jit
def _run_of(lean_tile, share, longer):
    """The run that holds a LeanTile: leanbench.decomposition.stream_k_run."""
    border = longer * (share + 1)
    return tl.where(lean_tile < border, lean_tile // (share + 1), longer + (lean_tile - border) // share)


@triton.jit
def _tiles_of(cache_seqlens, sequences, batch, TILE_TOKENS: tl.constexpr):
    """LeanTiles per output tile for a block of sequences, 0 past the batch."""
    tokens = tl.load(cache_seqlens + sequences, mask=sequences < batch, other=0)
    tiles = tl.maximum(1, (tokens + TILE_TOKENS - 1) // TILE_TOKENS)
    return tl.where(sequences < batch, tiles, 0)


@triton.jit
def _total_tiles(cache_seqlens, batch, TILE_TOKENS: tl.constexpr, SEQUENCES_AT_ONCE: tl.constexpr):
    total = 0
    for first in range(0, batch, SEQUENCES_AT_ONCE):
        sequences = first + tl.arange(0, SEQUENCES_AT_ONCE)
        total += tl.sum(_tiles_of(cache_seqlens, sequences, batch, TILE_TOKENS))
    return total


@triton.jit
def _find_sequence(
    cache_seqlens, batch, per_sequence, lean_tile, TILE_TOKENS: tl.constexpr, SEQUENCES_AT_ONCE: tl.constexpr
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


@triton.jit
def _reduce(
    host_partials,
    partials,
    run,
    others,  # parts of the output tile beside the host block's
    out,
    lse,
    row_offset,
    stride_out_head,
    GROUP_SIZE: tl.constexpr,
    ROW_COUNT: tl.constexpr,
    MERGE_ROWS: tl.constexpr,
    ONE_EACH: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    SLOT_SIZE_PADDED: tl.constexpr,
):
    """Merges an output tile's partials and writes its rows."""
    SLOT_SIZE: tl.constexpr = ROW_COUNT * (HEAD_DIM + SLOT_PADDING)
    columns = tl.arange(0, HEAD_DIM_PADDED)[None, :]
    # The host block's threads wrote its partial; others of them read it.
    tl.debug_barrier()
    for first_row in range(0, ROW_COUNT, MERGE_ROWS):
        rows = first_row + tl.arange(0, MERGE_ROWS)
        valid_rows = (rows < ROW_COUNT) & (row_offset + rows < GROUP_SIZE)
        acc, m, l = collect(  # noqa: E741
            host_partials + run * SLOT_SIZE,
            partials,
            run + 1,
            others,
            ROW_COUNT,
            rows,
            valid_rows,
            ONE_EACH,
            HEAD_DIM,
            HEAD_DIM_PADDED,
        )
        out_rows = (row_offset + rows)[:, None]
        mask = valid_rows[:, None] & (columns < HEAD_DIM)
        tl.store(out + out_rows * stride_out_head + columns, (acc / l).to(out.dtype.element_ty), mask=mask)
        tl.store(lse + out_rows + 0 * columns, (m + tl.log2(l)) * 0.6931471805599453, mask=mask & (columns == 0))
    clear(partials, run + 1, others, SLOT_SIZE, SLOT_SIZE_PADDED)


@triton.jit(do_not_specialize=["batch", "kv_heads", "context", "min_tiles_per_cta", "share", "longer"])
def lean_kernel(
    q,  # (batch, q_heads, D)
    k,  # (batch, tokens, kv_heads, D) through strides
    v,
    out,  # (batch, q_heads, D)
    lse,  # (batch, q_heads), fp32
    partials,  # int32, a slot per run, see write_partial; all EMPTY between launches
    host_partials,  # int32, a slot per run
    cache_seqlens,  # (batch,), int32; read when RAGGED
    context,
    batch,
    kv_heads,
    min_tiles_per_cta,  # RAGGED: the share is computed here, from the lengths
    share,  # not RAGGED: LeanTiles of a CTA, and how many CTAs have one more
    longer,
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
    ROW_TILES: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    ROW_COUNT: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    MERGE_ROWS: tl.constexpr,
    ONE_EACH: tl.constexpr,
    SLOT_SIZE_PADDED: tl.constexpr,
    SEQUENCES_AT_ONCE: tl.constexpr,
    RAGGED: tl.constexpr,
    MARKS: tl.constexpr = 0,
    stamps=None,  # see leanbench.kernels.stamps
):
    marks = stamp_start(stamps, MARKS)
    per_sequence = kv_heads * ROW_TILES
    # Runs are dealt from the last to the first, so that a host block waits for CTAs that started before it.
    if RAGGED:
        total = _total_tiles(cache_seqlens, batch, TILE_TOKENS, SEQUENCES_AT_ONCE) * per_sequence
        grid = tl.maximum(1, tl.minimum(tl.num_programs(0), total // min_tiles_per_cta))
        share = total // grid
        longer = total % grid
        run = grid - 1 - tl.program_id(0)
        # A CTA past the grid has no run.
        start = tl.where(run < 0, 0, _start_of(run, share, longer))
        end = tl.where(run < 0, 0, _start_of(run + 1, share, longer))
        sequence, sequence_start = _find_sequence(
            cache_seqlens, batch, per_sequence, start, TILE_TOKENS, SEQUENCES_AT_ONCE
        )
    else:
        tokens, tiles = sequence_tiles(cache_seqlens, 0, context, TILE_TOKENS, RAGGED)
        run = tl.num_programs(0) - 1 - tl.program_id(0)
        start = _start_of(run, share, longer)
        end = _start_of(run + 1, share, longer)

    marks = mark(stamps, marks, BEGIN, 0, MARKS)
    at = start
    while at < end:
        if RAGGED:
            tokens, tiles = sequence_tiles(cache_seqlens, sequence, context, TILE_TOKENS, RAGGED)
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

        kv_head = head_tile // ROW_TILES
        q_head = kv_head * GROUP_SIZE
        row_offset = (head_tile % ROW_TILES) * TILE_ROWS
        local_rows = tl.arange(0, TILE_ROWS)
        rows = row_offset + local_rows
        valid_rows = rows < GROUP_SIZE
        sequence64 = tl.cast(sequence, tl.int64)
        out_base = out + sequence64 * stride_out_batch + q_head * stride_out_head
        lse_base = lse + sequence64 * (kv_heads * GROUP_SIZE) + q_head

        q_rows = load_query(
            q + sequence64 * stride_q_batch + q_head * stride_q_head,
            rows,
            valid_rows,
            stride_q_head,
            HEAD_DIM,
            HEAD_DIM_PADDED,
        )
        acc, m, l = lean_tiles(  # noqa: E741
            q_rows,
            k + sequence64 * stride_k_batch + kv_head * stride_k_head,
            v + sequence64 * stride_v_batch + kv_head * stride_v_head,
            stride_k_token,
            stride_v_token,
            first,
            last,
            tokens,
            qk_scale,
            TILE_ROWS,
            TILE_TOKENS,
            HEAD_DIM,
            HEAD_DIM_PADDED,
            NUM_STAGES,
        )
        if last - first == tiles:
            write_output(acc, m, l, out_base, lse_base, rows, valid_rows, stride_out_head, HEAD_DIM)
            marks = mark(stamps, marks, TILES, output_tile, MARKS)
        elif first > 0:
            # A run has one such part at most, where it starts: its number names the slot.
            write_partial(acc, m, l, partials, run, ROW_COUNT, local_rows, valid_rows, HEAD_DIM)
            marks = mark(stamps, marks, TILES, output_tile, MARKS)
        else:
            # The host block. The other parts belong to the runs after this one, up to the output tile's last LeanTile.
            write_partial(acc, m, l, host_partials, run, ROW_COUNT, local_rows, valid_rows, HEAD_DIM)
            if MARKS > 0:
                marks = mark(stamps, marks, TILES, output_tile, MARKS)
                others = _run_of(tile_start + tiles - 1, share, longer) - run
                wait_for_all(partials, run + 1, others, ROW_COUNT, HEAD_DIM)
                marks = mark(stamps, marks, WAIT, output_tile, MARKS)
            _reduce(
                host_partials,
                partials,
                run,
                _run_of(tile_start + tiles - 1, share, longer) - run,
                out_base,
                lse_base,
                row_offset,
                stride_out_head,
                GROUP_SIZE,
                ROW_COUNT,
                MERGE_ROWS,
                ONE_EACH,
                HEAD_DIM,
                HEAD_DIM_PADDED,
                SLOT_SIZE_PADDED,
            )
            marks = mark(stamps, marks, REDUCTION, output_tile, MARKS)
        at = tile_start + last
        if RAGGED:
            sequence_end = sequence_start + tiles * per_sequence
            if at >= sequence_end:
                sequence += 1
                sequence_start = sequence_end
    stamp_end(stamps, marks, MARKS)


#: Sequences whose lengths a CTA adds up in one step.
_SEQUENCES_AT_ONCE = 128


@dataclass(frozen=True)
class Workspace:
    """Slots for partials. Launches on one stream may share it; launches that run at the same time may not."""

    #: int32, bit patterns of fp32. A launch leaves it as it found it: all EMPTY.
    partials: torch.Tensor
    #: int32: what host blocks keep of their own.
    host_partials: torch.Tensor

    @classmethod
    def on(cls, device: torch.device) -> Workspace:
        halves = torch.full((2, WORKSPACE_BYTES // 8), EMPTY.value, dtype=torch.int32, device=device)
        return cls(halves[0], halves[1])


_workspaces: dict[tuple[torch.device, int], Workspace] = {}
#: One per device, for the next stream that captures a graph: none can be made during the capture.
_spares: dict[torch.device, Workspace] = {}


def workspace_of(device: torch.device) -> Workspace:
    """The workspace of the device's current stream, made on first use.

    Graphs captured on one stream share that stream's workspace, so they must not be replayed at the same time.

    Raises:
        RuntimeError: a graph is captured before any other call.
    """
    on_gpu = device.type == "cuda"
    key = (device, torch.cuda.current_stream(device).cuda_stream if on_gpu else 0)
    if not on_gpu:
        if key not in _workspaces:
            _workspaces[key] = Workspace.on(device)
        return _workspaces[key]
    if torch.cuda.is_current_stream_capturing():
        if key not in _workspaces and device not in _spares:
            raise RuntimeError(
                f"LeanAttention has no workspace on {device} yet, and none can be made while a CUDA graph is captured: "
                "call it once before the capture"
            )
        return _workspaces.get(key) or _workspaces.setdefault(key, _spares.pop(device))
    if key not in _workspaces or device not in _spares:
        _workspaces.setdefault(key, Workspace.on(device))
        _spares.setdefault(device, Workspace.on(device))
        # Other streams will use the spare, whichever comes first.
        torch.cuda.current_stream(device).synchronize()
    return _workspaces[key]


def launches(
    inputs: AttentionInputs, config: KernelConfig, workspace: Workspace | None = None, sms: int | None = None
) -> tuple[TritonLaunch, ...]:
    """The launch of `lean_kernel` over these tensors.

    Args:
        workspace: defaults to that of the current stream.
        sms: the grid is `config.ctas_per_sm` times this; defaults to the device's.
    """
    assert config.ctas_per_sm is not None
    shape = LaunchShape.of(inputs)
    workspace = workspace or workspace_of(inputs.q.device)
    min_tiles_per_cta = config.min_tiles_per_cta or 1
    max_grid = lean_grid_limit(shape.row_count, shape.head_dim, config.ctas_per_sm * (sms or sm_count(inputs.q.device)))
    total = shape.lean_tiles(inputs.context, config.tile_tokens)
    aligned = config.align_grid and inputs.cache_seqlens is None
    grid = stream_k_grid(total, max_grid, min_tiles_per_cta, shape.output_tiles if aligned else 1)
    # With lengths on the device `total` is an upper bound: the kernel leaves CTAs idle where the real lengths need
    # fewer.
    share, longer = divmod(total, grid)
    arguments = (
        inputs.q,
        inputs.k_cache,
        inputs.v_cache,
        inputs.out,
        inputs.lse,
        workspace.partials,
        workspace.host_partials,
        inputs.cache_seqlens,
        inputs.context,
        shape.batch,
        shape.kv_heads,
        min_tiles_per_cta,
        share,
        longer,
        qk_scale(inputs),
        inputs.q.stride(0),
        inputs.q.stride(2),
        *cache_strides(inputs),
        inputs.out.stride(0),
        inputs.out.stride(2),
    )
    merge_rows = merge_rows_at_once(shape.row_count, shape.head_dim, config.num_warps)
    options = {
        **constants(shape, config, inputs.cache_seqlens is not None),
        "ROW_TILES": shape.row_tiles,
        "ROW_COUNT": shape.row_count,
        "NUM_STAGES": config.num_stages,
        "MERGE_ROWS": merge_rows,
        "ONE_EACH": one_number_each(shape.row_count, shape.head_dim, config.num_warps),
        "SLOT_SIZE_PADDED": padded(shape.row_count * (shape.head_dim + PARTIAL_ROW_EXTRA)),
        "SEQUENCES_AT_ONCE": _SEQUENCES_AT_ONCE,
        "num_warps": config.num_warps,
        "maxnreg": registers_per_thread(config.num_warps * config.ctas_per_sm),
    }
    return (TritonLaunch(lean_kernel, grid, arguments, options),)


def prepare(
    inputs: AttentionInputs, config: KernelConfig, workspace: Workspace | None = None, sms: int | None = None
) -> Callable[[], None]:
    """A function that makes the launch; arguments as in `launches`."""
    return run_all(launches(inputs, config, workspace, sms))
