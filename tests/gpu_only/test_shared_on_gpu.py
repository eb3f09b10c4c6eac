"""Sequences shared by two or more GPUs: see shared_sequences.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(180),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

SCRIPT = Path(__file__).with_name("shared_sequences.py")


def run(*arguments: str) -> str:
    """Return rank 0's output; check that all ranks exit without error."""
    gpus = min(8, torch.cuda.device_count())
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"]
    command = [sys.executable, "-m", *launcher, str(SCRIPT), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


def test_random_problems_are_right_and_alike_on_all_gpus() -> None:
    assert run("0", "fuzz=20").count("fuzz: ") == 1


def test_chained_steps_with_delays() -> None:
    assert run("0", "chain=10").count("chain: ") == 1


def test_a_rank_that_does_not_come_is_an_error_in_time() -> None:
    assert "did not deliver its partials to rank 0 within 1 s" in run("0", "late=1")
