"""Launch settings: one frozen dataclass per kernel, checked on construction.

Each field declares its valid values (`number`, `word`, `switch`). A class adds constraints between
fields. Nothing else checks settings: every config that exists can be launched, whether it came
from code, a flag, a sweep file or a file of tuned configs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from typing import Any, ClassVar, Protocol, TypeVar

from leanbench.core.errors import UserError, nearest

#: Key of the implementation in files and flags.
TAG = "implementation"


class Limit(Protocol):
    """Valid values of a setting."""

    def fault(self, value: Any) -> str | None:
        """Return the end of a sentence about an invalid value, or None."""
        ...

    def parse(self, text: str) -> Any:
        """Parse user input. Text that cannot be parsed is returned as it is, for `fault`."""
        ...


@dataclass(frozen=True)
class Range:
    """Whole numbers from `least` to `most`, and `unused`, the value of an absent setting."""

    least: int
    most: int
    power_of_two: bool = False
    unused: int | None = None

    def fault(self, value: Any) -> str | None:
        if isinstance(value, int) and not isinstance(value, bool):
            is_power = value & (value - 1) == 0
            fits = self.least <= value <= self.most and (is_power or not self.power_of_two)
            if fits or value == self.unused:
                return None
        kind = "a power of two" if self.power_of_two else "a whole number"
        return f"is not {kind} from {self.least} to {self.most}"

    def parse(self, text: str) -> int | str:
        return int(text) if re.fullmatch(r"\d{1,9}", text, re.ASCII) else text


@dataclass(frozen=True)
class Words:
    """A few words."""

    words: tuple[str, ...]

    def fault(self, value: Any) -> str | None:
        return None if value in self.words else f"is not {' or '.join(self.words)}"

    def parse(self, text: str) -> str:
        return text.lower()


class Switch:
    """True and false."""

    _TEXTS: ClassVar = {"true": True, "yes": True, "false": False, "no": False}

    def fault(self, value: Any) -> str | None:
        return None if isinstance(value, bool) else "is not true or false"

    def parse(self, text: str) -> bool | str:
        return self._TEXTS.get(text.lower(), text)


def number(least: int, most: int, *, power_of_two: bool = False) -> Any:
    """Declare a setting that is a whole number from `least` to `most`."""
    return field(metadata={"limit": Range(least, most, power_of_two)})


def optional_number(least: int, most: int, *, unused: int, power_of_two: bool = False) -> Any:
    """Declare a setting that is `unused` by default."""
    limit = Range(least, most, power_of_two, unused)
    return field(default=unused, metadata={"limit": limit})


def word(*words: str) -> Any:
    """Declare a setting that is one of `words`."""
    return field(metadata={"limit": Words(words)})


def switch() -> Any:
    """Declare a setting that is true or false."""
    return field(metadata={"limit": Switch()})


@dataclass(frozen=True)
class KernelConfig:
    """Launch settings of a kernel: the fields of a subclass, each with its limit.

    Raises:
        UserError: A value is outside its limit, or values contradict each other.
    """

    #: Implementation of the kernel; None if there is only one.
    implementation: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        for name, limit in limits(type(self)).items():
            value = getattr(self, name)
            if (fault := limit.fault(value)) is not None:
                raise UserError(f"{name} {value!r} {fault}")
        if (contradiction := self.contradiction()) is not None:
            raise UserError(contradiction)

    def contradiction(self) -> str | None:
        """Return a sentence about values that contradict each other, or None."""
        return None

    def to_dict(self) -> dict[str, int | bool | str]:
        """Convert to JSON types, without unused optional settings. `read_config` reads it back."""
        tag = {} if self.implementation is None else {TAG: self.implementation}
        values = {setting.name: getattr(self, setting.name) for setting in fields(self)}
        unused = {setting.name: setting.default for setting in fields(self)}
        return tag | {name: value for name, value in values.items() if value != unused[name]}


@dataclass(frozen=True)
class TileConfig(KernelConfig):
    """Launch settings of a kernel that reads LeanTiles. Subclasses add settings."""

    #: Context tokens of one LeanTile. Matrix instructions take 16, Triton powers of two.
    tile_tokens: int = number(16, 1024, power_of_two=True)
    num_warps: int = number(1, 32, power_of_two=True)
    num_stages: int = number(1, 10)

    #: CTAs per SM that the grid is made for. A subclass can declare it as a field at this position.
    ctas_per_sm: ClassVar[int] = 1


ConfigT = TypeVar("ConfigT", bound=KernelConfig)


@cache
def limits(config_type: type[KernelConfig]) -> dict[str, Limit]:
    """Return the limit of each setting, in field order."""
    return {setting.name: setting.metadata["limit"] for setting in fields(config_type)}


def required(config_type: type[KernelConfig]) -> list[str]:
    """Return the settings without a default."""
    return [setting.name for setting in fields(config_type) if setting.default is MISSING]


def read_config(types: Sequence[type[ConfigT]], values: Mapping[str, Any]) -> ConfigT:
    """Build the config of a `to_dict`, of the class among `types` that its implementation names.

    Raises:
        UserError: A setting is unknown, missing or out of range.
    """
    settings = {name: value for name, value in values.items() if name != TAG}
    config_type = config_type_of(types, values.get(TAG), settings)
    check_names(config_type, settings)
    return config_type(**settings)


def config_type_of(
    types: Sequence[type[ConfigT]], implementation: Any, names: Iterable[str]
) -> type[ConfigT]:
    """Return the class among `types` of an implementation.

    Args:
        implementation: Its name; None for the only class that has exactly the settings `names`.

    Raises:
        UserError: No class matches, or several do.
    """
    if implementation is None and len(types) == 1:
        return types[0]
    chosen = set(names)
    fitting = [known for known in types if {*required(known)} <= chosen <= limits(known).keys()]
    if implementation is None and len(fitting) == 1:
        return fitting[0]
    by_name = {
        config_type.implementation: config_type
        for config_type in types
        if config_type.implementation is not None
    }
    if isinstance(implementation, str) and implementation in by_name:
        return by_name[implementation]
    if not by_name:
        raise UserError(f"there is no setting {TAG!r}, the kernel has one implementation")
    known = " or ".join(by_name)
    if implementation is None:
        settings = dict.fromkeys(name for config_type in types for name in limits(config_type))
        for name in chosen - settings.keys():
            raise UserError(f"there is no setting {name!r}, {nearest(name, settings)}")
        raise UserError(f"{TAG} must be given as well, {known}")
    raise UserError(f"{TAG} {implementation!r} is not {known}")


def check_names(config_type: type[KernelConfig], settings: Mapping[str, Any]) -> None:
    """Raise UserError for an unknown or missing setting."""
    known = limits(config_type)
    for name in settings:
        if name not in known:
            raise UserError(f"there is no setting {name!r}, {nearest(name, known)}")
    missing = [name for name in required(config_type) if name not in settings]
    if missing:
        raise UserError(f"{', '.join(missing)} must be given as well")
