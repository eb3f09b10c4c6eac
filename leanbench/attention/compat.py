"""Torch operators ahead of a launch, for calls that no kernel supports as they are.

Non-contiguous tensors are copied, rows of a block table picked, tokens appended, packed queries
unpacked and tensors padded. This happens in every call: for compatibility, not for speed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from operator import or_
from typing import Any, NamedTuple

import torch

from leanbench.attention.call import Call
from leanbench.core.extras import NO_EXTRAS, Extras
from leanbench.core.inputs import AttentionInputs
from leanbench.kernels.launch import Relaunch, misalignment, problem_of
from leanbench.kernels.lean.cuda_kernel import HEAD_DIMS
from leanbench.kernels.lean.triton_kernel import LeanTriton

#: Fields that kernels read as contiguous tensors.
_CONTIGUOUS = (
    *("cache_seqlens", "cache_batch_idx", "cache_leftpad", "cu_seqlens_q", "cu_seqlens_k_new"),
    *("sinks", "rotary_cos", "rotary_sin", "rotary_seqlens"),
)
#: Fields that kernels read as contiguous rows.
_CONTIGUOUS_ROWS = ("q", "k_new", "v_new", "block_table")
_APPEND = (
    *("k_new", "v_new", "cu_seqlens_k_new"),
    *("rotary_cos", "rotary_sin", "rotary_seqlens", "rotary_interleaved"),
)
#: Sizes above the first one that head_dims are padded to.
_MAX_DIM, *_WIDE_DIMS = HEAD_DIMS[-3:]
#: Kernels read rows of K and V in pieces of 16 bytes.
_PIECE_BYTES = 16
_TRITON = LeanTriton()
MakeLaunch = Callable[[AttentionInputs], Relaunch]


class Steps(NamedTuple):
    """Steps ahead of a launch, in this order."""

    #: Fields that are copied.
    copied: tuple[str, ...]
    picks_rows: bool
    appends: bool
    unpacks: bool
    pads: bool

    @classmethod
    def of(cls, call: Call, inputs: AttentionInputs) -> Steps:
        """Choose the steps of a call; `inputs` are its tensors and outputs."""
        copies = non_contiguous(call)
        if call.latent:
            return cls(copies, False, False, False, False)
        if copies:
            call = _with_copies(call, copies)
            inputs = call.inputs(inputs.out, inputs.lse)
        extras, config = call.extras, call.config
        if extras is None:
            return cls(copies, False, False, False, _needs_padding(inputs))
        picks_rows = call.block_table is not None and extras.cache_batch_idx is not None
        by_sequence = call.batch_invariant or (config is not None and config.fixed_run_tiles)
        unpacks = by_sequence and extras.cu_seqlens_q is not None
        appends = extras.k_new is not None and (
            extras.cu_seqlens_k_new is not None
            or extras.rotary_seqlens is not None
            or (extras.rotary_cos is not None and (unpacks or _needs_torch_rotary(call, extras)))
            or not (is_read_in_place(call.k_cache) and is_read_in_place(call.v_cache))
        )
        if picks_rows or appends:
            rest = _without_append(extras) if appends else extras
            rest = rest._replace(cache_batch_idx=None) if picks_rows else rest
            inputs = call._replace(extras=rest).inputs(inputs.out, inputs.lse)
        return cls(copies, picks_rows, appends, unpacks, _needs_padding(inputs))

    def prepare(self, call: Call, undo: list[Callable[[], object]] | None = None) -> Call:
        """Return a call that kernels support; its outputs are new ones.

        Args:
            undo: Receives functions that restore what is appended to.
        """
        if self.copied:
            call = _with_copies(call, self.copied)
        if self.picks_rows:
            extras, table = call.all_extras, call.block_table
            assert table is not None
            assert extras.cache_batch_idx is not None
            table = table.index_select(0, extras.cache_batch_idx)
            extras = extras._replace(cache_batch_idx=None)
            call = call._replace(block_table=table, extras=extras)
        if self.appends:
            call = _append(call, [] if undo is None else undo)
        if self.unpacks:
            extras = call.all_extras._replace(cu_seqlens_q=None, max_seqlen_q=None)
            call = call._replace(q=Rows.of(call).unpack(call.q), extras=extras)
        return _padded(call) if self.pads else call

    def outputs(
        self, ready: Call, out: torch.Tensor, lse: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tensors that the launch of `ready` writes."""
        if self.unpacks:
            lse = lse.new_empty(ready.lse_shape)
        if self.unpacks or self.pads:
            out = out.new_empty(ready.out_shape)
        return out, lse

    def finish(
        self,
        call: Call,
        written: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """Copy the results of a launch to the outputs of the call."""
        if written[0] is out:
            return
        result = written[0][..., : out.shape[-1]]
        if self.unpacks:
            # Scratch memory for an LSE that the caller does not request has no rows.
            Rows.of(call).pack(result, written[1], out, lse if lse.dim() == 2 else None)
        else:
            out.copy_(result)


def launch_after_steps(
    call: Call, out: torch.Tensor, lse: torch.Tensor, make_launch: MakeLaunch
) -> Relaunch:
    """Launch a call after the steps that it needs, and return its relaunch.

    Args:
        make_launch: Makes a launch over its inputs and returns it.
    """
    inputs = call.inputs(out, lse)
    steps = Steps.of(call, inputs)
    if not any(steps):
        return make_launch(inputs)
    undo: list[Callable[[], object]] = []
    ready = steps.prepare(call, undo)
    written = steps.outputs(ready, out, lse)
    try:
        relaunch = make_launch(ready.inputs(*written))
    except Exception:
        # What is refused changes nothing.
        for restore in reversed(undo):
            restore()
        raise
    steps.finish(call, written, out, lse)
    return RelaunchAfterSteps(relaunch, steps, call.causal)


class RelaunchAfterSteps:
    """A relaunch after steps; see leanbench.kernels.launch.Relaunch."""

    any_capacity = False

    def __init__(self, relaunch: Relaunch, steps: Steps, causal: bool) -> None:
        self._relaunch, self._steps, self._causal = relaunch, steps, causal
        self.tile_tokens = relaunch.tile_tokens

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
        length = context if cache_seqlens is None else None
        call = Call(
            *(q, k_cache, v_cache, cache_seqlens, length, block_table),
            causal=self._causal,
            extras=extras,
        )
        ready = self._steps.prepare(call)
        written = self._steps.outputs(ready, out, lse)
        rest = ready.extras
        self._relaunch(
            *(ready.q, ready.k_cache, ready.v_cache, ready.cache_seqlens, ready.context),
            *(ready.block_table, *written),
            None if rest is None or rest.asks_nothing else rest,
        )
        self._steps.finish(call, written, out, lse)


def non_contiguous(call: Call) -> tuple[str, ...]:
    """Return the fields that kernels read as contiguous and that are not."""
    extras = call.extras or NO_EXTRAS
    names: list[str] = []
    for name in _CONTIGUOUS:
        tensor = getattr(call if name in Call._fields else extras, name)
        if tensor is not None and not tensor.is_contiguous():
            names.append(name)
    for name in _CONTIGUOUS_ROWS:
        tensor = getattr(call if name in Call._fields else extras, name)
        if tensor is not None and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            names.append(name)
    slopes = extras.alibi_slopes
    # Expanded slopes are shared by all sequences.
    if slopes is not None and not (slopes.is_contiguous() or slopes.stride() == (0, 1)):
        names.append("alibi_slopes")
    if call.latent and "q" not in names:
        # The latent kernel reads positions and heads as one dimension, 16 bytes at a time.
        q = call.q
        if not is_aligned(q) or (q.shape[1] > 1 and q.stride(1) != q.shape[2] * q.stride(2)):
            names.append("q")
    return tuple(names)


def _with_copies(call: Call, names: tuple[str, ...]) -> Call:
    tensors: dict[str, Any] = {}
    extras: dict[str, Any] = {}
    for name in names:
        source, copies = (call, tensors) if name in Call._fields else (call.all_extras, extras)
        copies[name] = getattr(source, name).clone(memory_format=torch.contiguous_format)
    if extras:
        tensors["extras"] = call.all_extras._replace(**extras)
    return call._replace(**tensors)


def _without_append(extras: Extras) -> Extras:
    return extras._replace(**{name: Extras._field_defaults[name] for name in _APPEND})


def _needs_torch_rotary(call: Call, extras: Extras) -> bool:
    """Return True if lean.cu cannot rotate: fp8 caches, or tables shorter than the cache."""
    assert extras.rotary_cos is not None
    # With pages, tables are as long as the capacity.
    is_short = call.block_table is None and extras.rotary_cos.shape[0] < call.k_cache.shape[1]
    return is_short or call.k_cache.element_size() == 1


def padded_dim(head_dim: int, cache: torch.Tensor) -> int:
    """Round a head_dim up to one that kernels support; unchanged above all of them."""
    numbers = _PIECE_BYTES // cache.element_size()
    whole = -(-head_dim // numbers) * numbers
    if whole <= _MAX_DIM:
        return whole
    return next((wide for wide in _WIDE_DIMS if whole <= wide), whole)


def _needs_padding(inputs: AttentionInputs) -> bool:
    """Return True if no kernel reads the tensors.

    Triton's reads unaligned tensors, but supports fewer kinds and sizes.
    """
    for cache in (inputs.k_cache, inputs.v_cache):
        # `padded_dim`, inlined.
        columns = cache.shape[3]
        if columns * cache.element_size() % _PIECE_BYTES:
            return True
        if columns > _MAX_DIM and columns not in _WIDE_DIMS:
            return True
    if misalignment(inputs) is None:
        return False
    return _TRITON.unsupported_reason(problem_of(inputs)) is not None


def is_read_in_place(cache: torch.Tensor) -> bool:
    """Return True if a launch reads the cache itself, not a copy."""
    return is_aligned(cache) and padded_dim(cache.shape[3], cache) == cache.shape[3]


def is_aligned(tensor: torch.Tensor) -> bool:
    """Return True if address, strides and rows are multiples of 16 bytes."""
    numbers = reduce(or_, (*tensor.stride()[:-1], tensor.shape[-1]))
    return (tensor.data_ptr() | tensor.element_size() * numbers) % _PIECE_BYTES == 0


def _padded(call: Call) -> Call:
    """Copy tensors, with zero columns; caches only if needed."""
    k_cache, v_cache, extras = call.k_cache, call.v_cache, call.all_extras
    k_dim, v_dim = padded_dim(k_cache.shape[3], k_cache), padded_dim(v_cache.shape[3], v_cache)
    scale = call.q.shape[-1] ** -0.5 if call.softmax_scale is None else call.softmax_scale
    # Both or neither: a launch is prepared for the alignment of the two together.
    if not (is_read_in_place(k_cache) and is_read_in_place(v_cache)):
        k_cache, v_cache = _widened(k_cache, k_dim), _widened(v_cache, v_dim)
    if extras.k_new is not None and extras.v_new is not None:
        k_new, v_new = _widened(extras.k_new, k_dim), _widened(extras.v_new, v_dim)
        extras = extras._replace(k_new=k_new, v_new=v_new)
    if extras.rotary_cos is not None and extras.rotary_sin is not None:
        cos, sin = extras.rotary_cos.clone(), extras.rotary_sin.clone()
        extras = extras._replace(rotary_cos=cos, rotary_sin=sin)
    if extras.prior is not None:
        extras = extras._replace(prior=_widened(extras.prior, v_dim))
    q = _widened(call.q, k_dim)
    return call._replace(q=q, k_cache=k_cache, v_cache=v_cache, softmax_scale=scale, extras=extras)


def _widened(tensor: torch.Tensor, columns: int) -> torch.Tensor:
    """Return a contiguous copy, zero-padded to `columns`."""
    # torch.nn.functional.pad does not support fp8.
    wide = tensor.new_zeros((*tensor.shape[:-1], columns))
    wide[..., : tensor.shape[-1]].copy_(tensor)
    return wide


class Rows:
    """Rows of `most` query tokens for packed sequences, aligned to the end of each sequence.

    Args:
        starts: (batch + 1,) int32.
        tokens: Number of query tokens of all sequences.
    """

    def __init__(self, starts: torch.Tensor, tokens: int, most: int) -> None:
        self._ends = starts[1:].long()
        self._tokens, self._most = tokens, most

    @classmethod
    def of(cls, call: Call) -> Rows:
        """Return the rows of a call with packed queries."""
        starts = call.all_extras.cu_seqlens_q
        assert starts is not None
        return cls(starts, call.q.shape[0], call.q_len)

    def unpack(self, q: torch.Tensor) -> torch.Tensor:
        """Return (batch, most, q_heads, head_dim).

        Rows before a sequence's first token have arbitrary tokens.
        """
        steps = torch.arange(self._most, device=q.device) - self._most
        return q[(self._ends[:, None] + steps).clamp(0, self._tokens - 1)]

    def pack(
        self,
        result: torch.Tensor,
        result_lse: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """Write the output (batch, most, q_heads, head_dim) and LSE (batch, q_heads, most) to
        packed tensors. Tokens of a sequence beyond `most` are left unwritten.
        """
        tokens = torch.arange(self._tokens, device=out.device)
        owner = torch.searchsorted(self._ends, tokens, right=True)
        owner = owner.clamp(max=self._ends.shape[0] - 1)
        column = (tokens - self._ends[owner]).clamp(max=-1) + self._most
        has_row, column = column >= 0, column.clamp(min=0)
        out.copy_(torch.where(has_row[:, None, None], result[owner, column], out))
        if lse is not None:
            lse.copy_(torch.where(has_row, result_lse[owner, :, column].T, lse))


def _append(call: Call, undo: list[Callable[[], object]]) -> Call:
    """Write the new tokens into the caches, and return the call without them; see `Steps.prepare`.

    Tokens past the capacity are dropped. Nothing is read from the device.
    """
    extras, table, caches = call.all_extras, call.block_table, (call.k_cache, call.v_cache)
    k_new, v_new, lengths = extras.k_new, extras.v_new, call.cache_seqlens
    assert k_new is not None
    assert v_new is not None
    q, capacity, device = call.q, call.capacity, call.q.device
    if extras.cu_seqlens_k_new is None:
        batch, count = k_new.shape[:2]
        starts = torch.arange(0, (batch + 1) * count, count, device=device)
        k_new, v_new, counts = k_new.flatten(0, 1), v_new.flatten(0, 1), count
    else:
        starts = extras.cu_seqlens_k_new.long()
        batch, counts = starts.shape[0] - 1, starts.diff()
    if lengths is not None:
        cached = lengths.clamp(0, capacity).long()
    else:
        cached = torch.full((batch,), call.context - call.new_tokens, device=device)
    owner, step = _owners(starts, k_new.shape[0])
    if extras.rotary_cos is not None:
        first = cached if extras.rotary_seqlens is None else extras.rotary_seqlens.long()
        k_new = _rotated(k_new, first[owner] + step, extras)
        windows = (extras.window_left, extras.window_right)
        is_local = call.causal or max(windows) >= 0 or extras.attention_chunk > 0
        q = _rotated_queries(q, first, extras, step=1 if is_local else 0)
    at = cached[owner] + step
    is_kept = (at < capacity) & (step < starts.diff()[owner])
    at = at.clamp(max=capacity - 1)
    if table is not None:
        page_size = caches[0].shape[1]
        rows, at = table[owner, at // page_size].long(), at % page_size
    else:
        rows = owner if extras.cache_batch_idx is None else extras.cache_batch_idx[owner].long()
    for cache, new in zip(caches, (k_new, v_new), strict=True):
        undo.append(_write(cache, rows, at, new, is_kept))
    length = call.context
    if lengths is not None or isinstance(counts, torch.Tensor):
        lengths, length = (cached + counts).clamp(max=capacity).int(), None
    return call._replace(q=q, cache_seqlens=lengths, length=length, extras=_without_append(extras))


def _owners(starts: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sequence of each of `count` packed tokens, and its number in that sequence.

    Tokens past the last sequence count as its own.
    """
    tokens = torch.arange(count, device=starts.device)
    owner = torch.searchsorted(starts[1:], tokens, right=True).clamp(max=starts.shape[0] - 2)
    return owner, tokens - starts[owner]


def _rotated_queries(
    q: torch.Tensor, first: torch.Tensor, extras: Extras, step: int
) -> torch.Tensor:
    if extras.cu_seqlens_q is not None:
        owner, number = _owners(extras.cu_seqlens_q.long(), q.shape[0])
        return _rotated(q, first[owner] + step * number, extras)
    positions = first[:, None] + step * torch.arange(q.shape[1], device=q.device)
    return _rotated(q.flatten(0, 1), positions.flatten(), extras).view(q.shape)


def _rotated(rows: torch.Tensor, positions: torch.Tensor, extras: Extras) -> torch.Tensor:
    """Rotate (tokens, heads, head_dim) by rows of the tables, and round to the dtype again.

    Positions past the tables use the last row.
    """
    assert extras.rotary_cos is not None
    assert extras.rotary_sin is not None
    positions = positions.clamp(0, extras.rotary_cos.shape[0] - 1)
    cos = extras.rotary_cos.float()[positions][:, None]
    sin = extras.rotary_sin.float()[positions][:, None]
    half, rotated = cos.shape[-1], rows.float()
    if extras.rotary_interleaved:
        low, high = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        low, high = slice(0, half), slice(half, 2 * half)
    x, y = rotated[..., low], rotated[..., high]
    rotated = rotated.clone()
    rotated[..., low], rotated[..., high] = x * cos - y * sin, x * sin + y * cos
    return rotated.to(rows.dtype)


def _write(
    cache: torch.Tensor,
    rows: torch.Tensor,
    at: torch.Tensor,
    new: torch.Tensor,
    is_kept: torch.Tensor,
) -> Callable[[], object]:
    """Write the kept tokens into a cache, and return a function that restores it.

    The host does not know their number. The others repeat the first kept one. If none is kept, the
    cache's own numbers are written again.
    """
    if cache.element_size() == 1:
        # fp8 tensors cannot be indexed.
        cache, new = cache.view(torch.uint8), new.view(torch.uint8)
    first = is_kept.int().argmax().reshape(1)

    def kept(values: torch.Tensor) -> torch.Tensor:
        where = is_kept.view(-1, *[1] * (values.dim() - 1))
        return torch.where(where, values, values.index_select(0, first))

    # If none is kept, the first one can be past the end of its sequence: its page is arbitrary.
    rows = kept(rows).clamp(0, cache.shape[0] - 1)
    at = kept(at)
    before = cache[rows, at]
    cache.index_put_((rows, at), torch.where(is_kept.any(), kept(new), before))
    return partial(cache.index_put_, (rows, at), before)
