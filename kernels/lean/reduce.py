"""The reduction of an output tile's partials, which CTAs of the same launch store in the partials
workspace while others wait for them.

A partial's slot is full of `EMPTY` until its numbers arrive, each 4-byte number arrives whole, and
no number has the bits of `EMPTY`: whoever reads anything else has the number. So no fence and no
flag stand between the store and the read; a partial costs one trip to the L2 and back, where a
fence, a flag and a read would cost three.
"""

import triton
import triton.language as tl
from leanbench.kernels.tile import EMPTY, INTERPRETED, SLOT_PADDING, row_offsets


def _wait_ptx(pointers: int, count: int) -> str:
    """PTX that reads, at each of `pointers`, up to `count` numbers a stride apart, until none of
    them is EMPTY.

    Operands: `count` outputs for each pointer, the pointers, the stride in bytes, and how many of
    the `count` there are. The loop is each thread's own: threads that hold the same element wait
    for their own copies of it, which a reduction over the tensor would not see. All reads of a
    round are in flight together.
    """
    outputs = pointers * count
    stride, present = f"${outputs + pointers}", f"${outputs + pointers + 1}"
    lines = [
        "{",
        f".reg .pred has<{count}>;",
        f".reg .b64 step<{count}>;",
        ".reg .b64 at;",
        ".reg .pred again;",
    ]
    for i in range(count):
        lines += [f"setp.gt.s32 has{i}, {present}, {i};", f"mul.wide.s32 step{i}, {stride}, {i};"]
    lines += [f"mov.b32 ${output}, 0;" for output in range(outputs)]
    lines.append("poll:")
    for output in range(outputs):
        pointer, i = divmod(output, count)
        lines += [
            f"add.s64 at, ${outputs + pointer}, step{i};",
            f"@has{i} ld.relaxed.gpu.global.b32 ${output}, [at];",
        ]
    lines.append("setp.eq.s32 again, $0, -1;")
    lines += [f"setp.eq.or.s32 again, ${output}, -1, again;" for output in range(1, outputs)]
    lines += ["@again bra poll;", "}"]
    return "\n".join(lines)


def _constraints(pointers: int, count: int) -> str:
    return ",".join(["=&r"] * pointers * count + ["l"] * pointers + ["r", "r"])


_WAIT_ROWS = tl.constexpr(_wait_ptx(2, 8))
_WAIT_ROWS_CONSTRAINTS = tl.constexpr(_constraints(2, 8))
_WAIT_LOGS = tl.constexpr(_wait_ptx(1, 16))
_WAIT_LOGS_CONSTRAINTS = tl.constexpr(_constraints(1, 16))
_SIXTEEN = tl.constexpr((tl.int32,) * 16)
#: Reads a number again that had not arrived yet.
_SETTLE = tl.constexpr(
    """{
    .reg .pred again;
    mov.b32 $0, $2;
    setp.eq.s32 again, $0, -1;
    @!again bra done;
    poll:
    ld.relaxed.gpu.global.b32 $0, [$1];
    setp.eq.s32 again, $0, -1;
    @again bra poll;
    done:
    }"""
)


@triton.jit
def _wait_rows(acc_pointers, log_pointers, stride, present):
    """16 tensors: the numbers of up to 8 partials, then their logarithms; 0 from partial `present`
    on.
    """
    if INTERPRETED:
        # Programs run one after the other there: what is waited for has been written.
        numbers = _load_8(acc_pointers, stride, present) + _load_8(log_pointers, stride, present)
    else:
        numbers = tl.inline_asm_elementwise(
            _WAIT_ROWS,
            _WAIT_ROWS_CONSTRAINTS,
            [acc_pointers, log_pointers, stride * 4, present],
            dtype=_SIXTEEN,
            is_pure=False,
            pack=1,
        )
    return numbers


@triton.jit
def _wait_logs(log_pointers, stride, present):
    """16 tensors: the logarithms of up to 16 partials; 0 from partial `present` on."""
    if INTERPRETED:
        logs = _load_16(log_pointers, stride, present)
    else:
        logs = tl.inline_asm_elementwise(
            _WAIT_LOGS,
            _WAIT_LOGS_CONSTRAINTS,
            [log_pointers, stride * 4, present],
            dtype=_SIXTEEN,
            is_pure=False,
            pack=1,
        )
    return logs


@triton.jit
def _settle(numbers, pointers):
    """`numbers`, those that were still EMPTY read again until they are there."""
    if not INTERPRETED:
        numbers = tl.inline_asm_elementwise(
            _SETTLE, "=&r,l,r", [pointers, numbers], dtype=tl.int32, is_pure=False, pack=1
        )
    return numbers


@triton.jit
def _load_8(pointers, stride, present):
    if INTERPRETED:
        # Triton 3.9's interpreter takes no mask of one number with a block of pointers.
        present = tl.zeros(pointers.shape, tl.int32) + present
    # .cg reads the L2, which all SMs share; an L1 would answer with what it saw first.
    return (
        tl.load(pointers, mask=present > 0, other=0, cache_modifier=".cg"),
        tl.load(pointers + stride, mask=present > 1, other=0, cache_modifier=".cg"),
        tl.load(pointers + stride * 2, mask=present > 2, other=0, cache_modifier=".cg"),
        tl.load(pointers + stride * 3, mask=present > 3, other=0, cache_modifier=".cg"),
        tl.load(pointers + stride * 4, mask=present > 4, other=0, cache_modifier=".cg"),
        tl.load(pointers + stride * 5, mask=present > 5, other=0, cache_modifier=".cg"),
        tl.load(pointers + stride * 6, mask=present > 6, other=0, cache_modifier=".cg"),
        tl.load(pointers + stride * 7, mask=present > 7, other=0, cache_modifier=".cg"),
    )


@triton.jit
def _load_16(pointers, stride, present):
    return _load_8(pointers, stride, present) + _load_8(pointers + stride * 8, stride, present - 8)


@triton.jit
def _log(bits, is_there):
    """A partial's logarithm, -inf where there is no partial."""
    return tl.where(is_there, bits.to(tl.float32, bitcast=True), float("-inf"))


@triton.jit
def gather_partials(
    own,  # the host block's partial
    partials,
    first_slot,  # of the other parts, in consecutive slots
    count,
    row_count,
    rows,
    valid_rows,
    ONE_EACH: tl.constexpr,  # a thread holds one number of these rows
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
):
    """Waits for the `count` other partials of an output tile and merges them to the host block's,
    always in this order.

    Returns (acc, m, l), each (R, DP); m and l repeat along the columns. With one number a thread,
    each waits for its own and its row's logarithm at once and no thread depends on another: in so
    small a merge a barrier costs more than the arithmetic. With more, waits of one thread would
    queue up: it waits for the logarithms, which are stored last, and then finds the numbers there.
    """
    columns = tl.arange(0, HEAD_DIM_PADDED)
    stride = row_count * (HEAD_DIM + SLOT_PADDING)
    # Rows and columns that are padding read what a valid one does.
    row = tl.where(valid_rows, rows, 0)
    acc_offsets = row[:, None] * HEAD_DIM + (columns % HEAD_DIM)[None, :]
    if HEAD_DIM == HEAD_DIM_PADDED:
        acc_offsets = row[:, None] * HEAD_DIM + columns[None, :]
    row_logs = row_count * HEAD_DIM + row
    acc = tl.load(own + acc_offsets, cache_modifier=".cg").to(tl.float32, bitcast=True)
    if ONE_EACH:
        log_offsets = row_logs[:, None] + tl.zeros_like(columns)[None, :]
        m = tl.load(own + log_offsets, cache_modifier=".cg").to(tl.float32, bitcast=True)
        l = tl.full((rows.shape[0], HEAD_DIM_PADDED), 1.0, tl.float32)  # noqa: E741
        for first in range(0, count, 8):
            present = count - first
            base = partials + (first_slot + first) * stride
            numbers = _wait_rows(base + acc_offsets, base + log_offsets, stride, present)
            m_new = m
            for i in tl.static_range(8):
                m_new = tl.maximum(m_new, _log(numbers[8 + i], i < present))
            rescale = tl.exp2(m - m_new)
            acc = acc * rescale
            l = l * rescale  # noqa: E741
            for i in tl.static_range(8):
                weight = tl.exp2(_log(numbers[8 + i], i < present) - m_new)
                acc += numbers[i].to(tl.float32, bitcast=True) * weight
                l += weight  # noqa: E741
            m = m_new
        return acc, m, l
    m_row = tl.load(own + row_logs, cache_modifier=".cg").to(tl.float32, bitcast=True)
    l_row = tl.full((rows.shape[0],), 1.0, tl.float32)
    for first in range(0, count, 16):
        present = count - first
        base = partials + (first_slot + first) * stride
        # A partial's logarithms are stored last: where they have arrived, the rest nearly always
        # has.
        logs = _wait_logs(base + row_logs, stride, present)
        parts = _load_16(base + acc_offsets, stride, present)
        m_new = m_row
        for i in tl.static_range(16):
            m_new = tl.maximum(m_new, _log(logs[i], i < present))
        rescale = tl.exp2(m_row - m_new)
        acc = acc * rescale[:, None]
        l_row = l_row * rescale
        for i in tl.static_range(16):
            weight = tl.exp2(_log(logs[i], i < present) - m_new)
            acc += (
                _settle(parts[i], base + (acc_offsets + i * stride)).to(tl.float32, bitcast=True)
                * weight[:, None]
            )
            l_row += weight
        m_row = m_new
    return (
        acc,
        tl.broadcast_to(m_row[:, None], acc.shape),
        tl.broadcast_to(l_row[:, None], acc.shape),
    )


@triton.jit
def wait_for_all(partials, first_slot, count, row_count, HEAD_DIM: tl.constexpr):
    """Waits for `count` partials at once and merges none: what shows a traced build's wait apart
    from its merge.
    """
    if not INTERPRETED:
        stride = row_count * (HEAD_DIM + SLOT_PADDING)
        for first in range(0, count, 128):
            slots = first_slot + tl.minimum(first + tl.arange(0, 128), count - 1)
            # A partial's logarithms are stored last.
            _settle(
                tl.full((128,), EMPTY, tl.int32), partials + (slots * stride + row_count * HEAD_DIM)
            )


@triton.jit
def clear_partials(
    partials, first_slot, count, SLOT_SIZE: tl.constexpr, SLOT_SIZE_PADDED: tl.constexpr
):
    """Empties `count` slots for the next launch."""
    # Threads that hold the same element may still be waiting for it.
    tl.debug_barrier()
    numbers = tl.arange(0, SLOT_SIZE_PADDED)
    for slot in range(first_slot, first_slot + count):
        tl.store(partials + slot * SLOT_SIZE + numbers, EMPTY, mask=numbers < SLOT_SIZE)


@triton.jit
def reduce_partials(
    host_partials,
    partials,
    work_range,
    others,  # parts of the output tile besides the host block's
    out,
    lse,
    row_offset,
    out_strides,  # (batch, head, query position)
    GROUP_SIZE: tl.constexpr,
    Q_LEN: tl.constexpr,
    ROW_COUNT: tl.constexpr,
    MERGE_ROWS: tl.constexpr,
    ONE_EACH: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    SLOT_SIZE_PADDED: tl.constexpr,
    FIXED_RUN_TILES: tl.constexpr,
):
    """Merges an output tile's partials and writes its rows.

    Every row has a finite logarithm in the host block's partial: one that sees no token belongs to
    a context shorter than Q_LEN, which is one LeanTile and needs no merge.
    """
    SLOT_SIZE: tl.constexpr = ROW_COUNT * (HEAD_DIM + SLOT_PADDING)
    columns = tl.arange(0, HEAD_DIM_PADDED)[None, :]
    # The host block's threads wrote its partial; others of them read it.
    tl.debug_barrier()
    for first_row in range(0, ROW_COUNT, MERGE_ROWS):
        rows = first_row + tl.arange(0, MERGE_ROWS)
        valid_rows = (rows < ROW_COUNT) & (row_offset + rows < GROUP_SIZE * Q_LEN)
        acc, m, l = gather_partials(  # noqa: E741
            host_partials + work_range * SLOT_SIZE,
            partials,
            work_range + 1,
            others,
            ROW_COUNT,
            rows,
            valid_rows,
            ONE_EACH,
            HEAD_DIM,
            HEAD_DIM_PADDED,
        )
        out_rows = row_offsets(
            row_offset + rows, out_strides[1], out_strides[2], GROUP_SIZE, Q_LEN
        )[:, None]
        lse_rows = row_offsets(row_offset + rows, Q_LEN, 1, GROUP_SIZE, Q_LEN)[:, None]
        mask = valid_rows[:, None] & (columns < HEAD_DIM)
        tl.store(out + out_rows + columns, (acc / l).to(out.dtype.element_ty), mask=mask)
        tl.store(
            lse + lse_rows + 0 * columns,
            (m + tl.log2(l)) * 0.6931471805599453,
            mask=mask & (columns == 0),
        )
    if FIXED_RUN_TILES > 0:
        # The host block's own partial is in its work range's slot.
        clear_partials(partials, work_range, others + 1, SLOT_SIZE, SLOT_SIZE_PADDED)
    else:
        clear_partials(partials, work_range + 1, others, SLOT_SIZE, SLOT_SIZE_PADDED)
