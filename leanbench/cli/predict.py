"""`leanbench predict`: what predictions rest on, and how wrong they are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from leanbench.cli import output
from leanbench.cli.completion import gpu_names, run_names

if TYPE_CHECKING:
    from leanbench.model.calibrate import CellError
    from leanbench.model.calibration import Errors, InUse, RunErrors
    from leanbench.model.claims import Outcome

predict = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Fit the performance model, hold it against runs, and show what predictions rest on.",
)

_Runs = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN",
        help="Measured runs: paths, or names under runs/.",
        autocompletion=run_names,
    ),
]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _gpu(default: str | bool) -> Any:
    """The option --gpu; `default` is what help says, True for the parameter's."""
    return typer.Option(
        "--gpu",
        metavar="NAME",
        help="A GPU from `leanbench list gpus`.",
        autocompletion=gpu_names,
        show_default=default,
    )


_GpuOfRuns = Annotated[str | None, _gpu("the first run's")]
_GpuHere = Annotated[str | None, _gpu("the GPU that is here, or else a100-80gb")]
_GpuOfPaper = Annotated[str | None, _gpu(True)]

#: Cells that `check` lists.
_WORST = 15


@predict.command("fit", short_help="Fit the model to measured runs of one GPU.")
def fit(
    runs: _Runs,
    check: Annotated[
        list[str] | None,
        typer.Option(
            "--check",
            metavar="RUN",
            help="A run to check with; may be given again.",
            autocompletion=run_names,
        ),
    ] = None,
    gpu: _GpuOfRuns = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FILE", help="Where to write it.", show_default="your own folder"
        ),
    ] = None,
    only_lean_cuda: Annotated[
        bool,
        typer.Option(
            "--only-lean-cuda", help="Fit the constants of lean_cuda, the others stay as they are."
        ),
    ] = False,
    json_: _Json = False,
) -> None:
    """Fit the model to measured runs of one GPU and write the calibration.

    Half of a run's shapes are fitted to, the other half and the runs of --check tell how wrong
    predictions are. From then on `leanbench` predicts this GPU with it.
    """
    from leanbench.model.calibrate import calibrate, read_runs
    from leanbench.model.calibration import to_json, user_file, write_calibration

    measured = read_runs([*runs, *(check or [])], gpu)
    fitted = calibrate(
        measured[: len(runs)],
        measured[len(runs) :],
        on_progress=lambda text: output.say(f"{text}."),
        only_lean_cuda=only_lean_cuda,
    )
    path = out or user_file(fitted.calibration.gpu)
    write_calibration(fitted.calibration, path)
    if json_:
        _show_json(to_json(fitted.calibration))
    else:
        _show_errors(fitted.after, fitted.before)
    used = (
        ""
        if out
        else ": predictions go by it from now on; remove it to go back to the one that ships"
    )
    output.say(f"Wrote {path}{used}.")


@predict.command("check", short_help="Hold predictions against measured runs.")
def check(runs: _Runs, gpu: _GpuOfRuns = None, json_: _Json = False) -> None:
    """Say how far predictions are from measured runs, and which cells are worst."""
    from dataclasses import asdict

    from leanbench.model.calibrate import check_runs, constants_in_use, read_runs
    from leanbench.model.calibration import calibration_for

    measured = read_runs(runs, gpu)
    in_use = calibration_for(measured[0].spec)
    errors, cells = check_runs(measured, constants_in_use(measured[0].spec, in_use))
    if json_:
        worst = [
            {
                "run": error.run,
                "problem": error.cell.problem.to_dict(),
                "kernel": error.cell.kernel,
                "error": error.error,
            }
            for error in cells[:_WORST]
        ]
        _show_json(
            {
                "calibration": str(in_use.path),
                "runs": [asdict(of_run) for of_run in errors],
                "worst": worst,
            }
        )
        return
    _say_source(in_use)
    _show_errors(errors)
    _show_worst(cells)


@predict.command("show", short_help="Print the constants in use for a GPU.")
def show(gpu: _GpuHere = None, json_: _Json = False) -> None:
    """Print the constants in use for a GPU: units, where they come from, how wrong they were."""
    from leanbench.gpu.local import choose
    from leanbench.model.calibration import calibration_for, to_json
    from leanbench.model.constants import declared

    in_use = calibration_for(choose(gpu, False).spec)
    if json_:
        _show_json(
            {"path": str(in_use.path), "gpu_asked": in_use.gpu, **to_json(in_use.calibration)}
        )
        return
    _say_source(in_use)
    table = output.table(f"Constants of {in_use.calibration.gpu}")
    for name in ("constant", "value", "unit", "from", "meaning"):
        table.add_column(
            name, justify="right" if name == "value" else "left", no_wrap=name != "meaning"
        )
    lean_cuda = in_use.constants.lean_cuda
    for of in (in_use.constants, *([] if lean_cuda is None else [lean_cuda])):
        prefix = "" if of is in_use.constants else "lean_cuda "
        for constant in declared(of):
            about, value = constant.metadata, getattr(of, constant.name)
            table.add_row(
                prefix + constant.name,
                f"{value:.5g}",
                about["unit"],
                about["fitted"],
                about["meaning"],
            )
    output.show_table(table)
    _show_errors(in_use.calibration.runs)


@predict.command("claims", short_help="Compare the paper's claims with predictions.")
def claims(gpu: _GpuOfPaper = "a100-80gb", json_: _Json = False) -> None:
    """Compare the LeanAttention paper's claims with what the model predicts."""
    from dataclasses import asdict

    from leanbench.gpu.catalogue import find
    from leanbench.model import short_error
    from leanbench.model.claims import evaluate

    spec = find(gpu or "a100-80gb")
    outcomes = evaluate(spec)
    if json_:
        _show_json(
            [
                {
                    **asdict(outcome.claim),
                    "predicted": asdict(outcome.predicted),
                    "verdict": outcome.claim.verdict(outcome.predicted),
                    "single_stage": outcome.single_stage and asdict(outcome.single_stage),
                }
                for outcome in outcomes
            ]
        )
        return
    output.say(f"Predicted for {spec.product}, nothing was measured. {short_error(spec.name)}")
    _show_claims(outcomes)


def _show_json(content: Any) -> None:
    import json

    output.show(json.dumps(content, indent=1))


def _say_source(in_use: InUse) -> None:
    from leanbench.model import short_error

    calibration = in_use.calibration
    output.say(f"{in_use.path}: leanbench {calibration.leanbench}, {calibration.created}.")
    output.say(short_error(in_use.gpu))


def _show_errors(runs: Sequence[RunErrors], before: Sequence[RunErrors] = ()) -> None:
    """A row for each run and kernel: with two tables of errors, the earlier ones first."""
    table = output.table("Predicted over measured: median, 90th percentile and worst error")
    moments = ("before", "after") if before else ("error",)
    for name in ("run", "rows are", "of", "kernel", "rows", *moments, "order of kernels"):
        table.add_column(
            name, justify="right" if name in ("rows", *moments) else "left", no_wrap=True
        )
    for index, run in enumerate(runs):
        order = f"{run.pairs_right} of {run.pairs} right" if run.pairs else ""
        earlier = before[index] if before else None
        for kernel, errors in (("all", run.all), *run.by_kernel.items()):
            is_first = kernel == "all"
            was = (
                []
                if earlier is None
                else [_words(earlier.all if is_first else earlier.by_kernel[kernel])]
            )
            head = (run.run, run.role, run.quantity) if is_first else ("", "", "")
            table.add_row(
                *head, kernel, str(errors.rows), *was, _words(errors), order if is_first else ""
            )
    output.show_table(table)


def _words(errors: Errors) -> str:
    return f"{errors.median:.1%} {errors.p90:.1%} {errors.worst:.1%}"


def _show_worst(cells: Sequence[CellError]) -> None:
    table = output.table("Worst cells")
    for name in ("run", "problem", "kernel", "measured µs", "predicted µs", "error"):
        table.add_column(
            name, justify="right" if name.endswith(("µs", "error")) else "left", no_wrap=True
        )
    for worst in cells[:_WORST]:
        measured_us = worst.cell.latency_us
        predicted_us = measured_us * (1 + worst.error)
        label = worst.cell.problem.label
        table.add_row(
            worst.run,
            label,
            worst.cell.kernel,
            f"{measured_us:.4g}",
            f"{predicted_us:.4g}",
            f"{worst.error:+.1%}",
        )
    output.show_table(table)


def _show_claims(outcomes: Sequence[Outcome]) -> None:
    table = output.table("The paper's claims, and with a single-stage fa2")
    columns = ("figure", "claim", "paper", "predicted", "verdict", "single-stage fa2", "verdict")
    for name in columns:
        is_number = name in ("paper", "predicted", "single-stage fa2")
        table.add_column(
            name, justify="right" if is_number else "left", no_wrap=name not in ("claim", "verdict")
        )
    for outcome in outcomes:
        claim, figures = outcome.claim, [outcome.predicted, outcome.single_stage]
        cells = [
            cell
            for figure in figures
            for cell in (
                ("", "") if figure is None else (claim.words_of(figure), claim.verdict(figure))
            )
        ]
        table.add_row(claim.figure, claim.words, claim.paper_words, *cells)
    output.show_table(table)
