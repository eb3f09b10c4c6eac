"""Power of each build, for `--objective energy|edp`. The energy of a launch is its latency times
this.

It is measured once per build, on a problem that fills the GPU: while K and V stream, a build draws
the same power on any problem. A window of seconds for every candidate and problem would take an
hour.
"""

from __future__ import annotations

from collections.abc import Sequence

from leanbench.configs.store import TunedConfig
from leanbench.core.errors import UserError
from leanbench.core.problem import AttentionProblem
from leanbench.kernels.lean.configs import BuildKey
from leanbench.tune.stopwatch import GpuStopwatch

#: Builds of a kind of call with measured power: the first requested ones.
MOST_BUILDS = 8
#: Window of one measurement.
WINDOW_S = 2.0


def measure_power(
    index: int,
    stopwatch: GpuStopwatch,
    work: Sequence[tuple[AttentionProblem, Sequence[TunedConfig]]],
) -> list[dict[BuildKey, float]]:
    """Measure the kW of each config's build in back-to-back launches, for each problem of `work`.

    Raises:
        UserError: NVML or its energy counter cannot be used on this machine.
    """
    import torch

    from leanbench.gpu.nvml import Nvml
    from leanbench.gpu.nvml_library import NvmlError
    from leanbench.measure.energy import measure_window
    from leanbench.measure.energy_meter import calibrate
    from leanbench.measure.timing import Replay

    power_of_problems: list[dict[BuildKey, float]] = []
    try:
        with Nvml(str(torch.cuda.get_device_properties(index).uuid)) as nvml:
            calibration = calibrate(nvml)
            for problem, configs in work:
                buffers = stopwatch.buffers(problem)
                power: dict[BuildKey, float] = {}
                for config in configs[:MOST_BUILDS]:
                    replay = Replay(stopwatch.launches(buffers, config), 4.0)
                    reading = measure_window(
                        replay.graph.replay, replay.launches, nvml, calibration, WINDOW_S
                    )
                    if reading.energy_mj is None:
                        raise UserError(
                            "this GPU has no energy counter that can be read: tune for --objective"
                            " latency"
                        )
                    power[config.build_key] = reading.energy_mj / reading.sustained_us
                power_of_problems.append(power)
                buffers = replay = None  # the next problem needs the memory
    except NvmlError as error:
        raise UserError(
            f"--objective energy and edp need NVML, which cannot be used here: {error}"
        ) from None
    return power_of_problems
