"""Attention of a whole model by a kernel of this project or a library."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from leanbench.check.launches import launch_of
from leanbench.configs import lookup
from leanbench.core.config import KernelConfig
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.inputs import AttentionInputs
from leanbench.core.kernel import Kernel, written_by
from leanbench.core.problem import AttentionProblem
from leanbench.decode import BOUND
from leanbench.decode.cache import StepCache

if TYPE_CHECKING:
    import torch


#: A function that a model calls as transformers' attention functions, (module, query, key, value,
#: mask, scaling=, ...), with the K and V of new tokens alone. It returns the output.
Attention = Callable[..., Any]


class LayerAttention:
    """A function with the signature of transformers' attention functions that runs a kernel.

    Each call prepares a launch over its tensors, because graph captures see nothing else. A plan
    for the lengths of a step is made in the first call and shared by all layers, as in servers.

    The launch writes the new token where the kernel does that. Otherwise, and in the ring of a
    layer with a window, torch operators write it first.
    """

    def __init__(
        self,
        kernel: Kernel,
        problem: AttentionProblem,
        cache: StepCache,
        spec: GpuSpec,
        request: str | KernelConfig,
    ) -> None:
        assert problem.model is not None
        self.kernel = kernel
        self._cache = cache
        self._request = request
        #: How launch settings were chosen, by the layers' window.
        self.choices: dict[int | None, lookup.Choice] = {}
        #: Whether launches write the new token in layers without a window.
        self.appends = False
        for kind in problem.model.layer_kinds:
            of_layer, window = problem.layer_problem(kind), kind.window
            choice = lookup.resolve(kernel, of_layer, spec, request)
            appending = replace(of_layer, append=1)
            able = kernel.implementation_of(choice.config)
            if window is None and able.unsupported_reason(appending) is None:
                choice = lookup.resolve(kernel, appending, spec, request)
                self.appends = True
            self.choices[window] = choice
        self._plans: dict[int | None, Any] = {}

    def __call__(
        self,
        module: Any,
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
            key: (batch, kv_heads, 1, head_dim).
            value: Like `key`.
        """
        cache, layer = self._cache, module.layer_idx
        if self.appends and sliding_window is None:
            (k, v), lengths = cache.layers[layer], cache.lengths_before
            inputs = call_inputs(query, k, v, lengths, scaling=scaling, sinks=s_aux)
            inputs = replace(inputs, k_new=key.transpose(1, 2), v_new=value.transpose(1, 2))
        else:
            k, v = cache.write(key, value, layer)
            lengths = cache.lengths[sliding_window]
            inputs = call_inputs(query, k, v, lengths, scaling=scaling, sinks=s_aux)
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


def written_first(
    attend: Attention,
    cache: StepCache,
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    **call: Any,
) -> torch.Tensor:
    """Write the new tokens with torch operators, and call `attend` over the layer's cache."""
    caches = cache.write(key, value, module.layer_idx)
    return attend(module, query, *caches, mask, **call)


def call_inputs(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scaling: float,
    sinks: torch.Tensor | None,
) -> AttentionInputs:
    """Return the inputs of a layer's call.

    Args:
        query: (batch, q_heads, 1, head_dim).
        key: The layer's cache, (batch, kv_heads, capacity, head_dim).
        value: Like `key`.
    """
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
