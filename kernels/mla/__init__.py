"""Multi-head latent attention (MLA; DeepSeek-V2, arXiv 2405.04434): decode over a latent cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

from leanbench.kernels.mla.build import LATENT_DIM, VALUE_DIM, MlaBuild
from leanbench.kernels.mla.configs import MlaConfig

from leanbench.compile.nvrtc import check_nvrtc, compile_cuda
from leanbench.core.errors import UserError
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.kernel import Kernel, LaunchResources
from leanbench.core.problem import AttentionProblem

if TYPE_CHECKING:
    from leanbench.core.inputs import AttentionInputs

#: Tokens that pages have a multiple of: those of a stage.
PAGE_TOKENS = 64
_MOST_PAGE_TOKENS = 1 << 20
#: Splits of one stage, and of more; of more splits it is the merge that takes longer.
_MOST_SHORT_SPLITS, _MOST_SPLITS = 32, 64
#: What MlaConfig.min_tiles_per_cta goes up to.
_MOST_STAGES = 64


class LeanMla(Kernel[MlaConfig]):
    name = "lean_mla"
    title = (
        "LeanAttention over a latent cache (MLA): stream-K and the reduction in one launch (CUDA"
        " C++, Hopper)"
    )
    decomposition = "stream_k"
    source = "Sanovar et al. 2024, arXiv 2405.10480; this project's CUDA C++ kernel"
    axes = Kernel.axes | {
        "q_len",
        "page_size",
        "capacity",
        "lengths",
        "lengths_on",
        "causal",
        "v_head_dim",
        "latent",
        "kv_dtype",
        "scaled",
    }
    head_dims = (LATENT_DIM,)
    page_sizes = range(PAGE_TOKENS, _MOST_PAGE_TOKENS + 1, PAGE_TOKENS)
    guards_lengths = True
    config_types = (MlaConfig,)

    def unavailable_reason(self) -> str | None:
        return _missing()

    def refusal(self, problem: AttentionProblem) -> str | None:
        if not problem.latent or problem.value_dim != VALUE_DIM:
            return (
                f"{self.name} takes latent caches with v_head_dim {VALUE_DIM} alone: give latent"
                f" and v_head_dim {VALUE_DIM}"
            )
        return _missing()

    def default_config(self, problem: AttentionProblem, gpu: GpuSpec) -> MlaConfig:
        return self.config_of(problem.known_to_host.max_context, problem.lengths_on == "host")

    def config_of(self, context: int, exact: bool) -> MlaConfig:
        """The heuristic: no more splits than merge well (H200, entry 47 of the performance log).

        Args:
            exact: `context` is every sequence's length, and not just the most of one.
        """
        stages = -(-context // PAGE_TOKENS)
        least = 1 if stages <= _MOST_SHORT_SPLITS else 2
        if exact:
            least = max(least, min(-(-stages // _MOST_SPLITS), _MOST_STAGES))
        return MlaConfig(min_tiles_per_cta=least, align_grid=True)

    def candidate_configs(self, problem: AttentionProblem, gpu: GpuSpec) -> list[MlaConfig]:
        return [
            MlaConfig(min_tiles_per_cta=tiles, align_grid=align_grid)
            for align_grid in (True, False)
            for tiles in (1, 2, 4, 8)
        ]

    def compile(
        self, problem: AttentionProblem, config: MlaConfig, capability: tuple[int, int]
    ) -> tuple[LaunchResources, ...]:
        build = MlaBuild.of_shape(
            problem.q_heads,
            problem.q_len,
            problem.dtype == "bf16",
            problem.causal,
            problem.lengths_on == "device",
            problem.page_size or 0,
            problem.kv_dtype,
        )
        return (build.resources(compile_cuda(build.source(capability)), build.cluster),)

    def prepare(self, inputs: AttentionInputs, config: MlaConfig) -> Callable[[], None]:
        from leanbench.kernels.mla.launch import launch_of

        return launch_of(inputs, config).run()

    def resources(self, inputs: AttentionInputs, config: MlaConfig) -> tuple[LaunchResources, ...]:
        from leanbench.kernels.mla.launch import launch_of

        return (launch_of(inputs, config).resources(),)


@cache
def _missing() -> str | None:
    """What the kernel lacks on this machine, as a sentence, or None."""
    try:
        check_nvrtc()
    except UserError as error:
        return f"lean_mla: {error}"
    return None


LEAN_MLA = LeanMla()
KERNELS = (LEAN_MLA,)
