"""`leanbench tune`: time the settings of calls on a GPU, and keep what was learned."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import geometric_mean, median
from typing import TYPE_CHECKING, Annotated

import typer

from leanbench.cli import output
from leanbench.cli.completion import gpu_names
from leanbench.cli.options import Quiet, argument, option, switch
from leanbench.core.errors import OptionWithoutEffect, UserError
from leanbench.core.parallel import NONE
from leanbench.core.syntax import MAX_SEED

if TYPE_CHECKING:
    from leanbench.configs.store import TimedCall
    from leanbench.core.gpu_spec import GpuSpec
    from leanbench.core.problem import AttentionProblem
    from leanbench.gpu.local import Target
    from leanbench.tune.check import Checked
    from leanbench.tune.search import Request, Tuning

_BUDGET = "60s"
_CHECKED = 20
#: Newest calls that the model's constants are fitted to.
_FITTED = 300


def tune(
    problem: Annotated[
        list[str] | None,
        argument("PROBLEM", "A call to tune, as of `leanbench trace`; common ones if not given."),
    ] = None,
    calls: Annotated[
        Path | None,
        option("--calls", "FILE", "Tune the calls that a server recorded (LEANBENCH_RECORD=FILE)."),
    ] = None,
    gpu: Annotated[
        str | None,
        option(
            "--gpu",
            "NAME",
            "The GPU to tune on; of one that is not here, the model's choices are shown.",
            autocompletion=gpu_names,
        ),
    ] = None,
    budget: Annotated[
        str, option("--budget", "TIME", "Time limit once all is compiled: 90s, 10m.")
    ] = _BUDGET,
    objective: Annotated[
        str, option("--objective", "latency|energy|edp", "What to minimise.")
    ] = "latency",
    check: Annotated[
        bool,
        switch("--check", "Change nothing: time all candidates, and show what the settings reach."),
    ] = False,
    seed: Annotated[
        int | None,
        option(
            "--seed",
            "N",
            "Seed of the calls of --check; 0 if not given.",
            min=0,
            max=MAX_SEED,
        ),
    ] = None,
    problems: Annotated[
        int | None,
        option(
            "--problems",
            "N",
            f"Number of calls of --check; {_CHECKED} if not given.",
            min=1,
            max=1000,
        ),
    ] = None,
    out: Annotated[
        Path | None, option("--out", "FILE", "Also write what --check timed, as JSON lines.")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Find the fastest settings of LeanAttention for calls on this GPU, and keep all timings.

    Each call's candidates are ranked by a model of the kernel, compiled, checked, and the first
    ones timed. A later call with a timed signature gets its best settings, in every process; any
    other call gets the model's choice, with constants measured here. Every timed call is saved at
    once, energies last: a tuning can stop anywhere, and another one adds to it.
    """
    from leanbench.configs.lookup import refusal
    from leanbench.configs.store import OBJECTIVES
    from leanbench.core.syntax import choose as choose_word
    from leanbench.core.syntax import parse_seconds
    from leanbench.gpu.local import choose
    from leanbench.tune.search import Request

    choose_word("objective", objective, OBJECTIVES)
    budget_s = parse_seconds("--budget", budget)
    for name, value in {"--seed": seed, "--problems": problems, "--out": out}.items():
        if value is not None and not check:
            raise OptionWithoutEffect(f"{name} {value}", "--check")
    if problem and calls is not None:
        raise UserError(f"--calls {calls} and a PROBLEM are two sources: leave one out")
    if gpu is not None and not gpu.strip():
        raise UserError("--gpu is empty: name a GPU from `leanbench list gpus`, or leave --gpu out")
    target = choose(gpu, require_gpu=False)
    chosen = _calls(problem, calls, target.spec)
    if problem and (reason := refusal(chosen[0], target.spec)) is not None:
        raise UserError(reason)
    output.say_note(target)
    if objective != "latency" and (check or target.local_index is None):
        raise UserError(
            f"--objective {objective} applies to tuning on a GPU that is here: leave it out"
        )
    if target.local_index is None:
        if gpu is None or check:
            why = target.note or f"there is no {gpu or 'GPU'} here"
            other = "" if check else ", or name one for the model's choices, as in --gpu a100"
            raise UserError(f"{why}: tune on a machine that has one{other}")
        _show_predicted(chosen, target, gpu)
        return
    request = Request(target.spec, target.local_index, objective)
    if check:
        from leanbench.tune.calls import drawn, fills

        if problem or calls:
            _check(request, [fills(call) for call in chosen], problems or len(chosen), out)
            return
        most = problems or _CHECKED
        _check(request, list(islice(drawn(seed or 0), 4 * most)), most, out)
        return
    _tune(request, chosen, budget_s, quiet=quiet)


def _calls(problem: list[str] | None, calls: Path | None, spec: GpuSpec) -> list[AttentionProblem]:
    from leanbench.core.axes import parse_problem
    from leanbench.tune.calls import common, read_calls

    if problem:
        given = [parse_problem(problem)]
    else:
        given = common(spec) if calls is None else read_calls(calls)
    # GPUs that share a call look up the settings of their part.
    return [call if call.parallel == NONE else call.shard(0) for call in given]


def _tune(
    request: Request, calls: Sequence[AttentionProblem], budget_s: float, *, quiet: bool
) -> None:
    from leanbench.cli.progress import TuneProgress
    from leanbench.compile.build import process_pool
    from leanbench.configs.store import check_target, path_for, read, save
    from leanbench.tune.search import Tuning, energies, measured_constants

    check_target(request.spec)
    tuning = Tuning.of(request)
    began_s = time.monotonic()
    stopped = None
    with TuneProgress(quiet=quiet) as progress:
        try:
            with process_pool() as pool:
                stopped = tuning.run(calls, budget_s, pool, progress)
        except KeyboardInterrupt as error:
            progress.stop()
            kept = f"{counted(tuning)} saved in {path_for(request.spec)}, the same command adds"
            output.say(
                f"Stopped: {kept} to them."
                if request.objective == "latency"
                else f"Stopped: nothing was saved, {request.objective} is measured last."
            )
            raise typer.Exit(128 + output.signal_of(error)) from None
        if request.objective != "latency":
            energies(tuning)
    if not tuning.timed:
        why = next(iter(tuning.left_out.values()), "the budget was spent on compiling")
        raise UserError(f"nothing could be timed on {request.spec.product}: {why}")
    everything: dict[str, list[TimedCall]] = {}
    for call in read(path_for(request.spec)).calls()[-_FITTED:]:
        if call.objective == "latency":
            everything.setdefault(call.signature, []).append(call)
    constants, before, after = measured_constants(everything, request.spec)
    path = save(request.spec, [], constants)
    if not quiet:
        _show_tuned(tuning, before, after)
        output.show(f"Stopped after {time.monotonic() - began_s:.0f} s: {stopped}.")
    for call, reason in tuning.left_out.items():
        output.say(f"{call.label} is left out, {reason}.")
    output.say(f"Saved in {path}; used from now on where --config and --configs say nothing else.")


def counted(tuning: Tuning) -> str:
    return output.counted(len(tuning.timed), "signature")


def _show_tuned(tuning: Tuning, before: list[float], after: list[float]) -> None:
    from leanbench.tune.search import gains

    by_shape: dict[str, list[float]] = {}
    for gain in gains(tuning.timed):
        shape = gain.signature.partition(" tiles ")[2].partition(" B")[0] + " B"
        by_shape.setdefault(shape, []).append(gain.ratio)
    table = output.table(f"timed on {tuning.request.spec.product}: gain over the untuned choice")
    table.add_column("calls of", no_wrap=True)
    for name in ("signatures", "mean gain", "most"):
        table.add_column(name, justify="right")
    for shape, ratios in sorted(by_shape.items()):
        mean, most = geometric_mean(ratios) - 1, max(ratios) - 1
        table.add_row(shape, str(len(ratios)), f"{mean:+.1%}", f"{most:+.1%}")
    output.show_table(table)
    output.show(
        "A fill of a cache gets the settings that were best on the other fills of its signature."
    )
    if before:
        output.show(
            f"Calls left out: the model's choice reaches {geometric_mean(before):.1%} of the best"
            f" timed candidate, and {geometric_mean(after):.1%} with constants measured on the"
            " other calls. The better is kept."
        )


def _show_predicted(calls: Sequence[AttentionProblem], target: Target, gpu: str) -> None:
    from leanbench.configs.lookup import refusal, resolve, tuned_kernel

    output.say(
        f"{output.why_predicted(target, gpu)}: predicted by the model of the settings, nothing is"
        " timed or saved."
    )
    first = f", the first {_CHECKED} of {len(calls)} calls" if len(calls) > _CHECKED else ""
    table = output.table(f"predicted for {target.spec.product}: settings without timings{first}")
    table.add_column("call", no_wrap=True)
    table.add_column("settings")
    for call in calls[:_CHECKED]:
        if refusal(call, target.spec) is None:
            config = resolve(tuned_kernel(call), call, target.spec, "heuristic").config
            table.add_row(call.label, settings_words(config))
    output.show_table(table)


def settings_words(config: object) -> str:
    """Return settings as ``tile_tokens=128 num_warps=4 ...``, without those that are off."""
    values = config.to_dict() if hasattr(config, "to_dict") else {}  # pyright: ignore[reportAttributeAccessIssue]
    return " ".join(f"{name}={value}" for name, value in values.items() if value not in (False, 0))


def _check(
    request: Request,
    calls: Sequence[Sequence[AttentionProblem]],
    most: int,
    out: Path | None,
) -> None:
    from leanbench.compile.build import process_pool
    from leanbench.configs.lookup import refusal
    from leanbench.core.errors import OutOfMemory
    from leanbench.tune.check import call_of, check
    from leanbench.tune.search import compile_calls
    from leanbench.tune.stopwatch import GpuStopwatch

    able = [call for call in calls if not any(refusal(fill, request.spec) for fill in call)][:most]
    if out is not None:
        _append(out, "")  # a file that cannot be written is found before anything is timed
    watch = GpuStopwatch(request.index, request.spec)
    checked: list[Checked] = []
    with process_pool() as pool:
        compile_calls(replace(request, candidates=None), map(call_of, able), pool)
    for fills in able:
        try:
            one = check(request, fills, watch)
        except OutOfMemory as error:
            output.say(f"{fills[0].label} is left out: {error}")
            continue
        if one is None:
            output.say(f"{fills[0].label} is left out: a candidate failed")
            continue
        checked.append(one)
        output.say(f"{fills[0].label}: {one.share():.1%} of the best, {one.choice.how}")
        if out is not None:
            _append(out, json.dumps(one.to_dict()) + "\n")
    if not checked:
        raise UserError("no call could be timed: free the GPU's memory, or give other calls")
    _show_checked(checked, request)


def _append(path: Path, text: str) -> None:
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror}): choose another --out") from None


def _show_checked(checked: list[Checked], request: Request) -> None:
    table = output.table(
        f"measured on {request.spec.product}: best candidate's latency over the choice's, worst"
        " first"
    )
    table.add_column("call", no_wrap=True)
    table.add_column("share", justify="right")
    table.add_column("by")
    table.add_column("best settings")
    for one in sorted(checked, key=lambda one: one.share())[:10]:
        table.add_row(
            one.fills[0].label, f"{one.share():.1%}", one.choice.how, settings_words(one.best)
        )
    output.show_table(table)
    for name, shares in (
        ("settings", [one.share() for one in checked]),
        ("the model", [one.share("model") for one in checked]),
        ("settings, to each fill's own best", [one.share_of_fills for one in checked]),
    ):
        near = sum(share >= 0.99 for share in shares)
        output.show(
            f"{name}: {geometric_mean(shares):.1%} of the best in the mean, {min(shares):.1%} at"
            f" worst, {near} of {len(shares)} within 1%"
        )
    errors = sorted(
        abs(one.predicted_us / geometric_mean(one.us["chosen"]) - 1)
        for one in checked
        if one.predicted_us is not None
    )
    if errors:
        output.show(
            f"predicted latency of the choice: median error {median(errors):.1%}, 90th"
            f" percentile {errors[int(0.9 * (len(errors) - 1))]:.1%}"
        )
