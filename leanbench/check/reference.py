"""Comparison of a kernel's outputs with the fp64 reference."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from leanbench.core.inputs import AttentionInputs

if TYPE_CHECKING:
    import torch

#: ||out - reference|| / ||reference|| of each (sequence, KV head). Rounding the output and the
#: softmax weights to the dtype costs about its unit roundoff (4.9e-4, 3.9e-3) over sqrt(3) each;
#: the limits leave a factor of about three.
RELATIVE_ERROR_LIMIT = {"fp16": 2e-3, "bf16": 1e-2}
#: |lse - reference| / max(1, |reference|): fp32 sums of exact products.
LSE_ERROR_LIMIT = 1e-3
#: Cached K elements that one check converts to fp64; beyond it, KV heads are sampled.
CHECK_ELEMENTS = 1 << 28
#: (sequence, KV head) pairs that the check of a benchmark cell computes, a quarter of a millisecond
#: each.
CELL_PAIRS = 256


@dataclass(frozen=True)
class CheckResult:
    """The worst errors over the checked (sequence, KV head) pairs; NaN anywhere makes them
    infinite.
    """

    relative_error: float
    #: None: the kernel writes no LSE.
    lse_error: float | None
    checked_heads: int
    total_heads: int

    def failure(self, dtype: str) -> str | None:
        """One sentence if a limit is exceeded, or None."""
        limit = RELATIVE_ERROR_LIMIT[dtype]
        if not self.relative_error <= limit:
            return (
                f"relative error {self.relative_error:.2e} against the fp64 reference is above"
                f" {limit:.0e}"
            )
        if self.lse_error is not None and not self.lse_error <= LSE_ERROR_LIMIT:
            return (
                f"LSE error {self.lse_error:.2e} against the fp64 reference is above"
                f" {LSE_ERROR_LIMIT:.0e}"
            )
        return None


class Reference:
    """The fp64 outputs of some (sequence, KV head) pairs of one call, to hold any number of kernels
    against.

    As many pairs as `max_elements` and `max_pairs` allow: the first, the last, and others drawn
    afresh.
    """

    def __init__(
        self,
        inputs: AttentionInputs,
        max_elements: int = CHECK_ELEMENTS,
        max_pairs: int | None = None,
    ) -> None:
        import torch

        from leanbench.kernels.reference.torch import attend

        pairs = [
            (sequence, head)
            for sequence in range(inputs.q.shape[0])
            for head in range(inputs.kv_heads)
        ]
        self.total_heads = len(pairs)
        longest = max(1, *inputs.read_lengths())
        affordable = max(
            2, min(max_elements // (longest * inputs.head_dim), max_pairs or len(pairs))
        )
        if affordable < len(pairs):
            pairs = [pairs[0], *random.sample(pairs[1:-1], affordable - 2), pairs[-1]]
        results = [attend(inputs, sequence, head) for sequence, head in pairs]
        device = inputs.q.device
        self._sequences = torch.tensor([sequence for sequence, _ in pairs], device=device)
        self._heads = torch.tensor([head for _, head in pairs], device=device)
        #: (pairs, q_len, group_size, head_dim)
        self._out = torch.stack([out for out, _ in results])
        #: (pairs, group_size, q_len)
        self._lse = torch.stack([lse for _, lse in results])

    def check(self, inputs: AttentionInputs, lse_base: float | None = math.e) -> CheckResult:
        """Errors of `inputs.out` and `inputs.lse`; every element is tested for NaN, outside the
        sampled heads too.

        Args:
            lse_base: of the logarithm in `inputs.lse`; None: nobody wrote it, only the output is
                checked.
        """
        import torch

        group_size, head_dim = inputs.group_size, inputs.head_dim
        batch, q_len, _, _ = inputs.out.shape
        # One row for each pair, the pair's query heads next to each other.
        out = inputs.out.view(batch, q_len, -1, group_size, head_dim)[
            self._sequences, :, self._heads
        ].double()
        nan = inputs.out.isnan().any()
        errors = [_worst_relative(out, self._out)]
        if lse_base is not None:
            lse = inputs.lse.view(batch, -1, group_size, q_len)[
                self._sequences, self._heads
            ].double()
            nan |= inputs.lse.isnan().any()
            errors.append(_worst_lse(lse * math.log(lse_base), self._lse))
        worst = torch.stack(errors)
        worst_out, *worst_lse = torch.where(nan | worst.isnan(), torch.inf, worst).tolist()
        return CheckResult(
            worst_out, worst_lse[0] if worst_lse else None, len(self._sequences), self.total_heads
        )


def _worst_relative(got: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """The largest ||got - reference|| / ||reference|| of a pair; where the reference is 0, so must
    be the output.
    """
    import torch

    norm = reference.flatten(1).norm(dim=1)
    difference = (got - reference).flatten(1).norm(dim=1)
    of_zero = torch.where(difference == 0, 0.0, torch.inf).to(difference.dtype)
    # A NaN difference stays NaN, whatever the norm.
    ratio = torch.where((norm == 0) & ~difference.isnan(), of_zero, difference / norm)
    return _max_or_nan(ratio)


def _worst_lse(got: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """The largest |got - reference| / max(1, |reference|); the LSE of an empty sequence is -inf on
    both sides.
    """
    import torch

    of_empty = torch.where(got == reference, 0.0, torch.inf).to(got.dtype)
    difference = torch.where(
        reference.isinf(), of_empty, (got - reference).abs() / reference.abs().clamp(min=1.0)
    )
    return _max_or_nan(difference)


def _max_or_nan(values: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.where(values.isnan().any(), torch.nan, values.max())
