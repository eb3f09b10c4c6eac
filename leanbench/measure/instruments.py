"""Instruments that problems are measured with on one GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from leanbench.core.gpu_spec import GpuSpec
from leanbench.measure.energy import check_window
from leanbench.measure.energy_meter import EnergyCalibration, calibrate
from leanbench.measure.options import MeasureOptions
from leanbench.measure.ranks import Gang
from leanbench.measure.read_floor import ReadFloor

if TYPE_CHECKING:
    import torch

    from leanbench.gpu.nvml import GpuState, Nvml

#: Receives the name of the kernel whose code runs next, None for nobody's: whoever watches this
#: process knows whom to blame if it dies.
Announce = Callable[[str | None], None]


@dataclass(frozen=True)
class Instruments:
    """One GPU, how it is to be measured, and what is known of it between problems."""

    device: torch.device
    spec: GpuSpec
    options: MeasureOptions
    #: None where NVML cannot be used: latency needs none.
    nvml: Nvml | None
    #: Of the energy counter, where the options ask for energy and NVML answers.
    calibration: EnergyCalibration | None
    read_floor: ReadFloor
    announce: Announce
    #: The processes of other GPUs, for problems that GPUs share.
    gang: Gang = field(default_factory=Gang)

    @property
    def device_index(self) -> int:
        return self.device.index or 0

    def gpu_state(self) -> GpuState | None:
        """Clocks, temperature, power and throttle reasons of this moment."""
        return None if self.nvml is None else self.nvml.state()


def open_instruments(
    device_index: int, options: MeasureOptions | None = None, announce: Announce = lambda name: None
) -> Instruments:
    """The instruments of the GPU that torch counts as `device_index`. With energy among the
    options, two seconds pass in which the idle GPU is watched.

    Raises:
        UserError: the sustained window is too short for this GPU's energy counter.
    """
    import torch

    from leanbench.gpu.local import spec_of_device

    options = options or MeasureOptions()
    device = torch.device("cuda", device_index)
    torch.cuda.set_device(device)
    nvml = open_nvml(device)
    calibration = calibrate(nvml) if options.energy and nvml is not None else None
    if calibration is not None:
        check_window(options.window_s, calibration.tick_ms)
    spec = spec_of_device(device_index)
    return Instruments(device, spec, options, nvml, calibration, ReadFloor(), announce)


def open_nvml(device: torch.device) -> Nvml | None:
    """NVML for the GPU that torch means; None where it cannot be had."""
    import torch

    from leanbench.gpu.nvml import Nvml
    from leanbench.gpu.nvml_library import NvmlError

    try:
        # With or without its prefix: torch names a MIG instance's too.
        return Nvml(str(torch.cuda.get_device_properties(device).uuid)).__enter__()
    except NvmlError:
        return None
