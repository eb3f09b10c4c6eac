"""`leanbench tune`: find the best launch settings for a GPU, and keep them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from leanbench.cli import output
from leanbench.cli.completion import gpu_names
from leanbench.cli.options import Quiet, RequireGpu
from leanbench.core.axes import AXES
from leanbench.core.errors import UserError
from leanbench.report.document import without_shared

if TYPE_CHECKING:
    from leanbench.configs.space import FamilyKey
    from leanbench.configs.tuned import Family
    from leanbench.gpu.local import Target
    from leanbench.tune.plan import Plan
    from leanbench.tune.result import Summary
    from leanbench.tune.run import Request, Tuned

#: The budget on a GPU where none is given, besides compiling.
_MEASURED_S = 60.0
_OBJECTIVES = ("latency", "energy", "edp")
#: LeanTiles in tokens that the LeanAttention paper found on an A100, fp16 (arXiv 2405.10480).
_PAPER_TILES = {64: 256, 128: 128}


def tune(
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu",
            metavar="NAME",
            help="A GPU to tune on, or to predict for if it is not here; needed where none is.",
            autocompletion=gpu_names,
        ),
    ] = None,
    head_dim: Annotated[
        str, typer.Option("--head-dim", metavar="LIST", help=AXES["head_dim"].help)
    ] = "64,128",
    group: Annotated[
        str, typer.Option("--group", metavar="LIST", help="Query heads per KV head; 1 is MHA.")
    ] = "1,4,8",
    dtype: Annotated[
        str, typer.Option("--dtype", metavar="LIST", help=AXES["dtype"].help)
    ] = "fp16",
    kv_layout: Annotated[
        str, typer.Option("--kv-layout", metavar="LIST", help=AXES["kv_layout"].help)
    ] = "HND",
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget",
            metavar="TIME",
            help="Time limit once all is compiled: 90s, 10m. Default: 60s on a GPU, none for"
            " predictions.",
        ),
    ] = None,
    exhaustive: Annotated[
        bool,
        typer.Option(
            "--exhaustive", help="Time every candidate, on more problems; no budget unless given."
        ),
    ] = False,
    objective: Annotated[
        str, typer.Option("--objective", metavar="latency|energy|edp", help="What to minimise.")
    ] = "latency",
    require_gpu: RequireGpu = False,
    keep: Annotated[
        bool, typer.Option("--keep/--no-keep", help="Write what was found to the tuned configs.")
    ] = True,
    quiet: Quiet = False,
) -> None:
    """Find the fastest LeanTile, warps, stages and grid of LeanAttention for a GPU, and keep them.

    Calls whose lengths the host knows use them; in CUDA C++, only for problems that were timed.
    All other calls, such as those with lengths in a tensor, take the heuristic's settings.

    Candidates are compiled for the GPU, pruned by the registers and shared memory that they need,
    timed in turn over problems of all sizes, and carried to other problems by a formula fitted to
    the timings. After an interruption, the same command resumes. For a --gpu that is not here, the
    performance model predicts the timings.
    """
    import time

    began_s = time.monotonic()
    if quiet and not keep:
        raise UserError(
            "--no-keep and --quiet together leave nothing of a tuning: leave --no-keep out to keep"
            " what is found, or --quiet to see it"
        )
    families = _families(head_dim, group, dtype, kv_layout)
    if gpu is not None and not gpu.strip():
        raise UserError("--gpu is empty: name a GPU from `leanbench list gpus`, or leave --gpu out")
    from leanbench.gpu.local import choose
    from leanbench.tune.run import check_budget, forget

    request = _request(choose(gpu, require_gpu), families, (budget, exhaustive), objective)
    target = request.target
    if gpu is None and target.local_index is None:
        raise UserError(
            f"{target.note or 'there is no GPU here'}: tune on a machine that has one, or name one"
            " to predict for, as in --gpu a100 (`leanbench list gpus`)"
        )
    # Before anything says that something is predicted.
    check_budget(request)
    if keep:
        from leanbench.configs.store import check_target

        check_target(target.spec)
    if gpu is not None and target.local_index is None:
        _say_predicted(target, gpu, request.kernel.name)
    output.say_note(target)

    tuned = _tune(request, quiet=quiet)

    if not quiet:
        _show(tuned.families, target, time.monotonic() - began_s)
    for family, reason in tuned.left_out.items():
        output.say(f"{family.label} is left out, {reason}.")
    if keep:
        _save(request, tuned.families)
    forget(request)


def _tune(request: Request, *, quiet: bool) -> Tuned:
    """Tune with a progress bar.

    Raises:
        typer.Exit: the command was interrupted.
    """
    from leanbench.cli.progress import TuneProgress
    from leanbench.tune.run import tune

    predicted = request.plan.predicted
    with TuneProgress(predicted=predicted, quiet=quiet) as progress:
        try:
            return tune(request, progress)
        except KeyboardInterrupt as error:
            progress.stop()
            output.say(
                "Stopped: nothing was saved but what was compiled, the same command takes less"
                " time."
                if predicted
                else f"Stopped: {progress.done} problems are noted, the same command goes on"
                " from there."
            )
            raise typer.Exit(128 + output.signal_of(error)) from None


def _save(request: Request, results: list[tuple[Summary, Family]]) -> None:
    from leanbench.configs.store import save_families

    saved = save_families(request.target.spec, [family for _, family in results])
    output.say(f"Saved in {saved.path}; {_who_uses_it(request)}.")
    for family in saved.refused:
        output.say(
            f"Measured entries are there for head_dim {family.head_dim}, group size"
            f" {family.group_size}, {family.dtype} {family.kv_layout}: the predicted ones were"
            " not saved."
        )


def _who_uses_it(request: Request) -> str:
    if request.objective != "latency":
        return f"`leanbench sweep --configs {request.objective}` uses it"
    if request.target.local_index is None:
        return f"used on {request.target.spec.product} where nothing that was measured fits"
    return "used from now on where --config and --configs say nothing else"


def _families(head_dim: str, group: str, dtype: str, kv_layout: str) -> Sequence[FamilyKey]:
    from leanbench.configs.space import default_families
    from leanbench.core.problem import AttentionProblem
    from leanbench.core.registry import kernel
    from leanbench.core.syntax import parse_numbers

    groups = parse_numbers("group", group)
    if max(groups) > 64:
        raise UserError(
            f"--group {max(groups)} is above 64: an output tile holds at most 64 query rows"
        )
    head_dims = AXES["head_dim"].parse(head_dim)
    for size in head_dims:
        reason = kernel("lean").unsupported_reason(AttentionProblem(1, 1, 1, 1, size))
        if reason is not None:
            raise UserError(reason)
    return default_families(
        head_dims,
        groups,
        AXES["dtype"].parse(dtype),
        AXES["kv_layout"].parse(kv_layout),
    )


def _request(
    target: Target, families: Sequence[FamilyKey], effort: tuple[str | None, bool], objective: str
) -> Request:
    from leanbench.core.registry import kernel
    from leanbench.core.syntax import choose
    from leanbench.tune.run import Request

    plan = _plan(*effort, predicted=target.local_index is None)
    aim: Any = choose("objective", objective, _OBJECTIVES)
    return Request(kernel("lean"), families, target, plan, aim)


def _plan(budget: str | None, exhaustive: bool, *, predicted: bool) -> Plan:
    from leanbench.core.syntax import parse_seconds
    from leanbench.tune.plan import EXHAUSTIVE_PROBLEMS, PREDICTED_PROBLEMS, PROBLEMS, Plan

    if budget is not None:
        budget_s = parse_seconds("--budget", budget)
    elif exhaustive:
        budget_s = float("inf")
    else:
        # Without a GPU the work is bounded, and a slow machine compiles slowly.
        budget_s = float("inf") if predicted else _MEASURED_S
    problems = EXHAUSTIVE_PROBLEMS if exhaustive else PREDICTED_PROBLEMS if predicted else PROBLEMS
    return Plan(budget_s, problems, every_candidate=exhaustive or predicted, predicted=predicted)


def _say_predicted(target: Target, gpu: str, kernel: str) -> None:
    from leanbench.model import short_error

    why = output.why_predicted(target, gpu)
    source = (
        f"{why}: predicted by the performance model of {target.spec.product}, nothing is timed."
    )
    output.say(f"{source} {short_error(target.spec.name, [kernel])}")


def _show(results: list[tuple[Summary, Family]], target: Target, took_s: float) -> None:
    predicted = target.local_index is None
    title = f"{'predicted for' if predicted else 'measured on'} {target.spec.product}"
    _show_table([summary for summary, _ in results], title, predicted=predicted)
    _show_notes(results, took_s, predicted=predicted)


def _show_table(summaries: list[Summary], title: str, *, predicted: bool) -> None:
    shared, families = without_shared([summary.family.label for summary in summaries])
    columns: list[output.Column] = [
        ("problems", [str(summary.problems) for summary in summaries]),
        ("predicted" if predicted else "timed", [str(summary.timed) for summary in summaries]),
        ("left\nout", [str(summary.left_out) for summary in summaries]),
        ("listed", [str(len(summary.shortlist)) for summary in summaries]),
        ("ties", [f"{summary.ties:.1f}" for summary in summaries]),
        ("mean\ngain", [f"{summary.gain - 1:+.1%}" for summary in summaries]),
        ("most\ngain", [f"{summary.most_gain - 1:+.1%}" for summary in summaries]),
        (
            "held\nout",
            [
                "-" if summary.held_out is None else f"{summary.held_out:.1%}"
                for summary in summaries
            ],
        ),
        ("chosen LeanTile\n(problems)", [_two_a_line(_chosen(summary)) for summary in summaries]),
    ]
    output.show_columns(
        f"{title}{f', all {shared}' if shared else ''}", [("family", families)], columns
    )


def _chosen(summary: Summary) -> list[str]:
    """Triton's LeanTiles and CUDA C++, each with how often it was chosen."""
    tiles = [f"{tokens} ({times})" for tokens, times in summary.tile_tokens.items()]
    return [*tiles, f"CUDA ({summary.cuda})"] if summary.cuda else tiles


def _two_a_line(words: list[str]) -> str:
    return ",\n".join(", ".join(words[at : at + 2]) for at in range(0, len(words), 2))


def _show_notes(results: list[tuple[Summary, Family]], took_s: float, *, predicted: bool) -> None:
    from leanbench.tune.result import geometric_mean

    done = "predicted" if predicted else "timed"
    summaries = [summary for summary, _ in results]
    gain = geometric_mean([summary.gain for summary in summaries]) - 1
    costs = {
        "latency": "takes {} longer",
        "energy": "takes {} more energy",
        "edp": "has {} more energy x latency",
    }
    words = costs[results[0][1].objective].format(f"{gain:.1%}")
    output.show(
        f"\n{done}, left out: candidates, the latter ruled out by what they take; listed:"
        " candidates that other problems choose from; ties: candidates as fast as the fastest of a"
        " problem; gain: of the chosen over the heuristic's; held out: the chosen one's speed over"
        " the best on problems left out of the fit; LeanTile in tokens."
    )
    output.show(
        f"{'By prediction, the' if predicted else 'The'} heuristic {words} than what was chosen"
        f" (geometric mean over {done} problems)."
    )
    held = [summary for summary in summaries if summary.held_out is not None]
    if held:
        mean = geometric_mean([summary.held_out or 1.0 for summary in held])
        worst = min(summary.worst_held_out or 1.0 for summary in held)
        output.show(
            f"On problems left out of the fit, what is chosen reaches {mean:.1%} of the best"
            f" {done} there (worst {worst:.1%})."
        )
    errors = [summary.median_error for summary in summaries]
    fitted = sum(summary.fitted for summary in summaries)
    able = sum(summary.able for summary in summaries)
    knows = f"knows {fitted} of {able} builds and whose median error is {_range(errors)}"
    if predicted:
        output.show(f"They are carried to other problems by a formula that {knows}.")
    else:
        untried = geometric_mean([summary.untried for summary in summaries])
        output.show(
            f"The best of those that were not timed would be {1 - untried:.1%} faster in the mean,"
            f" by the formula, which {knows}."
        )
    _show_spills(summaries, predicted=predicted)
    output.show(f"Stopped after {took_s:.0f} s: {results[0][1].stopped}.")
    _show_lean_tiles(summaries)


def _show_spills(summaries: list[Summary], *, predicted: bool) -> None:
    """Print which families' chosen settings spill registers."""
    spilling = [
        f"{summary.family.label} on {len(summary.spilled)} of {summary.problems} problems"
        f" (up to {max(summary.spilled)} of a thread)"
        for summary in summaries
        if summary.spilled
    ]
    if spilling:
        cost = ", whose cost is a rough estimate" if predicted else ""
        output.show(f"Chosen settings spill registers{cost}: {'; '.join(spilling)}.")


def _range(shares: Sequence[float]) -> str:
    """``1.2% to 2.8%``, or ``2.8%`` where both ends read the same."""
    return " to ".join(dict.fromkeys(f"{end(shares):.1%}" for end in (min, max)))


def _show_lean_tiles(summaries: list[Summary]) -> None:
    """LeanTile that is best on most problems of each head_dim, next to the paper's."""
    for head_dim, paper in _PAPER_TILES.items():
        tiles: dict[int, int] = {}
        for summary in summaries:
            if summary.family.head_dim == head_dim:
                for tokens, times in summary.tile_tokens.items():
                    tiles[tokens] = tiles.get(tokens, 0) + times
        if tiles:
            most = max(tiles, key=tiles.__getitem__)
            share = tiles[most] / sum(tiles.values())
            which = "where Triton is chosen " if any(summary.cuda for summary in summaries) else ""
            output.show(
                f"LeanTile for head_dim {head_dim}: {most} tokens on {share:.0%} of the problems"
                f" {which}(the LeanAttention paper names {paper} for an A100)."
            )
