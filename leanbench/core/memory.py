"""GPU memory that a problem needs, for plans, predictions and measurements."""

from __future__ import annotations

from dataclasses import replace

from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.llm.model import WEIGHT_BYTES, WholeModel
from leanbench.core.problem import AttentionProblem

#: CUDA context, workspaces of kernels, and CUDA graphs.
RESERVE_BYTES = 512_000_000
_FP64_BYTES = 8


def needed_bytes(problem: AttentionProblem) -> int:
    """Return the bytes of the allocated K and V, Q and the outputs, the fp64 reference of one KV
    head (its K, V and scores), and the reserve.
    """
    queries = problem.group_size * problem.q_len
    if problem.model is not None:
        config = problem.model.config
        widest = max(config.get(key, 0) for key in ("hidden_size", "intermediate_size", "ffn_dim"))
        # Logits and activations of the layers.
        rows = problem.batch * (2 * config["vocab_size"] + 8 * widest)
        weights = problem.model.weights * WEIGHT_BYTES + rows * WEIGHT_BYTES
        alone = problem.layer_problem(next(iter(problem.model.layer_kinds)))
        return needed_bytes(alone) - alone.kv_allocated_bytes + problem.kv_allocated_bytes + weights
    reference = problem.max_context * (2 * problem.head_dim + 3 * queries) * _FP64_BYTES
    query_and_output = problem.io_bytes - problem.kv_bytes
    return problem.kv_allocated_bytes + query_and_output + reference + RESERVE_BYTES


def _what_fits(problem: AttentionProblem, model: WholeModel, available_bytes: float) -> str:
    """Suggest more GPUs, or the number of layers that fit."""

    def fits(layers: int) -> bool:
        part = replace(problem, whole_model=str(replace(model, layers=layers)))
        return needed_bytes(part) <= available_bytes

    layers = next((count for count in range(model.layer_count - 1, 0, -1) if fits(count)), None)
    tp = "share the model out with --tp, choose a smaller context or batch"
    return tp if layers is None else f"{tp}, or measure a part of it with --layers {layers}"


def shortage(
    problem: AttentionProblem, available_bytes: float, gpu: str, state: str = ""
) -> str | None:
    """Return a sentence if the problem needs more than is available, or None.

    Args:
        gpu: Name of the GPU.
        state: Adjective of the available bytes, such as ``free``.
    """
    needed = needed_bytes(problem)
    if needed <= available_bytes:
        return None
    has = f"{gpu} has {available_bytes / 1e9:.1f} GB {state}".rstrip()
    if problem.model is not None:
        return (
            f"needs {needed / 1e9:.1f} GB (weights {problem.model.weights * WEIGHT_BYTES / 1e9:.1f}"
            f" GB, K and V {problem.kv_allocated_bytes / 1e9:.1f} GB, the rest for the step and the"
            f" check) and {has}: {_what_fits(problem, problem.model, available_bytes)}"
        )
    return (
        f"needs {needed / 1e9:.1f} GB (K and V {problem.kv_allocated_bytes / 1e9:.1f} GB, the rest"
        f" for Q, the output and the check) and {has}: choose a smaller context, batch or number"
        " of KV heads"
    )


def shortage_on(problem: AttentionProblem, gpu: GpuSpec) -> str | None:
    """Return `shortage` on an otherwise empty GPU."""
    return shortage(problem, gpu.memory_gb * 1e9, gpu.name)
