"""Replays of one CUDA graph that keep a GPU busy while the host has other things to do."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

#: How much work is queued: seconds of it, within a number of replays. Enough to outlast what the
#: host does between two looks at the queue, not so much that the driver has no room and makes the
#: host wait.
_QUEUED_S = 0.03
_MIN_REPLAYS = 3
_MAX_REPLAYS = 256
#: The host looks at the queue before this share of it is done.
_PAUSE_SHARE = 0.25
_WARM_UP_PAUSE_S = 0.005


class Event(Protocol):
    """Methods of `torch.cuda.Event` that the queue uses."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end_event: Any, /) -> float: ...


def record_event() -> Event:
    """A timing event, recorded on torch's current stream."""
    import torch

    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class ReplayQueue:
    """Replays that wait their turn on the current stream. `finished` counts those that were seen to
    have ended.

    Args:
        replay: enqueues one replay.
        record: records an event behind it.
        now: the host's clock, in seconds.
        sleep: as `time.sleep`.
    """

    def __init__(
        self,
        replay: Callable[[], object],
        record: Callable[[], Event],
        now: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self._replay, self._record, self._now, self._sleep = replay, record, now, sleep
        #: The ends of the replays that are queued or running, in order.
        self._pending: deque[Event] = deque()
        self.finished = 0
        #: How often every replay had ended before the host looked again.
        self.gaps = 0
        replay()
        start = record()
        replay()
        self._last_end = record()
        self._last_end.synchronize()
        replay_s = max(1e-6, start.elapsed_time(self._last_end) / 1000)
        self._depth = min(_MAX_REPLAYS, max(_MIN_REPLAYS, math.ceil(_QUEUED_S / replay_s)))
        self._max_pause_s = _PAUSE_SHARE * self._depth * replay_s
        self._fill()

    @property
    def next_end(self) -> tuple[int, Event]:
        """The end of the replay that is running: what `finished` will be then, and its event."""
        return self.finished + 1, self._pending[0]

    @property
    def last_end(self) -> tuple[int, Event]:
        """The latest end that was seen: `finished` then, and its event."""
        return self.finished, self._last_end

    def feed(self) -> None:
        """Counts the replays that have ended and queues as many."""
        while self._pending and self._pending[0].query():
            self._last_end = self._pending.popleft()
            self.finished += 1
        self.gaps += not self._pending
        self._fill()

    def pause(self, seconds: float) -> None:
        """Sleeps that long, or shorter where the queue would run dry, and feeds."""
        self._sleep(max(0.0, min(seconds, self._max_pause_s)))
        self.feed()

    def keep_busy(self, seconds: float) -> None:
        """Nothing but replays."""
        end_s = self._now() + seconds
        while self._now() < end_s:
            self.pause(_WARM_UP_PAUSE_S)

    def drain(self) -> None:
        """Waits for what is queued."""
        if self._pending:
            self._pending[-1].synchronize()

    def _fill(self) -> None:
        while len(self._pending) < self._depth:
            self._replay()
            self._pending.append(self._record())
