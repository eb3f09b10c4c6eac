"""The two sides of a comparison: which rows of which run take part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leanbench.core.errors import UserError, nearest
from leanbench.core.problem import AttentionProblem
from leanbench.records.reading import RUNS, Run, find_run, read_run
from leanbench.report.frame import gpu_name

if TYPE_CHECKING:
    from leanbench.records.row import Row

#: What two rows share to be a pair: problem, kernel ("" where two kernels are compared), configs
#: request, cache state.
Key = tuple[AttentionProblem, str, str, str]


@dataclass(frozen=True)
class Selection:
    """One side of the comparison: the rows that take part in it, of one run."""

    run: Run
    #: The one kernel that was named, or None for all.
    kernel: str | None
    rows: Mapping[Key, Row]

    @property
    def name(self) -> str:
        """As people would name it: ``runs/before`` or ``runs/before:lean``."""
        return str(self.run.directory) + (f":{self.kernel}" if self.kernel else "")

    @property
    def gpu(self) -> str:
        return gpu_name(self.run.manifest, next(iter(self.rows.values())).environment)

    def environment(self, key: str) -> dict[str, Any]:
        """What the manifest says of the environment that rows name by `key`, with the GPU a
        prediction is for.
        """
        recorded = _mapping(_mapping(self.run.manifest.get("environments")).get(key))
        return {**recorded, "gpu_product": gpu_name(self.run.manifest, key)} if recorded else {}

    @property
    def measure(self) -> dict[str, Any]:
        """What the manifest says of how the run was measured, the fields of `effort` among the
        others.
        """
        measure = _mapping(self.run.manifest.get("measure"))
        return {
            **_mapping(measure.get("effort")),
            **{name: measure[name] for name in measure if name != "effort"},
        }


def select(base: str, new: str, kernels: Sequence[str]) -> list[Selection]:
    """The sides ``RUN`` and ``RUN``, or ``RUN:KERNEL`` and ``RUN:KERNEL``.

    Args:
        kernels: the kernels that take part, where the sides name none; empty for all.

    Raises:
        UserError: no such run or kernel, a kernel on one side only, or a side without rows.
    """
    names = [_split(text) for text in (base, new)]
    _refuse_names(names, base, new, kernels)
    runs = [read_run(find_run(name)) for name, _ in names]
    for kernel in kernels:
        _refuse_unknown(kernel, runs)
    return [_select(run, kernel, kernels) for run, (_, kernel) in zip(runs, names, strict=True)]


def _split(text: str) -> tuple[str, str | None]:
    """The run and the kernel of ``RUN`` or ``RUN:KERNEL``; a folder whose name has a colon is a
    run.
    """
    if ":" not in text or Path(text).is_dir() or (RUNS / text).is_dir():
        return text, None
    run, _, kernel = text.rpartition(":")
    if not run or not kernel:
        raise UserError(
            f"{text!r} is not RUN or RUN:KERNEL, write for example before or before:lean"
        )
    return run, kernel


def _refuse_names(
    names: list[tuple[str, str | None]], base: str, new: str, kernels: Sequence[str]
) -> None:
    (base_run, base_kernel), (new_run, new_kernel) = names
    if (base_kernel is None) != (new_kernel is None):
        with_kernel, without = (base, new) if base_kernel else (new, base)
        raise UserError(
            f"{with_kernel} names a kernel and {without} does not: name one on both sides, or on"
            " neither"
        )
    if kernels and base_kernel:
        raise UserError(
            f"--kernels {','.join(kernels)} and {base} both choose a kernel: leave one of them out"
        )
    if base_kernel == new_kernel and find_run(base_run).resolve() == find_run(new_run).resolve():
        raise UserError(
            f"BASE and NEW are both {base}: name another run, or two kernels as in RUN:lean RUN:fa2"
        )


def _refuse_unknown(kernel: str, runs: Sequence[Run]) -> None:
    known = {row.kernel for run in runs for row, _ in run.results}
    if known and kernel not in known:
        where = " and ".join(dict.fromkeys(str(run.directory) for run in runs))
        raise UserError(f"{where} ran no kernel {kernel!r}, {nearest(kernel, known)}")


def _select(run: Run, kernel: str | None, kernels: Sequence[str]) -> Selection:
    if kernel is not None:
        _refuse_unknown(kernel, [run])
    chosen = [kernel] if kernel is not None else kernels
    rows: dict[Key, Row] = {}
    for row, problem in run.results:
        if not chosen or row.kernel in chosen:
            # A cell that has two rows was measured twice; as with samples, the later counts.
            rows[problem, "" if kernel else row.kernel, _request(run, row), row.cache] = row
    if not run.results:
        raise UserError(f"{run.directory} has no rows to compare: {run.go_on}")
    if not rows:
        known = ", ".join(dict.fromkeys(row.kernel for row, _ in run.results))
        raise UserError(
            f"{run.directory} ran no {' or '.join(chosen)}: choose kernels that both ran, it has"
            f" {known}"
        )
    return Selection(run, kernel, rows)


def _request(run: Run, row: Row) -> str:
    """The request for launch settings: `best` of many, or one known before, which is
    `default` whoever chose it. Rows that failed early do not say, the run does.
    """
    request = _mapping(run.manifest.get("sweep")).get("configs")
    request = request if isinstance(request, str) else (row.config_choice or "default").split()[0]
    return "default" if request in ("heuristic", "tuned", "given") else request


def _mapping(value: Any) -> dict[str, Any]:
    """A manifest is read as it was written: any part may be missing, or something else."""
    return value if isinstance(value, dict) else {}
