"""Launches of mla.cu, and their arguments from the tensors of a call."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from leanbench.kernels.launch import qk_scale
from leanbench.kernels.lean.cuda import CudaLaunch, CudaRelaunch
from leanbench.kernels.lean.cuda_driver import clusters_at_once, sm_count, tensor_map
from leanbench.kernels.lean.cuda_params import Descale, Divisor, Params, check_counts
from leanbench.kernels.mla.build import TILE, MlaBuild
from leanbench.kernels.mla.configs import MlaConfig

from leanbench.core.decomposition import stream_k_grid
from leanbench.core.extras import fp8_name

if TYPE_CHECKING:
    from leanbench.core.extras import Extras
    from leanbench.core.inputs import AttentionInputs

#: Cost of partials and their merge, in stages of 64 tokens (H200). Short ranges pay for long
#: contexts, whole output tiles for short ones.
_PARTIALS_TILES = 5
#: Cost of an output tile's end, in stages of 64 tokens, for lengths on the device.
_END_TILES = 1
#: Cost of a merge, in stages of 64 tokens.
_MERGE_TILES = 4
#: Smallest normal number of fp32.
_LEAST_SCALE = 2.0**-126
#: Sixteenths by which a split may exceed the mean work range, for pairs of CTAs.
_LONGEST_STEPS = 31


class MlaRelaunch(CudaRelaunch):
    """A launch of mla.cu that updates its pointers and length in every call."""

    any_capacity = False
    # The second tensor map is the query's.
    mapped = ("k_cache", "q")

    def __call__(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        cache_seqlens: torch.Tensor | None,
        context: int,
        block_table: torch.Tensor | None,
        out: torch.Tensor,
        lse: torch.Tensor,
        extras: Extras | None = None,
    ) -> None:
        """Launch the kernel; see leanbench.kernels.launch.Relaunch. V is part of `k_cache`."""
        super().__call__(q, k_cache, q, cache_seqlens, context, block_table, out, lse, extras)


def launch_of(inputs: AttentionInputs, config: MlaConfig) -> CudaLaunch:
    build, params = _build(inputs, config), Params()
    _pass_tensors(params, inputs, build)
    grid, slots_bytes = _deal(inputs, build, config, params)
    held = (inputs.q, inputs.k_cache, inputs.out, inputs.lse)
    held += (inputs.cache_seqlens, inputs.block_table, inputs.k_descale)
    capacity = inputs.k_cache.shape[1]
    extras = () if inputs.k_descale is None else ("k_descale",)
    return CudaLaunch(build, inputs.q.device, grid, params, slots_bytes, capacity, held, extras)


def _build(inputs: AttentionInputs, config: MlaConfig) -> MlaBuild:
    return MlaBuild.of_shape(
        inputs.q.shape[2],
        inputs.q_len,
        inputs.q.dtype == torch.bfloat16,
        inputs.causal,
        inputs.cache_seqlens is not None,
        inputs.page_size or 0,
        fp8_name(inputs.k_cache.dtype),
        config.column_groups,
    )


def _deal(
    inputs: AttentionInputs, build: MlaBuild, config: MlaConfig, params: Params
) -> tuple[int, int]:
    """Write the schedule to `params`; return the CTAs of the launch and the partials' bytes."""
    device, batch = inputs.q.device, inputs.q.shape[0]
    slots = sm_count(device) // build.cluster
    slots = min(slots, clusters_at_once(build, device))
    end_tiles = _END_TILES if build.ragged else 0
    real_tiles = max(1, -(-inputs.context // TILE))
    tiles = real_tiles + end_tiles
    per_sequence = build.row_tiles(inputs.q_len) * build.column_groups
    output_tiles = batch * per_sequence
    total = output_tiles * tiles
    check_counts(total, tiles * TILE)
    work_ranges = stream_k_grid(output_tiles * real_tiles, slots, config.min_tiles_per_cta)
    if config.align_grid and not build.ragged:
        work_ranges = _aligned(work_ranges, output_tiles, real_tiles)
    params.tile_shift = TILE.bit_length() - 1
    params.by_heads = Divisor.of(per_sequence)
    params.share, params.longer = divmod(total, work_ranges)
    params.longest_steps = _LONGEST_STEPS if build.cluster > 1 else 0
    params.merge_tiles = _MERGE_TILES
    params.end_tiles = end_tiles
    params.min_tiles_per_range = config.min_tiles_per_cta
    params.by_tiles = Divisor.of(tiles)
    params.by_share = Divisor.of(params.share)
    params.by_share_plus_1 = Divisor.of(params.share + 1)
    # One per range, and one for the first split of each split output tile.
    return work_ranges * build.cluster, 2 * work_ranges * build.cluster * build.partial_bytes


def _aligned(work_ranges: int, output_tiles: int, tiles: int) -> int:
    """Return work ranges that end at output tiles of `tiles` stages.

    Returns `work_ranges` if the longest would exceed an equal share by more than partials cost.
    """
    if output_tiles <= work_ranges:
        splits = work_ranges // output_tiles
        aligned, longest = splits * output_tiles, -(-tiles // splits)
    else:
        whole = -(-output_tiles // work_ranges)
        if output_tiles % whole:
            return work_ranges
        aligned, longest = output_tiles // whole, whole * tiles
    even = output_tiles * tiles / work_ranges
    return aligned if longest - even <= _PARTIALS_TILES else work_ranges


def _pass_tensors(params: Params, inputs: AttentionInputs, build: MlaBuild) -> None:
    """Set the parameters that depend only on the tensors. The second tensor map is the query's."""
    q, out, cache = inputs.q, inputs.out, inputs.k_cache
    batch, q_len, heads, _ = q.shape
    params.k, params.v = cache.data_ptr(), q.data_ptr()
    params.out, params.lse = out.data_ptr(), inputs.lse.data_ptr()
    if inputs.cache_seqlens is not None:
        params.cache_seqlens = inputs.cache_seqlens.data_ptr()
    if inputs.block_table is not None:
        params.block_table = inputs.block_table.data_ptr()
        params.stride_table = inputs.block_table.stride(0)
    params.stride_out_batch, params.stride_out_token, params.stride_out_head = out.stride()[:3]
    params.context, params.batch, params.kv_heads = inputs.context, batch, build.column_groups
    # Above 0 in fp32: hidden scores of -inf times 0 would be NaN.
    params.qk_scale = max(qk_scale(inputs), _LEAST_SCALE)
    if inputs.k_descale is not None:
        params.k_descale = _descale(inputs.k_descale)
    share = TILE // build.cluster
    params.k_map.words[:] = tensor_map(params.k, cache.shape, cache.stride(), build, share)
    rows = (batch, q_len * heads, 1, q.shape[3])
    strides = (q.stride(0), q.stride(2), q.stride(2), 1)
    # The query has 16-bit numbers for any cache dtype.
    params.v_map.words[:] = tensor_map(params.v, rows, strides, replace(build, kv_dtype=0), TILE)


def _descale(scales: torch.Tensor) -> Descale:
    """Return one scale for the whole cache, or one per sequence, (batch, 1)."""
    return Descale(scales.data_ptr(), 0, 0) if scales.dim() == 1 else Descale.of(scales)
