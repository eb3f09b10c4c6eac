"""Axis declarations. `leanbench.core.axes` has the table of all axes."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any

from leanbench.core.axis_values import Values

#: Default of an axis that every problem must set.
REQUIRED: Any = object()


@dataclass(frozen=True)
class Axis:
    """One dimension of the problem space.

    Flags, sweep files, labels, tables and kernels read everything about a dimension from here.
    """

    #: Sweep-file key, AttentionProblem field and column name. The flag replaces _ by -.
    name: str
    values: Values
    #: Prefix of the value in labels: the "b" of ``b8``. If empty, no other axis may use the words
    #: of this one.
    letter: str = ""
    #: Default of a problem; REQUIRED if the problem must set it.
    default: Any = REQUIRED
    #: Default of a sweep; None for the problem's default.
    swept: tuple[Any, ...] | None = None
    #: Help text of the flag.
    help: str = ""
    metavar: str = "LIST"
    #: Sweep axis that sets this field along with others: heads sets q_heads and kv_heads.
    part_of: str = ""
    #: Include the default value in labels and commands, or in JSON. Must be False for an axis
    #: added later: it would rename existing problems.
    always_in_label: bool = False
    always_in_json: bool = False
    #: Display name in charts and selectors.
    label: str = ""
    #: Column heading; defaults to the label.
    heading: str = ""
    #: Description of the column, if the heading is not enough.
    meaning: str = ""
    #: Format string for reports; defaults to "<heading> <value>".
    phrase: str = ""
    #: Text for ``none`` in reports.
    none_phrase: str = ""
    #: What a kernel without support for the axis does: "takes no sinks". Follows its name.
    refusal: str = ""

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def is_required(self) -> bool:
        return self.default is REQUIRED

    @property
    def grid(self) -> tuple[Any, ...]:
        """Default values of a sweep."""
        return (self.default,) if self.swept is None else self.swept

    @property
    def grid_text(self) -> str:
        """Default values of a sweep, as a flag accepts them."""
        return ",".join(map(self.write, self.grid))

    @property
    def is_number(self) -> bool:
        """True if every value is a number, so that the axis can be the x axis of a chart."""
        return self.values.json_type in (int, float) and not self.values.or_none

    @property
    def title(self) -> str:
        """Column heading."""
        return self.heading or self.label or self.name

    def parse(self, text: str) -> tuple[Any, ...]:
        """Parse a flag or a sweep-file key; raises UserError."""
        return self.values.parse(self.name, text)

    def write(self, value: Any) -> str:
        """Format a value as text that `parse` accepts."""
        return self.values.write(value)

    def to_json(self, value: Any) -> Any:
        """Convert a value to JSON."""
        return self.values.to_json(value)

    def from_json(self, value: Any) -> Any:
        """Convert the output of `to_json` back; raises TypeError."""
        return self.values.from_json(self.name, value)

    def check(self, value: Any) -> None:
        """Raise UserError for a value that no problem can have."""
        self.values.check(self.name, value)

    def describe(self, text: str) -> str:
        """Return a formatted value as a report shows it: ``q_len 4``, ``bf16``, ``pages of 64``."""
        if self.none_phrase and text == self.write(self.values.none):
            return self.none_phrase
        phrase = self.phrase or ("{}" if self.values.is_word else f"{self.title} {{}}")
        return phrase.format(text)

    @property
    def default_words(self) -> str:
        """Default value in a sentence: ``q_len 1``, ``a contiguous cache``."""
        if self.values.or_none and self.default == self.values.none:
            return self.values.or_none
        return f"{self.name} {self.write(self.default)}"


def axis(values: Values, letter: str = "", default: Any = REQUIRED, **options: Any) -> Any:
    """Declare a dataclass field that is an axis; `options` are further fields of `Axis`."""
    declared = Axis("", values, letter, default, **options)
    return field(default=MISSING if default is REQUIRED else default, metadata={"axis": declared})


def axes_of(dataclass_type: type) -> tuple[Axis, ...]:
    """Return the axes declared in a dataclass, in field order."""
    return tuple(replace(own.metadata["axis"], name=own.name) for own in fields(dataclass_type))
