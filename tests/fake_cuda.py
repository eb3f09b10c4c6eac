"""A driver without a GPU under lean.cu and mla.cu: it records launches, from Python and from C."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from leanbench.kernels.launch import Relaunch, problem_of
from leanbench.kernels.lean import cuda, cuda_driver
from leanbench.kernels.lean.cuda_kernel import LeanCuda
from leanbench.kernels.lean.cuda_params import (
    PAGE_SCALES_PARAMS_BYTES,
    PARAMS_ALIGNMENT,
    Params,
)
from leanbench.kernels.mla import LEAN_MLA
from leanbench.kernels.mla import launch as mla_kernel

from leanbench.attention import fast, prepared
from leanbench.attention.call import Call
from leanbench.attention.prepared import Family, PreparedLaunches
from leanbench.core.inputs import AttentionInputs
from leanbench.gpu.catalogue import find

H200 = find("h200")
FUNCTION = 0x1234
_CUDA = LeanCuda()
_SMS, _CLUSTERS = 132, 16


class Launched(NamedTuple):
    #: Parameters: each launch copies them.
    params: Params
    #: Grid, CTA, shared memory.
    sizes: tuple[int, ...]
    stream: int
    attributes: bytes
    #: True if C has launched, not Python.
    in_c: bool


class FakeCuda:
    """Functions of the driver. Tensors are on the CPU, on stream 0."""

    def __init__(self) -> None:
        self.launches: list[Launched] = []
        self.moved: list[int] = []
        #: Status of the next launches.
        self.status = 0
        self.in_python = 0
        integer, pointer = ctypes.c_int, ctypes.c_void_p
        address = ctypes.c_uint64
        #: Callbacks, which must live as long as their addresses are used.
        self.functions: dict[str, Any] = {
            "cuLaunchKernelEx": ctypes.CFUNCTYPE(integer, *[pointer] * 4)(self._launch),
            "cuTensorMapReplaceAddress": ctypes.CFUNCTYPE(integer, pointer, address)(self._move),
            "cuStreamIsCapturing": ctypes.CFUNCTYPE(integer, *[pointer] * 2)(self._none),
            "cuCtxGetDevice": ctypes.CFUNCTYPE(integer, pointer)(self._none),
        }

    def addresses(self) -> list[int]:
        """Return the addresses of the functions that C calls."""
        return [
            ctypes.cast(function, ctypes.c_void_p).value or 0
            for function in self.functions.values()
        ]

    def entry_point(self, name: str, arguments: int) -> Callable[..., int]:
        """Return the function that Python calls."""
        if name == "cuTensorMapEncodeTiled":
            return self._encode
        function = self.functions[name]

        def call(*arguments: Any) -> int:
            self.in_python += 1
            try:
                return function(*arguments)
            finally:
                self.in_python -= 1

        return call

    def _launch(self, config: int, function: int, pointers: int, extra: None) -> int:
        assert function == FUNCTION
        address = ctypes.c_uint64.from_address(pointers).value
        assert address % PARAMS_ALIGNMENT == 0
        memory = ctypes.create_string_buffer(PAGE_SCALES_PARAMS_BYTES)
        ctypes.memmove(memory, address, PAGE_SCALES_PARAMS_BYTES)
        stream, attributes, count = (ctypes.c_uint64 * 3).from_address(config + 32)
        self.launches.append(
            Launched(
                Params.from_buffer_copy(memory),
                tuple((ctypes.c_uint32 * 7).from_address(config)),
                stream,
                ctypes.string_at(attributes, 72 * (count & 0xFFFFFFFF)) if attributes else b"",
                not self.in_python,
            )
        )
        return self.status

    def _move(self, place: int, address: int) -> int:
        assert place % PARAMS_ALIGNMENT == 0
        ctypes.c_uint64.from_address(place).value = address
        self.moved.append(address)
        return 0

    def _encode(self, place: int, dtype: int, rank: int, address: int, *rest: Any) -> int:
        sizes = (ctypes.c_uint64 * 7).from_address(rest[0])
        (ctypes.c_uint64 * 10).from_address(place)[:] = [address, dtype, rank, *sizes]
        return 0

    def _none(self, *places: int) -> int:
        ctypes.c_int.from_address(places[-1]).value = 0
        return 0


def use_fake_driver(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Launch over tensors on the CPU with a fake driver."""
    fake = FakeCuda()
    monkeypatch.setattr(cuda_driver, "_entry_point", fake.entry_point)
    monkeypatch.setattr(cuda_driver, "_function", lambda build, device: FUNCTION)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    monkeypatch.setattr(prepared, "check_runs_on", lambda device: None)
    monkeypatch.setattr(prepared, "check_latent_launch", lambda call: None)
    monkeypatch.setattr(prepared, "_LAUNCHES", PreparedLaunches())
    for module in (cuda, mla_kernel):
        monkeypatch.setattr(module, "clusters_at_once", lambda build, device: _CLUSTERS)
        monkeypatch.setattr(module, "sm_count", lambda device: _SMS)
    return fake


def use_fake_cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Launch calls over tensors on the CPU with CUDA C++ and a fake driver."""
    fake = use_fake_driver(monkeypatch)

    def launch(call: Call, family: Family, inputs: AttentionInputs) -> Relaunch:
        problem = problem_of(inputs)
        uniform = inputs.cache_seqlens is None
        if call.latent:
            problem = replace(problem, lengths_on="host" if uniform else "device")
            latent = LEAN_MLA.relaunch(inputs, LEAN_MLA.default_config(problem, H200))
            return prepared._launch(latent, inputs)
        choose = _CUDA.default_config if uniform else _CUDA.any_length_config
        config: Any = call.config or choose(problem, H200)
        return prepared._launch(cuda.launch_of(inputs, config).relaunch(), inputs)

    monkeypatch.setattr(cuda, "refusal", lambda inputs: None)
    monkeypatch.setattr(prepared, "_launch_with_settings", launch)
    # Later tests on a GPU use its driver again.
    fast._use_driver.cache_clear()
    monkeypatch.setattr(fast, "_use_driver", lambda: None)
    if fast._extension is not None:
        fast._extension.use_driver(*fake.addresses())
    fast.clear()
    return fake
