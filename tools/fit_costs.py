"""Fit the settings model's constants to the committed timings, and print what it chooses.

    python tools/fit_costs.py

Leave-one-GPU-out: constants of one GPU choose on the other, alone and with the two constants that
`leanbench tune` measures, taken from a quarter of the other's problems.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean, median

from leanbench.kernels.lean.configs import LeanCudaConfig
from leanbench.kernels.lean.cuda_cost import Costs
from leanbench.kernels.lean.cuda_settings import is_likely, space

from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.problem import AttentionProblem
from leanbench.gpu.catalogue import find
from leanbench.tune.fit import Timed, fit, timed_of
from leanbench.tune.search import MEASURED

REPORTS = Path(__file__).resolve().parents[1] / "reports"


def timings(gpu: str) -> list[Timed]:
    """Return the committed timings of the candidates that a GPU has now."""
    spec = find(gpu)
    path = REPORTS / gpu / "settings" / "candidates.jsonl.gz"
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    problems = [AttentionProblem.from_dict(row["problem"]) for row in rows]
    timed = (
        timed_of(problem, _costs(problem, row["times"], spec), spec)
        for problem, row in zip(problems, rows, strict=True)
    )
    return [each for each in timed if each is not None]


def _costs(problem: AttentionProblem, times: list, spec: GpuSpec) -> dict[LeanCudaConfig, float]:
    on_device = problem.lengths_on == "device"
    candidates = {
        (each.build_key, each.tile_tokens) for each in space(problem, spec) if is_likely(each)
    }
    costs: dict[LeanCudaConfig, float] = {}
    for values, us, _ in times:
        settings = {name: value for name, value in values.items() if name != "implementation"}
        config = LeanCudaConfig(**settings)
        usual = config.min_tiles_per_cta == 1 and config.align_grid != on_device
        if usual and (config.build_key, config.tile_tokens) in candidates:
            costs.setdefault(config, us)
    return costs


def show(name: str, timed: Sequence[Timed], costs: Costs) -> None:
    """Print the share of the best that the model's choice reaches, and its error."""
    shares = [each.share(costs) for each in timed]
    errors = sorted(
        abs(float(predicted.min() / each.us[predicted.argmin()]) - 1)
        for each in timed
        for predicted in (each.predicted_us(costs),)
    )
    print(
        f"{name}: {len(timed)} problems, share of the best {geometric_mean(shares):.3f}, worst"
        f" {min(shares):.3f}; error median {median(errors):.1%}, 90th percentile"
        f" {errors[int(0.9 * len(errors))]:.1%}"
    )


def main() -> None:
    both = {gpu: timings(gpu) for gpu in ("h100", "h200")}
    show("as committed", [each for timed in both.values() for each in timed], Costs())
    for own, other in (("h100", "h200"), ("h200", "h100")):
        costs = fit(both[own], Costs._fields, Costs())
        print(own, {name: round(us, 3) for name, us in costs._asdict().items()})
        show(f"{own} on itself", both[own], costs)
        show(f"{own} on {other}", both[other], costs)
        measured = fit(both[other][::4], MEASURED, costs)
        rest = [each for at, each in enumerate(both[other]) if at % 4]
        show(f"{own} on {other}, {' and '.join(MEASURED)} measured there", rest, measured)


if __name__ == "__main__":
    main()
