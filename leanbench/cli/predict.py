"""`leanbench predict`: what predictions rest on, and how wrong they are."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from leanbench.cli import output
from leanbench.cli.completion import gpu_names, run_names
from leanbench.cli.help import Commands
from leanbench.cli.options import argument, option, switch
from leanbench.core.errors import UserError

if TYPE_CHECKING:
    from leanbench.core.gpu_spec import GpuSpec
    from leanbench.model.calibrate import CellError
    from leanbench.model.calibration import Errors, InUse, RunErrors
    from leanbench.paper.predicted import Outcome

predict = Commands(
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Fit the performance model, compare it with runs, and show what predictions rest on.",
)

_Runs = Annotated[
    list[str],
    argument("RUN", "Measured runs: paths, or names under runs/.", autocompletion=run_names),
]
_Json = Annotated[bool, switch("--json", "Print JSON.")]


def _gpu(default: str | bool) -> Any:
    """Return the option --gpu. `default` is its default in the help, True for the parameter's."""
    return typer.Option(
        "--gpu",
        metavar="NAME",
        help="A GPU from `leanbench list gpus`.",
        autocompletion=gpu_names,
        show_default=default,
    )


_GpuOfRuns = Annotated[str | None, _gpu("the first run's")]
_GpuNamed = Annotated[str | None, argument("GPU", "The same as --gpu.", autocompletion=gpu_names)]
_GpuHere = Annotated[str | None, _gpu("the GPU that is here, or else h200")]
_GpuOfPaper = Annotated[str | None, _gpu(True)]

#: Cells that `check` lists.
_WORST = 15
#: Legends of the tables.
_ABOUT_CONSTANTS = (
    "from: the figures that a fit takes the value from; held: a fit leaves it as it is, as no run"
    " tells it apart from the others. lean_cuda: of the kernels in CUDA C++."
)
_ABOUT_ERRORS = (
    "Of rows that are ok, with a cold L2, of kernels that the model knows. fitted: constants were"
    " chosen on these rows, checked: they were not. order of kernels: of pairs on one problem that"
    " were measured more than {} apart, those whose faster kernel is predicted to be the faster."
)


@predict.command("fit", short_help="Fit the model to measured runs of one GPU.")
def fit(
    runs: _Runs,
    check: Annotated[
        list[str] | None,
        option(
            "--check", "RUN", "A run to check with; may be given again.", autocompletion=run_names
        ),
    ] = None,
    gpu: _GpuOfRuns = None,
    out: Annotated[
        Path | None, option("--out", "FILE", "Where to write it.", show_default="your own folder")
    ] = None,
    only_lean_cuda: Annotated[
        bool,
        switch("--only-lean-cuda", "Fit the constants of lean_cuda, the others stay as they are."),
    ] = False,
    json_: _Json = False,
) -> None:
    """Fit the model to measured runs of one GPU and write the calibration.

    Of a run of 40 rows or more, the model is fitted to half of the shapes; the other half and the
    runs of --check say how wrong predictions are. From then on `leanbench` predicts this GPU with
    it.
    """
    from leanbench.model.calibrate import calibrate, read_runs
    from leanbench.model.calibration import (
        refuse_to_overwrite,
        to_json,
        user_file,
        write_calibration,
    )

    measured = read_runs([*runs, *(check or [])], gpu)
    path = out or user_file(measured[0].spec.name)
    # Check before minutes of fitting.
    refuse_to_overwrite(path)
    fitted = calibrate(
        measured[: len(runs)],
        measured[len(runs) :],
        on_progress=lambda text: output.say(f"{text}."),
        only_lean_cuda=only_lean_cuda,
    )
    write_calibration(fitted.calibration, path)
    if json_:
        _show_json(to_json(fitted.calibration))
    else:
        _show_errors(fitted.calibration.gpu, fitted.after, fitted.before)
    used = (
        ""
        if out
        else ": predictions go by it from now on; remove it to go back to the one that ships"
    )
    output.say(f"Wrote {path}{used}.")


@predict.command("check", short_help="Compare predictions with measured runs.")
def check(runs: _Runs, gpu: _GpuOfRuns = None, json_: _Json = False) -> None:
    """Print how far predictions are from measured runs, and the worst cells."""
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
    _print_source(in_use, measured[0].spec, {cell.cell.kernel: None for cell in cells})
    _show_errors(measured[0].spec.name, errors)
    _show_worst(cells)


@predict.command("show", short_help="Print the constants in use for a GPU.")
def show(name: _GpuNamed = None, gpu: _GpuHere = None, json_: _Json = False) -> None:
    """Print the constants in use for a GPU: units, where they come from, how wrong they were.

    A GPU without a calibration of its own uses another's: the lines above the table say whose, and
    how they are scaled.
    """
    from leanbench.gpu.local import choose
    from leanbench.model.calibration import calibration_for, to_json
    from leanbench.model.constants import declared

    if name is not None and gpu is not None:
        raise UserError(f"{name} and --gpu {gpu} both name the GPU: leave one of them out")
    spec = choose(name or gpu, False).spec
    in_use = calibration_for(spec)
    if json_:
        _show_json(
            {"path": str(in_use.path), "gpu_asked": in_use.gpu, **to_json(in_use.calibration)}
        )
        return
    _print_source(in_use, spec)
    table = output.table(f"Constants of {_whose(in_use, spec)}")
    table.add_column("constant, and its meaning")
    table.add_column("value", justify="right", no_wrap=True)
    for name in ("unit", "from"):
        table.add_column(name, no_wrap=True)
    lean_cuda = in_use.constants.lean_cuda
    for of in (in_use.constants, *([] if lean_cuda is None else [lean_cuda])):
        prefix = "" if of is in_use.constants else "lean_cuda "
        for constant in declared(of):
            about, value = constant.metadata, getattr(of, constant.name)
            table.add_row(
                f"{prefix}{constant.name}\n{about['meaning']}",
                f"{value:.5g}",
                about["unit"],
                about["fitted"],
            )
    output.show_table(table)
    output.show(f"{_ABOUT_CONSTANTS}\n")
    _show_errors(in_use.calibration.gpu, in_use.calibration.runs)


@predict.command("claims", short_help="Compare the paper's claims with predictions.")
def claims(gpu: _GpuOfPaper = "a100-80gb", json_: _Json = False) -> None:
    """Compare the LeanAttention paper's claims with what the model predicts."""
    from dataclasses import asdict

    from leanbench.gpu.catalogue import find
    from leanbench.model import short_error
    from leanbench.paper.predicted import evaluate

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

    output.show_whole(json.dumps(content, indent=1))


def _print_source(in_use: InUse, spec: GpuSpec, kernels: Iterable[str] = ()) -> None:
    """Print the origin of the constants and their errors.

    Args:
        kernels: Kernels to print errors of; empty for all that were compared.
    """
    from leanbench.gpu.catalogue import find
    from leanbench.model import short_error

    calibration = in_use.calibration
    output.say(
        f"Constants of {find(calibration.gpu).product}, fitted by leanbench {calibration.leanbench}"
        f" on {calibration.created[:10]}: {in_use.path}."
    )
    if in_use.is_scaled:
        output.say(
            f"None were fitted to {spec.product}: for it, shares and times stay as they are, rates"
            " go by its own bandwidth, clock and SMs, idle power by its power limit."
        )
    output.say(short_error(in_use.gpu, kernels))


def _whose(in_use: InUse, spec: GpuSpec) -> str:
    from leanbench.gpu.catalogue import find

    own = find(in_use.calibration.gpu).product
    return f"{own}, used for {spec.product}" if in_use.is_scaled else own


def _show_errors(gpu: str, runs: Sequence[RunErrors], before: Sequence[RunErrors] = ()) -> None:
    """Print a row for each run and kernel.

    Args:
        gpu: Catalogue name of the GPU that the runs were measured on.
        before: Errors before the fit.
    """
    from leanbench.gpu.catalogue import find
    from leanbench.model.measured import ORDER_MARGIN

    title = f"How far predictions are from rows measured on {find(gpu).product}"
    title += ": median, 90th percentile and worst" if before else ""
    moments = ("before", "after") if before else ("median", "90th percentile", "worst")
    rows = []
    for index, run in enumerate(runs):
        order = f"{run.pairs_right} of {run.pairs} right" if run.pairs else ""
        earlier = before[index] if before else None
        for kernel, errors in (("all", run.all), *run.by_kernel.items()):
            is_first = kernel == "all"
            figures = _figures(errors)
            if earlier is not None:
                was = earlier.all if is_first else earlier.by_kernel[kernel]
                figures = [" ".join(_figures(was)), " ".join(figures)]
            head = (run.run if is_first else "", kernel)
            about = (run.role, run.quantity, order) if is_first else ("", "", "")
            rows.append((*head, str(errors.rows), *figures, *about))
    names = ("run", "kernel", "rows", *moments, "rows are", "of", "order of kernels")
    output.show_rows(title, names, rows, labels=2)
    output.show(_ABOUT_ERRORS.format(f"{ORDER_MARGIN:.0%}"))


def _figures(errors: Errors) -> list[str]:
    return [f"{share:.1%}" for share in (errors.median, errors.p90, errors.worst)]


def _show_worst(cells: Sequence[CellError]) -> None:
    listed = min(_WORST, len(cells))
    output.show("")
    rows = [
        (
            worst.cell.problem.label,
            worst.cell.kernel,
            output.four_digits(worst.cell.latency_us),
            output.four_digits(worst.cell.latency_us * (1 + worst.error)),
            f"{worst.error:+.1%}",
            worst.run,
        )
        for worst in cells[:_WORST]
    ]
    title = f"The worst {listed} of {output.counted(len(cells), 'cell')}"
    names = ("problem", "kernel", "measured µs", "predicted µs", "error", "run")
    output.show_rows(title, names, rows, labels=2)


def _show_claims(outcomes: Sequence[Outcome]) -> None:
    rows = []
    for outcome in outcomes:
        claim, figures = outcome.claim, [outcome.predicted, outcome.single_stage]
        cells = [
            cell
            for figure in figures
            for cell in (
                ("", "") if figure is None else (claim.words_of(figure), claim.verdict(figure))
            )
        ]
        rows.append((claim.figure, textwrap.fill(claim.words, 30), claim.paper_words, *cells))
    names = ("figure", "claim", "paper", "predicted", "verdict", "single-stage fa2", "verdict")
    output.show_rows("The paper's claims, and with a single-stage fa2", names, rows, labels=2)
