"""A GPU with a queue of work, an energy counter in ticks, and a power that lags the load."""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import dataclass, field


@dataclass
class SimulatedGpu:
    """Stands for the host, torch's events and `Nvml`; only `sleep` and calls move its clock."""

    replay_s: float = 0.004
    #: Maximum variation of replays, as a fraction of `replay_s`.
    replay_jitter: float = 0.0
    idle_w: float = 80.0
    load_w: float = 600.0
    #: Time constant of the power's response to the load.
    lag_s: float = 0.1
    tick_s: float = 0.1
    #: Time of the first tick.
    phase_s: float = 0.037
    nvml_call_s: float = 0.0003
    replay_call_s: float = 0.00002
    #: Maximum excess of a sleep.
    oversleep_s: float = 0.0
    #: Ratio of the instantaneous power's reading to the actual power; None: the driver has none.
    power_gain: float | None = 1.0
    has_counter: bool = True
    #: Faults of the counter: from each time on, add mJ to the true energy; None for a stopped
    #: counter.
    counter_faults: list[tuple[float, float | None]] = field(default_factory=list)
    reasons: list[tuple[float, list[str] | None]] = field(default_factory=lambda: [(0.0, [])])
    clocks: list[tuple[float, int | None]] = field(default_factory=lambda: [(0.0, 1980)])
    seed: int = 0

    def __post_init__(self) -> None:
        self.time_s = 0.0
        self._random = random.Random(self.seed)
        self._power_w = self.idle_w
        self._energy_mj = 1e6
        self._published_mj, self._published_w = self._energy_mj, self.idle_w
        self._next_tick_s = self.phase_s
        #: End times of the queued replays.
        self._ends: deque[float] = deque()
        self._busy_until_s = 0.0
        self.replays = 0
        self.longest_queue = 0
        #: Times at which the GPU ran out of work.
        self.went_idle: list[float] = []
        self.sleeps: list[float] = []

    # The host

    def now(self) -> float:
        return self.time_s

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.sleeps.append(seconds)
        self.advance(seconds + self._random.uniform(0, self.oversleep_s))

    def replay(self) -> None:
        self.advance(self.replay_call_s)
        lasts_s = self.replay_s * (1 + self._random.uniform(-1, 1) * self.replay_jitter)
        self._busy_until_s = max(self._busy_until_s, self.time_s) + lasts_s
        self._ends.append(self._busy_until_s)
        self.replays += 1
        self.longest_queue = max(self.longest_queue, len(self._ends))

    def record(self) -> SimulatedEvent:
        return SimulatedEvent(self, self._busy_until_s)

    # Nvml

    def total_energy_mj(self) -> int | None:
        self.advance(self.nvml_call_s)
        if not self.has_counter:
            return None
        energy_mj = self._published_mj
        for from_s, added_mj in self.counter_faults:
            if self.time_s >= from_s:
                energy_mj = 5e5 if added_mj is None else energy_mj + added_mj
        return int(energy_mj)

    def power_instant_w(self) -> float | None:
        self.advance(self.nvml_call_s)
        return None if self.power_gain is None else self._published_w * self.power_gain

    def sm_clock_mhz(self) -> int | None:
        self.advance(self.nvml_call_s)
        return [clock for from_s, clock in self.clocks if self.time_s >= from_s][-1]

    def throttle_reasons(self) -> list[str] | None:
        self.advance(self.nvml_call_s)
        return [reasons for from_s, reasons in self.reasons if self.time_s >= from_s][-1]

    # Time

    def advance(self, seconds: float) -> None:
        end_s = self.time_s + seconds
        while self.time_s < end_s:
            busy = self.time_s < self._busy_until_s
            stop_s = min(end_s, self._next_tick_s, self._busy_until_s if busy else math.inf)
            self._burn(stop_s - self.time_s, self.load_w if busy else self.idle_w)
            self.time_s = stop_s
            if busy and stop_s == self._busy_until_s:
                self.went_idle.append(stop_s)
            if stop_s == self._next_tick_s:
                self._next_tick_s += self.tick_s
                self._published_mj, self._published_w = self._energy_mj, self._power_w
            while self._ends and self._ends[0] <= self.time_s:
                self._ends.popleft()

    def _burn(self, seconds: float, target_w: float) -> None:
        gone = -math.expm1(-seconds / self.lag_s)
        self._energy_mj += (
            target_w * seconds + (self._power_w - target_w) * self.lag_s * gone
        ) * 1000
        self._power_w += (target_w - self._power_w) * gone


@dataclass
class SimulatedEvent:
    gpu: SimulatedGpu
    at_s: float

    def query(self) -> bool:
        return self.at_s <= self.gpu.time_s

    def synchronize(self) -> None:
        self.gpu.advance(max(0.0, self.at_s - self.gpu.time_s))

    def elapsed_time(self, end_event: SimulatedEvent, /) -> float:
        assert self.query()
        assert end_event.query(), "the event has not ended"
        return (end_event.at_s - self.at_s) * 1000
