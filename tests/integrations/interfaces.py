"""Whether a class that takes another's place takes its calls, and which fields a source reads."""

import ast
import inspect
from collections.abc import Callable, Iterator
from inspect import Parameter
from types import FunctionType, ModuleType
from typing import Any


def faults(own: Callable[..., Any], base: Callable[..., Any]) -> list[str]:
    """Calls of `base` that `own` does not take: parameters by name, in their place, left out."""
    of_own, of_base = _parameters(own), _parameters(base)
    takes_any = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in of_own.values())
    named = {name: one for name, one in of_base.items() if one.kind is not Parameter.VAR_KEYWORD}
    found = [f"does not take {name}" for name in named if name not in of_own and not takes_any]
    places = zip(_positional(of_own), _positional(of_base), strict=False)
    found += [f"has {name} in the place of {other}" for name, other in places if name != other]
    for name, parameter in of_own.items():
        optional = parameter.default is not Parameter.empty or parameter.kind in (
            Parameter.VAR_KEYWORD,
            Parameter.VAR_POSITIONAL,
        )
        if not optional and (name not in of_base or of_base[name].default is not Parameter.empty):
            found.append(f"needs {name}")
    return found


def _parameters(function: Callable[..., Any]) -> dict[str, Parameter]:
    return dict(inspect.signature(function).parameters)


def _positional(parameters: dict[str, Parameter]) -> list[str]:
    kinds = Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD
    return [name for name, parameter in parameters.items() if parameter.kind in kinds]


def overridden(own: type) -> Iterator[tuple[str, Callable[..., Any], Callable[..., Any]]]:
    """Methods of a class that one above it has, too: name, its own and the other."""
    for name in vars(own):
        base = getattr(super(own, own), name, None)
        if not name.startswith("__") and callable(base):
            yield name, getattr(own, name), base


def methods(own: type) -> dict[str, Callable[..., Any]]:
    """Functions of a class that are its own, and how it is made."""
    kinds = FunctionType, staticmethod, classmethod
    names = [name for name, value in vars(own).items() if isinstance(value, kinds)]
    return {
        name: getattr(own, name)
        for name in names
        if not name.startswith("__") or name == "__init__"
    }


def fields_read(module: ModuleType, *names: str) -> set[str]:
    """Return the fields that a module's source reads of variables with these names."""
    read = set()
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            of = node.value
            name = of.id if isinstance(of, ast.Name) else getattr(of, "attr", None)
            if name in names:
                read.add(node.attr)
    return read
