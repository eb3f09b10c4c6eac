"""Tuned configs: one JSON file a GPU, with what a look-up reads, and when and with what it was
found.

Written by `leanbench tune`, read by whatever launches a kernel without settings of its own
(leanbench.configs.lookup).
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainSerializer, PlainValidator

from leanbench.configs.formula import Coefficients
from leanbench.core.config import read_config
from leanbench.core.errors import UserError
from leanbench.core.gpu_spec import GpuSpec, name_fault
from leanbench.kernels.lean.configs import LEAN_CONFIGS, LeanConfig

#: Raised when a field changes its meaning or goes.
SCHEMA_VERSION = 3
#: What a choice by the formula must promise over the heuristic's at least, as a share of the
#: latency.
LEAST_GAIN = 0.005

Positive = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
#: Drivers round the L2 in their own ways. H200, GH200 and H100 NVL differ in their bandwidth alone.
L2_TOLERANCE = 0.02
BANDWIDTH_TOLERANCE = 0.1
Objective = Literal["latency", "energy", "edp"]


def _safe(name: str) -> str:
    if (fault := name_fault(name)) is not None:
        raise ValueError(fault)
    return name


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TunedGpu(_Model):
    """The GPU that the entries hold for: compute capability, SMs, L2 and bandwidth are its key,
    names are for people.
    """

    #: Names the file, see leanbench.configs.store.path_of.
    name: Annotated[str, AfterValidator(_safe)]
    product: str
    compute_capability: tuple[Positive, Annotated[int, Field(ge=0)]]
    sms: Positive
    l2_mib: PositiveFloat
    bandwidth_tb_s: PositiveFloat

    @classmethod
    def of(cls, spec: GpuSpec) -> TunedGpu:
        return cls(**{name: getattr(spec, name) for name in cls.model_fields})

    def is_like(self, gpu: TunedGpu | GpuSpec) -> bool:
        """Whether what was found on one of them holds for the other."""
        return (
            tuple(self.compute_capability) == tuple(gpu.compute_capability)
            and self.sms == gpu.sms
            and abs(self.l2_mib / gpu.l2_mib - 1) <= L2_TOLERANCE
            and abs(self.bandwidth_tb_s / gpu.bandwidth_tb_s - 1) <= BANDWIDTH_TOLERANCE
        )


def _read_settings(value: Any) -> LeanConfig:
    if isinstance(value, LeanConfig):
        return value
    if not isinstance(value, dict):
        raise ValueError(f"{value!r} are no launch settings")
    try:
        return read_config(LEAN_CONFIGS, value)
    except UserError as error:
        raise ValueError(str(error)) from None


class Candidate(_Model):
    """Launch settings that a look-up may choose or compare with."""

    config: Annotated[
        LeanConfig, PlainValidator(_read_settings), PlainSerializer(lambda config: config.to_dict())
    ]
    #: Of a CTA of the compiled kernel; null if it did not compile.
    shared_bytes: Annotated[int, Field(ge=0)] | None = None
    #: Index into `Family.builds`; null where it has no coefficients: CUDA C++, or timed too seldom.
    build: Annotated[int, Field(ge=0)] | None = None


class Build(_Model):
    """The formula of a compiled Triton kernel; candidates that differ in their grid only share
    it.
    """

    #: See leanbench.configs.formula.Coefficients.
    start_us: PositiveFloat
    ramp_us: PositiveFloat
    gpu_bytes_per_us: PositiveFloat
    cta_bytes_per_us: PositiveFloat
    sm_bytes_per_us: PositiveFloat
    boundary_us: PositiveFloat
    more_boundaries_us: PositiveFloat
    split_us: PositiveFloat
    partial_us: PositiveFloat
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


class Timed(NamedTuple):
    """One candidate's time on one problem."""

    #: Index into `Family.candidates`.
    candidate: Annotated[int, Field(ge=0)]
    latency_us: PositiveFloat


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
    #: Fastest first: the heuristic's, the chosen one, those that tie, the fastest of each
    #: implementation.
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
    #: Candidates in Triton to choose from for a problem that was not timed, by the formula.
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
        for name, index, count in self._indices():
            if not 0 <= index < count:
                return f"{name} is {index}, there are {count}"
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


class TunedConfigs(_Model):
    """A file of tuned configs."""

    schema_version: Literal[3] = SCHEMA_VERSION
    kernel: str
    gpu: TunedGpu
    families: list[Family]

    def fault(self) -> str | None:
        """The first family's fault, see Family.fault, or that a family is there twice; None if
        there is none.
        """
        seen: set[tuple[int, str, int, str, str]] = set()
        for number, family in enumerate(self.families):
            fault = "it is there twice" if family.key in seen else family.fault()
            if fault:
                return f"family {number} ({family.label}): {fault}"
            seen.add(family.key)
        return None
