"""A Triton kernel that reads memory and does next to nothing else."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["count", "fewer"])
def read_kernel(a, b, sums, count, fewer, BLOCK: tl.constexpr, ONE_BLOCK: tl.constexpr):
    """Adds up the first `count` 32-bit words of `a` and of `b`, one sum per CTA, so that no read
    can be left out; where `b` has `fewer`, not None, those.
    """
    of_b = count if fewer is None else fewer
    offsets = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int32)
    if ONE_BLOCK:
        at = tl.program_id(0).to(tl.int64) * BLOCK + offsets
        total += tl.load(a + at, mask=at < count, other=0) + tl.load(
            b + at, mask=at < of_b, other=0
        )
    else:
        for start in tl.range(
            tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK, num_stages=3
        ):
            at = start.to(tl.int64) + offsets
            total += tl.load(a + at, mask=at < count, other=0) + tl.load(
                b + at, mask=at < of_b, other=0
            )
    tl.store(sums + tl.program_id(0), tl.sum(total))
