"""XQA, TensorRT-LLM's decode kernel, as FlashInfer packages it: `flashinfer.xqa`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from leanbench.kernels.libraries.flash_infer import (
    FlashInferKernel,
    page_numbers,
    page_size_of,
    pages_of,
)
from leanbench.kernels.libraries.library import current_stream, lengths

from leanbench.core.config import KernelConfig, switch
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.kernel import FP8
from leanbench.core.kinds import SAME
from leanbench.core.problem import AttentionProblem

if TYPE_CHECKING:
    import torch

    from leanbench.core.inputs import AttentionInputs

_PAGE_SIZES = (16, 32, 64, 128)
#: Memory for a partial result per split and for counters, as in FlashInfer's own wrapper.
_SCRATCH_BYTES = 256 << 20
_COUNTERS = 2 << 20


@dataclass(frozen=True)
class XqaConfig(KernelConfig):
    """Options of XQA available to a caller."""

    #: Overlap the start of a launch with the end of the previous one (programmatic dependent
    #: launch).
    enable_pdl: bool = switch()


class FlashInferXqa(FlashInferKernel):
    """XQA. With an fp8 cache it multiplies in fp8: Q and softmax weights are rounded to it."""

    name = "flashinfer_xqa"
    title = (
        "XQA, TensorRT-LLM's decode kernel in FlashInfer, with programmatic dependent launch or"
        " without, whichever is faster in a cell"
    )
    decomposition = "fixed_split"
    source = "NVIDIA TensorRT-LLM; flashinfer-python"
    #: The kernel writes no LSE.
    lse_base = None
    page_sizes = _PAGE_SIZES
    config_types = (XqaConfig,)
    config_choice = "best"
    axes = FlashInferKernel.axes | {
        *("page_size", "lengths", "lengths_on"),
        *("window_left", "sinks", "kv_dtype", "scaled"),
    }

    def refusal(self, problem: AttentionProblem) -> str | None:
        if problem.page_size is None and problem.cache_capacity % _PAGE_SIZES[0]:
            return (
                f"{self.name} reads pages of 16 to 128 tokens, and the cache has room for"
                f" {problem.cache_capacity}: choose a multiple of 16"
            )
        if problem.kv_dtype not in (SAME, "e4m3"):
            return (
                f"{self.name} takes fp8 as e4m3, this problem has {problem.kv_dtype}: choose e4m3"
            )
        return super().refusal(problem)

    def precision(self, problem: AttentionProblem) -> str:
        return problem.dtype if problem.kv_dtype == SAME else FP8

    def default_config(self, problem: AttentionProblem, gpu: GpuSpec) -> XqaConfig:
        return XqaConfig(enable_pdl=True)

    def candidate_configs(self, problem: AttentionProblem, gpu: GpuSpec) -> list[XqaConfig]:
        return [XqaConfig(enable_pdl=True), XqaConfig(enable_pdl=False)]

    def launch(self, inputs: AttentionInputs, config: XqaConfig) -> partial[Any]:
        import torch
        from flashinfer import xqa

        page_size = page_size_of(inputs)
        table = inputs.block_table
        if table is None:
            pages = inputs.k_cache.shape[1] // page_size
            (numbers,) = page_numbers([inputs], page_size, [pages] * inputs.batch)
            table = numbers.view(inputs.batch, pages)
        scratch, counters = _workspace(inputs.q.device, current_stream(inputs.q.device))
        sinks = inputs.sinks
        return partial(
            xqa,
            inputs.q,
            pages_of(inputs.k_cache, inputs, page_size),
            pages_of(inputs.v_cache, inputs, page_size),
            table,
            lengths(inputs).view(torch.uint32)[:, None],
            inputs.out,
            scratch,
            counters,
            inputs.kv_heads,
            page_size,
            sinks=None if sinks is None else sinks.float().view(inputs.kv_heads, -1),
            # XQA divides this factor of the scores by the root of head_dim.
            q_scale=inputs.softmax_scale * inputs.head_dim**0.5,
            # XQA's window includes the query token.
            sliding_win_size=inputs.window_left + 1,
            enable_pdl=config.enable_pdl,
        )


@cache
def _workspace(device: torch.device, stream: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scratch memory and counters, initially zero, shared by launches of a stream."""
    import torch

    scratch = torch.empty(_SCRATCH_BYTES, dtype=torch.uint8, device=device)
    return scratch, torch.zeros(_COUNTERS, dtype=torch.int32, device=device).view(torch.uint32)
