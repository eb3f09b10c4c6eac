"""Instruments of a GPU: NVML, energy calibration, read floor, processes of other GPUs."""

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
from leanbench.measure.tampering import Untouched

if TYPE_CHECKING:
    import torch

    from leanbench.gpu.nvml import GpuState, Nvml

#: Receives the name of the kernel that runs next, or None. The parent blames it if this process
#: dies.
Announce = Callable[[str | None], None]


@dataclass(frozen=True)
class Instruments:
    """GPU, options of its measurements, and state that is kept between problems."""

    device: torch.device
    spec: GpuSpec
    options: MeasureOptions
    #: None if NVML cannot be used. Latency does not need it.
    nvml: Nvml | None
    #: Calibration of the energy counter, with the energy option and NVML.
    calibration: EnergyCalibration | None
    read_floor: ReadFloor
    announce: Announce
    #: State before any kernel ran; None if it is not checked.
    untouched: Untouched | None = None
    #: Processes of other GPUs, for problems that GPUs share.
    gang: Gang = field(default_factory=Gang)

    @property
    def device_index(self) -> int:
        return self.device.index or 0

    def gpu_state(self) -> GpuState | None:
        """Read clocks, temperature, power and throttle reasons."""
        return None if self.nvml is None else self.nvml.state()


def open_instruments(
    device_index: int, options: MeasureOptions | None = None, announce: Announce = lambda name: None
) -> Instruments:
    """Open the instruments of torch's GPU `device_index`.

    With the energy option, this watches the idle GPU for two seconds.

    Raises:
        UserError: The sustained window is too short for this GPU's energy counter.
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
    floor, untouched = ReadFloor(), Untouched.now()
    return Instruments(device, spec, options, nvml, calibration, floor, announce, untouched)


def open_nvml(device: torch.device) -> Nvml | None:
    """Open NVML for torch's device; None if that fails."""
    import torch

    from leanbench.gpu.nvml import Nvml
    from leanbench.gpu.nvml_library import NvmlError

    try:
        # The prefix is optional. For a MIG instance, torch gives the instance's UUID.
        return Nvml(str(torch.cuda.get_device_properties(device).uuid)).__enter__()
    except NvmlError:
        return None
