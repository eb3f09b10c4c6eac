"""Backends of `torch.nn.functional.scaled_dot_product_attention`: cuDNN, FlashAttention-2,
memory-efficient, math.

Their limits are in torch's aten/src/ATen/native/transformers/cuda/sdp_utils.cpp.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from leanbench.kernels.libraries.library import MAX_PROMPT, LibraryKernel

from leanbench.core.config import KernelConfig
from leanbench.core.kernel import OwnOutputs
from leanbench.core.problem import AttentionProblem

if TYPE_CHECKING:
    import torch

    from leanbench.core.inputs import AttentionInputs


class SdpaKernel(LibraryKernel):
    """A single backend; torch raises if it cannot run.

    Its causal mask begins at the first token: it decodes one query token, or prefills a prompt.
    """

    #: The call returns only the output.
    lse_base = None
    #: Name in `torch.nn.attention.SDPBackend`.
    backend: str
    max_q_len = MAX_PROMPT
    axes = LibraryKernel.axes | {"q_len"}

    def refusal(self, problem: AttentionProblem) -> str | None:
        if problem.q_len not in (1, problem.max_context):
            return (
                f"{self.name} takes one query token or a whole prompt, this problem has q_len"
                f" {problem.q_len} and {problem.max_context} tokens: choose q_len 1 or as many as"
                " tokens"
            )
        return super().refusal(problem)

    def launch(self, inputs: AttentionInputs, config: KernelConfig | None) -> SdpaLaunch:
        return SdpaLaunch(inputs, self.backend)


class SdpaLaunch(OwnOutputs):
    """A launch over views: q (batch, q_heads, q_len, head_dim), K and V (batch, kv_heads, tokens,
    head_dim).
    """

    def __init__(self, inputs: AttentionInputs, backend: str) -> None:
        from torch.nn.attention import SDPBackend

        super().__init__(inputs)
        self._backend = getattr(SDPBackend, backend)
        self._q = inputs.q.transpose(1, 2)
        self._k = inputs.k_cache[:, : inputs.context].transpose(1, 2)
        self._v = inputs.v_cache[:, : inputs.context].transpose(1, 2)

    def compute(self) -> tuple[torch.Tensor, torch.Tensor]:
        from torch.nn.attention import sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        with sdpa_kernel(self._backend):
            out = scaled_dot_product_attention(
                self._q,
                self._k,
                self._v,
                is_causal=self.results.q_len > 1,
                scale=self.results.softmax_scale,
                enable_gqa=self.results.group_size > 1,
            )
        return out.transpose(1, 2), self.results.lse


class Cudnn(SdpaKernel):
    name = "cudnn"
    title = "cuDNN's attention through torch's scaled_dot_product_attention"
    source = "NVIDIA cuDNN, the version that torch loads"
    backend = "CUDNN_ATTENTION"
    # Support for 256 depends on the GPU and the versions of cuDNN and torch.
    head_dims = (64, 80, 96, 128)

    def refusal(self, problem: AttentionProblem) -> str | None:
        if problem.max_context == 1:
            return f"{self.name} refuses a context of one token, choose 2 or more"
        return super().refusal(problem)


class CudnnLse(Cudnn):
    name = "cudnn_lse"
    title = "cuDNN's attention through torch, with the LSE written as well"
    lse_base = math.e

    def launch(self, inputs: AttentionInputs, config: KernelConfig | None) -> CudnnLseLaunch:
        return CudnnLseLaunch(inputs, self.backend)


class CudnnLseLaunch(SdpaLaunch):
    """The operator that `scaled_dot_product_attention` calls if a gradient is required."""

    def compute(self) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            self._q,
            self._k,
            self._v,
            attn_bias=None,
            compute_log_sumexp=True,
            is_causal=self.results.q_len > 1,
            scale=self.results.softmax_scale,
        )
        return out.transpose(1, 2), lse.view(self.results.lse.shape)


class TorchFlash(SdpaKernel):
    name = "torch_flash"
    title = (
        "torch's own FlashAttention-2 through scaled_dot_product_attention; a heuristic splits the"
        " context, so at decode it is FlashDecoding"
    )
    decomposition = "fixed_split"
    source = "Dao 2023, arXiv 2307.08691; the CUDA code in torch"
    backend = "FLASH_ATTENTION"
    head_dims = (64, 80, 96, 128, 256)


class TorchEfficient(SdpaKernel):
    name = "torch_efficient"
    title = (
        "the memory-efficient attention in torch through scaled_dot_product_attention; it does not"
        " split the context"
    )
    decomposition = "one_cta_per_tile"
    source = "Rabe and Staats 2021, arXiv 2112.05682; the CUTLASS kernel in torch, from xFormers"
    backend = "EFFICIENT_ATTENTION"
    head_dims = (64, 80, 96, 128, 256)

    def refusal(self, problem: AttentionProblem) -> str | None:
        if problem.group_size > 1:
            return (
                "torch_efficient takes a KV head for every query head, not one for"
                f" {problem.group_size} of them"
            )
        return super().refusal(problem)


class TorchMath(SdpaKernel):
    """torch's plain operators. Each call casts K and V to fp32 and repeats them for each query
    head.
    """

    name = "torch_math"
    title = (
        "plain operators in fp32 through torch's scaled_dot_product_attention; copies K and V in"
        " every call"
    )
    source = "the backend MATH in torch"
    backend = "MATH"
    head_dims = (64, 80, 96, 128, 256)
