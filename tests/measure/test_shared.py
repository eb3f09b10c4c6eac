"""Measurement of problems shared by GPUs, on rank 0 of two fake ranks with identical actions."""

import pickle
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from pretended_gpu import PROBLEM, PretendedGpu, PretendedReplay, Right

from leanbench.core.errors import GpuUnusable, OutOfMemory, UserError
from leanbench.core.inputs import AttentionInputs, Peers
from leanbench.core.kernel import TracedCall
from leanbench.core.timeline import CtaTimeline, Timeline
from leanbench.measure import extras, shard, shared, timeline, timing
from leanbench.measure.energy import EqualReplays, sustained_outcome
from leanbench.measure.energy_meter import SustainedReading
from leanbench.measure.instruments import Instruments, open_instruments
from leanbench.measure.options import MeasureOptions
from leanbench.measure.protocol import measure_loaded, measure_problem, measure_timelines
from leanbench.measure.ranks import RankLost, Ranks
from leanbench.measure.shared import attention_on

T = TypeVar("T")


class Pair(Ranks):
    """Rank 0 of two; the other one has the same results."""

    def __init__(self) -> None:
        super().__init__(0, 2)
        self.announced: list[Any] = []

    def broadcast(self, value: T | None = None) -> T:
        self.announced.append(value)
        return value  # pyright: ignore[reportReturnType]

    def all_gather(self, value: T) -> list[T]:
        return [value, value]

    def together(self, work: Callable[[], T], waits: bool = False) -> T:
        try:
            return work()
        except UserError as error:
            self.refusal = error
            raise

    def layout(self, counts: Any) -> Any:
        peers = Peers(2, 0, 0)
        group = SimpleNamespace(peers=peers, barrier=lambda: None)
        return SimpleNamespace(group=group if counts.context > 1 else None)

    def barrier(self) -> None:
        pass


class SharedPretendedReplay(PretendedReplay):
    def __init__(self, ranks: Ranks, launches: Any, sample_ms: float) -> None:
        # Chains with a barrier, and instrumented builds, belong to no kernel.
        if hasattr(launches[0], "kernel"):
            super().__init__(launches, sample_ms)


class Alike(Right):
    """A `Right` kernel; all GPUs have the same tokens, so the output does not change."""

    lse_base = None
    axes = Right.axes | {"parallel"}


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Pair:
    pair = Pair()
    monkeypatch.setattr(shared, "SharedReplay", SharedPretendedReplay)
    monkeypatch.setattr(shard, "_gathered", lambda inputs, tensor: torch.stack([tensor, tensor]))
    monkeypatch.setattr("torch.distributed.broadcast", lambda tensor, src, group: None)
    return pair


def opened(gpu: PretendedGpu, pair: Pair, **options: Any) -> Instruments:
    instruments: Instruments = open_instruments(0, MeasureOptions(**options), gpu.announce)
    gang: Any = SimpleNamespace(of=lambda size, device, options: pair, at_work=nullcontext)
    return replace(instruments, gang=gang)


def measure(
    gpu: PretendedGpu, pair: Pair, parallel: str, *kernels: Right, **options: Any
) -> dict[str, dict[str, Any]]:
    problem = replace(PROBLEM, parallel=parallel)
    return measure_problem(attention_on(opened(gpu, pair, **options), problem), kernels)


def test_heads_that_are_split(gpu: PretendedGpu, pair: Pair) -> None:
    rows = measure(gpu, pair, "tp:2", Right("one", [10.0]), Right("other", [20.0]))
    assert [rows[name]["latency_us"] for name in ("one", "other")] == [10.0, 20.0]
    assert rows["one"]["status"] == "ok"
    # One KV head of two, 2 sequences of 100 tokens, K and V of 64 numbers of 2 bytes.
    assert rows["one"]["kv_bytes"] == 2 * 100 * 64 * 2 * 2
    assert rows["one"]["bandwidth_tb_s"] == pytest.approx(51_200 / 10.0 / 1e6)
    assert rows["one"]["read_floor_us"] == 8.0
    assert "shard_us" not in rows["one"]
    assert gpu.made[-1] == replace(PROBLEM, q_heads=2, kv_heads=1)
    # The other ranks get the problem first; there is no further sample at the end.
    request = pickle.loads(pickle.dumps(pair.announced[0]))
    assert request == pair.announced[0]
    assert request.problem["parallel"] == "tp:2"
    assert pair.announced[-1] is None


def test_tokens_that_are_split(
    gpu: PretendedGpu, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = Right("local", [9.0])
    monkeypatch.setattr(
        shared, "alone", lambda own: [local.prepare(inputs, None) for inputs in own.buffers]
    )
    # Each launch after a barrier, and barriers alone.
    times_us = iter([12.0, 3.0])
    monkeypatch.setattr(shared, "median_us", lambda replay: next(times_us))
    row = measure(gpu, pair, "cp:2", Alike("lean", [10.5]), energy=False)["lean"]
    assert (row["status"], row["latency_us"]) == ("ok", 10.5)
    assert (row["shard_us"], row["exchange_us"]) == (9.0, 1.5)
    assert row["from_barrier_us"] == 9.0
    assert gpu.made[-1].context == 50


def test_energy_is_that_of_all_gpus(
    gpu: PretendedGpu, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows: list[float] = []

    def window(replay: Any, launches: int, *arguments: Any, ranks: Any) -> Any:
        assert ranks is pair
        windows.append(arguments[2])
        return reading(11.0, 600.0, ["clocks were low"])

    monkeypatch.setattr(extras, "measure_window", window)
    row = measure(gpu, pair, "tp:2", Right(), sustained=True, occupancy=True, window_s=2.5)["right"]
    assert windows == [2.5]
    assert (row["status"], row["sustained_us"]) == ("ok", 11.0)
    assert row["sustained_power_w"] == 1200.0
    assert row["energy_mj"] == pytest.approx(2 * 600 * 11.0 / 1000)
    low = [f"rank {rank}: clocks were low" for rank in (0, 1)]
    assert row["warnings"] == [*low, "occupancy: not measured where GPUs share a problem"]


def reading(
    sustained_us: float, power_w: float | None, warnings: list[str], idle_w: float | None = None
) -> SustainedReading:
    energy_mj = None if power_w is None else power_w * sustained_us / 1000
    window_s, clock_mhz = 2.0 + sustained_us / 100, 1980 - int(sustained_us)
    energies = (energy_mj, energy_mj, None)
    return SustainedReading(
        sustained_us, window_s, clock_mhz, power_w, *energies, [], warnings, idle_power_w=idle_w
    )


def test_readings_of_ranks_are_added_where_all_have_them() -> None:
    both = [reading(10.0, 500.0, [], 80.0), reading(12.0, 700.0, [], 90.0)]
    outcome = sustained_outcome(both)
    assert outcome.energy_mj == pytest.approx(5.0 + 8.4)
    assert outcome.energy_delay_mj_us == pytest.approx(13.4 * 12.0)
    assert (outcome.sustained_us, outcome.sustained_s) == (12.0, 2.1)
    assert (outcome.sustained_power_w, outcome.idle_power_w) == (1200.0, 170.0)
    assert outcome.sustained_clock_mhz == 1968
    one = sustained_outcome([both[0], reading(12.0, None, [])])
    assert (one.sustained_us, one.energy_mj, one.sustained_power_w) == (12.0, None, None)
    assert (one.idle_power_w, one.energy_delay_mj_us) == (None, None)


def test_every_rank_replays_as_often_as_the_one_with_the_most() -> None:
    class Other(Pair):
        def all_gather(self, value: Any) -> list[Any]:
            return [value, 7]

    waited: list[float] = []
    queue: Any = SimpleNamespace(keep_busy=lambda seconds: waited.append(seconds))
    replayed: list[str] = []
    replays = EqualReplays(Other(), lambda: replayed.append("replay"), 5.0)
    for _ in range(4):
        replays()
    replays.finish(queue, lambda: 3.0)
    assert len(replayed) == replays.count == 7
    assert waited == [2.0]


def test_a_follower_takes_the_samples_that_rank_0_names(
    gpu: PretendedGpu, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = iter(["other", "one", "other", None])
    monkeypatch.setattr(pair, "rank", 1)
    monkeypatch.setattr(pair, "broadcast", lambda value=None: next(named))
    monkeypatch.setattr("leanbench.core.registry.kernel", Right)
    problem = replace(PROBLEM, parallel="tp:2").to_dict()
    request = shared.Request(measure_loaded, problem, {"one": "default", "other": "default"})
    shared.follow(pair, opened(gpu, pair), request)
    assert gpu.sampled == ["other", "one", "other"]
    assert gpu.floors == []


@pytest.mark.parametrize(
    ("buffers", "launch_ms", "launches"),
    [(3, 0.1, 42), (3, 5.0, 6), (3, 0.001, 1020), (600, 0.001, 1200)],
)
def test_a_chain_uses_each_buffer_equally_often_and_is_as_slow_as_the_slowest_rank(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, buffers: int, launch_ms: float, launches: int
) -> None:
    """A sample takes 4 ms; the other rank takes twice the time of this one."""
    monkeypatch.undo()
    own_ms = launch_ms / 2

    def twice(slowest: torch.Tensor, op: Any) -> None:
        slowest *= 2

    def captured(launches: Any, count: int) -> Any:
        return SimpleNamespace(replay=lambda: None, count=count)

    monkeypatch.setattr(timing, "capture", captured)
    monkeypatch.setattr(timing.Replay, "_replay_ms", lambda own: own_ms * own.graph.count)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    tensor = torch.tensor
    monkeypatch.setattr("torch.tensor", lambda value, device: tensor(value))
    monkeypatch.setattr("torch.distributed.all_reduce", twice)
    replay = shared.SharedReplay(pair, [lambda: None] * buffers, 4.0)
    assert replay.launches == launches
    assert replay.sample_us() == pytest.approx(1e3 * launch_ms, rel=1e-5)


def test_a_wrong_kernel_is_not_timed(gpu: PretendedGpu, pair: Pair) -> None:
    class Wrong(Right):
        def spoil(self, inputs: Any) -> None:
            inputs.out.mul_(2)

    rows = measure(gpu, pair, "tp:2", Wrong("wrong"), Right("right"))
    assert rows["wrong"]["status"] == "incorrect"
    assert rows["wrong"]["reason"].startswith("rank 0: relative error")
    assert "latency_us" not in rows["wrong"]
    assert rows["right"]["status"] == "ok"


def test_what_all_ranks_refuse_is_a_sentence_and_what_one_does_not_know_ends_it(
    gpu: PretendedGpu, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*arguments: Any) -> None:
        raise OutOfMemory("needs 7 GB")

    monkeypatch.setattr(shard, "refuse_shortage", no_room)
    row = measure(gpu, pair, "tp:2", Right())["right"]
    assert (row["status"], row["reason"]) == ("out_of_memory", "needs 7 GB")

    def too_many(counts: Any) -> None:
        raise UserError("a context group has at most 8 GPUs")

    monkeypatch.setattr(shard, "refuse_shortage", lambda *arguments: None)
    monkeypatch.setattr(pair, "layout", too_many)
    with pytest.raises(UserError, match="a context group has at most 8 GPUs"):
        measure(gpu, pair, "tp:2", Right())

    def breaks(*arguments: Any) -> None:
        raise UserError("of rank 0 alone")

    monkeypatch.setattr(shared, "load_shard", breaks)
    with pytest.raises(GpuUnusable, match="rank 0: UserError: of rank 0 alone"):
        measure(gpu, pair, "tp:2", Right())

    def is_left_alone(*arguments: Any) -> None:
        raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:80")

    monkeypatch.setattr(shared, "load_shard", is_left_alone)
    with pytest.raises(RankLost, match=r"^the process of another GPU ended while this was meas"):
        measure(gpu, pair, "tp:2", Right())


def test_best_is_refused(gpu: PretendedGpu, pair: Pair) -> None:
    problem = replace(PROBLEM, parallel="tp:2")
    row = measure_problem(attention_on(opened(gpu, pair), problem), [Right()], "best")["right"]
    assert row["status"] == "unsupported"
    assert row["reason"].startswith("configs 'best' times candidates on one GPU")


class Traced(Alike):
    """A kernel with an instrumented build; its n-th recorded launch lasts `durations_us[n]`."""

    def __init__(self, durations_us: list[float], factor: float = 1.0) -> None:
        super().__init__("traced")
        self.durations_us, self.factor = list(durations_us), factor

    def prepare_traced(self, inputs: AttentionInputs, config: Any) -> TracedCall:
        attend = self.prepare(inputs, config)

        def launch() -> None:
            attend()
            inputs.out.mul_(self.factor)

        def read() -> tuple[CtaTimeline, ...]:
            return (CtaTimeline("traced", 0, 3, 0.0, self.durations_us.pop(0), ()),)

        call: Any = SimpleNamespace(launch=launch, read=read)
        return call


class Uneven(Pair):
    """A pair of ranks; the other rank's launches have these durations."""

    def __init__(self, durations_us: list[float]) -> None:
        super().__init__()
        self.durations_us = durations_us

    def all_gather(self, value: Any) -> list[Any]:
        if isinstance(value, Timeline):
            return [value, replace(value, rank=1)]
        is_durations = isinstance(value, list) and isinstance(value[0], float)
        return [value, self.durations_us if is_durations else value]


def timelines(gpu: PretendedGpu, pair: Pair, kernel: Right, configs: str = "default") -> Any:
    problem = replace(PROBLEM, parallel="cp:2")
    return measure_timelines(attention_on(opened(gpu, pair), problem), kernel, configs)


def test_timelines_of_ranks_are_of_the_launch_whose_slowest_gpu_took_the_median(
    gpu: PretendedGpu, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeline, "capture", lambda launches, count: SimpleNamespace(replay=list))
    monkeypatch.setattr(timeline, "timer_tick_ns", lambda device: 32)
    # The plain chain, then the instrumented one.
    times_us = iter([10.0, 10.5])
    monkeypatch.setattr(shared, "median_us", lambda replay: next(times_us))
    own_us = [9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0]
    # The slowest: 9, 8, 12, 6, 5, 4, 3, 2, 10, with the fourth launch as the median.
    other_us = [1.0, 1.0, 12.0, 1.0, 1.0, 1.0, 1.0, 1.0, 10.0]
    both = timelines(gpu, Uneven(other_us), Traced(own_us))
    assert [own.name for own in both] == ["traced, rank 0", "traced, rank 1"]
    first = both[0]
    assert first.duration_us == 6.0
    assert (first.latency_us, first.traced_latency_us, first.tick_ns) == (10.0, 10.5, 32)
    assert first.own_problem == replace(PROBLEM, context=50)


def test_why_ranks_have_no_timelines(
    gpu: PretendedGpu, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert timelines(gpu, pair, Alike("plain")) == "plain has no instrumented build"
    assert timelines(gpu, pair, Right()) == (
        "right runs on one GPU, this problem has parallel cp:2: leave it out"
    )
    refused = timelines(gpu, pair, Alike("plain"), "best")
    assert refused.startswith("configs 'best' times candidates on one GPU")

    def no_room(*arguments: Any) -> None:
        raise OutOfMemory("needs 7 GB")

    with pytest.raises(GpuUnusable, match="the instrumented build of traced differs"):
        timelines(gpu, pair, Traced([], factor=1.1))
    monkeypatch.setattr(shard, "refuse_shortage", no_room)
    assert timelines(gpu, pair, Traced([])) == "needs 7 GB"
