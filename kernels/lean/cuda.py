"""Launches of lean.cu, and their arguments from the tensors of a call."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from leanbench.kernels.launch import (
    Relaunch,
    cache_strides,
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
    Descale,
    Divisor,
    Params,
    check_counts,
    pack_pointers,
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
        self._build, self._bulk, self._capacity = launch.build, launch.build.bulk, launch.capacity
        self._caches = launch.params.k, launch.params.v
        self._map: CacheMap | None = None
        self.tile_tokens = 1 << launch.params.tile_shift
        self._extras = launch.extras
        #: For each extra tensor: its index in Extras, and the structure and field of its pointer.
        self._places = [
            (Extras._fields.index(name), *pointer(self._launch.params, name))
            for name in launch.extras
        ]
        #: True if the launch holds its stream's workspace.
        self._has_workspace = False

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
            self._resize(k_cache, k, v)
        elif self._bulk and caches != self._caches:
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
            for index, structure, field in self._places:
                setattr(structure, field, fields[index].data_ptr())
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
        return dict(zip(("k_map", "v_map"), self.mapped, strict=True)) if self._bulk else {}

    def _resize(self, cache: torch.Tensor, k: int, v: int) -> None:
        """Update strides and tensor maps for dense caches; those of K apply to V."""
        params, shape, strides = self._launch.params, cache.shape, cache.stride()
        self._capacity = shape[1]
        params.stride_k_batch = params.stride_v_batch = strides[0]
        params.stride_k_token = params.stride_v_token = strides[1]
        params.stride_k_head = params.stride_v_head = strides[2] * self._build.heads_of_row
        if self._bulk:
            cache_map = self._map = self._map or CacheMap(shape, strides, self._build)
            cache_map.resize(shape, strides)
            self._launch.encode(cache_map, k, v)


def pointer(params: Params, name: str) -> tuple[ctypes.Structure, str]:
    """Return the structure and field with the pointer of an extra tensor.

    It is the field of that name, or its `at` if the field is a structure.
    """
    field = getattr(params, name)
    return (field, "at") if isinstance(field, ctypes.Structure) else (params, name)


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
        beyond = inputs.k_new is not None or inputs.peers is not None
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
    device = inputs.q.device
    build = build_of(inputs, config)
    per_sequence = inputs.kv_heads // build.heads_of_row * build.row_tiles(inputs.q_len)
    output_tiles = _most_output_tiles(inputs, build)
    slots = cluster_slots(sms or sm_count(device), build.ctas_per_sm, build.cluster)
    slots = min(slots, clusters_at_once(build, device))
    extras = extra_tensors(inputs)
    params = _params(inputs, build, extras)
    params.tile_shift = config.tile_tokens.bit_length() - 1
    params.by_heads = Divisor.of(per_sequence)
    window = dealt_window(inputs.most_behind, inputs.new_tokens)
    tokens = dealt_tokens(build, inputs.context, inputs.q_len, window)
    if config.splits:
        lean_tiles = max(1, -(-tokens // config.tile_tokens))
        work_ranges = output_tiles * config.splits
        check_counts(max(work_ranges * build.cluster, output_tiles * lean_tiles), inputs.context)
        waiting = work_ranges if config.splits > 1 else 0
        slots_bytes = fixed_run_bytes(waiting, build.partial_bytes)
    elif config.fixed_run_tiles:
        if build.ragged_q:
            raise UserError(
                "lean_cuda splits contexts by work where there is cu_seqlens_q: leave it or"
                " batch_invariant out"
            )
        runs = most_fixed_runs(tokens, per_sequence, config)
        total = output_tiles * runs
        check_counts(total, inputs.context)
        work_ranges = min(total, slots)
        slots_bytes = fixed_run_bytes(total, build.partial_bytes)
        params.longest_shift = (config.tile_tokens * config.fixed_run_tiles).bit_length() - 1
    else:
        end_tiles = END_TILES if build.ragged else 0
        real_tiles = max(1, -(-tokens // config.tile_tokens))
        tiles = real_tiles + end_tiles
        total = output_tiles * tiles
        check_counts(total, max(inputs.context, tiles * config.tile_tokens))
        rereads = rereads_memory(build, _kv_bytes(inputs))
        aligned = (config.align_grid or rereads) and not build.ragged
        many_rows = isinstance(build, ManyRowsBuild)
        if (clusters := many_rows and build.cluster > 1) and build.ragged:
            raise UserError(
                f"cluster_size {build.cluster} with tile_rows {build.rows} takes sequences of one"
                " length that the host knows, without cache_leftpad and cu_seqlens_q: choose"
                " cluster_size 1"
            )
        work_ranges = stream_k_grid(
            output_tiles * real_tiles,
            slots,
            config.min_tiles_per_cta,
            output_tiles if aligned else 1,
        )
        even = many_rows and (clusters or (aligned and output_tiles <= slots))
        range_bytes = build.partial_bytes * (1 if even else build.range_partials)
        # The workspace holds the partials of all work ranges.
        work_ranges = min(work_ranges, WORKSPACE_BYTES // range_bytes)
        sizes = output_tiles, real_tiles, config.tile_tokens, slots
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
        params.share, params.longer = divmod(total, work_ranges)
        params.longest_steps, params.merge_tiles = split_limits(build, config.tile_tokens, rereads)
        params.end_tiles = end_tiles
        params.min_tiles_per_range = config.min_tiles_per_cta
        params.by_tiles = Divisor.of(tiles)
        params.by_share = Divisor.of(params.share)
        params.by_share_plus_1 = Divisor.of(params.share + 1)
    held = (inputs.q, inputs.k_cache, inputs.v_cache, inputs.out, inputs.lse)
    held += (inputs.cache_seqlens, inputs.block_table)
    held += tuple(extras.values())
    grid, capacity = work_ranges * build.cluster, inputs.k_cache.shape[1]
    return CudaLaunch(build, device, grid, params, slots_bytes, capacity, held, tuple(extras))


def _kv_bytes(inputs: AttentionInputs) -> int:
    """Return the bytes of K and V that the call reads; an upper bound for lengths on the device."""
    columns = inputs.head_dim + inputs.value_dim
    numbers = inputs.batch * inputs.context * inputs.kv_heads * columns
    return numbers * inputs.k_cache.element_size()


def _most_output_tiles(inputs: AttentionInputs, build: CudaBuild) -> int:
    """Return the number of output tiles; with `cu_seqlens_q` an upper bound from the total."""
    row_tiles = inputs.batch * build.row_tiles(inputs.q_len)
    if inputs.cu_seqlens_q is not None:
        # The last output tile of each sequence can be partly empty.
        full = inputs.q.shape[0] * inputs.group_size // build.rows
        row_tiles = max(1, min(row_tiles, full + inputs.batch))
    return inputs.kv_heads // build.heads_of_row * row_tiles


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
        params.stride_table = inputs.block_table.stride(0)
    if inputs.cu_seqlens_q is not None:
        params.total_queries = inputs.q.shape[0]
    else:
        params.stride_q_batch, params.stride_out_batch = inputs.q.stride(0), inputs.out.stride(0)
    params.stride_q_token, params.stride_q_head = inputs.q.stride()[-3:-1]
    params.stride_out_token, params.stride_out_head = inputs.out.stride()[-3:-1]
    params.context, params.batch, params.kv_heads = (
        inputs.context,
        inputs.batch,
        inputs.kv_heads // build.heads_of_row,
    )
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
        setattr(*pointer(params, name), tensor.data_ptr())
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
    params.stride_k_batch, params.stride_k_head, params.stride_k_token = cache_strides(k_cache)
    params.stride_v_batch, params.stride_v_head, params.stride_v_token = cache_strides(v_cache)
    params.stride_k_head *= build.heads_of_row
    params.stride_v_head *= build.heads_of_row
    if build.bulk:
        shape, strides = v_cache.shape, v_cache.stride()
        params.k_map.words[:] = tensor_map(params.k, k_cache.shape, k_cache.stride(), build)
        # Assigning the structure would make ctypes keep a reference from `params` to itself.
        params.v_map.words[:] = params.k_map.words
        if (shape, strides) != (k_cache.shape, k_cache.stride()):
            params.v_map.words[:] = tensor_map(params.v, shape, strides, build)
