"""SGLang's FlashAttention-3 backend, with LeanAttention in decode steps. Written from the sources
of SGLang 0.5.23; not run on a GPU.

Metadata, page tables, CUDA graphs and prompts are inherited from the server's backend.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from leanbench.attention import lean_attn_with_kvcache


class LeanBackend(FlashAttentionBackend):
    """Backend that `leanbench.integrations.sglang.register` registers."""

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        *,
        sinks: torch.Tensor | None = None,
        **options: Any,
    ) -> Any:
        """Compute the attention of a layer's decode step, after writing its tokens to the cache.

        Args:
            q: (batch, heads x head_dim).
            k: (batch, kv_heads, head_dim) of the new tokens; None: they are in the cache.
            options: Further features, which FlashAttention handles.

        Returns:
            (batch, heads x head_dim of V).
        """
        table = self._page_table(layer)
        if table is None or not self._is_plain(layer, forward_batch, options):
            return super().forward_decode(
                q, k, v, layer, forward_batch, save_kv_cache, sinks=sinks, **options
            )
        metadata = self.forward_metadata
        if k is not None and save_kv_cache:
            place = KVWriteLoc.for_layer(forward_batch, layer, swa_loc=metadata.swa_out_cache_loc)
            scales = layer.k_scale, layer.v_scale
            self.token_to_kv_pool.set_kv_buffer(layer, place, k, v, *scales)
        q, _, _, k_descale, v_descale = self.prepare_paged_mha_query(
            q,
            None,
            None,
            layer,
            logical_batch_size=forward_batch.batch_size,
            kv_head_num=layer.tp_k_head_num,
            is_prefill=False,
        )
        k_cache, v_cache = self.get_paged_mha_kv_cache(layer)
        out = getattr(forward_batch, "_attn_output", None)
        heads = layer.tp_q_head_num
        result = lean_attn_with_kvcache(
            q.reshape(-1, 1, heads, layer.head_dim),
            k_cache,
            v_cache,
            cache_seqlens=metadata.cache_seqlens_int32,
            block_table=table,
            softmax_scale=layer.scaling,
            causal=True,
            window_size=(layer.sliding_window_size if _is_windowed(layer) else -1, -1),
            softcap=layer.logit_cap,
            sinks=sinks,
            k_descale=k_descale,
            v_descale=v_descale,
            out=None if out is None else out.view(-1, 1, heads, layer.v_head_dim),
        )
        assert isinstance(result, torch.Tensor)
        return result.view(-1, heads * layer.v_head_dim)

    def _page_table(self, layer: Any) -> torch.Tensor | None:
        """Return the pages of the sequences, or None if the step has no page table."""
        if _is_windowed(layer) and self.use_sliding_window_kv_pool:
            return self.forward_metadata.swa_page_table
        return self.forward_metadata.page_table

    def _is_plain(self, layer: Any, forward_batch: Any, options: dict[str, Any]) -> bool:
        """Return True if LeanAttention supports the step; FlashAttention handles the others."""
        metadata, chunked = self.forward_metadata, self.local_attn_builder
        return (
            not any(value is not None and value is not False for value in options.values())
            and not self.use_mla
            and not self.kv_cache_is_mxfp8
            and forward_batch.spec_info is None
            and metadata.max_seq_len_q == 1
            and layer.attn_type == AttentionType.DECODER
            and not layer.is_cross_attention
            and (layer.head_dim <= 256 or layer.head_dim == 512)
            and not (chunked is not None and chunked.applies(layer, metadata))
            and not (self.is_prefill_aware_swa and metadata.pa_swa_page_table is not None)
        )


def _is_windowed(layer: Any) -> bool:
    return layer.sliding_window_size is not None and layer.sliding_window_size > -1
