"""FlashInfer's decode of a single sequence: `flashinfer.single_decode_with_kv_cache`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from leanbench.kernels.libraries.flash_infer import FlashInferKernel, layout_of

from leanbench.core.config import KernelConfig
from leanbench.core.kernel import OwnOutputs
from leanbench.core.problem import AttentionProblem

if TYPE_CHECKING:
    import torch

    from leanbench.core.inputs import AttentionInputs


class FlashInferSingle(FlashInferKernel):
    name = "flashinfer_single"
    title = "FlashInfer's decode of a single sequence on tensor cores"

    def refusal(self, problem: AttentionProblem) -> str | None:
        if problem.batch > 1:
            return f"{self.name} decodes a single sequence, this problem has batch {problem.batch}"
        is_strided = problem.kv_layout == "HND" and problem.kv_heads > 1
        if is_strided and problem.cache_capacity > problem.max_context:
            return (
                f"{self.name} takes K and V without gaps, heads of this cache are"
                f" {problem.cache_capacity} tokens apart and have {problem.max_context}: choose NHD"
                " or an exact capacity"
            )
        return super().refusal(problem)

    def launch(
        self, inputs: AttentionInputs, config: KernelConfig | None
    ) -> FlashInferSingleLaunch:
        return FlashInferSingleLaunch(inputs, self.use_tensor_cores)


class FlashInferSingleCudaCores(FlashInferSingle):
    name = "flashinfer_single_cuda_cores"
    title = "FlashInfer's decode of a single sequence without tensor cores"
    use_tensor_cores = False


class FlashInferSingleLaunch(OwnOutputs):
    def __init__(self, inputs: AttentionInputs, use_tensor_cores: bool) -> None:
        from flashinfer import single_decode_with_kv_cache

        super().__init__(inputs)
        kv_layout = layout_of(inputs)
        k, v = inputs.k_cache[0, : inputs.context], inputs.v_cache[0, : inputs.context]
        if kv_layout == "HND":
            k, v = k.transpose(0, 1), v.transpose(0, 1)
        self._attend = partial(
            single_decode_with_kv_cache,
            inputs.q[0, 0],
            k,
            v,
            kv_layout=kv_layout,
            use_tensor_cores=use_tensor_cores,
            sm_scale=inputs.softmax_scale,
            return_lse=True,
        )

    def compute(self) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = self._attend()
        return out.view(self.results.out.shape), lse.view(self.results.lse.shape)
