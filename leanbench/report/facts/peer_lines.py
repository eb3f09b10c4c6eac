"""How libraries ran: in which of their modes, and on which layout of K and V."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from leanbench.core.registry import kernels


def mode_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """``flashinfer_best: flashinfer in 30 of 42 cells, flashinfer_cuda_cores in 12.`` for each
    kernel whose config names a mode.

    Args:
        rows: as in results.jsonl.
    """
    modes: dict[str, Counter[str]] = {}
    for row in rows:
        config = row.get("config") or {}
        if "mode" in config:
            modes.setdefault(row["kernel"], Counter())[config["mode"]] += 1
    return [f"{kernel}: {_counted(counts)}." for kernel, counts in modes.items()]


def _counted(counts: Counter[str]) -> str:
    (first, most), *others = counts.most_common()
    return ", ".join(
        [f"{first} in {most} of {counts.total()} cells", *(f"{mode} in {n}" for mode, n in others)]
    )


def layout_line(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """A sentence on the layouts of a run in which a library's kernel ran; None of any other."""
    registered = kernels()
    ran = {row["kernel"] for row in rows if row.get("latency_us") is not None}
    if not any(name in registered and registered[name].is_peer for name in ran):
        return None
    layouts = {row["problem"].get("kv_layout", "HND") for row in rows}
    return (
        f"All kernels of a problem read the same K and V, in the layout of the problem"
        f" ({', '.join(sorted(layouts))}): none is given the layout that it prefers."
    )
