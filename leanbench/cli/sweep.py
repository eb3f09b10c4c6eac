"""`leanbench sweep`: measure (or predict) every cell of a sweep, then report."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from leanbench.cli import output
from leanbench.cli.completion import gpu_names, kernel_names, sweep_names
from leanbench.cli.options import Baseline, axis_options
from leanbench.cli.sweep_flags import (
    limits_of,
    measure_flags,
    refuse_what_cannot_be_predicted,
    say_what_is_not_predicted,
)
from leanbench.cli.sweep_run import command_of, has_failed, run_path, run_sweep
from leanbench.core.errors import UserError, nearest

if TYPE_CHECKING:
    from leanbench.run.cells import Sweep


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
    from leanbench.gpu.local import choose
    from leanbench.model import known_error
    from leanbench.run.cells import expand
    from leanbench.run.sweep_file import requested_sweep

    measure = measure_flags(
        cache, sustained, energy, window, occupancy, counters, ci, min_samples, max_samples
    )
    requested = requested_sweep(file, axes, kernels, configs, measure, config or (), draw, seed)
    cells = expand(requested)
    limits = limits_of(timeout, budget, requested.measure)
    if baseline is not None and baseline not in requested.kernels:
        raise UserError(
            f"--baseline {baseline} is no kernel of this sweep,"
            f" {nearest(baseline, requested.kernels)}"
        )
    if name is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise UserError(
            f"--name {name!r} is not a folder name: use letters, digits, dots, dashes and"
            " underscores"
        )
    if gpu is not None and not gpu.strip():
        # As from an unset shell variable.
        raise UserError("--gpu is empty: name a GPU from `leanbench list gpus`, or leave --gpu out")
    target = choose(gpu, require_gpu)
    predicted = target.local_index is None
    output.say_kernel_warnings()
    if not quiet:
        _say_whose_layers(requested)
    if predicted:
        refuse_what_cannot_be_predicted(requested.measure)
        why = target.note or f"No {gpu or 'GPU'} here"
        if dry_run:
            output.say(f"{why}: this would be predicted for {target.spec.product}.")
        else:
            source = (
                f"{why}: predicted by the performance model for {target.spec.product}, nothing was"
                " measured."
            )
            output.say(f"{source} {known_error(target.spec.name, requested.kernels)}")
        say_what_is_not_predicted(requested.measure)
    output.say_note(target)
    if dry_run:
        from leanbench.cli.sweep_tables import show_dry_run

        show_dry_run(cells, target.spec, requested.measure, predicted=predicted)
        return
    from leanbench.configs.store import user_faults

    for fault in user_faults():
        output.say(f"! {fault}; it is not used.")
    path = run_path(out, name, cells, requested, target, resume)
    command = command_of(ctx)
    finished = run_sweep(
        path, cells, requested, target, limits, command, resume=resume, quiet=quiet
    )
    if not quiet:
        from leanbench.cli.sweep_tables import show_ending

        show_ending(finished, baseline)
        output.say(f"Run directory: {path}")
    if not no_report:
        from leanbench.report import write_report

        for written in write_report(path, path, ["html", "csv"], baseline=baseline):
            output.show(str(written))
    if has_failed(finished):
        raise typer.Exit(1)


def _say_whose_layers(requested: Sweep) -> None:
    """Rows name problems, which may be those of several models."""
    from leanbench.core.language_models import by_layer

    for names, tps in dict.fromkeys((grid["model"], grid["tp"]) for grid in requested.grids):
        for layer, models in by_layer(names, tps).items():
            output.say(f"{layer.words}: {', '.join(models)}")
