"""A sweep's run: its folder, its manifest, its cells with progress, and how to go on with it."""

from __future__ import annotations

import re
import shlex
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from leanbench.cli import output
from leanbench.cli.machines import Machines, open_machines
from leanbench.cli.options import RunFlags
from leanbench.cli.sweep_flags import (
    limits_of,
    refuse_what_cannot_be_predicted,
    say_what_is_not_predicted,
)
from leanbench.core.errors import UserError, nearest

if TYPE_CHECKING:
    from leanbench.gpu.local import Target
    from leanbench.records.directory import RunDirectory
    from leanbench.records.reading import Run
    from leanbench.run.cells import Cell, Sweep
    from leanbench.run.limits import Limits

#: Statuses that say that a kernel failed.
FAILED = ("crashed", "timeout", "incorrect")
#: Statuses that say that a cell was not begun.
NOT_RUN = ("unsupported", "out_of_memory")


def run_requested(requested: Sweep, flags: RunFlags, command: list[str]) -> None:
    """Runs a sweep, prints what came out, and writes its report.

    Args:
        command: what goes on with it, without --name and --resume.

    Raises:
        UserError: a flag is wrong, or the run cannot be.
        typer.Exit: a kernel failed, or a signal stopped it.
    """
    from leanbench.run.cells import expand
    from leanbench.run.shard import Shard

    every_cell = expand(requested)
    shard = None if flags.shard is None else Shard.parse(flags.shard)
    cells = every_cell if shard is None else shard.of(every_cell)
    limits = limits_of(flags.timeout, flags.budget, requested.measure)
    _refuse_flags(requested, flags)
    with open_machines(flags, requested.measure, cells, limits) as machines:
        predicted = machines.target.local_index is None
        output.say_kernel_warnings()
        if not flags.quiet:
            _say_whose_layers(requested)
            _say_what_is_cut(requested)
        if predicted:
            _say_predicted(requested, machines.target, flags)
        output.say_note(machines.target)
        if flags.dry_run:
            from leanbench.cli.sweep_tables import show_dry_run

            if flags.resume:
                path = run_path(flags, cells, requested, machines.target)
                asked = manifest_of(cells, requested, machines.target, command)
                cells = _cells_left(path, cells, asked)
            show_dry_run(requested, cells, machines.target.spec, predicted=predicted)
            return
        from leanbench.configs.store import user_faults

        for fault in user_faults():
            output.say(f"! {fault}; it is not used.")
        manifest = manifest_of(cells, requested, machines.target, command)
        if shard is not None:
            manifest["shard"] = shard.to_manifest(every_cell)
        path = run_path(flags, cells, requested, machines.target)
        finished = run_sweep(path, cells, manifest, machines, limits, command, flags)
    files: list[Path] = []
    if not flags.no_report:
        from leanbench.report import write_report

        # Before anything is printed, which may fail: stdout can be full.
        files = write_report(path, path, ["html", "csv"], baseline=flags.baseline)
    if not flags.quiet:
        from leanbench.cli.sweep_tables import show_ending

        show_ending(finished, flags.baseline)
        output.say(f"Run directory: {path}")
    for file in files:
        output.show(str(file))
    if has_failed(finished):
        raise typer.Exit(1)


def _refuse_flags(requested: Sweep, flags: RunFlags) -> None:
    if flags.baseline is not None and flags.baseline not in requested.kernels:
        raise UserError(
            f"--baseline {flags.baseline} is no kernel of this sweep,"
            f" {nearest(flags.baseline, requested.kernels)}"
        )
    name = flags.name
    if name is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise UserError(
            f"--name {name!r} cannot name a folder: use up to 100 letters, digits, dots, dashes and"
            " underscores, a letter or digit first"
        )


def _say_predicted(requested: Sweep, target: Target, flags: RunFlags) -> None:
    """That nothing is measured, why, and how far predictions are off where nothing else says it.

    Raises:
        UserError: an option that cannot be predicted.
    """
    from leanbench.model import short_error

    refuse_what_cannot_be_predicted(requested.measure)
    why = target.note or f"No {flags.gpu or 'GPU'} here"
    if flags.dry_run:
        output.say(
            f"{why}: the sweep {requested.name} would be predicted for {target.spec.product}."
        )
    else:
        source = (
            f"{why}: predicted by the performance model for {target.spec.product}, nothing was"
            " measured."
        )
        # Unless it is quiet, what ends the run says it.
        error = f" {short_error(target.spec.name, requested.kernels)}" if flags.quiet else ""
        output.say(f"{source}{error}")
    say_what_is_not_predicted(requested.measure)


def _say_whose_layers(requested: Sweep) -> None:
    """Rows name problems, which may be those of several models."""
    from leanbench.core.language_models import by_layer

    for names, tps in dict.fromkeys((grid["model"], grid["tp"]) for grid in requested.grids):
        for layer, models in by_layer(names, tps).items():
            output.say(f"{layer.words}: {', '.join(models)}")


def _say_what_is_cut(requested: Sweep) -> None:
    """Contexts that no sequence of a file of lengths is longer than."""
    from leanbench.core.lengths import longest_in_file

    cut = {
        (lengths, longest): [context for context in grid["context"] if context < longest]
        for grid in requested.grids
        for lengths in grid["lengths"]
        if (longest := longest_in_file(lengths)) is not None
    }
    for (lengths, longest), contexts in cut.items():
        if contexts:
            output.say(
                f"Lengths of {lengths} reach {longest} tokens and are cut at the context"
                f" ({', '.join(map(str, contexts))}): --context {longest} cuts none."
            )


def run_sweep(
    path: Path,
    cells: list[Cell],
    manifest: dict[str, Any],
    machines: Machines,
    limits: Limits,
    command: list[str],
    flags: RunFlags,
) -> Run:
    """The run with all its rows, after what was left of it has run.

    Raises:
        UserError: a worker cannot run, the run cannot be written, or its rows are of other kernels
            or settings.
        typer.Exit: a signal stopped it.
    """
    from leanbench.cli.progress import SweepProgress
    from leanbench.records.directory import RunDirectory
    from leanbench.records.reading import read_run
    from leanbench.run.runner import Stopped, run_cells

    open_run = RunDirectory.resume if flags.resume else RunDirectory.create
    with open_run(path, manifest) as run:
        total = sum(cell.key not in run.finished for cell in cells)
        if flags.resume and not flags.quiet:
            output.say(f"Resuming {path}: {_done_of(len(cells), total)}")
        if total and flags.executor == "local":
            _refuse_other_software(run, cells, machines.target)
        try:
            with SweepProgress(total, quiet=flags.quiet) as progress:
                executor = machines.executor_of(run)
                left = run_cells(cells, run, executor, progress, limits.budget_s)
        except Stopped as stopped:
            _say_how_to_go_on(f"Stopped by {stopped}", run, len(cells), command)
            raise typer.Exit(stopped.exit_code) from None
        except UserError:
            if run.finished:
                _say_how_to_go_on("Stopped by an error", run, len(cells), command)
            raise
        if flags.executor == "ray":
            # Rows came as problems ended.
            run.sort()
        if left:
            _say_how_to_go_on("The budget is spent", run, len(cells), command)
    return read_run(path)


def _cells_left(path: Path, cells: list[Cell], asked: dict[str, Any]) -> list[Cell]:
    """The cells that --resume would run; says how many are done.

    Args:
        asked: the manifest of what is asked for now.

    Raises:
        UserError: there is no such run, or it is of another request.
    """
    from leanbench.records.manifest import refuse_differences
    from leanbench.records.reading import read_run

    run = read_run(path)
    refuse_differences(path, run.manifest, asked)
    finished = {row.cell for row, _ in run.results}
    left = [cell for cell in cells if cell.key not in finished]
    output.say(f"{path}: {_done_of(len(cells), len(left))}")
    return left


def _done_of(cells: int, left: int) -> str:
    return f"{cells - left} of {cells} cells are done, {left} are left."


def _refuse_other_software(run: RunDirectory, cells: list[Cell], target: Target) -> None:
    """Refuses to go on with other kernels or settings; a cluster compares those of its nodes."""
    from leanbench.configs.fingerprint import settings_hash
    from leanbench.core.registry import kernel
    from leanbench.records.boards import refuse_other_software
    from leanbench.records.environment import software

    tuned = any(
        kernel(cell.kernel).tuned_as is not None and cell.request not in ("heuristic", "given")
        for cell in cells
    )
    settings = {"settings": settings_hash(target.spec)} if tuned else {}
    refuse_other_software(run.path, run.manifest, software() | settings)


def has_failed(run: Run) -> bool:
    """Whether a kernel failed, or no cell could run."""
    rows = [row for row, _ in run.results]
    if rows and all(row.status in NOT_RUN for row in rows):
        found = {row.status for row in rows}
        how = " or ".join(status.replace("_", " ") for status in NOT_RUN if status in found)
        which = f"the only cell is {how}"
        if len(rows) > 1:
            which = f"all {len(rows)} cells are {how}, the first"
        why = " because" if rows[0].status == "unsupported" else ":"
        output.say(f"Nothing to compare: {which}{why} {rows[0].reason}.")
        return True
    return any(row.status in FAILED for row in rows)


def run_path(flags: RunFlags, cells: list[Cell], requested: Sweep, target: Target) -> Path:
    """The run's folder: --name, the newest that --resume goes on with, or a new one."""
    from leanbench.records.directory import newest_run

    out = flags.out
    if flags.name is not None:
        return out / flags.name
    if flags.resume:
        return newest_run(out, requested.name, [cell.key for cell in cells])
    shard = "" if flags.shard is None else f"-{flags.shard.strip().replace('/', 'of')}"
    path = out / f"{requested.name}-{target.spec.name}-{datetime.now():%Y%m%d-%H%M%S}{shard}"
    # Two runs in one second.
    attempts = (path.with_name(f"{path.name}-{count}") for count in range(2, 1000))
    return next(attempt for attempt in (path, *attempts) if not attempt.exists())


def manifest_of(
    cells: list[Cell], requested: Sweep, target: Target, command: list[str]
) -> dict[str, Any]:
    """The manifest that a run begins with, see leanbench.records.manifest."""
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


def command_of(ctx: typer.Context) -> list[str]:
    """The command line without --name, --resume and --budget."""
    words = ["leanbench", ctx.info_name or "sweep"]
    for param in ctx.command.params:
        value = ctx.params.get(param.name or "")
        if value in (None, False, param.default) or param.name in ("name", "resume", "budget"):
            continue
        flag = [] if param.param_type_name == "argument" else [param.opts[0]]
        for item in value if isinstance(value, list | tuple) else [value]:
            words += flag if item is True else [*flag, str(item)]
    return words
