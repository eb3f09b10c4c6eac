"""`leanbench sweep`: measure (or predict) every cell of a sweep, then report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from leanbench.cli.completion import gpu_names, kernel_names, sweep_names
from leanbench.cli.options import Baseline, axis_options
from leanbench.cli.sweep_flags import measure_flags
from leanbench.cli.sweep_run import RunFlags, command_of, run_requested


@axis_options
def sweep(
    ctx: typer.Context,
    axes: dict[str, str],
    file: Annotated[
        str | None,
        typer.Argument(
            metavar="FILE",
            help="A sweep file, or a name from `leanbench list sweeps`.",
            autocompletion=sweep_names,
        ),
    ] = None,
    draw: Annotated[
        int | None,
        typer.Option(
            "--draw", metavar="N", help="Problems to draw, of a sweep that draws them (serving)."
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", metavar="N", help="Of the problems that are drawn.")
    ] = None,
    kernels: Annotated[
        str | None,
        typer.Option(
            "--kernels",
            metavar="LIST",
            help="Names from `leanbench list kernels`.",
            autocompletion=kernel_names,
        ),
    ] = None,
    configs: Annotated[
        str | None,
        typer.Option(
            "--configs",
            metavar="default|heuristic|best|energy|edp",
            help="Tuned ones or else the heuristic's; the heuristic's; the fastest candidate;"
            " tuned ones of least energy.",
        ),
    ] = None,
    config: Annotated[
        list[str] | None,
        typer.Option(
            "--config",
            metavar="KERNEL:FIELD=VALUE,...",
            help="A kernel's launch settings, whatever --configs says; repeatable.",
        ),
    ] = None,
    cache: Annotated[
        str | None,
        typer.Option(
            "--cache",
            metavar="cold|warm",
            help="The L2 at each launch: cold, as in serving, or warm.",
        ),
    ] = None,
    sustained: Annotated[
        bool, typer.Option("--sustained", help="Also latency over seconds, back to back.")
    ] = False,
    energy: Annotated[
        bool, typer.Option("--energy", help="Also energy, over seconds back to back.")
    ] = False,
    window: Annotated[
        str,
        typer.Option(
            "--window", metavar="TIME", help="Length of the --sustained and --energy window."
        ),
    ] = "3s",
    occupancy: Annotated[
        bool,
        typer.Option(
            "--occupancy", help="Also warp occupancy, and SM busy share from an instrumented build."
        ),
    ] = False,
    counters: Annotated[
        bool,
        typer.Option(
            "--counters", help="Also hardware counters, by Nsight Compute in a separate pass."
        ),
    ] = False,
    ci: Annotated[
        str,
        typer.Option(
            "--ci",
            metavar="PERCENT",
            help="Measure until the median is known to this, 95% interval.",
        ),
    ] = "0.5%",
    min_samples: Annotated[
        int, typer.Option("--min-samples", metavar="N", help="Samples of a kernel at least.")
    ] = 10,
    max_samples: Annotated[
        int, typer.Option("--max-samples", metavar="N", help="Samples of a kernel at most.")
    ] = 200,
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu",
            metavar="NAME",
            help="The GPU to use, or to predict for if it is not here.",
            autocompletion=gpu_names,
        ),
    ] = None,
    require_gpu: Annotated[bool, typer.Option("--require-gpu", help="Refuse to predict.")] = False,
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Folder that holds the run directories.")
    ] = Path("runs"),
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Name of the run directory.")
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Finish the run of --name, or else the sweep's newest one."),
    ] = False,
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget", metavar="TIME", help="Start no cell after this long: 90s, 10m, 2h."
        ),
    ] = None,
    timeout: Annotated[
        str,
        typer.Option(
            "--timeout",
            metavar="TIME",
            help="Longest time for one cell, beside windows and counters.",
        ),
    ] = "120s",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List cells, bytes and estimated time, run none.")
    ] = False,
    baseline: Baseline = None,
    no_report: Annotated[bool, typer.Option("--no-report", help="Write no HTML and CSV.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no table.")] = False,
) -> None:
    """Run every kernel on every problem of a sweep, then write HTML and CSV.

    A LIST is separated by commas and wins over FILE. Without FILE and axes, the smoke sweep runs;
    with axes alone, the others are as `leanbench list axes` says; with --model, they are those of
    the sweep models. Without a GPU, the performance model predicts for --gpu (a100 unless given).

    Exit code 1 means that a cell crashed, timed out or was incorrect, or that every cell is
    unsupported.
    """
    from leanbench.run.sweep_file import requested_sweep

    measure = measure_flags(
        cache, sustained, energy, window, occupancy, counters, ci, min_samples, max_samples
    )
    requested = requested_sweep(file, axes, kernels, configs, measure, config or (), draw, seed)
    flags = RunFlags(
        gpu=gpu,
        require_gpu=require_gpu,
        out=out,
        name=name,
        resume=resume,
        budget=budget,
        timeout=timeout,
        dry_run=dry_run,
        baseline=baseline,
        no_report=no_report,
        quiet=quiet,
    )
    run_requested(requested, flags, command_of(ctx))
