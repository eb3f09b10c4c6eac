"""`leanbench configs validate`: hold the look-up against every candidate, on problems that were not
tuned, or that a sweep draws.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from leanbench.cli import output
from leanbench.core.errors import UserError
from leanbench.core.syntax import MAX_SEED

if TYPE_CHECKING:
    from leanbench.core.gpu_spec import GpuSpec
    from leanbench.core.kernel import Kernel
    from leanbench.core.problem import AttentionProblem
    from leanbench.gpu.local import Target
    from leanbench.run.draw import Draw
    from leanbench.tune.stopwatch import GpuStopwatch
    from leanbench.tune.validate import Unseen


def validate(
    gpu: Annotated[
        str | None, typer.Option("--gpu", metavar="NAME", help="Which of the GPUs that are here.")
    ] = None,
    problems: Annotated[
        int,
        typer.Option(
            "--problems",
            metavar="N",
            min=1,
            max=100,
            help="Problems of each family, or of the sweep.",
        ),
    ] = 7,
    sweep: Annotated[
        str | None,
        typer.Option(
            "--sweep",
            metavar="FILE",
            help="Take problems that this sweep draws (serving), of whatever family.",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed", metavar="N", min=0, max=MAX_SEED, help="Seed of the sweep's problems."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Also write what was timed, as JSON lines."),
    ] = None,
) -> None:
    """Time every candidate on problems that were not tuned, and say how near the looked-up config
    comes to the best.

    Families are those that are tuned, yours or shipped, for the GPU that is here; a problem takes
    about half a second. A sweep's problems, which may be of any family, are compiled first.
    """
    from leanbench.core.registry import kernel
    from leanbench.gpu.local import choose
    from leanbench.tune.stopwatch import GpuStopwatch
    from leanbench.tune.validate import validate as run

    draw = _draw(sweep, seed)
    target = choose(gpu, require_gpu=False)
    if target.local_index is None:
        why = target.note or f"there is no {gpu or 'GPU'} here"
        raise UserError(f"{why}, and configs validate times kernels: run it where the GPU is")
    output.say_note(target)
    lean = kernel("lean")
    watch = GpuStopwatch(lean, target.local_index, target.spec)
    problems_timed: list[Unseen] = []
    chosen = (
        _of_families(target.spec, problems, watch)
        if draw is None
        else _compiled(draw, problems, lean, target.spec, watch)
    )
    for problem in chosen:
        unseen = run(lean, problem, target.spec, watch)
        problems_timed.append(unseen)
        output.say(
            f"{problem.label}: {unseen.share:.1%} of the best of {unseen.candidates},"
            f" {unseen.choice.how}"
        )
    _show(problems_timed, target)
    if out is not None:
        _write(out, problems_timed)


def _draw(sweep: str | None, seed: int | None) -> Draw | None:
    """The problems of a sweep, as many as can be drawn."""
    from leanbench.run.draw import MOST_PROBLEMS
    from leanbench.run.sweep_file import load_sweep

    if sweep is None:
        if seed is not None:
            raise UserError(
                f"--seed {seed} is of the problems that a sweep draws: give --sweep serving too, or"
                " leave --seed out"
            )
        return None
    draw = load_sweep(sweep).draw
    if draw is None:
        raise UserError(
            f"--sweep {sweep} draws no problems: name one with a [draw] table, such as serving"
        )
    return replace(draw, count=MOST_PROBLEMS, seed=draw.seed if seed is None else seed)


def _compiled(
    draw: Draw, count: int, lean: Kernel, spec: GpuSpec, watch: GpuStopwatch
) -> list[AttentionProblem]:
    """The first problems of a draw that fit, with their builds compiled.

    Raises:
        UserError: none fits.
    """
    from leanbench.compile.build import process_pool
    from leanbench.tune.validate import compile_launches, fitting

    drawn = fitting(draw.problems(), lean, count, watch.room_bytes)
    if not drawn:
        raise UserError(
            f"none of {draw.count} drawn problems fits into {watch.room_bytes / 1e9:.0f} GB, half"
            " of the GPU's free memory: free some, or draw smaller capacities or batches"
        )
    with process_pool() as pool:
        compile_launches(lean, drawn, spec, pool)
    return drawn


def _of_families(spec: GpuSpec, count: int, watch: GpuStopwatch) -> Iterator[AttentionProblem]:
    """Problems of each tuned family.

    Raises:
        UserError: nothing is tuned.
    """
    from leanbench.configs.store import tuned_for
    from leanbench.tune.validate import unseen_problems

    files = tuned_for(spec)
    families = {family.key: family for file in reversed(files) for family in file.tuned.families}
    tuned = [family for family in families.values() if family.objective == "latency"]
    if not tuned:
        raise UserError(f"nothing is tuned for {spec.product}: run `leanbench tune` first")
    for family in tuned:
        yield from unseen_problems(family, spec, count, watch.most_bytes)


def _show(problems_timed: list[Unseen], target: Target) -> None:
    from leanbench.tune.result import geometric_mean

    table = output.table(
        f"measured on {target.spec.product}: latency of the best candidate over that of the choice"
    )
    for name in ("chosen by", "geometric mean", "worst", "worst problem", "within 1%"):
        table.add_column(
            name,
            justify="left" if name in ("chosen by", "worst problem") else "right",
            no_wrap=True,
        )
    for name, shares in (
        ("look-up", [unseen.share for unseen in problems_timed]),
        ("heuristic", [unseen.heuristic_share for unseen in problems_timed]),
    ):
        worst = min(range(len(problems_timed)), key=shares.__getitem__)
        near = sum(share >= 0.99 for share in shares)
        label = problems_timed[worst].problem.label
        table.add_row(
            name,
            f"{geometric_mean(shares):.1%}",
            f"{shares[worst]:.1%}",
            label,
            f"{near} of {len(problems_timed)}",
        )
    output.show_table(table)


def _write(path: Path, problems_timed: list[Unseen]) -> None:
    try:
        path.write_text(
            "".join(json.dumps(unseen.to_dict()) + "\n" for unseen in problems_timed),
            encoding="utf-8",
        )
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror}): choose another --out") from None
