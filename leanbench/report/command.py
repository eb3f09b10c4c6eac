"""The command that repeats one row."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from leanbench.core.axes import AXES
from leanbench.core.lengths import write_lengths

if TYPE_CHECKING:
    from leanbench.core.problem import AttentionProblem
    from leanbench.records.row import Row

#: Axes that a whole model says itself.
_OF_A_MODEL = ("heads", "head_dim")


def axis_texts(problem: AttentionProblem) -> dict[str, str]:
    """The values of a problem's axes as flags take them, by axis; what labels leave out is left
    out.
    """
    lengths: dict[str, Any] = {"context": problem.max_context, "batch": problem.batch}
    if problem.is_ragged:
        lengths = {"lengths": write_lengths(problem.contexts)}
    values = {"heads": (problem.q_heads, problem.kv_heads), **lengths, **problem.stated}
    if problem.whole_model is not None:
        for name in _OF_A_MODEL:
            values.pop(name)
    return {name: axis.write(values[name]) for name, axis in AXES.items() if name in values}


def sweep_command(row: Row, problem: AttentionProblem, manifest: Mapping[str, Any]) -> str:
    """`leanbench sweep` with the row's problem, kernel, launch settings and what was measured;
    ready for a shell.
    """
    words = ["leanbench", "sweep"]
    for name, text in axis_texts(problem).items():
        words += [AXES[name].flag, text]
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


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
