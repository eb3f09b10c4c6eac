"""Help texts: options in panels, arguments without Python types."""

from __future__ import annotations

import re
from operator import itemgetter
from typing import Any

import typer
from typer.core import TyperCommand

#: Panels of a command with many options, in the order of its help.
PANELS = ("Most used", "Problem", "Rarely used axes", "What is measured", "Run")
#: Options by panel. Other axes and options go to the last panels.
_MEMBERS = {
    "Most used": (
        *("kernels", "gpu", "context", "heads", "head_dim", "batch", "model"),
        *("out", "resume"),
    ),
    "Problem": (
        *("dtype", "kv_layout", "kv_dtype", "q_len", "page_size", "capacity", "lengths"),
        *("lengths_on", "tp", "causal", "window_left", "softcap", "sinks", "draw", "seed"),
        *("layers", "positions"),
    ),
    "What is measured": (
        *("configs", "config", "cache", "sustained", "energy", "window", "occupancy"),
        *("counters", "prefill", "ci", "min_samples", "max_samples", "repeat"),
    ),
}


def panel_of(option: str, *, is_axis: bool) -> str:
    """Return the panel of an option of `leanbench sweep` or `leanbench decode`."""
    members = (panel for panel, names in _MEMBERS.items() if option in names)
    return next(members, "Rarely used axes" if is_axis else "Run")


class Command(TyperCommand):
    """A command that lists its options by `rich_help_panel`, in plain text."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        # Typer puts braces around required arguments.
        return [re.sub(r"[{}]", "", piece) for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        arguments: list[tuple[str, str]] = []
        panels: dict[str, list[tuple[int, tuple[str, str]]]] = {}
        params = self.get_params(ctx)
        has_panels = any(_panel(param) for param in params)
        for param in params:
            if (record := param.get_help_record(ctx)) is None:
                continue
            name, text = record
            if param.param_type_name == "argument":
                # Typer adds the type: RUN <list[str]>.
                arguments.append((re.sub(r" <[^>]*>$", "", name), text))
            else:
                panel = _panel(param) or (PANELS[-1] if has_panels else "Options")
                panels.setdefault(panel, []).append((_position(panel, param.name or ""), record))
        if arguments:
            with formatter.section("Arguments"):
                formatter.write_dl(arguments)
        for panel in sorted(panels, key=[*PANELS, "Options"].index):
            with formatter.section(panel):
                ordered = sorted(panels[panel], key=itemgetter(0))
                formatter.write_dl([record for _, record in ordered])


def _panel(param: Any) -> str | None:
    return getattr(param, "rich_help_panel", None)


def _position(panel: str, name: str) -> int:
    """Return the position in a panel. Options that are not listed keep the command's order."""
    members = _MEMBERS.get(panel, ())
    return members.index(name) if name in members else len(members)


class Commands(typer.Typer):
    """Group of commands with the help of `Command`."""

    def command(self, *args: Any, **options: Any) -> Any:
        return super().command(*args, cls=Command, **options)
