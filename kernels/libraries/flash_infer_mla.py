"""FlashInfer's decode over a latent cache: `flashinfer.mla.BatchMLAPagedAttentionWrapper` with its
default backend, on Hopper the backend fa3.

Its planner splits sequences by tokens, not by pages, so a contiguous cache is passed as one page
per sequence without a copy. Partials of split sequences are rounded to the output's dtype.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from leanbench.kernels.libraries.flash_infer import (
    FlashInferKernel,
    Plan,
    PlannedFlashInfer,
    offsets,
    pages_of,
    workspace,
)
from leanbench.kernels.libraries.latent import HEAD_DIMS, VALUE_DIM, latent_refusal

from leanbench.core.kernel import OwnOutputs
from leanbench.core.kinds import SAME
from leanbench.core.problem import AttentionProblem

if TYPE_CHECKING:
    import torch

    from leanbench.core.inputs import AttentionInputs

#: Capacity of a plan in work items, which FlashInfer does not check. A work item is part of a
#: sequence with up to 64 query rows, or 128 if the sequence has more than 64.
_PIECES = 16384
#: Upper bound of a GPU's SMs. Splitting adds at most one work item per SM.
_SMS = 1024


class FlashInferMla(PlannedFlashInfer):
    name = "flashinfer_mla"
    title = "FlashInfer's decode over a latent cache, planned for the lengths before it is timed"
    head_dims = HEAD_DIMS
    axes = FlashInferKernel.axes | {
        *("q_len", "page_size", "lengths", "lengths_on", "causal", "v_head_dim", "latent"),
        *("select", "kv_dtype", "scaled"),
    }
    page_numbers_name = "_kv_indices_buf"

    def refusal(self, problem: AttentionProblem) -> str | None:
        if (reason := latent_refusal(self.name, problem)) is not None:
            return reason
        if problem.kv_dtype != SAME and (problem.kv_dtype, problem.dtype) != ("e4m3", "bf16"):
            return (
                f"{self.name} takes fp8 as e4m3 with dtype bf16, this problem has"
                f" {problem.kv_dtype} with {problem.dtype}: choose e4m3 and bf16"
            )
        rows = problem.q_len * problem.q_heads
        tiles = -(-rows // (128 if rows > 64 else 64))
        most = (_PIECES - _SMS) // tiles
        if problem.batch > most:
            return (
                f"{self.name} plans at most {_PIECES} pieces of work, this problem has"
                f" {problem.batch} sequences of {rows} query rows: choose a batch of at most {most}"
            )
        return super().refusal(problem)

    def page_size(self, inputs: AttentionInputs) -> int:
        return inputs.k_cache.shape[1]

    def plan_call(self, plan: Plan) -> tuple[Any, Callable[[], Any]]:
        import torch
        from flashinfer.mla import BatchMLAPagedAttentionWrapper

        page_offsets = offsets(plan.page_counts)
        wrapper = BatchMLAPagedAttentionWrapper(workspace(plan.device, plan.stream))
        return wrapper, partial(
            wrapper.plan,
            offsets([plan.q_len] * len(plan.lengths)),
            page_offsets,
            torch.zeros(int(page_offsets[-1]), dtype=torch.int32),
            torch.tensor(plan.lengths, dtype=torch.int32),
            plan.q_heads,
            plan.value_dim,
            plan.head_dim - plan.value_dim,
            plan.page_size,
            plan.causal,
            plan.softmax_scale,
            plan.dtype,
            plan.kv_dtype,
        )

    def pass_page_numbers(self, wrapper: Any, numbers: torch.Tensor) -> None:
        # Since 0.7, the planned backend holds them.
        planned = getattr(wrapper, "_planned_backend", None)
        if planned is None:
            super().pass_page_numbers(wrapper, numbers)
            return
        wrapper._planned_backend = copy.copy(planned)
        super().pass_page_numbers(wrapper._planned_backend, numbers)

    def run_call(self, wrapper: Any, inputs: AttentionInputs, plan: Plan) -> FlashInferMlaLaunch:
        return FlashInferMlaLaunch(wrapper, inputs, plan)


class FlashInferMlaLaunch(OwnOutputs):
    """A launch that writes `inputs.out`. In its LSE, heads of a query token are adjacent."""

    def __init__(self, wrapper: Any, inputs: AttentionInputs, plan: Plan) -> None:
        import torch

        super().__init__(inputs)
        batch, q_len, q_heads, _ = inputs.q.shape
        q = inputs.q.flatten(0, 1)
        cache = pages_of(inputs.k_cache, inputs, plan.page_size)[:, :, 0]
        lse = torch.empty(batch, q_len, q_heads, dtype=torch.float32, device=q.device)
        self._outputs = inputs.out, lse.transpose(1, 2)
        self._attend = partial(
            wrapper.run,
            q[..., :VALUE_DIM],
            q[..., VALUE_DIM:],
            cache[..., :VALUE_DIM],
            cache[..., VALUE_DIM:],
            out=inputs.out.flatten(0, 1),
            lse=lse.flatten(0, 1),
            return_lse=True,
            **({} if plan.kv_dtype == plan.dtype else {"ckv_scale": 1.0, "kpe_scale": 1.0}),
        )

    def compute(self) -> tuple[torch.Tensor, torch.Tensor]:
        self._attend()
        return self._outputs
