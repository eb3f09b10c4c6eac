"""Launches prepared once for all calls of a signature: what decides a launch, and nothing else.

A call with a signature seen before writes its pointers and its length into the launch that was
prepared then, and launches: what the checks and the settings depend on is part of the signature.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Hashable
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from leanbench.calls import values
from leanbench.calls.adapted import launch_adapted, launch_latent
from leanbench.calls.call import Call, check_layouts
from leanbench.calls.extra_checks import check_extras
from leanbench.calls.latent_launch import (
    as_attention,
    check_latent,
    check_latent_launch,
    relaunch_latent,
)
from leanbench.calls.refusals import refuse_kinds, refuse_problem
from leanbench.calls.settings import (
    LENGTHS_TOGETHER,
    all_but_capacity,
    heuristic_of,
    lengths_with,
    settings_of,
    shared_problem,
)
from leanbench.configs.lookup import state
from leanbench.core.errors import UserError
from leanbench.core.extras import EXTRA_TENSORS, Extras, extras_of
from leanbench.core.inputs import AttentionInputs
from leanbench.kernels.launch import Relaunch
from leanbench.kernels.lean import LEAN
from leanbench.kernels.lean.configs import LeanConfig, LeanCudaConfig
from leanbench.kernels.lean.workspace import WORKSPACES

#: Bytes to which the alignment of a pointer can matter.
_ALIGNMENT = 16
#: Signatures that a thread keeps at least; it forgets those that were not used for as many others.
_KEPT = 512


class Prepared(NamedTuple):
    """The launch of a signature. It keeps no tensor of a call alive."""

    relaunch: Relaunch
    #: Lengths that it is for; of a call without a number, its capacity alone.
    lengths: range
    #: Tokens that its caches have room for, of a sequence or a page; None: any number.
    capacity: int | None
    #: What outputs are like.
    out_like: torch.Tensor
    #: What LSEs are like, or where those go that nobody asked for.
    lse: torch.Tensor
    has_own_lse: bool

    def is_for(self, length: int, capacity: int | None) -> bool:
        """Whether it is for a length in caches with so much room; None: the signature says it."""
        if length not in self.lengths:
            return False
        if capacity is None:
            return True
        return length <= capacity if self.capacity is None else capacity == self.capacity


class PreparedLaunches(threading.local):
    """The prepared launches of a thread, by signature."""

    def __init__(self) -> None:
        self._recent: dict[Hashable, Prepared] = {}
        self._before: dict[Hashable, Prepared] = {}
        #: Settings for lengths on the device, by `all_but_capacity`.
        self.any_length: dict[Hashable, LeanCudaConfig] = {}
        self._lses: dict[tuple[torch.device, Hashable], torch.Tensor] = {}

    def get(self, signature: Hashable) -> Prepared | None:
        prepared = self._recent.get(signature)
        if prepared is None and (prepared := self._before.get(signature)) is not None:
            self.put(signature, prepared)
        return prepared

    def put(self, signature: Hashable, prepared: Prepared) -> None:
        if len(self._recent) >= _KEPT:
            self._before, self._recent = self._recent, {}
        self._recent[signature] = prepared

    def unasked_lse(self, q: torch.Tensor, stream: Hashable) -> torch.Tensor:
        """Room for the LSE of `q`, which all calls of a stream share: nobody reads it."""
        rows = q.numel() // q.shape[-1]
        room = self._lses.get((q.device, stream))
        if room is None or room.numel() < rows:
            size = 1 << (rows - 1).bit_length()
            room = torch.empty(size, dtype=torch.float32, device=q.device)
            self._lses[q.device, stream] = room
        return room


_LAUNCHES = PreparedLaunches()
#: Tuned settings that did not fit a GPU.
_refused: set[tuple[torch.device, LeanConfig]] = set()


def attend(call: Call, with_lse: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Output, and the LSE if asked for; errors as in leanbench.attention."""
    # Fields of a tuple by name take longer than all of them at once.
    q, k_cache, v_cache, lengths, length, block_table, out, _, _, _, _, extras, peers, _ = call
    index = q.get_device()
    if index < 0:
        # Of devices that are no GPUs, one number says nothing.
        stream, capturing = (q.device, k_cache.device, v_cache.device), False
    elif index == torch._C._cuda_getDevice():
        stream = torch._C._cuda_getCurrentRawStream(index)
        capturing = torch._C._cuda_isCurrentStreamCapturing()
    else:
        # Kernels are launched on the current device.
        with torch.cuda.device(index):
            return attend(call, with_lse)
    if values.CHECKS_VALUES and not capturing:
        check_layouts(call)
        if not call.latent and (own := call.with_own_rows()) is not call:
            return attend(own, with_lse)
        _check(call)
        values.check_values(call)
    capacity, dense_form = None, None
    try:
        if lengths is None and block_table is None and peers is None:
            dense_form = _dense_form(k_cache, v_cache, extras)
            if dense_form is not None:
                capacity = k_cache.shape[1]
                length = capacity if length is None else length
        signature = _signature(call, length, dense_form, with_lse, stream, capturing)
    except RuntimeError:
        check_layouts(call)
        raise
    prepared = _LAUNCHES.get(signature)
    if prepared is None or not (length is None or prepared.is_for(length, capacity)):
        # Asked where no launch is known: other calls have no time for it.
        if not call.latent and (own := call.with_own_rows()) is not call:
            return attend(own, with_lse)
        out, lse, prepared = _attend_first(call, length, capacity, with_lse, stream, capturing)
        _LAUNCHES.put(signature, prepared)
        return out, lse if with_lse else None
    relaunch, known, _, out_like, lse, has_own_lse = prepared
    if out is None:
        out = torch.empty_like(out_like)
    if has_own_lse:
        lse = torch.empty_like(lse)
    context = known.start if length is None else length
    relaunch(q, k_cache, v_cache, lengths, context, block_table, out, lse, extras)
    return out, lse if with_lse else None


def _check(call: Call) -> None:
    if call.latent:
        check_latent(call)
    else:
        refuse_kinds(call)
        call.check()
        check_extras(call)
    call.check_length()


def _attend_first(
    call: Call,
    length: int | None,
    dense_capacity: int | None,
    with_lse: bool,
    stream: Hashable,
    capturing: bool,
) -> tuple[torch.Tensor, torch.Tensor, Prepared]:
    """Output, LSE, and what serves the next call.

    Args:
        dense_capacity: None: the caches are not those of `_dense_form`.
    """
    inputs, relaunch = _launch_first(call)
    any_capacity = dense_capacity is not None and relaunch.any_capacity
    lengths = range(call.capacity, call.capacity + 1)
    if length is not None:
        most = lengths_with(length)[-1] if any_capacity else call.capacity
        lengths = _lengths(length, call.new_tokens, most, relaunch.tile_tokens)
    # A graph keeps its pointers: it writes to memory of its own.
    has_own_lse = with_lse or capturing
    prepared = Prepared(
        relaunch,
        lengths,
        None if any_capacity else call.k_cache.shape[1],
        _like(inputs.out),
        _like(inputs.lse) if has_own_lse else _LAUNCHES.unasked_lse(call.q, stream),
        has_own_lse,
    )
    return inputs.out, inputs.lse, prepared


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """What torch.empty_like, which takes half the host time of torch.empty, makes contiguous
    tensors of its shape from.
    """
    return _number(tensor.device, tensor.dtype).expand(tensor.shape)


@cache
def _number(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """One number, in memory that is no graph's."""
    return WORKSPACES.no_replays(device).view(dtype)[:1]


def _dense_form(
    k_cache: torch.Tensor, v_cache: torch.Tensor, extras: Extras | None
) -> tuple[int, int, int] | None:
    """What of the sizes and strides of dense caches decides a launch; None: others, which all do.

    Dense caches, K and V alike, lie in memory as (batch, kv_heads, tokens, head_dim) without gaps,
    and the host knows the length: those that torch.cat makes longer are of another capacity, with
    other strides, in every step, and nothing else in their launch changes.
    """
    shape, strides = k_cache.shape, k_cache.stride()
    # The stride of tokens first: it tells most caches apart.
    if len(shape) != 4 or strides[1] != shape[3] or shape[1] < 2:
        return None
    batch, tokens, heads, dim = shape
    if (
        strides == (heads * tokens * dim, dim, tokens * dim, 1)
        and strides == v_cache.stride()
        and shape == v_cache.shape
        and (extras is None or extras.k_new is None)
    ):
        return batch, heads, dim
    return None


def _signature(
    call: Call,
    length: int | None,
    dense_form: tuple[int, int, int] | None,
    with_lse: bool,
    stream: Hashable,
    capturing: bool,
) -> Hashable:
    """All that decides what is launched, besides pointers, the length, and the capacity of dense
    caches.

    Args:
        stream: the GPU's; without a GPU, the devices of q and of the caches.
    """
    q, k, v, lengths, _, table, out, scale, causal, invariant, config, extras, peers, latent = call
    # As `lengths_with` groups them: multiples are alone.
    group = length
    if length is not None and length % LENGTHS_TOGETHER:
        group = -1 - length // LENGTHS_TOGETHER
    return (
        stream,
        capturing,
        q.shape,
        q.stride(),
        q.dtype,
        q.get_device(),
        q.data_ptr() % _ALIGNMENT,
        dense_form or (k.shape, k.stride(), v.shape, v.stride()),
        k.dtype,
        k.get_device(),
        v.dtype,
        v.get_device(),
        (k.data_ptr() | v.data_ptr()) % _ALIGNMENT,
        None if lengths is None else _form(lengths),
        group,
        None if table is None else _form(table),
        None if out is None else _form(out),
        scale,
        causal,
        invariant,
        with_lse,
        state() if config is None else config,
        None if extras is None else _forms(extras),
        peers,
        latent,
    )


def _form(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    index = tensor.get_device()
    # A device takes longer to compare than its index; of those that are no GPUs, that says nothing.
    device = tensor.device if index < 0 else index
    return tensor.shape, tensor.stride(), tensor.dtype, device, tensor.data_ptr() % _ALIGNMENT


def _forms(extras: Extras) -> Hashable:
    tensors: Any = extras[:EXTRA_TENSORS]
    forms: list[Hashable] = [extras[EXTRA_TENSORS:]]
    for place, tensor in enumerate(tensors):
        if tensor is not None:
            forms += place, *_form(tensor)
    return tuple(forms)


def _lengths(length: int, least: int, capacity: int, tile_tokens: int) -> range:
    """The lengths from `least` to `capacity` that share their settings with `length` and have as
    many LeanTiles.
    """
    shared = lengths_with(length)
    most = -(-length // tile_tokens) * tile_tokens
    first = max(shared[0], most - tile_tokens + 1, least)
    last = min(shared[-1], most, capacity)
    return range(first, last + 1)


def _launch_first(call: Call) -> tuple[AttentionInputs, Relaunch]:
    """Checks a call and launches it; its tensors, the outputs among them."""
    _check(call)
    device = call.q.device
    if call.latent:
        call = as_attention(call)
        check_latent_launch(call)
    else:
        check_runs_on(device)
    out = call.out
    if out is None:
        out = torch.empty(call.out_shape, dtype=call.out_dtype, device=device)
    scale = call.softmax_scale
    inputs = AttentionInputs(
        q=call.q,
        k_cache=call.k_cache,
        v_cache=call.v_cache,
        cache_seqlens=call.cache_seqlens,
        context=call.capacity if call.length is None else call.length,
        softmax_scale=call.q.shape[-1] ** -0.5 if scale is None else scale,
        out=out,
        lse=torch.empty(call.lse_shape, dtype=torch.float32, device=device),
        block_table=call.block_table,
        # The last query token sees all tokens either way.
        causal=call.causal or call.q_len == 1,
        peers=call.peers,
        latent=call.latent,
        **({} if call.extras is None else call.extras._asdict()),
    )
    if call.latent:
        return inputs, launch_latent(inputs, _launched_latent)
    launch = partial(_launched, config=call.config, batch_invariant=call.batch_invariant)
    by_sequence = call.batch_invariant or bool(call.config and call.config.fixed_run_tiles)
    return inputs, launch_adapted(inputs, launch, by_sequence)


def check_runs_on(device: torch.device) -> None:
    """Raises UserError: there is no GPU, and no interpreter in its place."""
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise UserError(
            f"the tensors are on {device}: move them to a GPU, or set TRITON_INTERPRET=1 before"
            " triton is imported to try it there"
        )


def _launched_latent(inputs: AttentionInputs) -> Relaunch:
    return _launch(relaunch_latent(inputs), inputs)


def _launched(
    inputs: AttentionInputs, config: LeanConfig | None, batch_invariant: bool
) -> Relaunch:
    """The launch with these settings, or the default ones, made once.

    Tuned settings were timed with the compiler and on the GPU of their day: where they do not fit
    any more, the heuristic's run.
    """
    if config is None and inputs.cache_seqlens is not None and not batch_invariant:
        return _launch(LEAN.relaunch(inputs, _any_length_config(inputs)), inputs)
    problem = shared_problem(inputs)
    refuse_problem(problem)
    if config is not None:
        return _launch(LEAN.relaunch(inputs, config), inputs)
    choice = settings_of(inputs, problem, batch_invariant)
    if choice.how != "tuned":
        return _launch(LEAN.relaunch(inputs, choice.config), inputs)
    tuned = inputs.q.device, choice.config
    if tuned not in _refused:
        try:
            return _launch(LEAN.relaunch(inputs, choice.config), inputs)
        except Exception as error:
            if type(error).__name__ not in ("OutOfResources", "DoesNotFit"):
                raise
            _refused.add(tuned)
            reason = str(error).partition("\n")[0]
            warnings.warn(
                f"tuned settings do not fit any more ({reason}), the heuristic's are used: tune"
                " again",
                stacklevel=2,
            )
    return _launch(LEAN.relaunch(inputs, heuristic_of(inputs, problem)), inputs)


def _any_length_config(inputs: AttentionInputs) -> Any:
    """The settings for lengths on the device; those in CUDA C++ are looked up once for all
    capacities.
    """
    known, key = _LAUNCHES.any_length, all_but_capacity(inputs)
    config = known.get(key)
    if config is None:
        problem = shared_problem(inputs)
        refuse_problem(problem)
        config = settings_of(inputs, problem, batch_invariant=False).config
        if isinstance(config, LeanCudaConfig):
            if len(known) >= _KEPT:
                known.clear()
            known[key] = config
    return config


def _launch(relaunch: Relaunch, inputs: AttentionInputs) -> Relaunch:
    relaunch(
        inputs.q,
        inputs.k_cache,
        inputs.v_cache,
        inputs.cache_seqlens,
        inputs.context,
        inputs.block_table,
        inputs.out,
        inputs.lse,
        extras_of(inputs),
    )
    return relaunch
