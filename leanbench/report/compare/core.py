"""Comparison of two runs, or of two kernels, cell by cell. See `pair` for the verdicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leanbench.core.errors import UserError, nearest
from leanbench.core.problem import AttentionProblem
from leanbench.records.reading import RUNS, Run, find_run, read_run
from leanbench.records.standing import measured_spread
from leanbench.report.compare.pair import match
from leanbench.report.compare.ratios import Margin, margin_of

if TYPE_CHECKING:
    from leanbench.records.row import Row
    from leanbench.report.compare.pair import Pair

#: Order in tables: the most urgent first.
_ORDER = ("broken", "slower", "ambiguous", "faster", "mended", "same", "no verdict")

#: Identity of a cell: problem, kernel ("" if two kernels are compared), configs request, L2 state.
Key = tuple[AttentionProblem, str, str, str]


@dataclass(frozen=True)
class Selection:
    """One side of a comparison: rows of a run."""

    run: Run
    #: Kernel of ``RUN:KERNEL``; None for all.
    kernel: str | None
    rows: Mapping[Key, Row]

    @property
    def name(self) -> str:
        """Name of the side: ``runs/before`` or ``runs/before:lean``."""
        return str(self.run.directory) + (f":{self.kernel}" if self.kernel else "")

    @property
    def gpu(self) -> str:
        return self.run.gpu_name(next(iter(self.rows.values())).environment)

    def environment(self, key: str) -> dict[str, Any]:
        """Return a recorded environment, with the GPU that a prediction is for."""
        recorded = self.run.environments.get(key)
        return {**recorded, "gpu_product": self.run.gpu_name(key)} if recorded else {}

    @property
    def measure(self) -> dict[str, Any]:
        """Options of measuring in the manifest, with the fields of `effort`."""
        measure = {**self.run.section("measure")}
        effort = measure.pop("effort", None)
        return {**(effort if isinstance(effort, dict) else {}), **measure}


@dataclass(frozen=True)
class Difference:
    """A field of the environments or of the measuring options that differs.

    A resumed run may have several values.
    """

    field: str
    base: tuple[str, ...]
    new: tuple[str, ...]


@dataclass(frozen=True)
class Comparison:
    """Every cell of both sides."""

    base: Selection
    new: Selection
    margin: Margin
    #: Most urgent first, within a verdict by size; `same` in base's order.
    pairs: tuple[Pair, ...]
    differences: tuple[Difference, ...]
    #: Labels of the cells without a partner.
    only_in_base: tuple[str, ...]
    only_in_new: tuple[str, ...]

    @property
    def source(self) -> str:
        """`measured` or `predicted`, the same for all pairs."""
        return self.pairs[0].base.source

    @property
    def of_two_kernels(self) -> bool:
        return self.base.kernel != self.new.kernel

    @property
    def without_samples(self) -> int:
        """Number of pairs with the interval of the rows instead of samples."""
        return sum(pair.ratio_low is not None and not pair.from_samples for pair in self.pairs)

    @property
    def other_settings(self) -> int:
        """Number of pairs with different launch settings; 0 for two kernels."""
        if self.of_two_kernels:
            return 0
        configs = [(pair.base.config, pair.new.config) for pair in self.pairs]
        return sum(None not in pair and pair[0] != pair[1] for pair in configs)

    def failures(self, above: float) -> list[Pair]:
        """Return broken cells, and significantly slower ones beyond `above` (0.05 is 5%)."""
        return [
            pair
            for pair in self.pairs
            if pair.broken
            or (pair.verdict == "slower" and pair.ratio is not None and pair.ratio > 1 + above)
        ]


def compare(base: str, new: str, *, margin: float, kernels: Sequence[str] = ()) -> Comparison:
    """Compare `RUN` with `RUN`, or `RUN:KERNEL` with `RUN:KERNEL`.

    A run is a path or a name under runs/.

    Args:
        margin: relative difference that counts as none, 0.01 for 1%.
        kernels: kernels to compare if the sides name none; empty for all.

    Raises:
        UserError: no such run or kernel, a kernel on one side only, measured against predicted, or
            nothing to pair.
    """
    sides = _select(base, new, kernels)
    sources = [{row.source for row in side.rows.values()} for side in sides]
    if len(sources[0] | sources[1]) > 1:
        kinds = " and ".join(
            f"{side.name} is {', '.join(sorted(of))}"
            for side, of in zip(sides, sources, strict=True)
        )
        raise UserError(
            f"{kinds}: a prediction and a measurement are never compared, name two runs of one kind"
        )
    return _compare(sides[0], sides[1], margin)


def group(pair: Pair) -> str:
    """Return the verdict, or `broken`, `mended` or `no verdict`."""
    if pair.broken or pair.mended:
        return "broken" if pair.broken else "mended"
    return pair.verdict or "no verdict"


def counts(pairs: Sequence[Pair]) -> dict[str, int]:
    """Count the pairs by `group`, in the order of tables."""
    groups = [group(pair) for pair in pairs]
    return {name: groups.count(name) for name in _ORDER if name in groups}


def _select(base: str, new: str, kernels: Sequence[str]) -> list[Selection]:
    names = [_split(text) for text in (base, new)]
    _check_names(names, base, new, kernels)
    runs = [read_run(find_run(name)) for name, _ in names]
    for kernel in kernels:
        _check_kernel(kernel, runs)
    return [_side(run, kernel, kernels) for run, (_, kernel) in zip(runs, names, strict=True)]


def _split(text: str) -> tuple[str, str | None]:
    """Split ``RUN`` or ``RUN:KERNEL``; a folder with a colon in its name is a run."""
    if ":" not in text or Path(text).is_dir() or (RUNS / text).is_dir():
        return text, None
    run, _, kernel = text.rpartition(":")
    if not run or not kernel:
        raise UserError(
            f"{text!r} is not RUN or RUN:KERNEL, write for example before or before:lean"
        )
    return run, kernel


def _check_names(
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


def _check_kernel(kernel: str, runs: Sequence[Run]) -> None:
    known = {row.kernel for run in runs for row, _ in run.results}
    if known and kernel not in known:
        where = " and ".join(dict.fromkeys(str(run.directory) for run in runs))
        raise UserError(f"{where} ran no kernel {kernel!r}, {nearest(kernel, known)}")


def _side(run: Run, kernel: str | None, kernels: Sequence[str]) -> Selection:
    if kernel is not None:
        _check_kernel(kernel, [run])
    chosen = [kernel] if kernel is not None else kernels
    rows: dict[Key, Row] = {}
    for row, problem in run.results:
        if not chosen or row.kernel in chosen:
            # If a cell was measured twice, the later row counts, as with samples.
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
    """Return the request for launch settings: `best`, or `default` for settings known before.

    Rows that failed early have no choice, so the manifest goes first.
    """
    request = run.section("sweep").get("configs")
    request = request if isinstance(request, str) else (row.config_choice or "default").split()[0]
    return "default" if request in ("heuristic", "tuned", "given") else request


def _compare(base: Selection, new: Selection, margin: float) -> Comparison:
    if not any(key in new.rows for key in base.rows):
        raise UserError(_why_no_pairs(base, new))
    samples = _samples_us(base.run.directory), _samples_us(new.run.directory)
    rows = [row for side in (base, new) for row in side.rows.values() if row.status == "ok"]
    source, kernels = (rows[0].source if rows else ""), dict.fromkeys(row.kernel for row in rows)
    spreads = [
        measured_spread(
            (row.process_spread for row in side.rows.values()),
            side.run.manifest.get("process_spread"),
        )
        for side in (base, new)
    ]
    of_all = margin_of(source, (base.gpu, new.gpu), kernels, least=max(margin, *spreads))
    pairs = match(base.rows, new.rows, of_all.share, samples)
    return Comparison(
        base,
        new,
        of_all,
        tuple(sorted(pairs.values(), key=_urgency)),
        tuple(_differences(base, new, list(pairs))),
        tuple(_cell_label(key, row) for key, row in base.rows.items() if key not in new.rows),
        tuple(_cell_label(key, row) for key, row in new.rows.items() if key not in base.rows),
    )


def _urgency(pair: Pair) -> tuple[int, float]:
    # Pairs that are the same stay in base's order; the largest gain comes first.
    ratio = 1.0 if pair.verdict == "same" else pair.ratio or 1.0
    return _ORDER.index(group(pair)), ratio if pair.verdict == "faster" else -ratio


def _cell_label(key: Key, row: Row) -> str:
    warm = " warm" if row.cache == "warm" else ""
    return f"{row.kernel} · {key[0].label}{warm}"


def _why_no_pairs(base: Selection, new: Selection) -> str:
    common = {key[:2] for key in base.rows} & {key[:2] for key in new.rows}
    if not common and {key[0] for key in base.rows} & {key[0] for key in new.rows}:
        kernels = [list(dict.fromkeys(key[1] for key in side.rows)) for side in (base, new)]
        return (
            f"there is nothing to pair, {base.name} ran {', '.join(kernels[0])} and {new.name}"
            f" {', '.join(kernels[1])} on the same problems: name a kernel on both sides, as in"
            f" {base.name}:{kernels[0][0]} {new.name}:{kernels[1][0]}"
        )
    if not common:
        ran = [
            f"{side.name} ran {_cell_label(*next(iter(side.rows.items())))}" for side in (base, new)
        ]
        return (
            f"there is nothing to pair, for example {ran[0]} and {ran[1]}: choose runs that share"
            " problems"
        )
    requests = []
    for side in (base, new):
        shared = [key for key in side.rows if key[:2] in common]
        requests.append(
            " and ".join(dict.fromkeys(f"configs {k[2]}, {k[3]} cache" for k in shared))
        )
    return (
        f"there is nothing to pair, {base.name} ran the shared problems with {requests[0]} and"
        f" {new.name} with {requests[1]}: sweep one of them again as the other was"
    )


def _samples_us(directory: Path) -> dict[str, list[float]]:
    from leanbench.records.samples import SAMPLES, read_samples

    try:
        return {cell: samples.samples_us for cell, samples in read_samples(directory).items()}
    except ValueError as error:
        where = directory / SAMPLES
        raise UserError(
            f"{where} is damaged: remove it, then the rows' own intervals are compared"
        ) from error


def _differences(base: Selection, new: Selection, shared: Sequence[Key]) -> list[Difference]:
    """Return the fields that both sides recorded with other values for the compared rows."""
    recorded = [_recorded(side, [side.rows[key] for key in shared]) for side in (base, new)]
    return [
        Difference(field, tuple(values), tuple(recorded[1][field]))
        for field, values in recorded[0].items()
        if field in recorded[1] and set(values) != set(recorded[1][field])
    ]


def _recorded(side: Selection, rows: Sequence[Row]) -> dict[str, dict[str, None]]:
    """Collect the values of each field, in the order of their first appearance."""
    values: dict[str, dict[str, None]] = {}
    recorded = [side.environment(key) for key in dict.fromkeys(row.environment for row in rows)]
    # Measuring options do not affect a prediction.
    if any(row.source == "measured" for row in rows):
        recorded.append(side.measure)
    for fields in recorded:
        for field, value in fields.items():
            values.setdefault(field, {})[_written(value)] = None
    return values


def _written(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)
