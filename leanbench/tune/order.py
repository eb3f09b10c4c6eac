"""Order of a problem's launches for timing, before much is known about them.

Timings of one implementation say little about another's, so each has its share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import islice

from leanbench.configs.formula import Shape, divide, typical
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.kernel import Kernel
from leanbench.core.problem import AttentionProblem
from leanbench.kernels.lean.configs import BuildKey, LeanConfig, LeanCudaConfig, LeanTritonConfig

#: Launches of builds with too few timings, in addition to the promising ones.
_UNKNOWN = 2
#: Minimum share of each implementation among the promising ones.
_LEAST_SHARE = 0.25


def first(
    problem: AttentionProblem,
    launches: Sequence[LeanConfig],
    rank: Callable[[Sequence[LeanConfig]], list[float]],
    target: tuple[Kernel, GpuSpec],
    begin: int,
) -> list[int]:
    """Return an order of launches before any fit.

    Triton launches are ranked by the performance model (`rank`). They alternate with those of CUDA
    C++, for which it is less reliable; those are spread over their builds.

    Args:
        begin: index of the first build, modulo their number.
    """
    known = [index for index, config in enumerate(launches) if isinstance(config, LeanTritonConfig)]
    cuda = [index for index, config in enumerate(launches) if isinstance(config, LeanCudaConfig)]
    predicted_us = dict(
        zip(known, rank([launches[index] for index in known]) if known else [], strict=True)
    )
    spread = _over_builds(problem, {index: launches[index] for index in cuda}, target, begin)
    return _in_turn([sorted(known, key=predicted_us.__getitem__), spread])


def _over_builds(
    problem: AttentionProblem,
    launches: Mapping[int, LeanConfig],
    target: tuple[Kernel, GpuSpec],
    begin: int,
) -> list[int]:
    """Order launches in rounds over the builds.

    Within a build, the fastest by the formula come first. Its typical coefficients cover grids, not
    builds.
    """
    kernel, spec = target
    shape, coefficients = Shape.of(problem), typical(spec.bandwidth_tb_s)
    costs_us = {
        index: coefficients.latency_us(divide(shape, config, spec.sms, kernel))
        for index, config in launches.items()
    }
    builds: dict[BuildKey, list[int]] = {}
    for index, config in launches.items():
        builds.setdefault(config.build_key, []).append(index)
    orders = [sorted(indices, key=costs_us.__getitem__) for indices in builds.values()]
    start = begin % max(1, len(orders))
    return _in_turn([*orders[start:], *orders[:start]])


def _in_turn(orders: Sequence[Sequence[int]]) -> list[int]:
    """Interleave: the first of each, the second of each, and so on."""
    longest = max(map(len, orders), default=0)
    return [order[index] for index in range(longest) for order in orders if index < len(order)]


def promising(
    launches: Sequence[LeanConfig], predicted_us: Sequence[float], most: int
) -> list[int]:
    """Return the `most` launches with the lowest predicted latency, and a few of unknown builds.

    Each implementation has a minimum share. Builds without coefficients would otherwise never get
    any.
    """
    order = sorted(range(len(launches)), key=predicted_us.__getitem__)
    share = int(_LEAST_SHARE * most)
    shares = [
        [index for index in order if launches[index].implementation == implementation][:share]
        for implementation in dict.fromkeys(config.implementation for config in launches)
    ]
    chosen = list(dict.fromkeys([*_in_turn(shares), *order]))[:most]
    unknown = (index for index in order if predicted_us[index] == math.inf and index not in chosen)
    return [*chosen, *islice(unknown, _UNKNOWN)]
