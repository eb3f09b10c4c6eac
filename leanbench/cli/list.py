"""`leanbench list`: kernels, sweeps, axes, quantities, lengths, models and GPUs."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Annotated

import typer

from leanbench.cli import output
from leanbench.cli.completion import that_begin
from leanbench.cli.options import option

if TYPE_CHECKING:
    from leanbench.core.llm.model import Model

FORMATS = ("table", "markdown", "json")


def _kernels() -> None:
    from rich.text import Text

    from leanbench.core.registry import kernels

    output.say_kernel_warnings()
    table = output.table()
    table.add_column("name", no_wrap=True)
    # Titles have long names, which leave no room for a second column of text.
    table.add_column("what it is, its decomposition and source", overflow="fold")
    # This project's own first, calls over several GPUs last.
    own = [name for name in kernels() if name.startswith("lean")]
    shared = [name for name, kernel in kernels().items() if "distributed" in kernel.__module__]
    others = [name for name in kernels() if name not in {*own, *shared}]
    for name in own + others + shared:
        kernel = kernels()[name]
        about = f"{kernel.title}\n{kernel.decomposition}; {kernel.source}"
        table.add_row(kernel.name, Text(about))
    output.show_table(table)
    missing: dict[str, list[str]] = {}
    for name, kernel in kernels().items():
        if reason := kernel.unavailable_reason():
            missing.setdefault(reason.removeprefix(f"{name} "), []).append(name)
    for reason, names in missing.items():
        output.show(f"{', '.join(names)}: {reason}")


def _sweeps() -> None:
    from leanbench.run.cells import expand
    from leanbench.run.sweep_file import load_sweep, shipped_sweeps

    table = output.table()
    table.add_column("name", no_wrap=True)
    table.add_column("cells", justify="right")
    table.add_column("what it asks")
    for name in shipped_sweeps():
        sweep = load_sweep(name)
        table.add_row(name, str(len(expand(sweep))), sweep.description)
    output.show_table(table)


def _axes() -> None:
    from leanbench.core.axes import AXES

    table = output.table()
    for column in ("flag", "letter", "unless given"):
        table.add_column(column, no_wrap=True)
    table.add_column("what it takes")
    for axis in AXES.values():
        table.add_row(axis.flag, axis.letter, axis.grid_text, axis.help)
    output.show_table(table)


def _lengths() -> None:
    from leanbench.core.lengths import DISTRIBUTIONS, traces

    table = output.table("Lengths of a batch's sequences, for --lengths")
    table.add_column("name", no_wrap=True)
    for column in ("mean", "longest"):
        table.add_column(column, justify="right")
    table.add_column("what they are", overflow="fold")
    for name, meaning in DISTRIBUTIONS.items():
        table.add_row(name, "", "", meaning)
    for name, trace in traces().items():
        about = f"{trace.source}; {trace.licence}; {trace.requests} requests"
        table.add_row(name, f"{trace.mean_tokens:.0f}", str(trace.quantiles[-1]), about)
    output.show_table(table)


def _models() -> None:
    from leanbench.core.llm.model import models

    listed = models().values()
    kinds = [
        "\n".join(textwrap.fill(words, 24) for words in _layer_words(model)) for model in listed
    ]
    columns = [
        ("heads", [f"{model.main_layer.q_heads}/{model.main_layer.kv_heads}" for model in listed]),
        ("head\ndim", [str(model.main_layer.head_dim) for model in listed]),
        ("layers", [str(model.layers) for model in listed]),
        ("not plain", kinds),
        ("leanbench\ndecode", ["yes" if model.config.is_whole else "" for model in listed]),
        ("also called", ["\n".join((model.config.hub, *model.config.also)) for model in listed]),
    ]
    names: output.Column = ("name", [model.name for model in listed])
    output.show_columns("Language models, for --model", [names], columns)


def _layer_words(model: Model) -> list[str]:
    """Describe the layers of a model that are not full attention with the heads of its column."""
    words = []
    main = model.main_layer
    for layer, count in model.layer_kinds(1).items():
        heads = f"h{main.q_heads}/{main.kv_heads} d{main.head_dim}"
        kind = layer.words.removeprefix(heads).strip()
        if kind:
            words.append(kind if count == model.layers else f"{count}: {kind}")
    return words + [f"{count}: {name}" for name, count in model.other_layers.items()]


def _gpus() -> None:
    from leanbench.gpu.catalogue import CATALOGUE

    between = ", " if output.console().width >= 120 else ",\n"
    capabilities = [gpu.compute_capability for gpu in CATALOGUE]
    columns = [
        ("SMs", [str(gpu.sms) for gpu in CATALOGUE]),
        ("memory (GB)", [f"{gpu.memory_gb:g}" for gpu in CATALOGUE]),
        ("bandwidth (TB/s)", [f"{gpu.bandwidth_tb_s:g}" for gpu in CATALOGUE]),
        ("L2 (MiB)", [f"{gpu.l2_mib:g}" for gpu in CATALOGUE]),
        ("power (W)", [str(gpu.power_limit_w) for gpu in CATALOGUE]),
        ("compute cap.", [f"{major}.{minor}" for major, minor in capabilities]),
        ("also called", [between.join(gpu.aliases) for gpu in CATALOGUE]),
    ]
    names: output.Column = ("name", [gpu.name for gpu in CATALOGUE])
    output.show_columns("GPUs, for --gpu", [names], columns)


def _quantities() -> None:
    from leanbench.report.columns import ROW_COLUMNS, stored_unit

    table = output.table()
    table.add_column("name", no_wrap=True)
    table.add_column("heading in tables, unit and meaning", overflow="fold")
    for quantity in ROW_COLUMNS:
        unit = f" ({stored_unit(quantity)})" if stored_unit(quantity) else ""
        table.add_row(quantity.name, f"{quantity.heading}{unit}: {quantity.meaning}")
    output.show_table(table)


_LISTS = {
    "kernels": _kernels,
    "sweeps": _sweeps,
    "axes": _axes,
    "quantities": _quantities,
    "lengths": _lengths,
    "models": _models,
    "gpus": _gpus,
}


def list_(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="WHAT",
            help=f"{', '.join([*_LISTS][:-1])} or {[*_LISTS][-1]}.",
            autocompletion=lambda incomplete: that_begin(incomplete, _LISTS),
            show_default=False,
        ),
    ] = None,
    format_: Annotated[
        str, option("--format", "|".join(FORMATS), "How to print quantities.")
    ] = "table",
) -> None:
    """List the kernels, the sweeps that come with leanbench, the axes of sweeps, the quantities of
    rows (also as docs/quantities.md or as a JSON schema), or the distributions of lengths (for
    --lengths), models (for --model) and GPUs that it knows.
    """
    from leanbench.core.errors import UserError
    from leanbench.core.syntax import choose

    if what is None:
        raise UserError(f"no list is named: choose from {', '.join(_LISTS)}")
    show = _LISTS[choose("list", what, list(_LISTS))]
    if choose("--format", format_, FORMATS) == "table":
        show()
    elif what == "quantities":
        from leanbench.report.columns import quantities_text, schema_text

        text = quantities_text() if format_ == "markdown" else schema_text()
        output.show_whole(text.rstrip("\n"))
    else:
        raise UserError(f"--format {format_} is for quantities, {what} are a table: leave it out")
