"""What the CUDA driver is asked for: a build's function, clusters, tensor maps, launches."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from leanbench.kernels.lean.cuda_build import CudaBuild
from leanbench.kernels.lean.cuda_params import Params, aligned_params
from leanbench.kernels.lean.workspace import WORKSPACES

from leanbench.compile.nvrtc import compile_cuda
from leanbench.core.errors import DoesNotFit


class DriverLaunch:
    """The arguments of cuLaunchKernelEx, laid out once.

    Args:
        params: copied, its tensor maps pointed to K and V; `self.params` may be written between
            launches, which copy it in their turn.
        slots_bytes: what the slots of the partials take that each launch is lent.

    Raises:
        DoesNotFit: a CTA takes more than the GPU has.
    """

    def __init__(
        self,
        build: CudaBuild,
        device: torch.device,
        grid: int,
        params: Params,
        slots_bytes: int,
    ) -> None:
        self._device, self._stream, self._slots_bytes = device, 0, slots_bytes
        self._config = _launch_config(build, grid)
        self.params = aligned_params()
        ctypes.pointer(self.params)[0] = params
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self.params))
        self._arguments = (
            self._config.getPtr(),
            int(_function(build, device)),
            ctypes.addressof(self._pointers),
            None,
        )
        self._launch = _entry_point("cuLaunchKernelEx", 4)
        self._replace_address = _entry_point("cuTensorMapReplaceAddress", 2)
        if build.bulk:
            self.move(params.k, params.v)

    def run(self) -> None:
        """Launches on the device's current stream.

        Raises:
            RuntimeError: the driver refuses; or see Workspaces.lend.
        """
        slots, self.params.epoch, replays = WORKSPACES.lend(self._device, self._slots_bytes)
        self.params.partials, self.params.replays = slots.data_ptr(), replays.data_ptr()
        stream = torch._C._cuda_getCurrentRawStream(self._device.index)
        if stream != self._stream:
            self._config.hStream, self._stream = _driver().CUstream(stream), stream
        if status := self._launch(*self._arguments):
            _check((_driver().CUresult(status),))

    def move(self, k: int, v: int) -> None:
        """Lets the tensor maps of `params` describe K and V at other addresses.

        Raises:
            RuntimeError: the driver refuses.
        """
        start = ctypes.addressof(self.params)
        for place, address in ((start + Params.k_map.offset, k), (start + Params.v_map.offset, v)):
            if status := self._replace_address(place, address):
                _check((_driver().CUresult(status),))


def tensor_map(
    address: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    build: CudaBuild,
    box_tokens: int | None = None,
) -> tuple[int, ...]:
    """The words of a tensor map of a cache as (head_dim, token, KV head, sequence or page), read in
    boxes of `box_tokens` by a column of shared memory.

    Args:
        box_tokens: a page or a chunk by default.
    """
    driver = _driver()
    rows, tokens, heads, head_dim = shape
    # Numbers are copied as they are.
    dtypes, swizzles = driver.CUtensorMapDataType, driver.CUtensorMapSwizzle
    dtype = {
        1: dtypes.CU_TENSOR_MAP_DATA_TYPE_UINT8,
        2: dtypes.CU_TENSOR_MAP_DATA_TYPE_UINT16,
    }[build.kv_bytes]
    swizzle = {
        64: swizzles.CU_TENSOR_MAP_SWIZZLE_64B,
        128: swizzles.CU_TENSOR_MAP_SWIZZLE_128B,
    }[build.column_bytes]
    box = (build.column_bytes // build.kv_bytes, box_tokens or build.box, 1, 1)
    row_stride, token_stride, head_stride, _ = strides

    # A size of 1 may have any stride, one that is too large for a tensor map among them.
    def stride_bytes(size: int, stride: int) -> Any:
        return driver.cuuint64_t(build.kv_bytes * (stride if size > 1 else head_dim))

    encoded = _check(
        driver.cuTensorMapEncodeTiled(
            dtype,
            4,
            address,
            [driver.cuuint64_t(size) for size in (head_dim, tokens, heads, rows)],
            [
                stride_bytes(tokens, token_stride),
                stride_bytes(heads, head_stride),
                stride_bytes(rows, row_stride),
            ],
            [driver.cuuint32_t(size) for size in box],
            [driver.cuuint32_t(1)] * 4,
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzle,
            # Promotion to 256 bytes costs 9% of the bandwidth above 500 MB (H200).
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_NONE,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return tuple(int(word) for word in encoded.opaque)


@cache
def capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@cache
def sm_count(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def clusters_at_once(build: CudaBuild, device: torch.device) -> int:
    """Clusters that the GPU holds at once: GPUs of one name differ in how many SMs their GPCs have.

    Raises:
        DoesNotFit: it holds none.
    """
    if build.cluster == 1:
        return sm_count(device) * build.ctas_per_sm
    config = _launch_config(build, build.cluster)
    with torch.cuda.device(device):
        held = int(_check(_driver().cuOccupancyMaxActiveClusters(_function(build, device), config)))
    if held == 0:
        raise DoesNotFit(
            f"this GPU holds no cluster of {build.cluster} CTAs of {build}: choose a smaller"
            " cluster_size"
        )
    return held


@cache
def _function(build: CudaBuild, device: torch.device) -> Any:
    """The compiled kernel, loaded on the device.

    Raises:
        DoesNotFit: a CTA takes more than the GPU has.
    """
    driver = _driver()
    binary = compile_cuda(build.source(capability(device)))
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # makes the context
        module = _check(driver.cuModuleLoadData(binary.cubin))
        function = _check(driver.cuModuleGetFunction(module, build.entry.encode()))
        attributes = driver.CUfunction_attribute
        try:
            _check(
                driver.cuFuncSetAttribute(
                    function,
                    attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                    build.shared_bytes,
                )
            )
        except RuntimeError:
            raise DoesNotFit(
                f"a CTA of {build} takes {build.shared_bytes / 1024:.0f} KB of shared memory, more"
                " than this GPU has: fewer stages or warps need less"
            ) from None
    return function


def _launch_config(build: CudaBuild, grid: int) -> Any:
    driver = _driver()
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = 32 * build.warps, 1, 1
    config.sharedMemBytes = build.shared_bytes
    ids, attributes = driver.CUlaunchAttributeID, []
    if build.cluster > 1:
        attribute = driver.CUlaunchAttribute()
        attribute.id = ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        value = driver.CUlaunchAttributeValue()
        value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = build.cluster, 1, 1
        attribute.value = value
        attributes.append(attribute)
    if build.cooperative:
        attribute = driver.CUlaunchAttribute()
        attribute.id = ids.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        value = driver.CUlaunchAttributeValue()
        value.cooperative = 1
        attribute.value = value
        attributes.append(attribute)
    if attributes:
        config.attrs, config.numAttrs = attributes, len(attributes)
    return config


@cache
def _entry_point(name: str, arguments: int) -> Callable[..., int]:
    """A function of the driver that takes pointers: through ctypes it takes less host time than
    through cuda.bindings, which reads the same structures.
    """
    function = getattr(ctypes.CDLL("libcuda.so.1"), name)
    function.argtypes = [ctypes.c_void_p] * arguments
    function.restype = ctypes.c_int
    return function


@cache
def _driver() -> Any:
    from cuda.bindings import driver  # pyright: ignore[reportAttributeAccessIssue]

    return driver


def _check(returned: tuple[Any, ...]) -> Any:
    """What a driver call returned after its status.

    Raises:
        RuntimeError: the status says that it failed.
    """
    status, *rest = returned
    if int(status) != 0:
        _, name = _driver().cuGetErrorString(status)
        raise RuntimeError(f"CUDA driver: {name.decode() if name else status}")
    return rest[0] if len(rest) == 1 else tuple(rest)
