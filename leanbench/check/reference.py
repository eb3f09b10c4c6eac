"""Comparison of a kernel's outputs with the fp64 reference."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from leanbench.core.inputs import AttentionInputs
from leanbench.core.kernel import FP8, ROUNDED_SCORES

if TYPE_CHECKING:
    import torch

#: ||out - reference|| / ||reference|| of each (sequence, KV head), see `_worst_relative`. Rounding
#: the output and the softmax weights to the dtype costs about its unit roundoff (4.9e-4, 3.9e-3)
#: over sqrt(3) each; the limits leave a factor of about three.
#: With Q and softmax weights in e4m3 (unit roundoff 6.3e-2) scores of standard deviation 1 are off
#: by 2.6e-2, and the weights by as much again: together 3.7e-2. Scales of K up to 1.5 make that
#: 4.7e-2 (the median of 24 draws of 8,192 tokens on the CPU; 6.2e-2 at worst), about half of
#: the limit.
#: A score rounded to the dtype is off by its unit roundoff times the score, up to four or so, at
#: which its weight is large: eager attention in bf16 was 1.2e-2 off on an H200 (docs/decode.md).
RELATIVE_ERROR_LIMIT = {
    "fp16": 2e-3,
    "bf16": 1e-2,
    FP8: 1e-1,
    f"fp16{ROUNDED_SCORES}": 5e-3,
    f"bf16{ROUNDED_SCORES}": 4e-2,
}
#: |lse - reference| / max(1, |reference|): fp32 sums of exact products; scores of a Q in e4m3 are
#: off by 2.6e-2 each, an LSE of few tokens by nearly as much.
LSE_ERROR_LIMIT = {"fp16": 1e-3, "bf16": 1e-3, FP8: 3e-2}
#: Times that limit for logarithms to base 2, which FlashInfer alone writes: over some 24 tokens its
#: LSE is off by 1.04e-3 (an H200), and its output right.
BASE_2_LSE_LIMIT = 2
#: Cached K elements that one check converts to fp64; beyond it, KV heads are sampled.
CHECK_ELEMENTS = 1 << 28
#: (sequence, KV head) pairs that the check of a benchmark cell computes, a quarter of a millisecond
#: each.
CELL_PAIRS = 256


@dataclass(frozen=True)
class CheckResult:
    """Largest errors of the checked (sequence, KV head) pairs; infinite if there is a NaN."""

    relative_error: float
    #: None: the kernel writes no LSE.
    lse_error: float | None
    checked_heads: int
    total_heads: int
    #: Of the logarithm that was written.
    lse_base: float | None = math.e

    def failure(self, precision: str) -> str | None:
        """Return a sentence if a limit is exceeded, or None.

        Args:
            precision: See `leanbench.core.kernel.Kernel.precision`.
        """
        limit = RELATIVE_ERROR_LIMIT[precision]
        if not self.relative_error <= limit:
            return (
                f"relative error {self.relative_error:.2e} against the fp64 reference is above"
                f" {limit:.0e}"
            )
        if self.lse_error is None:
            return None
        limit = LSE_ERROR_LIMIT[precision] * (BASE_2_LSE_LIMIT if self.lse_base == 2 else 1)
        if not self.lse_error <= limit:
            return f"LSE error {self.lse_error:.2e} against the fp64 reference is above {limit:.0e}"
        return None


def draw_pairs(
    inputs: AttentionInputs,
    max_elements: int = CHECK_ELEMENTS,
    max_pairs: int | None = None,
    draw: random.Random | None = None,
) -> list[tuple[int, int]]:
    """Return the (sequence, KV head) pairs to check: all, or the first, the last, and a random
    sample of the others.

    Args:
        max_elements: Limit of the elements to convert to fp64.
        max_pairs: Limit of the pairs.
        draw: None for the system's randomness, which no kernel can foresee.
    """
    pairs = [
        (sequence, head) for sequence in range(inputs.batch) for head in range(inputs.kv_heads)
    ]
    longest = max(1, *inputs.read_lengths())
    pair_elements = longest * max(inputs.head_dim, inputs.group_size * inputs.q_len)
    affordable = max(2, min(max_elements // pair_elements, max_pairs or len(pairs)))
    if affordable < len(pairs):
        draw = draw or random.SystemRandom()
        pairs = [pairs[0], *draw.sample(pairs[1:-1], affordable - 2), pairs[-1]]
    return pairs


class Reference:
    """fp64 outputs of some (sequence, KV head) pairs of a call, to compare any number of kernels
    with.

    The pairs are `pairs`, or those of `draw_pairs` with these limits.
    """

    def __init__(
        self,
        inputs: AttentionInputs,
        max_elements: int = CHECK_ELEMENTS,
        max_pairs: int | None = None,
        draw: random.Random | None = None,
        pairs: list[tuple[int, int]] | None = None,
    ) -> None:
        import torch

        from leanbench.kernels.reference.torch import attend

        if pairs is None:
            pairs = draw_pairs(inputs, max_elements, max_pairs, draw)
        self.total_heads = inputs.batch * inputs.kv_heads
        results = [attend(inputs, sequence, head) for sequence, head in pairs]
        device = inputs.q.device
        self._heads = torch.tensor([head for _, head in pairs], device=device)[:, None]
        starts = inputs.read_query_starts()
        lengths = [starts[sequence + 1] - starts[sequence] for sequence, _ in pairs]
        #: (pairs, q_len): rows of the pairs among all query tokens, and whether there are so many.
        positions = torch.arange(inputs.q_len, device=device)
        self._is_row = positions < torch.tensor(lengths, device=device)[:, None]
        firsts = torch.tensor([starts[sequence] for sequence, _ in pairs], device=device)
        self._rows = (firsts[:, None] + positions).where(self._is_row, firsts[:, None])
        #: (pairs, q_len, group_size, head_dim of V), 0 where there is no row.
        self._out = _padded([out for out, _ in results], inputs.q_len)
        #: (pairs, q_len, group_size), likewise.
        self._lse = _padded([lse.T for _, lse in results], inputs.q_len)
        self._appended = Appended(inputs, pairs) if inputs.new_tokens else None

    def merge(self, gather: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Merge the references of processes that have parts of the same sequences.

        Args:
            gather: Stacks the tensors of all processes.
        """
        import torch

        outs, lses = gather(self._out), gather(self._lse)
        self._lse = torch.logsumexp(lses, dim=0)
        weights = (lses - self._lse).nan_to_num(nan=0.0, neginf=-torch.inf).exp()
        weights = torch.where(lses.isneginf(), 0.0, weights)
        self._out = (weights[..., None] * outs).sum(dim=0)

    def check(self, inputs: AttentionInputs, lse_base: float | None = math.e) -> CheckResult:
        """Return the errors of `inputs.out`, `inputs.lse` and appended tokens.

        NaN is searched in all elements of the outputs, also of heads that are not sampled.

        Args:
            lse_base: Base of the logarithm in `inputs.lse`; None: there is no LSE.
        """
        import torch

        group_size, is_packed = inputs.group_size, inputs.cu_seqlens_q is not None
        # One row for each pair, the pair's query heads next to each other.
        out = inputs.out if is_packed else inputs.out.flatten(0, 1)
        out = out.unflatten(1, (-1, group_size))[self._rows, self._heads].double()
        nan = inputs.out.isnan().any()
        out = out * self._is_row[..., None, None]
        errors = [_worst_relative(out, self._out, inputs.out.dtype)]
        if lse_base is not None:
            lse = inputs.lse if is_packed else inputs.lse.transpose(0, 1).flatten(1)
            lse = lse.T.unflatten(1, (-1, group_size))[self._rows, self._heads].double()
            nan |= inputs.lse.isnan().any()
            lse = torch.where(self._is_row[..., None], lse * math.log(lse_base), 0.0)
            errors.append(_worst_lse(lse, self._lse))
        if self._appended is not None:
            errors[0] = torch.maximum(errors[0], self._appended.worst(inputs))
        worst = torch.stack(errors)
        worst_out, *worst_lse = torch.where(nan | worst.isnan(), torch.inf, worst).tolist()
        return CheckResult(
            worst_out,
            worst_lse[0] if worst_lse else None,
            len(self._heads),
            self.total_heads,
            lse_base,
        )


class Appended:
    """Contents of the caches after a call that appends, for some (sequence, KV head) pairs."""

    def __init__(self, inputs: AttentionInputs, pairs: list[tuple[int, int]]) -> None:
        from leanbench.kernels.reference.torch import keys_and_values

        self._pairs = pairs
        expected = [keys_and_values(inputs, *pair) for pair in pairs]
        cached, lengths = inputs.read_cached(), inputs.read_lengths()
        self._counts = [lengths[sequence] - cached[sequence] for sequence, _ in pairs]
        self._k = self._last([k for k, _ in expected], inputs.new_tokens)
        self._v = self._last([v for _, v in expected], inputs.new_tokens)

    def worst(self, inputs: AttentionInputs) -> torch.Tensor:
        """Return the largest relative error of appended rows."""
        import torch

        from leanbench.kernels.reference.torch import in_cache

        errors = []
        for cache, expected in ((inputs.k_cache, self._k), (inputs.v_cache, self._v)):
            rows = [in_cache(inputs, cache, *pair).double() for pair in self._pairs]
            appended = self._last(rows, inputs.new_tokens)
            errors.append(_worst_relative(appended, expected, cache.dtype))
        return torch.maximum(*errors)

    def _last(self, rows: list[torch.Tensor], most: int) -> torch.Tensor:
        """Return the appended rows of each pair, (pairs, most, head_dim)."""
        last = [pair[len(pair) - count :] for pair, count in zip(rows, self._counts, strict=True)]
        return _padded(last, most)


def _padded(rows: list[torch.Tensor], count: int) -> torch.Tensor:
    """Stack rows, zero-padded to `count`."""

    import torch

    def padding(pair: torch.Tensor) -> torch.Tensor:
        return pair.new_zeros((count - len(pair), *pair.shape[1:]))

    return torch.stack([torch.cat([pair, padding(pair)]) for pair in rows])


def _worst_relative(got: torch.Tensor, reference: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the largest ||got - reference|| / ||reference|| of a pair.

    Where the reference is 0, the output must be, too.

    Args:
        dtype: Dtype that `got` was written in. Nonzero numbers below its smallest normal one count
            as that, because rounding costs them as much. fp16 numbers below 6e-5 are 6e-8 from each
            other; outputs are so small if sinks have nearly all weight.
    """
    import torch

    least = torch.finfo(dtype).smallest_normal
    counted = torch.where(reference == 0, 0.0, reference.abs().clamp(min=least))
    norm = counted.flatten(1).norm(dim=1)
    difference = (got - reference).flatten(1).norm(dim=1)
    zero_error = torch.where(difference == 0, 0.0, torch.inf).to(difference.dtype)
    # A NaN difference stays NaN, whatever the norm.
    ratio = torch.where((norm == 0) & ~difference.isnan(), zero_error, difference / norm)
    return _max_or_nan(ratio)


def _worst_lse(got: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return the largest |got - reference| / max(1, |reference|).

    The LSE of an empty sequence must be -inf.
    """
    import torch

    empty_error = torch.where(got == reference, 0.0, torch.inf).to(got.dtype)
    difference = torch.where(
        reference.isinf(), empty_error, (got - reference).abs() / reference.abs().clamp(min=1.0)
    )
    return _max_or_nan(difference)


def _max_or_nan(values: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.where(values.isnan().any(), torch.nan, values.max())
