"""Ragged batches: context lengths as a server sees them, a few long and many short."""

from __future__ import annotations

import random

from leanbench.core.errors import UserError

#: Lengths are spread log-uniformly over this factor before they are scaled to the mean.
SPREAD = 64
#: Sequences of a ragged batch; the lengths of each are found by bisection.
MAX_SEQUENCES = 4096


def ragged_contexts(batch: int, longest: int, mean_over_max: float) -> tuple[int, ...]:
    """`batch` context lengths of which one is `longest` and whose mean is `mean_over_max` x
    `longest`.

    One sequence has the longest context. The others are log-uniform over a factor of SPREAD,
    scaled by one factor that brings the mean to its target, clipped to 1..longest and rounded (so
    the mean is met to within one token). The draw depends on the arguments alone: the same cell is
    the same problem in every sweep.

    Raises:
        UserError: the longest sequence alone exceeds the mean, or there are more than
            MAX_SEQUENCES.
    """
    if batch > MAX_SEQUENCES:
        raise UserError(
            f"batch {batch} is above the limit of {MAX_SEQUENCES} for ragged batches: choose a"
            " smaller one"
        )
    if mean_over_max * batch <= 1:
        raise UserError(
            f"ragged {mean_over_max:g} with batch {batch} cannot be: one sequence at the full"
            f" context alone has a mean of 1/{batch} of it, choose ragged above {1 / batch:.3g} or"
            f" a batch above {1 / mean_over_max:g}"
        )
    # random.Random keeps its sequence from one Python version to the next, so a resumed run finds
    # its cells again.
    draw = random.Random(f"{batch} {longest} {mean_over_max!r}")
    weights = [SPREAD ** (draw.random() - 1) for _ in range(batch - 1)]
    target = mean_over_max * batch * longest - longest

    def clipped(scale: float) -> list[float]:
        return [min(longest, max(1.0, scale * weight)) for weight in weights]

    # The sum grows with the scale; at the upper end every length is clipped to the longest.
    low, high = 0.0, float(longest) * SPREAD
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(clipped(middle)) < target else (low, middle)
    lengths = [round(length) for length in clipped(high)]
    lengths.insert(draw.randrange(batch), longest)
    return tuple(lengths)
