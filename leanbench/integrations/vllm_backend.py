"""vLLM's FlashAttention backend, with LeanAttention in decode steps. Written from the sources of
vLLM 0.25.0 and 0.33.0; vLLM 0.25.0 ran on an H200 (docs/integrations.md).

Batches, cache shapes and writes, CUDA graphs and prompts are inherited from the server's backend.
"""

from __future__ import annotations

from contextlib import nullcontext
from importlib import import_module
from typing import Any

import torch
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)

from leanbench.attention import lean_attn_with_kvcache
from leanbench.core.switches import AUTOTUNE, is_on

#: Query tokens of a sequence up to which a batch is a decode step: one, or those that speculation
#: verifies. More of them are FlashAttention's (reports/performance-log.md, entry 42).
MAX_QUERY_TOKENS = 16
#: Fields of FlashAttention's metadata, in vLLM 0.25 and 0.33, with ranges of a prompt that have
#: bidirectional attention: those of an image.
MM_PREFIX_FIELDS = ("mm_prefix_range_tensor", "mm_prefix_query_range_tensor")


class LeanBackend(FlashAttentionBackend):
    """Backend that `leanbench.integrations.vllm.register` registers."""

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

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Any:
        if common_attn_metadata.max_query_len > MAX_QUERY_TOKENS:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        return super().build(0, common_attn_metadata, fast_build=True)

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
        """Compute attention over a cache that has the new tokens already.

        Args:
            query: (tokens, heads, head_size), padded to the tokens of a graph.
            kv_cache: (blocks, 2, block_size, kv_heads, head_size), in vLLM 0.33 (blocks, kv_heads,
                block_size, 2 head_size).
            output: (tokens, heads, head_size), written.
        """
        scaled = output_scale is not None or output_block_scale is not None
        if scaled or attn_metadata is None or not self._takes(attn_metadata):
            return super().forward(
                layer,
                query,
                key,
                value,
                kv_cache,
                attn_metadata,
                output,
                output_scale,
                output_block_scale,
            )
        tokens, lengths = attn_metadata.num_actual_tokens, attn_metadata.seq_lens
        q, out = query[:tokens], output[:tokens]
        k_cache, v_cache = self._caches(kv_cache)
        options: dict[str, Any] = {}
        if _is_single(attn_metadata):
            q, out = q.unsqueeze(1), out.unsqueeze(1)
        else:
            options["cu_seqlens_q"] = attn_metadata.query_start_loc
            options["max_seqlen_q"] = min(attn_metadata.max_query_len, tokens)
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
