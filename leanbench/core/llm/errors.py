"""Refusals of models and of their config.json."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leanbench.core.errors import UserError
from leanbench.core.files import short_json


@dataclass(eq=False)
class UnknownModel(UserError):
    """A name that is neither in the registry nor a path."""

    #: Name, as given.
    name: str
    #: Nearest known name, or the known names.
    hint: str

    def __str__(self) -> str:
        return f"there is no model or config.json {self.name[:80]!r}, {self.hint}"


@dataclass(eq=False)
class NotAConfig(UserError):
    """A file that is no config.json of a language model."""

    path: Path
    reason: str

    def __str__(self) -> str:
        return (
            f"{self.path} is no config.json of a language model ({self.reason}): name the one that"
            " came with the weights"
        )


@dataclass(eq=False)
class InvalidKey(UserError):
    """A key of a config.json that is absent or out of range."""

    path: Path | str
    key: str
    #: Value; None if it is absent.
    value: Any
    #: Valid values.
    must: str

    def __str__(self) -> str:
        if self.value is None:
            return f"{self.path} has no {self.key}: add it, {self.must}"
        return f"{self.path} has {self.key} {short_json(self.value)}: it must be {self.must}"


@dataclass(eq=False)
class NoDecodeAttention(UserError):
    """A model without an attention layer that leanbench has."""

    #: Name or path.
    model: str
    #: Kinds of its layers.
    layers: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"{self.model} has no decode attention that leanbench knows, only"
            f" {', '.join(self.layers)}: name another model"
        )
