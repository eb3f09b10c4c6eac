"""Loans of a partials workspace to launches, on a fake GPU: streams, captures and counters."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from leanbench.kernels.lean import workspace
from leanbench.kernels.lean.workspace import Workspaces

GPU = torch.device("cuda", 0)
SMALL, LARGE = 4 << 20, 50_000_000


@pytest.fixture
def gpu(monkeypatch) -> SimpleNamespace:
    """Fake a GPU's current stream and capture state."""
    now = SimpleNamespace(stream=1, capture=None, made=[])

    def made(device, make):
        now.made.append(device)
        return make()

    def zeros(device, numbers, dtype):
        return torch.zeros(numbers, dtype=getattr(torch, dtype))

    empty = torch.empty
    # A torch without CUDA lacks this function.
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda index: now.stream, raising=False
    )
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now.capture is not None)
    monkeypatch.setattr(torch, "empty", lambda *size, device, **kinds: empty(*size, **kinds))
    monkeypatch.setattr(workspace, "_capture_id", lambda stream: now.capture)
    monkeypatch.setattr(workspace, "_made", made)
    monkeypatch.setattr(workspace, "_zeros", zeros)
    return now


def test_a_workspace_grows_with_the_calls_of_its_stream(gpu):
    workspaces = Workspaces()
    small = workspaces.lend(GPU, 1000).slots
    assert small.numel() * 8 == SMALL
    assert workspaces.lend(GPU, SMALL).slots is small
    large = workspaces.lend(GPU, LARGE).slots
    assert large.numel() * 8 == 1 << 26
    assert workspaces.lend(GPU, 1000).slots is large
    gpu.stream = 2
    beside = workspaces.lend(GPU, 1000).slots
    assert beside.data_ptr() not in (small.data_ptr(), large.data_ptr())
    # Three workspaces, and the counters.
    assert len(gpu.made) == 4


def test_no_two_launches_have_an_epoch(gpu):
    workspaces = Workspaces()
    epochs = [workspaces.lend(GPU, 1000).epoch for _ in range(100)]
    assert len(set(epochs)) == 100
    assert all(-(2**31) <= epoch < 2**31 for epoch in epochs)


@pytest.mark.parametrize("first", [0, 2**31 - 1, 2**31, 2**32 - 1, 2**32])
def test_epochs_are_32_bits_and_never_0(first, gpu):
    workspaces = Workspaces()
    workspaces.epochs = iter(range(first, first + 3))  # pyright: ignore
    epochs = [workspaces.lend(GPU, 1000).epoch for _ in range(3)]
    assert 0 not in epochs
    assert [epoch % 2**32 for epoch in epochs] == [
        number % 2**32 or 1 for number in range(first, first + 3)
    ]


def test_a_capture_has_slots_and_a_counter_of_its_own(gpu):
    workspaces = Workspaces()
    eager = workspaces.lend(GPU, 1000)
    assert eager.replays.item() == 0
    gpu.capture = 7
    first, second = workspaces.lend(GPU, 1000), workspaces.lend(GPU, 1000)
    assert (eager.stays, first.stays, second.stays) == (True, False, False)
    assert first.slots.numel() * 8 == 1000
    assert len({slots.data_ptr() for slots in (eager.slots, first.slots, second.slots)}) == 3
    # Incremented once: both belong to one capture, and each replay increments it once.
    assert first.replays.data_ptr() == second.replays.data_ptr() != eager.replays.data_ptr()
    assert first.replays.item() == workspace._REPLAY_STEP
    gpu.capture = 8
    assert workspaces.lend(GPU, 1000).replays.data_ptr() != first.replays.data_ptr()
    gpu.stream = 2
    beside = workspaces.lend(GPU, 1000)
    assert beside.replays.data_ptr() != first.replays.data_ptr()
    assert beside.replays.item() == workspace._REPLAY_STEP
    gpu.capture = None
    assert workspaces.lend(GPU, 1000).replays.item() == 0


def test_epochs_of_replays_do_not_meet():
    """The graph has 1,000 launches, replayed 100,000 times."""
    step = workspace._REPLAY_STEP % 2**32
    distances = (torch.arange(1, 100_000) * step) % 2**32
    assert torch.minimum(distances, 2**32 - distances).min().item() > 1000


def test_the_first_call_may_not_be_captured(gpu):
    gpu.capture = 7
    with pytest.raises(RuntimeError, match="make the same call once before the capture"):
        Workspaces().lend(GPU, 1000)


def test_launches_keep_their_ranges_in_memory_of_their_own(gpu):
    workspaces = Workspaces()
    assert workspaces.keep(GPU, 1000) == (0, 0)  # no memory yet
    workspaces.lend(GPU, 1000)
    memory, numbers = workspaces.kept[GPU], 1 << 17
    kept = [workspaces.keep(GPU, numbers) for _ in range(100)]
    starts = [(address - memory.data_ptr()) // 4 for address, _ in kept]
    at_once = len(memory) // numbers
    assert sorted(starts[:at_once]) == list(range(0, len(memory), numbers))
    assert starts[at_once : 2 * at_once] == starts[:at_once]
    assert len({key for _, key in kept} | {0}) == 101
    assert workspaces.keep(GPU, len(memory)) == (0, 0)
