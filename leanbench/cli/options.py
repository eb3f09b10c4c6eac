"""Options that several commands have, or that follow from a table."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from leanbench.cli import completion
from leanbench.core.axes import AXES
from leanbench.core.axis import Axis

#: RUN of commands that read runs.
Runs = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN",
        help="Run directories, or names of some under runs/.",
        autocompletion=completion.run_names,
    ),
]

#: `--baseline` of commands that compare kernels.
Baseline = Annotated[
    str | None,
    typer.Option(
        "--baseline",
        metavar="KERNEL",
        help="The kernel that the others are compared with.",
        show_default="lean, or the first that ran",
    ),
]

#: `--gpu` of commands that predict where it is not here.
Gpu = Annotated[
    str | None,
    typer.Option(
        "--gpu",
        metavar="NAME",
        help="The GPU to use, or to predict for if it is not here.",
        autocompletion=completion.gpu_names,
    ),
]

RequireGpu = Annotated[bool, typer.Option("--require-gpu", help="Refuse to predict.")]

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no table.")]

#: Of commands that can use many machines.
Executor = Annotated[
    str,
    typer.Option(
        "--executor",
        metavar="local|ray",
        help="One GPU of this machine, or all GPUs of a Ray cluster.",
    ),
]

RayAddress = Annotated[
    str | None,
    typer.Option(
        "--ray-address",
        metavar="HOST:PORT",
        help="The Ray cluster.",
        show_default="RAY_ADDRESS, or the one that runs here",
    ),
]

MixBoards = Annotated[
    bool,
    typer.Option("--mix-boards", help="Take boards that differ in clocks, driver or versions."),
]

#: `--ci` of commands that time kernels.
Ci = Annotated[
    str,
    typer.Option(
        "--ci", metavar="PERCENT", help="Measure until the median is known to this, 95% interval."
    ),
]


@dataclass(frozen=True)
class RunFlags:
    """Flags of a command that runs a sweep: on what, for how long, and what to do with it."""

    gpu: Gpu = None
    require_gpu: RequireGpu = False
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Folder that holds the run directories.")
    ] = Path("runs")
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Name of the run directory.")
    ] = None
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Finish the run of --name, or else the sweep's newest one."),
    ] = False
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget", metavar="TIME", help="Start no cell after this long: 90s, 10m, 2h."
        ),
    ] = None
    timeout: Annotated[
        str,
        typer.Option(
            "--timeout",
            metavar="TIME",
            help="Longest time for one cell, beside windows and counters.",
        ),
    ] = "120s"
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="List cells, bytes and estimated time, run none; with --resume, those left.",
        ),
    ] = False
    executor: Executor = "local"
    ray_address: RayAddress = None
    mix_boards: MixBoards = False
    shard: Annotated[
        str | None,
        typer.Option(
            "--shard",
            metavar="I/N",
            help="Every N-th problem from the I-th on, for `leanbench merge` later.",
        ),
    ] = None
    baseline: Baseline = None
    no_report: Annotated[bool, typer.Option("--no-report", help="Write no HTML and CSV.")] = False
    quiet: Quiet = False


def run_options(
    timeout: str = RunFlags.timeout,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator that gives a command the options of RunFlags in place of its argument `flags`.

    Args:
        timeout: The default of `--timeout`.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(**given: Any) -> None:
            flags = RunFlags(**{field.name: given.pop(field.name) for field in fields(RunFlags)})
            command(**given, flags=flags)

        signature = inspect.signature(command, eval_str=True)
        own = [
            parameter for parameter in signature.parameters.values() if parameter.name != "flags"
        ]
        run.__dict__["__signature__"] = signature.replace(
            parameters=[*own, *_parameters_of_flags(timeout)]
        )
        return run

    return decorate


def _parameters_of_flags(timeout: str) -> list[inspect.Parameter]:
    hints = get_type_hints(RunFlags, include_extras=True)
    defaults = {field.name: field.default for field in fields(RunFlags)} | {"timeout": timeout}
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return [
        inspect.Parameter(name, kind, default=default, annotation=hints[name])
        for name, default in defaults.items()
    ]


def axis_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with an option for each axis of a sweep, after its FILE. They reach it as `axes`:
    the text of each that was given, by the axis' name.
    """

    @wraps(command)
    def run(**given: Any) -> None:
        texts = {name: given.pop(name) for name in AXES}
        command(**given, axes={name: text for name, text in texts.items() if text is not None})

    signature = inspect.signature(command, eval_str=True)
    parameters = [own for own in signature.parameters.values() if own.name != "axes"]
    place = 1 + next(place for place, own in enumerate(parameters) if own.name == "file")
    options = [_option(axis) for axis in AXES.values()]
    parameters[place:place] = options
    run.__dict__["__signature__"] = signature.replace(parameters=parameters)
    return run


def _option(axis: Axis) -> inspect.Parameter:
    complete = completion.OF_AXES.get(axis.name)
    option = typer.Option(axis.flag, metavar=axis.metavar, help=axis.help, autocompletion=complete)
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Parameter(
        axis.name, kind, default=None, annotation=Annotated[str | None, option]
    )
