"""Launches of kernels, and their arguments from the tensors of a call."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, Protocol

from leanbench.compile.cubin import cubin_resources
from leanbench.core.config import TileConfig
from leanbench.core.decomposition import TileGrid, stream_k_with_ends, tile_rows
from leanbench.core.errors import UserError
from leanbench.core.extras import kinds_of
from leanbench.core.inputs import dtype_name
from leanbench.core.kernel import LaunchResources
from leanbench.core.problem import AttentionProblem

if TYPE_CHECKING:
    import torch

    from leanbench.core.extras import Extras
    from leanbench.core.gpu_spec import GpuSpec
    from leanbench.core.inputs import AttentionInputs

#: Number of SMs in Triton's interpreter. An odd number makes uneven shares.
INTERPRETER_SMS = 5
#: Numbers of a partial's row after its D columns: sum, maximum, and two for 16-byte alignment of
#: the next slot's rows.
PARTIAL_ROW_EXTRA = 4
#: Capacity of a CTA's row of events. The maximum is 16 KB, enough for some 400k output tiles.
_LEAST_EVENTS, _MOST_EVENTS = 8, 1024

#: Largest offset of a number in a LeanTile or a page: Triton's kernels use 32 bits.
_MOST_OFFSET = 2**31 - 1
#: Alignment in bytes of 16-byte copies, and of the start and strides of bulk tensor copies.
_COPY_BYTES = 16
#: Tensors read 4 bytes at a time by calls that append.
_READ_IN_WORDS = ("k_new", "v_new", "rotary_cos", "rotary_sin")


@dataclass(frozen=True)
class LaunchShape:
    """Sizes derived from a call, named as in leanbench.core.decomposition."""

    batch: int
    kv_heads: int
    group_size: int
    q_len: int
    head_dim: int
    rows: int
    row_tiles: int
    #: Rows of a partial in use. The padding of small groups is neither stored nor read.
    row_count: int

    @classmethod
    def of(cls, inputs: AttentionInputs) -> LaunchShape:
        group_size, q_len, head_dim = inputs.group_size, inputs.q_len, inputs.head_dim
        rows = tile_rows(group_size, head_dim, q_len)
        return cls(
            batch=inputs.q.shape[0],
            kv_heads=inputs.kv_heads,
            group_size=group_size,
            q_len=q_len,
            head_dim=head_dim,
            rows=rows,
            row_tiles=-(-group_size * q_len // rows),
            row_count=min(group_size * q_len, rows),
        )

    @property
    def output_tiles(self) -> int:
        return self.batch * self.kv_heads * self.row_tiles

    def lean_tiles(self, context: int, tile_tokens: int) -> int:
        """Return the number of LeanTiles if every sequence had `context` tokens."""
        return self.output_tiles * max(1, -(-context // tile_tokens))


@dataclass(frozen=True)
class TritonLaunch:
    #: The function under `@triton.jit`.
    function: Any
    #: CTAs.
    grid: int
    arguments: tuple[Any, ...]
    #: Compile-time parameters of the kernel and of Triton, by name.
    options: dict[str, Any]
    #: Factory of leading arguments that every launch gets anew.
    lent: Callable[[], tuple[Any, ...]] = tuple

    @property
    def name(self) -> str:
        return self.function.__name__

    def run(self) -> Callable[[], None]:
        """Return a function that launches the kernel."""
        function, grid, arguments, options, lent = (
            self.function,
            (self.grid,),
            self.arguments,
            self.options,
            self.lent,
        )

        def launch() -> None:
            function[grid](*lent(), *arguments, **options)

        return launch

    def traced(self, events: torch.Tensor, max_events: int) -> TritonLaunch:
        """Return the launch of a build that records timeline events.

        A CTA records up to `max_events`; see leanbench.kernels.events.
        """
        return replace(self, options={**self.options, "events": events, "MAX_EVENTS": max_events})

    def _compiled(self) -> Any:
        return self.function.warmup(
            *self.lent(), *self.arguments, grid=(self.grid,), **self.options
        )

    def compile(self) -> LaunchResources:
        """Return the resources of a CTA, compiled for the active target.

        Raises:
            RuntimeError: Triton's interpreter is on.
        """
        compiled = self._compiled()
        if compiled is None:
            raise RuntimeError("TRITON_INTERPRET=1 is set, so nothing is compiled: unset it")
        binary = cubin_resources(compiled.asm["cubin"], compiled.metadata.name)
        return LaunchResources(
            launch=self.name,
            ctas=self.grid,
            num_warps=compiled.metadata.num_warps,
            registers_per_thread=binary.registers_per_thread,
            shared_bytes=compiled.metadata.shared,
            spilled_registers=binary.spilled_registers,
        )

    def resources(self) -> LaunchResources | None:
        """Return the resources of a CTA of the compiled kernel; None in the interpreter.

        Raises:
            triton.runtime.errors.OutOfResources: a CTA needs more than the GPU has.
        """
        compiled = self._compiled()
        if compiled is None:
            return None
        # Registers are known once the kernel is loaded. Otherwise the first launch would load it.
        compiled._init_handles()
        return LaunchResources(
            launch=self.name,
            ctas=self.grid,
            num_warps=compiled.metadata.num_warps,
            registers_per_thread=compiled.n_regs,
            shared_bytes=compiled.metadata.shared,
            spilled_registers=compiled.n_spills,
        )


class Launch(Protocol):
    """One launch of a GPU kernel."""

    @property
    def name(self) -> str:
        """Name of the GPU kernel."""
        ...

    @property
    def grid(self) -> int:
        """Number of CTAs."""
        ...

    def run(self) -> Callable[[], None]:
        """Return a function that launches the kernel."""
        ...

    def traced(self, events: torch.Tensor, max_events: int) -> Launch:
        """Return the launch of a build that records timeline events.

        A CTA records up to `max_events`; see leanbench.kernels.events.
        """
        ...


class Relaunch(Protocol):
    """A launch over any tensors with the prepared shapes, strides, dtypes and alignments (to 16
    bytes).

    It runs on the stream for which it was prepared and keeps no tensor alive. It is not
    thread-safe.
    """

    #: Tokens per LeanTile.
    @property
    def tile_tokens(self) -> int: ...

    #: True if dense caches (`leanbench.attention.prepared`) of other capacities are supported.
    @property
    def any_capacity(self) -> bool: ...

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
        """Launch the kernel.

        Arguments are the fields of AttentionInputs; `extras` belong to a call that is not plain.

        Args:
            context: must give the number of LeanTiles of the tensors used for preparation.
        """
        ...


def run_all(launches: Sequence[Launch]) -> Callable[[], None]:
    """Return a function that makes these launches in order.

    Its host time is that of calls written out.
    """
    launchers = [launch.run() for launch in launches]
    if len(launchers) == 1:
        return launchers[0]

    def run() -> None:
        for launch in launchers:
            launch()

    return run


def events_per_row(events: int) -> int:
    """Return the capacity of a CTA's row for up to `events` events.

    It is a power of two: each value is another build of the kernel.
    """
    return min(_MOST_EVENTS, padded(max(_LEAST_EVENTS, events)))


def most_parts(
    lengths: tuple[int, ...],
    tile_tokens: int,
    per_sequence: int,
    work_ranges: int,
    min_tiles_per_range: int,
    end_tiles: int = 0,
    packs: bool = False,
) -> int:
    """Return the most output tiles in which a stream-K work range over these lengths has a part.

    `per_sequence` is the number of output tiles of a sequence. See
    leanbench.core.decomposition.stream_k_with_ends.
    """
    tiles = TileGrid(tuple(max(1, -(-length // tile_tokens)) for length in lengths), per_sequence)
    return _most_segments(tiles, work_ranges, min_tiles_per_range, end_tiles, packs)


# Rotating buffers have the same lengths.
@lru_cache(maxsize=8)
def _most_segments(
    tiles: TileGrid, work_ranges: int, min_tiles_per_range: int, end_tiles: int, packs: bool
) -> int:
    schedule = stream_k_with_ends(tiles, work_ranges, min_tiles_per_range, end_tiles, packs=packs)
    return max(Counter(segment.cta for segment in schedule.segments).values())


def cache_strides(inputs: AttentionInputs, name: str, tile_tokens: int) -> tuple[int, int, int]:
    """Return the (batch or page, head, token) strides of `k_cache` or `v_cache`, in elements.

    Raises:
        UserError: the kernels' 32-bit offsets do not reach all tokens of a LeanTile or a page.
    """
    cache = getattr(inputs, name)
    batch, token, head, _ = cache.stride()
    most = _MOST_OFFSET // max(tile_tokens, inputs.page_size or 1)
    if cache.shape[1] > 1 and token > most:
        raise UserError(
            f"{name} steps by {token} numbers from token to token, Triton's kernels take at most"
            f" {most}: pass a contiguous cache"
        )
    return batch, head, token


def row_strides(tensor: torch.Tensor) -> tuple[int, int, int | None]:
    """Return the (batch, head, query position) strides of Q or of the output.

    The last is None for a single position: the compiled kernel takes no argument for None.
    """
    batch, position, head, _ = tensor.stride()
    return batch, head, position if tensor.shape[1] > 1 else None


def block_table(inputs: AttentionInputs) -> tuple[torch.Tensor | None, int | None, int | None]:
    """Return the block table and its strides from sequence to sequence and from KV head to KV head.

    The compiled kernel takes no argument for None: what there is not.
    """
    table = inputs.block_table
    if table is None:
        return None, None, None
    return table, table.stride(0), table.stride(1) if inputs.has_table_of_heads else None


def qk_scale(inputs: AttentionInputs) -> float:
    """Return the softmax scale in units of log2. The kernels exponentiate with base 2."""
    return inputs.softmax_scale * math.log2(math.e)


def constants(inputs: AttentionInputs, config: TileConfig) -> dict[str, Any]:
    """Return the compile-time parameters common to all Triton kernels.

    They exclude shapes that change between calls.
    """
    shape = LaunchShape.of(inputs)
    return {
        "GROUP_SIZE": shape.group_size,
        "Q_LEN": shape.q_len,
        "TILE_ROWS": shape.rows,
        "TILE_TOKENS": config.tile_tokens,
        "HEAD_DIM": shape.head_dim,
        "HEAD_DIM_PADDED": padded(shape.head_dim),
        "RAGGED": inputs.cache_seqlens is not None,
    }


def padded(size: int) -> int:
    """Return the next power of two."""
    return 1 << (size - 1).bit_length()


def merge_rows_at_once(row_count: int, head_dim: int, num_warps: int) -> int:
    """Return the rows that a merge accumulates together.

    A power of two, with at most 8 numbers per thread.
    """
    return min(padded(row_count), max(1, 8 * 32 * num_warps // padded(head_dim)))


#: Lower caps make kernels spill. CTAs beyond those that fit at once only cost their start.
_MIN_REGISTERS = 96


def registers_per_thread(warps_per_sm: int) -> int | None:
    """Return the register cap for `warps_per_sm` warps on an SM with 64K registers.

    None if the cap would be too low. Without a cap the compiler may spill for an occupancy that the
    settings do not need.
    """
    cap = min(255, 65536 // (32 * warps_per_sm) // 8 * 8)
    return cap if cap >= _MIN_REGISTERS else None


def misalignment(inputs: AttentionInputs) -> str | None:
    """Return why a tensor cannot be read or written in whole copies, or None."""
    checked: list[tuple[str, torch.Tensor | None, int, str]] = [
        ("k_cache", inputs.k_cache, _COPY_BYTES, "copies 16 bytes at a time"),
        ("v_cache", inputs.v_cache, _COPY_BYTES, "copies 16 bytes at a time"),
        ("q", inputs.q, 2 * inputs.q.element_size(), "reads two numbers at a time"),
        ("out", inputs.out, 8, "writes four numbers at a time"),
    ]
    if inputs.k_new is not None:
        checked += [
            (name, getattr(inputs, name), 4, "reads 4 bytes at a time") for name in _READ_IN_WORDS
        ]
    for name, tensor, most, why in checked:
        if tensor is None:
            continue
        strides = tensor.stride()
        steps = 0
        for step in strides[:-1]:
            steps |= step
        if (tensor.data_ptr() | tensor.element_size() * steps) % most:
            return (
                f"{name} starts at or steps by no multiple of {most} bytes (strides {strides}):"
                f" lean_cuda {why}"
            )
    return None


def problem_of(inputs: AttentionInputs, context: int | None = None) -> AttentionProblem:
    """Return the problem that these tensors define, without reading from the device.

    Args:
        context: replaces the tensors' context.
    """
    _, token_stride, head_stride, _ = inputs.k_cache.stride()
    return AttentionProblem(
        batch=inputs.batch,
        q_heads=inputs.q_heads,
        kv_heads=inputs.kv_heads,
        context=max(1, inputs.context if context is None else context, inputs.new_tokens),
        head_dim=inputs.head_dim,
        dtype=dtype_name(inputs.out.dtype),
        # HND: tokens of a head are adjacent.
        kv_layout="HND" if head_stride > token_stride else "NHD",
        q_len=inputs.q_len,
        page_size=inputs.page_size,
        **kinds_of(inputs),
    )


@cache
def spec_of(device: torch.device) -> GpuSpec:
    """Return the spec of the tensors' GPU; an H200 in the interpreter."""
    if device.type == "cuda":
        import torch

        from leanbench.gpu.local import spec_of_device

        return spec_of_device(torch.cuda.current_device() if device.index is None else device.index)
    from leanbench.gpu.catalogue import find

    return find("h200")


def sm_count(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETER_SMS
    import torch

    return torch.cuda.get_device_properties(device).multi_processor_count
