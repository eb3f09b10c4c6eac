"""FlashAttention-3 for Hopper (Shah et al., 2024, arXiv 2407.08608): its
`flash_attn_with_kvcache`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from leanbench.kernels.libraries.library import LibraryKernel, lengths

from leanbench.core.config import KernelConfig
from leanbench.core.kernel import OwnOutputs

if TYPE_CHECKING:
    import torch

    from leanbench.core.inputs import AttentionInputs


class FlashAttn3(LibraryKernel):
    name = "flash_attn_3"
    title = "FlashAttention-3's flash_attn_with_kvcache, for Hopper; a heuristic splits the context"
    decomposition = "fixed_split"
    source = "Shah et al. 2024, arXiv 2407.08608; flash_attn_3"
    modules = ("flash_attn_interface",)
    install = (
        'pip install "git+https://github.com/Dao-AILab/flash-attention.git#subdirectory=hopper"'
    )
    distribution = "flash_attn_3"
    written_for = "3.0"
    head_dims = (64, 80, 96, 128, 256)
    axes = LibraryKernel.axes | {"q_len", "page_size", "lengths", "lengths_on"}

    def launch(self, inputs: AttentionInputs, config: KernelConfig | None) -> FlashAttn3Launch:
        return FlashAttn3Launch(inputs)

    def planner(self, inputs: AttentionInputs) -> Callable[[], Any] | None:
        import flash_attn_interface as library

        return _metadata_call(library, inputs, _shared(inputs))


class FlashAttn3Launch(OwnOutputs):
    """Who does what is computed here where the library lets it, as servers do once for all layers
    of a step.
    """

    def __init__(self, inputs: AttentionInputs) -> None:
        import flash_attn_interface as library

        super().__init__(inputs)
        shared = _shared(inputs)
        metadata_call = _metadata_call(library, inputs, shared)
        self._attend = partial(
            library.flash_attn_with_kvcache,
            inputs.q,
            inputs.k_cache,
            inputs.v_cache,
            page_table=inputs.block_table,
            softmax_scale=inputs.softmax_scale,
            scheduler_metadata=None if metadata_call is None else metadata_call(),
            return_softmax_lse=True,
            **shared,
        )

    def compute(self) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, *_ = self._attend()
        return out, lse


def _shared(inputs: AttentionInputs) -> dict[str, Any]:
    """What both calls must say the same. With one query token there is nothing to mask."""
    return {
        "cache_seqlens": lengths(inputs),
        "causal": inputs.q_len > 1,
        "pack_gqa": inputs.group_size > 1,
    }


def _metadata_call(
    library: Any, inputs: AttentionInputs, shared: dict[str, Any]
) -> Callable[[], Any] | None:
    """None where this version has no such function."""
    if not hasattr(library, "get_scheduler_metadata"):
        return None
    batch, q_len, q_heads, head_dim = inputs.q.shape
    # What flash_attn_with_kvcache takes for the longest context, which it does not ask the device
    # for.
    tokens = inputs.k_cache.shape[1] * (
        1 if inputs.block_table is None else inputs.block_table.shape[1]
    )
    return partial(
        library.get_scheduler_metadata,
        batch,
        q_len,
        tokens,
        q_heads,
        inputs.kv_heads,
        head_dim,
        qkv_dtype=inputs.q.dtype,
        page_size=inputs.page_size,
        **shared,
    )
