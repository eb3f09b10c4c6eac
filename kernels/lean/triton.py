"""LeanAttention in Triton: stream-K over LeanTiles and the reduction, in one launch.

The schedule is `leanbench.core.decomposition.stream_k`. With the lengths on the device every CTA
computes it for itself.

The reduction is the paper's (Algorithm 2): a CTA whose run starts in the middle of an output tile
stores that part's partial and goes on; the host block, which holds the tile's first LeanTile at the
end of its own run, waits for the other partials, merges them in the order of the context, whoever
came first, and writes the output. So repeats agree bit for bit.

No grid deadlocks, whether or not all CTAs fit the GPU at once: runs are dealt from the last to the
first, a host block only waits for CTAs of lower index, the hardware starts CTAs in the order of
their index (decoupled look-back scans rest on the same), and a CTA stores its first partial before
it waits. The host block empties the slots it has read: a launch finds the workspace as the one
before it did, and the host never clears it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from leanbench.kernels.launch import (
    PARTIAL_ROW_EXTRA,
    LaunchShape,
    TritonLaunch,
    block_table,
    cache_strides,
    constants,
    merge_rows_at_once,
    padded,
    qk_scale,
    registers_per_thread,
    row_strides,
    run_all,
    sm_count,
)
from leanbench.kernels.lean import (
    WORKSPACE_BYTES,
    fixed_run_bytes,
    lean_grid_limit,
    one_number_each,
    partial_bytes,
)
from leanbench.kernels.lean.runs import find_sequence, run_of, start_of, total_tiles
from leanbench.kernels.lean.workspace import reduce, wait_for_all
from leanbench.kernels.stamps import BEGIN, REDUCTION, TILES, WAIT, mark, stamp_end, stamp_start
from leanbench.kernels.tile import (
    EMPTY,
    lean_tiles,
    load_query,
    row_offsets,
    sequence_tiles,
    write_output,
    write_partial,
)

from leanbench.core.decomposition import stream_k_grid

if TYPE_CHECKING:
    from leanbench.core.inputs import AttentionInputs
    from leanbench.core.registry import KernelConfig


@triton.jit(
    do_not_specialize=[
        "stride_table",
        "batch",
        "kv_heads",
        "context",
        "min_tiles_per_cta",
        "share",
        "longer",
    ]
)
def lean_kernel(
    q,  # (batch, Q_LEN, q_heads, D) through strides
    k,  # see lean_tiles
    v,
    out,  # (batch, Q_LEN, q_heads, D) through strides
    lse,  # (batch, q_heads, Q_LEN), fp32
    partials,  # int32, a slot per run, see write_partial; all EMPTY between launches
    host_partials,  # int32, a slot per run; with fixed runs of one part each, `partials` again
    cache_seqlens,  # (batch,), int32; read when RAGGED
    block_table,  # see lean_tiles
    stride_table,
    context,
    batch,
    kv_heads,
    min_tiles_per_cta,  # RAGGED: the share is computed here, from the lengths
    share,  # not RAGGED: LeanTiles of a CTA, and how many CTAs have one more
    longer,
    qk_scale,
    stride_q_batch: tl.int64,
    stride_q_head,
    stride_q_position,
    stride_k_batch: tl.int64,
    stride_k_head: tl.int64,
    stride_k_token,
    stride_v_batch: tl.int64,
    stride_v_head: tl.int64,
    stride_v_token,
    stride_out_batch: tl.int64,
    stride_out_head,
    stride_out_position,
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
    SLOT_SIZE_PADDED: tl.constexpr,
    SEQUENCES_AT_ONCE: tl.constexpr,
    RAGGED: tl.constexpr,
    FIXED_RUN_TILES: tl.constexpr,  # 0: runs are equal shares of all LeanTiles
    MARKS: tl.constexpr = 0,
    stamps=None,  # see leanbench.kernels.stamps
):
    marks = stamp_start(stamps, MARKS)
    per_sequence = kv_heads * ROW_TILES
    # Fixed runs are dealt as LeanTiles of their length would be, one to a CTA: but for the loop
    # over the LeanTiles themselves, what is counted below are then runs.
    UNIT_TOKENS: tl.constexpr = (
        TILE_TOKENS * FIXED_RUN_TILES if FIXED_RUN_TILES > 0 else TILE_TOKENS
    )
    # Runs are dealt from the last to the first, so that a host block waits for CTAs that started
    # before it.
    if RAGGED:
        total = total_tiles(cache_seqlens, batch, UNIT_TOKENS, SEQUENCES_AT_ONCE) * per_sequence
        grid = tl.maximum(1, tl.minimum(tl.num_programs(0), total // min_tiles_per_cta))
        share = total // grid
        longer = total % grid
        run = grid - 1 - tl.program_id(0)
        # A CTA past the grid has no run.
        start = tl.where(run < 0, 0, start_of(run, share, longer))
        end = tl.where(run < 0, 0, start_of(run + 1, share, longer))
        sequence, sequence_start = find_sequence(
            cache_seqlens, batch, per_sequence, start, UNIT_TOKENS, SEQUENCES_AT_ONCE
        )
    else:
        tokens, tiles = sequence_tiles(cache_seqlens, 0, context, UNIT_TOKENS, RAGGED)
        run = tl.num_programs(0) - 1 - tl.program_id(0)
        start = start_of(run, share, longer)
        end = start_of(run + 1, share, longer)

    marks = mark(stamps, marks, BEGIN, 0, MARKS)
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
        out_base = out + sequence64 * stride_out_batch + q_head * stride_out_head
        lse_base = lse + (sequence64 * (kv_heads * GROUP_SIZE) + q_head) * Q_LEN

        q_rows = load_query(
            q + sequence64 * stride_q_batch + q_head * stride_q_head,
            row_offsets(rows, stride_q_head, stride_q_position, GROUP_SIZE, Q_LEN),
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
            sequence64,
            kv_head,
            stride_k_batch,
            stride_k_head,
            stride_k_token,
            stride_v_batch,
            stride_v_head,
            stride_v_token,
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
                row_offsets(rows, stride_out_head, stride_out_position, GROUP_SIZE, Q_LEN),
                row_offsets(rows, Q_LEN, 1, GROUP_SIZE, Q_LEN),
                valid_rows,
                HEAD_DIM,
            )
            marks = mark(stamps, marks, TILES, output_tile, MARKS)
        elif first > 0:
            # A run has one such part at most, where it starts: its number names the slot.
            write_partial(acc, m, l, partials, run, ROW_COUNT, local_rows, valid_rows, HEAD_DIM)
            marks = mark(stamps, marks, TILES, output_tile, MARKS)
        else:
            # The host block. The other parts belong to the runs after this one, up to the output
            # tile's last LeanTile.
            write_partial(
                acc, m, l, host_partials, run, ROW_COUNT, local_rows, valid_rows, HEAD_DIM
            )
            if MARKS > 0:
                marks = mark(stamps, marks, TILES, output_tile, MARKS)
                others = run_of(tile_start + tiles - 1, share, longer) - run
                wait_for_all(partials, run + 1, others, ROW_COUNT, HEAD_DIM)
                marks = mark(stamps, marks, WAIT, output_tile, MARKS)
            reduce(
                host_partials,
                partials,
                run,
                run_of(tile_start + tiles - 1, share, longer) - run,
                out_base,
                lse_base,
                row_offset,
                stride_out_head,
                stride_out_position,
                GROUP_SIZE,
                Q_LEN,
                ROW_COUNT,
                MERGE_ROWS,
                ONE_EACH,
                HEAD_DIM,
                HEAD_DIM_PADDED,
                SLOT_SIZE_PADDED,
                FIXED_RUN_TILES,
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


#: Half of a workspace is the host blocks'.
_PARTIALS_BYTES = WORKSPACE_BYTES // 2


@dataclass(frozen=True, eq=False)
class Workspace:
    """Slots for partials. Launches on one stream may share it; launches that run at the same time
    may not.
    """

    #: int32, bit patterns of fp32. A launch leaves it as it found it: all EMPTY.
    partials: torch.Tensor
    #: int32: what host blocks keep of their own.
    host_partials: torch.Tensor

    @classmethod
    def on(cls, device: torch.device, partials_bytes: int = _PARTIALS_BYTES) -> Workspace:
        """A new one whose `partials` have room for at least that many bytes."""

        def empty(size: int) -> torch.Tensor:
            return torch.full((size // 4,), EMPTY.value, dtype=torch.int32, device=device)

        # Powers of two: a context that grows token by token needs a larger one a few times only.
        size = _PARTIALS_BYTES if partials_bytes <= _PARTIALS_BYTES else padded(partials_bytes)
        return cls(empty(size), empty(_PARTIALS_BYTES))

    def holds(self, partials_bytes: int) -> bool:
        return self.partials.numel() * 4 >= partials_bytes


_workspaces: dict[tuple[torch.device, int], Workspace] = {}
#: One per device, for the next stream that captures a graph: none can be made during the capture.
_spares: dict[torch.device, Workspace] = {}
#: Those that a graph was captured with, which may be replayed when the stream has a larger one.
_captured: set[Workspace] = set()


def workspace_of(device: torch.device, partials_bytes: int = _PARTIALS_BYTES) -> Workspace:
    """The workspace of the device's current stream, made on first use and again where a call needs
    a larger one.

    Graphs captured on one stream share that stream's workspace, so they must not be replayed at the
    same time.

    Args:
        partials_bytes: what its `partials` must have room for.

    Raises:
        RuntimeError: a graph is captured, and no call before it needed a workspace as large.
    """
    if device.type != "cuda":
        found = _workspaces.get((device, 0))
        if found is None or not found.holds(partials_bytes):
            found = _workspaces[device, 0] = Workspace.on(device, partials_bytes)
        return found
    key = (device, torch.cuda.current_stream(device).cuda_stream)
    found, spare = _workspaces.get(key), _spares.get(device)
    own_is_fine = found is not None and found.holds(partials_bytes)
    spare_is_fine = spare is not None and spare.holds(partials_bytes)
    if torch.cuda.is_current_stream_capturing():
        if not own_is_fine:
            if not spare_is_fine:
                size_mb = (partials_bytes + _PARTIALS_BYTES) / 1e6
                raise RuntimeError(
                    f"LeanAttention has no workspace of {size_mb:.0f} MB on {device} yet, and none"
                    " can be made while a CUDA graph is captured: make the same call once before"
                    " the capture"
                )
            _workspaces[key] = _spares.pop(device)
        _captured.add(_workspaces[key])
    elif not (own_is_fine and spare_is_fine):
        if not own_is_fine:
            _workspaces[key] = _new_workspace(device, partials_bytes)
        if not spare_is_fine:
            _spares[device] = _new_workspace(device, partials_bytes)
    return _workspaces[key]


def _new_workspace(device: torch.device, partials_bytes: int) -> Workspace:
    def make() -> Workspace:
        workspace = Workspace.on(device, partials_bytes)
        torch.cuda.current_stream(device).synchronize()
        return workspace

    # What runs on the current stream may still use the workspace that this one takes the place of.
    torch.cuda.current_stream(device).synchronize()
    # In a thread of its own: before torch.compile captures a graph, it lets the calling thread's
    # allocations come from that graph's memory, and refuses one that lives on.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()


def launches(
    inputs: AttentionInputs,
    config: KernelConfig,
    workspace: Workspace | None = None,
    sms: int | None = None,
) -> tuple[TritonLaunch, ...]:
    """The launch of `lean_kernel` over these tensors.

    Args:
        workspace: defaults to that of the current stream.
        sms: the grid is `config.ctas_per_sm` times this, but for fixed runs; defaults to the
            device's.

    Raises:
        UserError: the partials of fixed runs are too many.
        RuntimeError: see workspace_of.
    """
    assert config.ctas_per_sm is not None
    device, shape = inputs.q.device, LaunchShape.of(inputs)
    total = shape.lean_tiles(inputs.context, config.tile_tokens * (config.fixed_run_tiles or 1))
    if config.fixed_run_tiles is None:
        workspace = workspace or workspace_of(device)
        host_partials = workspace.host_partials
        min_tiles_per_cta = config.min_tiles_per_cta or 1
        max_grid = lean_grid_limit(
            shape.row_count, shape.head_dim, config.ctas_per_sm * (sms or sm_count(device))
        )
        aligned = config.align_grid and inputs.cache_seqlens is None
        grid = stream_k_grid(
            total, max_grid, min_tiles_per_cta, shape.output_tiles if aligned else 1
        )
    else:
        partials_bytes = fixed_run_bytes(total, partial_bytes(shape.row_count, shape.head_dim))
        workspace = workspace or workspace_of(device, partials_bytes)
        assert workspace.holds(partials_bytes)
        host_partials = workspace.partials
        min_tiles_per_cta, grid = 1, total
    # With lengths on the device `total` is an upper bound: the kernel leaves CTAs idle where the
    # real lengths need fewer.
    share, longer = divmod(total, grid)
    arguments = (
        inputs.q,
        inputs.k_cache,
        inputs.v_cache,
        inputs.out,
        inputs.lse,
        workspace.partials,
        host_partials,
        inputs.cache_seqlens,
        *block_table(inputs),
        inputs.context,
        shape.batch,
        shape.kv_heads,
        min_tiles_per_cta,
        share,
        longer,
        qk_scale(inputs),
        *row_strides(inputs.q),
        *cache_strides(inputs),
        *row_strides(inputs.out),
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
        "SLOT_SIZE_PADDED": padded(shape.row_count * (shape.head_dim + PARTIAL_ROW_EXTRA)),
        "FIXED_RUN_TILES": config.fixed_run_tiles or 0,
        "SEQUENCES_AT_ONCE": _SEQUENCES_AT_ONCE,
        "num_warps": config.num_warps,
        "maxnreg": registers_per_thread(config.num_warps * config.ctas_per_sm),
    }
    return (TritonLaunch(lean_kernel, grid, arguments, options),)


def prepare(
    inputs: AttentionInputs,
    config: KernelConfig,
    workspace: Workspace | None = None,
    sms: int | None = None,
) -> Callable[[], None]:
    """A function that makes the launch; arguments as in `launches`."""
    return run_all(launches(inputs, config, workspace, sms))
