"""Launches as users make them: of this project's kernel, calls of `lean_attn_with_kvcache`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from leanbench.core.config import KernelConfig
from leanbench.core.inputs import AttentionInputs
from leanbench.core.kernel import BATCH_INVARIANT, Kernel, OwnOutputs

if TYPE_CHECKING:
    import torch


def launch_of(
    kernel: Kernel,
    inputs: AttentionInputs,
    config: KernelConfig | None,
    request: str | KernelConfig | None = None,
) -> Callable[[], Any]:
    """A launch of a kernel over these tensors.

    Args:
        request: what `config` came from, as `leanbench.configs.lookup.resolve` takes it: the API is
            told nothing that it finds by itself. None: these settings and no others.
    """
    if not kernel.is_api:
        return kernel.prepare(inputs, config)
    if request == BATCH_INVARIANT:
        return ApiCall(inputs, batch_invariant=True)
    return ApiCall(inputs) if finds_settings(kernel, request) else ApiCall(inputs, config=config)


def finds_settings(kernel: Kernel, request: str | KernelConfig | None) -> bool:
    """Whether the API is to choose the settings, as it does for a caller who gives none."""
    return kernel.is_api and kernel.implementation is None and request == "default"


class ApiCall(OwnOutputs):
    """A call over `inputs`; lengths that the host knows are passed as a number. A launch writes
    `inputs.out`, and an LSE of its own.
    """

    def __init__(self, inputs: AttentionInputs, **settings: Any) -> None:
        from leanbench.attention import lean_attn_with_kvcache

        super().__init__(inputs)
        on_host = inputs.cache_seqlens is None
        self._call = partial(
            lean_attn_with_kvcache,
            inputs.q,
            inputs.k_cache,
            inputs.v_cache,
            inputs.context if on_host else inputs.cache_seqlens,
            inputs.softmax_scale,
            causal=True,
            return_softmax_lse=True,
            block_table=inputs.block_table,
            **settings,
        )

    def __call__(self) -> None:
        _, lse = self._call(out=self.results.out)
        self.results = replace(self.results, lse=lse)

    def compute(self) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = self._call()
        return out, lse
