"""A family of tuned configs in the form of a lookup: ready to choose from without a search."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from leanbench.configs.formula import Coefficients, Work
from leanbench.configs.nearness import EntryKey
from leanbench.configs.tuned import LEAST_GAIN
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.kernel import Kernel
from leanbench.core.problem import AttentionProblem
from leanbench.kernels.configs import stages_that_fit
from leanbench.kernels.lean.configs import BuildKey, LeanConfig, LeanTritonConfig

if TYPE_CHECKING:
    from leanbench.configs.store import File
    from leanbench.configs.tuned import Build, Candidate, Family, TunedProblem

#: Validity limit of the formula, as a multiple of the tokens of the largest fitted problem.
_REACH = 2
#: Wording of a gain in each objective.
_BETTER = {"latency": "faster", "energy": "lower in energy", "edp": "lower in energy x latency"}


@dataclass(frozen=True)
class Rates:
    """Cost of a launch of one build, in its objective: latency (us), energy or energy x latency."""

    coefficients: Coefficients
    #: Power of the build; 1 for latency.
    power_kw: float
    #: Exponent of latency in the objective: 2 for energy x latency.
    exponent: int

    def cost(self, work: Work) -> float:
        return self.power_kw * self.coefficients.latency_us(work) ** self.exponent


@dataclass(frozen=True)
class TimedChoice:
    """Settings for a problem that was timed."""

    config: LeanConfig
    #: ``timed at 8 x 4096 tokens``: (sequence, KV head) pairs and context.
    where: str
    #: Gain in latency over the heuristic at that time; None for other objectives, or if unknown.
    gain: float | None
    heuristic: LeanConfig


@dataclass(frozen=True, eq=False)
class Entry:
    """A family that serves `key` on the GPU `spec`, possibly a fallback from another family."""

    kernel: Kernel
    spec: GpuSpec
    #: Requested key; the family's own can differ.
    key: EntryKey
    #: ``measured 2026-11-21 on NVIDIA H200, shipped``.
    source: str
    #: Wording of a better choice.
    better: str
    #: Minimum predicted gain over the heuristic for a choice by the formula, as a fraction.
    least_gain: float
    shortlist: tuple[tuple[LeanConfig, Rates], ...]
    rates: Mapping[BuildKey, Rates]
    #: Maximum number of (sequence, KV head) pairs, and of tokens of all pairs, in the fitted
    #: problems; infinite if the file does not have them.
    most_kv_heads: float
    most_tokens: float
    #: Implementations that were timed.
    implementations: frozenset[str | None]
    #: Tokens of the smallest LeanTile among the family's candidates for this kernel; 1 without
    #: candidates. Contexts with the same number of them share a result.
    granule: int
    #: Choices by (batch x KV heads, context rounded up to `granule`).
    timed: Mapping[tuple[int, int], TimedChoice]
    #: ``another GPU`` or ``another group size`` if its times do not apply to this key; or empty.
    times_of: str = ""

    def rates_of(self, config: LeanConfig) -> Rates | None:
        return self.rates.get(config.build_key)

    def reaches(self, kv_heads: int, context: int) -> bool:
        """Return True if the formula was fitted to problems of about this size.

        Far beyond them, its error exceeds its possible gain.

        Args:
            kv_heads: of all sequences together.
        """
        return kv_heads <= self.most_kv_heads and kv_heads * context <= _REACH * self.most_tokens

    @classmethod
    def of(cls, kernel: Kernel, spec: GpuSpec, key: EntryKey, file: File, family: Family) -> Entry:
        """Create an entry for `key` and the GPU `spec` from a family of `file`.

        Candidates that the kernel cannot launch are removed. On another GPU than the file's, the
        memory's rate is scaled, and candidates that do not fit are removed.
        """
        gpu = file.tuned.gpu
        here = gpu.is_like(spec)
        bandwidth_ratio = 1.0 if here else spec.bandwidth_tb_s / gpu.bandwidth_tb_s
        builds = [_rates(build, family.objective, bandwidth_ratio) for build in family.builds]
        rates: dict[BuildKey, Rates] = {}
        for candidate in family.candidates:
            build_rates = None if candidate.build is None else builds[candidate.build]
            if build_rates is not None:
                rates.setdefault(candidate.config.build_key, build_rates)
        shortlist = [family.candidates[index] for index in family.shortlist]
        shortlist = [
            candidate
            for candidate in shortlist
            if _launches(kernel, candidate) and (here or _fits(candidate, key, spec))
        ]
        listed = [
            (candidate.config, rates[candidate.config.build_key])
            for candidate in shortlist
            if candidate.config.build_key in rates
        ]
        # The family's value was fitted against the heuristic over all implementations.
        least_gain = LEAST_GAIN if kernel.implementation else family.least_gain
        kv_heads = [problem.batch * problem.kv_heads for problem in family.problems]
        tokens = [
            heads * problem.context
            for heads, problem in zip(kv_heads, family.problems, strict=True)
        ]
        most = max(kv_heads, default=math.inf), max(tokens, default=math.inf)
        tile_tokens = [
            candidate.config.tile_tokens
            for candidate in family.candidates
            if _launches(kernel, candidate)
        ]
        entry = cls(
            kernel,
            spec,
            key,
            _source(file, family, key),
            _BETTER[family.objective],
            least_gain,
            tuple(listed),
            rates,
            *most,
            frozenset(candidate.config.implementation for candidate in family.candidates),
            min(tile_tokens, default=1),
            {},
        )
        # Times of another GPU, or of other query rows, do not apply to this problem.
        if not here:
            return replace(entry, times_of="another GPU")
        if family.group_size != key[2]:
            return replace(entry, times_of="another group size")
        return replace(entry, timed=_timed(kernel, family, entry.granule))


def _rates(build: Build, objective: str, bandwidth_ratio: float) -> Rates | None:
    """Return a build's rates, or None if the objective needs an unknown power."""
    coefficients = build.coefficients
    coefficients = replace(
        coefficients, gpu_bytes_per_us=coefficients.gpu_bytes_per_us * bandwidth_ratio
    )
    power_kw = 1.0 if objective == "latency" else build.power_kw
    return (
        None if power_kw is None else Rates(coefficients, power_kw, 2 if objective == "edp" else 1)
    )


def _timed(kernel: Kernel, family: Family, granule: int) -> dict[tuple[int, int], TimedChoice]:
    choices: dict[tuple[int, int], TimedChoice] = {}
    for problem in family.problems:
        chosen = _chosen(kernel, family, problem)
        if chosen is not None:
            context = -(-problem.context // granule) * granule
            choices[problem.batch * problem.kv_heads, context] = _timed_choice(
                kernel, family, problem, chosen
            )
    return choices


def _launches(kernel: Kernel, candidate: Candidate) -> bool:
    """Return True if the kernel takes the candidate and can launch it on this machine."""
    config = candidate.config
    return kernel.takes(config) and kernel.implementation_of(config).unavailable_reason() is None


def _chosen(kernel: Kernel, family: Family, problem: TunedProblem) -> int | None:
    """Return the chosen candidate, or for latency the fastest that the kernel launches, or None."""
    able = [problem.chosen]
    if family.objective == "latency":
        able += [timed.candidate for timed in problem.timed]
    return next((index for index in able if _launches(kernel, family.candidates[index])), None)


def _timed_choice(
    kernel: Kernel, family: Family, problem: TunedProblem, chosen: int
) -> TimedChoice:
    times_us = {timed.candidate: timed.latency_us for timed in problem.timed}
    chosen_us, heuristic_us = times_us.get(chosen), times_us.get(problem.heuristic)
    # With several implementations, the heuristic may have chosen another than this kernel's.
    launches_heuristic = _launches(kernel, family.candidates[problem.heuristic])
    gain = None
    if (
        family.objective == "latency"
        and launches_heuristic
        and chosen != problem.heuristic
        and chosen_us
        and heuristic_us
    ):
        gain = 1 - chosen_us / heuristic_us
    verb = "timed" if family.source == "measured" else "predicted"
    where = f"{verb} at {problem.batch * problem.kv_heads} x {problem.context} tokens"
    return TimedChoice(
        family.candidates[chosen].config, where, gain, family.candidates[problem.heuristic].config
    )


def _fits(candidate: Candidate, key: EntryKey, spec: GpuSpec) -> bool:
    """Return True if the candidate's CTAs fit a GPU with other shared memory than the timed one."""
    if candidate.shared_bytes is not None:
        shared_kb = candidate.shared_bytes / 1024
        return shared_kb <= min(
            spec.shared_kb_per_cta, spec.shared_kb_per_sm / candidate.config.ctas_per_sm - 1
        )
    config = candidate.config
    if not isinstance(config, LeanTritonConfig):
        return False
    head_dim, dtype, group_size, kv_layout, _ = key
    problem = AttentionProblem(1, group_size, 1, config.tile_tokens, head_dim, dtype, kv_layout)
    stages = stages_that_fit(
        problem, config.tile_tokens, config.num_stages, spec, config.ctas_per_sm
    )
    return stages == config.num_stages


def _source(file: File, family: Family, key: EntryKey) -> str:
    _, dtype, group_size, kv_layout, _ = key
    source = f"{family.source} {family.time[:10]} on {file.tuned.gpu.product}, {file.where}"
    pairs = {"dtype": (family.dtype, dtype), "layout": (family.kv_layout, kv_layout)}
    pairs["group size"] = (str(family.group_size), str(group_size))
    instead = [
        f"{name} {of_family} for {of_key}"
        for name, (of_family, of_key) in pairs.items()
        if of_family != of_key
    ]
    return f"{source}, {', '.join(instead)}" if instead else source
