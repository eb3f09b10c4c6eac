"""Axis: one thing in which problems differ, and everything that flags, sweep files, labels, tables
and kernels need to know of it. leanbench.core.axes has the table.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any

from leanbench.core.axis_values import Values

#: In place of a default.
REQUIRED: Any = object()


@dataclass(frozen=True)
class Axis:
    """One thing in which problems differ."""

    #: Key of sweep files, field of AttentionProblem, column; the flag has dashes.
    name: str
    values: Values
    #: In front of the value in labels and in problems as people type them; empty: the value alone,
    #: which is a word of no other axis.
    letter: str = ""
    #: Where a problem does not say; REQUIRED: it must.
    default: Any = REQUIRED
    #: Of a sweep that does not say; None: the default alone.
    swept: tuple[Any, ...] | None = None
    #: Of the flag.
    help: str = ""
    metavar: str = "LIST"
    #: The axis of sweeps that gives this field together with others; empty: its own.
    part_of: str = ""
    #: Labels, repeat commands, and JSON name the value also where it is the default. An axis that
    #: comes later must not, or old problems get other names.
    always_in_label: bool = False
    always_in_json: bool = False
    #: Name for people, in charts and selectors, and over a column where that needs a shorter one;
    #: what the column means where its heading does not say it.
    label: str = ""
    heading: str = ""
    meaning: str = ""
    #: A value, and None, in a line of a report; heading and value if empty.
    phrase: str = ""
    none_phrase: str = ""
    #: What a kernel does that has nothing but the default; follows its name in a sentence.
    refusal: str = ""

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def is_required(self) -> bool:
        return self.default is REQUIRED

    @property
    def grid(self) -> tuple[Any, ...]:
        """The values of a sweep that does not say."""
        return (self.default,) if self.swept is None else self.swept

    @property
    def grid_text(self) -> str:
        """Those values as a flag has them; empty where there are none."""
        return ",".join(map(self.write, self.grid))

    @property
    def is_number(self) -> bool:
        """Whether every value is a number: it can stand on the x axis of a chart."""
        return self.values.json_type in (int, float) and not self.values.or_none

    @property
    def title(self) -> str:
        """Over a column."""
        return self.heading or self.label or self.name

    def parse(self, text: str) -> tuple[Any, ...]:
        """The values of a flag or of a sweep file's key; raises UserError."""
        return self.values.parse(self.name, text)

    def write(self, value: Any) -> str:
        """The text that `parse` reads back."""
        return self.values.write(value)

    def to_json(self, value: Any) -> Any:
        """The value in JSON."""
        return self.values.to_json(value)

    def from_json(self, value: Any) -> Any:
        """What `to_json` wrote; raises TypeError for a value of another type."""
        return self.values.from_json(self.name, value)

    def check(self, value: Any) -> None:
        """Refuses a value that no problem has; raises UserError."""
        self.values.check(self.name, value)

    def say(self, text: str) -> str:
        """A written value in a line of a report: ``q_len 4``, ``bf16``, ``pages of 64``."""
        if self.none_phrase and text == self.write(self.values.none):
            return self.none_phrase
        phrase = self.phrase or ("{}" if self.values.is_word else f"{self.title} {{}}")
        return phrase.format(text)

    @property
    def default_words(self) -> str:
        """The default in a sentence: ``q_len 1``, ``a contiguous cache``."""
        if self.values.or_none and self.default == self.values.none:
            return self.values.or_none
        return f"{self.name} {self.write(self.default)}"


def axis(values: Values, letter: str = "", default: Any = REQUIRED, **about: Any) -> Any:
    """A field of a dataclass that is an axis; `about` has further fields of `Axis`."""
    declared = Axis("", values, letter, default, **about)
    return field(default=MISSING if default is REQUIRED else default, metadata={"axis": declared})


def axes_of(declared: type) -> tuple[Axis, ...]:
    """The axes that are fields of a dataclass, in their order."""
    return tuple(replace(own.metadata["axis"], name=own.name) for own in fields(declared))
