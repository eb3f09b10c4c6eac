"""`leanbench decode`: a decode step of a whole model, with each kernel as its attention."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from leanbench.cli import output
from leanbench.cli.completion import kernel_names, whole_model_names
from leanbench.cli.options import (
    Ci,
    RunFlags,
    argument,
    check_window_is_used,
    given_axes,
    measure_flags,
    option,
    switch,
    with_shared_options,
)
from leanbench.cli.sweep_run import command_line, run_sweep
from leanbench.core.lengths import is_explicit
from leanbench.core.model_config import split_models
from leanbench.core.whole_model import read_model

if TYPE_CHECKING:
    from leanbench.run.cells import Sweep

#: Base sweep of the command, and the axes that it accepts.
_SWEEP = "decode"
_AXES = ("context", "batch", "lengths", "dtype", "capacity", "kv_layout")


@with_shared_options(axes=_AXES, after="model", timeout="300s")
def decode(
    ctx: typer.Context,
    model: Annotated[
        str,
        argument(
            "MODEL",
            "A model that `leanbench list models` marks (opt-6.7b, llama-3-8b, ...), or the"
            " path of any config.json.",
            autocompletion=whole_model_names,
        ),
    ],
    tp: Annotated[
        str | None,
        option(
            "--tp",
            "N",
            "GPUs that share the model out; one of them runs, without their communication.",
        ),
    ] = None,
    layers: Annotated[
        str | None, option("--layers", "N", "The first N layers: a part of the model.")
    ] = None,
    positions: Annotated[
        str | None,
        option("--positions", "N", "Positions in place of the config's, for contexts beyond them."),
    ] = None,
    kernels: Annotated[
        str | None,
        option(
            "--kernels",
            "LIST",
            "lean, fa2, fixed_split, flash_attn_3; transformers' own: sdpa, eager; the bound:"
            " no_attention.",
            autocompletion=kernel_names,
        ),
    ] = None,
    energy: Annotated[
        bool, switch("--energy", "Also energy per token, over seconds back to back.")
    ] = False,
    prefill: Annotated[
        str | None,
        option("--prefill", "N", "Also time to first token, for contexts up to N tokens: 8k."),
    ] = None,
    window: Annotated[
        str | None, option("--window", "TIME", "Length of the --energy window.", show_default="3s")
    ] = None,
    ci: Ci = "0.5%",
    **shared: Any,
) -> None:
    """Time per token of a whole model, with each kernel as its attention, then HTML and CSV.

    The model is transformers', made from its config with random weights, its KV cache is full of
    random values, and a step is captured in a CUDA graph. MODEL may be several, separated by
    commas. Without --context, contexts end at each model's positions. The command is `leanbench
    sweep decode` with another model: runs resume, compare and report as those of sweeps. Without a
    GPU, attention is predicted by the performance model and the rest as the time in which the
    weights are read.
    """
    from leanbench.run.sweep_file import requested_sweep

    flags = RunFlags.from_options(shared)
    options = {"tp": tp, "layers": layers, "positions": positions}
    suffix = "".join(f":{key}={value}" for key, value in options.items() if value is not None)
    models = ",".join(f"{one}{suffix}" for one in split_models(model))
    given = {"whole_model": models, **given_axes(shared)}
    measure = measure_flags(ci=ci, energy=energy, window=window, prefill=prefill)
    requested = requested_sweep(_SWEEP, given, kernels, None, measure)
    check_window_is_used(window, requested.measure, "--energy")
    if "context" not in given:
        requested = _within_positions(requested, quiet=flags.quiet)
    run_sweep(requested, flags, command_line(ctx))


def _within_positions(requested: Sweep, *, quiet: bool) -> Sweep:
    """Limit the contexts of each model to its positions. Print a line unless `quiet`."""
    from leanbench.run.cells import Grid

    grids = []
    for grid in requested.grids:
        for name in grid["whole_model"]:
            positions = max(grid["context"]) if name is None else read_model(name).max_positions
            contexts = tuple(dict.fromkeys(min(each, positions) for each in grid["context"]))
            grids.append(Grid(**{**grid.values, "whole_model": (name,), "context": contexts}))
            cut = contexts != grid["context"] and not all(map(is_explicit, grid["lengths"]))
            if cut and not quiet:
                output.say(
                    f"{name} has {positions} positions: contexts are {_written(contexts)} in place"
                    f" of {_written(grid['context'])}; --positions {max(grid['context'])} asks for"
                    " all of them."
                )
    return replace(requested, grids=tuple(grids))


def _written(contexts: tuple[int, ...]) -> str:
    return ", ".join(map(str, contexts))
