"""The machine under examination, and the finding of a check."""

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

#: `note`: figures are right. `problem`: nothing can be measured, or figures would mislead.
Status = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """One line and its fix."""

    status: Status
    text: str
    #: None if `text` is enough.
    fix: str | None = None
    #: Figures of `text` with units in their names; null if unknown.
    values: dict[str, Any] = field(default_factory=dict)


def ok(text: str, **values: Any) -> Finding:
    return Finding("ok", text, None, values)


def note(text: str, fix: str | None = None, **values: Any) -> Finding:
    return Finding("note", text, fix, values)


def problem(text: str, fix: str | None, **values: Any) -> Finding:
    return Finding("problem", text, fix, values)


@dataclass
class Machine:
    """This machine, and its GPU that a sweep would use."""

    #: Folder of run directories.
    runs: Path = Path("runs")
    #: Check also every kernel, libraries and hardware counters, which takes minutes.
    deep: bool = False

    @cached_property
    def gpus(self) -> list[LocalGpu]:
        """Return the GPUs that CUDA would see; raise NvmlError for a broken driver."""
        return local_gpus()

    @property
    def has_gpu(self) -> bool:
        """Return True if the driver can read the GPU that a sweep would use."""
        try:
            return bool(self.gpus) and self.gpu.fault is None
        except NvmlError:
            return False

    @cached_property
    def target(self) -> Target | None:
        """Return the target of a sweep; None if neither NVML nor torch sees a GPU. Starts CUDA."""
        try:
            chosen = choose(None, require_gpu=False)
            return chosen if chosen.local_index is not None or self.gpus else None
        except NvmlError:  # reported by the check of the GPU
            return None

    @cached_property
    def device_index(self) -> int | None:
        """Return torch's index of the GPU; None if torch cannot use one."""
        try:
            return None if self.target is None else self.target.local_index
        except Exception:  # reported by the check of torch
            return None

    @property
    def spec(self) -> GpuSpec:
        """Return the spec of the GPU, which must exist."""
        assert self.target is not None
        return self.target.spec

    @property
    def device(self) -> torch.device:
        """Return torch's device of the GPU, which must be usable."""
        import torch

        assert self.device_index is not None
        return torch.device("cuda", self.device_index)

    @property
    def can_launch(self) -> bool:
        """Return True if kernels run on the GPU, not in the interpreter."""
        return self.device_index is not None and os.environ.get("TRITON_INTERPRET") != "1"

    @cached_property
    def gpu(self) -> LocalGpu:
        """Return NVML's record of the GPU, which must exist."""
        if self.device_index is not None:
            import torch

            uuid = str(torch.cuda.get_device_properties(self.device_index).uuid)
            # NVML counts GPUs by bus. torch can put the fastest first.
            return next(
                (gpu for gpu in self.gpus if gpu.uuid.endswith(uuid)), self.gpus[self.device_index]
            )
        return self.gpus[0]

    def nvml(self) -> Nvml:
        """Open NVML of that GPU."""
        return Nvml(self.gpu.uuid)
