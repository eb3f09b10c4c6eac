"""Config overrides: launch settings given in flags and sweep files, ``fa2:tile_tokens=128,...``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from leanbench.core.config import TAG, KernelConfig, check_names, config_type_of, limits
from leanbench.core.errors import UserError
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel
from leanbench.gpu.catalogue import find


def parse_overrides(texts: Sequence[str]) -> dict[str, KernelConfig]:
    """Return settings by kernel, from one text per kernel.

    Raises:
        UserError: A text is invalid, or two are for one kernel.
    """
    overrides: dict[str, KernelConfig] = {}
    for text in texts:
        name, config = parse_override(text)
        if name in overrides:
            raise UserError(
                f"config {text!r}: {name} already has settings, give one config per kernel"
            )
        overrides[name] = config
    return overrides


def parse_override(text: str) -> tuple[str, KernelConfig]:
    """Parse ``lean:implementation=triton,tile_tokens=128,...`` with all settings of the kernel.

    Raises:
        UserError: A setting is unknown, missing, repeated or out of range.
    """
    name, colon, written = text.partition(":")
    name = name.strip()
    if not colon or not name:
        raise UserError(
            f"config {text!r} is invalid: write KERNEL:FIELD=VALUE,... such as {_example('lean')}"
        )
    types = kernel(name).config_types
    if not types:
        raise UserError(f"config {text!r}: {name} has no launch settings, leave it out")
    items = _items(text, name, written)
    config_type = KernelConfig
    try:
        _check_values(types, items)
        config_type = config_type_of(types, items.pop(TAG, None), items)
        check_names(config_type, items)
        known = limits(config_type)
        return name, config_type(
            **{field: known[field].parse(value) for field, value in items.items()}
        )
    except UserError as error:
        # A question, "did you mean 'copy'?", ends a sentence.
        then = " Write settings as in" if str(error).endswith("?") else ", as in"
        raise UserError(f"config {text!r}: {error}{then} {_example(name, config_type)}") from None


def check_overrides(overrides: Mapping[str, KernelConfig], kernels: Sequence[str]) -> None:
    """Reject settings of a kernel that does not run."""
    for name in overrides:
        if name not in kernels:
            raise UserError(
                f"config {override_text(name, overrides[name])!r} is for a kernel that is not among"
                f" {', '.join(kernels)}: add {name} to --kernels or leave its config out"
            )


def override_text(name: str, config: KernelConfig) -> str:
    """Format settings as `parse_override` reads them."""
    values = config.to_dict()
    written = (
        f"{field}={str(value).lower() if isinstance(value, bool) else value}"
        for field, value in values.items()
    )
    return f"{name}:{','.join(written)}"


def _check_values(types: Sequence[type[KernelConfig]], items: Mapping[str, str]) -> None:
    """Reject a value that no implementation of the kernel accepts."""
    for field, value in items.items():
        known = [of_type[field] for of_type in map(limits, types) if field in of_type]
        faults = [limit.fault(limit.parse(value)) for limit in known]
        if faults and None not in faults:
            raise UserError(f"{field} {known[0].parse(value)!r} {faults[0]}")


def _items(text: str, name: str, written: str) -> dict[str, str]:
    """Return the values after the colon by field."""
    items: dict[str, str] = {}
    for item in written.split(","):
        field, equals, value = item.partition("=")
        field, value = field.strip(), value.strip()
        if not equals or not field or not value:
            raise UserError(
                f"config {text!r}: {item.strip()!r} is not FIELD=VALUE, write for example"
                f" {_example(name)}"
            )
        if field in items:
            raise UserError(f"config {text!r}: {field} is given twice, leave one of them out")
        items[field] = value.lower() if field == TAG else value
    return items


def _example(name: str, config_type: type[KernelConfig] = KernelConfig) -> str:
    """Return example settings of a type, those of the heuristic if possible."""
    problem, gpu = AttentionProblem(1, 8, 8, 4096, 64), find("h200")
    shown = kernel(name)
    configs = [shown.default_config(problem, gpu), *shown.candidate_configs(problem, gpu)]
    typed = (config for config in configs if isinstance(config, config_type))
    return override_text(name, next(typed, configs[0]))
