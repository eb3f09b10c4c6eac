"""A rank of test_distributed_kernels.py. Arguments: rank, number of ranks, port, kernels.

Prints the errors of each kernel as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
import pytest
import torch
import torch.distributed as dist
from library_stand_ins import stand_in

from leanbench.core.inputs import AttentionInputs, Peers, make_inputs
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel
from leanbench.gpu.catalogue import find

PROBLEM = AttentionProblem(2, 4, 2, 48, 64)


def expected(shards: list[AttentionInputs]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and LSE over the tokens of all shards in fp64, for the first one's queries."""
    q = shards[0].q.double()
    k = torch.cat([shard.k_cache for shard in shards], 1).double().repeat_interleave(2, 2)
    v = torch.cat([shard.v_cache for shard in shards], 1).double().repeat_interleave(2, 2)
    scores = torch.einsum("bqhd,bthd->bhqt", q, k) * shards[0].softmax_scale
    return torch.einsum("bhqt,bthd->bqhd", scores.softmax(-1), v), scores.logsumexp(-1)


class TorchDistBackend:
    def __init__(self, group: Any) -> None:
        self.group = group


class FlashInfer:
    """A fake of FlashInfer's exchange that detects a workspace in use before it is ready."""

    def __init__(self) -> None:
        self.ready: set[int] = set()
        self.group: Any = None

    def allocate(self, mapping: Any, *, mnnvl_config: Any) -> torch.Tensor:
        assert mapping.cp_size == mapping.world_size
        whole: Any = mnnvl_config.comm_backend
        assert whole.Split(mapping.rank, 0) is whole
        self.group = whole.group
        return torch.zeros(mapping.cp_size, 8, dtype=torch.int64)

    def init(self, workspace: torch.Tensor, cp_rank: int, cp_size: int) -> None:
        assert len(workspace) == cp_size
        self.ready.add(workspace.data_ptr())

    def alltoall(
        self, partial_o: torch.Tensor, softmax_stats: torch.Tensor, workspace: torch.Tensor,
        cp_rank: int, cp_size: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        assert workspace.data_ptr() in self.ready
        assert partial_o.shape[:-1] == softmax_stats.shape[:-1] == (2 * 4 // cp_size, cp_size)
        assert partial_o.is_contiguous()
        assert softmax_stats.is_contiguous()
        assert softmax_stats.shape[-1] % 2 == 0
        return self._exchanged(partial_o), self._exchanged(softmax_stats)

    def _exchanged(self, entries: torch.Tensor) -> torch.Tensor:
        sent = entries.movedim(-2, 0).contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        return received.movedim(0, -2).contiguous()


def stand_in_for_flashinfer() -> None:
    exchange, patch = FlashInfer(), pytest.MonkeyPatch()
    for name in ("flashinfer", "tvm_ffi"):
        stand_in(patch, name)
    stand_in(
        patch,
        "flashinfer.comm",
        Mapping=SimpleNamespace,
        decode_cp_a2a_allocate_mnnvl_workspace=exchange.allocate,
        decode_cp_a2a_init_workspace=exchange.init,
        decode_cp_a2a_alltoall=exchange.alltoall,
    )
    members = {"MnnvlConfig": SimpleNamespace, "TorchDistBackend": TorchDistBackend}
    stand_in(patch, "flashinfer.comm.mnnvl", **members)


def main() -> None:
    stand_in_for_flashinfer()
    rank, size = int(sys.argv[1]), int(sys.argv[2])
    store = f"tcp://127.0.0.1:{sys.argv[3]}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    shards = [make_inputs(PROBLEM, "cpu", 10 + own) for own in range(size)]
    out, lse = expected(shards)
    peers = Peers(size, rank, 0, dist.group.WORLD)
    inputs = replace(shards[rank], q=shards[0].q, peers=peers)
    config = kernel("lean_triton").default_config(PROBLEM, find("h200"))
    errors = {}
    for name in sys.argv[4:]:
        inputs.poison()
        launch = kernel(name).prepare(inputs, config)
        launch()
        launch()
        own = slice(None)
        if kernel(name).shares_heads:
            own = slice(rank * 4 // size, (rank + 1) * 4 // size)
        off = (inputs.out[:, :, own].double() - out[:, :, own]).abs().max()
        errors[name] = [float(off), float((inputs.lse[:, own].double() - lse[:, own]).abs().max())]
    print(json.dumps(errors), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
