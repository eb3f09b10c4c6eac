"""Triton's builds of lean_kernel for captured launches, in a process without the interpreter."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import torch
from leanbench.kernels.lean import LeanTriton, workspace

from leanbench.compile.triton_target import triton_target
from leanbench.core.inputs import shape_only
from leanbench.core.problem import AttentionProblem
from leanbench.gpu.catalogue import find

META = torch.device("meta")


def counters_of_captures(device: torch.device, captures: int) -> list[torch.Tensor]:
    """Return the counters of successive captures on a GPU's stream."""
    capture_id, counters = workspace._capture_id, []
    try:
        for capture in range(captures):
            workspace._capture_id = lambda stream, capture=capture: capture
            counters.append(workspace.WORKSPACES._counter_of_capture(device, 1))
    finally:
        workspace._capture_id = capture_id
    return counters


def builds_compiled(folder: Path) -> tuple[int, int]:
    """Count builds in an empty cache `folder`.

    Counts after a job of `leanbench tune`, and after five captures of the launch that it compiled
    for.
    """
    os.environ["TRITON_CACHE_DIR"] = str(folder)
    lean, problem = LeanTriton(), AttentionProblem(1, 8, 8, 1024, 64)
    config = lean.tuning_space(problem, find("h200"))[0]
    lean.compile(problem, config, (9, 0))
    ahead = len(list(folder.rglob("*.cubin")))
    (launch,) = lean.launches(shape_only(problem), config)
    for counter in counters_of_captures(META, 5):
        lent = (*launch.lent()[:-1], counter)
        with triton_target((9, 0)):
            replace(launch, lent=lambda lent=lent: lent).compile()
    return ahead, len(list(folder.rglob("*.cubin")))
