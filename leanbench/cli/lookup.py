"""`leanbench lookup`: what was measured for a shape, or for the nearest ones."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any

from leanbench.cli import output
from leanbench.cli.completion import gpu_names
from leanbench.cli.options import argument, option, switch
from leanbench.core.errors import UserError

if TYPE_CHECKING:
    from leanbench.records.published import PublishedRow

#: Axes of which all values are shown unless the shape has one.
_FREE = ("dtype", "kv_layout")
#: Nearest problems, if the shape was not measured.
_NEAREST = 3

Json = Annotated[bool, switch("--json", "Print JSON.")]


def lookup(
    shape: Annotated[list[str], argument("SHAPE", "b8 h32/8 n4k d128, as `leanbench trace`.")],
    gpu: Annotated[
        str | None,
        option("--gpu", "NAME", "This GPU only.", autocompletion=gpu_names),
    ] = None,
    json_: Json = False,
) -> None:
    """Show what was measured for a shape on any GPU: each kernel's latency, interval and run.

    The rows are those of the runs in `reports/`, in any dtype and layout unless SHAPE has one.
    Without any of this shape, the rows of the nearest shapes are shown. Needs no GPU.
    """
    from leanbench.advice.neighbours import nearest
    from leanbench.core.axes import AXES, parse_problem
    from leanbench.core.llm.config import own_name
    from leanbench.core.llm.model import model_named
    from leanbench.records.published import published

    for word in shape:
        if name := own_name(word):
            raise UserError(
                f"{word} is a model: `leanbench recommend {word}` answers for its layers; look up a"
                f" layer by its shape, {model_named(name).main_layer.words} n4k"
            )
    problem = parse_problem(shape)
    only = None if gpu is None else _published_gpu(gpu)
    rows = [row for row in published() if only in (None, row.run.gpu)]
    hashed = {row.problem for row in rows if row.run.kernels}
    # Kernels from before they were hashed are told of only where nothing else was timed.
    rows = [row for row in rows if row.run.kernels or row.problem not in hashed]
    others = list(dict.fromkeys(row.problem for row in rows))
    words = " ".join(shape).split()
    free = [name for name in _FREE if not any(map(AXES[name].values.reads, words))]
    same = {name: getattr(problem, name) for name in free}
    found = [each for each in others if replace(each, **same) == problem]
    is_measured = bool(found)
    shown = found or nearest(problem, filter(hashed.__contains__, others), _NEAREST)
    unnamed = {AXES[name].write(value) for name, value in same.items()}
    asked = " ".join(word for word in problem.label.split() if word not in unnamed)
    if not shown:
        raise UserError(f"nothing like {asked} was measured: leave model= out")
    by_problem = {
        each: sorted((row for row in rows if row.problem == each), key=lambda row: row.latency_us)
        for each in shown
    }
    if json_:
        found = [
            {
                "problem": each.to_dict(),
                "label": each.label,
                "rows": list(map(_fields, by_problem[each])),
            }
            for each in shown
        ]
        # Otherwise these are the nearest shapes.
        answer = {"shape": asked, "is_measured": is_measured, "measured": found}
        output.show_whole(json.dumps(answer, indent=2))
        return
    if not is_measured:
        output.show(f"{asked} was not measured. The nearest measured shapes:")
    for index, each in enumerate(shown):
        if index or not is_measured:
            output.show("")
        output.show("", lead=each.label)
        for name in dict.fromkeys(row.run.gpu for row in by_problem[each]):
            _show(name, [row for row in by_problem[each] if row.run.gpu == name])
    output.show("")
    _show_origins([row for rows in by_problem.values() for row in rows])


def _published_gpu(gpu: str) -> str:
    """Return the catalogue name of a GPU with published rows.

    Raises:
        UserError: The GPU is unknown, or nothing was measured on it.
    """
    from leanbench.gpu.catalogue import find
    from leanbench.records.published import published

    name = find(gpu).name
    known = sorted({row.run.gpu for row in published()})
    if name not in known:
        raise UserError(
            f"nothing was measured on {name}: choose --gpu {' or '.join(known)}, or predict with"
            f" `leanbench sweep --gpu {name}`"
        )
    return name


def _show(gpu: str, rows: list[PublishedRow]) -> None:
    from leanbench.gpu.catalogue import find

    columns = [
        ("µs", [output.four_digits(row.latency_us) for row in rows]),
        ("95% interval", list(map(_interval, rows))),
        ("floor", [_share(row) for row in rows]),
        ("run", [row.run.name + ", old kernels" * (not row.run.kernels) for row in rows]),
    ]
    output.show_columns(find(gpu).product, [("kernel", [row.kernel for row in rows])], columns)


def _interval(row: PublishedRow) -> str:
    ends = "-"
    if row.low_us is not None and row.high_us is not None:
        ends = " to ".join(map(output.four_digits, (row.low_us, row.high_us)))
    return f"{ends}, noisy" if row.is_noisy else ends


def _share(row: PublishedRow) -> str:
    return "-" if row.floor_share is None else f"{row.floor_share:.0%}"


def _show_origins(rows: list[PublishedRow]) -> None:
    """Print the age of each run and the versions of the libraries."""
    output.show("floor: the time of a kernel that only reads K and V, over the latency.")
    by_age: dict[str, list[str]] = {}
    for run in dict.fromkeys(row.run for row in rows):
        kernels = f"kernels {run.kernels}" if run.kernels else "kernels not recorded"
        age = ", older than those here" * (run.kernels != _kernels_here())
        by_age.setdefault(f"{run.day}, {kernels}{age}", []).append(run.name)
    for age, names in by_age.items():
        output.show(f"{', '.join(names)}: {age}")
    versions = {row.kernel: row.library for row in rows if row.library}
    if versions:
        output.show("; ".join(f"{kernel}: {version}" for kernel, version in versions.items()))


@cache
def _kernels_here() -> str:
    from leanbench.records.environment import kernels_hash

    return kernels_hash()


def _fields(row: PublishedRow) -> dict[str, Any]:
    fields = {name: value for name, value in vars(row).items() if name not in ("run", "problem")}
    is_older = row.library is None and row.run.kernels != _kernels_here()
    run = {**vars(row.run), "kernels_are_older": is_older}
    return {**fields, "read_floor_share": row.floor_share, "run": run}
