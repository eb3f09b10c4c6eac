"""`leanbench configs`: look at tuned launch settings, carry them from machine to machine, hold them
against the GPU.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from leanbench.cli import output
from leanbench.cli.configs_validate import validate
from leanbench.cli.help import Commands
from leanbench.core.errors import UserError

if TYPE_CHECKING:
    from leanbench.configs.store import File
    from leanbench.configs.tuned import Family
    from leanbench.core.gpu_spec import GpuSpec

configs = Commands(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="List, show, move and verify the launch settings that were tuned for GPUs.",
)

Gpu = Annotated[str, typer.Argument(metavar="GPU", help="A name from `leanbench configs list`.")]


@configs.command("list", short_help="List the files there are.")
def list_() -> None:
    """List the files of tuned configs: yours, and those that come with leanbench."""
    from leanbench.cli.configs_tables import files_table, folder_lines
    from leanbench.configs.store import all_files, configs_folder

    files = all_files()
    for file in files:
        if isinstance(file.content, str):
            output.say(f"! {file.content}")
    readable = [file for file in files if not isinstance(file.content, str)]
    if not readable:
        output.show(f"Nothing is tuned: run `leanbench tune`, it writes to {configs_folder()}.")
        return
    output.show_table(files_table(readable))
    for line in folder_lines(readable):
        output.show(line)


@configs.command("show", short_help="Show what is tuned for a GPU.")
def show(
    gpu: Gpu,
    head_dim: Annotated[
        int | None, typer.Option("--head-dim", metavar="N", help="Only families of this head_dim.")
    ] = None,
    group: Annotated[
        int | None, typer.Option("--group", metavar="N", help="Only families of this group size.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", metavar="NAME", help="Only fp16 or bf16.")
    ] = None,
    kv_layout: Annotated[
        str | None, typer.Option("--kv-layout", metavar="NAME", help="Only HND or NHD.")
    ] = None,
) -> None:
    """Show each family's shortlist, and each tuned problem's chosen config with its gain over the
    heuristic.

    For a GPU without tuned configs, it shows those of the GPU whose settings are used on it.
    """
    from leanbench.cli.configs_tables import family_lines, show_problems, show_shortlist

    wanted = {"head_dim": head_dim, "group_size": group, "dtype": dtype, "kv_layout": kv_layout}
    wanted = {name: value for name, value in wanted.items() if value is not None}
    files = _files_of(gpu) or _stand_in_of(gpu)
    shown = 0
    for file in files:
        for family in file.tuned.families:
            if any(getattr(family, name) != value for name, value in wanted.items()):
                continue
            output.show("\n" * bool(shown) + "\n".join(family_lines(file, family)))
            show_shortlist(family)
            show_problems(family)
            shown += 1
    if not shown:
        there = "; ".join(
            dict.fromkeys(family.label for file in files for family in file.tuned.families)
        )
        words = ", ".join(f"{name} {value}" for name, value in wanted.items())
        raise UserError(
            f"nothing is tuned for {files[0].tuned.gpu.name} with {words or 'any family'}, there"
            f" is: {there or 'no family'}"
        )


@configs.command("export", short_help="Write what is tuned for a GPU to a file.")
def export(
    gpu: Gpu,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Where to; it must not be there yet.")
    ],
) -> None:
    """Write what is tuned for a GPU to one file: your families, and those shipped ones that you
    have not tuned.
    """
    from leanbench.configs import store

    if file.exists():
        raise UserError(f"{file} is there already: remove it or choose another name")
    files = _files_of(gpu)
    if not files:
        raise _nothing_tuned(gpu)
    families = {
        family.key: family for source in reversed(files) for family in source.tuned.families
    }
    first = files[0].tuned
    store.export(file, first.gpu, list(families.values()), kernel=first.kernel)
    output.show(f"{file}: {_count(len(families))} of {first.gpu.product}")


@configs.command("import", short_help="Merge a file into yours.")
def import_(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="As `leanbench configs export` writes it.")
    ],
) -> None:
    """Merge a file of tuned configs into yours.

    A family that you have is replaced, but a predicted one never replaces a measured one.
    """
    from leanbench.configs.store import merge
    from leanbench.configs.tuned_file import fault_of, read
    from leanbench.core.registry import kernels

    try:
        tuned = read(file, or_pipe=True)
    except UserError as error:
        raise UserError(
            f"{fault_of(error)}: give a file that `leanbench configs export` of this version wrote"
        ) from None
    if not tuned.families:
        raise UserError(f"{file} holds no families: export again from where they were tuned")
    known = {kernel.tuned_as for kernel in kernels().values() if kernel.tuned_as is not None}
    if tuned.kernel not in known:
        raise UserError(
            f"{file} is of kernel {tuned.kernel!r}, configs are tuned for"
            f" {', '.join(sorted(known))} only"
        )
    saved = merge(tuned.gpu, tuned.families, kernel=tuned.kernel)
    replaced = {family.key: family for family in saved.replaced}
    for family in tuned.families:
        before = replaced.get(family.key)
        if before == family:
            output.show(f"unchanged {family.label}: {_source(family)}")
        elif before is not None:
            output.show(f"replaced {family.label}: {_source(before)} by {_source(family)}")
        elif family in saved.added:
            output.show(f"added {family.label}: {_source(family)}")
        else:
            output.show(f"left out {family.label}: {_source(family)}, yours is measured")
    output.show(
        f"{saved.path}: {_count(len(saved.added) + len(saved.replaced))} of {tuned.gpu.product}"
        " imported"
    )


@configs.command("verify", short_help="Time the tuned choices again on the GPU that is here.")
def verify(
    gpu: Annotated[
        str | None, typer.Option("--gpu", metavar="NAME", help="Which of the GPUs that are here.")
    ] = None,
    sample: Annotated[
        int | None,
        typer.Option(
            "--sample", metavar="N", min=1, help="Only N of the tuned problems, evenly spread."
        ),
    ] = None,
) -> None:
    """Time each tuned problem's chosen config again, side by side with those that tied and the
    heuristic's.

    A choice holds within 1% of the fastest. Exit code 1 means that the median choice is more than
    2% slower than the fastest: tune again.
    """
    from leanbench.configs.store import tuned_for
    from leanbench.core.registry import kernel
    from leanbench.gpu.local import choose
    from leanbench.tune.verify import FAILS_ABOVE, GpuTimer, judge, median_regret, tasks_of

    target = choose(gpu, require_gpu=False)
    if target.local_index is None:
        why = target.note or f"there is no {gpu or 'GPU'} here"
        raise UserError(f"{why}, and configs verify times kernels: run it where the GPU is")
    output.say_note(target)
    files = tuned_for(target.spec)
    families = {family.key: family for file in reversed(files) for family in file.tuned.families}
    tasks = tasks_of(list(families.values()), sample)
    if not tasks:
        raise UserError(
            f"no tuned problems are there for {target.spec.product}: run `leanbench tune` first"
        )
    timer = GpuTimer(kernel(files[0].tuned.kernel), target.local_index, target.spec)
    verdicts = []
    for task in tasks:
        verdict = judge(task, timer)
        if isinstance(verdict, str):
            output.show(f"{task.problem.label}: not timed, {verdict}")
            continue
        verdicts.append(verdict)
        words = (
            "holds"
            if verdict.holds
            else f"does not hold, {_words(verdict.fastest.to_dict())} is faster"
        )
        output.show(
            f"{task.problem.label}: {verdict.chosen_us:.2f} µs, {verdict.regret:.1%} over the"
            f" fastest: {words}"
        )
    if not verdicts:
        raise UserError(
            "none of the tuned problems could be timed here: free the GPU's memory, or tune again"
        )
    regret = median_regret(verdicts)
    held = sum(verdict.holds for verdict in verdicts)
    output.show(f"{held} of {len(verdicts)} choices hold within 1%; median regret {regret:.2%}")
    if regret > FAILS_ABOVE:
        output.say(f"The median regret is above {FAILS_ABOVE:.0%}: run `leanbench tune` again.")
        raise typer.Exit(1)


configs.command(
    "validate", short_help="Compare the choices with every candidate on other problems."
)(validate)


def _files_of(gpu: str) -> list[File]:
    """The readable files of a GPU by its name, the user's first; without any, those of a GPU with
    the same figures, which it uses as its own, and says whose.
    """
    from leanbench.configs.store import all_files, tuned_for
    from leanbench.gpu.catalogue import slug

    catalogued = _catalogued(gpu)
    # A GPU that the catalogue does not know may have been tuned all the same.
    names = {slug(gpu), *([catalogued.name] if catalogued else [])}
    files = all_files()
    named = [file for file in files if names & file.names]
    faults = [file.content for file in named if isinstance(file.content, str)]
    readable = [file for file in named if not isinstance(file.content, str)]
    # Where a stand-in is looked for, the look-up says them.
    for fault in faults if readable or catalogued is None else ():
        output.say(f"! {fault}")
    # A slice of a GPU, and a GPU under another's name, have files of their own: the namesake's come
    # first.
    readable.sort(key=lambda file: file.path.stem not in names)
    if readable:
        return [file for file in readable if file.tuned.gpu.is_like(readable[0].tuned.gpu)]
    alike = tuned_for(catalogued) if catalogued else []
    if catalogued and alike:
        output.say(
            f"{catalogued.name} uses the settings of {alike[0].tuned.gpu.name} as its own: compute"
            " capability, SMs, L2 and bandwidth agree."
        )
    return alike


def _stand_in_of(gpu: str) -> list[File]:
    """The file of another GPU whose settings are used on this one, which has none; says whose.

    Raises:
        UserError: there is none.
    """
    from leanbench.configs.lookup import stand_in

    spec = _catalogued(gpu)
    other = stand_in(spec) if spec else None
    if spec is None or other is None:
        raise _nothing_tuned(gpu)
    output.say(
        f"Nothing is tuned for {spec.name}: these are the settings of {other.tuned.gpu.name}. In"
        f" Triton, {spec.name} takes them where their formula, at its own SMs and bandwidth, says"
        " that they are faster than the heuristic's; in CUDA C++ it takes the heuristic's, as times"
        f" are not carried over. `leanbench tune --gpu {spec.name}` finds its own."
    )
    return [other]


def _nothing_tuned(gpu: str) -> UserError:
    """What is said of a GPU that has no file."""
    from leanbench.configs.lookup import stand_in
    from leanbench.configs.store import all_files
    from leanbench.gpu.catalogue import suggest

    spec = _catalogued(gpu)
    if spec is None:
        known = sorted({name for file in all_files() for name in file.names})
        guess = suggest(gpu, known)
        hint = f"did you mean {guess!r}?" if guess else f"known: {', '.join(known)}"
        return UserError(
            f"nothing is tuned for a GPU {gpu!r}, {hint if known else 'nor for any other'}"
        )
    other = stand_in(spec)
    used = f", the settings of {other.tuned.gpu.name} are used on it" if other else ""
    return UserError(
        f"nothing is tuned for {spec.name}{used}: run `leanbench tune --gpu {spec.name}`"
        + (f", or name {other.tuned.gpu.name}" if other else "")
    )


def _catalogued(gpu: str) -> GpuSpec | None:
    from leanbench.gpu.catalogue import find

    with contextlib.suppress(UserError):
        return find(gpu)
    return None


def _source(family: Family) -> str:
    return f"{family.source} {family.time[:10]}"


def _count(families: int) -> str:
    return f"{families} famil{'y' if families == 1 else 'ies'}"


def _words(values: dict[str, int | bool | str]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())
