"""Options that several commands have, or that follow from a table."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any

import typer

from leanbench.cli import completion
from leanbench.core.axes import AXES
from leanbench.core.axis import Axis

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
