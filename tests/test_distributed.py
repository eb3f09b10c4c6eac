"""Calls over sequences shared by GPUs: rejected calls, and the tokens and heads of each rank."""

from __future__ import annotations

import ctypes
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import leanbench
from leanbench.attention.call import Call
from leanbench.core.errors import UserError
from leanbench.core.inputs import Peers
from leanbench.core.problem import AttentionProblem
from leanbench.distributed import (
    ContextGroup,
    Layout,
    contiguous_shard,
    interleaved_shard,
    lean_attn_with_kvcache,
)
from leanbench.distributed import group as module
from leanbench.distributed.group import (
    Place,
    _had_another,
    _own_place,
    _peer_workspaces,
    check_limits,
    check_places,
    half_numbers,
    late_sentence,
    workspace_bytes_for,
)

Q, CACHE = torch.zeros(1, 1, 8, 64).half(), torch.zeros(1, 32, 2, 64).half()


def group(failed: int = 0, workspace_bytes: int = 1 << 20) -> ContextGroup:
    """Return a group of two without GPUs; this process is rank 0, and rank `failed` - 1 is late."""
    own = ContextGroup.__new__(ContextGroup)
    own.rank, own.size, own.workspace_bytes = 0, 2, workspace_bytes
    own.peers = Peers(2, 0, 0)
    own._failed_rank, own._timeout_s = ctypes.c_int32(failed), 10.0
    return own


def call(**arguments: Any) -> Any:
    return lean_attn_with_kvcache(
        **{"q": Q, "k_cache": CACHE, "v_cache": CACHE, "group": group(), **arguments}
    )


@pytest.fixture
def attended(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Return the calls that reach the kernel."""
    calls: list[Call] = []

    def attend(call: Call, with_lse: bool) -> tuple[torch.Tensor, None]:
        calls.append(call)
        return call.q, None

    monkeypatch.setattr("leanbench.distributed.calls.attend", attend)
    return calls


#: Defaults of leanbench.lean_attn_with_kvcache.
DEFAULTS = {
    name: argument.default
    for name, argument in inspect.signature(leanbench.lean_attn_with_kvcache).parameters.items()
    if argument.default is not argument.empty
}


def test_arguments_that_ask_for_nothing(attended: list[Call]) -> None:
    more = {"scheduler_metadata": None, "pack_gqa": True, "sm_margin": 0}
    assert call(**DEFAULTS, **more) is Q
    for name, value in DEFAULTS.items():
        assert call(**{name: value}) is Q
    for window_size in ((-1, 0), [-1, 5], (-2, -7)):
        assert call(window_size=window_size, num_splits=3, rotary_interleaved=False) is Q
    plain = attended[0]
    assert all(one == plain for one in attended)
    assert (plain.extras, plain.peers) == (None, Peers(2, 0, 0))


def test_arguments_that_there_are_not() -> None:
    with pytest.raises(TypeError, match="has no argument 'windows'"):
        call(windows=None)
    with pytest.raises(TypeError) as caught:
        call(group="x")
    assert str(caught.value) == ("group is 'x': pass a leanbench.distributed.ContextGroup, or None")


def test_rows_without_numbers_are_refused_as_on_one_gpu() -> None:
    empty = torch.zeros(1, 1, 8, 0).half(), torch.zeros(1, 32, 2, 0).half()
    sentences = []
    for own in (None, group()):
        with pytest.raises(Exception, match="head_dim") as caught:
            call(q=empty[0], k_cache=empty[1], v_cache=empty[1], group=own)
        sentences.append((caught.type, str(caught.value)))
    assert sentences[0] == sentences[1]


@pytest.mark.parametrize(
    ("length", "size", "shards"),
    [
        (7, 3, [(0, 3), (3, 2), (5, 2)]),
        (1, 2, [(0, 1), (1, 0)]),
        # The first ones are the longer ones.
        (18, 8, [(0, 3), (3, 3), (6, 2), (8, 2), (10, 2), (12, 2), (14, 2), (16, 2)]),
    ],
)
def test_contiguous_shards(length: int, size: int, shards: list[tuple[int, int]]) -> None:
    assert [contiguous_shard(length, rank, size) for rank in range(size)] == shards


def test_contiguous_shards_of_tensors_are_those_of_numbers() -> None:
    for length, size in product(range(40), range(1, 9)):
        own = [contiguous_shard(length, rank, size) for rank in range(size)]
        tensors = [contiguous_shard(torch.tensor([length]), rank, size) for rank in range(size)]
        assert [(int(start), int(count)) for start, count in tensors] == own
        assert sum(count for _, count in own) == length
    problem = AttentionProblem(2, 8, 8, (18, 1024), 64, parallel="cp:8")
    assert [problem.shard(rank).contexts[0] for rank in range(8)] == [3, 3, 2, 2, 2, 2, 2, 2]


def test_shards_of_lengths_near_the_end_of_32_bits() -> None:
    most = 2**31 - 1
    lengths = torch.tensor([most], dtype=torch.int32)
    for rank in range(8):
        start, count = contiguous_shard(lengths, rank, 8)
        assert (int(start), int(count)) == contiguous_shard(most, rank, 8)
        assert (start.dtype, count.dtype) == (torch.int32, torch.int32)
        share = interleaved_shard(lengths, rank, 8, 1 << 28)
        assert share.dtype == torch.int32
        assert int(share) == interleaved_shard(most, rank, 8, 1 << 28)


def test_shards_of_whole_numbers_of_numpy() -> None:
    numpy = pytest.importorskip("numpy")
    assert interleaved_shard(numpy.int64(20), 1, numpy.int32(2), 16) == 4
    assert contiguous_shard(numpy.int64(7), numpy.int64(1), 3) == (3, 2)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((7, 3, 3), "rank 3 is not one of 3 ranks, counted from 0: pass a lower one, or more"),
        ((7, -1, 3), "rank is -1: pass a whole number of 0 or more"),
        ((7, 0, 0), "size is 0: pass a whole number of 1 or more"),
        ((7.0, 0, 2), "length is 7.0: pass a whole number of 0 or more"),
        ((-7, 0, 2), "length is -7: pass a whole number"),
        ((torch.tensor([7.0]), 0, 2), "length is a tensor of torch.float32: pass one of whole"),
    ],
)
def test_shards_that_there_are_not(arguments: tuple[Any, int, int], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        contiguous_shard(*arguments)
    with pytest.raises(UserError, match=sentence):
        interleaved_shard(*arguments, 16)
    with pytest.raises(UserError, match="page_size is 0: pass a whole number of 1 or more"):
        interleaved_shard(7, 0, 2, 0)


def test_interleaved_shards() -> None:
    assert [interleaved_shard(100, rank, 3, 16) for rank in range(3)] == [36, 32, 32]
    assert [interleaved_shard(20, rank, 2, 16) for rank in range(2)] == [16, 4]
    lengths = torch.tensor([100, 0, 33])
    assert interleaved_shard(lengths, 0, 2, 16).tolist() == [52, 0, 17]
    assert interleaved_shard(lengths, 1, 2, 16).tolist() == [48, 0, 16]


def test_a_layout() -> None:
    layouts = [Layout(2, 2, rank) for rank in range(4)]
    places = [(own.tensor_rank, own.rank % own.context) for own in layouts]
    assert places == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [own.heads(8) for own in layouts] == [range(4)] * 2 + [range(4, 8)] * 2
    with pytest.raises(UserError, match="7 KV heads do not divide by 2 tensor-parallel GPUs"):
        layouts[0].heads(7)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"window_size": (5, 0)}, "does not support window_size where GPUs share the sequences"),
        ({"k": CACHE, "v": CACHE}, "does not support k, v where GPUs share the sequences"),
        ({"window_size": (-1, 0), "q": Q.expand(1, 2, 8, 64)}, "does not support window_size"),
        ({"window_size": None}, "does not support window_size"),
        ({"attention_chunk": 128, "k": None}, "does not support attention_chunk where"),
        ({"config": "fast", "num_splits": 3}, "does not support config where"),
        ({"causal": True, "q": Q.expand(1, 2, 8, 64)}, "causal=True with 2 query tokens"),
        ({"q": Q.clone().requires_grad_()}, "has no gradient"),
    ],
)
def test_what_depends_on_places_is_refused(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(NotImplementedError, match=sentence):
        call(**arguments)


def test_a_late_rank_is_the_next_calls_error() -> None:
    with pytest.raises(RuntimeError) as caught:
        call(group=group(failed=2))
    assert str(caught.value) == late_sentence(1, 0, 10.0)
    assert str(caught.value).startswith(
        "rank 1 of the context group did not deliver its partials to rank 0 within 10 s: it died"
    )


def test_a_workspace_that_is_too_small() -> None:
    assert workspace_bytes_for(2, 8, 64) == 2 * 2 * 8 * 64 // 4 * 32
    with pytest.raises(UserError, match="take 16384 bytes, the group's workspace has 16383"):
        call(group=group(workspace_bytes=16383))


def places(*gpus: str, **fields: Any) -> list[Place]:
    """Return ranks on these GPUs of one host."""
    return [Place("one", gpu, index, **fields) for index, gpu in enumerate(gpus)]


#: Places of ranks that may not share sequences, and words of the sentence.
WRONG_PLACES = [
    ([*places("a"), Place("two", "b", 1)], "rank 0 is on one, rank 1 on two"),
    ([*places("a"), Place("one")], "rank 1 has no GPU that torch can use: a context group"),
    (places("a", "b", "a"), "ranks 0 and 2 are both on GPU a"),
    ([*places("a"), Place("one", "b", 1, had_another=True)], "rank 1 had a ContextGroup before"),
    (places(*"abcdefghi"), "at most 8 GPUs, this one would have 9"),
    *(
        (
            [own._replace(apart=found) for own, found in zip(places("a", "b"), apart, strict=True)],
            "the GPUs of ranks 0 and 1 have no peer access: choose GPUs that have it, `leanbench",
        )
        for apart in ((("b",), ()), ((), ("c", "a")))
    ),
    (
        [Place("one", "a"), Place("one", "b")],
        "ranks 0 and 1 both count their GPU as cuda:0, a CUDA_VISIBLE_DEVICES for each rank: start"
        " them with the same GPUs visible to all, and call"
        ' torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))',
    ),
]


@pytest.mark.parametrize(("ranks", "sentence"), WRONG_PLACES, ids=[own for _, own in WRONG_PLACES])
def test_where_ranks_may_not_be(ranks: list[Place], sentence: str) -> None:
    check_places(places("a", "b"))
    check_places(places("a", "b", apart=("c",)))
    with pytest.raises(UserError, match=re.escape(sentence)):
        check_places(ranks)


#: Rank 0 had a context group with another process group, rank 1 is new. Neither has a GPU.
_MEETS_AGAIN = """
import sys
from datetime import timedelta
import torch, torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from leanbench.core.errors import UserError
from leanbench.distributed import ContextGroup, group
rank, path = int(sys.argv[1]), sys.argv[2]
symmetric_memory.empty = lambda size, dtype, device: torch.zeros(size, dtype=dtype)
symmetric_memory.rendezvous = lambda *arguments: None
torch.cuda.synchronize = lambda device: None
group._own_place = lambda: group.Place("one", "ab"[rank], rank)
if rank == 0:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group._peer_workspaces(dist.group.WORLD, torch.device("cpu"), 32)
    dist.destroy_process_group()
store = dist.FileStore(path, 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=90))
try:
    ContextGroup()
except UserError as error:
    print(error)
dist.destroy_process_group()
"""


@pytest.mark.deep
def test_a_rank_that_had_another_group_is_every_ranks_error(tmp_path: Path) -> None:
    root = Path(__file__).parents[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _MEETS_AGAIN, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=root,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=100) for rank in ranks]
    assert {out.strip() for out, _ in outputs} == {
        "rank 0 had a ContextGroup before torch.distributed.destroy_process_group, and torch would"
        " look for the ranks of that one, whose process group had the same name: start new"
        " processes for another ContextGroup"
    }, outputs


def test_a_process_that_is_no_member_of_the_group_is_refused() -> None:
    with alone(), pytest.raises(UserError, match="rank 0 of all processes is no member of the"):
        # Result of torch.distributed.new_group for processes outside of the group.
        ContextGroup(dist.GroupMember.NON_GROUP_MEMBER)  # type: ignore[arg-type]


@contextmanager
def alone() -> Iterator[None]:
    """Make this process a group of one."""
    store: Any = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_without_processes_a_group_is_refused() -> None:
    for make in (ContextGroup, Layout.make):
        with pytest.raises(UserError, match=r"^torch\.distributed is not initialized: start a"):
            make()


def test_what_is_no_process_group_is_refused() -> None:
    groups: list[Any] = ["world", 0, [], object()]
    for _ in range(2):
        with alone():
            for group in groups:
                with pytest.raises(UserError, match="which is no process group, or one that was"):
                    ContextGroup(group)
            # It was destroyed before the second time.
            groups = [dist.group.WORLD]


def test_only_process_groups_by_the_name_of_one_that_is_gone_had_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_met", {})
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    memory = "torch.distributed._symmetric_memory"
    monkeypatch.setattr(f"{memory}.empty", lambda size, dtype, device: torch.zeros(size))
    monkeypatch.setattr(f"{memory}.rendezvous", lambda *arguments: None)
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    kept: list[Any] = []
    for had_another in (False, True):
        place = f"file://{tmp_path}/{had_another}"
        dist.init_process_group("gloo", init_method=place, rank=0, world_size=1)
        try:
            groups: list[Any] = [dist.group.WORLD, *(dist.new_group([0]) for _ in range(2))]
            assert [_had_another(own) for own in groups] == [had_another] * 3
            for own in groups:
                _peer_workspaces(own, torch.device("cpu"), 32)
            # Another context group of the same process group, or next to one of another.
            assert not any(_had_another(own) for own in groups)
            assert not _had_another(dist.new_group([0]))
        finally:
            dist.destroy_process_group()
        # A destroyed group may still have a name in its process.
        kept.append(groups[0])


def test_the_place_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "one")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert _own_place() == Place("one")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    gpus = [SimpleNamespace(uuid=uuid) for uuid in "abcd"]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpus[index])
    ways = {(2, 0), (0, 2), (2, 3)}
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *way: way in ways)
    assert _own_place() == Place("one", "c", 2, ("b", "d"))


WRONG_TIMES = [-1, 0, float("inf"), float("nan"), 1e11, 86_401, "5", True]
WRONG_SIZES = [0, -1, 31, 1e6, "64", None, True]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        *(({"timeout_s": own}, "pass the seconds that a launch waits") for own in WRONG_TIMES),
        *(({"workspace_bytes": own}, "pass a whole number of 32 or more") for own in WRONG_SIZES),
    ],
    ids=str,
)
def test_times_and_sizes_that_are_none(arguments: dict[str, Any], sentence: str) -> None:
    [(name, value)] = arguments.items()
    with pytest.raises(UserError, match=rf"^{name} is {re.escape(repr(value))}: {sentence}"):
        ContextGroup(**arguments)


@pytest.mark.parametrize("timeout_s", [1e-9, 5, 86_400.0])
def test_times_and_sizes_at_the_limits_are_taken(timeout_s: float) -> None:
    check_limits(timeout_s, 32)


def test_the_second_half_of_a_workspace_starts_at_a_unit() -> None:
    assert half_numbers(1_000_010) == 125_000
    assert half_numbers(64 << 20) == 8 << 20
    for workspace_bytes in range(32, 200):
        half_bytes = 4 * half_numbers(workspace_bytes)
        assert half_bytes % 16 == 0
        assert 2 * half_bytes <= workspace_bytes < 2 * half_bytes + 32
    # Data that fits the workspace fits its halves.
    assert all(workspace_bytes_for(8, rows, 4) % 32 == 0 for rows in range(1, 9))


def test_a_group_of_one_is_a_call_on_this_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def on_this_gpu(*tensors: torch.Tensor, **arguments: Any) -> torch.Tensor:
        seen.update(arguments)
        return tensors[0]

    monkeypatch.setattr("leanbench.distributed.calls._on_this_gpu", on_this_gpu)
    alone = group()
    alone.size = 1
    assert call(group=alone, window_size=(5, 0), softcap=2.0) is Q
    assert call(group=None, cache_seqlens=7) is Q
    assert (seen["window_size"], seen["cache_seqlens"]) == ((5, 0), 7)
