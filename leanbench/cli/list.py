"""`leanbench list`: what there is to measure, to ask and to predict for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from leanbench.cli import output

if TYPE_CHECKING:
    from rich.table import Table


def list_(
    what: Annotated[str, typer.Argument(metavar="kernels|sweeps|models|gpus", help="What to list.")],
) -> None:
    """List the kernels, the sweeps that come with leanbench, or the models (for --model) and GPUs that it knows."""
    from leanbench.run.axes import choose

    tables = {"kernels": _kernels, "sweeps": _sweeps, "models": _models, "gpus": _gpus}
    output.show_table(tables[choose("list", what, list(tables))]())


def _kernels() -> Table:
    from leanbench.registry import family_faults, kernels

    table = output.table()
    for column in ("name", "decomposition"):
        table.add_column(column, no_wrap=True)
    for column in ("what it is", "source"):
        table.add_column(column)
    for kernel in kernels().values():
        missing = kernel.unavailable_reason()
        title = kernel.title if missing is None else f"{kernel.title}; {missing}"
        table.add_row(kernel.name, kernel.decomposition, title, kernel.source)
    for fault in family_faults():
        output.say(f"! {fault}; its kernels are left out.")
    return table


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


def _models() -> Table:
    from leanbench.run.models import models

    table = output.table()
    table.add_column("name", no_wrap=True)
    for column in ("heads", "head_dim", "layers"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("sliding-window layers", no_wrap=True)
    for column in ("also called", "config on the hub"):
        table.add_column(column, overflow="fold")
    for model in models().values():
        sliding = f"{model.sliding_layers}, {model.sliding_window} tokens" if model.sliding_window else ""
        heads = f"{model.q_heads}/{model.kv_heads}"
        table.add_row(
            model.name, heads, str(model.head_dim), str(model.layers), sliding, ", ".join(model.also), model.config
        )
    return table


def _gpus() -> Table:
    from leanbench.gpu.catalogue import CATALOGUE

    table = output.table()
    # The name is what people type: never cut.
    table.add_column("name", no_wrap=True)
    for column in ("SMs", "memory (GB)", "bandwidth (TB/s)", "L2 (MB)", "power (W)", "compute cap."):
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
