"""`leanbench configs`: look at timed launch settings, explain a call's, and carry them from machine
to machine.
"""

from __future__ import annotations

import contextlib
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from leanbench.cli import output
from leanbench.cli.help import Commands
from leanbench.cli.options import Gpu, argument
from leanbench.core.errors import UserError

if TYPE_CHECKING:
    from leanbench.configs.store import File, TimedCall
    from leanbench.core.gpu_spec import GpuSpec

configs = Commands(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="List, show, explain and move the launch settings that were timed on GPUs.",
)

Name = Annotated[str, argument("GPU", "A name from `leanbench configs list`.")]
#: Candidates that `explain` prints.
_EXPLAINED = 12


@configs.command("list", short_help="List the files there are.")
def list_() -> None:
    """List the files of timings: yours, and those that come with leanbench."""
    from leanbench.configs.store import all_files, configs_folder

    files = all_files()
    if not files:
        output.show(f"Nothing is tuned: run `leanbench tune`, it writes to {configs_folder()}.")
        return
    table = output.table()
    table.add_column("GPU", no_wrap=True)
    for column in ("whose", "newest"):
        table.add_column(column)
    for column in ("signatures", "calls", "timings"):
        table.add_column(column, justify="right")
    for file in files:
        name, lines = file.gpu["name"], file.lines
        table.add_row(
            # A namesake's file has another name.
            name if file.path.stem == name else f"{name} in {file.path.name}",
            file.where,
            max((str(line.get("time"))[:10] for line in lines), default="-"),
            str(len({line["signature"] for line in lines})),
            str(len(lines)),
            str(sum(len(call.costs) for call in file.calls())),
        )
    output.show_table(table)
    for line in dict.fromkeys(f"{file.where}: {file.path.parent}" for file in files):
        output.show(line)


@configs.command("show", short_help="Show what was timed on a GPU.")
def show(gpu: Name) -> None:
    """Show the best settings of each timed signature, with their gain over the untuned choice.

    The best is a latency in us, an energy in mJ or their product for each fill.
    """
    from leanbench.cli.tune import settings_words
    from leanbench.configs.lookup import ranked

    for file in _files_of(gpu):
        by_signature: dict[tuple[str, str], list[TimedCall]] = {}
        for call in file.calls():
            by_signature.setdefault((call.objective, call.signature), []).append(call)
        constants = ", ".join(f"{name} {us:.2f} us" for name, us in file.constants.items())
        output.show(f"{file.gpu['product']} ({file.where}){': ' if constants else ''}{constants}")
        table = output.table()
        table.add_column("signature, and its settings")
        for column in ("fills", "best", "gain"):
            table.add_column(column, justify="right")
        for (objective, signature), calls in sorted(by_signature.items()):
            order = ranked(calls)
            if not order:
                continue
            costs = [(call.costs[order[0]], next(iter(call.costs.values()))) for call in calls]
            gain = sum(default / best for best, default in costs) / len(costs) - 1
            words = signature if objective == "latency" else f"{signature} ({objective})"
            best = ", ".join(f"{cost:.2f}" for cost, _ in costs)
            words = f"{words}\n{settings_words(order[0])}"
            table.add_row(words, str(len(calls)), best, f"{gain:+.1%}")
        output.show_table(table)


@configs.command("explain", short_help="Show which settings a call gets, and why.")
def explain(
    problem: Annotated[list[str], argument("PROBLEM", "h32/8 n4k d128, or a label from a table.")],
    gpu: Gpu = None,
) -> None:
    """Show the settings of a call, and its candidates with their predicted parts in microseconds.

    The model adds start and merge to the memory's time and the longest CTA's (warps and ends),
    which overlap. With lengths on the device, figures are means over fills of the cache: all long,
    all short, mixed, and a single long sequence; the worst fill counts half more in the order.
    """
    from leanbench.cli.tune import settings_words
    from leanbench.configs.lookup import choose, looked_up, refusal, tuned_kernel
    from leanbench.configs.signature import signature_of
    from leanbench.core.axes import parse_problem
    from leanbench.gpu.local import choose as choose_gpu
    from leanbench.kernels.lean.configs import MOST_WARP_ROWS, LeanCudaConfig
    from leanbench.kernels.lean.cuda_cost import total_us
    from leanbench.kernels.lean.cuda_settings import (
        costs_of,
        predict,
        ranked,
    )

    call = parse_problem(problem)
    target = choose_gpu(gpu, require_gpu=False)
    output.say_note(target)
    spec = target.spec
    if (reason := refusal(call, spec)) is not None:
        raise UserError(reason)
    choice = choose(tuned_kernel(call), call, spec)
    output.show(f"{call.label} on {spec.product}: {choice.how}, {choice.why}")
    output.show(settings_words(choice.config))
    seen = looked_up(call)
    output.show(f"signature: {signature_of(seen)}")
    chosen = choice.config.to_dict() if choice.config else {}
    if chosen.get("tile_rows", MOST_WARP_ROWS + 1) > MOST_WARP_ROWS:
        output.show(
            "Without timings rules choose the settings of this kernel, the model ranks none."
        )
        return
    columns, parts = predict(seen, spec, costs_of(spec))
    totals_us = total_us(parts).mean(0)
    equal: dict[tuple[object, float], list[LeanCudaConfig]] = {}
    for config, us in ranked(seen, spec, costs_of(spec)):
        equal.setdefault((config.build_key, round(us, 2)), []).append(config)
    table = output.table("candidates by predicted latency (us)")
    for name in ("total", *parts):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("settings")
    for configs in islice(equal.values(), _EXPLAINED):
        config = configs[0]
        index = columns.configs.index(config)
        words = [f"{part.mean(0)[index]:.2f}" for part in parts.values()]
        tiles = "/".join(str(each.tile_tokens) for each in configs)
        short = (
            f"tile {tiles}, chunk {config.chunk_tokens}, {config.num_warps} warps,"
            f" {config.num_stages} stages, {config.ctas_per_sm} per SM, cluster"
            f" {config.cluster_size}, {config.tile_rows} rows"
        )
        table.add_row(f"{totals_us[index]:.2f}", *words, short)
    output.show_table(table)


@configs.command("export", short_help="Write what was timed on a GPU to a file.")
def export(
    gpu: Name,
    file: Annotated[Path, argument("FILE", "Where to; it must not be there yet.")],
) -> None:
    """Write what was timed on a GPU to one file: yours, and what is shipped of other calls."""
    from leanbench.configs.store import export as write

    if file.exists():
        raise UserError(f"{file} is there already: remove it or choose another name")
    files = _files_of(gpu)
    count = write(file, files)
    output.show(f"{file}: {output.counted(count, 'call')} of {files[0].gpu['product']}")


@configs.command("import", short_help="Merge a file into yours.")
def import_(
    file: Annotated[Path, argument("FILE", "As `leanbench configs export` writes it.")],
) -> None:
    """Merge a file of timings into yours. A call that you have is replaced."""
    from leanbench.configs.store import fault_of, merge, read

    try:
        timed = read(file, or_pipe=True)
    except UserError as error:
        raise UserError(
            f"{fault_of(error)}: give a file that `leanbench configs export` of this version wrote"
        ) from None
    calls = timed.calls()
    if not calls:
        raise UserError(f"{file} holds no timings: export again from where they were made")
    path = merge(timed)
    output.show(f"{path}: {output.counted(len(calls), 'call')} of {timed.gpu['product']} imported")


def _files_of(gpu: str) -> list[File]:
    """Return the readable files of a GPU by its name, yours first.

    Raises:
        UserError: there is none.
    """
    from leanbench.configs.store import all_files
    from leanbench.gpu.catalogue import slug, suggest

    spec = _catalogued(gpu)
    files = all_files()
    named = [
        file
        for file in files
        if slug(gpu) in (file.path.stem, file.gpu["name"], slug(str(file.gpu["product"])))
        or (spec is not None and file.is_for(spec))
    ]
    if named:
        return named
    if spec is not None:
        raise UserError(
            f"nothing is tuned for {spec.name}: run `leanbench tune` where it is, or `leanbench"
            f" tune --gpu {spec.name}` for the model's choices"
        )
    known = sorted({str(file.gpu["name"]) for file in files})
    hint = ": run `leanbench tune`, or import a file"
    if known:
        guess = suggest(gpu, known)
        hint = f", did you mean {guess!r}?" if guess else f", known: {', '.join(known)}"
    raise UserError(f"nothing is tuned for a GPU {gpu!r}{hint}")


def _catalogued(gpu: str) -> GpuSpec | None:
    from leanbench.gpu.catalogue import find

    with contextlib.suppress(UserError):
        return find(gpu)
    return None
