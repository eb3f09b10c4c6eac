"""Compares a kernel's outputs with the fp64 reference."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from leanbench.inputs import AttentionInputs

if TYPE_CHECKING:
    import torch

#: ||out - reference|| / ||reference|| of each (sequence, KV head). Rounding the output and the softmax weights to the
#: dtype costs about its unit roundoff (4.9e-4, 3.9e-3) over sqrt(3) each; the limits leave a factor of about three.
RELATIVE_ERROR_LIMIT = {"fp16": 2e-3, "bf16": 1e-2}
#: |lse - reference| / max(1, |reference|): fp32 sums of exact products.
LSE_ERROR_LIMIT = 1e-3
#: Cached K elements that one check converts to fp64; beyond it, KV heads are sampled.
CHECK_ELEMENTS = 1 << 28


@dataclass(frozen=True)
class CheckResult:
    """The worst errors over the checked (sequence, KV head) pairs; NaN anywhere makes them infinite."""

    relative_error: float
    lse_error: float
    checked_heads: int
    total_heads: int

    def failure(self, dtype: str) -> str | None:
        """One sentence if a limit is exceeded, or None."""
        limit = RELATIVE_ERROR_LIMIT[dtype]
        if not self.relative_error <= limit:
            return f"relative error {self.relative_error:.2e} against the fp64 reference is above {limit:.0e}"
        if not self.lse_error <= LSE_ERROR_LIMIT:
            return f"LSE error {self.lse_error:.2e} against the fp64 reference is above {LSE_ERROR_LIMIT:.0e}"
        return None


def check_against_reference(inputs: AttentionInputs, max_elements: int = CHECK_ELEMENTS) -> CheckResult:
    """Errors of `inputs.out` and `inputs.lse`.

    Every element of the outputs is tested for NaN; the reference runs on as many (sequence, KV head) pairs as
    `max_elements` allows: the first, the last, and others drawn afresh.
    """
    batch, _, kv_heads, head_dim = inputs.k_cache.shape
    pairs = [(sequence, head) for sequence in range(batch) for head in range(kv_heads)]
    affordable = max(2, max_elements // (inputs.context * head_dim))
    chosen = pairs
    if affordable < len(pairs):
        chosen = [pairs[0], *random.sample(pairs[1:-1], affordable - 2), pairs[-1]]
    worst_out = worst_lse = 0.0
    if inputs.out.isnan().any() or inputs.lse.isnan().any():
        worst_out = worst_lse = float("inf")
    for sequence, head in chosen:
        out_error, lse_error = _errors(inputs, sequence, head)
        worst_out, worst_lse = max(worst_out, out_error), max(worst_lse, lse_error)
    return CheckResult(worst_out, worst_lse, len(chosen), len(pairs))


def _errors(inputs: AttentionInputs, sequence: int, head: int) -> tuple[float, float]:
    import torch

    from leanbench.kernels.reference.torch import attend  # pyright: ignore[reportMissingImports]

    out, lse = attend(inputs, sequence, head)
    group = slice(head * inputs.group_size, (head + 1) * inputs.group_size)
    got_out = inputs.out[sequence, :, group].double()
    got_lse = inputs.lse[sequence, group].double()
    out_error = _relative(got_out, out)
    empty = lse.isinf()
    lse_difference = torch.where(
        empty,
        torch.where(got_lse == lse, 0.0, torch.inf),
        (got_lse - lse).abs() / lse.abs().clamp(min=1.0),
    )
    return out_error, _worst(lse_difference)


def _relative(got: torch.Tensor, reference: torch.Tensor) -> float:
    norm = reference.norm().item()
    difference = (got - reference).norm().item()
    if difference != difference:
        return float("inf")
    if norm == 0.0:
        return 0.0 if difference == 0.0 else float("inf")
    return difference / norm


def _worst(values: torch.Tensor) -> float:
    worst = values.max().item()
    return float("inf") if worst != worst else worst
