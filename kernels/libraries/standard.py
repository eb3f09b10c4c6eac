"""Standard attention, the baseline of LeanAttention's Section II: all scores go through memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from leanbench.kernels.libraries.library import LibraryKernel

from leanbench.core.config import KernelConfig
from leanbench.core.kernel import OwnOutputs
from leanbench.core.problem import AttentionProblem

if TYPE_CHECKING:
    import torch

    from leanbench.core.inputs import AttentionInputs

#: Longest context in fp16. With more tokens, rounding of the small softmax weights approaches the
#: error limit of the check.
_FP16_TOKENS = 65_536


class Standard(LibraryKernel):
    """Scores and softmax weights in memory, batch * q_heads * context * 2 bytes each."""

    name = "standard"
    title = "standard attention: two matrix products and a softmax in torch, the scores in memory"
    source = "Vaswani et al. 2017, arXiv 1706.03762; operators of torch"
    #: The softmax returns no LSE.
    lse_base = None
    head_dims = (64, 80, 96, 128, 256)

    def refusal(self, problem: AttentionProblem) -> str | None:
        if problem.dtype == "fp16" and problem.max_context > _FP16_TOKENS:
            return (
                "standard keeps softmax weights in fp16, too coarse for those of"
                f" {problem.max_context} tokens: choose bf16, or at most {_FP16_TOKENS} tokens"
            )
        if problem.kv_layout == "NHD" and min(problem.batch, problem.kv_heads) > 1:
            return (
                "standard would copy K and V of several sequences and KV heads in the layout NHD:"
                " choose HND"
            )
        return super().refusal(problem)

    def launch(self, inputs: AttentionInputs, config: KernelConfig | None) -> StandardLaunch:
        return StandardLaunch(inputs)


class StandardLaunch(OwnOutputs):
    """A launch over views with a matrix per KV head and sequence: q (matrices, group_size,
    head_dim), K and V (matrices, tokens, head_dim).
    """

    def __init__(self, inputs: AttentionInputs) -> None:
        super().__init__(inputs)
        heads, context, head_dim = (
            inputs.q.shape[0] * inputs.kv_heads,
            inputs.context,
            inputs.head_dim,
        )
        self._q = inputs.q.view(heads, inputs.group_size, head_dim)
        self._k = inputs.k_cache[:, :context].transpose(1, 2).view(heads, context, head_dim)
        self._v = inputs.v_cache[:, :context].transpose(1, 2).view(heads, context, head_dim)
        #: Added to the scores with a factor of 0. The matrix product takes its scale only with an
        #: addend.
        self._nothing = inputs.q.new_zeros(1)

    def compute(self) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        scale = self.results.softmax_scale
        scores = torch.baddbmm(self._nothing, self._q, self._k.transpose(1, 2), beta=0, alpha=scale)
        out = torch.bmm(scores.softmax(-1), self._v)
        return out.view(self.results.q.shape), self.results.lse
