"""The command that repeats one row."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from leanbench.core.axes import AXES
from leanbench.core.errors import UserError
from leanbench.core.ragged import ragged_contexts

if TYPE_CHECKING:
    from leanbench.core.problem import AttentionProblem
    from leanbench.records.row import Row


def sweep_command(row: Row, problem: AttentionProblem, manifest: Mapping[str, Any]) -> str | None:
    """`leanbench sweep` with the row's problem, kernel, launch settings and what was measured;
    ready for a shell.

    None for a ragged batch that was not drawn as `--ragged` draws: no flag names its lengths.
    """
    values: dict[str, Any] = {
        "heads": (problem.q_heads, problem.kv_heads),
        "context": problem.max_context,
        "batch": problem.batch,
        **problem.stated,
    }
    if problem.is_ragged:
        share = _share(problem, manifest)
        if share is None:
            return None
        values["ragged"] = share
    words = ["leanbench", "sweep"]
    for name, axis in AXES.items():
        words += [axis.flag, axis.write(values[name])] if name in values else []
    words += ["--kernels", row.kernel, *_config(row), *_measured(row)]
    gpu = _mapping(manifest.get("gpu")).get("name")
    if row.source == "predicted" and gpu:
        words += ["--gpu", str(gpu)]
    return shlex.join(words)


def _config(row: Row) -> list[str]:
    if not row.config:
        return []
    texts = {
        name: str(value).lower() if isinstance(value, bool) else value
        for name, value in row.config.items()
    }
    return [
        "--config",
        f"{row.kernel}:{','.join(f'{name}={text}' for name, text in texts.items())}",
    ]


def _measured(row: Row) -> list[str]:
    """Flags of what the row holds besides latency."""
    flags = ["--cache", "warm"] if row.cache == "warm" else []
    if row.energy_mj is not None:
        flags.append("--energy")
    elif row.sustained_us is not None:
        flags.append("--sustained")
    if row.theoretical_warp_occupancy is not None or row.sm_busy_share is not None:
        flags.append("--occupancy")
    if row.counted_dram_bytes is not None or row.counted_warp_occupancy is not None:
        flags.append("--counters")
    return flags


def _share(problem: AttentionProblem, manifest: Mapping[str, Any]) -> float | None:
    """The mean over the longest context that `--ragged` was given: of the run's sweep, else a round
    one.
    """
    grids = _mapping(manifest.get("sweep")).get("grids")
    given = [
        share
        for grid in (grids if isinstance(grids, list) else [])
        for share in _shares(_mapping(grid))
    ]
    mean_over_max = problem.total_context / problem.batch / problem.max_context
    for share in dict.fromkeys([*given, round(mean_over_max, 2), round(mean_over_max, 3)]):
        try:
            if (
                0 < share < 1
                and _draw(problem.batch, problem.max_context, share) == problem.contexts
            ):
                return share
        except UserError:
            continue
    return None


#: A run has few ragged batches, and a row for each kernel.
_draw = lru_cache(ragged_contexts)


def _shares(grid: Mapping[str, Any]) -> list[float]:
    given = grid.get("ragged")
    return [share for share in given if isinstance(share, float)] if isinstance(given, list) else []


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
