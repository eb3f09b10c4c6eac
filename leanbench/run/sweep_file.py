"""Sweep files: TOML that names kernels and axes. See `sweeps/` for examples."""

from __future__ import annotations

import logging
import os
import re
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
)

from leanbench.core.axes import AXES
from leanbench.core.config import KernelConfig
from leanbench.core.errors import (
    InvalidValue,
    OptionWithoutEffect,
    Reason,
    UserError,
    nearest,
)
from leanbench.core.files import read_text
from leanbench.core.lengths import UNIFORM, is_explicit, longest_in_file, read_lengths
from leanbench.core.paths import SWEEPS
from leanbench.core.registry import kernel
from leanbench.core.syntax import (
    MAX_SEED,
    check_seed,
    choose,
    parse_names,
    parse_number,
    parse_percent,
)
from leanbench.formats.dataset import is_dataset, read_problems
from leanbench.measure.options import MeasureOptions
from leanbench.run.cells import CONFIG_CHOICES, DEFAULT_KERNELS, Grid, Sweep
from leanbench.run.draw import MOST_PROBLEMS, Draw, Sample
from leanbench.run.overrides import check_overrides, parse_overrides
from leanbench.run.sweep_errors import check_effects, in_toml, sentence

_MOST_MB = 10
#: Kernels of latent caches.
LATENT_KERNELS = ("lean_mla", "flash_mla", "flashinfer_mla")
#: Syntax of `prefill` in a file.
_PREFILL = "a number of tokens such as 8k, or 0 for none"


def parse_kernels(text: str) -> tuple[str, ...]:
    """Parse a list of kernel names; raise UserError for an unknown one."""
    return tuple(kernel(name).name for name in parse_names("kernels", text))


def _is_flag_value(value: Any) -> bool:
    """Return True if the text of the value can be parsed like a flag."""
    if isinstance(value, int):
        # Python writes no integer of thousands of digits as text.
        return not isinstance(value, bool) and value.bit_length() <= 63
    return isinstance(value, (float, str))


def _validator(read: Callable[[Any], Any]) -> BeforeValidator:
    """Return a validator that raises ValueError for UserError, as pydantic expects."""

    def checked(value: Any) -> Any:
        try:
            return read(value)
        except UserError as error:
            raise ValueError(str(error)) from error

    return BeforeValidator(checked)


def _reads(parse: Callable[[str], tuple[Any, ...]], weighs: bool = False) -> BeforeValidator:
    """Return a validator that joins numbers and lists, and parses them like a flag.

    Args:
        weighs: Keep values that stand in a list several times.
    """

    def read(value: Any) -> tuple[Any, ...]:
        items = value if isinstance(value, list) else [value]
        if not items or not all(map(_is_flag_value, items)):
            switch = '"yes" or "no", ' * isinstance(value, bool)
            raise UserError(
                f"{in_toml(value)} is invalid: write {switch}a number, a string or a list of them"
            )
        if weighs:
            return tuple(value for item in items for value in parse(str(item)))
        return parse(",".join(map(str, items)))

    return _validator(read)


def _read_overrides(value: Any) -> dict[str, KernelConfig]:
    """Parse a string, or a list of strings, like --config."""
    texts = value if isinstance(value, list) else [value]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise UserError(
            f"{in_toml(value)} is invalid: write a string such as lean:tile_tokens=128,... or a"
            " list of them"
        )
    return parse_overrides(texts)


class _Keys(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    def axes(self) -> dict[str, tuple[Any, ...]]:
        """Return the values of the given axes."""
        return {name: value for name in AXES if (value := getattr(self, name)) is not None}


def _axes_table(name: str, weighs: bool = False) -> Any:
    """Return a table with a key for each axis."""
    keys: dict[str, Any] = {
        axis.name: (Annotated[tuple[Any, ...] | None, _reads(axis.parse, weighs)], None)
        for axis in AXES.values()
    }
    return create_model(name, __base__=_Keys, **keys)


_Axes = _axes_table("_Axes")


class GridTable(_Axes):
    """A `[[grid]]` of a sweep file."""


def _read_fill(value: Any) -> tuple[float, float]:
    """Parse two percentages, as in ["1%", "100%"]."""
    if not isinstance(value, list) or len(value) != 2 or not all(isinstance(v, str) for v in value):
        raise UserError(f'{in_toml(value)} is invalid: write two percentages: ["1%", "100%"]')
    low, high = (parse_percent("fill", text, most=100, above_zero=True) for text in value)
    if low > high:
        raise UserError(
            f"{in_toml(value)} starts above its end: write the smaller percentage first"
        )
    return low, high


def _whole(least: int, most: int) -> BeforeValidator:
    """Return a validator of whole numbers in a range, given as number or string."""

    def read(value: Any) -> int:
        is_number = isinstance(value, str) and re.fullmatch("[0-9]{1,20}", value)
        number = int(value) if is_number else value
        if type(number) is not int or not least <= number <= most:
            raise UserError(
                f"{in_toml(value)} is invalid: write a whole number from {least} to {most}"
            )
        return number

    return _validator(read)


def _read_prefill(value: Any) -> int:
    """Parse tokens like --prefill; 0 for none."""
    if isinstance(value, float) or not _is_flag_value(value):
        raise UserError(f"{in_toml(value)} is invalid: write {_PREFILL}")
    return parse_number("prefill", str(value), _PREFILL, least=0)


class DrawTable(_axes_table("_DrawnAxes", weighs=True)):
    """The `[draw]` of a sweep file: problems drawn from the values of its axes. A value that stands
    several times is drawn as often.
    """

    count: Annotated[int, _whole(1, MOST_PROBLEMS)]
    seed: Annotated[int, _whole(0, MAX_SEED)] = 0
    fill: Annotated[tuple[float, float] | None, _validator(_read_fill)] = None


def _read_configs(value: Any) -> str:
    if not isinstance(value, str):
        raise UserError(f"{in_toml(value)} is invalid: write text in quotes")
    return choose("configs", value, CONFIG_CHOICES)


class SweepFile(_Axes):
    """Content of a sweep file. Every `[[grid]]` inherits the axes at the top."""

    #: Part of the names of run directories.
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    description: str = ""
    kernels: Annotated[tuple[str, ...], _reads(parse_kernels)] = DEFAULT_KERNELS
    configs: Annotated[str, _validator(_read_configs)] = "default"
    #: Launch settings of kernels, instead of those by `configs`.
    config: Annotated[dict[str, KernelConfig], _validator(_read_overrides)] = Field({})
    #: Additional measurements, like the flags of the same names.
    cache: Literal["cold", "warm"] = "cold"
    sustained: bool = False
    energy: bool = False
    occupancy: bool = False
    counters: bool = False
    prefill: Annotated[int, _validator(_read_prefill)] = 0
    grid: list[GridTable] = Field([])
    draw: DrawTable | None = None

    def to_sweep(self) -> Sweep:
        """Return the sweep; raise UserError if axes contradict each other."""
        grids: list[Grid] = []
        for own in self.grid or ([] if self.draw else [GridTable()]):
            given = {**self.axes(), **own.axes()}
            _check_together(given, given.get("lengths", ()))
            grids.append(Grid(**given))
        measure = MeasureOptions(
            cache=self.cache,
            sustained=self.sustained,
            energy=self.energy,
            occupancy=self.occupancy,
            counters=self.counters,
            prefill=self.prefill,
        )
        draw = self._draw()
        drawn = [draw.values] if draw else []
        check_effects([*(grid.values for grid in grids), *drawn])
        return Sweep(
            self.name,
            tuple(grids),
            self.kernels,
            self.configs,
            self.description,
            measure,
            self.config,
            draw,
        )

    def _draw(self) -> Draw | None:
        if self.draw is None:
            return None
        given = {**self.axes(), **self.draw.axes()}
        _check_together(given, given.get("lengths", ()))
        return Draw.of(self.draw.count, self.draw.seed, given, self.draw.fill)


def _check_together(given: Collection[str], lengths: Sequence[str]) -> None:
    """Reject axes that contradict each other or have no effect.

    Args:
        lengths: Values of the axis lengths.
    """
    for model, its_axes in (
        ("model", ("heads", "head_dim")),
        ("whole_model", ("model", "tp", "heads", "head_dim")),
    ):
        for axis in its_axes:
            if model in given and axis in given:
                raise UserError(f"{model} sets {axis}: leave {axis} or {model} out")
    if "tp" in given and "model" not in given:
        raise UserError(
            "tp splits the heads of models and no model is given: name one of `leanbench list"
            " models`"
        )
    doubled = [axis for axis in ("batch", "context") if axis in given]
    if doubled and lengths and all(map(is_explicit, lengths)):
        raise UserError(
            f"lengths {lengths[0]} set batch and context: leave {doubled[0]} out, or name a"
            " distribution such as zipf"
        )


def shipped_sweeps() -> dict[str, Path]:
    """Return the sweep files that come with leanbench by name."""
    return {path.stem: path for path in sorted(SWEEPS.glob("*.toml"))}


def load_sweep(file: str) -> Sweep:
    """Load a sweep from a path or a shipped name, or from files of FlashInfer-Bench.

    Raises:
        UserError: There is no such sweep, or the file is invalid.
    """
    shipped = shipped_sweeps()
    path = shipped.get(file, Path(file))
    if path.exists() and is_dataset(path):
        return _imported_sweep(path)
    if file not in shipped and not os.path.lexists(path):
        if path.suffix in (".toml", ".json", ".jsonl") or path.parent != Path():
            raise UserError(
                f"there is no sweep file {file!r}: give a path to a TOML file, to definitions of"
                f" FlashInfer-Bench, or one of {', '.join(shipped)}"
            )
        there_is = nearest(file, shipped, "`leanbench list sweeps`")
        raise UserError(f"there is no sweep {file!r}, {there_is}")
    try:
        text = read_text(path, _MOST_MB)
        content = tomllib.loads(text)
    except RecursionError:
        raise UserError(
            f"{path} is nested too deep: a sweep file has lists of values and no lists in them"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is not TOML: {error}") from None
    except ValueError:
        raise UserError(f"{path} is not TOML: it has a number of too many digits") from None
    try:
        return SweepFile.model_validate(content).to_sweep()
    except ValidationError as error:
        raise UserError(sentence(path, text, error, SweepFile.model_fields)) from None
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _imported_sweep(path: Path) -> Sweep:
    """Return a sweep over FlashInfer-Bench's problems. Batch and context have defaults without
    workloads.
    """
    imported = read_problems(path)
    if note := imported.note():
        logging.getLogger(__name__).warning(f"{path}: {note}")
    kernels = (DEFAULT_KERNELS if imported.has_plain else ()) + (
        LATENT_KERNELS if imported.has_latent else ()
    )
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", path.resolve().stem).lstrip("._-")[:64]
    return Sweep(
        name or "flashinfer-bench",
        tuple(Grid(**axes) for axes in imported.grids),
        kernels,
        description=f"Decode attention of {path}, from FlashInfer-Bench",
    )


def requested_sweep(
    file: str | None,
    axis_flags: dict[str, str],
    kernels: str | None,
    configs: str | None,
    measure: dict[str, Any] | None = None,
    overrides: Sequence[str] = (),
    count: int | None = None,
    seed: int | None = None,
) -> Sweep:
    """Return the sweep of a command line. Flags win over the file.

    The default file is `models` with a model, none with other axes, else `smoke`.

    Args:
        measure: Fields of MeasureOptions that flags set.
        overrides: Launch settings in the syntax of `parse_override`.
        count: Number of problems to draw, from the file's draw or else from its grids.
        seed: Seed of the draw.

    Raises:
        UserError: A value is invalid, or a kernel unknown.
    """
    given = {name: AXES[name].parse(text) for name, text in axis_flags.items()}
    if file is None and given and "model" not in given:
        sweep = Sweep("custom")
    else:
        sweep = load_sweep(file or ("models" if given else "smoke"))
    # Default contexts do not truncate lengths of files.
    contexts = {} if "context" in given else _contexts_of_files(given.get("lengths", ()))
    grids = [_overridden(grid.values, {**contexts, **given}) for grid in sweep.grids]
    drawn = [_overridden(sweep.draw.values, given)] if sweep.draw else []
    tables = [*grids, *drawn]
    with_models = ["model"] if any(table["model"] for table in tables) else []
    if any(None not in table["whole_model"] for table in tables):
        with_models.append("whole_model")
    lengths = given.get("lengths") or [value for table in tables for value in table["lengths"]]
    if "head_dim" in given and "model" in with_models and "model" not in given:
        raise OptionWithoutEffect(
            f"--head-dim {axis_flags['head_dim']}", "--heads", f"the sweep {sweep.name} has models"
        )
    _check_together([*given, *with_models], lengths)
    if "host" in given.get("lengths_on", ()) and not any(map(_can_be_uniform, tables)):
        raise OptionWithoutEffect(
            "lengths_on host", "equal lengths", "different lengths are always on the device"
        )
    # Flags may override values of the file.
    check_effects(tables, given)
    sweep = replace(sweep, grids=tuple(Grid(**values) for values in grids))
    _check_draw(sweep, count, seed)
    if sweep.draw is not None:
        draw = _redrawn(sweep.draw, given, count, seed)
        draw.check_capacities()
        sweep = replace(sweep, draw=draw)
    elif count is not None:
        of = f"{count} problems, drawn with seed {seed or 0}, of {sweep.name}"
        described = f"{of}: {sweep.description}" if sweep.description else of
        sweep = replace(sweep, sample=Sample(count, seed or 0), description=described)
    if kernels is not None:
        sweep = replace(sweep, kernels=parse_kernels(kernels))
    if measure:
        sweep = replace(sweep, measure=replace(sweep.measure, **measure))
    if configs is not None:
        sweep = replace(sweep, configs=choose("configs", configs, CONFIG_CHOICES))
    if overrides:
        sweep = replace(sweep, overrides={**sweep.overrides, **parse_overrides(overrides)})
    check_overrides(sweep.overrides, sweep.kernels)
    return sweep


def _contexts_of_files(lengths: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """Return the longest length as the axis context, if all lengths come from files."""
    longest = [longest_in_file(one) for one in lengths]
    known = [one for one in longest if one is not None]
    return {"context": (max(known),)} if known and len(known) == len(longest) else {}


def _can_be_uniform(table: Mapping[str, tuple[Any, ...]]) -> bool:
    """Return True if a batch of a table can have sequences of one length."""
    return any(
        len(set(read_lengths("lengths", one))) == 1
        if is_explicit(one)
        else one == UNIFORM or 1 in table["batch"]
        for one in table["lengths"]
    )


def _overridden(
    values: Mapping[str, tuple[Any, ...]], given: Mapping[str, tuple[Any, ...]]
) -> dict[str, tuple[Any, ...]]:
    """Return the values of a table, overridden by flags. Heads replace models."""
    shapes = {"model": (), "tp": (1,)} if "heads" in given else {}
    return {**values, **shapes, **given}


def _check_draw(sweep: Sweep, count: int | None, seed: int | None) -> None:
    """Reject --draw and --seed out of range, or without effect."""
    fix = f"draw 1 to {MOST_PROBLEMS} problems"
    if count is not None and count < 1:
        raise InvalidValue("--draw", count, Reason.BELOW_MINIMUM, fix, 1)
    if count is not None and count > MOST_PROBLEMS:
        raise InvalidValue("--draw", count, Reason.ABOVE_MAXIMUM, fix, MOST_PROBLEMS)
    if seed is not None:
        check_seed("--seed", seed)
    if seed is not None and count is None and sweep.draw is None:
        raise OptionWithoutEffect(f"--seed {seed}", "--draw", f"{sweep.name} draws no problems")


def _redrawn(
    draw: Draw, given: dict[str, tuple[Any, ...]], count: int | None, seed: int | None
) -> Draw:
    """Return the draw of a sweep file with the values of flags."""
    own = {name: draw.values[name] for name in draw.given}
    return Draw.of(
        draw.count if count is None else count,
        draw.seed if seed is None else seed,
        _overridden(own, given),
        # Given contexts replace drawn ones.
        None if "context" in given else draw.fill,
    )
