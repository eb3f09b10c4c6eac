"""`leanbench list`: what there is to measure, to ask and to predict for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from leanbench.cli import output

if TYPE_CHECKING:
    from rich.table import Table


def list_(
    what: Annotated[
        str, typer.Argument(metavar="kernels|sweeps|axes|models|gpus", help="What to list.")
    ],
) -> None:
    """List the kernels, the sweeps that come with leanbench, the axes of sweeps, or the models (for
    --model) and GPUs that it knows.
    """
    from leanbench.core.syntax import choose

    tables = {
        "kernels": _kernels,
        "sweeps": _sweeps,
        "axes": _axes,
        "models": _models,
        "gpus": _gpus,
    }
    output.show_table(tables[choose("list", what, list(tables))]())
    if what == "kernels":
        _say_missing()


def _kernels() -> Table:
    from rich.text import Text

    from leanbench.core.registry import family_faults, kernels

    table = output.table()
    for column in ("name", "decomposition"):
        table.add_column(column, no_wrap=True)
    # Titles have long names in them, which a second column of text would leave no room for.
    table.add_column("what it is, and its source", overflow="fold")
    for kernel in kernels().values():
        table.add_row(kernel.name, kernel.decomposition, Text(f"{kernel.title}\n{kernel.source}"))
    for fault in family_faults():
        output.say(f"! {fault}; its kernels are left out.")
    return table


def _say_missing() -> None:
    """A line for each kernel that cannot run here, below the table."""
    from leanbench.core.registry import kernels

    for missing in filter(None, (kernel.unavailable_reason() for kernel in kernels().values())):
        output.show(missing)


def _sweeps() -> Table:
    from leanbench.run.cells import expand
    from leanbench.run.sweep_file import load_sweep, shipped_sweeps

    table = output.table()
    table.add_column("name", no_wrap=True)
    table.add_column("cells", justify="right")
    table.add_column("what it asks")
    for name in shipped_sweeps():
        sweep = load_sweep(name)
        table.add_row(name, str(len(expand(sweep))), sweep.description)
    return table


def _axes() -> Table:
    from leanbench.core.axes import AXES

    table = output.table()
    for column in ("flag", "letter", "unless given"):
        table.add_column(column, no_wrap=True)
    table.add_column("what it takes")
    for axis in AXES.values():
        table.add_row(axis.flag, axis.letter, axis.grid_text, axis.help)
    return table


def _models() -> Table:
    from leanbench.core.language_models import models

    table = output.table()
    table.add_column("name", no_wrap=True)
    for column in ("heads", "head\ndim", "layers"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("sliding-window\nlayers", no_wrap=True)
    table.add_column("config on the hub,\nother names", overflow="fold")
    for model in models().values():
        sliding = (
            f"{model.sliding_layers}, {model.sliding_window} tokens" if model.sliding_window else ""
        )
        heads = f"{model.q_heads}/{model.kv_heads}"
        table.add_row(
            model.name,
            heads,
            str(model.head_dim),
            str(model.layers),
            sliding,
            "\n".join((model.config, *model.also)),
        )
    return table


def _gpus() -> Table:
    from leanbench.gpu.catalogue import CATALOGUE

    table = output.table()
    # The name is what people type: never cut.
    table.add_column("name", no_wrap=True)
    for column in (
        "SMs",
        "memory (GB)",
        "bandwidth (TB/s)",
        "L2 (MB)",
        "power (W)",
        "compute cap.",
    ):
        table.add_column(column, justify="right", min_width=max(map(len, column.split())))
    table.add_column("also called", overflow="fold")
    for gpu in CATALOGUE:
        major, minor = gpu.compute_capability
        table.add_row(
            gpu.name,
            str(gpu.sms),
            f"{gpu.memory_gb:g}",
            f"{gpu.bandwidth_tb_s:g}",
            f"{gpu.l2_mb:g}",
            str(gpu.power_limit_w),
            f"{major}.{minor}",
            ", ".join(gpu.aliases),
        )
    return table
