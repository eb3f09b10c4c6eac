"""CUDA driver calls: functions of builds, clusters, tensor maps, launches."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from leanbench.kernels.lean.cuda_build import CudaBuild
from leanbench.kernels.lean.cuda_params import (
    PAGE_SCALES_PARAMS_BYTES,
    Params,
    TensorMap,
    aligned_params,
)
from leanbench.kernels.lean.workspace import WORKSPACES, Lent

from leanbench.compile.nvrtc import compile_cuda
from leanbench.core.errors import DoesNotFit

#: CUlaunchConfig, and writers of its first field and of its stream.
_Config, _STREAM_OFFSET = ctypes.c_uint64 * 7, 32
_pack_grid, _pack_stream = struct.Struct("I").pack_into, struct.Struct("Q").pack_into
_PARAMS_SIZE, _K_MAP, _V_MAP = ctypes.sizeof(Params), Params.k_map.offset, Params.v_map.offset
#: Offset of its attributes and their number, and an attribute's size.
_ATTRIBUTES_OFFSET, _ATTRIBUTE_BYTES = 40, 72


class LaunchBlock(NamedTuple):
    """Copies of the structures of a launch, for callers that launch it themselves."""

    params: bytes
    function: int
    #: A CUlaunchConfig without its attributes.
    config: bytes
    attributes: bytes
    stream: int


class DriverLaunch:
    """Arguments of cuLaunchKernelEx, laid out once.

    Args:
        params: copied, with tensor maps moved to K and V. `self.params` may be written between
            launches; each launch copies it.
        slots_bytes: size of the partials' slots that each launch borrows.

    Raises:
        DoesNotFit: a CTA needs more than the GPU has.
    """

    def __init__(
        self,
        build: CudaBuild,
        device: torch.device,
        grid: int,
        params: Params,
        slots_bytes: int,
    ) -> None:
        self._device, self._stream = device, 0
        #: Address of the slots from the last `borrow`.
        self.slots = 0
        self._build = build
        # The attributes, to which the configuration points, are kept alive.
        config = self._whole_config = _launch_config(build, build.cluster)
        self._config = _Config.from_address(config.getPtr())
        self._function = int(_function(build, device))
        self._launch = _entry_point("cuLaunchKernelEx", 4)
        self._replace_address = _entry_point("cuTensorMapReplaceAddress", 2)
        self._copy(params)
        self.resize(grid, slots_bytes)
        if build.bulk:
            self.move(params.k, params.v)

    def copy(self) -> DriverLaunch:
        """Return a launch with its own parameters."""
        other = object.__new__(DriverLaunch)
        other.__dict__.update(self.__dict__)
        other._copy(self.params)
        return other

    def resize(self, grid: int, slots_bytes: int) -> None:
        """Change the CTAs, and the size of the slots."""
        self._slots_bytes = slots_bytes
        _pack_grid(self._config, 0, grid)
        stride = self.params.kept_stride = self._build.kept_stride(self.params.batch)
        self._kept_numbers = grid * stride
        #: Stream and counter of the last `borrow`.
        self._kept_for = None

    def _copy(self, params: Params) -> None:
        config = self._config = _Config.from_buffer_copy(self._config)
        self.params = aligned_params()
        start = ctypes.addressof(self.params)
        ctypes.memmove(start, ctypes.addressof(params), _PARAMS_SIZE)
        #: Addresses of the tensor maps of K and V.
        self.maps = start + _K_MAP, start + _V_MAP
        pointers = self._pointers = ctypes.c_void_p(start)
        self._arguments = (
            ctypes.addressof(config),
            self._function,
            ctypes.addressof(pointers),
            None,
        )

    def run(self) -> None:
        """Launch on the device's current stream.

        Raises:
            RuntimeError: a driver error, or see Workspaces.lend.
        """
        # `lent` keeps a capture's slots alive until the launch is captured.
        lent = self.borrow()
        self.launch(lent.epoch)

    def borrow(self) -> Lent:
        """Borrow a workspace of the device's current stream, and use that stream for launches.

        Raises:
            RuntimeError: see Workspaces.lend.
        """
        lent = WORKSPACES.lend(self._device, self._slots_bytes)
        self.slots = self.params.partials = lent.slots.data_ptr()
        self.params.replays = lent.replays.data_ptr()
        stream = torch._C._cuda_getCurrentRawStream(self._device.index)
        if stream != self._stream:
            _pack_stream(self._config, _STREAM_OFFSET, stream)
            self._stream = stream
        if self._kept_numbers and self._kept_for != (stream, self.params.replays):
            self._kept_for = stream, self.params.replays
            kept = WORKSPACES.keep(self._device, self._kept_numbers)
            self.params.kept, self.params.kept_key = kept
        return lent

    def launch(self, epoch: int) -> None:
        """Launch on the stream and with the workspace of the last `borrow`.

        Args:
            epoch: from Workspaces.next_epoch.

        Raises:
            RuntimeError: a driver error.
        """
        self.params.epoch = epoch
        if status := self._launch(*self._arguments):
            check_status(status)

    def block(self) -> LaunchBlock:
        """Return the launch as it was last made."""
        config = bytes(self._config)
        attributes, count = struct.unpack_from("QI", config, _ATTRIBUTES_OFFSET)
        return LaunchBlock(
            ctypes.string_at(ctypes.addressof(self.params), PAGE_SCALES_PARAMS_BYTES),
            self._function,
            config,
            ctypes.string_at(attributes, count * _ATTRIBUTE_BYTES) if count else b"",
            self._stream,
        )

    def move(self, k: int, v: int) -> None:
        """Move the tensor maps of `params` to other addresses of K and V.

        Raises:
            RuntimeError: a driver error.
        """
        k_map, v_map = self.maps
        if status := self._replace_address(k_map, k) or self._replace_address(v_map, v):
            check_status(status)

    def encode(self, cache_map: CacheMap, k: int, v: int) -> None:
        """Replace the tensor maps of `params` by `cache_map` at these addresses of K and V.

        Raises:
            RuntimeError: a driver error.
        """
        k_map, v_map = self.maps
        cache_map.encode(k_map, k)
        # A copy with a new address takes less host time than encoding a second map.
        ctypes.memmove(v_map, k_map, ctypes.sizeof(TensorMap))
        if status := self._replace_address(v_map, v):
            check_status(status)


def tensor_map(
    address: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    build: CudaBuild,
    box_tokens: int | None = None,
) -> tuple[int, ...]:
    """Return the words of a tensor map encoded by `CacheMap`."""
    aligned = aligned_params()
    cache_map = CacheMap(build, box_tokens)
    cache_map.resize(shape, strides)
    cache_map.encode(ctypes.addressof(aligned), address)
    return tuple(aligned.k_map.words)


# Creating an array type of ctypes takes longer than creating an array.
_Layout, _Box = ctypes.c_uint64 * 7, ctypes.c_uint32 * 4
#: Write a cache's four sizes and three strides to a `_Layout`.
_pack_layout = struct.Struct("7Q").pack_into


class CacheMap:
    """Arguments of cuTensorMapEncodeTiled, laid out once.

    The tensor map describes a cache as (head_dim, token, KV head, sequence or page), read in boxes
    of `box_tokens` by a column of shared memory.

    Args:
        box_tokens: a page or a chunk by default.
    """

    def __init__(self, build: CudaBuild, box_tokens: int | None = None) -> None:
        self._dtype, *modes = _map_modes(build.kv_bytes, build.column_bytes)
        self._kv_bytes, self._heads_of_row = build.kv_bytes, build.heads_of_row
        self._layout = _Layout()
        columns = build.column_bytes // build.kv_bytes
        self._box = _Box(columns, box_tokens or build.box, 1, 1)
        self._steps = _Box(1, 1, 1, 1)
        sizes = ctypes.addressof(self._layout)
        self._arguments = (
            sizes,
            sizes + ctypes.sizeof(ctypes.c_uint64) * 4,
            ctypes.addressof(self._box),
            ctypes.addressof(self._steps),
            *modes,
        )
        self._encode = _entry_point("cuTensorMapEncodeTiled", 12)

    def resize(self, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        """Set the shape and strides of the next tensor map."""
        rows, tokens, heads, head_dim = shape
        row_stride, token_stride, head_stride, _ = strides
        heads, head_dim = heads // self._heads_of_row, head_dim * self._heads_of_row
        head_stride *= self._heads_of_row
        # A dimension of size 1 can have any stride, even one too large for a tensor map.
        _pack_layout(
            self._layout,
            0,
            head_dim,
            tokens,
            heads,
            rows,
            self._kv_bytes * (token_stride if tokens > 1 else head_dim),
            self._kv_bytes * (head_stride if heads > 1 else head_dim),
            self._kv_bytes * (row_stride if rows > 1 else head_dim),
        )

    def encode(self, place: int, address: int) -> None:
        """Write the tensor map of a cache at `address` to `place`, a multiple of 64.

        Raises:
            RuntimeError: a driver error.
        """
        if status := self._encode(place, self._dtype, 4, address, *self._arguments):
            check_status(status)


@cache
def _map_modes(kv_bytes: int, column_bytes: int) -> tuple[int, ...]:
    """Return a tensor map's dtype, interleaving, swizzle, promotion and fill."""
    driver = _driver()
    # The dtype only sets the size: numbers are copied unchanged.
    dtypes, swizzles = driver.CUtensorMapDataType, driver.CUtensorMapSwizzle
    modes = (
        {
            1: dtypes.CU_TENSOR_MAP_DATA_TYPE_UINT8,
            2: dtypes.CU_TENSOR_MAP_DATA_TYPE_UINT16,
        }[kv_bytes],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        {
            64: swizzles.CU_TENSOR_MAP_SWIZZLE_64B,
            128: swizzles.CU_TENSOR_MAP_SWIZZLE_128B,
        }.get(column_bytes, swizzles.CU_TENSOR_MAP_SWIZZLE_NONE),
        # Promotion to 256 bytes reduces the bandwidth of large caches.
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_NONE,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    return tuple(mode.value for mode in modes)


@cache
def capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@cache
def sm_count(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def clusters_at_once(build: CudaBuild, device: torch.device) -> int:
    """Return the number of resident clusters. GPUs of one name differ in the SMs of their GPCs.

    Raises:
        DoesNotFit: no cluster is resident.
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
    """Return the compiled kernel, loaded on the device.

    Raises:
        DoesNotFit: a CTA needs more than the GPU has.
    """
    driver = _driver()
    binary = compile_cuda(build.source(capability(device)))
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # creates the context
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
    attributes = _launch_attributes(build.cluster, build.cooperative)
    if attributes:
        # cuda.bindings copies the attributes.
        config.attrs, config.numAttrs = attributes, len(attributes)
    return config


@cache
def _launch_attributes(cluster: int, cooperative: bool) -> list[Any]:
    driver, attributes = _driver(), []
    ids = driver.CUlaunchAttributeID
    if cluster > 1:
        attribute = driver.CUlaunchAttribute()
        attribute.id = ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        value = driver.CUlaunchAttributeValue()
        value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = cluster, 1, 1
        attribute.value = value
        attributes.append(attribute)
    if cooperative:
        attribute = driver.CUlaunchAttribute()
        attribute.id = ids.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        value = driver.CUlaunchAttributeValue()
        value.cooperative = 1
        attribute.value = value
        attributes.append(attribute)
    return attributes


@cache
def _entry_point(name: str, arguments: int) -> Callable[..., int]:
    """Return a driver function that takes pointers.

    Through ctypes it takes less host time than through cuda.bindings, which reads the same
    structures.
    """
    function = getattr(ctypes.CDLL("libcuda.so.1"), name)
    function.argtypes = [ctypes.c_void_p] * arguments
    function.restype = ctypes.c_int
    return function


@cache
def _driver() -> Any:
    from cuda.bindings import driver  # pyright: ignore[reportAttributeAccessIssue]

    return driver


def check_status(status: int) -> None:
    """Raise RuntimeError if the status of a driver call is an error."""
    _check((_driver().CUresult(status),))


def _check(returned: tuple[Any, ...]) -> Any:
    """Return a driver call's results after its status.

    Raises:
        RuntimeError: the status is an error.
    """
    status, *results = returned
    if int(status) != 0:
        _, name = _driver().cuGetErrorString(status)
        raise RuntimeError(f"CUDA driver: {name.decode() if name else status}")
    return results[0] if len(results) == 1 else tuple(results)
