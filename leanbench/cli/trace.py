"""`leanbench trace`: timelines of all CTAs, as pictures."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from leanbench.cli import output
from leanbench.cli.completion import kernel_names
from leanbench.cli.options import Gpu, RequireGpu, argument, option
from leanbench.core.errors import GpuUnusable, UserError

if TYPE_CHECKING:
    from leanbench.core.kernel import Kernel
    from leanbench.core.problem import AttentionProblem
    from leanbench.core.timeline import Timeline
    from leanbench.gpu.local import Target
    from leanbench.report.trace.picture import Panel


def trace(
    problem: Annotated[
        list[str], argument("PROBLEM", "h56 n64k d64, or a label from a table (not a ragged one).")
    ],
    kernels: Annotated[
        str,
        option(
            "--kernels", "LIST", "Names from `leanbench list kernels`.", autocompletion=kernel_names
        ),
    ] = "lean,fixed_split,fa2",
    configs: Annotated[
        str,
        option(
            "--configs",
            "default|heuristic|best|energy|edp",
            "Tuned settings or else the heuristic's; the heuristic's; the fastest candidate;"
            " tuned ones of least energy; of least energy times latency.",
        ),
    ] = "default",
    gpu: Gpu = None,
    require_gpu: RequireGpu = False,
    out: Annotated[
        Path | None,
        option("--out", "DIR", "Folder for the files; a new one under runs/ if not given."),
    ] = None,
    format_: Annotated[
        str, option("--format", "LIST", "html,json; json is for https://ui.perfetto.dev.")
    ] = "html,json",
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="No picture in the terminal.")
    ] = False,
) -> None:
    """Show what every CTA of a kernel did and when: in the terminal, as HTML and as a Perfetto
    trace.

    PROBLEM is words in any order: h query heads or query/KV heads, n context, d head_dim; b batch,
    bf16 and NHD where they are not 1, fp16 and HND; `leanbench list axes` has all letters. k is
    1024. A ragged batch is a length per sequence: n1k+300+64k. GPUs that share a problem, as with
    cp:2, are shown side by side. Without a GPU, the performance model predicts for --gpu (h200
    unless given).

    Exit code 1 means that no kernel has a timeline.
    """
    from leanbench.core.axes import parse_problem
    from leanbench.core.registry import kernel
    from leanbench.core.syntax import choose as choose_word
    from leanbench.core.syntax import parse_names
    from leanbench.gpu.local import choose
    from leanbench.report.trace import trace_files, write_trace
    from leanbench.report.trace.terminal import terminal_text
    from leanbench.run.cells import CONFIG_CHOICES

    parsed = parse_problem(problem)
    traced = [kernel(name) for name in parse_names("kernels", kernels)]
    choose_word("configs", configs, CONFIG_CHOICES)
    formats = parse_names("format", format_)
    target = choose(gpu, require_gpu)
    folder = out or _new_folder(parsed, target.spec.name)
    if (folder / "results.jsonl").exists():
        raise UserError(f"--out {folder} is a run directory: choose another folder for the trace")
    try:
        trace_files(folder, formats)
        output.say_kernel_warnings()
        output.say_note(target)
        panels = _panels(parsed, traced, configs, target, gpu)
        if not panels:
            raise typer.Exit(1)
        if not quiet:
            console = output.console()
            columns = console.width if console.is_terminal else min(console.width, 120)
            ascii_only = console.options.ascii_only
            console.print(terminal_text(panels, columns, ascii_only=ascii_only))
        for path in write_trace(panels, folder, formats):
            output.show_whole(str(path))
        _write_manifest(folder, parsed, panels, target)
    finally:
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def _write_manifest(
    folder: Path, problem: AttentionProblem, panels: list[Panel], target: Target
) -> None:
    """Write the problem, the settings and the environment next to the pictures."""
    from leanbench.configs.store import settings_hash
    from leanbench.measure.ranks import environment_of_ranks
    from leanbench.records.environment import measured_environment, predicted_environment
    from leanbench.report import write_whole

    here = target.local_index is not None
    first, gpus = target.local_index or 0, problem.gpus.gpus
    environment = measured_environment(first) if here else predicted_environment()
    if here and gpus > 1:
        environment |= environment_of_ranks(gpus, first)
    manifest = {
        "problem": problem.to_dict(),
        "kernels": {panel.timeline.name: panel.timeline.config for panel in panels},
        "source": "measured" if here else "predicted",
        "gpu": asdict(target.spec),
        "environment": environment | {"settings": settings_hash(target.spec)},
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    write_whole(folder / "trace-manifest.json", json.dumps(manifest, indent=2) + "\n")


def _panels(
    problem: AttentionProblem,
    kernels: list[Kernel],
    configs: str,
    target: Target,
    requested_gpu: str | None,
) -> list[Panel]:
    """Return a panel for each kernel and GPU. Warn about kernels without a timeline."""
    from leanbench.model.timeline import schedule_efficiency
    from leanbench.report.trace.picture import Panel

    if target.local_index is None:
        timelines = _predict(problem, kernels, configs, target, requested_gpu)
    else:
        timelines = _measure(problem, kernels, configs, target.local_index)
    panels: list[Panel] = []
    for kernel, result in zip(kernels, timelines, strict=True):
        if isinstance(result, str):
            output.say(f"No timeline of {kernel.name}: {result}.")
            continue
        panels += [Panel(each, schedule_efficiency(each, target.spec)) for each in result]
    return panels


def _predict(
    problem: AttentionProblem,
    kernels: list[Kernel],
    configs: str,
    target: Target,
    requested_gpu: str | None,
) -> list[list[Timeline] | str]:
    from leanbench.model import short_error
    from leanbench.model.timeline import predict_timelines

    timelines = [predict_timelines(problem, kernel, configs, target.spec) for kernel in kernels]
    drawn = [
        kernel.name
        for kernel, result in zip(kernels, timelines, strict=True)
        if not isinstance(result, str)
    ]
    if drawn:
        why = output.why_predicted(target, requested_gpu)
        source = f"{why}: predicted for {target.spec.product}, nothing was measured."
        output.say(f"{source} {short_error(target.spec.name, drawn)}")
    return timelines


def _measure(
    problem: AttentionProblem, kernels: list[Kernel], configs: str, index: int
) -> list[list[Timeline] | str]:
    from leanbench.measure.instruments import open_instruments
    from leanbench.measure.protocol import measure_timelines
    from leanbench.measure.shared import attention_on

    instruments = open_instruments(index)
    timelines = []
    for kernel in kernels:
        output.say(f"Tracing {kernel.name} on {instruments.spec.product}.")
        try:
            subject = attention_on(instruments, problem)
            timelines.append(measure_timelines(subject, kernel, configs))
        except GpuUnusable as error:
            raise UserError(f"tracing {kernel.name} failed: {error}") from error
    instruments.gang.close()
    return timelines


def _new_folder(problem: AttentionProblem, gpu: str) -> Path:
    from leanbench.records.directory import make_new_folder

    words = re.sub(r"[^A-Za-z0-9_]+", "-", problem.label)
    path = Path("runs") / f"trace-{words}-{gpu}-{datetime.now():%Y%m%d-%H%M%S}"
    return make_new_folder(path)
