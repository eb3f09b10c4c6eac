"""The matrix products of a step, alone: the linear layers and experts of the model, one after the
other on what a step gives them.

Not from a profiler: after its first look at the process, a step of 1,400 kernels without attention
took 6.82 ms in place of 6.26 (an H200, reports/h200/decode-models).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from leanbench.decode.step import DecodeStep

if TYPE_CHECKING:
    import torch


def products_of(step: DecodeStep) -> Callable[[], None]:
    """A launch of them, with the inputs of an eager step with the attention that it has."""
    import torch

    calls: list[tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]] = []

    def note(module: torch.nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        calls.append((module, args, named))

    hooks = [
        module.register_forward_pre_hook(note, with_kwargs=True)
        for module in step.model.modules()
        if isinstance(module, torch.nn.Linear) or type(module).__name__.endswith("Experts")
    ]
    try:
        step()
    finally:
        for hook in hooks:
            hook.remove()

    def launch() -> None:
        with torch.no_grad():
            for module, args, named in calls:
                module(*args, **named)

    return launch
