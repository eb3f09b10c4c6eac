"""mla.cu on the CPU, as lean_on_cpu.py has lean.cu."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from lean_on_cpu import Mutation, Workspace, library_of, replaced, tensor_map
from leanbench.kernels.lean.cuda import CudaLaunch
from leanbench.kernels.lean.cuda_params import aligned_params
from leanbench.kernels.mla import launch
from leanbench.kernels.mla.build import MlaBuild
from leanbench.kernels.mla.configs import MlaConfig

from leanbench.core.inputs import AttentionInputs
from leanbench.core.paths import KERNELS

_HERE = Path(__file__).parent
_SHARED = "extern __shared__ __align__(1024) unsigned char memory[];"
_OWN_SHARED = "unsigned char *const memory = shared_memory();"


@dataclass
class Cpu:
    """A stand-in for a GPU of a few SMs; see lean_on_cpu.Cpu."""

    folder: Path
    mutation: Mutation | None = None
    _libraries: dict[MlaBuild, ctypes.CDLL] = field(default_factory=dict)

    def launch(
        self,
        inputs: AttentionInputs,
        config: MlaConfig,
        sms: int,
        workspace: Workspace,
        lazy: bool = True,
        seed: int = 0,
    ) -> CudaLaunch:
        """Makes the call; all CTAs run at once.

        Raises:
            AssertionError: the launch does not end, or does what a GPU takes for an error.
        """
        stand_ins: Mapping[str, Any] = {
            "sm_count": lambda device: sms,
            "clusters_at_once": lambda build, device: sms // build.cluster,
            "tensor_map": tensor_map,
        }
        with mock.patch.multiple(launch, **stand_ins):
            made = launch.launch_of(inputs, config)
        build = made.build
        assert isinstance(build, MlaBuild)
        if build not in self._libraries:
            folder = self.folder / str(len(self._libraries))
            self._libraries[build] = compiled(build, folder, self.mutation)
        params = aligned_params()
        ctypes.pointer(params)[0] = made.params
        workspace.lend(params, made.slots_bytes)
        run = self._libraries[build].launch
        run.restype = ctypes.c_char_p
        every = made.grid
        failure = run(ctypes.byref(params), every, build.shared_bytes, every, int(lazy), seed)
        assert failure is None, failure.decode()
        return made


def compiled(build: MlaBuild, folder: Path, mutation: Mutation | None) -> ctypes.CDLL:
    for family in ("lean", "mla"):
        (folder / family).mkdir(parents=True)
        for path in (KERNELS / family).glob("*.cu*"):
            text = path.read_text(encoding="utf-8")
            if mutation is not None and mutation[0] == path.name:
                text = replaced(text, mutation[1], mutation[2])
            if path.name == "mla.cu":
                text = replaced(text, _SHARED, _OWN_SHARED)
            (folder / family / path.name).write_text(text, encoding="utf-8")
    shutil.copy(_HERE / "ptx_on_cpu.hpp", folder / "lean" / "ptx.cuh")
    shutil.copy(_HERE / "wgmma_on_cpu.hpp", folder / "lean" / "wgmma.cuh")
    source, library = folder / "mla" / "mla.cu", folder / "mla.so"
    return library_of(source, library, build, 900, f"-I{folder}")
