"""A registry kernel with implementations in CUDA C++ and in Triton; the config selects one."""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, TypeVar

from leanbench.kernels.lean.cuda_build import HOPPER
from leanbench.kernels.triton_kernel import TritonKernel

from leanbench.core.config import TileConfig
from leanbench.core.decomposition import Schedule
from leanbench.core.errors import UserError
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.kernel import Kernel, LaunchResources, TracedCall
from leanbench.core.problem import AttentionProblem

if TYPE_CHECKING:
    from leanbench.core.inputs import AttentionInputs

ConfigT = TypeVar("ConfigT", bound=TileConfig)


class Implementations(Kernel[ConfigT]):
    """A decomposition with two implementations; the config selects one."""

    triton: TritonKernel[Any]
    cuda: Kernel[Any]
    guards_lengths = True
    fits_whole_models = True

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.axes = cls.triton.axes | cls.cuda.axes
        # CUDA C++ supports all sizes of the Triton implementation.
        cls.head_dims, cls.page_sizes = cls.cuda.head_dims, cls.cuda.page_sizes
        cls.max_q_len = cls.cuda.max_q_len

    def refusal(self, problem: AttentionProblem) -> str | None:
        """Return None if either implementation supports the problem."""
        if self.triton.unsupported_reason(problem) is None:
            return None
        return self.cuda.unsupported_reason(problem)

    def implementation_of(self, config: ConfigT) -> Kernel[Any]:
        return self.cuda if config.implementation == "cuda" else self.triton

    def default_config(self, problem: AttentionProblem, gpu: GpuSpec) -> ConfigT:
        return self._implementation_for(problem, gpu).default_config(problem, gpu)

    def any_length_config(self, problem: AttentionProblem, gpu: GpuSpec) -> ConfigT:
        return self._implementation_for(problem, gpu).any_length_config(problem, gpu)

    def default_configs(
        self, problem: AttentionProblem, gpu: GpuSpec
    ) -> Callable[[int, int], ConfigT]:
        return self._implementation_for(problem, gpu).default_configs(problem, gpu)

    def implementation_on(self, gpu: GpuSpec) -> Kernel[Any]:
        # CUDA C++ was measured on Hopper.
        use_cuda = gpu.compute_capability == HOPPER and self.cuda.unavailable_reason() is None
        return self.cuda if use_cuda else self.triton

    def _implementation_for(self, problem: AttentionProblem, gpu: GpuSpec) -> Kernel[Any]:
        """Return the preferred implementation on this GPU, or the other if it takes the problem."""
        preferred = self.implementation_on(gpu)
        other = self.triton if preferred is self.cuda else self.cuda
        return preferred if preferred.unsupported_reason(problem) is None else other

    def candidate_configs(self, problem: AttentionProblem, gpu: GpuSpec) -> list[ConfigT]:
        return [
            config
            for kernel in self._able(problem, self.cuda, self.triton)
            for config in kernel.candidate_configs(problem, gpu)
        ]

    def tuning_space(self, problem: AttentionProblem, gpu: GpuSpec) -> list[ConfigT]:
        """Return the candidates of the preferred implementation, or of both in turn.

        Where CUDA C++ is preferred, Triton was not the faster on any timed problem.
        """
        able = self._able(problem, self.triton, self.cuda)
        if self.implementation_on(gpu) is self.cuda in able:
            able = [self.cuda]
        spaces = [kernel.tuning_space(problem, gpu) for kernel in able]
        return [each for turn in zip_longest(*spaces) for each in turn if each is not None]

    def _able(self, problem: AttentionProblem, *kernels: Kernel[Any]) -> list[Kernel[Any]]:
        """Return the elements of `kernels` that can run the problem on this machine."""
        return [
            kernel
            for kernel in kernels
            if kernel.unavailable_reason() is None and kernel.unsupported_reason(problem) is None
        ]

    def schedule(self, problem: AttentionProblem, config: ConfigT, gpu: GpuSpec) -> Schedule | None:
        return self.implementation_of(config).schedule(problem, config, gpu)

    def compile(
        self, problem: AttentionProblem, config: ConfigT, capability: tuple[int, int]
    ) -> tuple[LaunchResources, ...]:
        return self.implementation_of(config).compile(problem, config, capability)

    def prepare(self, inputs: AttentionInputs, config: ConfigT) -> Callable[[], None]:
        kernel, config = self._launched(inputs, config)
        return kernel.prepare(inputs, config)

    def resources(self, inputs: AttentionInputs, config: ConfigT) -> tuple[LaunchResources, ...]:
        kernel, config = self._launched(inputs, config)
        return kernel.resources(inputs, config)

    def prepare_traced(self, inputs: AttentionInputs, config: ConfigT) -> TracedCall | None:
        kernel, config = self._launched(inputs, config)
        return kernel.prepare_traced(inputs, config)

    def _launched(self, inputs: AttentionInputs, config: ConfigT) -> tuple[Kernel[Any], Any]:
        """Return the implementation to run, and its config.

        Tensors unsupported by CUDA C++ run in Triton with its heuristic.

        Raises:
            UserError: neither supports the tensors.
        """
        from leanbench.kernels.launch import problem_of, spec_of
        from leanbench.kernels.lean.cuda import refusal

        is_triton = config.implementation != "cuda"
        reason = None if is_triton else refusal(inputs)
        if not is_triton and reason is None:
            return self.cuda, config
        problem, gpu = problem_of(inputs), spec_of(inputs.q.device)
        beyond = self.triton.unsupported_reason(problem)
        if beyond is not None:
            raise UserError(reason or beyond)
        return self.triton, config if is_triton else self._in_triton(problem, config, gpu)

    def _in_triton(self, problem: AttentionProblem, config: ConfigT, gpu: GpuSpec) -> Any:
        """Return the settings of the Triton implementation that replace `config`."""
        return self.triton.default_config(problem, gpu)
