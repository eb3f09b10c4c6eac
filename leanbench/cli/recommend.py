"""`leanbench recommend`: which kernel to take, how to split and store the cache, and why."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from leanbench.cli import output
from leanbench.cli.completion import gpu_names, kernel_names, length_names, model_names
from leanbench.cli.lookup import Json
from leanbench.cli.options import RunFlags, argument, option, switch
from leanbench.core.axes import AXES
from leanbench.core.errors import InvalidValue, Reason, UserError
from leanbench.core.parallel import MOST_GPUS

if TYPE_CHECKING:
    from leanbench.advice.recommend import Recommendation, Request
    from leanbench.advice.words import Words
    from leanbench.gpu.local import Target

#: Kernels in the table.
_LISTED = 6
_HELP = """\
Name a model or a shape, and a GPU:
  leanbench recommend llama-3-70b --gpu h100 --gpus 4 --batch 32 --context 16k
  leanbench recommend --shape 32/8x128 --gpu h200 --batch 8 --context 64k"""


def recommend(
    model: Annotated[
        str | None,
        argument(
            "MODEL",
            "A name from `leanbench list models`, or a config.json.",
            autocompletion=model_names,
        ),
    ] = None,
    shape: Annotated[
        str | None,
        option("--shape", "HEADSxDIM", "In place of MODEL: query/KV heads and head_dim, 32/8x128."),
    ] = None,
    gpu: Annotated[
        str | None, option("--gpu", "NAME", "The GPU.", autocompletion=gpu_names)
    ] = None,
    gpus: Annotated[int, option("--gpus", "N", "GPUs that share the model or the shape.")] = 1,
    batch: Annotated[str | None, option("--batch", "N", "Sequences.", show_default="1")] = None,
    context: Annotated[
        str | None, option("--context", "N", "Cached tokens of each.", show_default="8k")
    ] = None,
    lengths: Annotated[
        str | None,
        option(
            "--lengths",
            "FILE",
            "Lengths as in sweeps: a file, a distribution, or 64k+1kx15.",
            autocompletion=length_names,
        ),
    ] = None,
    kv_dtype: Annotated[
        str | None,
        option(
            "--kv-dtype", "same|e4m3", "The cache's dtype.", show_default="same; e4m3 if that fits"
        ),
    ] = None,
    page_size: Annotated[
        str | None,
        option("--page-size", "N|none", "Tokens of a page.", show_default="none, 16 and 64"),
    ] = None,
    backends: Annotated[
        str | None,
        option(
            "--backends",
            "LIST",
            "Kernels to choose from, or families: lean,flashinfer.",
            show_default="lean and all libraries",
            autocompletion=kernel_names,
        ),
    ] = None,
    usd_per_hour: Annotated[
        float | None, option("--usd-per-hour", "USD", "Price of a GPU: dollars per million tokens.")
    ] = None,
    measure: Annotated[
        bool, switch("--measure", "Run a small sweep of the candidates on this machine's GPU.")
    ] = False,
    json_: Json = False,
) -> None:
    """Recommend a kernel, a split over GPUs and a cache format, with the time and the reasons.

    Times are measured rows of this shape, or estimates from near shapes, or the performance
    model's. `leanbench lookup` has the rows. Needs no GPU; --measure settles it on one.
    """
    from leanbench.advice.recommend import recommend as recommended
    from leanbench.advice.words import Words

    if model is None and shape is None:
        given = (gpu, batch, context, lengths, kv_dtype, page_size, backends, usd_per_hour)
        if any(value is not None for value in given) or measure or json_ or gpus != 1:
            raise UserError("no model and no shape: name a model, or give --shape 32/8x128")
        output.show(_HELP)
        return
    if usd_per_hour is not None and not 0 < usd_per_hour < math.inf:
        raise UserError(f"--usd-per-hour {usd_per_hour:g} is no price: write one such as 2.50")
    flags = _axis_flags(model, shape, {"batch": batch, "context": context, "lengths": lengths})
    target = _target(gpu, measure)
    formats = {"kv_dtype": kv_dtype, "page_size": page_size}
    request = _request(flags, formats, target, gpus, backends)
    recommendation = recommended(request)
    command = _sweep_words(recommendation, flags, gpu)
    if measure:
        _measure(command, gpu)
        return
    words = Words(recommendation, usd_per_hour)
    if json_:
        output.show_whole(json.dumps(words.to_json() | {"command": shlex.join(command)}, indent=2))
    else:
        _show(words, command)


def _axis_flags(
    model: str | None, shape: str | None, lengths: Mapping[str, str | None]
) -> dict[str, str]:
    """Return the axes of a sweep, as text."""
    from leanbench.core.lengths import is_explicit, longest_in_file

    if model is not None and shape is not None:
        raise UserError(f"model {model} conflicts with --shape {shape}: leave one of them out")
    if shape is None:
        flags = {"model": str(model)}
    else:
        match = re.fullmatch(r"(\d{1,9}(?:/\d{1,9})?)x(\d{1,9})", shape.strip(), re.ASCII)
        if match is None:
            fix = "write heads x head_dim such as 32/8x128"
            raise InvalidValue("--shape", shape, Reason.SYNTAX, fix)
        flags = {"heads": match[1], "head_dim": match[2]}
    flags |= {name: text for name, text in lengths.items() if text is not None}
    flags["dtype"] = "bf16"
    for name, text in flags.items():
        if len(AXES[name].parse(text)) > 1:
            raise InvalidValue(AXES[name].flag, text, Reason.TOO_MANY_VALUES, "give one", 1)
    drawn = flags.get("lengths", "")
    if not is_explicit(drawn):
        if drawn and "batch" not in flags:
            raise UserError(f"--lengths {drawn} needs the number of sequences: add --batch 32")
        flags.setdefault("batch", "1")
        if not drawn or longest_in_file(drawn) is None:
            flags.setdefault("context", "8k")
    return flags


def _target(gpu: str | None, measure: bool) -> Target:
    """Return the GPU.

    Raises:
        UserError: None is named and none is here, or --measure has none to measure on.
    """
    from leanbench.gpu.local import choose

    target = choose(gpu, require_gpu=False)
    if target.local_index is None and measure:
        name = target.spec.name if gpu else "GPU"
        raise UserError(
            f"--measure needs a GPU and no {name} is here: leave --measure out for the published"
            " rows"
        )
    if target.local_index is None and gpu is None:
        raise UserError("no GPU is here: name one with --gpu, such as h100 or h200")
    return target


def _request(
    flags: dict[str, str],
    formats: Mapping[str, str | None],
    target: Target,
    gpus: int,
    backend_words: str | None,
) -> Request:
    from leanbench.advice.recommend import Request, backends
    from leanbench.run.sweep_file import requested_sweep

    if not 1 <= gpus <= MOST_GPUS:
        raise UserError(f"--gpus {gpus} is not supported: choose 1 to {MOST_GPUS}")
    grid = requested_sweep(None, flags, None, None).grids[0]
    request = Request(
        grid, target.spec, gpus, backends(backend_words), are_named=backend_words is not None
    )
    fixed: dict[str, Any] = {
        f"{name}s": AXES[name].parse(text) for name, text in formats.items() if text is not None
    }
    return replace(request, **fixed)


def _sweep_words(
    recommendation: Recommendation, flags: Mapping[str, str], gpu: str | None
) -> list[str]:
    """Return the command that measures the candidates."""
    form = recommendation.choice.form
    problem = form.problem
    shown = dict(flags)
    if "model" in shown and form.tp > 1:
        shown["tp"] = str(form.tp)
    elif "heads" in shown:
        shown["heads"] = AXES["heads"].write((problem.q_heads, problem.kv_heads))
    for name in ("kv_dtype", "page_size", "parallel"):
        if (value := getattr(problem, name)) != AXES[name].default:
            shown[name] = AXES[name].write(value)
    if form.page_size is not None:
        shown["lengths_on"] = "device"
    names = [each.kernel for each in recommendation.options[:_LISTED]]
    words = [word for name, text in shown.items() for word in (AXES[name].flag, text)]
    of_gpu = [] if gpu is None else ["--gpu", gpu]
    return ["leanbench", "sweep", *words, "--kernels", ",".join(names), *of_gpu]


def _measure(command: list[str], gpu: str | None) -> None:
    """Run the sweep of the candidates."""
    from leanbench.cli.sweep_run import run_sweep
    from leanbench.run.sweep_file import requested_sweep

    pairs = dict(zip(command[2::2], command[3::2], strict=True))
    flags = {name: pairs[axis.flag] for name, axis in AXES.items() if axis.flag in pairs}
    sweep = requested_sweep(None, flags, pairs["--kernels"], None)
    # The file of models has several grids, which the flags make one.
    sweep = replace(sweep, name="recommend", grids=sweep.grids[:1])
    run_sweep(sweep, RunFlags(gpu=gpu, require_gpu=True), command)


def _show(words: Words, command: list[str]) -> None:
    recommendation = words.of
    output.show("", lead=words.title)
    for name, sentence in words.lines().items():
        output.show(f"{sentence}.", lead=f"{name}: ", style=_STYLES.get(name, "bold"))
    output.show("")
    options = recommendation.options[:_LISTED]
    fastest = recommendation.choice.step_us
    columns = [
        ("µs a layer", [f"{each.main.latency_us:.4g}" for each in options]),
        ("over the choice", [f"{each.step_us / fastest:.2f}x" for each in options]),
        ("from", [each.source for each in options]),
    ]
    output.show_columns("", [("kernel", [each.kernel for each in options])], columns)
    output.show("")
    output.show("To measure it on that GPU, add --measure or run:")
    output.show_whole(shlex.join(command))


_STYLES = {"Take": "bold green", "Note": "bold yellow"}
