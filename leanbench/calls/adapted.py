"""Calls that no kernel takes as they are: what torch's operators do ahead of a launch.

Tensors that do not lie in a row are copied, the rows of a block table are picked, tokens are
appended (leanbench.calls.appending), packed queries get rows of their own
(leanbench.calls.unpacking), tensors are padded (leanbench.calls.padding). All of it happens in
every call: for compatibility, not for speed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from leanbench.calls.appending import append_ahead
from leanbench.calls.padding import copied, is_read, is_whole, needs_padding, padded_dim
from leanbench.calls.unpacking import Rows
from leanbench.core.extras import NO_EXTRAS, Extras, extras_of
from leanbench.core.inputs import AttentionInputs
from leanbench.kernels.launch import Relaunch

#: Tensors whose numbers kernels read one after the other.
_IN_A_ROW = (
    *("cache_seqlens", "cache_batch_idx", "cache_leftpad", "cu_seqlens_q", "cu_seqlens_k_new"),
    *("sinks", "rotary_cos", "rotary_sin", "rotary_seqlens"),
)
#: Those of whose rows they do.
_ROWS_IN_A_ROW = ("q", "k_new", "v_new", "block_table")
AnyLaunch = Callable[[AttentionInputs], Relaunch]


class Tensors(NamedTuple):
    """What a launch is made over anew in each call; names as in AttentionInputs."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    cache_seqlens: torch.Tensor | None
    context: int
    block_table: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor
    extras: Extras

    @classmethod
    def of(cls, inputs: AttentionInputs) -> Tensors:
        own = {name: getattr(inputs, name) for name in cls._fields if name != "extras"}
        return cls(**own, extras=extras_of(inputs) or NO_EXTRAS)

    def over(self, inputs: AttentionInputs) -> AttentionInputs:
        """The inputs with these in place of their own."""
        own: dict[str, Any] = self._asdict()
        return replace(inputs, **own.pop("extras")._asdict(), **own)


class Steps(NamedTuple):
    """Which of them a call needs."""

    #: Fields of AttentionInputs that are copied.
    copied: tuple[str, ...]
    picks_rows: bool
    appends: bool
    unpacks: bool
    pads: bool
    #: Of the call.
    causal: bool

    @classmethod
    def of(cls, inputs: AttentionInputs, unpacks: bool) -> Steps:
        copies = scattered(inputs)
        if copies:
            inputs = _with_copies(Tensors.of(inputs), copies).over(inputs)
        picks_rows = inputs.block_table is not None and inputs.cache_batch_idx is not None
        appends = inputs.k_new is not None and (
            inputs.cu_seqlens_k_new is not None
            or inputs.rotary_seqlens is not None
            or (inputs.rotary_cos is not None and (unpacks or _turns_otherwise(inputs)))
            or not (is_read(inputs.k_cache) and is_read(inputs.v_cache))
        )
        rest = replace(inputs, cache_batch_idx=None) if picks_rows else inputs
        if appends:
            gone = dict.fromkeys(("k_new", "v_new", "rotary_cos", "rotary_sin"))
            rest = replace(rest, **gone, rotary_interleaved=False)
        return cls(copies, picks_rows, appends, unpacks, needs_padding(rest), inputs.causal)

    def ahead(self, own: Tensors) -> Tensors:
        """What the launch is made over."""
        if self.copied:
            own = _with_copies(own, self.copied)
        if self.picks_rows:
            own = _with_picked_rows(own)
        if self.appends:
            own = _after_append(own, self.causal)
        if self.unpacks:
            own = _unpacked(own)
        return _padded(own) if self.pads else own


def _turns_otherwise(inputs: AttentionInputs) -> bool:
    """Whether lean.cu has no rotation for the caches: of fp8 numbers, or where the tables are
    shorter than they.
    """
    assert inputs.rotary_cos is not None
    # With pages the tables are as long as the capacity.
    is_short = inputs.block_table is None and inputs.rotary_cos.shape[0] < inputs.k_cache.shape[1]
    return is_short or inputs.k_cache.element_size() == 1


def scattered(inputs: AttentionInputs) -> tuple[str, ...]:
    """Names of the tensors of a call that do not lie in a row where kernels read them so."""
    names: list[str] = []
    for name in _IN_A_ROW:
        tensor = getattr(inputs, name)
        if tensor is not None and not tensor.is_contiguous():
            names.append(name)
    for name in _ROWS_IN_A_ROW:
        tensor = getattr(inputs, name)
        if tensor is not None and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            names.append(name)
    slopes = inputs.alibi_slopes
    # Sequences may share theirs: a tensor that is expanded.
    if slopes is not None and not (slopes.is_contiguous() or slopes.stride() == (0, 1)):
        names.append("alibi_slopes")
    return tuple(names)


def is_read_as_latent(q: torch.Tensor) -> bool:
    """Whether positions and heads of (batch, q_len, q_heads, 576) lie in a row, and all of it at
    multiples of 16 bytes.
    """
    return (q.shape[1] == 1 or q.stride(1) == q.shape[2] * q.stride(2)) and is_whole(q)


def launch_adapted(
    inputs: AttentionInputs, launch: AnyLaunch, by_sequence: bool = False
) -> Relaunch:
    """The launch, made once; with what goes ahead of it where the inputs need that.

    Args:
        launch: makes the launch over the tensors it is handed, and returns it.
        by_sequence: no kernel takes packed queries then.
    """
    steps = Steps.of(inputs, unpacks=by_sequence and inputs.cu_seqlens_q is not None)
    if not any(steps[:-1]):
        return launch(inputs)
    return _launch_after(steps, inputs, launch)


def launch_latent(inputs: AttentionInputs, launch: AnyLaunch) -> Relaunch:
    """The same over a latent cache, whose kernel reads rows of `q` in a row, too."""
    copies = scattered(inputs)
    if "q" not in copies and not is_read_as_latent(inputs.q):
        copies = *copies, "q"
    if not copies:
        return launch(inputs)
    steps = Steps(copies, False, False, False, False, inputs.causal)
    return _launch_after(steps, inputs, launch)


def _launch_after(steps: Steps, inputs: AttentionInputs, launch: AnyLaunch) -> Relaunch:
    own = Tensors.of(inputs)
    ready = steps.ahead(own)
    relaunch = launch(ready.over(inputs))
    _take_output(own, ready)
    return AdaptedRelaunch(relaunch, steps)


class AdaptedRelaunch:
    """A launch after the steps that its tensors need; see leanbench.kernels.launch.Relaunch."""

    any_capacity = False

    def __init__(self, relaunch: Relaunch, steps: Steps) -> None:
        self._relaunch = relaunch
        self._steps = steps
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
        own = Tensors(
            q, k_cache, v_cache, cache_seqlens, context, block_table, out, lse, extras or NO_EXTRAS
        )
        ready = self._steps.ahead(own)
        *launched, remaining = ready
        self._relaunch(*launched, None if remaining.asks_nothing else remaining)
        _take_output(own, ready)


def _with_copies(own: Tensors, names: tuple[str, ...]) -> Tensors:
    tensors: dict[str, Any] = {}
    extras: dict[str, Any] = {}
    for name in names:
        of, copies = (own, tensors) if name in Tensors._fields else (own.extras, extras)
        copies[name] = getattr(of, name).clone(memory_format=torch.contiguous_format)
    return own._replace(extras=own.extras._replace(**extras), **tensors)


def _with_picked_rows(own: Tensors) -> Tensors:
    assert own.block_table is not None
    assert own.extras.cache_batch_idx is not None
    table = own.block_table.index_select(0, own.extras.cache_batch_idx)
    return own._replace(block_table=table, extras=own.extras._replace(cache_batch_idx=None))


def _after_append(own: Tensors, causal: bool) -> Tensors:
    caches, pages = (own.k_cache, own.v_cache), own.block_table
    lengths, context = own.cache_seqlens, own.context
    if lengths is None:
        lengths = context - own.extras.new_tokens
    appended = append_ahead(own.q, caches, lengths, pages, own.extras, causal)
    after = appended.lengths if isinstance(appended.lengths, torch.Tensor) else None
    if after is not None:
        context = own.k_cache.shape[1] * (1 if pages is None else pages.shape[1])
    return own._replace(q=appended.q, cache_seqlens=after, context=context, extras=appended.extras)


def _rows_of(own: Tensors) -> Rows:
    starts, most = own.extras.cu_seqlens_q, own.extras.max_seqlen_q
    assert starts is not None
    assert most is not None
    return Rows(starts, own.q.shape[0], most)


def _unpacked(own: Tensors) -> Tensors:
    q = _rows_of(own).unpack(own.q)
    batch, most, heads, _ = q.shape
    return own._replace(
        q=q,
        out=own.out.new_empty((batch, most, *own.out.shape[1:])),
        lse=own.lse.new_empty((batch, heads, most)),
        extras=own.extras._replace(cu_seqlens_q=None, max_seqlen_q=None),
    )


def _padded(own: Tensors) -> Tensors:
    """Copies, and a new `out`; of the caches where they need it."""
    k_cache, v_cache, extras = own.k_cache, own.v_cache, own.extras
    k_dim, v_dim = padded_dim(k_cache.shape[3], k_cache), padded_dim(v_cache.shape[3], v_cache)
    # Both or neither: a launch is prepared for the alignment of the two together.
    if not (is_read(k_cache) and is_read(v_cache)):
        k_cache, v_cache = copied(k_cache, k_dim), copied(v_cache, v_dim)
    if extras.k_new is not None and extras.v_new is not None:
        k_new, v_new = copied(extras.k_new, k_dim), copied(extras.v_new, v_dim)
        extras = extras._replace(k_new=k_new, v_new=v_new)
    if extras.rotary_cos is not None and extras.rotary_sin is not None:
        cos, sin = extras.rotary_cos.clone(), extras.rotary_sin.clone()
        extras = extras._replace(rotary_cos=cos, rotary_sin=sin)
    out = own.out.new_empty((*own.out.shape[:-1], v_dim))
    q = copied(own.q, k_dim)
    return own._replace(q=q, k_cache=k_cache, v_cache=v_cache, out=out, extras=extras)


def _take_output(own: Tensors, ready: Tensors) -> None:
    if ready.out is own.out:
        return
    out = ready.out[..., : own.out.shape[-1]]
    if ready.lse is own.lse:
        own.out.copy_(out)
    else:
        # Room for LSEs that nobody asked for has no rows.
        to_lse = own.lse if own.lse.dim() == 2 else None
        _rows_of(own).pack(out, ready.lse, own.out, to_lse)
