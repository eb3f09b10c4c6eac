"""GPUs that share sequences: lean.cu itself, launched for each of them on a fake GPU.

Launches run one after the other. The first ones time out while they wait for later ones, and are
repeated as the same launch once the others' partials have arrived.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import product

import pytest
import torch
from depth import deep
from lean_on_cpu import Cpu, Workspace, needs_compiler
from leanbench.kernels.lean.configs import LeanCudaConfig
from leanbench.kernels.lean.cuda_settings import cuda_config

from leanbench.check.poison import poison_unused
from leanbench.check.reference import Reference
from leanbench.core.inputs import AttentionInputs, Peers, make_inputs
from leanbench.core.problem import AttentionProblem
from leanbench.distributed.group import MOST_RANKS, PeerFields, workspace_bytes_for

pytestmark = needs_compiler

_LAUNCH = 1 << 20
#: Clock readings before a launch times out: longer than its own partials take to arrive.
_PATIENCE = 30_000


@dataclass
class FakeGroup:
    """Workspaces of `ranks` GPUs in the memory of this process."""

    ranks: int
    workspace_bytes: int
    launches: int = 0
    workspaces: list[torch.Tensor] = field(init=False)
    failures: list[torch.Tensor] = field(init=False)
    fields: list[PeerFields] = field(init=False)

    def __post_init__(self) -> None:
        numbers = self.workspace_bytes // 4
        self.workspaces = [torch.zeros(numbers, dtype=torch.int32) for _ in range(self.ranks)]
        self.failures = [torch.zeros(1, dtype=torch.int32) for _ in range(self.ranks)]
        addresses = [workspace.data_ptr() for workspace in self.workspaces]
        self.fields = [
            PeerFields(
                _LAUNCH,
                _PATIENCE,
                0,
                self.failures[rank].data_ptr(),
                numbers // 2,
                rank,
                (ctypes.c_uint64 * MOST_RANKS)(*addresses),
            )
            for rank in range(self.ranks)
        ]

    def peers(self, rank: int) -> Peers:
        return Peers(self.ranks, rank, ctypes.addressof(self.fields[rank]))


def shards_of(problem: AttentionProblem, lengths: list[tuple[int, ...]]) -> list[AttentionInputs]:
    """Return inputs for each rank, with the same queries and these lengths."""
    shards = [
        make_inputs(problem, "cpu", 1 + rank, score_scale=6.0) for rank in range(len(lengths))
    ]
    shards = [replace(shard, q=shards[0].q, sinks=shards[0].sinks) for shard in shards]
    for shard, own in zip(shards, lengths, strict=True):
        assert shard.cache_seqlens is not None
        shard.cache_seqlens.copy_(torch.tensor(own, dtype=torch.int32))
        poison_unused(shard)
    return shards


def whole(problem: AttentionProblem, shards: list[AttentionInputs]) -> AttentionInputs:
    """Return the call over the tokens of all shards."""
    lengths = [shard.read_lengths() for shard in shards]
    total = [sum(own) for own in zip(*lengths, strict=True)]
    most = max(*total, 1)
    joined = replace(problem, context=(most,) * problem.batch, capacity=most, page_size=None)
    inputs = make_inputs(joined, "cpu", 99)
    assert inputs.cache_seqlens is not None
    inputs.cache_seqlens.copy_(torch.tensor(total))
    for sequence, cache in product(range(problem.batch), ("k_cache", "v_cache")):
        tokens = [
            rows_of(shard, cache, sequence)[: own[sequence]]
            for shard, own in zip(shards, lengths, strict=True)
        ]
        getattr(inputs, cache)[sequence, : total[sequence]] = torch.cat(tokens)
    return replace(inputs, q=shards[0].q, sinks=shards[0].sinks)


def rows_of(inputs: AttentionInputs, cache: str, sequence: int) -> torch.Tensor:
    """Return a sequence's tokens in a cache, up to its capacity."""
    tensor = getattr(inputs, cache)
    if inputs.block_table is None:
        return tensor[sequence]
    return tensor[inputs.block_table[sequence].long()].flatten(0, 1)


def launch_all(
    cpu: Cpu,
    group: FakeGroup,
    shards: list[AttentionInputs],
    configs: list[LeanCudaConfig],
    sms: list[int],
    seed: int = 0,
) -> None:
    """Make one launch of the group: all ranks in turn, and again those that timed out."""
    workspaces = [Workspace(1000 + 77 * group.launches) for _ in shards]
    group.launches += 1
    for rank in [*range(group.ranks), *range(group.ranks - 1)]:
        group.fields[rank].tickets = group.launches * _LAUNCH
        group.fields[rank].failed = 0
        group.failures[rank].zero_()
        shards[rank].poison()
        own = replace(shards[rank], peers=group.peers(rank))
        cpu.launch(own, configs[rank], sms[rank], workspaces[rank], seed=seed + rank)
        assert group.fields[rank].tickets == (group.launches + 1) * _LAUNCH


PLAIN = AttentionProblem(3, 8, 2, (700, 1, 300), 64, capacity=768, lengths_on="device")
PAGED = replace(
    PLAIN, batch=2, kv_heads=1, context=(700, 130), dtype="bf16", page_size=16, q_len=2,
    causal=False, sinks=True,
)  # fmt: skip
ONE = cuda_config(32, 2, 2, 1, 1, 8, "async", 1, False)
PAGES = cuda_config(32, 2, 2, 1, 1, 16, "async", 1, False)
CLUSTERS = cuda_config(32, 2, 2, 1, 2, 8, "bulk", 1, False)
#: Problem, lengths by rank, a config per rank, SMs of each rank's GPU.
CASES = {
    # Uneven, empty on one rank, empty on both.
    "two": (PLAIN, [(700, 0, 300), (131, 0, 0)], [ONE, ONE], [7, 3]),
    # Ranks with different launch settings: a cluster per work range, and none.
    "settings": (PLAIN, [(700, 5, 300), (64, 1, 700)], [ONE, CLUSTERS], [4, 12]),
    "pages": (PAGED, [(700, 130), (0, 250)], [PAGES] * 2, [5, 9]),
}
DEEP_CASES = {
    "four": (PLAIN, [(700, 0, 300), (131, 0, 0), (1, 1, 1), (0, 0, 768)], [ONE] * 4, [7, 3, 1, 40]),
    "fixed runs": (
        PLAIN,
        [(700, 0, 300), (131, 77, 0)],
        [replace(ONE, fixed_run_tiles=4)] * 2,
        [7, 3],
    ),
}


def share(cpu: Cpu, name: str) -> None:
    """Make three launches, which use both halves of the workspaces, and repeat one.

    Checks that all ranks have the whole output with the same bits.
    """
    problem, lengths, configs, sms = (CASES | DEEP_CASES)[name]
    group = FakeGroup(len(lengths), workspace_bytes_for(len(lengths), 64, 64))
    shards = shards_of(problem, lengths)
    reference = Reference(whole(problem, shards))
    first = None
    for seed in range(3):
        launch_all(cpu, group, shards, configs, sms, seed)
        for shard in shards:
            assert reference.check(shard).failure(problem.dtype) is None
            assert torch.equal(shard.out, shards[0].out)
            assert torch.equal(shard.lse, shards[0].lse)
        first = shards[0].out.clone() if first is None else first
        assert torch.equal(shards[0].out, first)
    assert not any(failure.item() for failure in group.failures)


@pytest.mark.parametrize("name", [*CASES, *(deep(name) for name in DEEP_CASES)])
def test_all_ranks_have_the_whole_output_and_the_same_bits(cpu: Cpu, name: str) -> None:
    share(cpu, name)


def wait_in_vain(cpu: Cpu, case: str = "two") -> None:
    """Launch one rank alone; check that outputs are NaN, and the failure names the other."""
    problem, lengths, configs, sms = CASES[case]
    group = FakeGroup(2, workspace_bytes_for(2, 64, 64))
    shards = shards_of(problem, lengths)
    # Fills the half used by the lone launch with partials.
    for _ in range(2):
        launch_all(cpu, group, shards, configs, sms)
    own = replace(shards[0], peers=group.peers(0))
    own.out.zero_()
    own.lse.zero_()
    cpu.launch(own, configs[0], sms[0], Workspace(5))
    assert group.failures[0].item() == 2
    assert own.out.isnan().all()
    assert own.lse.isnan().all()
    # Later launches would not end with this timeout.
    group.fields[0].timeout_ns = 1 << 62
    own.out.zero_()
    cpu.launch(own, configs[0], sms[0], Workspace(6))
    assert own.out.isnan().all()


def test_a_rank_that_does_not_come(cpu: Cpu) -> None:
    wait_in_vain(cpu)


#: Mutations of peers.cuh, each with the check that detects it.
MUTATIONS: dict[str, tuple[str, str, Callable[[Cpu, str], None]]] = {
    "epochs stay": ("(launch ^ shape(p)) | 1u << 31", "shape(p) | 1u << 31", wait_in_vain),
    "another's place": (
        "places.workspaces[peer], places.rank)",
        "places.workspaces[peer], 0)",
        share,
    ),
    "too many tickets": ("LAUNCH_TICKETS - (gridDim.x - 1)", "LAUNCH_TICKETS", share),
    "the second unit alone": ("head[peer].w != places.epoch | ", "", share),
}


@pytest.mark.parametrize("name", [deep(name) for name in MUTATIONS])
def test_a_line_that_is_wrong_is_noticed(name: str) -> None:
    old, new, attempt = MUTATIONS[name]
    with pytest.raises(AssertionError):
        attempt(Cpu(("peers.cuh", old, new)), "two")


@pytest.mark.parametrize(
    ("batch", "q_heads", "kv_heads"),
    [(2, 8, 2), (1, 12, 3), (3, 8, 1)],
    ids=["another batch", "batch and KV heads the other way round", "another group"],
)
def test_a_rank_with_another_shape_is_none_that_comes(
    cpu: Cpu, batch: int, q_heads: int, kv_heads: int
) -> None:
    problem = AttentionProblem(3, 4, 1, (70, 1, 30), 64, capacity=128, lengths_on="device")
    shape = {"batch": batch, "q_heads": q_heads, "kv_heads": kv_heads}
    other = replace(problem, **shape, context=problem.contexts[:batch])
    group = FakeGroup(2, workspace_bytes_for(2, 64, 64))
    for rank, own in ((0, other), (1, problem)):
        inputs = make_inputs(own, "cpu", 1)
        inputs.out.zero_()
        cpu.launch(replace(inputs, peers=group.peers(rank)), ONE, 3, Workspace(5 + rank))
        assert group.failures[rank].item() == 2 - rank
        assert inputs.out.isnan().all()
