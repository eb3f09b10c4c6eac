"""Processes that measure together, on the CPU through gloo."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from leanbench.core.errors import UserError
from leanbench.measure import ranks
from leanbench.measure.ranks import LOST_FOLLOWER, Gang, ProcessGroupReuseError, Ranks, devices_for

#: Each rank prints its results as JSON.
_TOGETHER = """
import json, sys
import torch
from leanbench.core.errors import GpuUnusable, UserError
from leanbench.measure import ranks as module
rank, port = int(sys.argv[1]), int(sys.argv[2])
store = None
if rank == 0:
    store = module._store(0, 2, is_master=True)
    port = store.port
    print(port, flush=True)
ranks = module.join(rank, 2, port, None)
got = {"first": ranks.broadcast({"problem": 7} if rank == 0 else None),
       "all": ranks.all_gather(rank + 10), "fine": ranks.together(lambda: rank)}
def refuse():
    if rank == 1:
        raise UserError("no room: choose a smaller context")
def crash():
    if rank == 1:
        raise ValueError("nonsense")
def overflow():
    if rank == 1:
        raise torch.OutOfMemoryError("CUDA out of memory")
def count():
    # Rank 0 is waiting for a number of each rank.
    crash()
    return ranks.all_gather(rank)
for name, work, kind in (("refused", refuse, UserError), ("crashed", crash, GpuUnusable),
                         ("full", overflow, MemoryError), ("counted", count, GpuUnusable)):
    try:
        ranks.together(work)
    except kind as error:
        got[name] = [str(error), error is ranks.refusal]
got["again"] = ranks.all_gather(rank)
print(json.dumps(got), flush=True)
module.leave()
"""

_LOSES_ONE = """
import time
from leanbench.measure.ranks import Gang
gang = Gang()
with gang.at_work():
    gang._start(1, 2, gang._open_store(2), 99)
    time.sleep(120)
"""


#: A follower that answers nothing.
_CLOSES = """
import subprocess, sys
from leanbench.measure import ranks as module
module._LEAVES_S = 0.1
gang = module.Gang()
asleep = [sys.executable, "-c", "import time; print(1, flush=True); time.sleep(600)"]
follower = subprocess.Popen(asleep, stdout=subprocess.PIPE)
follower.stdout.readline()
gang.ranks, gang._followers = module.Ranks(0, 2), [follower]
told = []
gang.ranks.broadcast = told.append
module.leave = lambda: told.append("left")
gang.close()
print(told, follower.returncode, gang.ranks, gang._followers)
"""


def python(script: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", script, *arguments]
    root = Path(__file__).parents[2]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=root
    )


def test_ranks_agree_and_a_failure_of_one_is_everybodys() -> None:
    first = python(_TOGETHER, "0", "0")
    assert first.stdout is not None
    port = first.stdout.readline().strip()
    second = python(_TOGETHER, "1", port)
    outputs = [process.communicate(timeout=100) for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], outputs
    got = [json.loads(out.splitlines()[-1]) for out, _ in outputs]
    for rank, own in enumerate(got):
        assert own == {
            "first": {"problem": 7},
            "all": [10, 11],
            "fine": rank,
            "refused": ["no room: choose a smaller context", True],
            "crashed": ["rank 1: ValueError: nonsense", True],
            "full": ["rank 1: OutOfMemoryError: CUDA out of memory", True],
            "counted": ["rank 1: ValueError: nonsense", True],
            "again": [0, 1],
        }


@pytest.mark.deep
def test_a_worker_ends_with_a_follower_that_ends_at_work() -> None:
    worker = python(_LOSES_ONE)
    _, errors = worker.communicate(timeout=100)
    assert worker.returncode == LOST_FOLLOWER
    assert "rank 1 ended with 1" in errors


def test_a_follower_that_does_not_leave_is_killed() -> None:
    worker = python(_CLOSES)
    out, errors = worker.communicate(timeout=100)
    assert out.strip() == "[None, 'left'] -9 None []", errors


def test_a_process_has_one_gang_and_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_device_count", lambda: 4)
    monkeypatch.setattr(ranks, "leave", lambda: None)
    gang, own = Gang(), Ranks(0, 2)
    monkeypatch.setattr(own, "broadcast", lambda value: value)
    gang.ranks, gang._store = own, object()
    assert gang.of(2, 0, {}) is own
    with pytest.raises(ProcessGroupReuseError, match="4 ranks need a new process: this one has"):
        gang.of(4, 0, {})
    with pytest.raises(UserError, match="for 8 GPUs and 4 can be used here"):
        gang.of(8, 0, {})
    assert gang.of(2, 0, {}) is own
    gang.close()
    with pytest.raises(ProcessGroupReuseError, match="2 ranks need a new process"):
        gang.of(2, 0, {})
    assert devices_for(2, 0, 4) == [0, 1]
    assert devices_for(3, 2, 4) == [2, 0, 1]
    with pytest.raises(UserError, match="for 4 GPUs and 2 can be used here"):
        devices_for(4, 0, 2)
