"""Program that runs under Nsight Compute: one call of a kernel between cudaProfilerStart and
cudaProfilerStop.

leanbench.measure.counters starts it as ``ncu ... python -m leanbench.measure.counters_target
JSON``.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from leanbench.check.launches import launch_of
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel
from leanbench.measure.counters import TARGET_FAILED


def main() -> None:
    request = json.loads(sys.argv[1])
    _end_with(request["caller_pid"])
    try:
        _run(request)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        print(f"{TARGET_FAILED}{reason or type(error).__name__}", file=sys.stderr, flush=True)
        raise SystemExit(1) from None


def _run(request: dict[str, Any]) -> None:
    import torch

    from leanbench.gpu.local import spec_of_device
    from leanbench.measure.buffers import refuse_shortage, rotating_inputs

    if not torch.cuda.is_available():
        raise RuntimeError("torch finds no GPU that it can use")
    index = request["device_index"]
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    problem = AttentionProblem.from_dict(request["problem"])
    chosen = kernel(request["kernel"])
    config = None if request["config"] is None else chosen.read_config(request["config"])
    refuse_shortage(problem, device)
    buffers = rotating_inputs(problem, device, spec_of_device(index), request["cache"])
    launches = [launch_of(chosen, inputs, config) for inputs in buffers]
    for launch in launches:
        launch()
    torch.cuda.synchronize()
    # Its inputs were read longest ago.
    _profile(launches[0])


def _profile(launch: Callable[[], object]) -> None:
    import torch

    torch.cuda.profiler.start()
    launch()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def _end_with(caller_pid: int) -> None:
    """End this process after its caller, which is not its parent: ncu is between them."""

    def watch() -> None:
        while True:
            time.sleep(1.0)
            try:
                os.kill(caller_pid, 0)
            except ProcessLookupError:
                os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    main()
