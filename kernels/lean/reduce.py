"""Reduction of an output tile's partials: CTAs store them in the partials workspace while other
CTAs of the same launch wait for them.

A number of a partial is 8 bytes: the bits of an fp32 and the epoch, unique to the launch. Both
arrive together, so a reader that sees the epoch has the number. Earlier contents of a slot have
other epochs and are never mistaken for it. Store and read need neither fence nor flag: a partial
costs one trip to the L2 and back instead of three for a fence, a flag and a read.
"""

import triton
import triton.language as tl
from leanbench.kernels.tile import INTERPRETED, SLOT_PADDING, row_offsets


def _wait_ptx(pointers: int, count: int) -> str:
    """Return PTX that polls up to `count` numbers at each of `pointers` until all have the epoch.

    Operands: `count` outputs per pointer, the pointers, their stride in bytes, the number present
    out of `count`, and the epoch. Each thread loops on its own: threads with the same element wait
    for their own copies, which a reduction over the tensor would miss. All reads of a round are in
    flight together.
    """
    outputs = pointers * count
    stride, present, epoch = [f"${outputs + pointers + i}" for i in range(3)]
    lines = [
        "{",
        f".reg .pred has<{count}>;",
        f".reg .b64 step<{count}>;",
        f".reg .b64 number<{outputs}>;",
        ".reg .b64 at;",
        ".reg .b32 tag;",
        ".reg .pred again;",
    ]
    for i in range(count):
        lines += [f"setp.gt.s32 has{i}, {present}, {i};", f"mul.wide.s32 step{i}, {stride}, {i};"]
    lines += [f"mov.b64 number{output}, {{0, {epoch}}};" for output in range(outputs)]
    lines.append("poll:")
    for output in range(outputs):
        pointer, i = divmod(output, count)
        lines += [
            f"add.s64 at, ${outputs + pointer}, step{i};",
            f"@has{i} ld.relaxed.gpu.global.b64 number{output}, [at];",
        ]
    lines.append("setp.ne.s32 again, 0, 0;")
    for output in range(outputs):
        lines += [
            f"mov.b64 {{${output}, tag}}, number{output};",
            f"setp.ne.or.s32 again, tag, {epoch}, again;",
        ]
    lines += ["@again bra poll;", "}"]
    return "\n".join(lines)


def _constraints(pointers: int, count: int) -> str:
    return ",".join(["=&r"] * pointers * count + ["l"] * pointers + ["r"] * 3)


_WAIT_ROWS = tl.constexpr(_wait_ptx(2, 8))
_WAIT_ROWS_CONSTRAINTS = tl.constexpr(_constraints(2, 8))
_WAIT_MAXIMA = tl.constexpr(_wait_ptx(1, 16))
_WAIT_MAXIMA_CONSTRAINTS = tl.constexpr(_constraints(1, 16))
_SIXTEEN = tl.constexpr((tl.int32,) * 16)
#: Rereads a number until it has arrived.
_SETTLE = tl.constexpr(
    """{
    .reg .b64 number;
    .reg .b32 tag;
    .reg .pred again;
    mov.b64 {$0, tag}, $2;
    setp.ne.s32 again, tag, $3;
    @!again bra done;
    poll:
    ld.relaxed.gpu.global.b64 number, [$1];
    mov.b64 {$0, tag}, number;
    setp.ne.s32 again, tag, $3;
    @again bra poll;
    done:
    }"""
)


@triton.jit
def _value(number):
    """Return the bits of the fp32 in a slot's number."""
    return number.to(tl.int32)


@triton.jit
def _wait_rows(acc_pointers, max_pointers, stride, present, epoch):
    """Return 16 tensors: the numbers of up to 8 partials, then their maxima.

    They are 0 from partial `present` on.
    """
    if INTERPRETED:
        # The interpreter runs programs sequentially, so all partials have been written.
        numbers = _values_8(acc_pointers, stride, present) + _values_8(
            max_pointers, stride, present
        )
    else:
        numbers = tl.inline_asm_elementwise(
            _WAIT_ROWS,
            _WAIT_ROWS_CONSTRAINTS,
            [acc_pointers, max_pointers, stride * 8, present, epoch],
            dtype=_SIXTEEN,
            is_pure=False,
            pack=1,
        )
    return numbers


@triton.jit
def _wait_maxima(max_pointers, stride, present, epoch):
    """Return 16 tensors: the maxima of up to 16 partials, 0 from partial `present` on."""
    if INTERPRETED:
        maxima = _values_8(max_pointers, stride, present) + _values_8(
            max_pointers + stride * 8, stride, present - 8
        )
    else:
        maxima = tl.inline_asm_elementwise(
            _WAIT_MAXIMA,
            _WAIT_MAXIMA_CONSTRAINTS,
            [max_pointers, stride * 8, present, epoch],
            dtype=_SIXTEEN,
            is_pure=False,
            pack=1,
        )
    return maxima


@triton.jit
def _settle(numbers, pointers, is_there, epoch):
    """Return the values of `numbers`, rereading those yet to arrive; 0 outside `is_there`."""
    if INTERPRETED:
        values = _value(numbers)
    else:
        numbers = tl.where(is_there, numbers, epoch.to(tl.int64) << 32)
        values = tl.inline_asm_elementwise(
            _SETTLE, "=&r,l,l,r", [pointers, numbers, epoch], dtype=tl.int32, is_pure=False, pack=1
        )
    return values


@triton.jit
def _values_8(pointers, stride, present):
    loaded = _load_8(pointers, stride, present)
    return (
        _value(loaded[0]),
        _value(loaded[1]),
        _value(loaded[2]),
        _value(loaded[3]),
        _value(loaded[4]),
        _value(loaded[5]),
        _value(loaded[6]),
        _value(loaded[7]),
    )


@triton.jit
def _load_8(pointers, stride, present):
    if INTERPRETED:
        # Triton's interpreter does not accept a scalar mask with a block of pointers.
        present = tl.zeros(pointers.shape, tl.int32) + present
    # .cg reads the L2, shared by all SMs. An L1 would return stale numbers.
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
def _maximum(bits, is_there):
    """Return a partial's maximum, -inf outside `is_there`."""
    return tl.where(is_there, bits.to(tl.float32, bitcast=True), float("-inf"))


@triton.jit
def gather_partials(
    own,  # the host block's partial
    partials,
    first_slot,  # of the other parts, in consecutive slots
    count,
    epoch,
    row_count,
    rows,
    valid_rows,
    ONE_EACH: tl.constexpr,  # a thread holds one number of these rows
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
):
    """Wait for the `count` other partials of an output tile and merge them into the host block's.

    The order is fixed. Returns (acc, m, l), each (R, DP); m and l repeat along the columns. With
    one number per thread, each waits for its number and its row's maximum at once and depends on
    no other thread: a barrier would cost more than the arithmetic of so small a merge. With more
    numbers, the waits of a thread would queue up. It waits for the maxima, which are stored
    last, and then finds the numbers.
    """
    columns = tl.arange(0, HEAD_DIM_PADDED)
    stride = row_count * (HEAD_DIM + SLOT_PADDING)
    # Padding rows and columns read a valid element.
    row = tl.where(valid_rows, rows, 0)
    acc_offsets = row[:, None] * HEAD_DIM + (columns % HEAD_DIM)[None, :]
    if HEAD_DIM == HEAD_DIM_PADDED:
        acc_offsets = row[:, None] * HEAD_DIM + columns[None, :]
    row_sums = row_count * HEAD_DIM + row
    row_maxima = row_sums + row_count
    acc = _value(tl.load(own + acc_offsets, cache_modifier=".cg")).to(tl.float32, bitcast=True)
    if ONE_EACH:
        max_offsets = row_maxima[:, None] + tl.zeros_like(columns)[None, :]
        m = _value(tl.load(own + max_offsets, cache_modifier=".cg")).to(tl.float32, bitcast=True)
        sum_offsets = max_offsets - row_count
        l = _value(tl.load(own + sum_offsets, cache_modifier=".cg")).to(tl.float32, bitcast=True)  # noqa: E741
        for first in range(0, count, 8):
            present = count - first
            base = partials + (first_slot + first) * stride
            # In flight together with the numbers that are waited for.
            sums = _load_8(base + sum_offsets, stride, present)
            numbers = _wait_rows(base + acc_offsets, base + max_offsets, stride, present, epoch)
            m_new = m
            for i in tl.static_range(8):
                m_new = tl.maximum(m_new, _maximum(numbers[8 + i], i < present))
            rescale = tl.exp2(m - m_new)
            acc = acc * rescale
            l = l * rescale  # noqa: E741
            for i in tl.static_range(8):
                weight = tl.exp2(_maximum(numbers[8 + i], i < present) - m_new)
                own_sum = _settle(sums[i], base + (sum_offsets + i * stride), i < present, epoch)
                acc += numbers[i].to(tl.float32, bitcast=True) * weight
                l += own_sum.to(tl.float32, bitcast=True) * weight  # noqa: E741
            m = m_new
        return acc, m, l
    m_row = _value(tl.load(own + row_maxima, cache_modifier=".cg")).to(tl.float32, bitcast=True)
    l_row = _value(tl.load(own + row_sums, cache_modifier=".cg")).to(tl.float32, bitcast=True)
    for first in range(0, count, 16):
        present = count - first
        base = partials + (first_slot + first) * stride
        # A partial's maxima are stored last. Once they arrive, the rest nearly always has, too.
        maxima = _wait_maxima(base + row_maxima, stride, present, epoch)
        m_new = m_row
        for i in tl.static_range(16):
            m_new = tl.maximum(m_new, _maximum(maxima[i], i < present))
        rescale = tl.exp2(m_row - m_new)
        acc = acc * rescale[:, None]
        l_row = l_row * rescale
        # 8 at a time: 16 numbers of 8 bytes per element do not fit the registers.
        for half in tl.static_range(2):
            pointers = base + (acc_offsets + half * 8 * stride)
            parts = _load_8(pointers, stride, present - half * 8)
            sum_pointers = base + (row_sums + half * 8 * stride)
            sums = _load_8(sum_pointers, stride, present - half * 8)
            for i in tl.static_range(8):
                is_there = half * 8 + i < present
                weight = tl.exp2(_maximum(maxima[half * 8 + i], is_there) - m_new)
                part = _settle(parts[i], pointers + i * stride, is_there, epoch)
                own_sum = _settle(sums[i], sum_pointers + i * stride, is_there, epoch)
                acc += part.to(tl.float32, bitcast=True) * weight[:, None]
                l_row += own_sum.to(tl.float32, bitcast=True) * weight
        m_row = m_new
    return (
        acc,
        tl.broadcast_to(m_row[:, None], acc.shape),
        tl.broadcast_to(l_row[:, None], acc.shape),
    )


@triton.jit
def wait_for_all(partials, first_slot, count, epoch, row_count, HEAD_DIM: tl.constexpr):
    """Wait for `count` partials at once without merging.

    A traced build uses it to show the wait separately from the merge.
    """
    if not INTERPRETED:
        stride = row_count * (HEAD_DIM + SLOT_PADDING)
        for first in range(0, count, 128):
            slots = first_slot + tl.minimum(first + tl.arange(0, 128), count - 1)
            # A partial's maxima are stored last. The initial epoch matches no number.
            _settle(
                tl.full((128,), 0, tl.int64) + ((epoch.to(tl.int64) + 1) << 32),
                partials + (slots * stride + row_count * (HEAD_DIM + 1)),
                slots >= first_slot,
                epoch,
            )


@triton.jit
def reduce_partials(
    host_partials,
    partials,
    work_range,
    others,  # parts of the output tile in addition to the host block's
    epoch,
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
):
    """Merge an output tile's partials and write its rows.

    Every row has a finite maximum in the host block's partial. A row that sees no token belongs
    to a context shorter than Q_LEN, which is a single LeanTile and needs no merge.
    """
    SLOT_SIZE: tl.constexpr = ROW_COUNT * (HEAD_DIM + SLOT_PADDING)
    columns = tl.arange(0, HEAD_DIM_PADDED)[None, :]
    # Other threads of the host block read the partial written by its threads.
    tl.debug_barrier()
    for first_row in range(0, ROW_COUNT, MERGE_ROWS):
        rows = first_row + tl.arange(0, MERGE_ROWS)
        valid_rows = (rows < ROW_COUNT) & (row_offset + rows < GROUP_SIZE * Q_LEN)
        acc, m, l = gather_partials(  # noqa: E741
            host_partials + work_range * SLOT_SIZE,
            partials,
            work_range + 1,
            others,
            epoch,
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
