"""What the registry is told of LeanAttention's CUDA C++ implementation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from itertools import product
from typing import TYPE_CHECKING

from leanbench.kernels.launch import padded
from leanbench.kernels.lean.cuda_build import CudaBuild, rows_of

from leanbench.decomposition import cluster_slots, stream_k_grid
from leanbench.gpu.spec import GpuSpec
from leanbench.nvrtc import CudaBinary, CudaSource
from leanbench.problem import AttentionProblem
from leanbench.registry import Kernel, KernelConfig, LaunchResources, TracedCall

if TYPE_CHECKING:
    from leanbench.inputs import AttentionInputs

#: The first GPUs with bulk tensor copies and thread-block clusters.
HOPPER = (9, 0)
#: What `leanbench tune` considers, as (chunk_tokens, num_warps, num_stages, ctas_per_sm), by the largest head_dim. Bulk
#: copies where the GPU has them: cp.async was no faster anywhere on an H200.
_TUNED_BUILDS: dict[int, tuple[tuple[int, int, int, int], ...]] = {
    64: ((64, 4, 3, 1), (32, 8, 2, 1), (32, 8, 3, 1), (32, 4, 3, 1), (32, 4, 3, 2), (32, 4, 2, 2), (16, 8, 3, 2)),
    128: ((32, 4, 3, 1), (16, 8, 2, 1), (16, 8, 3, 1), (16, 4, 3, 2), (16, 4, 2, 2), (32, 4, 2, 1)),
    256: ((16, 4, 3, 1), (16, 4, 2, 1), (16, 8, 1, 1)),
}
_TUNED_CLUSTERS = (1, 2, 4, 8)
_ROWS = (8, 16, 32)
_TUNED_MIN_TILES = (1, 2, 4)
#: Clusters larger than 2 leave SMs idle; above this that costs more than their reduction saves.
_LARGE_BYTES = 2e9
#: As for the Triton kernel: rounding the grid down idles CTAs, and saves the crossing of borders.
_ALIGN_BYTES = 80e6
#: Output tiles have 8 rows at most while K and V are smaller than the first, 16 while they are smaller than the second.
_FEW_ROWS_BYTES = (40e6, 130e6)
#: Tokens of a CTA where a sequence's bits must not depend on the batch.
_FIXED_RUN_TOKENS = 1024


class LeanCuda(Kernel):
    name = "lean_cuda"
    title = "LeanAttention: stream-K over LeanTiles, reduction in the same launch (CUDA C++)"
    decomposition = "stream_k"
    source = "Sanovar et al. 2024, arXiv 2405.10480; this project's CUDA C++ kernel"
    tuned_as = "lean"
    implementation = "cuda"

    def unavailable_reason(self) -> str | None:
        return missing()

    def unsupported_reason(self, problem: AttentionProblem) -> str | None:
        return missing()

    def default_config(self, problem: AttentionProblem, gpu: GpuSpec) -> KernelConfig:
        return heuristic(problem, gpu)

    def batch_invariant_config(self, problem: AttentionProblem, gpu: GpuSpec) -> KernelConfig:
        # Chunk, warps, rows and the run's tokens decide about bits and follow from the family; stages do not.
        chunk = 32 if problem.head_dim <= 64 else 16
        rows = rows_of(problem.group_size, problem.q_len, problem.head_dim)
        config = replace(_config(chunk, 4, 3, 2, 1, rows, _copy(gpu), 1, True), tile_tokens=_FIXED_RUN_TOKENS)
        return _fitted(replace(config, min_tiles_per_cta=None, align_grid=None, fixed_run_tiles=1), problem, gpu)

    def candidate_configs(self, problem: AttentionProblem, gpu: GpuSpec) -> list[KernelConfig]:
        first = [config for config in self.tuning_space(problem, gpu) if config.min_tiles_per_cta == 1]
        return list(dict.fromkeys([self.default_config(problem, gpu), *first]))

    def tuning_space(self, problem: AttentionProblem, gpu: GpuSpec) -> list[KernelConfig]:
        hopper = gpu.compute_capability >= HOPPER
        builds = next(builds for most, builds in _TUNED_BUILDS.items() if problem.head_dim <= most)
        found: list[KernelConfig] = []
        clusters = _TUNED_CLUSTERS if hopper else (1,)
        most = rows_of(problem.group_size, problem.q_len, problem.head_dim)
        for build, cluster, rows in product(builds, clusters, [rows for rows in _ROWS if rows <= most]):
            if build[3] > 1 and cluster > 2:
                continue
            for min_tiles, align_grid in product(_TUNED_MIN_TILES, (True, False)):
                config = _config(*build, cluster, rows, _copy(gpu), min_tiles, align_grid)
                if CudaBuild.of(problem, config).fits(gpu):
                    found.append(config)
        return found

    def merge_rounds(self, rows: int, head_dim: int, num_warps: int, partials: int) -> int:
        """Levels of a tree of 16 partials a CTA."""
        return max(1, -(-(partials.bit_length()) // 4))

    def cuda_source(self, problem: AttentionProblem, config: KernelConfig, capability: tuple[int, int]) -> CudaSource:
        return CudaBuild.of(problem, config).source(capability)

    def cuda_resources(self, problem: AttentionProblem, config: KernelConfig, binary: CudaBinary) -> LaunchResources:
        return CudaBuild.of(problem, config).resources(binary, config.cluster_size or 1)

    def prepare(self, inputs: AttentionInputs, config: KernelConfig | None) -> Callable[[], None]:
        from leanbench.kernels.lean.cuda import launch_of

        assert config is not None
        return launch_of(inputs, config).run()

    def resources(self, inputs: AttentionInputs, config: KernelConfig | None) -> tuple[LaunchResources, ...]:
        from leanbench.kernels.lean.cuda import launch_of

        assert config is not None
        return (launch_of(inputs, config).resources(),)

    def prepare_traced(self, inputs: AttentionInputs, config: KernelConfig | None) -> TracedCall:
        from leanbench.kernels.lean.cuda import launch_of
        from leanbench.kernels.trace import StampedCall

        assert config is not None
        launch = launch_of(inputs, config)
        # The beginning; each part, of which a run has two more than it holds whole output tiles; a reduction.
        runs = launch.grid // launch.build.cluster
        output_tiles = inputs.q.shape[0] * inputs.kv_heads * launch.build.row_tiles
        marks = padded(4 + 2 * -(-output_tiles // runs) + 2)
        return StampedCall((launch,), min(1024, marks), inputs.q.device)


@cache
def missing() -> str | None:
    """What the CUDA C++ implementation lacks on this machine, as a sentence, or None."""
    if find_spec("cuda") is None or find_spec("cuda.bindings") is None:
        return "lean_cuda needs cuda-bindings and NVRTC: pip install cuda-bindings nvidia-cuda-nvrtc"
    return None


def _config(
    chunk: int,
    warps: int,
    stages: int,
    per_sm: int,
    cluster: int,
    rows: int,
    copy: str,
    min_tiles: int,
    align_grid: bool,
) -> KernelConfig:
    return KernelConfig(
        tile_tokens=128,
        num_warps=warps,
        num_stages=stages,
        ctas_per_sm=per_sm,
        min_tiles_per_cta=min_tiles,
        align_grid=align_grid,
        implementation="cuda",
        chunk_tokens=chunk,
        tile_rows=rows,
        cluster_size=cluster,
        copy=copy,
    )


def _copy(gpu: GpuSpec) -> str:
    return "bulk" if gpu.compute_capability >= HOPPER else "async"


def _fitted(config: KernelConfig, problem: AttentionProblem, gpu: GpuSpec) -> KernelConfig:
    """With as many stages as there is shared memory for, two at least while that takes no more than a CTA less."""
    while not CudaBuild.of(problem, config).fits(gpu):
        if config.num_stages > 2 or (config.num_stages > 1 and config.ctas_per_sm == 1):
            config = replace(config, num_stages=config.num_stages - 1)
        else:
            config = replace(config, ctas_per_sm=1)
    return config


def _cluster_size(output_tiles: int, kv_bytes: int, gpu: GpuSpec) -> int:
    """The largest with a cluster to each output tile and no second one: partials then meet without a detour through
    memory, which is worth the SMs that are left idle.
    """
    for size in (8, 4) if kv_bytes < _LARGE_BYTES else ():
        if output_tiles == 1 or cluster_slots(gpu.sms, 1, size) // output_tiles == 1:
            return size
    return 2 if output_tiles <= cluster_slots(gpu.sms, 1, 2) else 1


def heuristic(problem: AttentionProblem, gpu: GpuSpec) -> KernelConfig:
    """Settings chosen by sizes on an H200, see docs/performance-log.md."""
    hopper = gpu.compute_capability >= HOPPER
    rows = rows_of(problem.group_size, problem.q_len, problem.head_dim)
    for few, below_bytes in zip(_ROWS, _FEW_ROWS_BYTES, strict=False):
        if problem.kv_bytes < below_bytes:
            rows = min(rows, few)
    chunk = 64 if problem.head_dim <= 64 else 32 if problem.head_dim <= 128 else 16
    if rows > 16:
        # Scores of more tokens at once would not fit the registers.
        chunk = min(chunk, 32) if hopper else 16
    config = _config(chunk, 4, 3, 1, 1, rows, _copy(gpu), 1, True)
    output_tiles = problem.batch * problem.kv_heads * CudaBuild.of(problem, config).row_tiles
    if hopper and not problem.is_ragged:
        config = replace(config, cluster_size=_cluster_size(output_tiles, problem.kv_bytes, gpu))
    if config.cluster_size == 1 and (output_tiles >= gpu.sms or problem.is_ragged):
        # Two CTAs to an SM: one reads while the other is between output tiles.
        chunk = 32 if problem.head_dim <= 64 else 16
        config = replace(config, chunk_tokens=chunk, ctas_per_sm=2)
    config = _fitted(config, problem, gpu)
    slots = cluster_slots(gpu.sms, config.ctas_per_sm or 1, config.cluster_size or 1)
    tiles_per_sequence = output_tiles // problem.batch
    total = sum(-(-context // config.tile_tokens) for context in problem.contexts) * tiles_per_sequence
    grid = stream_k_grid(total, slots)
    idle = 1 - stream_k_grid(total, slots, multiple_of=output_tiles) / grid
    return replace(config, align_grid=idle * problem.kv_bytes < _ALIGN_BYTES or (config.cluster_size or 1) > 1)
