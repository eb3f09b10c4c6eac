"""Kept configs: one JSON file a GPU, with every candidate that was timed, what came of it, when and
with what.

Written by `leanbench tune`, read by whatever launches a kernel without being told how
(leanbench.configs.lookup).
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_serializer, model_validator

from leanbench.configs.formula import Coefficients
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.registry import KernelConfig

#: Raised when a field changes its meaning or goes.
SCHEMA_VERSION = 1
#: What a choice by the formula must promise over the heuristic's at least, as a share of the
#: latency.
LEAST_GAIN = 0.005

Positive = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
#: Drivers round the L2 in their own ways. H200, GH200 and H100 NVL differ in their bandwidth alone.
L2_TOLERANCE = 0.02
BANDWIDTH_TOLERANCE = 0.1
Objective = Literal["latency", "energy", "edp"]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, serialize_by_alias=True)


class KeptGpu(_Model):
    """The GPU that the entries hold for: compute capability, SMs and L2 are its key, names are for
    people.
    """

    name: str
    product: str
    compute_capability: tuple[Positive, Annotated[int, Field(ge=0)]]
    sms: Positive
    l2_mib: PositiveFloat
    bandwidth_tb_s: PositiveFloat

    @classmethod
    def of(cls, spec: GpuSpec) -> KeptGpu:
        return cls(**{name: getattr(spec, name) for name in cls.model_fields})

    def is_like(self, gpu: KeptGpu | GpuSpec) -> bool:
        """Whether what was found on one of them holds for the other."""
        return (
            tuple(self.compute_capability) == tuple(gpu.compute_capability)
            and self.sms == gpu.sms
            and abs(self.l2_mib / gpu.l2_mib - 1) <= L2_TOLERANCE
            and abs(self.bandwidth_tb_s / gpu.bandwidth_tb_s - 1) <= BANDWIDTH_TOLERANCE
        )


class Candidate(_Model):
    """Launch settings that were considered: the fields of leanbench.core.registry.KernelConfig, and
    what came of them.
    """

    tile_tokens: Positive
    num_warps: Positive
    num_stages: Positive
    ctas_per_sm: Positive
    min_tiles_per_cta: Positive
    align_grid: bool
    #: Null, as the four after it, for the implementation in Triton.
    implementation: Literal["cuda"] | None = None
    chunk_tokens: Positive | None = None
    tile_rows: Positive | None = None
    cluster_size: Positive | None = None
    #: pydantic's models have a method `copy`.
    copy_: Annotated[Literal["bulk", "async"] | None, Field(alias="copy")] = None
    #: Of the compiled kernel; null if it did not compile.
    registers_per_thread: Positive | None = None
    shared_bytes: Annotated[int, Field(ge=0)] | None = None
    spilled_registers: Annotated[int, Field(ge=0)] | None = None
    #: Index into `Family.builds`; null where it has no coefficients: never timed, or too seldom.
    build: Annotated[int, Field(ge=0)] | None = None
    #: One sentence why it was never timed.
    left_out: str | None = None

    @property
    def config(self) -> KernelConfig:
        return KernelConfig(
            self.tile_tokens,
            self.num_warps,
            self.num_stages,
            self.ctas_per_sm,
            self.min_tiles_per_cta,
            self.align_grid,
            implementation=self.implementation,
            chunk_tokens=self.chunk_tokens,
            tile_rows=self.tile_rows,
            cluster_size=self.cluster_size,
            copy=self.copy_,
        )

    def fault(self) -> str | None:
        """What contradicts itself, as a phrase; None if nothing does."""
        names = ("chunk_tokens", "tile_rows", "cluster_size", "copy_")
        settings = {name.rstrip("_"): getattr(self, name) for name in names}
        for name, value in settings.items():
            if (value is None) != (self.implementation is None):
                return (
                    f"is of {self.implementation or 'Triton'} and has"
                    f" {'no' if value is None else 'a'} {name}"
                )
        return None


class Build(_Model):
    """A compiled kernel: candidates that differ in their grid only share it."""

    #: See leanbench.configs.formula.Coefficients.
    start_us: PositiveFloat
    ramp_us: PositiveFloat
    gpu_bytes_per_us: PositiveFloat
    cta_bytes_per_us: PositiveFloat
    sm_bytes_per_us: PositiveFloat
    border_us: PositiveFloat
    more_borders_us: PositiveFloat
    cut_us: PositiveFloat
    more_cuts_us: PositiveFloat
    round_us: PositiveFloat
    excess: PositiveFloat
    #: Timings behind the coefficients, and their median relative error.
    points: Positive
    median_error: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    #: Energy of a launch over its latency, where the objective asked for it (mJ per us is kW).
    power_kw: PositiveFloat | None = None

    @property
    def coefficients(self) -> Coefficients:
        return Coefficients(**self.model_dump(exclude={"points", "median_error", "power_kw"}))


class Timed(_Model):
    """One candidate's time on one problem; in the file a list of these figures, there are
    thousands.
    """

    #: Index into `Family.candidates`.
    candidate: Annotated[int, Field(ge=0)]
    latency_us: PositiveFloat
    #: 95% confidence interval of the median; null where the model predicted it.
    low_us: PositiveFloat | None = None
    high_us: PositiveFloat | None = None

    @model_validator(mode="before")
    @classmethod
    def _from_list(cls, value: Any) -> Any:
        names = ("candidate", "latency_us", "low_us", "high_us")
        if not isinstance(value, list):
            return value
        if len(value) > len(names):
            raise ValueError(f"has {len(value)} figures, at most {len(names)} are known")
        return dict(zip(names, value, strict=False))

    @model_serializer
    def _to_list(self) -> list[float]:
        figures = (self.candidate, self.latency_us, self.low_us, self.high_us)
        return [figure for figure in figures if figure is not None]


class TunedProblem(_Model):
    """A problem that candidates were timed on."""

    batch: Positive
    kv_heads: Positive
    context: Positive
    #: The candidate that the heuristic chooses here, and the one to use.
    heuristic: Annotated[int, Field(ge=0)]
    chosen: Annotated[int, Field(ge=0)]
    #: Candidates that the intervals cannot tell from the fastest.
    ties: list[int]
    #: Fastest first.
    timed: list[Timed]


class Family(_Model):
    """What was found for problems that differ in batch, KV heads and context only."""

    head_dim: Positive
    dtype: str
    group_size: Positive
    kv_layout: str
    source: Literal["measured", "predicted"]
    objective: Objective
    #: UTC, ISO 8601.
    time: str
    #: leanbench, torch, triton, driver.
    versions: dict[str, str]
    #: Why the search ended.
    stopped: str
    candidates: list[Candidate]
    builds: list[Build]
    #: Candidates to choose from for a problem that was not timed, by the formula.
    shortlist: list[int]
    #: What the formula must promise over the heuristic's choice to be believed, as a share of the
    #: latency.
    least_gain: Annotated[float, Field(ge=0, lt=1)] = LEAST_GAIN
    problems: list[TunedProblem]

    @property
    def key(self) -> tuple[int, str, int, str, str]:
        """A file has one family of each key."""
        return self.head_dim, self.dtype, self.group_size, self.kv_layout, self.objective

    @property
    def label(self) -> str:
        """``head_dim 128, group size 4, fp16, HND``; the objective where it is not latency."""
        objective = "" if self.objective == "latency" else f", for {self.objective}"
        return (
            f"head_dim {self.head_dim}, group size {self.group_size}, {self.dtype},"
            f" {self.kv_layout}{objective}"
        )

    def fault(self) -> str | None:
        """What contradicts itself although every field is of its type, as a phrase; None if nothing
        does.
        """
        try:
            datetime.fromisoformat(self.time)
        except ValueError:
            return f"time {self.time!r} is no ISO 8601 time"
        if not self.builds:
            return "there are no builds"
        for name, index, count in self._indices():
            if not 0 <= index < count:
                return f"{name} is {index}, there are {count}"
        for number, candidate in enumerate(self.candidates):
            if (found := candidate.fault()) is not None:
                return f"candidate {number} {found}"
        for index in self.shortlist:
            if self.candidates[index].build is None:
                return f"candidate {index} is on the shortlist and has no build"
        return None

    def _indices(self) -> Iterator[tuple[str, int, int]]:
        """(what, index, how many there are) of all that point into a list."""
        builds, candidates = len(self.builds), len(self.candidates)
        for number, candidate in enumerate(self.candidates):
            if candidate.build is not None:
                yield f"the build of candidate {number}", candidate.build, builds
        for index in self.shortlist:
            yield "a candidate of the shortlist", index, candidates
        for number, problem in enumerate(self.problems):
            timed = [timed.candidate for timed in problem.timed]
            for index in (problem.heuristic, problem.chosen, *problem.ties, *timed):
                yield f"a candidate of problem {number}", index, candidates


class KeptConfigs(_Model):
    """A file of kept configs."""

    schema_version: Literal[1] = SCHEMA_VERSION
    kernel: str
    gpu: KeptGpu
    families: list[Family]

    def fault(self) -> str | None:
        """The first family's fault, see Family.fault, or that a family is there twice; None if
        there is none.
        """
        seen: set[tuple[int, str, int, str, str]] = set()
        for number, family in enumerate(self.families):
            found = "it is there twice" if family.key in seen else family.fault()
            if found:
                return f"family {number} ({family.label}): {found}"
            seen.add(family.key)
        return None
