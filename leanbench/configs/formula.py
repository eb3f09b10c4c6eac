"""Formula for the latency of a stream-K launch, from the way its LeanTiles divide. It applies
timings of tuned problems to others with lengths known to the host.

The nearest tuned problem is a poor guide: 128 output tiles of 4096 tokens do not show whether 200
of 3000 leave SMs idle. Properties of the schedule do: the longest CTA, crossed tile boundaries,
merged partials. A few coefficients convert them to microseconds. They are fitted to timings of one
build of the kernel, so they hold for its LeanTile, warps and stages on that GPU. The grid is an
argument of the formula.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any, Protocol

from leanbench.core.decomposition import cluster_slots, stream_k_grid, tile_rows, usable_sms
from leanbench.core.problem import ELEMENT_BYTES, AttentionProblem
from leanbench.kernels.lean.configs import LeanConfig, LeanCudaConfig


class Kernel(Protocol):
    """Methods of a kernel called by the formula, see leanbench.core.kernel.Kernel."""

    def grid_limit(self, rows: int, head_dim: int, wanted: int) -> int: ...

    def merge_rounds(self, rows: int, head_dim: int, num_warps: int, partials: int) -> int: ...

    def implementation_of(self, config: LeanConfig) -> Kernel: ...


#: Bytes read at which half of `ramp_us` is paid: the read rate increases with size (H200).
RAMP_BYTES = 30e6
#: Sharpness of the maximum of two limits: the GPU's memory and a CTA's pipeline.
_SHARPNESS = 5


@dataclass(frozen=True)
class Shape:
    """Sizes of a problem used by the formula."""

    #: KV heads of all sequences.
    kv_heads: int
    #: Tokens of every output tile.
    context: int
    head_dim: int
    #: Query rows that share a KV head.
    rows: int

    @classmethod
    def of(cls, problem: AttentionProblem) -> Shape:
        """Return the shape of a problem with a length known to the host.

        Lengths on the device are distributed differently.
        """
        assert problem.lengths_on == "host"
        return cls(
            kv_heads=problem.batch * problem.kv_heads,
            context=problem.max_context,
            head_dim=problem.head_dim,
            rows=problem.group_size * problem.q_len,
        )

    def partial_rows(self, config: LeanConfig) -> int:
        """Return the query rows of a partial."""
        if isinstance(config, LeanCudaConfig):
            return min(self.rows, config.tile_rows)
        return min(self.rows, tile_rows(self.rows, self.head_dim))

    def output_tiles(self, config: LeanConfig) -> int:
        return self.kv_heads * -(-self.rows // self.partial_rows(config))


@dataclass(frozen=True)
class Work:
    """Division of a shape by a config. Fields are numbers, or arrays for many launches at once."""

    #: K and V once, for any number of output tiles that share them.
    kv_bytes: Any
    #: LeanTiles of the longest CTA, in bytes of K and V; CTAs of a cluster divide theirs. A
    #: context's last LeanTile counts as a whole: its missing tokens still take arithmetic.
    longest_bytes: Any
    #: Bytes read in addition to all output tiles if every work range had the longest's length.
    excess_bytes: Any
    #: CTAs of the fullest SM.
    ctas_per_sm: Any
    #: Boundaries between output tiles crossed by one work range.
    boundaries: Any
    #: Partials merged by a host block: the splits of its output tile, less one.
    partials: Any
    #: Rounds of loads of the merge.
    rounds: Any


def grid_of(shape: Shape, config: LeanConfig, sms: int, kernel: Kernel) -> int:
    """Return the number of CTAs launched by `config` on a GPU with `sms` SMs."""
    return _work_ranges(shape, config, sms, kernel) * _cluster_size(config)


def _cluster_size(config: LeanConfig) -> int:
    return config.cluster_size if isinstance(config, LeanCudaConfig) else 1


def _work_ranges(shape: Shape, config: LeanConfig, sms: int, kernel: Kernel) -> int:
    """Return the number of work ranges: one per CTA or per cluster."""
    output_tiles = shape.output_tiles(config)
    total = output_tiles * -(-shape.context // config.tile_tokens)
    slots = cluster_slots(sms, config.ctas_per_sm, _cluster_size(config))
    most = kernel.implementation_of(config).grid_limit(
        shape.partial_rows(config), shape.head_dim, slots
    )
    multiple_of = output_tiles if config.align_grid else 1
    return stream_k_grid(total, most, config.min_tiles_per_cta, multiple_of)


def divide(shape: Shape, config: LeanConfig, sms: int, kernel: Kernel) -> Work:
    """Return the work of `config` on `sms` SMs; see leanbench.core.decomposition.stream_k."""
    tile_tokens, cluster_size = config.tile_tokens, _cluster_size(config)
    output_tiles = shape.output_tiles(config)
    of = -(-shape.context // tile_tokens)
    ranges = _work_ranges(shape, config, sms, kernel)
    share, longer = divmod(output_tiles * of, ranges)
    longest = share + (longer > 0)
    # Every work range has the same share, and shares and output tiles end together.
    even = longer == 0 and (share % of == 0 or of % share == 0)
    # A work range of n touches at most ceil((n - 1) / m) + 1 stretches of m, from any start.
    boundaries = (
        max(1, longest // of) - 1 if even else min(-(-(longest - 1) // of), output_tiles - 1)
    )
    partials = max(1, -(-of // share)) - 1 if even else min(-(-(of - 1) // share), ranges - 1)
    token_bytes = 2 * shape.head_dim * ELEMENT_BYTES
    whole, part = divmod(longest, of)
    read_bytes = token_bytes * (whole * shape.context + min(part * tile_tokens, shape.context))
    tile_bytes = token_bytes * output_tiles * shape.context
    launched = kernel.implementation_of(config)
    return Work(
        kv_bytes=token_bytes * shape.kv_heads * shape.context,
        longest_bytes=token_bytes * _longest_tokens(shape, config, whole, part) / cluster_size,
        excess_bytes=max(0, read_bytes * ranges - tile_bytes),
        ctas_per_sm=-(-ranges * cluster_size // usable_sms(sms, cluster_size)),
        boundaries=boundaries,
        partials=partials,
        rounds=launched.merge_rounds(
            shape.partial_rows(config), shape.head_dim, config.num_warps, partials
        )
        if partials
        else 0,
    )


def _longest_tokens(shape: Shape, config: LeanConfig, whole: int, part: int) -> int:
    """Return the tokens of a work range of `whole` output tiles and `part` LeanTiles.

    They are rounded up to the step: a LeanTile, or in CUDA C++ a chunk per warp of its CTAs.
    """
    if not isinstance(config, LeanCudaConfig):
        return (whole * -(-shape.context // config.tile_tokens) + part) * config.tile_tokens
    step = config.num_warps * config.cluster_size * config.chunk_tokens
    stretches = whole * -(-shape.context // step) + -(
        -min(part * config.tile_tokens, shape.context) // step
    )
    return stretches * step


@dataclass(frozen=True)
class Coefficients:
    """Coefficients of one build on one GPU. Times in us, rates in bytes per us."""

    #: Launch, first loads, last stores.
    start_us: float
    #: Maximum delay while the memory system reaches its rate; see RAMP_BYTES.
    ramp_us: float
    #: Rate of the GPU's memory.
    gpu_bytes_per_us: float
    #: Rate of one CTA alone, and of all CTAs of an SM.
    cta_bytes_per_us: float
    sm_bytes_per_us: float
    #: Cost of a work range's first boundary between output tiles, and of each further one.
    boundary_us: float
    more_boundaries_us: float
    #: Cost of splitting an output tile, of each partial, and of each round of its merge.
    split_us: float
    partial_us: float
    round_us: float
    #: Fraction of the time for `Work.excess_bytes` that is not hidden.
    excess: float

    def latency_us(
        self,
        work: Work,
        lesser: Callable[[Any, Any], Any] = min,
        greater: Callable[[Any, Any], Any] = max,
    ) -> Any:
        """Return the latency of a launch, or of many.

        For many, `work` has arrays, and the functions are numpy's minimum and maximum.
        """
        ramp = self.ramp_us * work.kv_bytes / (work.kv_bytes + RAMP_BYTES)
        gpu_us = work.kv_bytes / self.gpu_bytes_per_us
        cta_us = work.longest_bytes / lesser(
            self.cta_bytes_per_us, self.sm_bytes_per_us / work.ctas_per_sm
        )
        stream_us = gpu_us * (1 + (cta_us / gpu_us) ** _SHARPNESS) ** (1 / _SHARPNESS)
        boundary_us = self.boundary_us * lesser(
            work.boundaries, 1
        ) + self.more_boundaries_us * greater(work.boundaries - 1, 0)
        split_us = (
            self.split_us * lesser(work.partials, 1)
            + self.partial_us * work.partials
            + self.round_us * work.rounds
        )
        excess_us = self.excess * work.excess_bytes / self.gpu_bytes_per_us
        return self.start_us + ramp + stream_us + boundary_us + split_us + excess_us


#: Start of a fit, and the range of each coefficient. Rates of the GPU scale with its bandwidth in
#: TB/s.
_START = Coefficients(4, 3, 1.0e6, 5e4, 6e4, 0.9, 0.8, 0.8, 0.06, 0.5, 0.2)
_LOW = Coefficients(0.5, 0.01, 0.5e6, 2e3, 4e3, 0.01, 0.01, 0.01, 0.003, 0.005, 0.001)
_HIGH = Coefficients(20, 15, 1.3e6, 4e5, 6e5, 8, 6, 10, 2, 5, 2)
#: Allowed deviation of a coefficient's logarithm from its prior, relative to that of a latency.
LEAN = 0.4
#: Timings this much above their shape's best get a lower weight: they matter little for the choice.
_FAR, _FAR_WEIGHT = 1.25, 0.3


@dataclass(frozen=True)
class Point:
    """A timing used by a fit."""

    work: Work
    latency_us: float
    #: Ratio to the fastest of the same shape.
    over_best: float


def fit(
    points: Sequence[Point], bandwidth_tb_s: float, leaning_on: Coefficients | None = None
) -> Coefficients:
    """Return the coefficients that explain `points` best.

    Uses robust least squares of the logarithm of latency.

    Args:
        leaning_on: coefficients of all builds of a family together, a prior for a build with few
            timings.
    """
    import numpy as np
    from scipy.optimize import least_squares

    columns = [
        np.array([getattr(point.work, field.name) for point in points], dtype=float)
        for field in fields(Work)
    ]
    work = Work(*columns)
    measured = np.log([point.latency_us for point in points])
    weights = np.array([1.0 if point.over_best < _FAR else _FAR_WEIGHT for point in points])
    low, high = np.log(_scaled(_LOW, bandwidth_tb_s)), np.log(_scaled(_HIGH, bandwidth_tb_s))
    start = np.log(_scaled(_START, bandwidth_tb_s) if leaning_on is None else astuple(leaning_on))

    def residuals(logarithms: Any) -> Any:
        guess = Coefficients(*np.exp(logarithms))
        errors = weights * (np.log(guess.latency_us(work, np.minimum, np.maximum)) - measured)
        return (
            errors if leaning_on is None else np.concatenate([errors, LEAN * (logarithms - start)])
        )

    inside = np.clip(start, low + 1e-6, high - 1e-6)
    solution = least_squares(residuals, inside, bounds=(low, high), loss="soft_l1", f_scale=0.03)
    return Coefficients(*(float(value) for value in np.exp(solution.x)))


def typical(bandwidth_tb_s: float) -> Coefficients:
    """Return coefficients without any timings: good for comparing grids, not builds."""
    return Coefficients(*_scaled(_START, bandwidth_tb_s))


def _scaled(coefficients: Coefficients, bandwidth_tb_s: float) -> tuple[float, ...]:
    values = list(astuple(coefficients))
    values[2] *= bandwidth_tb_s
    return tuple(values)
