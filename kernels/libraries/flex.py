"""torch's FlexAttention (Dong et al., 2024, arXiv 2412.05496) without a mask, compiled."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from leanbench.kernels.libraries.library import LibraryKernel

from leanbench.core.config import KernelConfig
from leanbench.core.kernel import OwnOutputs
from leanbench.core.problem import AttentionProblem

if TYPE_CHECKING:
    import torch

    from leanbench.core.inputs import AttentionInputs

#: The block size with which FlexAttention says that nothing is masked, whatever the lengths.
_ONE_BLOCK = 1 << 30


class TorchFlex(LibraryKernel):
    name = "torch_flex"
    title = (
        "torch's FlexAttention, compiled: its decode kernel splits the context, two splits an SM"
    )
    decomposition = "fixed_split"
    source = "Dong et al. 2024, arXiv 2412.05496; torch"
    #: The output alone is asked for.
    lse_base = None
    head_dims = (64, 80, 96, 128, 256)

    def refusal(self, problem: AttentionProblem) -> str | None:
        if problem.group_size & (problem.group_size - 1):
            return (
                "torch_flex decodes groups of a power of two of query heads, this problem has"
                f" {problem.group_size}"
            )
        return super().refusal(problem)

    def launch(self, inputs: AttentionInputs, config: KernelConfig | None) -> TorchFlexLaunch:
        return TorchFlexLaunch(inputs)


class TorchFlexLaunch(OwnOutputs):
    """The tensors are views: q (batch, q_heads, 1, head_dim), K and V (batch, kv_heads, tokens,
    head_dim).
    """

    def __init__(self, inputs: AttentionInputs) -> None:
        super().__init__(inputs)
        tensors = [tensor.transpose(1, 2) for tensor in (inputs.q, *_used(inputs))]
        shapes = tuple(
            (tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in tensors
        )
        self._attend = partial(
            _compiled(shapes),
            *tensors,
            # Left out, two small kernels would make it in every call.
            block_mask=_nothing_masked(inputs.q.device),
            scale=inputs.softmax_scale,
            enable_gqa=inputs.group_size > 1,
        )

    def compute(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._attend().transpose(1, 2), self.results.lse


def _used(inputs: AttentionInputs) -> list[torch.Tensor]:
    return [cache[:, : inputs.context] for cache in (inputs.k_cache, inputs.v_cache)]


@lru_cache(maxsize=1)
def _compiled(shapes: tuple[Any, ...]) -> Callable[..., torch.Tensor]:
    """Compiled anew for every problem: torch keeps eight shapes of a function, and refuses more."""
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    torch.compiler.reset()
    # Sizes that are known let it take the decode kernel.
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


@lru_cache(maxsize=1)
def _nothing_masked(device: torch.device) -> Any:
    import torch
    from torch.nn.attention.flex_attention import BlockMask

    blocks = torch.ones(1, 1, 1, dtype=torch.int32, device=device)
    indices = torch.zeros(1, 1, 1, 1, dtype=torch.int32, device=device)
    return BlockMask.from_kv_blocks(blocks, indices, BLOCK_SIZE=_ONE_BLOCK, seq_lengths=(1, 1))
