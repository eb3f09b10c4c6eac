"""Real sweeps in processes of their own. They predict, so they need no GPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from leanbench.core.config import TileConfig
from leanbench.core.decomposition import TileGrid, one_cta_per_tile
from leanbench.core.problem import AttentionProblem
from leanbench.gpu.catalogue import find
from leanbench.gpu.local import DEFAULT_GPU
from leanbench.model.simulate import latency_us

KERNELS = (Path(__file__).parents[1] / "fixtures" / "kernels", Path(__file__).parent / "kernels")


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "leanbench", *words]


def environment(**more: str) -> dict[str, str]:
    # No GPU even where there is one: these drills are about processes.
    path = os.pathsep.join(map(str, KERNELS))
    return {**os.environ, "LEANBENCH_KERNEL_PATH": path, "CUDA_VISIBLE_DEVICES": "", **more}


def answer_signals() -> None:
    """Reset signals in a child. It inherits ignored ones from nohup or a background shell."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def run(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    options = {
        "env": environment(),
        "preexec_fn": answer_signals,
        "capture_output": True,
        "text": True,
        "timeout": 240,
        **options,
    }
    return subprocess.run(command(*words), **options)


def start(*words: str, **more: str) -> subprocess.Popen[str]:
    """Start a command in a new process group."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(
        command(*words),
        env=environment(**more),
        start_new_session=True,
        preexec_fn=answer_signals,
        **pipes,
    )


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "results.jsonl").read_bytes().splitlines()]


def whole_rows(path: Path) -> int:
    results = path / "results.jsonl"
    return results.read_bytes().count(b"\n") if results.exists() else 0


def wait_until(done: Any, what: str, seconds: float = 240.0) -> None:
    """Wait for an event that may be slow. The limit is for one that never comes."""
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            pytest.fail(f"{what} did not come within {seconds:g} s")
        time.sleep(0.01)


def children(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    if not path.exists():
        pytest.skip("needs /proc/PID/task/PID/children, which this system does not have")
    return [int(child) for child in path.read_text().split()]


def is_gone(pid: int) -> bool:
    """Return True if a process ended, even if nobody waited for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def stand_in_us(context: int) -> float:
    """Return the latency that the model predicts for the fixture kernels."""
    problem = AttentionProblem(1, 32, 8, context, 128)
    config = TileConfig(tile_tokens=64, num_warps=4, num_stages=2)
    return latency_us(
        one_cta_per_tile(TileGrid.of(problem, 64)), problem, config, find(DEFAULT_GPU)
    )
