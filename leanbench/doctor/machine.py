"""The machine that the checks examine, and what a check finds."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from leanbench.core.gpu_spec import GpuSpec
from leanbench.gpu.local import Target, choose
from leanbench.gpu.nvml import Nvml
from leanbench.gpu.nvml_library import NvmlError
from leanbench.gpu.visible import LocalGpu, local_gpus

if TYPE_CHECKING:
    import torch

#: `note`: worth knowing, figures are right all the same. `problem`: nothing can be measured, or
#: figures would mislead.
Status = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """One line, and what to do about it."""

    status: Status
    text: str
    #: None where there is nothing to do, or `text` says it.
    fix: str | None = None
    #: The figures of `text`, units in their names; null where the machine does not say.
    values: dict[str, Any] = field(default_factory=dict)


def ok(text: str, **values: Any) -> Finding:
    return Finding("ok", text, None, values)


def note(text: str, fix: str | None = None, **values: Any) -> Finding:
    return Finding("note", text, fix, values)


def problem(text: str, fix: str | None, **values: Any) -> Finding:
    return Finding("problem", text, fix, values)


@dataclass
class Machine:
    """This machine, and the GPU of it that a sweep would use."""

    #: Where run directories will be.
    runs: Path = Path("runs")
    #: Whether to look at all that may take minutes: every kernel, libraries, hardware counters.
    deep: bool = False

    @cached_property
    def gpus(self) -> list[LocalGpu]:
        """The GPUs that CUDA would see.

        Raises:
            NvmlError: the driver is broken.
        """
        return local_gpus()

    @property
    def has_gpu(self) -> bool:
        """Whether the driver works and the GPU that a sweep would use can be read."""
        try:
            return bool(self.gpus) and self.gpu.fault is None
        except NvmlError:
            return False

    @cached_property
    def target(self) -> Target | None:
        """Target that a sweep would run on; None without a GPU that NVML or, where NVML is silent,
        torch sees. Starts torch's CUDA.
        """
        try:
            chosen = choose(None, require_gpu=False)
            return chosen if chosen.local_index is not None or self.gpus else None
        except NvmlError:  # the check of the GPU says it
            return None

    @cached_property
    def device_index(self) -> int | None:
        """torch's index of the GPU; None: there is none, or torch cannot use it."""
        try:
            return None if self.target is None else self.target.local_index
        except Exception:  # the check of torch asks for `target`, too, and says why
            return None

    @property
    def spec(self) -> GpuSpec:
        """Of the GPU; there must be one."""
        assert self.target is not None
        return self.target.spec

    @property
    def device(self) -> torch.device:
        """The GPU for torch, which must be able to use it."""
        import torch

        assert self.device_index is not None
        return torch.device("cuda", self.device_index)

    @property
    def can_launch(self) -> bool:
        """Whether kernels run on the GPU: there is one, and Triton is not told to interpret."""
        return self.device_index is not None and os.environ.get("TRITON_INTERPRET") != "1"

    @cached_property
    def gpu(self) -> LocalGpu:
        """NVML's word on the GPU; there must be one."""
        if self.device_index is not None:
            import torch

            uuid = str(torch.cuda.get_device_properties(self.device_index).uuid)
            # NVML counts by bus, torch may put the fastest first.
            return next(
                (gpu for gpu in self.gpus if gpu.uuid.endswith(uuid)), self.gpus[self.device_index]
            )
        return self.gpus[0]

    def nvml(self) -> Nvml:
        """NVML of that GPU, for a `with`."""
        return Nvml(self.gpu.uuid)
