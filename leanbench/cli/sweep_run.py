"""Execution of a sweep: open the machine, run the cells, print and report the results."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from leanbench.cli import output
from leanbench.cli.options import RunFlags, limits_from_flags
from leanbench.core.errors import OptionWithoutEffect, UserError, nearest, short

if TYPE_CHECKING:
    from leanbench.cluster.cluster import Cluster
    from leanbench.core.gpu_spec import GpuSpec
    from leanbench.gpu.local import Target
    from leanbench.measure.options import MeasureOptions
    from leanbench.records.directory import RunDirectory
    from leanbench.records.reading import Run
    from leanbench.run.cells import Cell, Sweep
    from leanbench.run.problem_runner import Limits
    from leanbench.run.runner import Executor

EXECUTORS = ("local", "ray")
#: Cells that a dry run names.
LISTED = 40
#: Statuses of a failed kernel.
FAILED = ("crashed", "timeout", "incorrect")
#: Statuses of a cell that did not start.
NOT_RUN = ("unsupported", "out_of_memory")
#: Measurements that are never predicted. Energy of whole models is not, either.
_NOT_PREDICTED = ("sustained", "occupancy", "counters", "prefill")


def run_sweep(sweep: Sweep, flags: RunFlags, command: list[str]) -> None:
    """Run a sweep, print its results and write its report.

    Args:
        command: Command line that resumes the run, without --name and --resume.

    Raises:
        UserError: A flag is invalid, or the sweep cannot run.
        typer.Exit: A kernel failed, or a signal stopped the sweep.
    """
    run = rows_of_sweep(sweep, flags, command)
    if run is None:
        return
    path = run.directory
    files: list[Path] = []
    if not flags.no_report:
        from leanbench.report import write_report

        # Write before printing: printing fails if stdout is full.
        files = write_report(path, path, ["html", "csv"], baseline=flags.baseline)
    nothing_ran = explain_nothing_ran(run)
    if not flags.quiet:
        if not nothing_ran:
            show_ending(run, flags.baseline)
        output.say(f"Run directory: {path}")
    for file in files:
        output.show_whole(str(file))
    if nothing_ran:
        output.say(nothing_ran)
    elif not flags.quiet and (missing := explain_missing_kernels(run)):
        output.say(missing)
    if nothing_ran or has_failed(run):
        raise typer.Exit(1)


def rows_of_sweep(sweep: Sweep, flags: RunFlags, command: list[str]) -> Run | None:
    """Run a sweep. Return the run, or None after a dry run.

    Raises:
        UserError: A flag is invalid, or the sweep cannot run.
        typer.Exit: A signal stopped the sweep.
    """
    from leanbench.run.cells import Shard, expand

    every_cell = expand(sweep)
    shard = None if flags.shard is None else Shard.parse(flags.shard)
    cells = every_cell if shard is None else shard.of(every_cell)
    limits = limits_from_flags(flags.timeout, flags.budget, sweep.measure)
    _check_names(sweep, flags)

    with open_machines(flags, sweep.measure, cells, limits) as machines:
        target = machines.target
        _print_notes(sweep, target, flags)
        path = run_path(flags, cells, sweep, target)
        manifest = make_manifest(cells, sweep, target, command)
        if flags.dry_run:
            if flags.resume:
                cells = _remaining_cells(path, cells, manifest)
            show_dry_run(sweep, cells, target.spec, predicted=_is_predicted(target))
            return None
        if shard is not None:
            manifest["shard"] = shard.to_manifest(every_cell)
        return run_remaining_cells(path, cells, manifest, machines, limits, command, flags)


@dataclass(frozen=True)
class Machines:
    """Target of the rows, and the executor that makes them for a run."""

    target: Target
    executor_of: Callable[[RunDirectory], Executor]
    #: Processes that measure each cell.
    repeat: int = 1


@contextlib.contextmanager
def open_machines(
    flags: RunFlags, options: MeasureOptions, cells: Sequence[Cell], limits: Limits
) -> Iterator[Machines]:
    """Open the machine or the cluster that a sweep's flags name.

    Raises:
        UserError: A flag is invalid, the cluster does not answer, or no GPU can work.
    """
    from leanbench.core.syntax import choose

    if choose("--executor", flags.executor, EXECUTORS) == "ray":
        if options.repeat > 1:
            raise OptionWithoutEffect(f"--repeat {options.repeat}", "--executor local")
        from leanbench.cluster.ray_cluster import RayCluster

        with contextlib.closing(RayCluster(flags.ray_address)) as cluster:
            yield _cluster_machines(cluster, flags, options, cells, limits)
        return
    if flags.ray_address is not None:
        raise OptionWithoutEffect(f"--ray-address {flags.ray_address}", "--executor ray")
    if flags.mix_boards:
        raise OptionWithoutEffect("--mix-boards", "--executor ray")
    yield _local_machine(flags, options, cells, limits)


def _local_machine(
    flags: RunFlags, options: MeasureOptions, cells: Sequence[Cell], limits: Limits
) -> Machines:
    from leanbench.gpu.local import choose
    from leanbench.records.directory import WORKER_LOG
    from leanbench.run.runner import LocalExecutor
    from leanbench.run.worker_process import WorkerTarget

    target = choose(flags.gpu, flags.require_gpu)
    # Rows of a shard are merged with rows of other boards.
    calibrate = flags.shard is not None and target.local_index is not None
    gpus = max((cell.problem.gpus.gpus for cell in cells), default=1)
    worker = WorkerTarget(target.spec, target.local_index, options, calibrate, gpus)
    # A prediction is the same in every process.
    repeat = 1 if target.local_index is None else options.repeat

    def executor_of(run: RunDirectory) -> Executor:
        return LocalExecutor(worker, limits.timeout_s, run.path / WORKER_LOG, repeat)

    return Machines(target, executor_of, repeat)


def _cluster_machines(
    cluster: Cluster,
    flags: RunFlags,
    options: MeasureOptions,
    cells: Sequence[Cell],
    limits: Limits,
) -> Machines:
    from leanbench.cluster.cluster import shared_variables
    from leanbench.records.boards import boards_of
    from leanbench.records.directory import WORKER_LOG
    from leanbench.run.cluster_executor import AgentRequest, ClusterExecutor

    request = AgentRequest(
        flags.gpu, flags.require_gpu, options, limits.timeout_s, shared_variables()
    )
    executor = ClusterExecutor(cluster, request, cells, output.say)
    target = executor.target()

    def executor_of(run: RunDirectory) -> Executor:
        first = next(boards_of(run.manifest), None)
        executor.prepare(target, run.path / WORKER_LOG, first, flags.mix_boards)
        return executor

    return Machines(target, executor_of)


def _check_names(sweep: Sweep, flags: RunFlags) -> None:
    if flags.baseline is not None and flags.baseline not in sweep.kernels:
        raise UserError(
            f"--baseline {flags.baseline} is no kernel of this sweep,"
            f" {nearest(flags.baseline, sweep.kernels)}"
        )
    name = flags.name
    if name is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise UserError(
            f"--name {short(name)} cannot name a folder: use up to 100 letters, digits, dots,"
            " dashes and underscores, a letter or digit first"
        )


def _is_predicted(target: Target) -> bool:
    return target.local_index is None


def _print_notes(sweep: Sweep, target: Target, flags: RunFlags) -> None:
    """Print what to know before the sweep starts."""
    from leanbench.configs.store import user_faults

    output.say_kernel_warnings()
    if not flags.quiet:
        if not _is_predicted(target) and (missing := _missing_kernels(sweep.kernels)):
            output.say(missing)
        _print_model_layers(sweep)
        _warn_truncated_lengths(sweep)
    if _is_predicted(target):
        _announce_prediction(sweep, target, flags)
    output.say_note(target)
    if not flags.dry_run:
        for fault in user_faults():
            output.say(f"! {fault}; it is not used.")


def _announce_prediction(sweep: Sweep, target: Target, flags: RunFlags) -> None:
    """Print that nothing is measured, and why. Reject options that need a GPU."""
    if sweep.measure.cache == "warm":
        raise UserError(
            "--cache warm cannot be predicted, the model reads K and V from memory: leave it out"
        )
    why, product = output.why_predicted(target, flags.gpu), target.spec.product
    if flags.dry_run:
        output.say(f"{why}: the sweep {sweep.name} would be predicted for {product}.")
    else:
        output.say(f"{why}: predicted for {product}, nothing was measured.")
    whole_models = any(name is not None for grid in sweep.grids for name in grid["whole_model"])
    not_predicted = ("energy", *_NOT_PREDICTED) if whole_models else _NOT_PREDICTED
    left_out = [name for name in not_predicted if getattr(sweep.measure, name)]
    left_out += ["repeats"] * (sweep.measure.repeat > 1)
    if left_out:
        output.say(f"Only a GPU can measure {', '.join(left_out)}: left out.")


def _print_model_layers(sweep: Sweep) -> None:
    """Print the models behind each problem; models with equal layers share one."""
    from leanbench.core.llm.layers import notes_on_layers
    from leanbench.core.llm.model import by_layer, model_named

    for names, tps in dict.fromkeys((grid["model"], grid["tp"]) for grid in sweep.grids):
        for layer, models in by_layer(names, tps).items():
            output.say(f"{layer.words}: {', '.join(models)}")
        for model in map(model_named, names):
            for note in notes_on_layers(model.config):
                output.say(f"Note: {note}.")
            for kind, count in model.other_layers.items():
                output.say(f"{kind}, left out: {model.name} ({count} of {model.layers} layers)")


def _warn_truncated_lengths(sweep: Sweep) -> None:
    """Warn about contexts below the longest sequence of a file of lengths."""
    from leanbench.core.lengths import longest_in_file

    short_contexts = {
        (lengths, longest): [context for context in grid["context"] if context < longest]
        for grid in sweep.grids
        for lengths in grid["lengths"]
        if (longest := longest_in_file(lengths)) is not None
    }
    for (lengths, longest), contexts in short_contexts.items():
        if contexts:
            output.say(
                f"Lengths of {lengths} reach {longest} tokens and are cut at the context"
                f" ({', '.join(map(str, contexts))}): --context {longest} cuts none."
            )


def run_remaining_cells(
    path: Path,
    cells: list[Cell],
    manifest: dict[str, Any],
    machines: Machines,
    limits: Limits,
    command: list[str],
    flags: RunFlags,
) -> Run:
    """Run all unfinished cells and return the complete run.

    Raises:
        UserError: A worker cannot start, the run directory cannot be written, or it was made with
            other kernels or settings.
        typer.Exit: A signal stopped the sweep.
    """
    from leanbench.cli.progress import SweepProgress
    from leanbench.records.directory import RunDirectory
    from leanbench.records.reading import read_run
    from leanbench.run.runner import Stopped, run_cells

    open_directory = RunDirectory.resume if flags.resume else RunDirectory.create
    with open_directory(path, manifest) as directory:
        remaining = sum(cell.key not in directory.finished for cell in cells)
        if flags.resume and not flags.quiet:
            output.say(f"Resuming {path}: {_progress(len(cells), remaining)}")
        if remaining and flags.executor == "local":
            _check_same_software(directory, cells, machines.target)
        try:
            repeat = machines.repeat
            with SweepProgress(remaining, quiet=flags.quiet, repeat=repeat) as progress:
                executor = machines.executor_of(directory)
                target, budget_s, prepare = machines.target, limits.budget_s, None
                # Another machine's caches are out of reach.
                if target.local_index is not None:
                    from leanbench.run.builds import compile_cells

                    known = {"spec": target.spec, "progress": progress.compiling}
                    prepare = partial(compile_cells, **known, budget_s=budget_s)
                not_started = run_cells(cells, directory, executor, progress, budget_s, prepare)
        except Stopped as stopped:
            _print_resume_command(f"Stopped by {stopped}", directory, len(cells), command)
            raise typer.Exit(stopped.exit_code) from None
        except UserError:
            if directory.finished:
                _print_resume_command("Stopped by an error", directory, len(cells), command)
            raise
        if flags.executor == "ray":
            directory.sort()  # rows arrive as problems finish
        if not_started:
            _print_resume_command("The budget is spent", directory, len(cells), command)
    return read_run(path)


def _remaining_cells(path: Path, cells: list[Cell], manifest: dict[str, Any]) -> list[Cell]:
    """Return the cells that --resume would run, and print how many are done.

    Raises:
        UserError: The run does not exist, or its manifest differs.
    """
    from leanbench.records.manifest import refuse_differences
    from leanbench.records.reading import read_run

    run = read_run(path)
    refuse_differences(path, run.manifest, manifest)
    finished = {row.cell for row, _ in run.results}
    remaining = [cell for cell in cells if cell.key not in finished]
    output.say(f"{path}: {_progress(len(cells), len(remaining))}")
    return remaining


def _progress(cells: int, remaining: int) -> str:
    return f"{cells - remaining} of {cells} cells are done, {remaining} are left."


def _check_same_software(directory: RunDirectory, cells: list[Cell], target: Target) -> None:
    """Refuse to resume with other kernels or settings. A cluster compares its own nodes."""
    from leanbench.configs.store import settings_hash
    from leanbench.core.registry import kernel
    from leanbench.records.boards import refuse_other_software
    from leanbench.records.environment import software

    is_tuned = any(
        kernel(cell.kernel).tuned_as is not None and cell.request != "given" for cell in cells
    )
    settings = {"settings": settings_hash(target.spec)} if is_tuned else {}
    refuse_other_software(directory.path, directory.manifest, software() | settings)


def has_failed(run: Run) -> bool:
    """Return True if a kernel crashed, timed out or was incorrect."""
    return any(row.status in FAILED for row, _ in run.results)


def explain_nothing_ran(run: Run) -> str:
    """Return a message if no cell could run, else an empty string. Of several reasons, give that of
    a kernel of this project: a library lacks more.
    """
    from leanbench.core.registry import kernels

    rows = [row for row, _ in run.results]
    if not rows or not all(row.status in NOT_RUN for row in rows):
        return ""
    statuses = {row.status for row in rows}
    status = " or ".join(name.replace("_", " ") for name in NOT_RUN if name in statuses)
    libraries = {name for name, kernel in kernels().items() if kernel.is_peer}
    chosen = min(rows, key=lambda row: row.kernel in libraries)
    subject = f"the only cell is {status}"
    if len(rows) > 1:
        subject = f"all {len(rows)} cells are {status}, {chosen.kernel}"
    why = " because" if chosen.status == "unsupported" else ":"
    latent = kernels()["lean_mla"]
    can_run = latent.name not in {row.kernel for row in rows} and all(
        problem.latent and latent.unsupported_reason(problem) is None for _, problem in run.results
    )
    instead = f" {latent.name} takes latent caches: --kernels {latent.name}." * can_run
    return f"Nothing to compare: {subject}{why} {chosen.reason}.{instead}"


def explain_missing_kernels(run: Run) -> str:
    """Return a message if kernels of the run are not installed here or cannot be predicted, else an
    empty string.
    """
    from leanbench.core.registry import kernels

    names = dict.fromkeys(row.kernel for row, _ in run.results)
    ran = dict.fromkeys(row.kernel for row, _ in run.results if row.status not in NOT_RUN)
    others = [name for name in names if name not in ran]
    sentences = []
    if len(ran) == 1 and others:
        sentences.append(f"There was nothing to compare {next(iter(ran))} with.")
    sentences.append(_missing_kernels(others))
    libraries = {name for name, kernel in kernels().items() if kernel.is_peer}
    if run.manifest["source"] == "predicted" and libraries.intersection(others):
        sentences.append("Libraries are measured on a GPU, never predicted.")
    return " ".join(filter(None, sentences))


def _missing_kernels(names: Iterable[str]) -> str:
    """Return which kernels are not installed here and how to install them, or an empty string."""
    from leanbench.core.registry import kernel

    fixes: dict[str, list[str]] = {}
    for name in names:
        if reason := kernel(name).unavailable_reason():
            fix = re.search(r"pip install [^,;]+", reason)
            fixes.setdefault(fix[0] if fix else reason.removeprefix(f"{name} "), []).append(name)
    missing = "; ".join(f"{', '.join(missing)} ({fix})" for fix, missing in fixes.items())
    return missing and f"Not installed here: {missing}."


def run_path(flags: RunFlags, cells: list[Cell], sweep: Sweep, target: Target) -> Path:
    """Return the run directory: --name, the newest run that --resume can finish, or a new one.

    A new one is made at once, unless nothing is to run.
    """
    from leanbench.records.directory import make_new_folder, newest_run

    out = flags.out
    if flags.name is not None:
        return out / flags.name
    if flags.resume:
        return newest_run(out, sweep.name, [cell.key for cell in cells])
    shard = "" if flags.shard is None else f"-{flags.shard.strip().replace('/', 'of')}"
    path = out / f"{sweep.name}-{target.spec.name}-{datetime.now():%Y%m%d-%H%M%S}{shard}"
    return path if flags.dry_run else make_new_folder(path)


def make_manifest(
    cells: list[Cell], sweep: Sweep, target: Target, command: list[str]
) -> dict[str, Any]:
    """Return the initial manifest of a run, see leanbench.records.manifest."""
    return {
        "command": shlex.join(command),
        "source": "predicted" if _is_predicted(target) else "measured",
        "sweep": sweep.to_dict(),
        "measure": sweep.measure.to_dict(),
        "gpu": asdict(target.spec),
        "environments": {},
        "cells": [cell.key for cell in cells],
    }


def _print_resume_command(
    why: str, directory: RunDirectory, cells: int, command: list[str]
) -> None:
    from leanbench.records.directory import read_rows

    # Count on disk: a signal may arrive between writing a row and recording it in memory.
    done = len(read_rows(directory.path))
    output.say(f"{why}: {_progress(cells, cells - done)}")
    resume = shlex.join([*command, "--name", directory.path.name, "--resume"])
    output.say(f"Go on with: {resume}", whole=True)


def command_line(ctx: typer.Context) -> list[str]:
    """Return the command line without --name, --resume and --budget."""
    words = ["leanbench", ctx.info_name or "sweep"]
    for param in ctx.command.params:
        value = ctx.params.get(param.name or "")
        if value in (None, False, param.default) or param.name in ("name", "resume", "budget"):
            continue
        flag = [] if param.param_type_name == "argument" else [param.opts[0]]
        for item in value if isinstance(value, list | tuple) else [value]:
            words += flag if item is True else [*flag, str(item)]
    return words


def show_dry_run(requested: Sweep, cells: list[Cell], gpu: GpuSpec, *, predicted: bool) -> None:
    """Print the first `LISTED` cells, and the total time of those that can run.

    Args:
        cells: Cells that would run.
    """
    from leanbench.core.memory import shortage_on
    from leanbench.run.estimate import estimated_seconds, is_unsupported

    table = output.table(f"{requested.name}: {output.counted(len(cells), 'cell')} for {gpu.name}")
    for column in ("kernel", "problem", "configs"):
        table.add_column(column)
    for column in ("KV bytes", "about", "fits memory"):
        table.add_column(column, justify="right")
    total, large, refused = 0.0, 0, 0
    for number, cell in enumerate(cells):
        is_large = shortage_on(cell.problem, gpu) is not None
        is_refused = is_unsupported(cell, gpu, predicted)
        large += is_large
        refused += is_refused
        takes = "unsupported"
        if not is_refused:
            seconds = estimated_seconds(cell, gpu, predicted, requested.measure)
            total += 0.0 if is_large else seconds
            takes = _about(seconds)
        if number < LISTED:
            size = output.si_bytes(cell.problem.kv_bytes)
            fit = "no" if is_large else "yes"
            table.add_row(cell.kernel, cell.problem.label, cell.request, size, takes, fit)
    output.show_table(table)
    if len(cells) > LISTED:
        output.show(f"and {len(cells) - LISTED} more")
    counts = [
        f"{count} {what}"
        for count, what in ((large, "do not fit its memory"), (refused, "unsupported"))
        if count
    ]
    left_out = f" ({', '.join(counts)})" if counts else ""
    takes = "less than 1 s" if total < 1 else f"about {output.duration(total)}"
    output.show(f"{output.counted(len(cells), 'cell')}{left_out}, {takes}; nothing was run.")


def _about(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 0.05 else "< 0.1 s"


def show_ending(run: Run, baseline: str | None = None) -> None:
    """Print the results: figures by problem, their uncertainty, and the conclusion last.

    Args:
        baseline: Kernel to compare with; None for lean, or the first that was timed.
    """
    from leanbench.cli.document import show_document
    from leanbench.report.facts import ENDING, facts
    from leanbench.report.facts.results import Results

    show_document(facts(Results([run], baseline), ENDING))
