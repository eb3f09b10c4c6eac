"""`leanbench sweep`: measure (or predict) every cell of a sweep, then report."""

from __future__ import annotations

import re
import shlex
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from leanbench.cli import output
from leanbench.cli.completion import gpu_names, kernel_names, sweep_names
from leanbench.cli.options import Baseline, axis_options
from leanbench.core.errors import UserError, nearest

if TYPE_CHECKING:
    from leanbench.gpu.local import Target
    from leanbench.measure.options import MeasureOptions
    from leanbench.records.directory import RunDirectory
    from leanbench.records.reading import Run
    from leanbench.run.cells import Cell, Sweep
    from leanbench.run.runner import Limits

#: Statuses that say that a kernel failed.
FAILED = ("crashed", "timeout", "incorrect")


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

    For a model's sliding-window layers, give the window that `leanbench list models` says as
    --context.

    Exit code 1 means that a cell crashed, timed out or was incorrect, or that every cell is
    unsupported.
    """
    from leanbench.gpu.local import choose
    from leanbench.model import known_error
    from leanbench.run.cells import expand
    from leanbench.run.sweep_file import requested_sweep

    measure = _measure_flags(
        cache, sustained, energy, window, occupancy, counters, ci, min_samples, max_samples
    )
    requested = requested_sweep(file, axes, kernels, configs, measure, config or (), draw, seed)
    cells = expand(requested)
    limits = _limits(timeout, budget, requested.measure)
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
        _say_whose_shapes(requested)
    if predicted:
        _refuse_what_cannot_be_predicted(requested.measure)
        why = target.note or f"No {gpu or 'GPU'} here"
        if dry_run:
            output.say(f"{why}: this would be predicted for {target.spec.product}.")
        else:
            source = (
                f"{why}: predicted by the performance model for {target.spec.product}, nothing was"
                " measured."
            )
            output.say(f"{source} {known_error(target.spec.name, requested.kernels)}")
        _say_what_is_not_predicted(requested.measure)
    output.say_note(target)
    if dry_run:
        from leanbench.cli.sweep_tables import show_dry_run

        show_dry_run(cells, target.spec, requested.measure, predicted=predicted)
        return
    from leanbench.configs.store import user_faults

    for fault in user_faults():
        output.say(f"! {fault}; it is not used.")
    path = _run_path(out, name, cells, requested, target, resume)
    command = _command(ctx)
    finished = _run(path, cells, requested, target, limits, command, resume=resume, quiet=quiet)
    if not quiet:
        from leanbench.cli.sweep_tables import show_ending

        show_ending(finished, baseline)
        output.say(f"Run directory: {path}")
    if not no_report:
        from leanbench.report import write_report

        for written in write_report(path, path, ["html", "csv"], baseline=baseline):
            output.show(str(written))
    if _failed(finished):
        raise typer.Exit(1)


def _failed(run: Run) -> bool:
    """Whether a kernel failed, or none has a figure."""
    rows = [row for row, _ in run.results]
    if rows and all(row.status == "unsupported" for row in rows):
        output.say(
            f"Nothing to compare: all {len(rows)} cells are unsupported, the first because"
            f" {rows[0].reason}."
        )
        return True
    return any(row.status in FAILED for row in rows)


def _run(
    path: Path,
    cells: list[Cell],
    requested: Sweep,
    target: Target,
    limits: Limits,
    command: list[str],
    *,
    resume: bool,
    quiet: bool,
) -> Run:
    """Runs what is left. Returns the run with all its rows."""
    from leanbench.cli.progress import SweepProgress
    from leanbench.records.directory import RunDirectory
    from leanbench.records.reading import read_run
    from leanbench.run.runner import Stopped, run_cells
    from leanbench.run.worker_process import WorkerTarget

    open_run = RunDirectory.resume if resume else RunDirectory.create
    with open_run(path, _manifest(cells, requested, target, command)) as run:
        total = sum(cell.key not in run.finished for cell in cells)
        if resume and not quiet:
            output.say(
                f"Resuming {path}: {len(cells) - total} of {len(cells)} cells are done, {total} are"
                " left."
            )
        try:
            with SweepProgress(total, quiet=quiet) as progress:
                left = run_cells(
                    cells,
                    run,
                    WorkerTarget(target.spec, target.local_index, requested.measure),
                    limits,
                    progress,
                )
        except Stopped as stopped:
            _say_how_to_go_on(f"Stopped by {stopped}", run, len(cells), command)
            raise typer.Exit(stopped.exit_code) from None
        except UserError:
            if run.finished:
                _say_how_to_go_on("Stopped by an error", run, len(cells), command)
            raise
        if left:
            _say_how_to_go_on("The budget is spent", run, len(cells), command)
    return read_run(path)


def _measure_flags(
    cache: str | None,
    sustained: bool,
    energy: bool,
    window: str,
    occupancy: bool,
    counters: bool,
    ci: str,
    min_samples: int,
    max_samples: int,
) -> dict[str, Any]:
    """The fields of MeasureOptions that flags set."""
    from leanbench.core.syntax import choose, parse_percent, parse_seconds
    from leanbench.measure.timing import Effort

    relative_ci = parse_percent("--ci", ci, most=50, above_zero=True)
    if not 6 <= min_samples <= max_samples <= 10_000:
        raise UserError(
            f"--min-samples {min_samples} and --max-samples {max_samples} must be 6 (fewer give no"
            " 95% interval) to 10000, the first not above the second"
        )
    # A second is 250 samples of 4 ms: more take longer.
    max_seconds = max(1.0, max_samples / 200)
    effort = Effort(
        relative_ci, min_samples=min_samples, max_samples=max_samples, max_seconds=max_seconds
    )
    flags: dict[str, Any] = {"effort": effort, "window_s": parse_seconds("--window", window)}
    requested = {
        "sustained": sustained,
        "energy": energy,
        "occupancy": occupancy,
        "counters": counters,
    }
    flags |= {name: True for name, value in requested.items() if value}
    if cache is not None:
        flags["cache"] = choose("cache", cache, ["cold", "warm"])
    return flags


def _limits(timeout: str, budget: str | None, measure: MeasureOptions) -> Limits:
    """What a cell and the sweep may take; what the options ask for comes on top of --timeout."""
    from leanbench.core.syntax import parse_seconds
    from leanbench.measure.counters import TIMEOUT_S
    from leanbench.measure.energy import check_window
    from leanbench.run.runner import Limits

    timeout_s = parse_seconds("--timeout", timeout)
    if measure.sustained or measure.energy:
        check_window(measure.window_s)
        # The first kernel of a problem has the read floor's window too.
        timeout_s += 2 * measure.window_s
    if measure.counters:
        timeout_s += TIMEOUT_S
    return Limits(timeout_s, None if budget is None else parse_seconds("--budget", budget))


def _say_whose_shapes(requested: Sweep) -> None:
    """Rows name problems, which may be those of several models."""
    from leanbench.core.language_models import by_shape

    for names, tps in dict.fromkeys((grid["model"], grid["tp"]) for grid in requested.grids):
        for (q_heads, kv_heads, head_dim), models in by_shape(names, tps).items():
            output.say(f"h{q_heads}/{kv_heads} d{head_dim}: {', '.join(models)}")


def _refuse_what_cannot_be_predicted(measure: MeasureOptions) -> None:
    if measure.cache == "warm":
        raise UserError(
            "--cache warm cannot be predicted, the model reads K and V from memory: leave it out"
        )


def _say_what_is_not_predicted(measure: MeasureOptions) -> None:
    requested = [
        name for name in ("sustained", "energy", "occupancy", "counters") if getattr(measure, name)
    ]
    if requested:
        output.say(f"Only a GPU can measure {', '.join(requested)}: left out.")


def _run_path(
    out: Path, name: str | None, cells: list[Cell], requested: Sweep, target: Target, resume: bool
) -> Path:
    from leanbench.records.directory import newest_run

    if name is not None:
        return out / name
    if resume:
        return newest_run(out, requested.name, [cell.key for cell in cells])
    path = out / f"{requested.name}-{target.spec.name}-{datetime.now():%Y%m%d-%H%M%S}"
    # Two runs in one second.
    attempts = (path.with_name(f"{path.name}-{count}") for count in range(2, 1000))
    return (
        path if not path.exists() else next(attempt for attempt in attempts if not attempt.exists())
    )


def _manifest(
    cells: list[Cell], requested: Sweep, target: Target, command: list[str]
) -> dict[str, Any]:
    return {
        "command": shlex.join(command),
        "source": "predicted" if target.local_index is None else "measured",
        "sweep": requested.to_dict(),
        "measure": requested.measure.to_dict(),
        "gpu": asdict(target.spec),
        "environments": {},
        "cells": [cell.key for cell in cells],
    }


def _say_how_to_go_on(why: str, run: RunDirectory, cells: int, command: list[str]) -> None:
    from leanbench.records.directory import read_rows

    again = shlex.join([*command, "--name", run.path.name, "--resume"])
    # From the disk: a signal may come between the writing of a row and the note of it.
    done = len(read_rows(run.path))
    output.say(f"{why}: {done} of {cells} cells are done, {cells - done} are left.")
    output.say(f"Go on with: {again}")


def _command(ctx: typer.Context) -> list[str]:
    """The command line without --name, --resume and --budget."""
    words = ["leanbench", "sweep"]
    for param in ctx.command.params:
        value = ctx.params.get(param.name or "")
        if value in (None, False, param.default) or param.name in ("name", "resume", "budget"):
            continue
        flag = [] if param.param_type_name == "argument" else [param.opts[0]]
        for item in value if isinstance(value, list | tuple) else [value]:
            words += flag if item is True else [*flag, str(item)]
    return words
