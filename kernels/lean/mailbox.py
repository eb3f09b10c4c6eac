"""How a CTA hands a partial to another CTA of the same launch that is waiting for it.

A partial's slot is full of `EMPTY` until its numbers arrive, each 4-byte number arrives whole, and no number has the bits of
`EMPTY`: whoever reads anything else has the number. So no fence and no flag stand between the store and the read; a store
that is read costs one trip to the L2 and back, where a fence, a flag and a read would cost three.
"""

import os

import triton
import triton.language as tl
from leanbench.kernels.tile import EMPTY, SLOT_PADDING

_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")

#: Partials that one wait collects.
AT_ONCE = tl.constexpr(8)


def _wait_ptx(count: int) -> str:
    """PTX that reads up to `count` numbers, a stride apart, over and over until none of them is EMPTY.

    A loop per thread: threads that hold the same element each wait for their own copy, which a reduction over the tensor
    would not see.
    """
    lines = ["{", ".reg .pred has<%d>;" % count, ".reg .b64 at<%d>;" % count, ".reg .pred again;"]
    pointer, stride, present = (f"${count + operand}" for operand in range(3))
    for i in range(count):
        lines += [
            f"setp.gt.s32 has{i}, {present}, {i};",
            f"mad.wide.s32 at{i}, {stride}, {i}, {pointer};",
            f"mov.b32 ${i}, 0;",
        ]
    lines.append("poll:")
    lines += [f"@has{i} ld.relaxed.gpu.global.b32 ${i}, [at{i}];" for i in range(count)]
    lines.append("setp.eq.s32 again, $0, -1;")
    lines += [f"setp.eq.or.s32 again, ${i}, -1, again;" for i in range(1, count)]
    lines += ["@again bra poll;", "}"]
    return "\n".join(lines)


_WAIT_PTX = tl.constexpr(_wait_ptx(AT_ONCE.value))
_WAIT_CONSTRAINTS = tl.constexpr(",".join(["=&r"] * AT_ONCE.value + ["l", "r", "r"]))


@triton.jit
def _wait(pointers, stride, present):
    """Eight tensors: the numbers at `pointers`, `stride` and so on further; 0 past `present`."""
    if _INTERPRETED:
        # Programs run one after the other there: what is waited for has been written.
        return (
            tl.load(pointers, mask=present > 0, other=0),
            tl.load(pointers + stride, mask=present > 1, other=0),
            tl.load(pointers + 2 * stride, mask=present > 2, other=0),
            tl.load(pointers + 3 * stride, mask=present > 3, other=0),
            tl.load(pointers + 4 * stride, mask=present > 4, other=0),
            tl.load(pointers + 5 * stride, mask=present > 5, other=0),
            tl.load(pointers + 6 * stride, mask=present > 6, other=0),
            tl.load(pointers + 7 * stride, mask=present > 7, other=0),
        )
    return tl.inline_asm_elementwise(
        _WAIT_PTX,
        _WAIT_CONSTRAINTS,
        [pointers, stride * 4, present],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=False,
        pack=1,
    )


@triton.jit
def collect(
    own,  # the host block's partial
    partials,
    first_slot,  # of the other parts, in consecutive slots
    count,
    row_count,
    rows,
    valid_rows,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
):
    """Waits for the `count` other partials of an output tile and merges them to the host block's, always in this order.

    Returns (acc, m, l), each (R, DP): m and l repeat along the columns, so that no thread depends on another.
    """
    columns = tl.arange(0, HEAD_DIM_PADDED)
    stride = row_count * (HEAD_DIM + SLOT_PADDING)
    # Rows and columns that are padding wait for, and compute, what a valid neighbour does.
    row = tl.where(valid_rows, rows, 0)[:, None]
    acc_offsets = row * HEAD_DIM + tl.minimum(columns, HEAD_DIM - 1)[None, :]
    log_offsets = row_count * HEAD_DIM + row + tl.zeros_like(columns)[None, :]
    acc = tl.load(own + acc_offsets, cache_modifier=".cg").to(tl.float32, bitcast=True)
    m = tl.load(own + log_offsets, cache_modifier=".cg").to(tl.float32, bitcast=True)
    l = tl.full((rows.shape[0], HEAD_DIM_PADDED), 1.0, tl.float32)  # noqa: E741
    for first in range(0, count, AT_ONCE):
        base = partials + (first_slot + first) * stride
        logs = _wait(base + log_offsets, stride, count - first)
        parts = _wait(base + acc_offsets, stride, count - first)
        for i in tl.static_range(AT_ONCE):
            log = tl.where(i < count - first, logs[i].to(tl.float32, bitcast=True), float("-inf"))
            m_new = tl.maximum(m, log)
            rescale = tl.exp2(m - m_new)
            weight = tl.exp2(log - m_new)
            l = l * rescale + weight  # noqa: E741
            acc = acc * rescale + parts[i].to(tl.float32, bitcast=True) * weight
            m = m_new
    return acc, m, l


@triton.jit
def clear(partials, first_slot, count, SLOT_SIZE: tl.constexpr, SLOT_SIZE_PADDED: tl.constexpr):
    """Empties `count` slots for the next launch."""
    # Threads that hold the same element may still be waiting for it.
    tl.debug_barrier()
    numbers = tl.arange(0, SLOT_SIZE_PADDED)
    for slot in range(first_slot, first_slot + count):
        tl.store(partials + slot * SLOT_SIZE + numbers, EMPTY, mask=numbers < SLOT_SIZE)
