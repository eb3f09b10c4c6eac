"""The launch of lean.cu: what it passes, taken from the call's tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import torch
from leanbench.kernels.launch import cache_strides, most_parts, problem_of, qk_scale
from leanbench.kernels.lean.configs import LeanCudaConfig
from leanbench.kernels.lean.cuda_build import ENTRY, CudaBuild
from leanbench.kernels.lean.cuda_params import (
    Divisor,
    PaddedParams,
    Params,
    check_counts,
    too_far_apart,
)
from leanbench.kernels.lean.cuda_schedule import END_TILES, dealt_tiles
from leanbench.kernels.lean.workspace import SLOTS_BYTES, WORKSPACES, fixed_run_bytes

from leanbench.compile.nvrtc import compile_cuda
from leanbench.core.decomposition import cluster_slots, stream_k_grid
from leanbench.core.errors import DoesNotFit, UserError
from leanbench.core.kernel import LaunchResources

if TYPE_CHECKING:
    from leanbench.core.inputs import AttentionInputs

#: Bytes that a 16-byte copy, and the start and strides of a bulk tensor copy, must be a multiple
#: of.
_ALIGNMENT_BYTES = 16


@dataclass(frozen=True)
class CudaLaunch:
    """One launch of lean.cu."""

    build: CudaBuild
    device: torch.device
    #: CTAs.
    grid: int
    params: Params
    #: What the parameters point to: it lives as long as the launch.
    tensors: tuple[torch.Tensor | None, ...]

    name = "lean_cuda"

    def run(self) -> Callable[[], None]:
        """A function that launches on the current stream."""
        from cuda.bindings import driver  # pyright: ignore[reportAttributeAccessIssue]

        function = _function(self.build, self.device)
        config = _launch_config(self.build, self.grid)
        params = PaddedParams(self.params)
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        address = ctypes.addressof(pointers)

        def launch(keep: Any = (self, params, pointers)) -> None:
            config.hStream = driver.CUstream(torch.cuda.current_stream(self.device).cuda_stream)
            _check(driver.cuLaunchKernelEx(config, function, address, 0))

        return launch

    def traced(self, events: torch.Tensor, max_events: int) -> CudaLaunch:
        """The same launch of a build that records up to `max_events` events a CTA; see
        leanbench.kernels.events.
        """
        params = Params.from_buffer_copy(self.params)
        params.events = events.data_ptr()
        return replace(
            self,
            build=replace(self.build, max_events=max_events),
            params=params,
            tensors=(*self.tensors, events),
        )

    def most_parts(self, inputs: AttentionInputs) -> int:
        """See leanbench.kernels.launch.most_parts."""
        params = self.params
        per_sequence, work_ranges = (
            inputs.kv_heads * self.build.row_tiles,
            self.grid // self.build.cluster,
        )
        tile_tokens, min_tiles = 1 << params.tile_shift, params.min_tiles_per_range
        return most_parts(
            inputs, tile_tokens, per_sequence, work_ranges, min_tiles, params.end_tiles
        )

    def resources(self) -> LaunchResources:
        return self.build.resources(
            compile_cuda(self.build.source(_capability(self.device))), self.grid
        )


def refusal(inputs: AttentionInputs) -> str | None:
    """One sentence why these tensors are not for this implementation, or None."""
    reason = too_far_apart(inputs)
    if reason is not None:
        return reason
    if inputs.q.device.type != "cuda":
        return f"lean_cuda runs on a GPU, the tensors are on {inputs.q.device}"
    for name, tensor in (("k_cache", inputs.k_cache), ("v_cache", inputs.v_cache)):
        numbers = (tensor.data_ptr(), *(2 * stride for stride in tensor.stride()[:3]))
        if any(number % _ALIGNMENT_BYTES for number in numbers):
            return (
                f"{name} starts at or steps by no multiple of {_ALIGNMENT_BYTES} bytes (strides "
                f"{tuple(tensor.stride())}): lean_cuda copies 16 bytes at a time"
            )
    if any(
        number % 4
        for number in (inputs.q.data_ptr(), *(2 * stride for stride in inputs.q.stride()[:3]))
    ):
        return (
            "q starts at or steps by no multiple of 4 bytes: lean_cuda reads two numbers at a time"
        )
    return None


def build_of(inputs: AttentionInputs, config: LeanCudaConfig) -> CudaBuild:
    """What these tensors are launched with; lengths on the device are `ragged`, whatever
    they are.
    """
    return replace(
        CudaBuild.of(problem_of(inputs), config), ragged=int(inputs.cache_seqlens is not None)
    )


def launch_of(
    inputs: AttentionInputs, config: LeanCudaConfig, sms: int | None = None
) -> CudaLaunch:
    """The launch over these tensors.

    Args:
        sms: SMs to choose the grid for; the device's by default.

    Raises:
        UserError: these tensors, or this config on this GPU, are not for this implementation, or
            the partials of fixed runs are too many.
        RuntimeError: see Workspaces.of.
    """
    reason = refusal(inputs)
    if reason is not None:
        raise UserError(reason)
    device = inputs.q.device
    build = build_of(inputs, config)
    batch = inputs.q.shape[0]
    output_tiles = batch * inputs.kv_heads * build.row_tiles
    tile_tokens = config.tile_tokens * (config.fixed_run_tiles or 1)
    # Fixed runs are whole LeanTiles: an empty one would be a fixed run of its own.
    end_tiles = END_TILES if build.ragged and not config.fixed_run_tiles else 0
    real_tiles = max(1, -(-inputs.context // tile_tokens))
    tiles = real_tiles + end_tiles
    total = output_tiles * tiles
    check_counts(total, tiles * tile_tokens)
    if config.fixed_run_tiles:
        work_ranges, min_tiles_per_range = total, 1
        workspace = WORKSPACES.of(device, fixed_run_bytes(work_ranges, build.partial_bytes))
    else:
        min_tiles_per_range = config.min_tiles_per_cta
        slots = cluster_slots(sms or _sms(device), build.ctas_per_sm, build.cluster)
        slots = min(slots, _clusters_at_once(build, device))
        aligned = config.align_grid and inputs.cache_seqlens is None
        work_ranges = stream_k_grid(
            output_tiles * real_tiles, slots, min_tiles_per_range, output_tiles if aligned else 1
        )
        # The workspace holds a partial for each work range.
        work_ranges = min(work_ranges, SLOTS_BYTES // build.partial_bytes)
        workspace = WORKSPACES.of(device)
    share, longer = divmod(total, work_ranges)
    params = _params(inputs, build)
    params.partials = workspace.partials.data_ptr()
    params.tile_shift = tile_tokens.bit_length() - 1
    if not config.fixed_run_tiles:
        params.align_tiles, params.merge_tiles = dealt_tiles(build, tile_tokens)
    params.end_tiles = end_tiles
    params.min_tiles_per_range = min_tiles_per_range
    params.share, params.longer = share, longer
    params.by_tiles = Divisor.of(tiles)
    params.by_heads = Divisor.of(inputs.kv_heads * build.row_tiles)
    params.by_share, params.by_share_plus_1 = Divisor.of(share), Divisor.of(share + 1)
    held = (workspace.partials, inputs.q, inputs.k_cache, inputs.v_cache, inputs.out, inputs.lse)
    held += (inputs.cache_seqlens, inputs.block_table)
    return CudaLaunch(build, device, work_ranges * build.cluster, params, held)


def _params(inputs: AttentionInputs, build: CudaBuild) -> Params:
    """What follows from the tensors alone."""
    params = Params()
    params.q, params.k, params.v = (
        inputs.q.data_ptr(),
        inputs.k_cache.data_ptr(),
        inputs.v_cache.data_ptr(),
    )
    params.out, params.lse = inputs.out.data_ptr(), inputs.lse.data_ptr()
    if inputs.cache_seqlens is not None:
        params.cache_seqlens = inputs.cache_seqlens.data_ptr()
    if inputs.block_table is not None:
        params.block_table = inputs.block_table.data_ptr()
        params.pages_per_sequence = inputs.block_table.shape[1]
    params.stride_q_batch, params.stride_q_token, params.stride_q_head = inputs.q.stride()[:3]
    params.stride_out_batch, params.stride_out_token, params.stride_out_head = inputs.out.stride()[
        :3
    ]
    params.stride_k_batch, params.stride_k_head, params.stride_k_token = cache_strides(
        inputs.k_cache
    )
    params.stride_v_batch, params.stride_v_head, params.stride_v_token = cache_strides(
        inputs.v_cache
    )
    params.context, params.batch, params.kv_heads = (
        inputs.context,
        inputs.q.shape[0],
        inputs.kv_heads,
    )
    params.qk_scale = qk_scale(inputs)
    if build.bulk:
        box_tokens = min(build.chunk, build.page or build.chunk)
        for name, cache_tensor in (("k_map", inputs.k_cache), ("v_map", inputs.v_cache)):
            shape, strides = tuple(cache_tensor.shape), tuple(cache_tensor.stride())
            words = _tensor_map(
                cache_tensor.data_ptr(), shape, strides, bool(build.bf16), box_tokens
            )
            getattr(params, name).words[:] = words
    return params


@lru_cache(maxsize=1024)
def _tensor_map(
    address: int, shape: tuple[int, ...], strides: tuple[int, ...], bf16: bool, box_tokens: int
) -> tuple[int, ...]:
    """A cache as (head_dim, token, KV head, sequence or page), read in boxes of `box_tokens` x 128
    bytes.
    """
    from cuda.bindings import driver  # pyright: ignore[reportAttributeAccessIssue]

    rows, tokens, heads, head_dim = shape
    dtypes = driver.CUtensorMapDataType
    dtype = (
        dtypes.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 if bf16 else dtypes.CU_TENSOR_MAP_DATA_TYPE_FLOAT16
    )
    row_stride, token_stride, head_stride, _ = strides

    # A size of 1 may have any stride, one that is too large for a tensor map among them.
    def stride_bytes(size: int, stride: int) -> Any:
        return driver.cuuint64_t(2 * (stride if size > 1 else head_dim))

    tensor_map = _check(
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
            [driver.cuuint32_t(size) for size in (64, box_tokens, 1, 1)],
            [driver.cuuint32_t(1)] * 4,
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            # Promotion to 256 bytes costs 9% of the bandwidth above 500 MB (H200).
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_NONE,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return tuple(int(word) for word in tensor_map.opaque)


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@cache
def _sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _function(build: CudaBuild, device: torch.device) -> Any:
    """The compiled kernel, loaded on the device.

    Raises:
        UserError: a CTA takes more than the GPU has.
    """
    from cuda.bindings import driver  # pyright: ignore[reportAttributeAccessIssue]

    binary = compile_cuda(build.source(_capability(device)))
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # makes the context
        module = _check(driver.cuModuleLoadData(binary.cubin))
        function = _check(driver.cuModuleGetFunction(module, ENTRY.encode()))
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


@cache
def _clusters_at_once(build: CudaBuild, device: torch.device) -> int:
    """Clusters that the GPU holds at once: GPUs of one name differ in how many SMs their GPCs have.

    Raises:
        DoesNotFit: it holds none.
    """
    if build.cluster == 1:
        return _sms(device) * build.ctas_per_sm
    from cuda.bindings import driver  # pyright: ignore[reportAttributeAccessIssue]

    config = _launch_config(build, build.cluster)
    with torch.cuda.device(device):
        held = int(_check(driver.cuOccupancyMaxActiveClusters(_function(build, device), config)))
    if held == 0:
        raise DoesNotFit(
            f"this GPU holds no cluster of {build.cluster} CTAs of {build}: choose a smaller"
            " cluster_size"
        )
    return held


def _launch_config(build: CudaBuild, grid: int) -> Any:
    from cuda.bindings import driver  # pyright: ignore[reportAttributeAccessIssue]

    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = 32 * build.warps, 1, 1
    config.sharedMemBytes = build.shared_bytes
    if build.cluster > 1:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        value = driver.CUlaunchAttributeValue()
        value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = build.cluster, 1, 1
        attribute.value = value
        config.attrs, config.numAttrs = [attribute], 1
    return config


def _check(returned: tuple[Any, ...]) -> Any:
    """What a driver call returned after its status.

    Raises:
        RuntimeError: the status says that it failed.
    """
    from cuda.bindings import driver  # pyright: ignore[reportAttributeAccessIssue]

    status, *rest = returned
    if int(status) != 0:
        _, name = driver.cuGetErrorString(status)
        raise RuntimeError(f"CUDA driver: {name.decode() if name else status}")
    return rest[0] if len(rest) == 1 else tuple(rest)
