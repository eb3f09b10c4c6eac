"""A rank of test_distributed_kernels.py: its number, how many there are, a port, kernels.

Prints the errors of each kernel, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace

os.environ["TRITON_INTERPRET"] = "1"
import torch
import torch.distributed as dist

from leanbench.core.inputs import AttentionInputs, Peers, make_inputs
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel
from leanbench.gpu.catalogue import find

#: Of each rank.
PROBLEM = AttentionProblem(2, 4, 2, 48, 64)


def expected(shards: list[AttentionInputs]) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE over the tokens of all shards, with the first one's queries, in fp64."""
    q = shards[0].q.double()
    k = torch.cat([shard.k_cache for shard in shards], 1).double().repeat_interleave(2, 2)
    v = torch.cat([shard.v_cache for shard in shards], 1).double().repeat_interleave(2, 2)
    scores = torch.einsum("bqhd,bthd->bhqt", q, k) * shards[0].softmax_scale
    return torch.einsum("bhqt,bthd->bqhd", scores.softmax(-1), v), scores.logsumexp(-1)


def main() -> None:
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
