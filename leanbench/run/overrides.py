"""Launch settings that a person gives: ``lean:tile_tokens=128,num_warps=4,...``, in flags and in
sweep files alike.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from leanbench.core.errors import UserError, nearest
from leanbench.core.registry import KernelConfig, kernel

#: Least and most of each number. Matrix instructions want 16 tokens; Triton takes powers of two
#: only for `_POWERS`.
_LIMITS = {
    "tile_tokens": (16, 1024),
    "num_warps": (1, 32),
    "num_stages": (1, 10),
    "ctas_per_sm": (1, 32),
    "min_tiles_per_cta": (1, 2**20),
    "splits": (1, 2**16),
    "fixed_run_tiles": (1, 2**16),
    "chunk_tokens": (16, 128),
    "tile_rows": (8, 32),
    "cluster_size": (1, 8),
}
_POWERS = ("tile_tokens", "num_warps", "chunk_tokens", "tile_rows", "cluster_size")
#: What the words may be. Settings without `implementation` are Triton's.
_WORDS = {"implementation": ("cuda",), "copy": ("bulk", "async")}
_FLAGS = {"true": True, "yes": True, "false": False, "no": False}


def parse_pins(texts: Sequence[str]) -> dict[str, KernelConfig]:
    """Settings by kernel, from one text for each kernel.

    Raises:
        UserError: a text is not understood, or two are for one kernel; names that are unknown come
            with the nearest.
    """
    pins: dict[str, KernelConfig] = {}
    for text in texts:
        name, config = parse_pin(text)
        if name in pins:
            raise UserError(
                f"config {text!r}: {name} has settings already, give each kernel's once"
            )
        pins[name] = config
    return pins


def parse_pin(text: str) -> tuple[str, KernelConfig]:
    """Kernel and settings from ``lean:tile_tokens=128,...``; every field that the kernel has, and
    no other.

    Raises:
        UserError: anything in it is unknown, missing, twice or out of range.
    """
    name, colon, written = text.partition(":")
    name = name.strip()
    if not colon or not name:
        raise UserError(
            f"config {text!r} is not understood, write KERNEL:FIELD=VALUE,... such as"
            f" {_example('lean')}"
        )
    variants = _variants(kernel(name).name)
    if not variants:
        raise UserError(f"config {text!r}: {name} has no launch settings, leave it out")
    asked = _asked(text, name, written)
    # That of the kernel's implementations which is meant; the first where nothing tells them apart.
    has = max(variants, key=lambda variant: len(asked.keys() & variant.keys()))
    values: dict[str, Any] = {}
    for field, value in asked.items():
        if field not in has:
            raise UserError(
                f"config {text!r}: {name} has no setting {field!r}, {nearest(field, has)}"
            )
        values[field] = _value(text, field, value, has[field])
    missing = [field for field in has if field not in values]
    if missing:
        example = pin_text(name, KernelConfig(**has))
        raise UserError(
            f"config {text!r}: {name} needs {', '.join(missing)} as well, as in {example}"
        )
    return name, KernelConfig(**values)


def _asked(text: str, name: str, written: str) -> dict[str, str]:
    """What is written after the colon, by field."""
    asked: dict[str, str] = {}
    for item in written.split(","):
        field, equals, value = (part.strip() for part in item.partition("="))
        if not equals or not field or not value:
            raise UserError(
                f"config {text!r}: {item.strip()!r} is not FIELD=VALUE, write for example"
                f" {_example(name)}"
            )
        if field in asked:
            raise UserError(f"config {text!r}: {field} is given twice, leave one of them out")
        asked[field] = value
    return asked


def check_pinned(pins: Mapping[str, KernelConfig], kernels: Sequence[str]) -> None:
    """Raises UserError where settings are given for a kernel that does not run."""
    for name in pins:
        if name not in kernels:
            raise UserError(
                f"config {pin_text(name, pins[name])!r} is for a kernel that is not among"
                f" {', '.join(kernels)}: add {name} to --kernels or leave its config out"
            )


def pin_text(name: str, config: KernelConfig) -> str:
    """What `parse_pin` reads."""
    values = config.to_dict()
    written = (
        f"{field}={str(value).lower() if isinstance(value, bool) else value}"
        for field, value in values.items()
    )
    return f"{name}:{','.join(written)}"


def _value(text: str, field: str, value: str, example: Any) -> int | bool | str:
    if isinstance(example, bool):
        if value.lower() not in _FLAGS:
            raise UserError(
                f"config {text!r}: {field} {value!r} is not understood, write true or false"
            )
        return _FLAGS[value.lower()]
    if field in _WORDS:
        if value.lower() not in _WORDS[field]:
            fix = ": leave it out for Triton's settings" if field == "implementation" else ""
            raise UserError(
                f"config {text!r}: {field} {value!r} is not {' or '.join(_WORDS[field])}{fix}"
            )
        return value.lower()
    least, most = _LIMITS[field]
    number = int(value) if re.fullmatch(r"\d{1,9}", value, re.ASCII) else 0
    is_power = number & (number - 1) == 0
    if not least <= number <= most or (field in _POWERS and not is_power):
        kind = "a power of two" if field in _POWERS else "a whole number"
        raise UserError(f"config {text!r}: {field} {value!r} is not {kind} from {least} to {most}")
    return number


@cache
def _variants(name: str) -> list[dict[str, Any]]:
    """The settings that a kernel has, with those of its heuristic for a small problem; where it has
    several implementations, each's, Triton's first.
    """
    from leanbench.core.problem import AttentionProblem
    from leanbench.gpu.catalogue import find

    problem, gpu = AttentionProblem(1, 8, 8, 4096, 64), find("h200")
    found: dict[str, dict[str, Any]] = {}
    for config in (
        kernel(name).default_config(problem, gpu),
        *kernel(name).tuning_space(problem, gpu),
    ):
        if config is not None:
            found.setdefault(config.implementation or "", config.to_dict())
    return [found[implementation] for implementation in sorted(found)]


def _example(name: str) -> str:
    return pin_text(name, KernelConfig(**_variants(name)[0]))
