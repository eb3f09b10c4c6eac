"""`leanbench recommend`: which kernel to take, how to split and store the cache, and why."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from leanbench.cli import output
from leanbench.cli.completion import gpu_names, kernel_names, length_names, model_names
from leanbench.cli.lookup import Json
from leanbench.cli.options import RunFlags, argument, option, switch
from leanbench.core.axes import AXES
from leanbench.core.errors import InvalidValue, Reason, UserError
from leanbench.core.lengths import MAX_SEQUENCES, is_explicit, longest_in_file
from leanbench.core.parallel import MOST_GPUS

if TYPE_CHECKING:
    from leanbench.advice.recommend import Form, Recommendation, Request
    from leanbench.records.published import PublishedRow

#: Kernels in the table and in the sweep's command.
_LISTED = 6
_SHAPE = re.compile(r"([\d/]+)x(\d+)", re.ASCII)
#: Time after which the tour and --measure start nothing more.
_BUDGET = "2m"
#: Highest price of a GPU: far above any, and its multiples are finite.
_MOST_USD = 1e6
_HELP = """\
No GPU is here to measure. Name a model or a shape, and a GPU:
  leanbench recommend llama-3-70b --gpu h100 --gpus 4 --batch 32 --context 16k
  leanbench recommend --shape 32/8x128 --gpu h200 --batch 8 --context 64k"""
_STYLES = {"Take": "bold green", "Note": "bold yellow"}


def recommend(
    model: Annotated[
        str | None,
        argument(
            "MODEL",
            "A name from `leanbench list models`, NAME-fp8 for 8-bit weights, or a config.json.",
            autocompletion=model_names,
        ),
    ] = None,
    shape: Annotated[
        str | None,
        option("--shape", "HEADSxDIM", "Heads and head_dim instead of MODEL: 32/8x128."),
    ] = None,
    gpu: Annotated[
        str | None, option("--gpu", "NAME", "The GPU.", autocompletion=gpu_names)
    ] = None,
    gpus: Annotated[int, option("--gpus", "N", "GPUs that share the model or the shape.")] = 1,
    batch: Annotated[str | None, option("--batch", "N", "Sequences.", show_default="1")] = None,
    context: Annotated[
        str | None, option("--context", "N", "Cached tokens: 4k.", show_default="8k")
    ] = None,
    lengths: Annotated[
        str | None,
        option(
            "--lengths",
            "NAME|FILE",
            "Of a batch, one of `leanbench list lengths`, or one by one: 64k+16x3.",
            autocompletion=length_names,
        ),
    ] = None,
    kv_dtype: Annotated[
        str | None, option("--kv-dtype", "NAME", "Of the KV cache: same (16-bit), e4m3, e5m2.")
    ] = None,
    page_size: Annotated[
        str | None, option("--page-size", "N", "Tokens of a page, or none.")
    ] = None,
    backends: Annotated[
        str | None,
        option(
            "--backends",
            "LIST",
            "Kernels to choose from, by name or family: lean,flashinfer.",
            show_default="lean and all libraries",
            autocompletion=kernel_names,
        ),
    ] = None,
    usd_per_hour: Annotated[
        float | None, option("--usd-per-hour", "USD", "Price of one GPU.")
    ] = None,
    measure: Annotated[
        bool, switch("--measure", "Measure here first, all kernels that are installed.")
    ] = False,
    json_: Json = False,
) -> None:
    """Recommend a kernel, a split over GPUs and a cache format, with times and reasons.

    Times are measured rows of this shape, or else estimates from near shapes, or else the
    performance model's. `leanbench lookup` has the rows. Without --kv-dtype and --page-size, others
    are shown as well. Needs no GPU, but for --measure.

    Without MODEL and --shape, on a machine with a GPU: a tour of two minutes, which kernel is
    fastest where.
    """
    from leanbench.advice.recommend import Request, form_to_measure
    from leanbench.advice.recommend import backends as kernels_named
    from leanbench.advice.recommend import recommend as recommended
    from leanbench.advice.words import sentences, title, to_json
    from leanbench.gpu.local import choose
    from leanbench.run.sweep_file import requested_sweep

    sizes = {"batch": batch, "context": context, "lengths": lengths}
    sizes |= {"kv_dtype": kv_dtype, "page_size": page_size}
    given = {name: text for name, text in sizes.items() if text is not None}
    if model is None and shape is None:
        others = (gpu, backends, usd_per_hour)
        if given or json_ or measure or gpus != 1 or any(each is not None for each in others):
            raise UserError("no model is given: name one, or give --shape 32/8x128")
        if choose(None, require_gpu=False).local_index is None:
            output.show(_HELP)
        else:
            _tour()
        return
    if usd_per_hour is not None and not 0 < usd_per_hour <= _MOST_USD:
        raise UserError(
            f"--usd-per-hour {usd_per_hour:g} is no price of a GPU: write one such as 2.50, at most"
            f" {_MOST_USD:.0f}"
        )
    if usd_per_hour is not None and model is None:
        raise UserError(
            f"--usd-per-hour {usd_per_hour:g} needs a model, a shape alone has no tokens per"
            " second: name one, or leave it out"
        )
    if not 1 <= gpus <= MOST_GPUS:
        raise UserError(f"--gpus {gpus} is not supported: choose 1 to {MOST_GPUS}")
    target = choose(gpu, require_gpu=False)
    if gpu is None and target.local_index is None:
        raise UserError("no GPU is here: name one with --gpu, such as h100 or h200")
    flags = _axis_flags(model, shape, given)
    grid = requested_sweep(None, flags, None, None).grids[0]
    named = () if backends is None else kernels_named(backends)
    request = Request(model or str(shape), grid, target.spec, gpus, named)
    fixed = {f"{each}s": grid[each] for each in ("kv_dtype", "page_size") if each in flags}
    request = replace(request, **fixed)
    if (sequences := len(request.contexts)) > MAX_SEQUENCES:
        fix = "choose a smaller batch"
        raise InvalidValue("--batch", sequences, Reason.ABOVE_MAXIMUM, fix, MAX_SEQUENCES)
    if measure:
        if target.local_index is None:
            raise UserError(
                f"--measure needs the GPU, and no {target.spec.name} is here: leave --measure out,"
                " or run it where one is"
            )
        form = form_to_measure(request)
        request = replace(request, own=_measured_here(request, form, flags, gpu))
    recommendation = recommended(request)
    listed = [each.kernel for each in recommendation.options[:_LISTED]]
    command = _command(_swept_axes(recommendation.choice.form, flags), gpu, listed)
    if json_:
        found = to_json(recommendation, usd_per_hour)
        output.show_whole(json.dumps(found | {"command": shlex.join(command)}, indent=2))
    else:
        output.show("", lead=title(recommendation))
        for name, sentence in sentences(recommendation, usd_per_hour).items():
            output.show(f"{sentence}.", lead=f"{name}: ", style=_STYLES.get(name, "bold"))
        _show_options(recommendation)
        if not measure:
            here = "here with --measure, or" if target.local_index is not None else "on that GPU"
            output.show(f"\nMeasure {here} with:")
            output.show_whole(shlex.join(command))


def _swept_axes(form: Form, flags: Mapping[str, str]) -> dict[str, str]:
    """Return the axes of a sweep over a form, as text."""
    changed = {name: value for name, value in form.axes.items() if value != AXES[name].default}
    return {**flags} | {name: AXES[name].write(value) for name, value in changed.items()}


def _command(axes: Mapping[str, str], gpu: str | None, kernels: Sequence[str]) -> list[str]:
    """Return the command that sweeps these axes."""
    command = ["leanbench", "sweep"]
    command += [word for name, text in axes.items() for word in (AXES[name].flag, text)]
    return [*command, "--kernels", ",".join(kernels), *(["--gpu", gpu] if gpu else [])]


def _measured_here(
    request: Request, form: Form, given: Mapping[str, str], gpu: str | None
) -> tuple[PublishedRow, ...]:
    """Sweep a form on the GPU here, with all kernels that are installed. Return the timed rows.

    Raises:
        UserError: No kernel could be timed.
    """
    from leanbench.advice.recommend import runnable
    from leanbench.cli.sweep_run import explain_nothing_ran, rows_of_sweep
    from leanbench.core.registry import kernel
    from leanbench.records.published import rows_of
    from leanbench.run.sweep_file import requested_sweep

    able = runnable(request, form.layers)
    names = [name for name in able if kernel(name).unavailable_reason() is None]
    if not names:
        raise UserError(
            f"none of {', '.join(able) or 'the kernels'} is installed: `leanbench doctor`"
        )
    axes = _swept_axes(form, given)
    output.say(f"Measuring {', '.join(names)}: nothing starts after two minutes.")
    sweep = requested_sweep(None, axes, ",".join(names), None)
    flags = RunFlags(gpu=gpu, require_gpu=True, budget=_BUDGET, no_report=True)
    run = rows_of_sweep(sweep, flags, _command(axes, gpu, names))
    assert run is not None
    if not (rows := rows_of(run, str(run.directory))):
        raise UserError(explain_nothing_ran(run) or f"nothing was timed, see {run.directory}")
    return tuple(rows)


def _tour() -> None:
    """Measure a few calls with all kernels that are installed, and print which is fastest where."""
    from leanbench.advice.recommend import backends, without_modes
    from leanbench.cli.sweep_run import run_sweep
    from leanbench.core.registry import kernel
    from leanbench.run.sweep_file import load_sweep

    tour = load_sweep("tour")
    every = {name: kernel(name).unavailable_reason() for name in without_modes(backends(None))}
    here = [name for name, reason in every.items() if reason is None and name != "lean_mla"]
    versions = (kernel(name).library() or "this project" for name in here)
    output.show("Installed: " + ", ".join(map("{} ({})".format, here, versions)) + ".")
    if missing := [name for name, reason in every.items() if reason is not None]:
        output.show(f"Not installed: {', '.join(missing)}. `leanbench doctor` has the commands.")
    names = ",".join(here)
    output.say("Measuring, two minutes at most.")
    flags = RunFlags(require_gpu=True, budget=_BUDGET, no_report=True)
    run_sweep(
        replace(tour, kernels=tuple(here)),
        flags,
        ["leanbench", "sweep", "tour", "--kernels", names],
    )


def _axis_flags(model: str | None, shape: str | None, given: Mapping[str, str]) -> dict[str, str]:
    """Return the axes of a sweep, one value each, as text."""
    if model is not None and shape is not None:
        raise UserError(f"model {model} conflicts with --shape {shape}: leave one of them out")
    if model is not None and _SHAPE.fullmatch(model.strip()):
        raise UserError(f"{model} is a shape and no model: write --shape {model}")
    if shape is None:
        flags = {"model": str(model)}
    else:
        match = _SHAPE.fullmatch(shape.strip())
        if match is None:
            fix = "write heads x head_dim such as 32/8x128"
            raise InvalidValue("--shape", shape, Reason.SYNTAX, fix)
        flags = {"heads": match[1], "head_dim": match[2]}
    flags |= {**given, "dtype": "bf16"}
    for name, text in flags.items():
        if len(AXES[name].parse(text)) > 1:
            fix = "give one; of a batch, join lengths with +" if name == "lengths" else "give one"
            raise InvalidValue(AXES[name].flag, text, Reason.TOO_MANY_VALUES, fix, 1)
    drawn = flags.get("lengths", "")
    if drawn and not is_explicit(drawn) and "batch" not in flags:
        raise UserError(f"--lengths {drawn} needs the number of sequences: add --batch 32")
    if not is_explicit(drawn):
        flags.setdefault("batch", "1")
        if not drawn or longest_in_file(drawn) is None:
            flags.setdefault("context", "8k")
    return flags


def _show_options(recommendation: Recommendation) -> None:
    options = recommendation.options[:_LISTED]
    fastest = recommendation.choice.step_us
    time = ("µs a layer", [output.four_digits(each.main.latency_us) for each in options])
    if len(recommendation.choice.layers) > 1:
        time = ("µs a step", [output.four_digits(each.step_us) for each in options])
    columns = [
        time,
        ("over the choice", [f"{each.step_us / fastest:.2f}x" for each in options]),
        ("from", [each.source for each in options]),
    ]
    output.show("")
    output.show_columns("", [("kernel", [each.kernel for each in options])], columns)
