"""FlashInfer's cascade over a shared prefix: its queries are those of one sequence there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from leanbench.kernels.libraries.flash_infer import (
    FlashInferKernel,
    Plan,
    offsets,
    page_numbers,
    workspace,
)

from leanbench.core.config import KernelConfig
from leanbench.core.kernel import OwnOutputs
from leanbench.core.problem import AttentionProblem

if TYPE_CHECKING:
    import torch

    from leanbench.core.inputs import AttentionInputs


class FlashInferCascade(FlashInferKernel):
    name = "flashinfer_cascade"
    title = (
        "FlashInfer's cascade: a launch over a shared prefix, one over the rest, and a merge;"
        " planned before it is timed"
    )
    axes = FlashInferKernel.axes | {"page_size", "lengths", "lengths_on", "softcap"}
    lse_base = None

    def refusal(self, problem: AttentionProblem) -> str | None:
        if not 0 < problem.shared_prefix < min(problem.contexts):
            return (
                f"{self.name} takes sequences with a shared prefix and tokens of their own: give"
                " shared_prefix, or choose flashinfer"
            )
        return super().refusal(problem)

    def launch(self, inputs: AttentionInputs, config: KernelConfig | None) -> CascadeLaunch:
        wrapper, plan = self._planned(inputs)
        plan()
        return CascadeLaunch(inputs, wrapper)

    def planner(self, inputs: AttentionInputs, config: KernelConfig | None) -> Callable[[], Any]:
        return self._planned(inputs)[1]

    def _planned(self, inputs: AttentionInputs) -> tuple[Any, Callable[[], Any]]:
        """Create a wrapper and its planning function."""
        import torch
        from flashinfer import MultiLevelCascadeAttentionWrapper

        page_size = inputs.k_cache.shape[1]
        plan, shared = Plan.of(inputs, page_size), inputs.shared_prefix // page_size
        [numbers] = page_numbers([inputs], page_size, plan.page_counts)
        rows = numbers.split(plan.page_counts)
        last = [(length - 1) % page_size + 1 for length in plan.lengths]
        wrapper = MultiLevelCascadeAttentionWrapper(
            2, workspace(plan.device, plan.stream), plan.kv_layout
        )
        return wrapper, partial(
            wrapper.plan,
            [offsets([inputs.batch]), offsets([1] * inputs.batch)],
            [offsets([shared]), offsets([count - shared for count in plan.page_counts])],
            [rows[0][:shared], torch.cat([row[shared:] for row in rows])],
            [torch.tensor(each, dtype=torch.int32) for each in ([page_size], last)],
            plan.q_heads,
            plan.kv_heads,
            plan.head_dim,
            page_size,
            sm_scale=plan.softmax_scale,
            logits_soft_cap=plan.softcap,
            q_data_type=plan.dtype,
            kv_data_type=plan.kv_dtype,
        )


class CascadeLaunch(OwnOutputs):
    """A planned call, which allocates its output and keeps no LSE."""

    def __init__(self, inputs: AttentionInputs, wrapper: Any) -> None:
        super().__init__(inputs)
        k, v = inputs.k_cache, inputs.v_cache
        if k.stride(2) > k.stride(1):
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        self._attend = partial(wrapper.run, inputs.q[:, 0], (k, v))

    def compute(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._attend().view(self.results.out.shape), self.results.lse
