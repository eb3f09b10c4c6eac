"""Multi-head latent attention (MLA; DeepSeek-V2, arXiv 2405.04434): decode over a latent cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from leanbench.kernels.lean import cuda_settings
from leanbench.kernels.mla.build import (
    FEW_ROWS,
    LATENTS,
    LEAST_GROUPED_SPLITS,
    MERGED_ROWS,
    MOST_GROUPED_STAGES,
    MOST_SHORT_SPLITS,
    ONE_ROUND,
    TILE,
    VALUE_DIM,
    MlaBuild,
    cluster_of,
    gathers,
    most_groups,
)
from leanbench.kernels.mla.configs import MlaConfig

from leanbench.compile.nvrtc import check_nvrtc, compile_cuda
from leanbench.core.errors import UserError
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.kernel import Kernel, LaunchResources
from leanbench.core.kinds import SAME
from leanbench.core.problem import AttentionProblem

if TYPE_CHECKING:
    from leanbench.kernels.launch import Relaunch

    from leanbench.core.inputs import AttentionInputs

_MOST_PAGE_TOKENS = 1 << 20
#: Maximum splits of more than one stage. Beyond them the merge dominates.
_MOST_SPLITS = 64
#: Upper limit of MlaConfig.min_tiles_per_cta.
_MOST_STAGES = 64


class LeanMla(Kernel[MlaConfig]):
    name = "lean_mla"
    title = (
        "LeanAttention over a latent cache (MLA): stream-K and the reduction in one launch (CUDA"
        " C++, Hopper)"
    )
    decomposition = "stream_k"
    source = "Sanovar et al. 2024, arXiv 2405.10480; this project's CUDA C++ kernel"
    tuned_as = "lean_mla"
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
        "select",
        "row_scales",
    }
    head_dims = tuple(sorted(LATENTS))
    page_sizes = range(1, _MOST_PAGE_TOKENS + 1)
    guards_lengths = True
    config_types = (MlaConfig,)

    def unavailable_reason(self) -> str | None:
        return _missing()

    def refusal(self, problem: AttentionProblem) -> str | None:
        value_dim = LATENTS[problem.head_dim]
        if not problem.latent or problem.value_dim != value_dim:
            return (
                f"{self.name} takes latent caches of head_dim {problem.head_dim} with v_head_dim"
                f" {value_dim} alone: give latent and v_head_dim {value_dim}"
            )
        if problem.kv_dtype != SAME and value_dim != VALUE_DIM:
            return f"{self.name} takes fp8 with v_head_dim {VALUE_DIM} alone: leave kv_dtype out"
        if problem.row_scales and not gathers(problem.page_size):
            return (
                f"{self.name} copies rows with scales one by one: give page_size 1, or another than"
                f" a multiple of {TILE}"
            )
        return _missing()

    def default_config(self, problem: AttentionProblem, gpu: GpuSpec) -> MlaConfig:
        known = cuda_settings.known(problem)
        return self.default_configs(problem, gpu)(known.batch, known.max_context)

    def default_configs(
        self, problem: AttentionProblem, gpu: GpuSpec
    ) -> Callable[[int, int], MlaConfig]:
        exact, rows = problem.lengths_on == "host", problem.q_len * problem.q_heads
        cluster = cluster_of(rows, problem.page_size)
        groups = most_groups(problem.value_dim, problem.kv_dtype)
        # With 16 rows, or tokens copied one by one, the choice costs more than groups save.
        chooses = not exact and rows > TILE // 4 and not gathers(problem.page_size)

        def config(batch: int, context: int) -> MlaConfig:
            tokens = context if exact else cuda_settings.bound_of(context)
            return self.config_of((batch, rows, cluster), tokens, exact, gpu.sms, groups, chooses)

        return config

    def config_of(
        self,
        shape: tuple[int, int, int],
        context: int,
        exact: bool,
        sms: int,
        groups: int,
        chooses: bool,
    ) -> MlaConfig:
        """Return the heuristic's settings.

        There are no more splits than merge well, and short contexts have column groups if they save
        more than they recompute (H200; reports/performance-log.md, entries 47, 59 and 79). A launch
        with lengths on the device decides that again by them, and takes one group or these.

        Args:
            shape: sequences; rows of each: query heads at all positions; CTAs that share copies.
            exact: `context` is the length of every sequence, not only an upper bound.
            groups: limit of the column groups.
            chooses: the build takes column groups if its lengths are short.
        """
        stages = max(1, -(-context // TILE))
        least = 1 if stages <= MOST_SHORT_SPLITS else 2
        if exact:
            least = max(least, min(-(-stages // _MOST_SPLITS), _MOST_STAGES))
        deals = _deals(shape, stages, least, sms, groups)
        short = [deal for deal in deals if deal.column_groups == 1 or deal.is_short]
        chosen = min(short, key=lambda deal: deal.cost)
        if exact and chosen.column_groups > 1:
            # Equal splits. One more would start another round of the merge.
            least = max(least, stages // chosen.splits)
        column_groups = chosen.column_groups
        if chooses:
            column_groups = max(column_groups, _groups_of_short_lengths(deals))
        return MlaConfig(least, align_grid=True, column_groups=column_groups)

    def tuning_space(self, problem: AttentionProblem, gpu: GpuSpec) -> list[MlaConfig]:
        most = most_groups(problem.value_dim, problem.kv_dtype)
        grouped = [groups for groups in (2, 4) if groups <= most]
        return [
            *(
                MlaConfig(min_tiles_per_cta=tiles, align_grid=align_grid)
                for align_grid in (True, False)
                for tiles in (1, 2, 4, 8)
            ),
            *(MlaConfig(tiles, True, groups) for groups in grouped for tiles in (1, 2, 4)),
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
            config.column_groups,
            problem.row_scales,
            problem.head_dim,
        )
        return (build.resources(compile_cuda(build.source(capability)), build.cluster),)

    def prepare(self, inputs: AttentionInputs, config: MlaConfig) -> Callable[[], None]:
        from leanbench.kernels.mla.launch import launch_of

        return launch_of(inputs, config).run()

    def relaunch(self, inputs: AttentionInputs, config: MlaConfig) -> Relaunch:
        """Return a launch for other tensors; see leanbench.kernels.launch.Relaunch."""
        from leanbench.kernels.mla.launch import MlaRelaunch, launch_of

        return MlaRelaunch(launch_of(inputs, config))

    def resources(self, inputs: AttentionInputs, config: MlaConfig) -> tuple[LaunchResources, ...]:
        from leanbench.kernels.mla.launch import launch_of

        return (launch_of(inputs, config).resources(),)


@dataclass(frozen=True)
class _Deal:
    """Output tiles of one length, assigned to clusters without splits across boundaries."""

    column_groups: int
    #: Output tiles of all column groups.
    output_tiles: int
    #: Resident CTAs, or pairs.
    clusters: int
    #: Stages of an output tile, and the minimum of a split.
    stages: int
    least: int
    rows: int

    @property
    def longest(self) -> int:
        """Stages of the longest split."""
        splits = max(1, self.clusters // self.output_tiles)
        return max(self.least, -(-self.stages // splits))

    @property
    def splits(self) -> int:
        """Splits per output tile."""
        return -(-self.stages // self.longest)

    @property
    def is_short(self) -> bool:
        """True if all splits are resident, and so short that merges save more than scores cost."""
        few = self.rows <= FEW_ROWS
        if (
            self.output_tiles > self.clusters
            or self.longest > MOST_GROUPED_STAGES[self.column_groups][few]
        ):
            return False
        if self.column_groups == 2:
            return self.splits == 1 or self.splits >= LEAST_GROUPED_SPLITS
        # Four groups of few rows repeat the scores, which pays if half of the SMs would idle.
        return not few or 2 * self.output_tiles * self.splits <= self.clusters

    @property
    def cost(self) -> float:
        """Cost of the longest split and the merge, in stages (1.4 us on an H200).

        In a merge, each CTA stores a partial and reads an equal amount of others, for any number of
        splits: 4 stages with 64 rows and all columns, and 1 more if a single round does not
        suffice.
        """
        merge = self.rows / MERGED_ROWS / self.column_groups if self.splits > 1 else 0
        return self.longest + merge + (self.splits > ONE_ROUND)


def _deals(
    shape: tuple[int, int, int], stages: int, least: int, sms: int, limit: int
) -> list[_Deal]:
    """Return a deal for each number of column groups, the largest first."""
    batch, rows, cluster = shape
    output_tiles = batch * -(-rows // (TILE * cluster))
    return [
        _Deal(groups, groups * output_tiles, sms // cluster, stages, least, min(rows, TILE))
        for groups in (4, 2, 1)
        if groups <= limit
    ]


def _groups_of_short_lengths(deals: list[_Deal]) -> int:
    """Return the column groups of a launch whose lengths turn out to be short."""
    most = 2 if deals[0].rows <= FEW_ROWS else 4
    useful = (deal for deal in deals if deal.output_tiles <= deal.clusters)
    return next((deal.column_groups for deal in useful if deal.column_groups <= most), 1)


@cache
def _missing() -> str | None:
    """Return why the kernel cannot run on this machine, or None."""
    try:
        check_nvrtc()
    except UserError as error:
        return f"lean_mla: {error}"
    return None


LEAN_MLA = LeanMla()
KERNELS = (LEAN_MLA,)
