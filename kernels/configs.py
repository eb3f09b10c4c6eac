"""Launch settings that fit a GPU's shared memory."""

from __future__ import annotations

from leanbench.kernels.launch import padded

from leanbench.core.decomposition import tile_rows
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.problem import ELEMENT_BYTES, AttentionProblem

#: Query tile, barriers and layout conversions next to the K and V stages.
SHARED_RESERVE_KB = 12


def shared_kb(problem: AttentionProblem, tile_tokens: int, num_stages: int, gpu: GpuSpec) -> float:
    """Return the shared memory of one CTA's K and V tiles, in KB.

    Triton keeps `num_stages - 1` of each in flight. Hopper's asynchronous matrix instructions, used
    from 64 rows on, need one more, because they still read the oldest.
    """
    rows = tile_rows(problem.group_size, problem.head_dim, problem.q_len)
    asynchronous = gpu.compute_capability[0] == 9 and rows >= 64
    in_flight = num_stages if asynchronous else num_stages - 1
    return in_flight * 2 * tile_tokens * padded(problem.head_dim) * ELEMENT_BYTES / 1024


def stages_that_fit(
    problem: AttentionProblem, tile_tokens: int, num_stages: int, gpu: GpuSpec, per_sm: int = 1
) -> int:
    """Return `num_stages`, reduced to fit `per_sm` CTAs on an SM; at least 1."""
    limit_kb = min(gpu.shared_kb_per_cta, gpu.shared_kb_per_sm / per_sm) - SHARED_RESERVE_KB
    while num_stages > 1 and shared_kb(problem, tile_tokens, num_stages, gpu) > limit_kb:
        num_stages -= 1
    return num_stages
