"""Comparison of two runs, or two kernels, cell by cell; `leanbench.report.compare.pair` says how a
verdict is reached.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leanbench.core.errors import UserError
from leanbench.report.compare.match import match
from leanbench.report.compare.ratios import Margin, margin_of
from leanbench.report.compare.selection import Key, Selection, select

if TYPE_CHECKING:
    from leanbench.records.row import Row
    from leanbench.report.compare.pair import Pair

#: In this order in tables: what needs a look first, what needs none last.
_ORDER = ("broken", "slower", "ambiguous", "faster", "mended", "same", "no verdict")


@dataclass(frozen=True)
class Difference:
    """A field of the environments, or of how was measured, that is not the same; several values in
    a resumed run.
    """

    field: str
    base: tuple[str, ...]
    new: tuple[str, ...]


@dataclass(frozen=True)
class Comparison:
    """Every cell of both sides."""

    base: Selection
    new: Selection
    #: Relative difference that counts as none.
    margin: Margin
    #: What needs a look first: broken cells, then the worst slowdown; within a verdict by size,
    #: `same` in base's order.
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
        """`RUN:KERNEL` with another kernel, not a kernel with itself."""
        return self.base.kernel != self.new.kernel

    @property
    def without_samples(self) -> int:
        """Pairs whose interval comes from a row's own."""
        return sum(pair.ratio_low is not None and not pair.from_samples for pair in self.pairs)

    @property
    def other_settings(self) -> int:
        """Pairs whose launch settings differ; two kernels have settings of their own, so none are
        counted there.
        """
        if self.of_two_kernels:
            return 0
        configs = [(pair.base.config, pair.new.config) for pair in self.pairs]
        return sum(None not in pair and pair[0] != pair[1] for pair in configs)

    def failures(self, above: float) -> list[Pair]:
        """Cells that worked and do so no longer, or are significantly slower and by more than
        `above` (0.05 is 5%).
        """
        return [
            pair
            for pair in self.pairs
            if pair.broken
            or (pair.verdict == "slower" and pair.ratio is not None and pair.ratio > 1 + above)
        ]


def compare(base: str, new: str, *, margin: float, kernels: Sequence[str] = ()) -> Comparison:
    """The comparison of `RUN` with `RUN`, or of `RUN:KERNEL` with `RUN:KERNEL`; a run is a path or
    a name under runs/.

    Args:
        margin: relative difference that counts as none, 0.01 for 1%.
        kernels: the kernels to compare, where the two sides name none; empty for all.

    Raises:
        UserError: no such run or kernel, a kernel on one side only, measured against predicted, or
            nothing to pair.
    """
    sides = select(base, new, kernels)
    sources = [{row.source for row in side.rows.values()} for side in sides]
    if len(sources[0] | sources[1]) > 1:
        kinds = " and ".join(
            f"{side.name} is {', '.join(sorted(of))}"
            for side, of in zip(sides, sources, strict=True)
        )
        raise UserError(
            f"{kinds}: a prediction and a measurement are never compared, name two runs of one kind"
        )
    return _pair(sides[0], sides[1], margin)


def group(pair: Pair) -> str:
    """The verdict, or what became of the cell: `broken`, `mended` or `no verdict`."""
    if pair.broken or pair.mended:
        return "broken" if pair.broken else "mended"
    return pair.verdict or "no verdict"


def counts(pairs: Sequence[Pair]) -> dict[str, int]:
    """Pairs by `group`, in the order of tables."""
    groups = [group(pair) for pair in pairs]
    return {name: groups.count(name) for name in _ORDER if name in groups}


def _pair(base: Selection, new: Selection, margin: float) -> Comparison:
    if not any(key in new.rows for key in base.rows):
        raise UserError(_why_no_pairs(base, new))
    samples = _samples_us(base.run.directory), _samples_us(new.run.directory)
    rows = [row for side in (base, new) for row in side.rows.values() if row.status == "ok"]
    source, kernels = (rows[0].source if rows else ""), dict.fromkeys(row.kernel for row in rows)
    of_all = margin_of(source, (base.gpu, new.gpu), kernels, least=margin)
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
    # What counts as no difference is not ranked by it; the largest gain is the first of the gains.
    ratio = 1.0 if pair.verdict == "same" else pair.ratio or 1.0
    return _ORDER.index(group(pair)), ratio if pair.verdict == "faster" else -ratio


def _cell_label(key: Key, row: Row) -> str:
    warm = " warm" if row.cache == "warm" else ""
    return f"{row.kernel} · {key[0].label}{warm}"


def _why_no_pairs(base: Selection, new: Selection) -> str:
    """One sentence; a difference in request or cache state alone is named."""
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
    requests = [
        " and ".join(
            dict.fromkeys(
                f"configs {key[2]}, {key[3]} cache" for key in side.rows if key[:2] in common
            )
        )
        for side in (base, new)
    ]
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
    """Fields that both sides recorded, with other values, for the rows that are compared."""
    recorded = [_recorded(side, [side.rows[key] for key in shared]) for side in (base, new)]
    return [
        Difference(field, tuple(values), tuple(recorded[1][field]))
        for field, values in recorded[0].items()
        if field in recorded[1] and set(values) != set(recorded[1][field])
    ]


def _recorded(side: Selection, rows: Sequence[Row]) -> dict[str, list[str]]:
    """The values of each field, in the order they first appear."""
    values: dict[str, dict[str, None]] = {}
    environments = [side.environment(key) for key in dict.fromkeys(row.environment for row in rows)]
    # Options of measuring of a prediction changed nothing in it.
    measure = side.measure if any(row.source == "measured" for row in rows) else {}
    for field, value in (
        item for recorded in (*environments, measure) for item in recorded.items()
    ):
        values.setdefault(field, {})[_written(value)] = None
    return {field: list(of_field) for field, of_field in values.items()}


def _written(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)
