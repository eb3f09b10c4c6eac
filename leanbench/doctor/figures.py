"""Whether the figures are what the GPU should give, and how far two of the same thing are apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from leanbench.core.inputs import AttentionInputs
from leanbench.core.problem import AttentionProblem
from leanbench.doctor.finding import Finding, note, ok, problem
from leanbench.doctor.machine import Machine

#: Of the datasheet's bandwidth. Data-centre GPUs reach 90 to 97%.
_MIN_BANDWIDTH_SHARE = 0.8
#: Of `lean` against itself, relative. Quiet machines stay well below the first.
_NOISE_NOTE = 0.01
_NOISE_PROBLEM = 0.05
_BUSY_FIX = "stop other work on this GPU and this machine, then run `leanbench doctor` again"


def _sizes(machine: Machine) -> list[AttentionProblem]:
    """4 MB, 67 MB and 1.1 GB of K and V, the last one less where memory is short."""
    # Where torch alone sees the GPU nobody says.
    free = (machine.gpu.memory_free_bytes if machine.gpus else None) or 0
    large = 16 if free > 4_000_000_000 else 4
    return [
        AttentionProblem(1, 32, 8, 1024, 128),
        AttentionProblem(4, 32, 8, 4096, 128),
        AttentionProblem(large, 32, 8, 16384, 128),
    ]


def read_bandwidth(machine: Machine) -> Finding:
    """The read floor of sweeps at 1.1 GB. All eight reads are ranked: on one H200 (2026-11-23) one
    that was fixed here reached 3.87 TB/s, the fastest 4.66.
    """
    from leanbench.measure.judge import knows_bandwidth
    from leanbench.measure.read_floor import measure_read_floor

    large, datasheet_tb_s = _sizes(machine)[-1], machine.spec.bandwidth_tb_s
    timing = measure_read_floor(_inputs(machine, large), large.kv_bytes)
    bandwidth_tb_s = large.kv_bytes / timing.median_us / 1e6
    share = bandwidth_tb_s / datasheet_tb_s
    values = {
        "read_bandwidth_tb_s": bandwidth_tb_s,
        "datasheet_tb_s": datasheet_tb_s,
        "share": share,
    }
    text = (
        f"reads {large.kv_bytes / 1e9:.1f} GB at {bandwidth_tb_s:.2f} TB/s, "
        f"{share:.0%} of the datasheet's {datasheet_tb_s:.2f}"
    )
    if share < _MIN_BANDWIDTH_SHARE:
        return problem(
            f"{text}, below {_MIN_BANDWIDTH_SHARE:.0%}",
            f"{_BUSY_FIX}, and look at clocks and throttling",
            **values,
        )
    if share > 1 and knows_bandwidth(machine.spec):
        return problem(
            f"{text}, more than the memory can deliver",
            "report it: part was read from a cache or not at all, so shares of the floor are wrong",
            **values,
        )
    return ok(text, **values)


def noise_floor(machine: Machine) -> Finding:
    """`lean` as two candidates of one interleaved measurement: their medians should be equal."""
    from leanbench.measure.timing import Effort, measure_interleaved

    differences: dict[AttentionProblem, float] = {}
    for size in _sizes(machine):
        launches = _launches(machine, size)
        timings = measure_interleaved(
            {"once": launches, "again": launches}, Effort(max_seconds=0.5)
        )
        once, again = timings["once"].median_us, timings["again"].median_us
        differences[size] = abs(once - again) / min(once, again)
    worst = max(differences.values())
    by_size = ", ".join(
        f"{differs:.2%} at {size.kv_bytes / 1e6:.0f} MB" for size, differs in differences.items()
    )
    values = {"differences": {size.label: differs for size, differs in differences.items()}}
    text = f"lean against itself differs by {by_size}"
    if worst > _NOISE_PROBLEM:
        return problem(f"{text}: nothing here can be compared", _BUSY_FIX, **values)
    if worst > _NOISE_NOTE:
        return note(
            f"{text}: smaller differences between kernels mean nothing here", _BUSY_FIX, **values
        )
    return ok(text, **values)


def ping_pong(machine: Machine) -> Finding:
    """Messages between the GPUs of each pair that has peer access: the floor of what an exchange
    adds to GPUs that share tokens.
    """
    from leanbench.measure.ping_pong import BATCHES, MESSAGES, ROUNDS, measure_ping_pong, peer_pairs

    with_access, without = peer_pairs()
    apart = ", ".join(f"{first} and {second}" for first, second in without)
    if not with_access:
        return note(f"no message was timed: no peer access between GPUs {apart}", pairs=[])
    trips = [measure_ping_pong(*pair) for pair in with_access]
    one_way_us = {name: _spread([trip.one_way_us[name] for trip in trips]) for name in MESSAGES}
    values: dict[str, Any] = {
        "pairs": [
            {
                "first": trip.first,
                "second": trip.second,
                "round_trip_us": trip.round_trip_us,
                "one_way_us": trip.one_way_us,
            }
            for trip in trips
        ],
        "sent_bytes": {name: message.sent_bytes for name, message in MESSAGES.items()},
        "round_trips": (BATCHES - 1) * ROUNDS,
    }
    text = (
        f"half a round trip between GPUs: {one_way_us['unit']} us for 16 bytes stored as lean"
        " stores partials, the floor of what an exchange in its launch adds;"
        f" {one_way_us['partial']} for a CTA's 4 kB of partials, {one_way_us['flag']} for a flag by"
        " store-release and load-acquire, the floor of a barrier"
    )
    if without:
        return note(f"{text}; none was timed between GPUs {apart}: no peer access", **values)
    return ok(text, **values)


def _spread(values: list[float]) -> str:
    """The lowest to the highest, once if they are written alike."""
    lowest, highest = (f"{value:.2f}" for value in (min(values), max(values)))
    return lowest if lowest == highest else f"{lowest} to {highest}"


def _inputs(machine: Machine, size: AttentionProblem) -> list[AttentionInputs]:
    from leanbench.measure.buffers import rotating_inputs

    return rotating_inputs(size, machine.device, machine.spec, "cold")


def _launches(machine: Machine, size: AttentionProblem) -> list[Callable[[], object]]:
    from leanbench.core.registry import kernel

    lean = kernel("lean")
    config = lean.default_config(size, machine.spec)
    return [lean.prepare(inputs, config) for inputs in _inputs(machine, size)]
