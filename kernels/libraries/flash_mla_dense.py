"""FlashMLA's decode over a latent cache and over chosen rows, for Hopper, as SGLang packages it."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
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

#: The only page size of the dense kernel; chosen tokens that the sparse one takes at a time.
_PAGE_TOKENS = 64
#: Query heads of the sparse kernel. Others are padded.
_HEADS = (64, 128)


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


class FlashMlaSparse(LibraryKernel):
    name = "flash_mla_sparse"
    title = "FlashMLA's decode over chosen fp8 rows of a latent cache; its schedule is made before"
    decomposition = "fixed_split"
    source = FlashMla.source
    modules, install = FlashMla.modules, FlashMla.install
    distribution, written_for = FlashMla.distribution, FlashMla.written_for
    head_dims = HEAD_DIMS
    page_sizes = (1,)
    axes = LibraryKernel.axes | {
        *("page_size", "lengths", "lengths_on", "v_head_dim", "latent", "kv_dtype", "row_scales"),
        "select",
    }

    def refusal(self, problem: AttentionProblem) -> str | None:
        if (reason := latent_refusal(self.name, problem)) is not None:
            return reason
        if not problem.row_scales:
            return f"{self.name} takes rows with scales alone: give row_scales and kv_dtype e4m3"
        if problem.q_heads > _HEADS[-1]:
            return f"{self.name} takes {_HEADS[-1]} query heads at most: choose fewer, with tp"
        if (chosen := problem.seen.cache_capacity) % _PAGE_TOKENS:
            return (
                f"{self.name} takes {_PAGE_TOKENS} chosen tokens at a time, these are {chosen}:"
                f" choose a multiple of {_PAGE_TOKENS}"
            )
        return super().refusal(problem)

    def launch(self, inputs: AttentionInputs, config: KernelConfig | None) -> FlashMlaSparseLaunch:
        return FlashMlaSparseLaunch(inputs)

    def planner(self, inputs: AttentionInputs, config: KernelConfig | None) -> Callable[[], Any]:
        from flash_mla import get_mla_decoding_metadata  # pyright: ignore[reportMissingImports]

        assert inputs.block_table is not None
        tokens, heads, chosen = lengths(inputs), _heads(inputs), inputs.block_table.shape[1]
        return lambda: get_mla_decoding_metadata(
            tokens, heads, 1, heads, True, chosen, use_legacy=True
        )


def _heads(inputs: AttentionInputs) -> int:
    return next(heads for heads in _HEADS if inputs.q_heads <= heads)


class FlashMlaSparseLaunch(OwnOutputs):
    """A launch with query heads padded to the kernel's before it is timed."""

    def __init__(self, inputs: AttentionInputs) -> None:
        import torch
        from flash_mla import (  # pyright: ignore[reportMissingImports]
            flash_mla_with_kvcache,
            get_mla_metadata,
        )

        super().__init__(inputs)
        assert inputs.block_table is not None
        self._own = inputs.q_heads
        padded = (0, 0, 0, _heads(inputs) - self._own)
        # Numbers of tokens are the same in pages of any size; servers have 64.
        page = math.gcd(inputs.k_cache.shape[0], _PAGE_TOKENS)
        # A schedule for fewer tokens than are listed needs their numbers.
        is_full = inputs.cache_seqlens is None and inputs.context == inputs.block_table.shape[1]
        self._attend = partial(
            flash_mla_with_kvcache,
            torch.nn.functional.pad(inputs.q, padded),
            inputs.k_cache.view(-1, page, *inputs.k_cache.shape[2:]),
            None,
            None,
            VALUE_DIM,
            get_mla_metadata()[0],
            softmax_scale=inputs.softmax_scale,
            indices=inputs.block_table[:, None],
            topk_length=None if is_full else lengths(inputs),
            use_legacy=True,
        )

    def compute(self) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = self._attend()
        return out[:, :, : self._own], lse[:, : self._own]


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
