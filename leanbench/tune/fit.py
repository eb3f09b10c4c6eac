"""Fit of the settings model's costs to timings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from leanbench.configs.store import TunedConfig
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.problem import AttentionProblem
from leanbench.kernels.lean.configs import LeanCudaConfig
from leanbench.kernels.lean.cuda_cost import Columns, Costs, Work, parts_us, total_us, work_of
from leanbench.kernels.lean.cuda_masks import as_seen

#: Difference of two predictions, as a fraction, at which the better is chosen for sure.
_SHARPNESS = 0.03
#: Weight of a wrong level of all of a problem's predictions, relative to a wrong choice.
_LEVEL = 0.1
#: Weight of the largest regrets.
_WORST = 4
#: Range of a constant, as a factor of its start.
_RANGE = 2


class Timed(NamedTuple):
    """Timings of a problem's candidates."""

    problem: AttentionProblem
    columns: Columns
    work: Work
    #: Latency of each candidate in microseconds.
    us: Any

    def predicted_us(self, costs: Costs) -> Any:
        return total_us(parts_us(self.problem, self.work, self.columns, costs))[0]

    def share(self, costs: Costs) -> float:
        """Return the best latency over that of the model's choice."""
        import numpy as np

        return float(self.us.min() / self.us[int(np.argmin(self.predicted_us(costs)))])


def timed_of(
    problem: AttentionProblem, costs: Mapping[TunedConfig, float], spec: GpuSpec, least: int = 2
) -> Timed | None:
    """Return the timings of lean.cu on a problem; None with fewer than `least`."""
    import numpy as np

    lean = [
        (config, us)
        for config, us in costs.items()
        if isinstance(config, LeanCudaConfig) and not config.of_warpgroups
    ]
    if len(lean) < least:
        return None
    columns = Columns.of(problem, [config for config, _ in lean], spec)
    seen = as_seen(problem)
    lengths = Counter(seen.contexts)
    fill = tuple(sorted(lengths.items(), reverse=True))
    work = work_of(seen, [fill], columns, spec)
    return Timed(seen, columns, work, np.array([us for _, us in lean]))


def fit(timed: Sequence[Timed], names: Sequence[str], start: Costs) -> Costs:
    """Return `start` with the constants `names` changed for the least regret on `timed`."""
    import numpy as np
    from scipy.optimize import minimize

    logs = [np.log(each.us / each.us.min()) for each in timed]

    def loss(logarithms: Any) -> float:
        costs = start._replace(**dict(zip(names, np.exp(logarithms).tolist(), strict=True)))
        total = 0.0
        for each, regret in zip(timed, logs, strict=True):
            predicted = np.log(each.predicted_us(costs))
            weights = np.exp((predicted.min() - predicted) / _SHARPNESS)
            expected = float(weights @ regret / weights.sum())
            level = abs(float(predicted.min() - np.log(each.us.min())))
            total += expected + _WORST * expected**2 + _LEVEL * level
        return total / len(timed)

    first = np.log([getattr(start, name) for name in names])
    bounds = [(value - np.log(_RANGE), value + np.log(_RANGE)) for value in first]
    found = minimize(
        loss, first, method="Powell", bounds=bounds, options={"maxiter": 4, "ftol": 1e-4}
    )
    return start._replace(**dict(zip(names, np.exp(found.x).tolist(), strict=True)))
