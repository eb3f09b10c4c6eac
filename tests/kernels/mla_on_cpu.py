"""mla.cu on the CPU, see lean_on_cpu.py."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from lean_on_cpu import Mutation, Workspace, library_of, tensor_map
from leanbench.kernels.lean.cuda import CudaLaunch
from leanbench.kernels.lean.cuda_params import aligned_params
from leanbench.kernels.mla import launch
from leanbench.kernels.mla.build import MlaBuild
from leanbench.kernels.mla.configs import MlaConfig

from leanbench.core.inputs import AttentionInputs


@dataclass
class Cpu:
    """A fake GPU with a few SMs; see lean_on_cpu.Cpu."""

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
        """Launch the call; all CTAs are resident.

        Raises:
            AssertionError: the launch does not end, or does something that is an error on a GPU.
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
            self._libraries[build] = library_of(("lean", "mla"), build, self.mutation, 900)
        params = aligned_params()
        ctypes.pointer(params)[0] = made.params
        workspace.lend(params, made.slots_bytes)
        run = self._libraries[build].launch
        run.restype = ctypes.c_char_p
        every = made.grid
        failure = run(ctypes.byref(params), every, build.shared_bytes, every, int(lazy), seed)
        assert failure is None, failure.decode()
        return made
