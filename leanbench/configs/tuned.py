"""Tuned configs: a JSON file per GPU with the data of a lookup, and its date and versions.

Written by `leanbench tune`, read for every launch without given settings
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

#: Increased if a field changes its meaning or is removed.
SCHEMA_VERSION = 3
#: Minimum predicted gain in latency over the heuristic for a choice by the formula.
LEAST_GAIN = 0.005

Positive = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
#: Drivers round the L2 differently. H200, GH200 and H100 NVL differ only in their bandwidth.
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
    """GPU of the entries. Compute capability, SMs, L2 and bandwidth are its key; names are
    informative.
    """

    #: Name of the file, see leanbench.configs.store.path_of.
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
        """Return True if results of one GPU hold for the other."""
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
    """Launch settings available to a lookup, as a choice or for comparison."""

    config: Annotated[
        LeanConfig, PlainValidator(_read_settings), PlainSerializer(lambda config: config.to_dict())
    ]
    #: Shared memory of a CTA of the compiled kernel; null if it did not compile.
    shared_bytes: Annotated[int, Field(ge=0)] | None = None
    #: Index into `Family.builds`; null without coefficients: CUDA C++, or too few timings.
    build: Annotated[int, Field(ge=0)] | None = None


class Build(_Model):
    """Formula of a compiled Triton kernel, shared by candidates that differ only in their grid."""

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
    #: Number of timings behind the coefficients, and their median relative error.
    points: Positive
    median_error: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    #: Energy of a launch divided by its latency, if the objective needs it (mJ per us is kW).
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
    #: Candidate of the heuristic, and the one to use.
    heuristic: Annotated[int, Field(ge=0)]
    chosen: Annotated[int, Field(ge=0)]
    #: Candidates with intervals that overlap the fastest's.
    ties: list[int]
    #: Fastest first: the heuristic's, the chosen one, ties, the fastest of each implementation.
    timed: list[Timed]


class Family(_Model):
    """Results for problems that differ only in batch, KV heads and context."""

    head_dim: Positive
    dtype: str
    group_size: Positive
    kv_layout: str
    source: Literal["measured", "predicted"]
    objective: Objective
    #: UTC, ISO 8601.
    time: str
    #: Versions of leanbench, torch, triton, driver.
    versions: dict[str, str]
    #: Reason for the end of the search.
    stopped: str
    candidates: list[Candidate]
    builds: list[Build]
    #: Triton candidates for problems that were not timed, chosen by the formula.
    shortlist: list[int]
    #: Minimum predicted gain in latency over the heuristic for a choice by the formula.
    least_gain: Annotated[float, Field(ge=0, lt=1)] = LEAST_GAIN
    problems: list[TunedProblem]

    @property
    def key(self) -> tuple[int, str, int, str, str]:
        """Key, unique in a file."""
        return self.head_dim, self.dtype, self.group_size, self.kv_layout, self.objective

    @property
    def label(self) -> str:
        """Label: ``head_dim 128, group size 4, fp16, HND``, and the objective unless latency."""
        objective = "" if self.objective == "latency" else f", for {self.objective}"
        return (
            f"head_dim {self.head_dim}, group size {self.group_size}, {self.dtype},"
            f" {self.kv_layout}{objective}"
        )

    def fault(self) -> str | None:
        """Return an inconsistency that field types do not catch, as a phrase, or None."""
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
        """Yield (what, index, length) of every index into a list."""
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
        """Return the first family's fault, see Family.fault, or a duplicate family, or None."""
        seen: set[tuple[int, str, int, str, str]] = set()
        for number, family in enumerate(self.families):
            fault = "it is there twice" if family.key in seen else family.fault()
            if fault:
                return f"family {number} ({family.label}): {fault}"
            seen.add(family.key)
        return None
