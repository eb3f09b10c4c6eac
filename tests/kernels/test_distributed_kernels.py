"""Baseline exchanges between GPUs that share sequences: over gloo, in Triton's interpreter."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from library_stand_ins import stand_in

from leanbench.core.errors import UserError
from leanbench.core.inputs import make_inputs
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel

SCRIPT = Path(__file__).with_name("exchanging_rank.py")
#: Kernels that run without a GPU; torch's symmetric memory needs one.
KERNELS = (
    "nccl_all_gather",
    "nccl_all_to_all",
    "flashinfer_all_to_all",
    "tree_attention",
    "ring_attention",
)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.mark.deep
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


def test_flashinfers_exchange_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = AttentionProblem(1, 8, 2, 64, 64, parallel="cp:2")
    own, found = kernel("flashinfer_all_to_all"), "leanbench.kernels.distributed.find_spec"
    monkeypatch.setattr(found, lambda name: None)
    assert str(own.unsupported_reason(shared)).startswith(
        "flashinfer_all_to_all is not installed here (no module flashinfer, tvm_ffi): pip install"
    )
    monkeypatch.setattr(found, lambda name: ModuleSpec(name, None))
    assert own.unsupported_reason(shared) is None
    assert own.unsupported_reason(replace(shared, q_heads=9, kv_heads=3)) == (
        "flashinfer_all_to_all deals 9 query heads to 2 GPUs: choose heads that divide"
    )
    stand_in(monkeypatch, "flashinfer")
    monkeypatch.delitem(sys.modules, "flashinfer.comm", raising=False)
    with pytest.raises(UserError, match=r"flashinfer_all_to_all cannot import flashinfer\.comm"):
        own.prepare(make_inputs(replace(shared, parallel="none"), "cpu"), None)
