"""FlashMLA's dense decode over a latent cache, for Hopper, as SGLang packages it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from leanbench.kernels.libraries.latent import HEAD_DIMS, VALUE_DIM, latent_refusal
from leanbench.kernels.libraries.library import LibraryKernel, lengths

from leanbench.core.config import KernelConfig
from leanbench.core.errors import UserError
from leanbench.core.kernel import OwnOutputs
from leanbench.core.problem import AttentionProblem

if TYPE_CHECKING:
    import torch

    from leanbench.core.inputs import AttentionInputs

#: The only page size of the kernel.
_PAGE_TOKENS = 64


class FlashMla(LibraryKernel):
    name = "flash_mla"
    title = "FlashMLA's dense decode over a latent cache, for Hopper; its schedule is made before"
    decomposition = "fixed_split"
    source = "DeepSeek FlashMLA; sgl-flash-mla"
    modules = ("flash_mla",)
    install = "pip install --no-deps sgl-flash-mla"
    distribution = "sgl-flash-mla"
    written_for = "1.0.0"
    head_dims = HEAD_DIMS
    page_sizes = (_PAGE_TOKENS,)
    axes = LibraryKernel.axes | {
        "q_len",
        "page_size",
        "lengths",
        "lengths_on",
        "causal",
        "v_head_dim",
        "latent",
    }

    def refusal(self, problem: AttentionProblem) -> str | None:
        if (reason := latent_refusal(self.name, problem)) is not None:
            return reason
        if problem.page_size is None and problem.cache_capacity % _PAGE_TOKENS:
            return (
                f"{self.name} reads pages of {_PAGE_TOKENS} tokens, and the cache has room for"
                f" {problem.cache_capacity}: choose a multiple of {_PAGE_TOKENS}, or page_size"
                f" {_PAGE_TOKENS}"
            )
        return super().refusal(problem)

    def launch(self, inputs: AttentionInputs, config: KernelConfig | None) -> FlashMlaLaunch:
        return FlashMlaLaunch(inputs)

    def planner(self, inputs: AttentionInputs, config: KernelConfig | None) -> Callable[[], Any]:
        from flash_mla import get_mla_decoding_metadata  # pyright: ignore[reportMissingImports]

        tokens = lengths(inputs)
        rows, heads = inputs.q_len * inputs.q_heads, inputs.q_heads
        return lambda: get_mla_decoding_metadata(tokens, rows, 1, heads, use_legacy=True)


class FlashMlaLaunch(OwnOutputs):
    """A launch that keeps the schedule of its first call, as a server does for all layers of a
    step.
    """

    def __init__(self, inputs: AttentionInputs) -> None:
        from flash_mla import (  # pyright: ignore[reportMissingImports]
            flash_mla_with_kvcache,
            get_mla_metadata,
        )

        super().__init__(inputs)
        cache, table = _pages(inputs)
        schedule, _ = get_mla_metadata()
        tokens = lengths(inputs)
        self._attend = lambda: flash_mla_with_kvcache(
            inputs.q,
            cache,
            table,
            tokens,
            VALUE_DIM,
            schedule,
            softmax_scale=inputs.softmax_scale,
            causal=inputs.causal,
            use_legacy=True,
        )

    def compute(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._attend()


def _pages(inputs: AttentionInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cache as pages, and its block table, without copying a contiguous cache.

    Raises:
        UserError: tokens of a contiguous cache are not adjacent.
    """
    import torch

    cache, table = inputs.k_cache, inputs.block_table
    if table is not None:
        return cache, table
    batch, capacity, _, columns = cache.shape
    if not cache.is_contiguous():
        raise UserError(
            "flash_mla reads a contiguous cache, this one has strides"
            f" {tuple(cache.stride())}: pass a contiguous one"
        )
    pages = batch * capacity // _PAGE_TOKENS
    numbers = torch.arange(pages, dtype=torch.int32, device=cache.device)
    return cache.view(pages, _PAGE_TOKENS, 1, columns), numbers.view(batch, -1)
