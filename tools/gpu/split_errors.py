"""Print errors of one problem against fp64, by split and by order of its tokens.

    python tools/gpu/split_errors.py

Re-scaling of softmax is associative: the parts of a sequence may have any lengths and merge in any
order (appendix C and D of the LeanAttention paper). So the error should not depend on the split.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from leanbench.check.launches import launch_of
from leanbench.check.reference import CheckResult, Reference
from leanbench.configs.lookup import resolve
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.inputs import AttentionInputs, make_inputs
from leanbench.core.kernel import written_by
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel
from leanbench.gpu.local import choose
from leanbench.records.environment import kernels_hash

PROBLEM = AttentionProblem(1, 8, 8, 65_536, 128)
SPLITS = (1, 2, 3, 7, 16, 64, 128)
#: LeanTiles of a CTA at least, as shares of an output tile: the larger, the smaller the grid.
SHARES = (0.0, 0.2, 0.3, 0.7, 1.0)
_ROW = "{:<12} {:<18} {:>5} {:>9}   {:.3e}   {:.3e}   {:.3e}   {:.3e}"


def settings(problem: AttentionProblem, gpu: GpuSpec) -> Iterator[tuple[str, Any]]:
    """Yield kernels with settings that split the problem in different ways."""
    base: dict[str, Any] = {
        name: resolve(kernel(name), problem, gpu, "heuristic").config
        for name in ("fa2", "fixed_split", "lean")
    }
    yield "fa2", base["fa2"]
    for splits in SPLITS:
        yield "fixed_split", replace(base["fixed_split"], splits=splits)
    tiles = problem.max_context // base["lean"].tile_tokens
    for share in SHARES:
        least = max(1, int(share * tiles))
        yield "lean", replace(base["lean"], min_tiles_per_cta=least, align_grid=False)


def errors(inputs: AttentionInputs, reference: Reference, name: str, config: Any) -> CheckResult:
    """Launch a kernel and compare its outputs."""
    launch = launch_of(kernel(name), inputs, config)
    inputs.poison()
    launch()
    return reference.check(written_by(launch, inputs), kernel(name).lse_base)


def main() -> None:
    """Print a line for each split: of the tokens as drawn, and in the reverse order."""
    import torch

    target = choose(None, require_gpu=True)
    inputs = make_inputs(PROBLEM, f"cuda:{target.local_index}")
    backwards = replace(inputs, k_cache=inputs.k_cache.clone(), v_cache=inputs.v_cache.clone())
    for cache in (backwards.k_cache, backwards.v_cache):
        cache.copy_(torch.flip(cache, [1]))
    # fp64 in the reverse order differs from fp64 by 1e-16.
    reference = Reference(inputs)
    print(
        f"{PROBLEM.label}: {target.spec.product}, kernels {kernels_hash()},"
        f" {datetime.now(UTC):%Y-%m-%d}"
    )
    print("kernel       schedule            grid  partials   error, LSE error; reversed")
    for name, config in settings(PROBLEM, target.spec):
        schedule = kernel(name).schedule(PROBLEM, config, target.spec)
        assert schedule is not None
        found = [errors(each, reference, name, config) for each in (inputs, backwards)]
        figures = [part for check in found for part in (check.relative_error, check.lse_error)]
        print(_ROW.format(name, schedule.kind, schedule.grid, schedule.partials, *figures))


if __name__ == "__main__":
    main()
