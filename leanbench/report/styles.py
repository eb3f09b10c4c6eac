"""Styles of kernels and runs in pictures: colours and marks."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

#: Wong's colour-blind-safe set, darkened where needed for a contrast of 3:1 on white and on the
#: dark page alike.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#B85C93", "#A67C00", "#7B6FD0", "#8C7468", "#2E93A8")
#: `report_plot.js` draws them.
MARKS: tuple[str, ...] = (
    "circle",
    "square",
    "diamond",
    "triangle-up",
    "triangle-down",
    "pentagon",
    "cross",
    "star",
)
#: Colours that never change, whatever else runs.
FIXED = {
    name: index for index, name in enumerate(("lean", "fa2", "fixed_split", "cudnn", "flashinfer"))
}


def kernel_styles(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Colour and mark of each kernel.

    The known ones are fixed; another takes the entry its name hashes to, or the next one that is
    free in this run.
    """
    taken: dict[str, int] = {name: FIXED[name] for name in names if name in FIXED}
    for name in sorted(set(names) - set(FIXED)):
        start = zlib.crc32(name.encode())
        candidates = [(start + step) % len(PALETTE) for step in range(len(PALETTE))]
        free = [index for index in candidates if index not in taken.values()]
        # The first entries belong to lean, fa2 and fixed_split even when those did not run.
        free = [index for index in free if index > 2] or free or candidates
        taken[name] = free[0]
    return {name: (PALETTE[taken[name]], MARKS[taken[name]]) for name in names}
