"""Attention of a whole model, in addition to the other kernel families: transformers' own, and
none.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from leanbench.kernels.libraries.library import installed_version

from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.kernel import ROUNDED_SCORES, Kernel
from leanbench.core.problem import AttentionProblem

if TYPE_CHECKING:
    import torch

    from leanbench.core.inputs import AttentionInputs


class WholeModelKernel(Kernel[None]):
    """An attention function of transformers, called by a model in every layer."""

    decomposition = "other"
    source = "transformers, the version that is installed"
    is_peer = True
    lse_base = None
    fits_whole_models = True
    only_in_whole_models = True
    axes = Kernel.axes | {"capacity", "lengths", "lengths_on"}
    head_dims = range(8, 1025, 8)

    def unavailable_reason(self) -> str | None:
        if find_spec("transformers") is not None:
            return None
        return f"{self.name} needs transformers, which is not installed here"

    def library(self) -> str:
        return f"transformers {installed_version('transformers')}"

    def default_config(self, problem: AttentionProblem, gpu: GpuSpec) -> None:
        return None

    def prepare(self, inputs: AttentionInputs, config: None) -> Callable[[], Any]:
        raise TypeError(f"{self.name} is the attention of whole models")

    @abstractmethod
    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor,
        **call: Any,
    ) -> torch.Tensor:
        """Return the output as transformers' attention functions do, (batch, 1, q_heads, head_dim).

        Args:
            mask: (batch, 1, 1, capacity), True for visible tokens.
        """


class Eager(WholeModelKernel):
    name = "eager"
    title = "transformers' eager attention: torch's operators, one after the other"
    axes = WholeModelKernel.axes | {"sinks"}

    def precision(self, problem: AttentionProblem) -> str:
        return problem.dtype + ROUNDED_SCORES

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor,
        **call: Any,
    ) -> torch.Tensor:
        import torch

        # Each model's module defines its own.
        attend = sys.modules[type(module).__module__].eager_attention_forward
        zero = torch.zeros((), dtype=query.dtype, device=query.device)
        additive = zero.where(mask, torch.finfo(query.dtype).min)
        return attend(module, query, key, value, additive, **call)[0]


class Sdpa(WholeModelKernel):
    name = "sdpa"
    title = (
        "transformers' sdpa: torch's scaled_dot_product_attention with the mask of a static cache"
    )

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor,
        **call: Any,
    ) -> torch.Tensor:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, mask, **call)[0]


class NoAttention(WholeModelKernel):
    """No attention: the lower bound of a step's time."""

    name = "no_attention"
    title = "no attention: the query stands for the output, and the KV cache is not read"
    source = "this project"
    is_peer = False
    axes = WholeModelKernel.axes | {"sinks"}

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor,
        **call: Any,
    ) -> torch.Tensor:
        return query.transpose(1, 2)


KERNELS = (Eager(), Sdpa(), NoAttention())
