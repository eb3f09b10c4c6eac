"""Prepared launches: one for all calls of a signature.

A signature holds everything that checks and settings depend on. A call with a known signature only
writes its pointers and length into the prepared launch.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import cache, partial, reduce
from operator import or_
from typing import Any, NamedTuple, TypeGuard

import torch

from leanbench.attention import checks, fast
from leanbench.attention.call import HALVES, Call
from leanbench.attention.compat import launch_after_steps
from leanbench.attention.mla_launch import (
    as_attention,
    check_latent,
    check_latent_launch,
)
from leanbench.attention.record import is_captured, is_recorded, record
from leanbench.configs.lookup import Choice, Settings, state
from leanbench.core.config import KernelConfig
from leanbench.core.errors import UserError
from leanbench.core.extras import EXTRA_TENSORS, Extras, extras_of
from leanbench.core.inputs import AttentionInputs
from leanbench.core.problem import AttentionProblem
from leanbench.kernels.launch import Relaunch, problem_of, spec_of
from leanbench.kernels.lean import LEAN, LEAN_CUDA
from leanbench.kernels.lean.cuda import CudaRelaunch
from leanbench.kernels.lean.cuda_settings import LENGTHS_TOGETHER, bound_of
from leanbench.kernels.lean.workspace import WORKSPACES
from leanbench.kernels.mla import LEAN_MLA

#: Alignment of pointers, in bytes, that a launch may depend on.
_ALIGNMENT = 16
#: Number of recent signatures that a thread keeps, of those before them, and of its families.
_KEPT = 512
#: Number of batches and lengths of which a family keeps the settings.
_MOST_CHOICES = 2048


class Prepared(NamedTuple):
    """The launch of a signature. Keeps no tensor of a call alive."""

    relaunch: Relaunch
    #: Supported lengths; without a length on the host, the capacity.
    lengths: range
    #: Capacity of the caches, of a sequence or a page; None: any.
    capacity: int | None
    #: Template of outputs.
    out_like: torch.Tensor
    #: Template of LSEs, or scratch memory for them.
    lse: torch.Tensor
    has_own_lse: bool

    def is_for(self, length: int, capacity: int | None) -> bool:
        """Return True for a supported length; a `capacity` of None is part of the signature."""
        if length not in self.lengths:
            return False
        if capacity is None:
            return True
        return length <= capacity if self.capacity is None else capacity == self.capacity


#: See `replace_hook`.
Hook = Callable[[AttentionProblem], None]


class Family:
    """Calls that differ in nothing but sizes: their settings, and a launch with each."""

    def __init__(self) -> None:
        #: Settings by batch and `_tokens_of`.
        self.choices: dict[tuple[int, int], Choice] = {}
        #: Look-up of further ones; None: with a problem.
        self.choose: Callable[[int, int], Choice] | None = None
        #: Launches by their settings, each of the sizes of its last call.
        self.launches: dict[KernelConfig | None, CudaRelaunch] = {}

    def launch_for(
        self, call: Call, context: int, out: torch.Tensor, lse: torch.Tensor
    ) -> CudaRelaunch | None:
        """Return a launch of the sizes of a call, until the next one takes it, or None if one is to
        be prepared alone.

        Args:
            out: Tensor that it will write, or one of its dtype and strides.
            lse: The same of the LSE.
        """
        if not self.launches:
            return None
        batch, config, how = call.batch, call.config, "given"
        if config is None:
            if self.choose is None:
                return None
            config, how, _ = self.choice(batch, _tokens_of(call, context))
        known = self.launches.get(config)
        if known is not None:
            known.resize(batch, context, call.q, call.k_cache, call.v_cache, call.block_table)
            return known
        if how != "heuristic":
            # Timed settings may not fit any more.
            return None
        inputs = call.inputs(out, lse)
        relaunch = _kernel_of(inputs).relaunch(inputs, config)
        return relaunch if self.add(relaunch) else None

    def add(self, relaunch: Relaunch) -> TypeGuard[CudaRelaunch]:
        """Take a launch for calls of other sizes; return False if it has none."""
        if not isinstance(relaunch, CudaRelaunch) or relaunch.family is None:
            return False
        self.launches[relaunch.family.config] = relaunch
        return True

    def choice(self, batch: int, tokens: int) -> Choice:
        """Return the settings of a batch and `_tokens_of`, after `choose` is set."""
        choice = self.choices.get((batch, tokens))
        if choice is None:
            assert self.choose is not None
            if len(self.choices) >= _MOST_CHOICES:
                self.choices.clear()
            choice = self.choices[batch, tokens] = self.choose(batch, tokens)
        return choice


class PreparedLaunches(threading.local):
    """Prepared launches of a thread, by signature."""

    def __init__(self) -> None:
        self._recent: dict[Hashable, Prepared] = {}
        self._before: dict[Hashable, Prepared] = {}
        #: By `_family_key`.
        self.families: dict[Hashable, Family] = {}
        #: Hashes of signatures of known families that were called once.
        self._once: set[int] = set()
        self.on_signature: Hook | None = None
        #: True if a launch was prepared without a hook.
        self.has_unseen = False
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

    def forget(self) -> None:
        """Prepare the launch of each signature anew."""
        self._recent, self._before, self.has_unseen = {}, {}, False
        fast.clear()

    def was_called(self, signature: Hashable) -> bool:
        """Return False for a signature's first call, as far as they are remembered."""
        number = hash(signature)
        if number in self._once:
            return True
        if len(self._once) >= _KEPT:
            self._once.clear()
        self._once.add(number)
        return False

    def keep(self, key: Hashable, family: Family) -> None:
        if len(self.families) >= _KEPT:
            self.families.clear()
        self.families[key] = family

    def scratch_lse(self, q: torch.Tensor, stream: Hashable) -> torch.Tensor:
        """Return a buffer of the stream for an LSE that the caller does not request."""
        rows = q.numel() // q.shape[-1]
        buffer = self._lses.get((q.device, stream))
        if buffer is None or buffer.numel() < rows:
            size = 1 << (rows - 1).bit_length()
            buffer = torch.empty(size, dtype=torch.float32, device=q.device)
            self._lses[q.device, stream] = buffer
        return buffer


_LAUNCHES = PreparedLaunches()
#: Tuned settings that do not fit a GPU, and the form of K and V.
_too_large: set[Hashable] = set()


def attend(call: Call, with_lse: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the output, and the LSE if requested; errors as in leanbench.attention.decode."""
    # Unpacking a tuple is faster than reading its fields by name.
    q, k_cache, v_cache, lengths, length, table, out, _, _, _, _, extras, peers, _, learns = call
    index = q.get_device()
    if index < 0:
        # All CPU devices have one index.
        stream, capturing = (q.device, k_cache.device, v_cache.device), False
    elif index == torch._C._cuda_getDevice():
        stream = torch._C._cuda_getCurrentRawStream(index)
        capturing = torch._C._cuda_isCurrentStreamCapturing()
    else:
        # Kernels are launched on the current device.
        with torch.cuda.device(index):
            return attend(call, with_lse)
    if checks.CHECKS_VALUES and not capturing:
        checks.check_layouts(call)
        if not call.latent and (trimmed := call.without_spare_rows()) is not call:
            return attend(trimmed, with_lse)
        _check(call)
        if not q.is_meta:
            checks.check_values(call)
    capacity, dense_form = None, None
    try:
        if lengths is None and table is None and peers is None:
            dense_form = _dense_form(k_cache, v_cache, extras)
            if dense_form is not None:
                capacity = k_cache.shape[1]
                length = capacity if length is None else length
        signature = _signature(call, length, dense_form, with_lse, stream, capturing)
    except RuntimeError:
        checks.check_layouts(call)
        raise
    prepared = _LAUNCHES.get(signature)
    if prepared is None or not (length is None or prepared.is_for(length, capacity)):
        # Only here: calls with a prepared launch have no time for it.
        if not call.latent and (trimmed := call.without_spare_rows()) is not call:
            return attend(trimmed, with_lse)
        options = signature, length, capacity, with_lse, stream, capturing
        out, lse, prepared = _attend_first(call, *options)
        if prepared is not None:
            _LAUNCHES.put(signature, prepared)
        return out, lse if with_lse else None
    relaunch, known, _, out_like, lse, has_own_lse = prepared
    if out is None:
        out = torch.empty_like(out_like)
    if has_own_lse:
        lse = torch.empty_like(lse)
    context = known.start if length is None else length
    relaunch(q, k_cache, v_cache, lengths, context, table, out, lse, extras)
    if learns:
        fast.learn(call, relaunch, context, known, out_like, prepared.lse, has_own_lse)
    return out, lse if with_lse else None


def _check(call: Call) -> None:
    if call.latent:
        check_latent(call)
    else:
        checks.check_call(call)
    checks.check_length(call)


def _attend_first(
    call: Call,
    signature: tuple[Any, ...],
    length: int | None,
    dense_capacity: int | None,
    with_lse: bool,
    stream: Hashable,
    capturing: bool,
) -> tuple[torch.Tensor, torch.Tensor, Prepared | None]:
    """Check and launch a call; return output, LSE, and the launch for later calls.

    There is none for the first call of a known family's new sizes: many are the only one.

    Args:
        dense_capacity: None if the caches have no `_dense_form`.
    """
    key = _family_key(call, signature)
    family = None if _is_watched() else _LAUNCHES.families.get(key)
    _LAUNCHES.has_unseen |= call.config is None and _LAUNCHES.on_signature is None
    if family is None:
        family = Family()
        _check(call)
    else:
        # The rest of the checks follow from the family, whose key has all they compare.
        checks.check_length(call)
    if call.latent:
        call = as_attention(call)
    capacity, context = call.capacity, call.length
    context = capacity if context is None else context
    q, out = call.q, call.out
    if not family.launches:
        check_latent_launch(call) if call.latent else check_runs_on(q.device)
    if out is None:
        if q.dtype in HALVES and q.shape[-1] == call.v_cache.shape[3] and q.is_contiguous():
            # It takes half the host time.
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
        else:
            out = torch.empty(call.out_shape, dtype=call.out_dtype, device=q.device)
    # A graph keeps its pointers and must not write to shared memory.
    has_own_lse = with_lse or capturing
    if has_own_lse:
        lse = scratch_lse = torch.empty(call.lse_shape, dtype=torch.float32, device=q.device)
    else:
        lse = scratch_lse = _LAUNCHES.scratch_lse(q, stream)
    relaunch = family.launch_for(call, context, out, lse)
    if relaunch is not None:
        tensors = q, call.k_cache, call.v_cache, call.cache_seqlens
        relaunch(*tensors, context, call.block_table, out, lse, call.extras)
        if not _LAUNCHES.was_called(signature):
            return out, lse, None
        relaunch = relaunch.copy()
    else:
        if not has_own_lse:
            lse = torch.empty(call.lse_shape, dtype=torch.float32, device=q.device)
        make_launch = partial(_launch_with_settings, call, family)
        relaunch = launch_after_steps(call, out, lse, make_launch)
        if family.add(relaunch):
            relaunch = relaunch.copy()
        _LAUNCHES.keep(key, family)
    any_capacity = dense_capacity is not None and relaunch.any_capacity
    lengths = range(capacity, capacity + 1)
    if length is not None:
        most = _ends(length)[1] if any_capacity else capacity
        given = call.all_extras
        if given.rotary_cos is not None and given.rotary_seqlens is None:
            # A longer one has new tokens without a row: it is refused.
            most = min(most, given.rotary_cos.shape[0])
        lengths = _lengths(length, call.new_tokens, most, relaunch.tile_tokens)
    prepared = Prepared(
        relaunch,
        lengths,
        None if any_capacity else call.k_cache.shape[1],
        _like(out),
        _like(lse) if has_own_lse else scratch_lse,
        has_own_lse,
    )
    return out, lse, prepared


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """Return a template for torch.empty_like, which takes half the host time of torch.empty."""
    return _one_number(tensor.device, tensor.dtype).expand(tensor.shape)


@cache
def _one_number(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return one number in memory outside of CUDA graphs."""
    return WORKSPACES.no_replays(device).view(dtype)[:1]


def _dense_form(
    k_cache: torch.Tensor, v_cache: torch.Tensor, extras: Extras | None
) -> tuple[int, int, int] | None:
    """Return (batch, kv_heads, head_dim) of dense caches, None for others.

    Dense caches are (batch, kv_heads, tokens, head_dim) in memory, without gaps, with a length on
    the host. torch.cat makes such caches, with another capacity and other strides in every step.
    Nothing else in their launch changes.
    """
    shape, strides = k_cache.shape, k_cache.stride()
    # The token stride first: it rules out most caches.
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
) -> tuple[Any, ...]:
    """Return all that decides a launch but pointers, the length and the capacity of dense caches.

    Args:
        stream: The GPU's stream; on a CPU, the devices of q and the caches.
    """
    q, k, v, lengths, _, table, out, scale, causal, invariant, config, extras, peers, mla, _ = call
    # Groups of `lengths_with`: a multiple is a group of its own.
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
        mla,
    )


#: Fields of Extras with a number of each sequence, with rows that sequences do not have, and with
#: sizes that follow from those of `q`.
_OF_SEQUENCES, _OF_POSITIONS, _OF_PAGES, _OF_QUERIES = (
    frozenset(map(Extras._fields.index, names))
    for names in (
        (
            *("cache_batch_idx", "cache_leftpad", "rotary_seqlens"),
            *("cu_seqlens_q", "cu_seqlens_k_new"),
        ),
        ("rotary_cos", "rotary_sin"),
        ("k_page_descale", "v_page_descale"),
        ("prior", "prior_lse"),
    )
)


def _family_key(call: Call, signature: tuple[Any, ...]) -> Hashable:
    """Return all that decides checks, settings and a launch but sizes, and how sizes compare.

    A number of rows is in it as its difference to the batch, or to the number of pages, and whether
    it is 0, 1 or more.
    """
    stream, q_shape, q_device = signature[0], signature[2], signature[5]
    lengths, _, table, out, scale, causal, invariant, _, settings, extras, peers, latent = (
        signature[13:]
    )
    k, v = call.k_cache, call.v_cache
    if latent and k.dim() == 3 and call.block_table is None:
        k = v = k.unsqueeze(2)
    shape, v_shape = k.shape, v.shape
    if not q_shape or len(shape) != 4 or len(v_shape) != 4:
        return signature
    batch = q_shape[0] if extras is None else call.batch
    rows, capacity, heads, columns = shape
    strides, v_strides = k.stride(), v.stride()
    is_alike = strides == v_strides and shape == v_shape
    if lengths is not None:
        # Of a single number, any stride.
        lengths = lengths[0] == (batch,), lengths[1] == (1,) or batch == 1, *lengths[2:]
    places: Hashable = rows == batch
    if table is not None:
        places = _sizeless_table(table, batch, shape[1])
        capacity *= table[0][-1] if len(table[0]) in (2, 3) else 0
    if out is not None:
        out = out[0][1:], out[0][:1] == q_shape[:1], *out[1:]
    if extras is not None:
        extras = _sizeless(call, extras, batch, capacity)
    numbers = batch * capacity * heads * (columns + v_shape[3])
    item = k.element_size()
    return (
        *(q_shape[1:], min(q_shape[0], 2), min(batch, 2), min(shape[1], 2)),
        *(*signature[3:7], *signature[8:13]),
        _cache_form(shape, strides, item),
        None
        if is_alike
        else (_cache_form(v_shape, v_strides, v.element_size()), shape[:3] == v_shape[:3]),
        # All CPU devices have one index, but their stream has the devices.
        stream if q_device < 0 else None,
        # Sizes that are refused, or nearly.
        (batch, capacity) if numbers >> 58 or batch >> 20 else None,
        *(places, lengths, call.length is None, out),
        *(scale, causal, invariant, settings, extras, peers, latent),
    )


def _sizeless_table(form: tuple[Any, ...], batch: int, page_size: int) -> Hashable:
    """Return `_form` of a block table without sizes, see `_family_key`."""
    shape, strides = form[:2] if len(form[0]) in (2, 3) else ((0, 0), (0, 0))
    (rows, *heads, columns), (row, *head, step) = shape, strides
    most = reduce(or_, head, columns | row)
    wide = most if most >> 31 else 0
    return (
        *(page_size, rows - batch, min(rows, 2), *heads, columns > 0, columns > 1),
        *(step, row == 0, wide, *form[2:]),
    )


def _sizeless(call: Call, forms: tuple[Any, ...], batch: int, capacity: int) -> Hashable:
    """Return `_forms` of extras without sizes, see `_family_key`."""
    given, shape = call.all_extras, call.k_cache.shape
    most, tables = given.max_seqlen_q or 0, given.rotary_cos
    parts: list[Hashable] = [forms[0], given.new_tokens > capacity, most > call.q.shape[0]]
    for start in range(1, len(forms), 6):
        field, size, *form = forms[start : start + 6]
        if field in _OF_QUERIES:
            parts += field, *form
            continue
        rows = size[0] if size else 0
        if field in _OF_PAGES:
            rows -= shape[0]
        elif field in _OF_SEQUENCES or (len(size) > 1 and field not in _OF_POSITIONS):
            rows -= batch
        parts += field, rows, min(size[:1], (2,)), size[1:], *form
    if tables is not None:
        least = capacity if call.block_table is not None else call.length or 1
        parts += tables.shape[0] < shape[1], tables.shape[0] < least
    return tuple(parts)


def _cache_form(
    shape: tuple[int, ...], strides: tuple[int, ...], number_bytes: int
) -> tuple[Hashable, ...]:
    """Return what checks and settings depend on in the shape and the strides of a cache."""
    if 0 in shape or 0 in strides:
        return shape, strides
    row, token, head, step = strides
    columns = shape[3]
    # Only what copies as 16 bytes, pairs of heads and the layout depend on.
    apart = head if head <= token or head <= columns else -1
    odd = (row | token | head) * number_bytes % _ALIGNMENT
    return shape[2], columns, token, apart, step, odd


def _form(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    index = tensor.get_device()
    # An index is faster to compare than a device, but all CPU devices have one.
    device = tensor.device if index < 0 else index
    return tensor.shape, tensor.stride(), tensor.dtype, device, tensor.data_ptr() % _ALIGNMENT


def _forms(extras: Extras) -> Hashable:
    tensors: Any = extras[:EXTRA_TENSORS]
    forms: list[Hashable] = [extras[EXTRA_TENSORS:]]
    for field, tensor in enumerate(tensors):
        if tensor is not None:
            forms += field, *_form(tensor)
    return tuple(forms)


def _lengths(length: int, least: int, capacity: int, tile_tokens: int) -> range:
    """Return the lengths with the settings and the number of LeanTiles of `length`."""
    first, last = _ends(length)
    most = -(-length // tile_tokens) * tile_tokens
    return range(max(first, most - tile_tokens + 1, least), min(last, most, capacity) + 1)


def lengths_with(length: int) -> range:
    """Return the lengths that share settings: a multiple of `LENGTHS_TOGETHER`, or those between
    two multiples.
    """
    first, last = _ends(length)
    return range(first, last + 1)


def _ends(length: int) -> tuple[int, int]:
    """Return the first and last of `lengths_with`."""
    rest = length % LENGTHS_TOGETHER
    return (length - rest + 1, length - rest + LENGTHS_TOGETHER - 1) if rest else (length, length)


def check_runs_on(device: torch.device) -> None:
    """Raise UserError without a GPU or Triton's interpreter."""
    in_interpreter = device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    if device.type != "cuda" and not in_interpreter:
        raise UserError(
            f"the tensors are on {device}: move them to a GPU, or set TRITON_INTERPRET=1 before"
            " triton is imported to try it there"
        )


def replace_hook(hook: Hook | None) -> Hook | None:
    """Call `hook` for each signature of this thread that has no given settings, outside of
    captures, before its settings are looked up; return the hook until now.

    Signatures that no hook has seen are called for, too.
    """
    before, _LAUNCHES.on_signature = _LAUNCHES.on_signature, hook
    if hook is not None and _LAUNCHES.has_unseen:
        _LAUNCHES.forget()
    return before


def _launch_with_settings(call: Call, family: Family, inputs: AttentionInputs) -> Relaunch:
    """Launch with the settings of a call, or the default ones.

    Timed settings depend on the compiler and the GPU that they were timed with. If they no longer
    fit, the model's are used.
    """
    config = call.config
    if config is not None:
        _supported_problem(inputs)
        return _launch(LEAN.relaunch(inputs, config), inputs)
    choice, kernel = _choice(inputs, call.batch_invariant, family), _kernel_of(inputs)
    if choice.how != "tuned":
        return _launch(kernel.relaunch(inputs, choice.config), inputs)
    k_cache = inputs.k_cache
    tuned = k_cache.device, choice.config, k_cache.dtype, inputs.head_dim, inputs.value_dim
    if tuned not in _too_large:
        try:
            return _launch(kernel.relaunch(inputs, choice.config), inputs)
        except Exception as error:
            if type(error).__name__ not in ("OutOfResources", "DoesNotFit"):
                raise
            _too_large.add(tuned)
            reason = str(error).partition("\n")[0]
            warnings.warn(
                f"tuned settings do not fit any more ({reason}), the heuristic's are used: tune"
                " again",
                stacklevel=2,
            )
    problem = _with_lengths(inputs, _supported_problem(inputs))
    default = kernel.default_config(problem, spec_of(inputs.q.device))
    return _launch(kernel.relaunch(inputs, default), inputs)


def settings_of(
    inputs: AttentionInputs, problem: AttentionProblem, batch_invariant: bool
) -> Choice:
    """Choose the launch settings of a call without a config.

    Args:
        problem: `shared_problem` of the inputs.
    """
    choose = choices_of(inputs, problem, batch_invariant)
    return choose(inputs.batch, _tokens_of(inputs, inputs.context))


def choices_of(
    inputs: AttentionInputs, problem: AttentionProblem, batch_invariant: bool
) -> Callable[[int, int], Choice]:
    """Return a function that chooses the launch settings of a batch and `_tokens_of`."""
    spec, kernel = spec_of(inputs.q.device), _kernel_of(inputs)
    if not batch_invariant:
        uniform = inputs.cache_seqlens is None
        return Settings(kernel, problem, spec, uniform=uniform).choice
    reason = "these settings do not depend on the rest of the batch"
    choice = Choice(kernel.batch_invariant_config(problem, spec), "heuristic", reason)
    return lambda batch, tokens: choice


def _kernel_of(inputs: AttentionInputs) -> Any:
    if inputs.latent:
        return LEAN_MLA
    # Only CUDA C++ merges the partials of several GPUs, and a launch's results into the next one's.
    return LEAN if inputs.peers is None and inputs.prior is None else LEAN_CUDA


def shared_problem(inputs: AttentionInputs) -> AttentionProblem:
    """Return the problem of a call, with the longest length that shares its settings."""
    if inputs.cache_seqlens is not None:
        return problem_of(inputs)
    return problem_of(inputs, _ends(inputs.context)[1])


def _supported_problem(inputs: AttentionInputs) -> AttentionProblem:
    """Return `shared_problem`; raise NotImplementedError if the kernel does not support it.

    Tensors over a latent cache were checked.
    """
    problem = shared_problem(inputs)
    reason = None if inputs.latent else LEAN.unsupported_reason(problem)
    if reason is not None:
        raise NotImplementedError(f"lean_attn_with_kvcache does not support this yet: {reason}")
    return problem


def _is_watched() -> bool:
    """Return True if new signatures are tuned or recorded."""
    return _LAUNCHES.on_signature is not None or is_recorded()


def _choice(inputs: AttentionInputs, batch_invariant: bool, family: Family) -> Choice:
    """Return the settings of a new signature."""
    hook, sizes = _LAUNCHES.on_signature, (inputs.batch, _tokens_of(inputs, inputs.context))
    known = family.choices.get(sizes)
    if known is not None:
        return known
    problem = _supported_problem(inputs)
    if not batch_invariant and inputs.peers is None:
        called = _with_lengths(inputs, problem)
        record(inputs, called)
        if hook is not None and not is_captured(inputs):
            hook(called)
    if family.choose is None:
        family.choose = choices_of(inputs, problem, batch_invariant)
    return family.choice(*sizes)


def _tokens_of(call: Call | AttentionInputs, context: int) -> int:
    """Return the length for which settings are chosen: that of `shared_problem`, or its bound."""
    if call.cache_seqlens is not None:
        return bound_of(max(1, context, call.new_tokens))
    return max(1, _ends(context)[1], call.new_tokens)


def _with_lengths(inputs: AttentionInputs, problem: AttentionProblem) -> AttentionProblem:
    """Return the problem with lengths where the call has them."""
    if inputs.cache_seqlens is None:
        return problem
    return replace(problem, lengths_on="device", capacity=problem.max_context)


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
