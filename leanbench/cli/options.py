"""Command-line options shared by several commands."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_type_hints

import typer
from typer.models import OptionInfo

from leanbench.cli import completion
from leanbench.cli.help import panel_of
from leanbench.core.axes import AXES
from leanbench.core.axis import Axis
from leanbench.core.errors import OptionWithoutEffect, UserError

if TYPE_CHECKING:
    from leanbench.measure.options import MeasureOptions
    from leanbench.run.problem_runner import Limits

#: Limit of --repeat.
MOST_REPEATS = 100

Command = TypeVar("Command", bound=Callable[..., None])


def option(flag: str, metavar: str, help: str, **more: Any) -> Any:
    """Declare an option with a value."""
    return typer.Option(flag, metavar=metavar, help=help, **more)


def switch(flag: str, help: str, **more: Any) -> Any:
    """Declare an option without a value."""
    return typer.Option(flag, help=help, **more)


def argument(metavar: str, help: str, **more: Any) -> Any:
    """Declare a positional argument."""
    return typer.Argument(metavar=metavar, help=help, **more)


#: Positional RUN of commands that read runs.
Runs = Annotated[
    list[str],
    argument(
        "RUN", "Run directories, or names of some under runs/.", autocompletion=completion.run_names
    ),
]

#: --baseline of commands that compare kernels.
Baseline = Annotated[
    str | None,
    option(
        "--baseline",
        "KERNEL",
        "The kernel that the others are compared with.",
        show_default="lean, or the first that ran",
    ),
]

#: --gpu of commands that fall back to a prediction.
Gpu = Annotated[
    str | None,
    option(
        "--gpu",
        "NAME",
        "The GPU to use, or to predict for if it is not here.",
        autocompletion=completion.gpu_names,
    ),
]

RequireGpu = Annotated[bool, switch("--require-gpu", "Refuse to predict.")]

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no table.")]

#: --executor of commands that can run on a cluster.
Executor = Annotated[
    str, option("--executor", "local|ray", "One GPU of this machine, or all GPUs of a Ray cluster.")
]

RayAddress = Annotated[
    str | None,
    option(
        "--ray-address",
        "HOST:PORT",
        "The Ray cluster.",
        show_default="RAY_ADDRESS, or the one that runs here",
    ),
]

MixBoards = Annotated[
    bool, switch("--mix-boards", "Accept GPUs that differ in clocks, driver or versions.")
]

#: --ci of commands that time kernels.
Ci = Annotated[
    str, option("--ci", "PERCENT", "Measure until the median is known to this, 95% interval.")
]


@dataclass(frozen=True)
class RunFlags:
    """Flags of commands that run a sweep: hardware, limits, run directory and report."""

    gpu: Gpu = None
    require_gpu: RequireGpu = False
    out: Annotated[Path, option("--out", "DIR", "Folder that holds the run directories.")] = Path(
        "runs"
    )
    name: Annotated[str | None, option("--name", "NAME", "Name of the run directory.")] = None
    resume: Annotated[
        bool, switch("--resume", "Finish the run of --name, or else the sweep's newest one.")
    ] = False
    budget: Annotated[
        str | None, option("--budget", "TIME", "Start no cell after this long: 90s, 10m, 2h.")
    ] = None
    timeout: Annotated[
        str,
        option("--timeout", "TIME", "Longest time for one cell, windows and counters excluded."),
    ] = "120s"
    dry_run: Annotated[
        bool,
        switch(
            "--dry-run",
            "List cells, bytes and estimated time, run none; with --resume, those left.",
        ),
    ] = False
    executor: Executor = "local"
    ray_address: RayAddress = None
    mix_boards: MixBoards = False
    shard: Annotated[
        str | None,
        option(
            "--shard", "I/N", "Every N-th problem from the I-th on, for `leanbench merge` later."
        ),
    ] = None
    baseline: Baseline = None
    no_report: Annotated[bool, switch("--no-report", "Write no HTML and CSV.")] = False
    quiet: Quiet = False

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> RunFlags:
        """Pick the run flags out of a command's options."""
        return cls(**{flag.name: options[flag.name] for flag in fields(cls)})


def with_shared_options(
    *, axes: Iterable[str], after: str, timeout: str = RunFlags.timeout
) -> Callable[[Command], Command]:
    """Add the options of RunFlags and of axes to a command.

    Typer reads options from the signature. The command accepts them as `**shared`, without a
    wrapper. `RunFlags.from_options` and `given_axes` unpack them.

    Args:
        axes: Names of the axes.
        after: Parameter that the axes follow.
        timeout: Default of --timeout.
    """

    def decorate(command: Command) -> Command:
        parameters = [
            parameter
            for parameter in inspect.signature(command, eval_str=True).parameters.values()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        at = 1 + [parameter.name for parameter in parameters].index(after)
        parameters[at:at] = [_axis_parameter(AXES[name]) for name in axes]
        hints = get_type_hints(RunFlags, include_extras=True)
        for flag in fields(RunFlags):
            default = timeout if flag.name == "timeout" else flag.default
            parameters.append(_parameter(flag.name, default, hints[flag.name]))
        vars(command)["__signature__"] = inspect.Signature(list(map(_in_panel, parameters)))
        return command

    return decorate


def given_axes(options: Mapping[str, Any]) -> dict[str, str]:
    """Return the text of each axis option that the user passed."""
    return {name: options[name] for name in AXES if options.get(name) is not None}


def _axis_parameter(axis: Axis) -> inspect.Parameter:
    complete = completion.OF_AXES.get(axis.name)
    option = typer.Option(axis.flag, metavar=axis.metavar, help=axis.help, autocompletion=complete)
    return _parameter(axis.name, None, Annotated[str | None, option])


def _in_panel(parameter: inspect.Parameter) -> inspect.Parameter:
    """Put an option into its panel of the help."""
    option = next(iter(getattr(parameter.annotation, "__metadata__", ())), None)
    if not isinstance(option, OptionInfo):
        return parameter
    # Other commands share the option, and have no panels.
    option = copy(option)
    option.rich_help_panel = panel_of(parameter.name, is_axis=parameter.name in AXES)
    hint = get_args(parameter.annotation)[0]
    return parameter.replace(annotation=Annotated[hint, option])


def _parameter(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


def measure_flags(
    *,
    ci: str,
    window: str | None = None,
    energy: bool = False,
    sustained: bool = False,
    occupancy: bool = False,
    counters: bool = False,
    cache: str | None = None,
    min_samples: int = 10,
    max_samples: int = 200,
    prefill: str | None = None,
    repeat: int = 1,
) -> dict[str, Any]:
    """Return the fields of MeasureOptions that the flags set; a sweep file keeps the others."""
    from leanbench.core.syntax import choose, parse_number, parse_percent, parse_seconds
    from leanbench.measure.timing import Effort

    relative_ci = parse_percent("--ci", ci, most=50, above_zero=True)
    if not 6 <= min_samples <= max_samples <= 10_000:
        raise UserError(
            f"--min-samples {min_samples} and --max-samples {max_samples} must be 6 (fewer give no"
            " 95% interval) to 10000, the first not above the second"
        )
    # 250 samples of 4 ms fill a second. More samples need more time.
    max_seconds = max(1.0, max_samples / 200)
    fields: dict[str, Any] = {
        "effort": Effort(
            relative_ci, min_samples=min_samples, max_samples=max_samples, max_seconds=max_seconds
        )
    }
    switches = {
        "sustained": sustained,
        "energy": energy,
        "occupancy": occupancy,
        "counters": counters,
    }
    fields |= {name: True for name, is_on in switches.items() if is_on}
    if not 1 <= repeat <= MOST_REPEATS:
        raise UserError(f"--repeat {repeat} is not 1 to {MOST_REPEATS} processes: write 3")
    if repeat > 1:
        fields["repeat"] = repeat
    if window is not None:
        fields["window_s"] = parse_seconds("--window", window)
    if prefill is not None:
        fields["prefill"] = parse_number("--prefill", prefill, "a number of tokens such as 8k")
    if cache is not None:
        fields["cache"] = choose("cache", cache, ["cold", "warm"])
    return fields


def check_window_is_used(
    window: str | None, measure: MeasureOptions, options: str = "--energy or --sustained"
) -> None:
    """Reject --window if nothing is measured over a window.

    Args:
        options: Options of the command that use the window.
    """
    if window is not None and not (measure.energy or measure.sustained):
        raise OptionWithoutEffect(f"--window {window}", options, "sliding windows: --window-left")


def limits_from_flags(timeout: str, budget: str | None, measure: MeasureOptions) -> Limits:
    """Return the time limits of a cell and of the sweep. Extra measurements extend --timeout."""
    from leanbench.core.syntax import parse_seconds
    from leanbench.measure.counters import TIMEOUT_S
    from leanbench.measure.energy import check_window
    from leanbench.run.problem_runner import Limits

    timeout_s = parse_seconds("--timeout", timeout)
    if measure.sustained or measure.energy:
        check_window(measure.window_s)
        # The first kernel of a problem also measures the read floor over a window.
        timeout_s += 2 * measure.window_s
    if measure.counters:
        timeout_s += TIMEOUT_S
    return Limits(timeout_s, None if budget is None else parse_seconds("--budget", budget))
