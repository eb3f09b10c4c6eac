"""xFormers' split-K kernel in Triton for decoding: `xformers.ops.fmha.triton_splitk`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from leanbench.kernels.libraries.library import LibraryKernel

from leanbench.core.config import KernelConfig
from leanbench.core.errors import UserError
from leanbench.core.kernel import OwnOutputs

if TYPE_CHECKING:
    import torch

    from leanbench.core.inputs import AttentionInputs


class XformersSplitK(LibraryKernel):
    name = "xformers_split_k"
    title = "xFormers' Triton kernel triton_splitk; a heuristic splits the context"
    decomposition = "fixed_split"
    source = "Lefaudeux et al. 2022, xFormers; xformers"
    #: Only the output is requested.
    lse_base = None
    modules = ("xformers",)
    install = "pip install xformers"
    distribution = "xformers"
    written_for = "0.0.35"
    head_dims = (64, 128, 256)

    def prepare_all(
        self, copies: Sequence[AttentionInputs], config: KernelConfig | None
    ) -> list[Callable[[], Any]]:
        """Prepare all copies; raise UserError also if xFormers rejects the call.

        Even its Triton kernels need its compiled extension, which does not load with another CUDA
        version.
        """
        try:
            return super().prepare_all(copies, config)
        except ValueError as error:
            if "does not support inputs" not in str(error):
                raise
            # The error repeats the call over many lines; its last line has the reason.
            reason = str(error).strip().splitlines()[-1].strip()
            raise UserError(
                f"{self.name} is refused by xFormers ({reason}): `python -m xformers.info` tells"
                " what it was built for"
            ) from error

    def launch(self, inputs: AttentionInputs, config: KernelConfig | None) -> XformersLaunch:
        return XformersLaunch(inputs)


class XformersLaunch(OwnOutputs):
    """A launch over views as passed by users of xFormers.

    Without groups they are (batch, tokens, heads, head_dim), with groups (batch, tokens, kv_heads,
    group_size, head_dim) with K and V expanded, not repeated.
    """

    def __init__(self, inputs: AttentionInputs) -> None:
        from xformers.ops import fmha

        super().__init__(inputs)
        group_size = inputs.group_size
        q, k, v = inputs.q, inputs.k_cache[:, : inputs.context], inputs.v_cache[:, : inputs.context]
        if group_size > 1:
            q = q.unflatten(2, (inputs.kv_heads, group_size))
            k = k.unsqueeze(3).expand(-1, -1, -1, group_size, -1)
            v = v.unsqueeze(3).expand(-1, -1, -1, group_size, -1)
        self._attend = partial(
            fmha.memory_efficient_attention_forward,
            q,
            k,
            v,
            scale=inputs.softmax_scale,
            op=fmha.triton_splitk.FwOp,
        )

    def compute(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._attend().view(self.results.q.shape), self.results.lse
