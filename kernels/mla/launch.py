"""Launches of mla.cu, and their arguments from the tensors of a call."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from leanbench.kernels.launch import qk_scale
from leanbench.kernels.lean.cuda import CudaLaunch, CudaRelaunch, LaunchFamily
from leanbench.kernels.lean.cuda_build import CudaBuild
from leanbench.kernels.lean.cuda_driver import CacheMap, clusters_at_once, sm_count, tensor_map
from leanbench.kernels.lean.cuda_params import Descale, Divisor, Params, check_counts, pass_shares
from leanbench.kernels.mla.build import MERGED_ROWS, TILE, MlaBuild
from leanbench.kernels.mla.configs import MlaConfig

from leanbench.core.decomposition import stream_k_grid
from leanbench.core.extras import fp8_name

if TYPE_CHECKING:
    from leanbench.core.extras import Extras
    from leanbench.core.inputs import AttentionInputs

#: Cost of an output tile that two work ranges share, in stages of 64 tokens (H200): splits longer
#: than the mean by more than that cross output tiles instead.
_PARTIALS_TILES = 5
#: Cost of an output tile's end, in stages of 64 tokens, for lengths on the device.
_END_TILES = 1
#: Smallest normal number of fp32.
_LEAST_SCALE = 2.0**-126


class MlaRelaunch(CudaRelaunch):
    """A launch of mla.cu that updates its pointers and length in every call.

    V is part of `k_cache`.
    """

    any_capacity = False
    # The second tensor map is the query's.
    mapped = ("k_cache", "q")

    def __init__(self, launch: CudaLaunch) -> None:
        super().__init__(launch)
        build = launch.build
        self._map = CacheMap(build, build.box // build.cluster)
        self._query_map = CacheMap(_query_build(build), TILE)

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
        """Launch the kernel; see leanbench.kernels.launch.Relaunch."""
        super().__call__(q, k_cache, q, cache_seqlens, context, block_table, out, lse, extras)

    def _resize(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
        k_map, v_map = self._launch.maps
        _pass_rows(self._launch.params, k_cache)
        k, v = self._caches = k_cache.data_ptr(), q.data_ptr()
        self._capacity = k_cache.shape[1]
        self._map.resize(k_cache.shape, k_cache.stride())
        self._map.encode(k_map, k)
        self._query_map.resize(*_query_rows(q))
        self._query_map.encode(v_map, v)


@dataclass(frozen=True)
class MlaFamily(LaunchFamily):
    build: MlaBuild
    config: MlaConfig

    @classmethod
    def of(cls, inputs: AttentionInputs, config: MlaConfig) -> MlaFamily:
        build, device = _build(inputs, config), inputs.q.device
        slots = min(sm_count(device) // build.cluster, clusters_at_once(build, device))
        return cls(build, config, slots, inputs.q_len)

    @property
    def per_sequence(self) -> int:
        """Output tiles of a sequence."""
        return self.build.row_tiles(self.q_len)

    def divide(self, params: Params, batch: int, context: int, queries: int) -> tuple[int, int]:
        build, config = self.build, self.config
        end_tiles = _END_TILES if build.ragged else 0
        real_tiles = max(1, -(-context // TILE))
        tiles = real_tiles + end_tiles
        output_tiles = batch * self.per_sequence
        total = output_tiles * tiles
        check_counts(total, tiles * TILE)
        # Of a group.
        groups = build.column_groups
        real, slots = output_tiles * real_tiles, max(1, self.slots // groups)
        work_ranges = stream_k_grid(real, slots, config.min_tiles_per_cta)
        if config.align_grid and not build.ragged:
            work_ranges = _aligned(work_ranges, output_tiles, real_tiles)
        params.context, params.batch = context, batch
        share, longer = divmod(total, work_ranges)
        rows = min(build.group_size * self.q_len, TILE)
        limits = _PARTIALS_TILES, -(-rows // MERGED_ROWS)
        pass_shares(params, (end_tiles, config.min_tiles_per_cta, share, longer, *limits), tiles)
        all_ranges = work_ranges * groups
        if build.ragged and groups > 1:
            # In groups, short splits; in one, as many ranges as the capacity needs.
            whole = stream_k_grid(real, self.slots, config.min_tiles_per_cta)
            all_ranges = max(whole, groups * stream_k_grid(real, slots, 1))
        # One per range, and one for the first split of each split output tile.
        return all_ranges * build.cluster, 2 * all_ranges * build.cluster * build.partial_bytes


def launch_of(inputs: AttentionInputs, config: MlaConfig) -> CudaLaunch:
    family, params = MlaFamily.of(inputs, config), Params()
    _pass_tensors(params, inputs, family.build)
    params.by_heads = Divisor.of(family.per_sequence)
    grid, slots_bytes = family.divide(params, inputs.q.shape[0], inputs.context, 0)
    held = (inputs.q, inputs.k_cache, inputs.out, inputs.lse)
    held += (inputs.cache_seqlens, inputs.block_table, inputs.k_descale)
    capacity, device = inputs.k_cache.shape[1], inputs.q.device
    extras = () if inputs.k_descale is None else ("k_descale",)
    return CudaLaunch(
        family.build, device, grid, params, slots_bytes, capacity, held, extras, family
    )


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
        inputs.row_scales,
        inputs.head_dim,
    )


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
    params.k, params.v = cache.data_ptr(), q.data_ptr()
    params.out, params.lse = out.data_ptr(), inputs.lse.data_ptr()
    if inputs.cache_seqlens is not None:
        params.cache_seqlens = inputs.cache_seqlens.data_ptr()
    if inputs.block_table is not None:
        params.block_table = inputs.block_table.data_ptr()
        params.stride_table = inputs.block_table.stride(0)
    params.stride_out_batch, params.stride_out_token, params.stride_out_head = out.stride()[:3]
    _pass_rows(params, cache)
    params.kv_heads, params.tile_shift = 1, TILE.bit_length() - 1
    # Above 0 in fp32: hidden scores of -inf times 0 would be NaN.
    params.qk_scale = max(qk_scale(inputs), _LEAST_SCALE)
    if inputs.k_descale is not None:
        params.k_descale = _descale(inputs.k_descale)
    # Unused by builds that copy row by row, but launches move it.
    share = build.box // build.cluster
    params.k_map.words[:] = tensor_map(params.k, cache.shape, cache.stride(), build, share)
    params.v_map.words[:] = tensor_map(params.v, *_query_rows(q), _query_build(build), TILE)


def _pass_rows(params: Params, cache: torch.Tensor) -> None:
    """Set where rows of the cache are, for builds that copy row by row."""
    params.pages, params.stride_k_batch, params.stride_k_token = cache.shape[0], *cache.stride()[:2]


def _query_rows(q: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape and the strides of the query in its tensor map."""
    batch, q_len, heads, columns = q.shape
    row, _, head, _ = q.stride()
    return (batch, q_len * heads, 1, columns), (row, head, head, 1)


def _query_build(build: CudaBuild) -> CudaBuild:
    """Return a build for the query's tensor map: of 16-bit numbers for any dtype of the cache."""
    return replace(build, kv_dtype=0)


def _descale(scales: torch.Tensor) -> Descale:
    """Return one scale for the whole cache, or one per sequence, (batch, 1)."""
    return Descale(scales.data_ptr(), 0, 0) if scales.dim() == 1 else Descale.of(scales)
