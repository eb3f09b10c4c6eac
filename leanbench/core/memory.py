"""Whether a problem fits into a GPU's memory: one answer for a plan, a prediction and a
measurement.
"""

from __future__ import annotations

from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.problem import AttentionProblem

#: For the CUDA context, the kernels' workspaces and CUDA graphs.
RESERVE_BYTES = 512_000_000
_FP64_BYTES = 8


def needed_bytes(problem: AttentionProblem) -> int:
    """Bytes of K and V as they are allocated, Q and the outputs, the fp64 reference of one KV head
    (its K, V and scores), and the reserve.
    """
    queries = problem.group_size * problem.q_len
    reference = problem.max_context * (2 * problem.head_dim + 3 * queries) * _FP64_BYTES
    query_and_output = problem.io_bytes - problem.kv_bytes
    return problem.kv_allocated_bytes + query_and_output + reference + RESERVE_BYTES


def shortage(
    problem: AttentionProblem, available_bytes: float, gpu: str, state: str = ""
) -> str | None:
    """One sentence where the problem needs more than is available, or None.

    Args:
        gpu: whose memory it is.
        state: of the available bytes, e.g. ``free``.
    """
    needed = needed_bytes(problem)
    if needed <= available_bytes:
        return None
    has = f"{gpu} has {available_bytes / 1e9:.1f} GB {state}".rstrip()
    return (
        f"needs {needed / 1e9:.1f} GB (K and V {problem.kv_allocated_bytes / 1e9:.1f} GB, the rest"
        f" for Q, the output and the check) and {has}: choose a smaller context, batch or number"
        " of KV heads"
    )


def shortage_on(problem: AttentionProblem, gpu: GpuSpec) -> str | None:
    """As `shortage`, on an otherwise empty GPU of that kind."""
    return shortage(problem, gpu.memory_gb * 1e9, gpu.name)
