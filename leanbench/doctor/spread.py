"""Spread between processes: a process times `lean`, the parent compares several processes.

``python -m leanbench.doctor.spread`` prints a median in microseconds per problem, as JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys

from leanbench.core.errors import UserError
from leanbench.doctor.machine import Finding, Machine, note, ok
from leanbench.records.standing import record_spread, spread_of_processes

#: Processes that time the same problems.
PROCESSES = 3
_TIMEOUT_S = 180


def process_spread(machine: Machine) -> Finding:
    """Time `lean` in fresh processes. Sweeps on this GPU then count differences within the largest
    spread as level.
    """
    latencies_us = [_timed_elsewhere() for _ in range(PROCESSES)]
    spreads = [spread_of_processes(of_size) for of_size in zip(*latencies_us, strict=True)]
    spread = max(spreads)
    text = (
        f"the same kernel differs by ±{spread:.2%} between {PROCESSES} processes: sweeps on this"
        " GPU call smaller differences level"
    )
    try:
        record_spread(machine.gpu.uuid, spread)
    except OSError as error:
        return note(f"{text}, once that is recorded ({error})", process_spread=spread)
    return ok(text, process_spread=spread)


def _timed_elsewhere() -> list[float]:
    """Return the latencies that a fresh process measures.

    Raises:
        UserError: It failed.
    """
    done = subprocess.run(
        [sys.executable, "-P", "-m", "leanbench.doctor.spread"],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason"])[-1]
        raise UserError(f"a process that times lean failed: {reason}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    from leanbench.doctor.instruments import timed_sizes

    machine = Machine()
    print(json.dumps([timing.median_us for timing in timed_sizes(machine).values()]))


if __name__ == "__main__":
    main()
