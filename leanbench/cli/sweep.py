"""`leanbench sweep`: measure (or predict) every cell of a sweep, then report."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from leanbench.cli.completion import kernel_names, sweep_names
from leanbench.cli.options import (
    Ci,
    RunFlags,
    argument,
    check_window_is_used,
    given_axes,
    measure_flags,
    option,
    switch,
    with_shared_options,
)
from leanbench.cli.sweep_run import command_line, run_sweep
from leanbench.core.axes import AXES


@with_shared_options(axes=AXES, after="file")
def sweep(
    ctx: typer.Context,
    file: Annotated[
        str | None,
        argument(
            "FILE",
            "A sweep file, a name from `leanbench list sweeps`, or definitions of"
            " FlashInfer-Bench.",
            autocompletion=sweep_names,
        ),
    ] = None,
    draw: Annotated[
        int | None,
        option(
            "--draw", "N", "Problems to draw: of a sweep that draws them (serving), or of a grid's."
        ),
    ] = None,
    seed: Annotated[int | None, option("--seed", "N", "Seed of the drawn problems.")] = None,
    kernels: Annotated[
        str | None,
        option(
            "--kernels", "LIST", "Names from `leanbench list kernels`.", autocompletion=kernel_names
        ),
    ] = None,
    configs: Annotated[
        str | None,
        option(
            "--configs",
            "default|heuristic|best|energy|edp",
            "Tuned ones or else the heuristic's; the heuristic's; the fastest candidate;"
            " tuned ones of least energy; of least energy times latency.",
            show_default="default, or FILE's",
        ),
    ] = None,
    config: Annotated[
        list[str] | None,
        option(
            "--config",
            "KERNEL:FIELD=VALUE,...",
            "A kernel's launch settings, whatever --configs says; repeatable.",
        ),
    ] = None,
    cache: Annotated[
        str | None,
        option("--cache", "cold|warm", "The L2 at each launch: cold, as in serving, or warm."),
    ] = None,
    sustained: Annotated[
        bool, switch("--sustained", "Also latency over seconds, back to back.")
    ] = False,
    energy: Annotated[bool, switch("--energy", "Also energy, over seconds back to back.")] = False,
    window: Annotated[
        str | None,
        option(
            "--window", "TIME", "Length of the --sustained and --energy window.", show_default="3s"
        ),
    ] = None,
    occupancy: Annotated[
        bool,
        switch("--occupancy", "Also warp occupancy, and SM busy share from an instrumented build."),
    ] = False,
    counters: Annotated[
        bool, switch("--counters", "Also hardware counters, by Nsight Compute in a separate pass.")
    ] = False,
    ci: Ci = "0.5%",
    min_samples: Annotated[int, option("--min-samples", "N", "Samples of a kernel at least.")] = 10,
    max_samples: Annotated[int, option("--max-samples", "N", "Samples of a kernel at most.")] = 200,
    repeat: Annotated[
        int, option("--repeat", "N", "Fresh processes that measure each cell; 3 to publish.")
    ] = 1,
    **shared: Any,
) -> None:
    """Run every kernel on every problem of a sweep, then write HTML and CSV.

    A LIST is separated by commas and wins over FILE. Without FILE and axes, the smoke sweep runs;
    with axes alone, the others are as `leanbench list axes` says; with --model, they are those of
    the sweep models. Without a GPU, the performance model predicts for --gpu (h200 unless given).

    Exit code 1 means that a cell crashed, timed out or was incorrect, or that every cell is
    unsupported or out of memory.
    """
    from leanbench.run.sweep_file import requested_sweep

    measure = measure_flags(
        cache=cache,
        sustained=sustained,
        energy=energy,
        window=window,
        occupancy=occupancy,
        counters=counters,
        ci=ci,
        min_samples=min_samples,
        max_samples=max_samples,
        repeat=repeat,
    )
    requested = requested_sweep(
        file, given_axes(shared), kernels, configs, measure, config or (), draw, seed
    )
    check_window_is_used(window, requested.measure)
    run_sweep(requested, RunFlags.from_options(shared), command_line(ctx))
