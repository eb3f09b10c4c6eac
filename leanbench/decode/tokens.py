"""Whether the tokens that a replay of a step's graph chose are the eager step's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from leanbench.core.inputs import torch_dtype

if TYPE_CHECKING:
    import torch

#: How far rounding moves two logits against each other, in the dtype's epsilon times the
#: sequence's largest logit: one of each. The order of sums alone, `eager` against `sdpa` on a CPU,
#: moves a logit by 0.24 in the root mean square after 2 layers and after 32.
_ROUNDING_STEPS = 2


def token_fault(logits: torch.Tensor, chosen: torch.Tensor, dtype: str) -> str | None:
    """Sentence on tokens that are not the eager step's; None where each is, or has a logit there
    that rounding does not tell from the largest: another order of sums then chooses another token.

    Args:
        logits: (batch, vocabulary), of the eager step; chosen: (batch,), the replay's tokens,
            -1 where it wrote none; dtype: that the step computes in.
    """
    import torch

    missing = int((chosen < 0).sum())
    if missing:
        return f"a replay of the CUDA graph wrote no token for {missing} of {len(chosen)} sequences"
    values = logits.float()
    gaps = values.amax(dim=-1) - values.gather(1, chosen[:, None])[:, 0]
    epsilon = torch.finfo(torch_dtype(dtype)).eps
    limits = _ROUNDING_STEPS * epsilon * values.abs().amax(dim=-1)
    # Logits that are no numbers exceed every limit.
    unlike = (chosen != logits.argmax(dim=-1)) & ~(gaps <= limits)
    if not unlike.any():
        return None
    worst = int((gaps / limits).where(unlike, -1.0).argmax())
    return (
        f"a replay of the CUDA graph chose {int(unlike.sum())} of {len(chosen)} tokens that the"
        f" eager step did not: in its logits they are up to {float(gaps[worst]):.3g} below the"
        f" largest, and rounding to {dtype} accounts for {float(limits[worst]):.3g}"
    )
