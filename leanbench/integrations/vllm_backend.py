"""vLLM's FlashAttention backend, with LeanAttention in decode steps. Written from the sources of
vLLM 0.25.0 and 0.33.0; vLLM 0.25.0 ran on an H200 (docs/integrations.md).

Batches, cache shapes, CUDA graphs and prompts are inherited from the server's backend. The kernel
writes the new token in its launch where that is safe, else vLLM's own kernel does.
"""

from __future__ import annotations

from contextlib import nullcontext
from importlib import import_module
from typing import Any

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec

from leanbench.attention import lean_attn_with_kvcache
from leanbench.core.switches import AUTOTUNE, is_on
from leanbench.kernels.launch import spec_of
from leanbench.kernels.lean import LEAN

#: Query tokens of a sequence up to which a batch is a decode step: one, or those that speculation
#: verifies. More of them are FlashAttention's (reports/performance-log.md, entry 42).
MAX_QUERY_TOKENS = 16
#: Fields of FlashAttention's metadata, in vLLM 0.25 and 0.33, with ranges of a prompt that have
#: bidirectional attention: those of an image.
MM_PREFIX_FIELDS = ("mm_prefix_range_tensor", "mm_prefix_query_range_tensor")


class LeanBackend(FlashAttentionBackend):
    """Backend that `leanbench.integrations.vllm.register` registers."""

    #: Layers then write their tokens in `LeanImpl.forward` alone.
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        """Return the member of vLLM's AttentionBackendEnum."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[LeanImpl]:
        return LeanImpl

    @staticmethod
    def get_builder_cls() -> type[LeanMetadataBuilder]:
        return LeanMetadataBuilder


class LeanMetadataBuilder(FlashAttentionMetadataBuilder):
    """FlashAttention's metadata, without its scheduler's and cascade's if unused: LeanAttention
    schedules on the device.
    """

    #: A graph of single tokens has a row per token, so it serves no batch with a prompt. FA3's do.
    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        # Triton's kernel, which attends on other GPUs, does not append.
        is_cuda = LEAN.implementation_on(spec_of(device)) is LEAN.cuda
        self.may_append = is_cuda and _may_append(vllm_config)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Any:
        if common_attn_metadata.max_query_len > MAX_QUERY_TOKENS:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        metadata = super().build(0, common_attn_metadata, fast_build=True)
        metadata.may_append = self.may_append
        return metadata

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        metadata = super().build_for_cudagraph_capture(common_attn_metadata)
        # Settings are timed then: see `leanbench.autotune`.
        metadata.is_warm_up = is_on(AUTOTUNE, default=False)
        return metadata


class LeanImpl(FlashAttentionImpl):
    """Attention of a layer."""

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write the new tokens into the cache and compute attention over it.

        Args:
            query: (tokens, heads, head_size), padded to the tokens of a graph.
            key: Like `query`, with the KV heads; None where nothing is written.
            kv_cache: (blocks, 2, block_size, kv_heads, head_size), in vLLM 0.33 (blocks, kv_heads,
                block_size, 2 head_size).
            output: (tokens, heads, head_size), written.
        """
        scales = output_scale, output_block_scale
        given = (layer, query, key, value, kv_cache, attn_metadata, output, *scales)
        if attn_metadata is None:
            return super().forward(*given)
        takes = all(scale is None for scale in scales) and self._takes(attn_metadata)
        writes = self.kv_sharing_target_layer_name is None and not (key is None or value is None)
        appends = takes and writes and self._appends(attn_metadata, key, kv_cache)
        if writes and not appends:
            slots = attn_metadata.slot_mapping
            self.do_kv_cache_update(layer, key, value, kv_cache, slots)
        if not takes:
            return super().forward(*given)
        tokens, lengths = attn_metadata.num_actual_tokens, attn_metadata.seq_lens
        q, out = query[:tokens], output[:tokens]
        k_cache, v_cache = self._caches(kv_cache)
        options: dict[str, Any] = {}
        if _is_single(attn_metadata):
            q, out = q.unsqueeze(1), out.unsqueeze(1)
        else:
            options["cu_seqlens_q"] = attn_metadata.query_start_loc
            options["max_seqlen_q"] = min(attn_metadata.max_query_len, tokens)
        if appends:
            options["k"], options["v"] = key[:tokens].unsqueeze(1), value[:tokens].unsqueeze(1)
            lengths = _lengths_before(attn_metadata)
        if k_cache.dtype.itemsize == 1:
            scales = (lengths.shape[0], self.num_kv_heads)
            options["q_descale"] = layer._q_scale.expand(scales)
            options["k_descale"] = layer._k_scale.expand(scales)
            options["v_descale"] = layer._v_scale.expand(scales)
        is_warm_up = getattr(attn_metadata, "is_warm_up", False)
        # The tuner is above this room, and the package's name leads to it.
        with import_module("leanbench").autotune() if is_warm_up else nullcontext():
            lean_attn_with_kvcache(
                q,
                k_cache,
                v_cache,
                cache_seqlens=lengths,
                block_table=attn_metadata.block_table,
                softmax_scale=self.scale,
                causal=True,
                window_size=(self.sliding_window[0], -1),
                softcap=self.logits_soft_cap,
                alibi_slopes=self.alibi_slopes,
                sinks=self.sinks,
                batch_invariant=self.batch_invariant_enabled,
                out=out,
                **options,
            )
        return output

    def _takes(self, attn_metadata: Any) -> bool:
        """Return True for a decode step of a decoder that needs no feature of FlashAttention's
        backend.
        """
        return (
            attn_metadata.max_query_len <= MAX_QUERY_TOKENS
            and attn_metadata.causal is True
            and self.attn_type == AttentionType.DECODER
            and self.dcp_world_size == 1
            and (self.head_size <= 256 or self.head_size == 512)
            and attn_metadata.rswa_prefix_lens is None
            and all(getattr(attn_metadata, name, None) is None for name in MM_PREFIX_FIELDS)
            # Packed queries have no batch-invariant mode.
            and (_is_single(attn_metadata) or not self.batch_invariant_enabled)
        )

    def _appends(self, attn_metadata: Any, key: torch.Tensor, kv_cache: torch.Tensor) -> bool:
        """Return True if the kernel writes the new token of each sequence.

        vLLM writes fp8 caches, with their scales, and several tokens of a sequence.
        """
        return (
            getattr(attn_metadata, "may_append", False)
            and _is_single(attn_metadata)
            and key.dtype == kv_cache.dtype
        )

    def _caches(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V, (blocks, block_size, kv_heads, head_size)."""
        if kv_cache.dim() == 5:
            k_cache, v_cache = kv_cache.unbind(1)
        else:
            k_cache, v_cache = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        if self.kv_cache_dtype.startswith("fp8"):
            dtype = torch.float8_e5m2 if "e5m2" in self.kv_cache_dtype else torch.float8_e4m3fn
            k_cache, v_cache = k_cache.view(dtype), v_cache.view(dtype)
        return k_cache, v_cache


def _is_single(attn_metadata: Any) -> bool:
    """Return True if each sequence has one query token, with those that pad a graph."""
    return (
        attn_metadata.max_query_len == 1
        and attn_metadata.num_actual_tokens == attn_metadata.seq_lens.shape[0]
    )


def _may_append(vllm_config: Any) -> bool:
    """Return True if each row of a decode step may write at its length, through its block table.

    vLLM writes to `slot_mapping`, which names no slot for some rows. The kernel writes for all:

    - Rows that pad a graph write to vLLM's null block. Block tables of windows and states name it,
      too, and attention may read it there with a weight of 0, which turns NaN into NaN. So every
      layer must have full attention.
    - Draft models have rows past the longest sequence, and lengths that graphs change.
    - Idle ranks of data parallelism run rows of no request with block tables of others.
    - Prefix caching lets a request read a block in the step that fills it. vLLM writes all tokens
      of a layer before attention, the kernel does not: no row waits for another's token.
    """
    layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase).values()
    return (
        vllm_config.speculative_config is None
        and not vllm_config.cache_config.enable_prefix_caching
        and vllm_config.parallel_config.data_parallel_size == 1
        and all(type(layer.get_kv_cache_spec(vllm_config)) is FullAttentionSpec for layer in layers)
    )


def _lengths_before(attn_metadata: Any) -> torch.Tensor:
    """Return the sequences' lengths before the step, 0 for rows that pad a graph.

    A step's first layer computes them, for all layers. A graph that captures the step captures
    this, too, so each replay has the lengths of its step.
    """
    lengths = getattr(attn_metadata, "lengths_before", None)
    if lengths is None:
        lengths = attn_metadata.lengths_before = (attn_metadata.seq_lens - 1).clamp_(min=0)
    return lengths
