"""Launches of lean.cu, and their arguments from the tensors of a call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from leanbench.kernels.launch import (
    Relaunch,
    misalignment,
    most_parts,
    qk_scale,
)
from leanbench.kernels.lean.configs import CudaConfig, LeanCudaConfig
from leanbench.kernels.lean.cuda_append import pass_append, with_append
from leanbench.kernels.lean.cuda_build import CudaBuild, ManyRowsBuild, refusal_of_fp8
from leanbench.kernels.lean.cuda_driver import (
    CacheMap,
    DriverLaunch,
    LaunchBlock,
    capability,
    clusters_at_once,
    sm_count,
    tensor_map,
)
from leanbench.kernels.lean.cuda_masks import (
    dealt_tokens,
    dealt_window,
    pass_masks,
    read_dealt_lengths,
    with_masks,
)
from leanbench.kernels.lean.cuda_params import (
    POINTERS_OFFSET,
    STRIDES_OFFSET,
    Descale,
    Divisor,
    Params,
    check_counts,
    pack_pointer,
    pack_pointers,
    pack_strides,
    pass_shares,
    pass_table,
    too_far_apart,
)
from leanbench.kernels.lean.cuda_schedule import (
    END_TILES,
    even_splits,
    has_whole_tiles,
    most_fixed_runs,
    rereads_memory,
    split_limits,
    whole_ranges,
)
from leanbench.kernels.lean.workspace import WORKSPACE_BYTES, WORKSPACES, fixed_run_bytes

from leanbench.compile.nvrtc import compile_cuda
from leanbench.core.config import KernelConfig
from leanbench.core.decomposition import cluster_slots, stream_k_grid
from leanbench.core.errors import UserError
from leanbench.core.extras import Extras, extra_tensors
from leanbench.core.kernel import LaunchResources
from leanbench.core.kinds import SAME
from leanbench.core.problem import AttentionProblem

if TYPE_CHECKING:
    from leanbench.core.inputs import AttentionInputs

_FP8_NAMES = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


@dataclass(frozen=True)
class LaunchFamily(ABC):
    """What launches of one build and config have in common, whatever their sizes."""

    build: CudaBuild
    config: KernelConfig
    #: Clusters resident at once.
    slots: int
    q_len: int

    @abstractmethod
    def divide(self, params: Params, batch: int, context: int, queries: int) -> tuple[int, int]:
        """Set the parameters of the division of work; return the CTAs and the slots' bytes.

        Args:
            queries: query tokens of all sequences if they are packed.

        Raises:
            UserError: too much work.
        """


@dataclass(frozen=True)
class CudaLaunch:
    build: CudaBuild
    device: torch.device
    grid: int
    params: Params
    #: Size of the partials in bytes.
    slots_bytes: int
    #: Capacity of the caches in tokens, per sequence or page.
    capacity: int
    #: Tensors that the parameters point to, kept alive by the launch.
    tensors: tuple[torch.Tensor | None, ...]
    #: Names of the tensors from leanbench.core.extras in use.
    extras: tuple[str, ...] = ()
    #: None for a launch of no other sizes.
    family: LaunchFamily | None = None

    name = "lean_cuda"

    def run(self) -> Callable[[], None]:
        """Return a function that launches on the current stream and keeps the tensors alive."""
        launch = DriverLaunch(self.build, self.device, self.grid, self.params, self.slots_bytes)

        def run(keep: CudaLaunch = self) -> None:
            launch.run()

        return run

    def relaunch(self) -> Relaunch:
        """Return a launch for other tensors of the same shapes, strides and alignments.

        See leanbench.kernels.launch.Relaunch.
        """
        return CudaRelaunch(self)

    def traced(self, events: torch.Tensor, max_events: int) -> CudaLaunch:
        """Return the launch of a build that records timeline events.

        A CTA records up to `max_events`; see leanbench.kernels.events.
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
        """Return the most parts per CTA; see leanbench.kernels.launch.most_parts.

        With fixed runs, full caches are assumed.
        """
        params = self.params
        if self.build.fixed_runs:
            return -(-self.slots_bytes // (self.build.partial_bytes * self.grid))
        per_sequence, work_ranges = (
            inputs.kv_heads // self.build.heads_of_row * self.build.row_tiles(inputs.q_len),
            self.grid // self.build.cluster,
        )
        tile_tokens, min_tiles = 1 << params.tile_shift, params.min_tiles_per_range
        lengths = read_dealt_lengths(self.build, inputs)
        return most_parts(
            lengths,
            tile_tokens,
            per_sequence,
            work_ranges,
            min_tiles,
            params.end_tiles,
            self.build.packs,
        )

    def resources(self) -> LaunchResources:
        return self.build.resources(
            compile_cuda(self.build.source(capability(self.device))), self.grid
        )


class CudaRelaunch:
    """A launch of lean.cu that updates its pointers and length in every call.

    Strides and tensor maps are updated if the capacity of the caches changes.
    """

    any_capacity = True
    #: Fields of AttentionInputs that the pointers and tensor maps `k` and `v` belong to.
    mapped = ("k_cache", "v_cache")

    def __init__(self, launch: CudaLaunch) -> None:
        self._launch = DriverLaunch(
            launch.build, launch.device, launch.grid, launch.params, launch.slots_bytes
        )
        self._build, self._capacity = launch.build, launch.capacity
        self._caches = launch.params.k, launch.params.v
        #: None for a launch of no other sizes.
        self.family = launch.family
        self._map = CacheMap(launch.build) if launch.build.bulk else None
        self.tile_tokens = 1 << launch.params.tile_shift
        self._extras = launch.extras
        #: For each extra tensor: its index in Extras, and the offset of its pointer.
        self._places = [
            (Extras._fields.index(name), pointer_offset(name)) for name in launch.extras
        ]
        #: True if the launch holds its stream's workspace.
        self._has_workspace = False

    def copy(self) -> CudaRelaunch:
        """Return a launch with its own parameters."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._launch = self._launch.copy()
        return other

    def resize(
        self,
        batch: int,
        context: int,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        block_table: torch.Tensor | None,
    ) -> None:
        """Make it a launch of another batch, context, capacity, or number of pages or packed
        tokens.

        Strides of rows may differ, and those of KV heads if they exceed a token's. Alignments to 16
        bytes and everything else are the same.
        """
        assert self.family is not None
        launch, self._has_workspace = self._launch, False
        params = launch.params
        if block_table is not None:
            pass_table(params, block_table)
        if self._build.ragged_q:
            params.total_queries = q.shape[0]
        launch.resize(*self.family.divide(params, batch, context, q.shape[0]))
        self._resize(q, k_cache, v_cache)

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
        launch = self._launch
        if self._has_workspace:
            epoch = WORKSPACES.next_epoch()
        else:
            # `lent` keeps a capture's slots alive until the launch is captured.
            lent = launch.borrow()
            epoch, self._has_workspace = lent.epoch, lent.stays
        k, v = caches = k_cache.data_ptr(), v_cache.data_ptr()
        if k_cache.shape[1] != self._capacity:
            self._resize(q, k_cache, v_cache)
        elif self._map is not None and caches != self._caches:
            launch.move(k, v)
        self._caches = caches
        params = launch.params
        pack_pointers(
            params,
            POINTERS_OFFSET,
            q.data_ptr(),
            k,
            v,
            out.data_ptr(),
            lse.data_ptr(),
            launch.slots,
            0 if cache_seqlens is None else cache_seqlens.data_ptr(),
            0 if block_table is None else block_table.data_ptr(),
        )
        params.context = context
        if extras is not None:
            fields: Any = extras
            for index, offset in self._places:
                pack_pointer(params, offset, fields[index].data_ptr())
        launch.launch(epoch)

    def block(self) -> LaunchBlock | None:
        """Return the launch for others on its stream; None without the stream's workspace."""
        return self._launch.block() if self._has_workspace else None

    @property
    def pointers(self) -> dict[str, str]:
        """Fields of Params with the pointers of a call, and those fields of AttentionInputs."""
        k, v = self.mapped
        params, extras = self._launch.params, {name: name for name in self._extras}
        more = {name: name for name in ("cache_seqlens", "block_table") if getattr(params, name)}
        return {"q": "q", "k": k, "v": v, **more, **extras}

    @property
    def maps(self) -> dict[str, str]:
        """Fields of Params with tensor maps, and those fields of AttentionInputs."""
        return dict(zip(("k_map", "v_map"), self.mapped, strict=True)) if self._map else {}

    def _resize(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
        """Update the strides and tensor maps of the caches."""
        launch, cache_map = self._launch, self._map
        shape, strides, v_strides = k_cache.shape, k_cache.stride(), v_cache.stride()
        self._capacity = shape[1]
        pass_strides(launch.params, strides, v_strides, self._build)
        if cache_map is not None:
            cache_map.resize(shape, strides)
            k, v = self._caches = k_cache.data_ptr(), v_cache.data_ptr()
            launch.encode(cache_map, k, v)
            if v_strides != strides or v_cache.shape != shape:
                cache_map.resize(v_cache.shape, v_strides)
                cache_map.encode(launch.maps[1], v)


def pointer_offset(name: str) -> int:
    """Return the offset in Params of the pointer of an extra tensor.

    It is that of the field of that name, or of its `at`, the first field of a structure.
    """
    return getattr(Params, name).offset


def pass_strides(params: Params, k: tuple[int, ...], v: tuple[int, ...], build: CudaBuild) -> None:
    """Set the strides of K and V."""
    k_head, v_head = k[2] * build.heads_of_row, v[2] * build.heads_of_row
    pack_strides(params, STRIDES_OFFSET, k[0], k_head, v[0], v_head)
    params.stride_k_token, params.stride_v_token = k[1], v[1]


def refusal(inputs: AttentionInputs) -> str | None:
    """Return why this implementation cannot run these tensors, or None."""
    reason = too_far_apart(inputs)
    if reason is not None:
        return reason
    if inputs.q.device.type != "cuda":
        return f"lean_cuda runs on a GPU, the tensors are on {inputs.q.device}"
    kv_dtype = _FP8_NAMES.get(inputs.k_cache.dtype, SAME)
    reason = refusal_of_fp8(kv_dtype, inputs.head_dim, inputs.value_dim)
    return reason or misalignment(inputs)


def build_of(inputs: AttentionInputs, config: CudaConfig) -> CudaBuild:
    """Return the build for these tensors. Lengths on the device make it `ragged`, even if equal."""
    bf16, ragged = inputs.out.dtype == torch.bfloat16, inputs.cache_seqlens is not None
    dims, queries = (inputs.head_dim, inputs.value_dim), (inputs.group_size, inputs.q_len)
    fp8 = _FP8_NAMES.get(inputs.k_cache.dtype, SAME), _FP8_NAMES.get(inputs.q.dtype, SAME)
    ragged_q = inputs.cu_seqlens_q is not None
    if isinstance(config, LeanCudaConfig) and config.of_warpgroups:
        beyond = any(each is not None for each in (inputs.k_new, inputs.peers, inputs.prior))
        config = config.of_warps if beyond else config
    pairs = _has_head_pairs(inputs)
    build = _build(config, bf16, *fp8, ragged, *dims, *queries, ragged_q, inputs.page_size, pairs)
    build = with_append(with_masks(build, inputs), inputs)
    if inputs.k_page_descale is not None:
        build = replace(build, page_scales=1)
    return build if inputs.peers is None else replace(build, peers=inputs.peers.ranks)


def _has_head_pairs(inputs: AttentionInputs) -> bool:
    """Return True if these tensors allow copying the rows of two KV heads as one.

    The rows must be adjacent for each token, and no feature may need a single KV head. The sizes
    are checked by `takes_head_pairs`.
    """
    k, v = inputs.k_cache, inputs.v_cache
    return (
        inputs.kv_heads % 2 == 0
        and not inputs.has_table_of_heads
        and k.stride(2) == k.shape[3]
        and v.stride(2) == v.shape[3]
        and inputs.k_new is None
        and inputs.k_page_descale is None
        and inputs.peers is None
    )


@lru_cache(maxsize=1024)
def _build(
    config: CudaConfig,
    bf16: bool,
    kv_dtype: str,
    q_dtype: str,
    ragged: bool,
    head_dim: int,
    v_head_dim: int,
    group_size: int,
    q_len: int,
    ragged_q: bool,
    page_size: int | None,
    head_pairs: bool,
) -> CudaBuild:
    heads, layout = (2, "NHD") if head_pairs else (1, "HND")
    problem = AttentionProblem(
        1,
        heads * group_size,
        heads,
        1,
        head_dim,
        "bf16" if bf16 else "fp16",
        layout,
        q_len=q_len,
        page_size=page_size,
        kv_dtype=kv_dtype,
        q_dtype=q_dtype,
        v_head_dim=v_head_dim,
        q_lens=(q_len,) if ragged_q else None,
    )
    return replace(CudaBuild.of(problem, config), ragged=int(ragged or ragged_q))


@dataclass(frozen=True)
class CudaFamily(LaunchFamily):
    """A family of lean.cu or many_rows.cu."""

    config: CudaConfig
    #: KV heads, or pairs of them copied as one; and output tiles of one, of a sequence.
    kv_heads: int
    row_tiles: int
    group_size: int
    #: From `dealt_window`.
    window: int
    #: Bytes of K and V of a sequence's token, and of a work range's partial.
    token_bytes: int
    partial_bytes: int
    #: `split_limits` without and with rereads.
    limits: tuple[tuple[int, int], tuple[int, int]]

    @classmethod
    def of(cls, inputs: AttentionInputs, config: CudaConfig, sms: int | None = None) -> CudaFamily:
        """Return the family of these tensors; arguments and errors as in `launch_of`."""
        build, device = build_of(inputs, config), inputs.q.device
        slots = cluster_slots(sms or sm_count(device), build.ctas_per_sm, build.cluster)
        columns, tile_tokens = inputs.head_dim + inputs.value_dim, config.tile_tokens
        return cls(
            build,
            config,
            min(slots, clusters_at_once(build, device)),
            inputs.q_len,
            inputs.kv_heads // build.heads_of_row,
            build.row_tiles(inputs.q_len),
            inputs.group_size,
            dealt_window(inputs.most_behind, inputs.new_tokens),
            inputs.kv_heads * columns * inputs.k_cache.element_size(),
            build.partial_bytes,
            (split_limits(build, tile_tokens), split_limits(build, tile_tokens, rereads=True)),
        )

    def divide(self, params: Params, batch: int, context: int, queries: int) -> tuple[int, int]:
        build, config, slots = self.build, self.config, self.slots
        partial_bytes, tile_tokens = self.partial_bytes, config.tile_tokens
        output_tiles, per_sequence = batch * self.row_tiles, self.kv_heads * self.row_tiles
        if build.ragged_q:
            # An upper bound: the last output tile of each sequence can be partly empty.
            output_tiles = min(output_tiles, queries * self.group_size // build.rows + batch)
        output_tiles = self.kv_heads * max(1, output_tiles)
        tokens = context
        if self.window >= 0:
            tokens = dealt_tokens(build, context, self.q_len, self.window)
        params.context, params.batch = context, batch
        if config.splits:
            lean_tiles = max(1, -(-tokens // tile_tokens))
            work_ranges = output_tiles * config.splits
            check_counts(max(work_ranges * build.cluster, output_tiles * lean_tiles), context)
            waiting = work_ranges if config.splits > 1 else 0
            slots_bytes = fixed_run_bytes(waiting, partial_bytes)
        elif config.fixed_run_tiles:
            if build.ragged_q:
                raise UserError(
                    "lean_cuda splits contexts by work where there is cu_seqlens_q: leave it or"
                    " batch_invariant out"
                )
            runs = most_fixed_runs(tokens, per_sequence, config)
            total = output_tiles * runs
            check_counts(total, context)
            work_ranges = min(total, slots)
            slots_bytes = fixed_run_bytes(total, partial_bytes)
            params.longest_shift = (tile_tokens * config.fixed_run_tiles).bit_length() - 1
        else:
            end_tiles = END_TILES if build.ragged else 0
            real_tiles = max(1, -(-tokens // tile_tokens))
            tiles = real_tiles + end_tiles
            total = output_tiles * tiles
            check_counts(total, max(context, tiles * tile_tokens))
            # With lengths on the device, an upper bound.
            rereads = rereads_memory(build, batch * context * self.token_bytes)
            aligned = (config.align_grid or rereads) and not build.ragged
            many_rows = isinstance(build, ManyRowsBuild)
            if (clusters := many_rows and build.cluster > 1) and build.ragged:
                raise UserError(
                    f"cluster_size {build.cluster} with tile_rows {build.rows} takes sequences of"
                    " one length that the host knows, without cache_leftpad and cu_seqlens_q:"
                    " choose cluster_size 1"
                )
            work_ranges = stream_k_grid(
                output_tiles * real_tiles,
                slots,
                config.min_tiles_per_cta,
                output_tiles if aligned else 1,
            )
            even = many_rows and (clusters or (aligned and output_tiles <= slots))
            range_bytes = partial_bytes * (1 if even else build.range_partials)
            # The workspace holds the partials of all work ranges.
            work_ranges = min(work_ranges, WORKSPACE_BYTES // range_bytes)
            sizes = output_tiles, real_tiles, tile_tokens, slots
            whole = aligned and has_whole_tiles(build, *sizes)
            if clusters or whole:
                # Each CTA has a whole output tile and waits for no other, so not all need to be
                # resident.
                work_ranges, range_bytes = output_tiles, 0
            in_step = aligned and (rereads or many_rows) and build.q_len == 0
            if in_step and work_ranges < output_tiles:
                work_ranges = whole_ranges(work_ranges, output_tiles)
            if even:
                splits, length = even_splits(tiles, max(1, work_ranges // output_tiles))
                work_ranges, end_tiles = splits * output_tiles, splits * length - tiles
                tiles += end_tiles
                total = output_tiles * tiles
            slots_bytes = work_ranges * range_bytes
            share, longer = divmod(total, work_ranges)
            shares = end_tiles, config.min_tiles_per_cta, share, longer, *self.limits[rereads]
            pass_shares(params, shares, tiles)
        return work_ranges * build.cluster, slots_bytes


def launch_of(inputs: AttentionInputs, config: CudaConfig, sms: int | None = None) -> CudaLaunch:
    """Return the launch over these tensors.

    Args:
        sms: SMs that determine the grid; the device's by default.

    Raises:
        UserError: this implementation cannot run these tensors, or this config on this GPU, or the
            partials of fixed runs are too large.
    """
    reason = refusal(inputs)
    if reason is not None:
        raise UserError(reason)
    family, extras = CudaFamily.of(inputs, config, sms), extra_tensors(inputs)
    params = _params(inputs, family.build, extras)
    params.tile_shift = config.tile_tokens.bit_length() - 1
    params.by_heads = Divisor.of(family.kv_heads * family.row_tiles)
    sizes = inputs.batch, inputs.context, inputs.q.shape[0]
    grid, slots_bytes = family.divide(params, *sizes)
    held = (inputs.q, inputs.k_cache, inputs.v_cache, inputs.out, inputs.lse)
    held += (inputs.cache_seqlens, inputs.block_table)
    held += tuple(extras.values())
    capacity, device = inputs.k_cache.shape[1], inputs.q.device
    return CudaLaunch(
        family.build, device, grid, params, slots_bytes, capacity, held, tuple(extras), family
    )


def _params(inputs: AttentionInputs, build: CudaBuild, extras: dict[str, torch.Tensor]) -> Params:
    """Return the parameters that depend only on the tensors; `extras` are their `extra_tensors`."""
    params = Params()
    params.q, params.out, params.lse = (
        inputs.q.data_ptr(),
        inputs.out.data_ptr(),
        inputs.lse.data_ptr(),
    )
    _pass_caches(params, inputs.k_cache, inputs.v_cache, build)
    if inputs.cache_seqlens is not None:
        params.cache_seqlens = inputs.cache_seqlens.data_ptr()
    if inputs.block_table is not None:
        params.block_table = inputs.block_table.data_ptr()
        pass_table(params, inputs.block_table)
    if inputs.cu_seqlens_q is not None:
        params.total_queries = inputs.q.shape[0]
    else:
        params.stride_q_batch, params.stride_out_batch = inputs.q.stride(0), inputs.out.stride(0)
    params.stride_q_token, params.stride_q_head = inputs.q.stride()[-3:-1]
    params.stride_out_token, params.stride_out_head = inputs.out.stride()[-3:-1]
    params.kv_heads = inputs.kv_heads // build.heads_of_row
    params.q_len = inputs.q_len
    pass_append(params, inputs)
    params.qk_scale = qk_scale(inputs)
    pass_masks(params, inputs, build)
    if build.kv_dtype:
        params.q_descale, params.k_descale, params.v_descale = (
            Descale.of(scales) for scales in (inputs.q_descale, inputs.k_descale, inputs.v_descale)
        )
    if build.page_scales:
        params.k_page_descale = Descale.of(inputs.k_page_descale)
        params.v_page_descale = Descale.of(inputs.v_page_descale)
    for name, tensor in extras.items():
        pack_pointer(params, pointer_offset(name), tensor.data_ptr())
    if inputs.peers is not None:
        params.peers = inputs.peers.group
    return params


def _pass_caches(
    params: Params, k_cache: torch.Tensor, v_cache: torch.Tensor, build: CudaBuild
) -> None:
    """Set the pointers, strides and tensor maps of K and V.

    V's map may be a copy of K's, to be moved to V's address.
    """
    params.k, params.v = k_cache.data_ptr(), v_cache.data_ptr()
    pass_strides(params, k_cache.stride(), v_cache.stride(), build)
    if build.bulk:
        shape, strides = v_cache.shape, v_cache.stride()
        params.k_map.words[:] = tensor_map(params.k, k_cache.shape, k_cache.stride(), build)
        # Assigning the structure would make ctypes keep a reference from `params` to itself.
        params.v_map.words[:] = params.k_map.words
        if (shape, strides) != (k_cache.shape, k_cache.stride()):
            params.v_map.words[:] = tensor_map(params.v, shape, strides, build)
