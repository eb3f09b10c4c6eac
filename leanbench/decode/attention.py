"""The attention of a whole model's layers by a kernel of this project or a library."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from leanbench.check.launches import finds_settings, launch_of
from leanbench.configs import lookup
from leanbench.core.config import KernelConfig
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.inputs import AttentionInputs
from leanbench.core.kernel import Kernel, written_by
from leanbench.core.problem import AttentionProblem

if TYPE_CHECKING:
    import torch


#: A function that a model calls as transformers' attention functions, (module, query, key, value,
#: mask, scaling=, ...), and that returns the output.
Attention = Callable[..., Any]


class LayerAttention:
    """A function that a model calls as transformers' attention functions, (module, query, key,
    value, mask, scaling=, ...), which has a kernel compute the output.

    A layer's launch is prepared in every call, over the tensors of that call: while a CUDA graph is
    captured, nothing else reaches the GPU. What must be worked out once for the lengths of a step
    is kept from the first call, as servers keep it for all layers.
    """

    def __init__(
        self,
        kernel: Kernel,
        problem: AttentionProblem,
        lengths: Mapping[int | None, torch.Tensor],
        spec: GpuSpec,
        request: str | KernelConfig,
    ) -> None:
        assert problem.model is not None
        self.kernel = kernel
        self.lengths = lengths
        #: Whether it is what a model with attn_implementation="lean" runs.
        self._is_integration = finds_settings(kernel, request)
        self._request = request
        #: How launch settings were chosen, by the layers' window.
        self.choices = {
            kind.window: lookup.resolve(kernel, problem.layer_problem(kind), spec, request)
            for kind in problem.model.layer_kinds
        }
        self._plans: dict[int | None, Any] = {}

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scaling: float = 1.0,
        sliding_window: int | None = None,
        s_aux: torch.Tensor | None = None,
        **call: Any,
    ) -> torch.Tensor:
        """Output, (batch, 1, q_heads, head_dim).

        Args:
            query: (batch, q_heads, 1, head_dim).
            key: (batch, kv_heads, capacity, head_dim); value: likewise.
        """
        lengths = self.lengths[sliding_window]
        if self._is_integration:
            from leanbench.integrations.hf_attention import lean_attention

            packed = lengths.view(-1, 1, 1, 1)
            named = {"scaling": scaling, "sliding_window": sliding_window, "s_aux": s_aux, **call}
            return lean_attention(module, query, key, value, packed, **named)[0]
        inputs = call_inputs(query, key, value, lengths, scaling=scaling, sinks=s_aux)
        config = self.choices[sliding_window].config
        if sliding_window not in self._plans:
            self._plans[sliding_window] = self._plan(inputs, config)
        plan = self._plans[sliding_window]
        if plan is None and not self.kernel.is_peer:
            launch = launch_of(self.kernel, inputs, config, self._request)
        else:
            launch = self.kernel.prepare_planned(inputs, config, plan)
        launch()
        return written_by(launch, inputs).out

    def _plan(self, inputs: AttentionInputs, config: KernelConfig | None) -> Any:
        """What a step's layers share; None: nothing."""
        planner = self.kernel.planner(inputs, config)
        if planner is not None:
            return planner()
        if self.kernel.is_peer:
            # A library may compile in its first call, and is called once here, before the capture.
            self.kernel.prepare(inputs, config)
        return None


def call_inputs(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scaling: float,
    sinks: torch.Tensor | None,
) -> AttentionInputs:
    """The call of a layer, outputs not yet written; shapes as of `LayerAttention`."""
    q = query.transpose(1, 2)
    batch, q_len, q_heads, _ = q.shape
    return AttentionInputs(
        q=q,
        k_cache=key.transpose(1, 2),
        v_cache=value.transpose(1, 2),
        cache_seqlens=lengths,
        context=key.shape[2],
        softmax_scale=scaling,
        out=q.new_empty((batch, q_len, q_heads, value.shape[3])),
        lse=q.new_empty((batch, q_heads, q_len), dtype=_fp32()),
        sinks=sinks,
    )


def _fp32() -> torch.dtype:
    import torch

    return torch.float32
