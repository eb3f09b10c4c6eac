"""Where published runs and logs lie: a folder under `reports` for each GPU, and what names mean.

``peers`` lies at ``reports/h200/peers``, ``h100/peers`` at ``reports/h100/peers``. The same holds
for pages and pictures. All paths are relative to the checkout.
"""

from __future__ import annotations

import os
from pathlib import Path

#: By the name of the GPU in the catalogue. All but the first may be absent.
FOLDERS = {"h200": Path("reports") / "h200", "h100-sxm": Path("reports") / "h100"}
#: The folder whose names do not begin with it.
FOLDER = FOLDERS["h200"]


def gpu_of(name: str) -> str:
    """The GPU, by its name in the catalogue, whose folder something of that name lies in."""
    first = name.partition("/")[0]
    others = (gpu for gpu, folder in FOLDERS.items() if folder.name == first)
    return next(others, "h200")


def folder_of(name: str) -> Path:
    """The folder of that GPU."""
    return FOLDERS[gpu_of(name)]


def below(name: str) -> str:
    """The name without its GPU: ``peers`` of ``h100/peers``."""
    folder = folder_of(name)
    return name if folder == FOLDER else name.removeprefix(f"{folder.name}/")


def place_of(name: str) -> Path:
    """Where something of that name lies."""
    return folder_of(name) / below(name)


def name_of(place: Path) -> str:
    """The name of what lies there; empty outside of the folders."""
    for folder in FOLDERS.values():
        if place.is_relative_to(folder):
            return place.relative_to(folder if folder == FOLDER else folder.parent).as_posix()
    return ""


def link(name: str, document: str) -> str:
    """A link from a document to what has that name."""
    return f"[{name}]({Path(os.path.relpath(place_of(name), Path(document).parent)).as_posix()})"
