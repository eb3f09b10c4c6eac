"""The command that repeats a row."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from leanbench.core.axes import AXES
from leanbench.core.lengths import write_lengths

if TYPE_CHECKING:
    from leanbench.core.problem import AttentionProblem
    from leanbench.records.reading import Run
    from leanbench.records.row import Row


def sweep_command(row: Row, problem: AttentionProblem, run: Run) -> str:
    """Build the shell command `leanbench sweep` that measures a row again."""
    words = ["leanbench", "sweep", *_axis_flags(problem), "--kernels", row.kernel]
    if row.config:
        texts = [
            f"{name}={str(value).lower() if isinstance(value, bool) else value}"
            for name, value in row.config.items()
        ]
        words += ["--config", f"{row.kernel}:{','.join(texts)}"]
    words += ["--cache", "warm"] if row.cache == "warm" else []
    if row.energy_mj is not None:
        words.append("--energy")
    elif row.sustained_us is not None:
        words.append("--sustained")
    if row.theoretical_warp_occupancy is not None or row.sm_busy_share is not None:
        words.append("--occupancy")
    if row.counted_dram_bytes is not None or row.counted_warp_occupancy is not None:
        words.append("--counters")
    if row.source == "predicted" and (gpu := run.section("gpu").get("name")):
        words += ["--gpu", str(gpu)]
    return shlex.join(words)


def _axis_flags(problem: AttentionProblem) -> list[str]:
    """Return the flags of a problem's axes; values that labels omit are omitted."""
    lengths: dict[str, Any] = {"context": problem.max_context, "batch": problem.batch}
    if problem.is_ragged:
        lengths = {"lengths": write_lengths(problem.contexts)}
    values = {"heads": (problem.q_heads, problem.kv_heads), **lengths, **problem.stated}
    if problem.whole_model is not None:
        # The model defines them.
        del values["heads"], values["head_dim"]
    flags = []
    for name, axis in AXES.items():
        if name in values:
            flags += [axis.flag, axis.write(values[name])]
    return flags
