"""Registry entry of LeanAttention's CUDA C++ implementation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from leanbench.kernels.launch import events_per_row
from leanbench.kernels.lean import cuda_settings
from leanbench.kernels.lean.configs import LeanCudaConfig
from leanbench.kernels.lean.cuda_build import (
    CudaBuild,
    refusal_of_fp8,
    refusal_of_sharing,
    rows_of,
)
from leanbench.kernels.lean.cuda_schedule import cuda_schedule
from leanbench.kernels.lean.cuda_settings import copy_of, cuda_config, fitted, small_chunk

from leanbench.compile.nvrtc import check_nvrtc, compile_cuda
from leanbench.core.decomposition import Schedule
from leanbench.core.errors import UserError
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.kernel import Kernel, LaunchResources, TracedCall
from leanbench.core.kinds import SAME
from leanbench.core.problem import AttentionProblem

if TYPE_CHECKING:
    from leanbench.kernels.launch import Relaunch

    from leanbench.core.inputs import AttentionInputs

#: Supported head_dims of V, and of K, which can exceed it in a latent row.
VALUE_DIMS = (*range(8, 257, 8), 512)
HEAD_DIMS = (*VALUE_DIMS, 576)
#: Maximum tokens per page, and query tokens per sequence.
MAX_PAGE_SIZE, MAX_Q_LEN = 2**20, 2**20
#: Maximum LeanTiles of a fixed run if a sequence's bits must not depend on the batch.
_FIXED_RUN_TILES = 8


class LeanCuda(Kernel[LeanCudaConfig]):
    name = "lean_cuda"
    title = "LeanAttention: stream-K over LeanTiles, reduction in the same launch (CUDA C++)"
    decomposition = "stream_k"
    source = "Sanovar et al. 2024, arXiv 2405.10480; this project's CUDA C++ kernel"
    tuned_as = "lean"
    is_api = True
    axes = Kernel.axes | {
        *("q_len", "page_size", "capacity", "lengths", "lengths_on", "v_head_dim", "q_lens"),
        *("kv_dtype", "q_dtype", "scaled", "page_scales"),
        *("causal", "window_left", "window_right", "attention_chunk", "softcap", "sinks", "alibi"),
        *("leftpad", "batch_idx", "append", "rotary_dim", "rotary_interleaved", "parallel"),
        *("select", "latent", "shared_prefix"),
    }
    head_dims = HEAD_DIMS
    page_sizes = range(1, MAX_PAGE_SIZE + 1)
    max_q_len = MAX_Q_LEN
    guards_lengths = True
    config_types = (LeanCudaConfig,)

    def unavailable_reason(self) -> str | None:
        return missing()

    def refusal(self, problem: AttentionProblem) -> str | None:
        if problem.value_dim not in VALUE_DIMS:
            return (
                f"lean_cuda does not take v_head_dim {problem.value_dim}: choose a multiple of 8 up"
                " to 256, or 512"
            )
        if problem.latent and (problem.value_dim, problem.kv_dtype) != (problem.head_dim, SAME):
            return (
                f"lean_cuda takes latent caches with all columns of K in V and in {problem.dtype}"
                f" alone: give v_head_dim {problem.head_dim} and kv_dtype same"
            )
        return (
            refusal_of_fp8(problem.kv_dtype, problem.head_dim, problem.value_dim)
            or refusal_of_sharing(problem)
            or missing()
        )

    def default_config(self, problem: AttentionProblem, gpu: GpuSpec) -> LeanCudaConfig:
        return cuda_settings.chosen(cuda_settings.known(problem.own), gpu)

    def default_configs(self, problem: AttentionProblem, gpu: GpuSpec) -> cuda_settings.Choices:
        return cuda_settings.choices_of(problem.own, gpu)

    def any_length_config(self, problem: AttentionProblem, gpu: GpuSpec) -> LeanCudaConfig:
        known = cuda_settings.known(problem.own)
        return cuda_settings.chosen(cuda_settings.for_any_length(known), gpu)

    def batch_invariant_config(self, problem: AttentionProblem, gpu: GpuSpec) -> LeanCudaConfig:
        # Chunk, warps, rows and the run's tokens determine the bits and follow from the family.
        # Stages do not affect them.
        rows = rows_of(problem.group_size, problem.q_len, problem.value_dim)
        chunk = small_chunk(problem, rows)
        config = replace(
            cuda_config(chunk, 4, 2, 2, 1, rows, copy_of(problem, gpu), 1, False),
            fixed_run_tiles=_FIXED_RUN_TILES,
        )
        return fitted(config, problem, gpu)

    def tuning_space(self, problem: AttentionProblem, gpu: GpuSpec) -> list[LeanCudaConfig]:
        return cuda_settings.space(cuda_settings.known(problem.own), gpu)

    def schedule(
        self, problem: AttentionProblem, config: LeanCudaConfig, gpu: GpuSpec
    ) -> Schedule | None:
        return cuda_schedule(problem.own, config, gpu)

    def compile(
        self, problem: AttentionProblem, config: LeanCudaConfig, capability: tuple[int, int]
    ) -> tuple[LaunchResources, ...]:
        build = CudaBuild.of(problem, config)
        binary = compile_cuda(build.source(capability))
        return (build.resources(binary, config.cluster_size),)

    def prepare(self, inputs: AttentionInputs, config: LeanCudaConfig) -> Callable[[], None]:
        from leanbench.kernels.lean.cuda import launch_of

        return launch_of(inputs, config).run()

    def relaunch(self, inputs: AttentionInputs, config: LeanCudaConfig) -> Relaunch:
        from leanbench.kernels.lean.cuda import launch_of

        return launch_of(inputs, config).relaunch()

    def resources(
        self, inputs: AttentionInputs, config: LeanCudaConfig
    ) -> tuple[LaunchResources, ...]:
        from leanbench.kernels.lean.cuda import launch_of

        # A call with a shared prefix is two launches, and the API chooses the first one's settings.
        return () if inputs.shared_prefix else (launch_of(inputs, config).resources(),)

    def prepare_traced(self, inputs: AttentionInputs, config: LeanCudaConfig) -> TracedCall | None:
        if inputs.shared_prefix:
            return None
        from leanbench.kernels.lean.cuda import launch_of
        from leanbench.kernels.traced import TracedLaunches

        launch = launch_of(inputs, config)
        # The beginning; each part and its reduction; the exchange with other GPUs.
        max_events = events_per_row(2 + 2 * launch.most_parts(inputs))
        return TracedLaunches((launch,), max_events, inputs.q.device)


@cache
def missing(kernel: str = "lean_cuda") -> str | None:
    """Return why the CUDA C++ implementation cannot run on this machine, or None."""
    try:
        check_nvrtc()
    except UserError as error:
        return f"{kernel}: {error}"
    return None
