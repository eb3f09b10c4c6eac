"""A machine with a pretended H200, on which nothing can run."""

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from leanbench.doctor.machine import Machine
from leanbench.gpu.catalogue import find
from leanbench.gpu.local import Target
from leanbench.gpu.nvml import GpuLimits, GpuState
from leanbench.gpu.visible import LocalGpu

H200 = LocalGpu(
    index=0,
    product="NVIDIA H200",
    uuid="GPU-aaaa0000-0000-0000-0000-000000000000",
    memory_total_bytes=150_000_000_000,
    memory_free_bytes=149_000_000_000,
    driver_version="580.65.06",
    compute_capability=(9, 0),
    mig=False,
)
QUIET = GpuState(345, 3201, 31, 76.4, [])
LIMITS = GpuLimits(1980, 700.0, 4.917)


@pytest.fixture
def machine(tmp_path) -> Machine:
    """Return a machine. Replace `gpus` and `target` to change its GPU."""
    made = Machine(runs=tmp_path)
    made.gpus = [H200]
    made.target = Target(find("h200"), 0)
    made.device_index = 0
    made.gpu = H200
    return made


@pytest.fixture
def nvml(machine, monkeypatch) -> Callable[..., None]:
    """Call with what the driver shall answer, as `Nvml`'s methods return it."""

    def answer(**answers: Any) -> None:
        defaults = {"state": QUIET, "limits": LIMITS, "power_limit_w": 700.0}
        answers = {**defaults, "throttle_reasons": [], **answers}
        methods = {name: lambda value=value: value for name, value in answers.items()}
        monkeypatch.setattr(machine, "nvml", lambda: nullcontext(SimpleNamespace(**methods)))

    return answer
