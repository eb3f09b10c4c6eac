"""Sweeps over the problems of FlashInfer-Bench's definitions and workloads."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from leanbench.formats.dataset import read_problems
from leanbench.run.cells import DEFAULT_KERNELS, Grid, Sweep

#: Those that take latent caches.
LATENT_KERNELS = ("lean_mla", "flash_mla", "flashinfer_mla")


def imported_sweep(path: Path) -> Sweep:
    """The sweep of a definition, workloads, or a folder of them; batch and context of a definition
    without workloads are the default grid's.

    Raises:
        UserError: as `leanbench.formats.dataset.read_problems`.
    """
    imported = read_problems(path)
    if note := imported.note():
        logging.getLogger(__name__).warning(f"{path}: {note}")
    kernels = (DEFAULT_KERNELS if imported.has_plain else ()) + (
        LATENT_KERNELS if imported.has_latent else ()
    )
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", path.resolve().stem).lstrip("._-")[:64]
    return Sweep(
        name or "flashinfer-bench",
        tuple(Grid(**axes) for axes in imported.grids),
        kernels,
        description=f"Decode attention of {path}, from FlashInfer-Bench",
    )
