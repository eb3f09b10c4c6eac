"""torch's FlexAttention (Dong et al., 2024, arXiv 2412.05496), compiled: soft caps and ALiBi as
score functions, windows and causal masks as block masks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from leanbench.kernels.libraries.library import LibraryKernel

from leanbench.core.config import KernelConfig
from leanbench.core.kernel import OwnOutputs
from leanbench.core.problem import AttentionProblem

if TYPE_CHECKING:
    import torch

    from leanbench.core.inputs import AttentionInputs


class TorchFlex(LibraryKernel):
    name = "torch_flex"
    title = (
        "torch's FlexAttention, compiled: its decode kernel splits the context, two splits an SM"
    )
    decomposition = "fixed_split"
    source = "Dong et al. 2024, arXiv 2412.05496; torch"
    #: Only the output is requested.
    lse_base = None
    head_dims = (64, 80, 96, 128, 256)
    axes = LibraryKernel.axes | {
        *("q_len", "causal", "window_left", "window_right", "softcap", "alibi"),
    }

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
    """A launch over views: q (batch, q_heads, q_len, head_dim), K and V (batch, kv_heads, tokens,
    head_dim).
    """

    def __init__(self, inputs: AttentionInputs) -> None:
        super().__init__(inputs)
        tensors = [tensor.transpose(1, 2) for tensor in (inputs.q, *_used(inputs))]
        shapes = tuple(
            (tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in tensors
        )
        kinds = (inputs.softcap, inputs.alibi_slopes is not None, _Band.of(inputs))
        self._attend = partial(
            _compiled(shapes, kinds),
            *tensors,
            score_mod=_score_mod(inputs),
            block_mask=_block_mask(_Band.of(inputs)),
            scale=inputs.softmax_scale,
            enable_gqa=inputs.group_size > 1,
        )

    def compute(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._attend().transpose(1, 2), self.results.lse


def _used(inputs: AttentionInputs) -> list[torch.Tensor]:
    return [cache[:, : inputs.context] for cache in (inputs.k_cache, inputs.v_cache)]


@dataclass(frozen=True)
class _Band:
    """Band of tokens visible to the query tokens."""

    q_len: int
    context: int
    causal: bool
    left: int
    right: int
    device: torch.device

    @classmethod
    def of(cls, inputs: AttentionInputs) -> _Band:
        return cls(
            inputs.q_len,
            inputs.context,
            inputs.causal and inputs.q_len > 1,
            inputs.window_left,
            inputs.window_right,
            inputs.q.device,
        )

    @property
    def mask_mod(self) -> Callable[[Any, Any, Any, Any], Any]:
        """Return a predicate of visible tokens. torch accepts only plain functions."""
        first_query = self.context - self.q_len
        # A missing limit becomes a position past both ends.
        before = self.left if self.left >= 0 else self.context
        after = 0 if self.causal else self.right if self.right >= 0 else self.context

        def sees(batch: Any, head: Any, query: Any, token: Any) -> Any:
            distance = first_query + query - token
            return (distance <= before) & (distance >= -after)

        return sees


def _score_mod(inputs: AttentionInputs) -> Callable[..., torch.Tensor] | None:
    """Return the function applied to scores, or None."""
    softcap, slopes = inputs.softcap, inputs.alibi_slopes
    first = inputs.context - inputs.q_len

    def capped(score: Any, batch: Any, head: Any, query: Any, token: Any) -> Any:
        return softcap * (score / softcap).tanh() if softcap else score

    if slopes is None:
        return capped if softcap else None
    of_batch = slopes.expand(inputs.batch, -1)

    def biased(score: Any, batch: Any, head: Any, query: Any, token: Any) -> Any:
        distance = (first + query - token).abs()
        return capped(score, batch, head, query, token) - of_batch[batch, head] * distance

    return biased


@lru_cache(maxsize=1)
def _block_mask(band: _Band) -> Any:
    """Return the block mask, also if nothing is masked.

    Without it, each call would build a mask of a single block by two small kernels, and the decode
    kernel would not split.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(band.mask_mod, None, None, band.q_len, band.context, band.device)


@lru_cache(maxsize=1)
def _compiled(shapes: tuple[Any, ...], kinds: tuple[Any, ...]) -> Callable[..., torch.Tensor]:
    """Compile FlexAttention per problem: torch keeps at most eight shapes of a function."""
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    torch.compiler.reset()
    # Static sizes allow the decode kernel.
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)
