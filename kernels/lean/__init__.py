"""LeanAttention: stream-K decode attention (Sanovar et al., 2024, arXiv 2405.10480)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from leanbench.kernels.lean.configs import (
    LEAN_CONFIGS,
    LeanConfig,
    LeanCudaConfig,
    LeanTritonConfig,
)
from leanbench.kernels.lean.cuda_heuristic import HOPPER
from leanbench.kernels.lean.cuda_kernel import LeanCuda
from leanbench.kernels.lean.triton_kernel import LeanTriton

from leanbench.core.decomposition import Schedule
from leanbench.core.errors import UserError
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.kernel import BATCH_INVARIANT, Kernel, LaunchResources, TracedCall
from leanbench.core.problem import AttentionProblem

if TYPE_CHECKING:
    from leanbench.kernels.launch import Relaunch

    from leanbench.core.inputs import AttentionInputs

_TRITON, _CUDA = LeanTriton(), LeanCuda()


class Lean(Kernel[LeanConfig]):
    """Both implementations: the config says which."""

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
    axes = LeanTriton.axes | LeanCuda.axes
    head_dims = LeanCuda.head_dims
    page_sizes = LeanCuda.page_sizes
    max_q_len = LeanCuda.max_q_len
    guards_lengths = True
    fits_whole_models = True

    def refusal(self, problem: AttentionProblem) -> str | None:
        """None where one of the implementations takes the problem."""
        if _TRITON.unsupported_reason(problem) is None:
            return None
        return _CUDA.unsupported_reason(problem)

    def implementation_of(self, config: LeanConfig) -> Kernel[Any]:
        return _CUDA if isinstance(config, LeanCudaConfig) else _TRITON

    def default_config(self, problem: AttentionProblem, gpu: GpuSpec) -> LeanConfig:
        return self._implementation_for(problem, gpu).default_config(problem, gpu)

    def any_length_config(self, problem: AttentionProblem, gpu: GpuSpec) -> LeanConfig:
        return self._implementation_for(problem, gpu).any_length_config(problem, gpu)

    def batch_invariant_config(self, problem: AttentionProblem, gpu: GpuSpec) -> LeanConfig:
        return self._implementation_for(problem, gpu).batch_invariant_config(problem, gpu)

    def implementation_on(self, gpu: GpuSpec) -> LeanTriton | LeanCuda:
        # Hopper is where the CUDA C++ implementation was measured.
        use_cuda = gpu.compute_capability == HOPPER and _CUDA.unavailable_reason() is None
        return _CUDA if use_cuda else _TRITON

    def _implementation_for(self, problem: AttentionProblem, gpu: GpuSpec) -> LeanTriton | LeanCuda:
        """The preferred one on this GPU, if it takes the problem; CUDA C++ takes every one."""
        preferred = self.implementation_on(gpu)
        return preferred if preferred.unsupported_reason(problem) is None else _CUDA

    def candidate_configs(self, problem: AttentionProblem, gpu: GpuSpec) -> list[LeanConfig]:
        cuda = [] if _CUDA.unavailable_reason() else _CUDA.candidate_configs(problem, gpu)
        if _TRITON.unsupported_reason(problem) is not None:
            return [*cuda]
        return [*cuda, *_TRITON.candidate_configs(problem, gpu)]

    def tuning_space(self, problem: AttentionProblem, gpu: GpuSpec) -> list[LeanConfig]:
        cuda = [] if _CUDA.unavailable_reason() else _CUDA.tuning_space(problem, gpu)
        if _TRITON.unsupported_reason(problem) is not None:
            return [*cuda]
        return [*_TRITON.tuning_space(problem, gpu), *cuda]

    def grid_limit(self, rows: int, head_dim: int, wanted: int) -> int:
        return _TRITON.grid_limit(rows, head_dim, wanted)

    def merge_rounds(self, rows: int, head_dim: int, num_warps: int, partials: int) -> int:
        return _TRITON.merge_rounds(rows, head_dim, num_warps, partials)

    def schedule(
        self, problem: AttentionProblem, config: LeanConfig, gpu: GpuSpec
    ) -> Schedule | None:
        return self.implementation_of(config).schedule(problem, config, gpu)

    def compile(
        self, problem: AttentionProblem, config: LeanConfig, capability: tuple[int, int]
    ) -> tuple[LaunchResources, ...]:
        return self.implementation_of(config).compile(problem, config, capability)

    def prepare(self, inputs: AttentionInputs, config: LeanConfig) -> Callable[[], None]:
        kernel, config = self._launched(inputs, config)
        return kernel.prepare(inputs, config)

    def relaunch(self, inputs: AttentionInputs, config: LeanConfig) -> Relaunch:
        """The launch over other tensors; see leanbench.kernels.launch.Relaunch."""
        kernel, config = self._launched(inputs, config)
        return kernel.relaunch(inputs, config)

    def resources(self, inputs: AttentionInputs, config: LeanConfig) -> tuple[LaunchResources, ...]:
        kernel, config = self._launched(inputs, config)
        return kernel.resources(inputs, config)

    def prepare_traced(self, inputs: AttentionInputs, config: LeanConfig) -> TracedCall | None:
        kernel, config = self._launched(inputs, config)
        return kernel.prepare_traced(inputs, config)

    def _launched(
        self, inputs: AttentionInputs, config: LeanConfig
    ) -> tuple[LeanTriton | LeanCuda, Any]:
        """Which implementation runs, and how: tensors that the CUDA C++ one cannot take go to
        Triton's, with its heuristic, unless GPUs share the sequences.

        Raises:
            UserError: neither takes them.
        """
        from leanbench.kernels.launch import problem_of, spec_of
        from leanbench.kernels.lean.cuda import refusal

        if inputs.peers is not None:
            return _CUDA, config
        is_triton = isinstance(config, LeanTritonConfig)
        reason = None if is_triton else refusal(inputs)
        if not is_triton and reason is None:
            return _CUDA, config
        problem, gpu = problem_of(inputs), spec_of(inputs.q.device)
        beyond = _TRITON.unsupported_reason(problem)
        if beyond is not None:
            raise UserError(reason or beyond)
        if is_triton:
            return _TRITON, config
        if config.fixed_run_tiles:
            return _TRITON, _TRITON.batch_invariant_config(problem, gpu)
        return _TRITON, _TRITON.default_config(problem, gpu)


class LeanBatchInvariant(Lean):
    """What `batch_invariant=True` costs, to be seen side by side with `lean`."""

    name = "lean_batch_invariant"
    title = "lean with batch_invariant=True: bits that do not depend on the rest of the batch"
    tuned_as = None
    config_choice = BATCH_INVARIANT

    def default_config(self, problem: AttentionProblem, gpu: GpuSpec) -> LeanConfig:
        return self.batch_invariant_config(problem, gpu)

    def any_length_config(self, problem: AttentionProblem, gpu: GpuSpec) -> LeanConfig:
        return self.batch_invariant_config(problem, gpu)

    def candidate_configs(self, problem: AttentionProblem, gpu: GpuSpec) -> list[LeanConfig]:
        return [self.batch_invariant_config(problem, gpu)]

    def tuning_space(self, problem: AttentionProblem, gpu: GpuSpec) -> list[LeanConfig]:
        """Not tuned; one for each implementation."""
        able = [kernel for kernel in (_TRITON, _CUDA) if kernel.unsupported_reason(problem) is None]
        return [kernel.batch_invariant_config(problem, gpu) for kernel in able]


LEAN, LEAN_CUDA = Lean(), _CUDA
KERNELS = (LEAN, _TRITON, _CUDA, LeanBatchInvariant())
