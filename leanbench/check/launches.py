"""Launches as users make them: `lean` goes through `lean_attn_with_kvcache`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from leanbench.core.config import KernelConfig
from leanbench.core.extras import extras_of
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
    """Return a launch of a kernel over these tensors.

    Args:
        request: Origin of `config`, as in `leanbench.configs.lookup.resolve`. The API then gets no
            settings that it finds itself. None: exactly these settings.
    """
    if not kernel.is_api or inputs.peers is not None:
        return kernel.prepare(inputs, config)
    if request == BATCH_INVARIANT:
        return ApiCall(inputs, batch_invariant=True)
    return ApiCall(inputs) if finds_settings(kernel, request) else ApiCall(inputs, config=config)


def launches_of(
    kernel: Kernel,
    copies: Sequence[AttentionInputs],
    config: KernelConfig | None,
    request: str | KernelConfig | None = None,
) -> list[Callable[[], Any]]:
    """Return a launch for each of `copies`, which differ only in addresses and values."""
    if kernel.is_api:
        return [launch_of(kernel, inputs, config, request) for inputs in copies]
    return kernel.prepare_all(copies, config)


def finds_settings(kernel: Kernel, request: str | KernelConfig | None) -> bool:
    """Return True if the API chooses the settings, as for a caller without a config."""
    return kernel.is_api and kernel.implementation is None and request == "default"


class ApiCall(OwnOutputs):
    """A call over `inputs`; lengths on the host are passed as an int. It writes `inputs.out` and
    allocates the LSE.
    """

    def __init__(self, inputs: AttentionInputs, **settings: Any) -> None:
        from leanbench.attention import lean_attn_with_kvcache

        super().__init__(inputs)
        self._call = partial(
            lean_attn_with_kvcache,
            inputs.q,
            inputs.k_cache,
            inputs.v_cache,
            **api_arguments(inputs),
            **settings,
        )

    def __call__(self) -> None:
        _, lse = self._call(out=self.results.out)
        self.results = replace(self.results, lse=lse)

    def compute(self) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = self._call()
        return out, lse


def api_arguments(inputs: AttentionInputs) -> dict[str, Any]:
    """Return the arguments of `lean_attn_with_kvcache` after Q and the caches."""
    length = inputs.cache_seqlens
    arguments = {
        "cache_seqlens": inputs.context - inputs.new_tokens if length is None else length,
        "softmax_scale": inputs.softmax_scale,
        "causal": inputs.causal,
        "return_softmax_lse": True,
        "block_table": inputs.block_table,
    }
    if inputs.shared_prefix:
        arguments["shared_prefix"] = inputs.shared_prefix
    extras = extras_of(inputs)
    if extras is None:
        return arguments
    names = {"k_new": "k", "v_new": "v"}
    arguments |= {names.get(name, name): tensor for name, tensor in extras.tensors.items()}
    if extras.max_seqlen_q is not None:
        arguments["max_seqlen_q"] = extras.max_seqlen_q
    if (extras.window_left, extras.window_right) != (-1, -1):
        arguments["window_size"] = (extras.window_left, extras.window_right)
    if extras.attention_chunk:
        arguments["attention_chunk"] = extras.attention_chunk
    if extras.softcap:
        arguments["softcap"] = extras.softcap
    if extras.rotary_cos is not None:
        arguments["rotary_interleaved"] = extras.rotary_interleaved
    return arguments
