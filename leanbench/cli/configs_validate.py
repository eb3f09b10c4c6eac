"""`leanbench configs validate`: hold the look-up against every candidate, on problems that were not
tuned.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from leanbench.cli import output
from leanbench.core.errors import UserError

if TYPE_CHECKING:
    from leanbench.gpu.local import Target
    from leanbench.tune.validate import Unseen


def validate(
    gpu: Annotated[
        str | None, typer.Option("--gpu", metavar="NAME", help="Which of the GPUs that are here.")
    ] = None,
    problems: Annotated[
        int,
        typer.Option("--problems", metavar="N", min=1, max=100, help="Problems of each family."),
    ] = 7,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Also write what was timed, as JSON lines."),
    ] = None,
) -> None:
    """Time every candidate on problems that were not tuned, and say how near the looked-up config
    comes to the best.

    Families are those that are tuned, yours or shipped, for the GPU that is here; a problem takes
    about half a second.
    """
    from leanbench.configs.store import tuned_for
    from leanbench.core.registry import kernel
    from leanbench.gpu.local import choose
    from leanbench.tune.stopwatch import GpuStopwatch
    from leanbench.tune.validate import unseen_problems
    from leanbench.tune.validate import validate as run

    target = choose(gpu, require_gpu=False)
    if target.local_index is None:
        why = target.note or f"there is no {gpu or 'GPU'} here"
        raise UserError(f"{why}, and configs validate times kernels: run it where the GPU is")
    output.say_note(target)
    files = tuned_for(target.spec)
    families = {family.key: family for file in reversed(files) for family in file.tuned.families}
    tuned = [family for family in families.values() if family.objective == "latency"]
    if not tuned:
        raise UserError(f"nothing is tuned for {target.spec.product}: run `leanbench tune` first")
    lean = kernel(files[0].tuned.kernel)
    watch = GpuStopwatch(lean, target.local_index, target.spec)
    problems_timed: list[Unseen] = []
    for family in tuned:
        for problem in unseen_problems(family, target.spec, problems, watch.most_bytes):
            unseen = run(lean, problem, target.spec, watch)
            problems_timed.append(unseen)
            output.say(
                f"{problem.label}: {unseen.share:.1%} of the best of {unseen.candidates},"
                f" {unseen.choice.how}"
            )
    _show(problems_timed, target)
    if out is not None:
        _write(out, problems_timed)


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
