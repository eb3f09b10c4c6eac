"""Search space of a tuning: families of problems, their candidates, and the resulting launches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from leanbench.compile.build import Build, Job
from leanbench.configs.formula import Shape, grid_of
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.kernel import Kernel
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernels
from leanbench.gpu.occupancy import theoretical_occupancy
from leanbench.kernels.lean.configs import BuildKey, LeanConfig


@dataclass(frozen=True)
class FamilyKey:
    """Problems that run the same compiled kernels. They differ in batch, KV heads and context."""

    head_dim: int
    group_size: int
    dtype: str = "fp16"
    kv_layout: str = "HND"

    @property
    def label(self) -> str:
        """Label: ``d128 group 4 fp16 HND``."""
        heads = "MHA" if self.group_size == 1 else f"group {self.group_size}"
        return f"d{self.head_dim} {heads} {self.dtype} {self.kv_layout}"

    def problem(self, output_tiles: int, context: int) -> AttentionProblem:
        """Return a problem with this many (sequence, KV head) pairs.

        It has 8 KV heads if possible, like most models.
        """
        kv_heads = next(heads for heads in (8, 4, 2, 1) if output_tiles % heads == 0)
        if self.group_size == 1 and output_tiles <= 64:
            kv_heads = output_tiles
        batch = output_tiles // kv_heads
        return AttentionProblem(
            batch,
            kv_heads * self.group_size,
            kv_heads,
            context,
            self.head_dim,
            self.dtype,
            self.kv_layout,
        )


def jobs(kernel: Kernel, family: FamilyKey, spec: GpuSpec) -> dict[BuildKey, Job]:
    """Return the compile jobs of a family, one per build."""
    problem = family.problem(8, 4096)
    by_build: dict[BuildKey, Job] = {}
    for config in kernel.tuning_space(problem, spec):
        by_build.setdefault(config.build_key, Job(kernel.name, problem, config))
    return by_build


def why_not_run(build: Build, spec: GpuSpec) -> str | None:
    """Return why a build cannot run on a GPU, as a phrase; None if it can.

    A build that spills registers runs, slowly.
    """
    if build.failure is not None:
        return f"does not compile: {build.failure}"
    taken = build.resources[0]
    shared_kb = taken.shared_bytes / 1024
    if shared_kb > spec.shared_kb_per_cta:
        return f"takes {shared_kb:.0f} KB of shared memory, a CTA has {spec.shared_kb_per_cta} KB"
    if theoretical_occupancy(taken, spec).ctas_per_sm == 0:
        return f"takes {taken.registers_per_thread} registers of {taken.num_warps} warps, too many"
    return None


def why_left_out(build: Build, config: LeanConfig, spec: GpuSpec) -> str | None:
    """Return why a compiled candidate is not worth timing, as a phrase; None if it is."""
    reason = why_not_run(build, spec)
    if reason is None:
        fitting = theoretical_occupancy(build.resources[0], spec).ctas_per_sm
        if config.ctas_per_sm > fitting:
            return f"{config.ctas_per_sm} CTAs to an SM were asked for, {fitting} fit"
    return reason


@dataclass(frozen=True)
class Candidate:
    """A config of a family with a build that can be timed."""

    config: LeanConfig
    build: BuildKey


def candidates(
    kernel: Kernel, family: FamilyKey, spec: GpuSpec, builds: dict[BuildKey, Build]
) -> tuple[list[Candidate], dict[LeanConfig, str]]:
    """Return the candidates worth timing, and the reasons against the others."""
    problem = family.problem(8, 4096)
    able: list[Candidate] = []
    left_out: dict[LeanConfig, str] = {}
    for config in kernel.tuning_space(problem, spec):
        key = config.build_key
        reason = why_left_out(builds[key], config, spec)
        if reason is None:
            able.append(Candidate(config, key))
        else:
            left_out[config] = reason
    return able, left_out


def distinct(
    able: Iterable[Candidate], problem: AttentionProblem, kernel: Kernel, spec: GpuSpec
) -> list[Candidate]:
    """Return one candidate per distinct launch on this problem: build, LeanTile and grid."""
    shape = Shape.of(problem)
    launches: dict[tuple[BuildKey, int, int], Candidate] = {}
    for candidate in able:
        grid = grid_of(shape, candidate.config, spec.sms, kernel)
        launches.setdefault((candidate.build, candidate.config.tile_tokens, grid), candidate)
    return list(launches.values())


def heuristics(kernel: Kernel, problem: AttentionProblem, spec: GpuSpec) -> list[LeanConfig]:
    """Return the kernel's default, then those of its implementations alone."""
    alone = [
        implementation
        for implementation in kernels().values()
        if implementation.tuned_as == kernel.tuned_as and not implementation.unavailable_reason()
    ]
    configs = dict.fromkeys(chooser.default_config(problem, spec) for chooser in (kernel, *alone))
    return [config for config in configs if config is not None and kernel.takes(config)]


def default_families(
    head_dims: Sequence[int] = (64, 128),
    group_sizes: Sequence[int] = (1, 4, 8),
    dtypes: Sequence[str] = ("fp16",),
    kv_layouts: Sequence[str] = ("HND",),
) -> list[FamilyKey]:
    """Return the families of every combination."""
    return [
        FamilyKey(head_dim, group_size, dtype, kv_layout)
        for dtype in dtypes
        for kv_layout in kv_layouts
        for head_dim in head_dims
        for group_size in group_sizes
    ]
