"""Attention of a whole model by a kernel of this project or a library."""

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
from leanbench.decode import BOUND

if TYPE_CHECKING:
    import torch


#: A function that a model calls as transformers' attention functions, (module, query, key, value,
#: mask, scaling=, ...), and that returns the output.
Attention = Callable[..., Any]


class LayerAttention:
    """A function with the signature of transformers' attention functions that runs a kernel.

    Each call prepares a launch over its tensors, because graph captures see nothing else. A plan
    for the lengths of a step is made in the first call and shared by all layers, as in servers.
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
        """Return the output, (batch, 1, q_heads, head_dim).

        Args:
            query: (batch, q_heads, 1, head_dim).
            key: (batch, kv_heads, capacity, head_dim).
            value: Like `key`.
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
        """Return what the layers of a step share, or None."""
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
    """Return the inputs of a layer's call; shapes as in `LayerAttention`."""
    import torch

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
        lse=q.new_empty((batch, q_heads, q_len), dtype=torch.float32),
        sinks=sinks,
    )


def refusal(kernel: Kernel, problem: AttentionProblem, request: str | KernelConfig) -> str | None:
    """Return why a kernel cannot be the attention of a whole model, or None."""
    if request == "best":
        return (
            f"{kernel.name} would be timed with each of its settings, which whole models are not:"
            " choose --configs default or heuristic, and a kernel that is not always the best of"
            " several"
        )
    model = problem.model
    if kernel.name == BOUND and model is not None and problem.max_context <= model.max_positions:
        # The bound computes no attention, so it supports every kind.
        return None
    return kernel.unsupported_reason(problem)
