"""Others' exchanges between GPUs that share sequences: over gloo, in Triton's interpreter."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("exchanging_rank.py")
#: Without a GPU; torch's symmetric memory needs one.
KERNELS = ("nccl_all_gather", "nccl_all_to_all", "tree_attention", "ring_attention")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def test_exchanges_merge_what_ranks_make_of_their_shards() -> None:
    size, port = 2, free_port()
    root = Path(__file__).parents[2]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(rank), str(size), str(port), *KERNELS],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        )
        for rank in range(size)
    ]
    ended = [rank.communicate(timeout=150) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], ended
    for out, _ in ended:
        errors = json.loads(out.splitlines()[-1])
        assert errors.keys() == set(KERNELS)
        for name, (off, lse_off) in errors.items():
            assert off < 5e-4, (name, off)
            assert lse_off < 1e-5, (name, lse_off)
