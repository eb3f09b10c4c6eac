"""Arithmetic of a problem, and the rates at which a GPU can do and feed it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.problem import AttentionProblem

#: Dense FLOPs in 16 bits, summed in fp32, of an SM's tensor cores per clock, by compute capability.
#: The vendor's whitepapers of Turing to Blackwell, for data-centre and professional GPUs.
_TENSOR_FLOPS = {
    (7, 5): 1024,
    (8, 0): 2048,
    (8, 6): 1024,
    (8, 9): 1024,
    (9, 0): 4096,
    (10, 0): 8192,
    (10, 3): 8192,
    (12, 0): 1024,
    (12, 1): 1024,
}


@dataclass(frozen=True)
class Roofs:
    """Limits of a GPU by its vendor's figures."""

    bandwidth_tb_s: float
    #: Of the tensor cores in 16 bits, at the boost clock.
    tflop_s: float

    @classmethod
    def of(cls, spec: GpuSpec) -> Roofs | None:
        """Return the roofs of a GPU; None if its tensor cores are not known."""
        flops = _TENSOR_FLOPS.get(spec.compute_capability)
        if flops is None:
            return None
        return cls(spec.bandwidth_tb_s, flops * spec.sms * spec.boost_clock_mhz * 1e-6)


@lru_cache(maxsize=1 << 13)
def flops(problem: AttentionProblem) -> int | None:
    """Return the floating-point operations of both matrix products of a call.

    Two for each column of K and of V, for each pair of a query row and a token that it sees. Of a
    problem that GPUs share, it is the mean of a GPU; of a whole model it is None, because most of
    its work is not attention.
    """
    if problem.model is not None:
        return None
    problem = problem.seen
    lengths = (
        context - pad for context, pad in zip(problem.contexts, problem.leftpads, strict=True)
    )
    sequences = Counter(zip(lengths, problem.query_lengths, strict=True))
    pairs = sum(
        count * _seen(problem, length, queries) for (length, queries), count in sequences.items()
    )
    columns = problem.head_dim + problem.value_dim
    return 2 * pairs * problem.q_heads * columns // problem.gpus.gpus


def _seen(problem: AttentionProblem, length: int, queries: int) -> int:
    """Count the tokens that the query tokens of one sequence see."""
    return sum(_seen_at(problem, length, length - queries + at) for at in range(queries))


def _seen_at(problem: AttentionProblem, length: int, position: int) -> int:
    """Count the tokens that the query token at a position sees. A negative position is none."""
    first, last = 0, length - 1
    if problem.causal:
        last = position
    elif problem.window_right >= 0:
        last = min(last, position + problem.window_right)
    if problem.window_left >= 0:
        first = max(first, position - problem.window_left)
    if problem.attention_chunk:
        start = position - position % problem.attention_chunk
        first, last = max(first, start), min(last, start + problem.attention_chunk - 1)
    return max(0, last - first + 1)
