"""LeanAttention: stream-K decode attention (Sanovar et al., 2024, arXiv 2405.10480)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from leanbench.kernels.lean.configs import LEAN_CONFIGS, LeanConfig, LeanTritonConfig
from leanbench.kernels.lean.cuda_kernel import LeanCuda
from leanbench.kernels.lean.implementations import Implementations
from leanbench.kernels.lean.triton_kernel import LeanTriton

from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.kernel import BATCH_INVARIANT
from leanbench.core.problem import AttentionProblem

if TYPE_CHECKING:
    from leanbench.kernels.launch import Relaunch

    from leanbench.core.inputs import AttentionInputs

_TRITON, _CUDA = LeanTriton(), LeanCuda()


class Lean(Implementations[LeanConfig]):
    triton, cuda = _TRITON, _CUDA
    name = "lean"
    title = (
        "LeanAttention: stream-K over LeanTiles, reduction in the same launch (the faster of CUDA"
        " C++ and Triton)"
    )
    decomposition = "stream_k"
    source = "Sanovar et al. 2024, arXiv 2405.10480; this project's CUDA C++ and Triton kernels"
    tuned_as = "lean"
    is_api = True
    config_types = LEAN_CONFIGS

    def batch_invariant_config(self, problem: AttentionProblem, gpu: GpuSpec) -> LeanConfig:
        return self._implementation_for(problem, gpu).batch_invariant_config(problem, gpu)

    def relaunch(self, inputs: AttentionInputs, config: LeanConfig) -> Relaunch:
        """Return a launch for other tensors; see leanbench.kernels.launch.Relaunch."""
        kernel, config = self._launched(inputs, config)
        return kernel.relaunch(inputs, config)

    def _launched(self, inputs: AttentionInputs, config: LeanConfig) -> tuple[Any, Any]:
        # Only CUDA C++ supports GPUs that share sequences, and results over other tokens.
        alone = inputs.peers is not None or inputs.prior is not None
        return (_CUDA, config) if alone else super()._launched(inputs, config)

    def _in_triton(
        self, problem: AttentionProblem, config: LeanConfig, gpu: GpuSpec
    ) -> LeanTritonConfig:
        if config.fixed_run_tiles:
            return _TRITON.batch_invariant_config(problem, gpu)
        return _TRITON.default_config(problem, gpu)


class LeanBatchInvariant(Lean):
    """`lean` with `batch_invariant=True`, to show its cost next to `lean`."""

    name = "lean_batch_invariant"
    title = "lean with batch_invariant=True: bits that do not depend on the rest of the batch"
    tuned_as = None
    config_choice = BATCH_INVARIANT

    def refusal(self, problem: AttentionProblem) -> str | None:
        if problem.shared_prefix:
            return f"{self.name} merges no shared prefix: choose lean, or leave shared_prefix out"
        return super().refusal(problem)

    def default_config(self, problem: AttentionProblem, gpu: GpuSpec) -> LeanConfig:
        return self.batch_invariant_config(problem, gpu)

    def default_configs(
        self, problem: AttentionProblem, gpu: GpuSpec
    ) -> Callable[[int, int], LeanConfig]:
        return lambda batch, context: self.batch_invariant_config(problem, gpu)

    def any_length_config(self, problem: AttentionProblem, gpu: GpuSpec) -> LeanConfig:
        return self.batch_invariant_config(problem, gpu)

    def candidate_configs(self, problem: AttentionProblem, gpu: GpuSpec) -> list[LeanConfig]:
        return [self.batch_invariant_config(problem, gpu)]

    def tuning_space(self, problem: AttentionProblem, gpu: GpuSpec) -> list[LeanConfig]:
        """Return one config per implementation: the settings are not tuned."""
        able = [kernel for kernel in (_TRITON, _CUDA) if kernel.unsupported_reason(problem) is None]
        return [kernel.batch_invariant_config(problem, gpu) for kernel in able]


LEAN, LEAN_CUDA = Lean(), _CUDA
KERNELS = (LEAN, _TRITON, _CUDA, LeanBatchInvariant())
