"""FlashAttention-2 (Dao, 2023) and FlashDecoding (Dao et al., 2023) of the package flash-attn:
`flash_attn_with_kvcache` without and with splits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from leanbench.kernels.fixed_split.configs import split_counts
from leanbench.kernels.libraries.library import MAX_PROMPT, LibraryKernel, lengths

from leanbench.core.config import TileConfig, optional_number
from leanbench.core.decomposition import TileGrid
from leanbench.core.errors import UserError
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.kernel import OwnOutputs
from leanbench.core.problem import AttentionProblem

if TYPE_CHECKING:
    import torch

    from leanbench.core.inputs import AttentionInputs

#: Page sizes must be multiples of this.
_PAGE_TOKENS = 256
#: Value of `num_splits` that selects the library's heuristic.
_HEURISTIC = 0


class FlashAttn(LibraryKernel):
    name = "flash_attn"
    title = "FlashAttention-2: flash-attn's flash_attn_with_kvcache, the context not split"
    decomposition = "one_cta_per_tile"
    source = "Dao 2023, arXiv 2307.08691; flash-attn"
    modules = ("flash_attn",)
    install = "pip install flash-attn --no-build-isolation"
    distribution = "flash-attn"
    written_for = "2.8"
    head_dims = (64, 80, 96, 128, 256)
    max_q_len = MAX_PROMPT
    axes = LibraryKernel.axes | {
        *("q_len", "page_size", "lengths", "lengths_on", "causal", "window_left", "window_right"),
        *("softcap", "alibi", "leftpad", "batch_idx"),
        *("append", "rotary_dim", "rotary_interleaved"),
    }

    def refusal(self, problem: AttentionProblem) -> str | None:
        if problem.page_size is not None and problem.page_size % _PAGE_TOKENS:
            return (
                f"{self.name} takes pages of multiples of {_PAGE_TOKENS} tokens, this problem has"
                f" page_size {problem.page_size}: choose {_PAGE_TOKENS}"
            )
        if problem.leftpad and problem.page_size is not None:
            return f"{self.name} takes no padding in front of pages: leave leftpad or page_size out"
        if min(problem.contexts) < problem.q_len:
            return (
                f"{self.name} gives an LSE of +inf for a query token that sees nothing, not -inf:"
                f" with q_len {problem.q_len} choose contexts of at least {problem.q_len} tokens"
            )
        return super().refusal(problem)

    def launch(self, inputs: AttentionInputs, config: Any) -> FlashAttnLaunch:
        return FlashAttnLaunch(inputs, num_splits=1)


@dataclass(frozen=True)
class FlashDecodingConfig(TileConfig):
    """Compiled parameters of flash-attn, and the number of splits."""

    #: Splits per output tile; 0: the library's heuristic.
    splits: int = optional_number(1, 2**16, unused=0)


class FlashDecoding(FlashAttn):
    """flash-attn with splits. The library's heuristic applies if the config names none."""

    name = "flash_decoding"
    title = "FlashDecoding: flash-attn's flash_attn_with_kvcache, its heuristic splits the context"
    decomposition = "fixed_split"
    source = "Dao, Haziza, Massa, Sizov 2023, Flash-Decoding; flash-attn"
    config_types = (FlashDecodingConfig,)

    def default_config(self, problem: AttentionProblem, gpu: GpuSpec) -> FlashDecodingConfig:
        return _compiled_in(problem.head_dim)

    def candidate_configs(
        self, problem: AttentionProblem, gpu: GpuSpec
    ) -> list[FlashDecodingConfig]:
        default = self.default_config(problem, gpu)
        counts = split_counts(TileGrid.of(problem, default.tile_tokens), gpu)
        return [default, *(replace(default, splits=splits) for splits in counts)]

    def launch(self, inputs: AttentionInputs, config: FlashDecodingConfig) -> FlashAttnLaunch:
        compiled = _compiled_in(inputs.head_dim)
        if replace(config, splits=0) != compiled:
            raise UserError(
                f"{self.name} is compiled with {compiled.to_dict()} for head_dim {inputs.head_dim},"
                f" this config has {config.to_dict()}: only splits can be chosen"
            )
        return FlashAttnLaunch(inputs, num_splits=config.splits or _HEURISTIC)


class FlashAttnLaunch(OwnOutputs):
    def __init__(self, inputs: AttentionInputs, num_splits: int) -> None:
        from flash_attn import flash_attn_with_kvcache

        super().__init__(inputs)
        self._attend = partial(
            flash_attn_with_kvcache,
            inputs.q,
            inputs.k_cache,
            inputs.v_cache,
            inputs.k_new,
            inputs.v_new,
            rotary_cos=inputs.rotary_cos,
            rotary_sin=inputs.rotary_sin,
            rotary_interleaved=inputs.rotary_interleaved,
            cache_seqlens=lengths(inputs),
            cache_batch_idx=inputs.cache_batch_idx,
            cache_leftpad=inputs.cache_leftpad,
            block_table=inputs.block_table,
            softmax_scale=inputs.softmax_scale,
            # A single query token needs a causal mask only for the end of its window.
            causal=inputs.causal and (inputs.q_len > 1 or inputs.window_left >= 0),
            window_size=(inputs.window_left, inputs.window_right),
            softcap=inputs.softcap,
            alibi_slopes=inputs.alibi_slopes,
            num_splits=num_splits,
            return_softmax_lse=True,
        )

    def compute(self) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = self._attend()
        return out, lse


def _compiled_in(head_dim: int) -> FlashDecodingConfig:
    """Return tile and warps of its split kernels.

    They have no stages: shared memory holds one tile each of K and V.
    """
    return FlashDecodingConfig(
        256 if head_dim <= 64 else 128 if head_dim <= 128 else 64, num_warps=4, num_stages=1
    )
