"""Checks of the arguments of a call.

Checks use shapes, dtypes and devices, which a tracer knows. `check_length` needs numbers of the
host, `check_values` reads tensors and synchronizes.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch

from leanbench.attention.call import HALVES, WHOLE_NUMBERS, Call, short_repr
from leanbench.attention.compat import padded_dim
from leanbench.core.extras import EXTRA_TENSORS, Extras, fp8_name
from leanbench.core.kernel import size_choices
from leanbench.core.kinds import MOST_SOFTCAP, SAME
from leanbench.core.switches import CHECK_CALLS, is_on
from leanbench.kernels.lean import LEAN
from leanbench.kernels.lean.cuda_kernel import VALUE_DIMS
from leanbench.kernels.mla.build import gathers

#: True if every call reads its tensors (LEANBENCH_CHECK_CALLS=1).
CHECKS_VALUES = is_on(CHECK_CALLS, default=False)
FLOATS = (torch.float32, *HALVES)
#: Maximum of a stride: kernels use 32 bits.
MAX_STRIDE = (1 << 31) - 1
#: Arguments by the names of their fields in Extras.
_ARGUMENTS = {"k_new": "k", "v_new": "v"}


def check_call(call: Call) -> None:
    """Check everything but values on the device and the length.

    Raises:
        NotImplementedError: A size is unsupported.
        ValueError: The tensors are inconsistent.
    """
    _check_sizes(call)
    check_consistency(call)


def check_consistency(call: Call) -> None:
    """Check the tensors against each other.

    Raises:
        ValueError: They are inconsistent.
    """
    _check_shapes(call)
    _check_memory(call.q, call.k_cache, call.v_cache)
    if call.block_table is not None:
        # With `cache_batch_idx`, sequences pick their rows.
        batch = call.batch if call.all_extras.cache_batch_idx is None else None
        check_pages(call.block_table, call.q, batch, call.k_cache.shape[2])
        _check_table_of_heads(call)
    if call.cache_seqlens is not None:
        check_numbers("cache_seqlens", call.cache_seqlens, call.q, (call.batch,))
    if call.softmax_scale is not None and not math.isfinite(call.softmax_scale):
        raise ValueError(
            f"softmax_scale is {call.softmax_scale}: expected a finite number, or None for"
            " head_dim ** -0.5"
        )
    if call.out is not None:
        check_out(call, call.out)
    if call.extras is not None:
        _check_extras(call, call.extras)


def _check_sizes(call: Call) -> None:
    q, k_cache, v_cache = call.q, call.k_cache, call.v_cache
    if q.dim() == 0 or k_cache.dim() != 4:
        return
    dims = [("head_dim", q.shape[-1], k_cache, LEAN.head_dims)]
    if v_cache.dim() == 4:
        dims.append(("a v_cache of head_dim", v_cache.shape[3], v_cache, VALUE_DIMS))
    for name, dim, cache, supported in dims:
        padded = padded_dim(int(dim), cache)
        if padded and padded not in supported:
            most = max(supported)
            choices = f"{most} at most" if padded > most else size_choices(supported)
            raise NotImplementedError(
                f"lean_attn_with_kvcache does not support {name} {dim} yet: choose {choices}"
            )
    page_size = 0 if call.block_table is None else int(k_cache.shape[1])
    unsupported = None
    if page_size and page_size not in LEAN.page_sizes:
        choices = f"choose {size_choices(LEAN.page_sizes)}, or leave block_table out"
        unsupported = f"pages of {page_size} tokens yet: {choices}"
    elif call.q_len > LEAN.max_q_len:
        choices = f"pass at most {LEAN.max_q_len} at a time"
        unsupported = f"{call.q_len} query tokens yet: {choices}"
    if unsupported:
        raise NotImplementedError(f"lean_attn_with_kvcache does not support {unsupported}")


def _check_shapes(call: Call) -> None:
    q, k_cache, v_cache, extras = call.q, call.k_cache, call.v_cache, call.all_extras
    packed = extras.cu_seqlens_q is not None
    queries = "(query tokens, q_heads, head_dim)" if packed else "(batch, q_len, q_heads, head_dim)"
    rows = "(batch, tokens" if call.block_table is None else "(pages, page_size"
    if (
        q.dim() != (3 if packed else 4)
        or k_cache.dim() != 4
        or v_cache.shape[:-1] != k_cache.shape[:-1]
        or 0 in (*q.shape, *k_cache.shape, *v_cache.shape)
    ):
        raise ValueError(
            f"q is {tuple(q.shape)}, k_cache {tuple(k_cache.shape)}, v_cache"
            f" {tuple(v_cache.shape)}: expected {queries} and twice {rows}, kv_heads, head_dim), no"
            " size 0"
        )
    has_row_each = call.block_table is None and extras.cache_batch_idx is None
    if has_row_each and call.batch != k_cache.shape[0]:
        if packed:
            raise ValueError(
                f"cu_seqlens_q has {call.batch + 1} numbers, k_cache {tuple(k_cache.shape)} has"
                f" {k_cache.shape[0]} sequences: expected {k_cache.shape[0] + 1} numbers"
            )
        raise ValueError(
            f"q {tuple(q.shape)} and k_cache {tuple(k_cache.shape)} must agree in batch"
        )
    if q.shape[-1] != k_cache.shape[3] or q.shape[-2] % k_cache.shape[2]:
        raise ValueError(
            f"q {tuple(q.shape)} and k_cache {tuple(k_cache.shape)} must agree in head_dim, and"
            " q_heads must be a multiple of kv_heads"
        )


def _check_memory(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
    q_is_fp8, kv_is_fp8 = fp8_name(q.dtype) != SAME, fp8_name(k_cache.dtype) != SAME
    fits = kv_is_fp8 if q_is_fp8 else q.dtype in HALVES and (kv_is_fp8 or k_cache.dtype == q.dtype)
    if not fits or k_cache.dtype != v_cache.dtype:
        raise ValueError(
            f"q is {q.dtype}, the caches {k_cache.dtype} and {v_cache.dtype}: expected all fp16 or"
            " all bf16, or fp8 caches of one dtype"
        )
    if not q.device == k_cache.device == v_cache.device:
        raise ValueError(
            f"q is on {q.device}, the caches on {k_cache.device} and {v_cache.device}: use one"
            " device"
        )
    if k_cache.stride(3) != 1 or v_cache.stride(3) != 1:
        raise ValueError(
            f"the last strides of the caches are {k_cache.stride(3)} and {v_cache.stride(3)}:"
            " head_dim must be contiguous, its stride 1"
        )


def check_length(call: Call) -> None:
    """Check that a length on the host fits the cache; tracers may not know either.

    Raises:
        ValueError: It does not.
    """
    if call.length is None or call.new_tokens <= call.length <= call.capacity:
        return
    if call.new_tokens:
        raise ValueError(
            f"cache_seqlens {call.length - call.new_tokens} and {call.new_tokens} appended"
            f" tokens are outside the cache's 0 to {call.capacity} tokens: append at most what"
            " there is room for"
        )
    raise ValueError(
        f"cache_seqlens {call.length} is outside the cache's 0 to {call.capacity} tokens"
    )


def check_out(call: Call, out: torch.Tensor) -> None:
    """Check that the output can be written to `out`.

    Raises:
        ValueError: It cannot.
    """
    shape, dtype, device = call.out_shape, call.out_dtype, call.q.device
    dtypes = (dtype,) if call.q.dtype == dtype else HALVES
    if out.shape != shape or out.dtype not in dtypes or out.device != device:
        raise ValueError(
            f"out is {tuple(out.shape)} {out.dtype} on {out.device}: expected {tuple(shape)}"
            f" {dtype} on {device}, as q is"
        )
    if out.stride(-1) != 1:
        raise ValueError(
            f"the last stride of out is {out.stride(-1)}: head_dim must be contiguous, its stride 1"
        )
    if _is_expanded(out):
        raise ValueError(
            f"out has strides {tuple(out.stride())}, so that some of its rows are one in"
            " memory: pass a tensor that is not expanded"
        )


def _is_expanded(tensor: torch.Tensor) -> bool:
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return any(size > 1 and stride == 0 for size, stride in sizes)


def check_layouts(call: Call, **more: torch.Tensor | None) -> None:
    """Check that no tensor is sparse or nested.

    The check takes time, so calls use it only after torch has failed in its own words.

    Raises:
        ValueError: A tensor is.
    """
    caches = {"k_cache": call.k_cache, "v_cache": call.v_cache}
    if call.latent:
        caches = {"kv_cache": call.k_cache}
    tensors = {
        "q": call.q,
        **caches,
        "cache_seqlens": call.cache_seqlens,
        "block_table": call.block_table,
        "out": call.out,
        **{_ARGUMENTS.get(name, name): tensor for name, tensor in call.all_extras.tensors.items()},
        **more,
    }
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor) and (
            tensor.is_nested or tensor.layout is not torch.strided
        ):
            layout = "nested" if tensor.is_nested else f"of layout {tensor.layout}"
            raise ValueError(f"{name} is {layout}: pass a dense tensor")


def check_pages(
    block_table: torch.Tensor, q: torch.Tensor, batch: int | None, kv_heads: int | None = None
) -> None:
    """Check the shape, dtype, strides and device of a block table.

    Args:
        batch: Number of rows; None: any.
        kv_heads: KV heads that can have their own pages; None: none can.

    Raises:
        ValueError: The table is invalid.
    """
    heads = block_table.shape[1:-1]
    if (
        block_table.dim() not in (2, 3)
        or (heads and heads != (kv_heads,))
        or (batch is not None and block_table.shape[0] != batch)
        or 0 in block_table.shape
        or block_table.dtype != torch.int32
    ):
        rows = "rows" if batch is None else batch
        of_heads = "" if kv_heads is None else f" or ({rows}, {kv_heads} KV heads, pages of each)"
        raise ValueError(
            f"block_table is {tuple(block_table.shape)} {block_table.dtype}: expected"
            f" ({rows}, pages of a sequence){of_heads} torch.int32"
        )
    for size, step in zip(block_table.shape[:-1], block_table.stride()[:-1], strict=True):
        if size > 1 and step > MAX_STRIDE:
            raise ValueError(
                f"block_table steps by {step} numbers from row to row, the maximum is {MAX_STRIDE}:"
                " pass a contiguous one"
            )
    check_device("block_table", block_table, q)


def _check_table_of_heads(call: Call) -> None:
    """Raise NotImplementedError for extras that need positions, which chosen tokens do not have."""
    extras = call.all_extras
    refused = {
        "window_size": max(extras.window_left, extras.window_right) >= 0,
        "attention_chunk": extras.attention_chunk > 0,
        "alibi_slopes": extras.alibi_slopes is not None,
        "cache_leftpad": extras.cache_leftpad is not None,
        "k and v": extras.k_new is not None or extras.v_new is not None,
    }
    names = ", ".join(name for name, is_given in refused.items() if is_given)
    if names and call.block_table is not None and call.has_table_of_heads:
        raise NotImplementedError(
            f"lean_attn_with_kvcache does not support a block_table"
            f" {tuple(call.block_table.shape)}, of each KV head, together with {names}: its tokens"
            f" have no positions, leave {names} out, or pass a block_table (batch, pages of a"
            " sequence)"
        )


def check_numbers(
    name: str,
    tensor: torch.Tensor,
    q: torch.Tensor,
    *shapes: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...] = (torch.int32,),
) -> None:
    """Check that a tensor has one of these shapes and dtypes, and the device of `q`.

    Raises:
        ValueError: It does not.
    """
    if tensor.shape not in shapes or tensor.dtype not in dtypes:
        raise ValueError(
            f"{name} is {tuple(tensor.shape)} {tensor.dtype}: expected"
            f" {' or '.join(str(tuple(shape)) for shape in shapes)}"
            f" {' or '.join(map(str, dtypes))}"
        )
    check_device(name, tensor, q)


def check_device(name: str, tensor: torch.Tensor, q: torch.Tensor) -> None:
    """Raise ValueError if a tensor is not on the device of `q`."""
    if tensor.device != q.device:
        raise ValueError(f"{name} is on {tensor.device}, q on {q.device}: move it there")


def check_tensors(call: Call) -> None:
    """Check the types of the extras.

    Raises:
        ValueError: A tensor or a whole number is expected.
    """
    extras = call.all_extras
    most = extras.max_seqlen_q
    # A tensor's number could change under a prepared launch.
    if most is not None and (isinstance(most, bool) or not isinstance(most, WHOLE_NUMBERS)):
        raise ValueError(
            f"max_seqlen_q is {most!r}: expected the most query tokens of a sequence as an int"
        )
    for field, tensor in zip(Extras._fields, extras[:EXTRA_TENSORS], strict=False):
        if tensor is None or isinstance(tensor, torch.Tensor):
            continue
        name, expected = _ARGUMENTS.get(field, field), ": expected a tensor"
        if name.endswith("_page_descale"):
            expected = (
                ", on the host: pass a torch.float32 tensor (pages,) or (pages, kv_heads) on the"
                " device of q"
            )
        elif name.endswith("_descale"):
            expected = (
                ", on the host: pass a torch.float32 tensor on the device of q, of one number for"
                " all"
            )
        raise ValueError(f"{name} is {short_repr(tensor)}{expected}")
    # Sizes that keys of launches read; `check_call` covers other shapes.
    for name, tensor, expected in (
        ("k", extras.k_new, "(batch, new tokens, kv_heads, head_dim)"),
        ("rotary_cos", extras.rotary_cos, "(positions, rotary_dim / 2)"),
    ):
        if tensor is not None and tensor.dim() < 2:
            raise ValueError(f"{name} is {tuple(tensor.shape)}: expected {expected}")
    # These have no batch.
    starts = extras.cu_seqlens_q
    if starts is not None and starts.shape[:1] in ((), (0,)):
        raise ValueError(f"cu_seqlens_q is {tuple(starts.shape)}: expected (batch + 1,)")


def _check_extras(call: Call, extras: Extras) -> None:
    _check_by_shape(call, extras)
    _check_page_scales(call, extras)
    _check_packed(call, extras)
    _check_append(call, extras)
    _check_rotary(call, extras)
    # NaN fails, too.
    if not 0 <= extras.softcap <= MOST_SOFTCAP:
        raise ValueError(
            f"softcap is {extras.softcap}: expected 0 for none, or a number above it, at most"
            f" {MOST_SOFTCAP:g}"
        )


def _check_by_shape(call: Call, extras: Extras) -> None:
    """Check extras that have nothing but a shape and a dtype."""
    q, batch = call.q, call.batch
    q_heads, kv_heads = q.shape[-2], call.k_cache.shape[2]
    if extras.sinks is not None:
        check_numbers("sinks", extras.sinks, q, (q_heads,), dtypes=FLOATS)
    if extras.alibi_slopes is not None:
        shapes = (q_heads,), (batch, q_heads)
        check_numbers("alibi_slopes", extras.alibi_slopes, q, *shapes, dtypes=(torch.float32,))
    for name in ("cache_leftpad", "cache_batch_idx"):
        if (numbers := getattr(extras, name)) is not None:
            check_numbers(name, numbers, q, (batch,))
    for name in ("q_descale", "k_descale", "v_descale"):
        scales = getattr(extras, name)
        if scales is None:
            continue
        if scales.shape != (batch, kv_heads) or scales.dtype != torch.float32:
            raise ValueError(
                f"{name} is {tuple(scales.shape)} {scales.dtype}: expected"
                f" {(batch, kv_heads)} torch.float32, or what expands to it"
            )
        check_device(name, scales, q)


def _check_page_scales(call: Call, extras: Extras) -> None:
    k_scales, v_scales = extras.k_page_descale, extras.v_page_descale
    if (k_scales is None) != (v_scales is None):
        given, missing = ("k", "v") if v_scales is None else ("v", "k")
        raise ValueError(
            f"{given}_page_descale goes with {missing}_page_descale, which is None: pass both, ones"
            " for what has no scales, or neither"
        )
    pages, kv_heads = call.k_cache.shape[0], call.k_cache.shape[2]
    for name, scales in (("k_page_descale", k_scales), ("v_page_descale", v_scales)):
        if scales is None:
            continue
        if call.block_table is None:
            raise ValueError(
                f"{name} has scales of pages, and without a block_table the caches have none: pass"
                f" {name.replace('_page', '')}, or a block_table"
            )
        if fp8_name(call.k_cache.dtype) == SAME:
            raise ValueError(
                f"{name} has scales of fp8 pages, k_cache is {call.k_cache.dtype}: leave it out, or"
                " pass caches in torch.float8_e4m3fn or torch.float8_e5m2"
            )
        if scales.shape not in ((pages,), (pages, kv_heads)) or scales.dtype != torch.float32:
            raise ValueError(
                f"{name} is {tuple(scales.shape)} {scales.dtype}: expected {(pages,)} or"
                f" {(pages, kv_heads)} torch.float32, a scale for each page of the caches or for"
                " each of its KV heads"
            )
        check_device(name, scales, call.q)


def _check_packed(call: Call, extras: Extras) -> None:
    starts, most = extras.cu_seqlens_q, extras.max_seqlen_q
    if starts is None or most is None:
        return
    if starts.dim() != 1 or starts.shape[0] < 2:
        raise ValueError(f"cu_seqlens_q is {tuple(starts.shape)}: expected (batch + 1,)")
    check_numbers("cu_seqlens_q", starts, call.q, (call.batch + 1,))
    if not 1 <= most <= call.q.shape[0]:
        raise ValueError(
            f"max_seqlen_q {most} is outside the 1 to {call.q.shape[0]} tokens of q: pass the most"
            " tokens of a sequence"
        )


def _check_append(call: Call, extras: Extras) -> None:
    k, v = extras.k_new, extras.v_new
    if (k is None) != (v is None):
        raise ValueError("k and v are appended together: pass both or neither")
    if k is None or v is None:
        return
    if call.cache_seqlens is None and call.length is None:
        raise ValueError("k and v are appended at cache_seqlens: pass that too")
    table = call.block_table
    if table is not None and table.dim() == 2 and table.shape[0] > 1 and table.stride(0) == 0:
        raise ValueError(
            f"block_table {tuple(table.shape)} has strides {tuple(table.stride())}, so that all"
            " sequences have the same pages: append with a block_table that is not expanded"
        )
    starts = extras.cu_seqlens_k_new
    words, sizes = "batch, new tokens", (call.batch, k.shape[1] if k.dim() > 1 else 0)
    if starts is not None:
        check_numbers("cu_seqlens_k_new", starts, call.q, (call.batch + 1,))
        words, sizes = "new tokens", (k.shape[0] if k.dim() else 0,)
    for name, new, cache in (("k", k, call.k_cache), ("v", v, call.v_cache)):
        expected = (*sizes, *cache.shape[2:])
        if new.shape == expected and 0 in new.shape:
            raise ValueError(
                f"{name} is {tuple(new.shape)}, which has a size 0: leave k and v out where nothing"
                " is appended"
            )
        if new.shape != expected or new.dtype != cache.dtype:
            raise ValueError(
                f"{name} is {tuple(new.shape)} {new.dtype}: expected ({words}, kv_heads, head_dim)"
                f" = {expected} {cache.dtype}, as q and the caches are"
            )
        check_device(name, new, call.q)
        if _is_expanded(cache):
            raise ValueError(
                f"{name}_cache has strides {tuple(cache.stride())}, so that some of its rows are"
                " one in memory: append to a cache that is not expanded"
            )
    if call.new_tokens > call.capacity:
        raise ValueError(
            f"k has {call.new_tokens} tokens, the caches have room for {call.capacity} of a"
            " sequence: append at most as many"
        )


def _check_rotary(call: Call, extras: Extras) -> None:
    cos, sin = extras.rotary_cos, extras.rotary_sin
    if (cos is None) != (sin is None):
        raise ValueError("rotary_cos and rotary_sin go together: pass both or neither")
    if cos is None or sin is None:
        return
    if extras.k_new is None:
        raise ValueError("rotary_cos and rotary_sin rotate k, which is None: pass k and v too")
    # Tables need no rows for spare capacity.
    least = 1 if call.length is None else call.length
    if call.block_table is not None:
        least = call.capacity
    if (
        cos.dim() != 2
        or cos.shape[0] < least
        or cos.shape[1] % 8
        or not 0 < 2 * cos.shape[1] <= call.q.shape[-1]
    ):
        raise ValueError(
            f"rotary_cos is {tuple(cos.shape)}: expected (positions, rotary_dim / 2), a position"
            f" for each of {least} tokens or more, and rotary_dim a multiple of 16 up to"
            f" {call.q.shape[-1]}"
        )
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        check_numbers(name, table, call.q, tuple(cos.shape), dtypes=(call.q.dtype,))
    if extras.rotary_seqlens is not None:
        check_numbers("rotary_seqlens", extras.rotary_seqlens, call.q, (call.batch,))


def reads_values(tensor: torch.Tensor) -> bool:
    """Return True if calls read such tensors to check them; captures cannot wait, and those on
    `meta` have no numbers.
    """
    if not CHECKS_VALUES or tensor.is_meta:
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def check_values(call: Call) -> None:
    """Check lengths, rows, pages and starts of sequences against the caches and `q`.

    Raises:
        ValueError: A value is out of range.
    """
    extras = call.all_extras
    most = call.capacity - call.new_tokens
    length = call.capacity if call.length is None else call.length - call.new_tokens
    cached = [length] * call.batch
    if call.cache_seqlens is not None:
        cached = [length - extras.prior_tokens for length in call.cache_seqlens.tolist()]
        unit = "the tokens that a sequence has room for"
        unit += f", less the {call.new_tokens} appended" * (call.new_tokens > 0)
        _check_range("cache_seqlens", cached, most, unit)
    if extras.cache_leftpad is not None:
        for sequence, pad in enumerate(extras.cache_leftpad.tolist()):
            if not 0 <= pad <= cached[sequence]:
                raise ValueError(
                    f"cache_leftpad[{sequence}] is {pad}: expected 0 to the sequence's"
                    f" {cached[sequence]} tokens"
                )
    rows = call.k_cache if call.block_table is None else call.block_table
    if extras.cache_batch_idx is not None:
        picked = extras.cache_batch_idx.tolist()
        _check_range("cache_batch_idx", picked, rows.shape[0] - 1, "rows of the caches")
        if extras.k_new is not None:
            _check_distinct("cache_batch_idx", picked)
    for name, starts, packed in (
        ("cu_seqlens_q", extras.cu_seqlens_q, call.q),
        ("cu_seqlens_k_new", extras.cu_seqlens_k_new, extras.k_new),
    ):
        if starts is not None and packed is not None:
            limit = extras.max_seqlen_q if packed is call.q else None
            _check_starts(name, starts.tolist(), packed.shape[0], limit)
    if extras.k_new is not None:
        _check_appended(call, cached)
    if call.block_table is not None:
        _check_page_numbers(call, cached)
    if call.latent and extras.k_descale is not None:
        scales = extras.k_descale.flatten().expand(call.batch).tolist()
        for sequence, scale in enumerate(scales):
            if cached[sequence] and not scale > 0:
                raise ValueError(f"k_descale[{sequence}] is {scale}: expected a number above 0")


def _check_range(name: str, numbers: list[int], most: int, unit: str) -> None:
    for sequence, number in enumerate(numbers):
        if not 0 <= number <= most:
            raise ValueError(f"{name}[{sequence}] is {number}: expected 0 to {most}, {unit}")


def _check_distinct(name: str, numbers: list[int]) -> None:
    for sequence, number in enumerate(numbers):
        if (first := numbers.index(number)) < sequence:
            raise ValueError(
                f"{name}[{first}] and [{sequence}] are both {number}: tokens are appended to one"
                " row for each sequence, pass different rows"
            )


def _check_starts(name: str, starts: list[int], tokens: int, most: int | None) -> None:
    if starts[0] != 0 or starts[-1] > tokens:
        raise ValueError(
            f"{name} goes from {starts[0]} to {starts[-1]}: expected 0 to at most {tokens} tokens"
        )
    for sequence, (start, end) in enumerate(pairwise(starts)):
        if end < start or (most is not None and end - start > most):
            limit = "" if most is None else f", by at most max_seqlen_q, {most}"
            raise ValueError(
                f"{name} goes from {start} to {end} in sequence {sequence}: expected starts that"
                f" rise{limit}"
            )


def _check_appended(call: Call, cached: list[int]) -> None:
    """Check room for new tokens, and that each sequence has query tokens to append them."""
    extras = call.all_extras
    queries, new = extras.cu_seqlens_q, extras.cu_seqlens_k_new
    for sequence, count in enumerate([] if new is None else new.diff().tolist()):
        if cached[sequence] + count > call.capacity:
            raise ValueError(
                f"cu_seqlens_k_new has {count} tokens for sequence {sequence}, which has"
                f" {cached[sequence]}: expected at most the {call.capacity} of the caches together"
            )
    for sequence, count in enumerate([] if queries is None else queries.diff().tolist()):
        if count == 0:
            raise ValueError(
                f"cu_seqlens_q has no query token for sequence {sequence}, so its new tokens might"
                " not be written: drop the sequence, or pass a query token"
            )
    if extras.rotary_cos is None:
        return
    name, first = "cache_seqlens", cached
    if extras.rotary_seqlens is not None:
        name, first = "rotary_seqlens", extras.rotary_seqlens.tolist()
    for sequence, (row, count) in enumerate(zip(first, _new_counts(call), strict=True)):
        most = extras.rotary_cos.shape[0] - count
        if not 0 <= row <= most:
            raise ValueError(
                f"{name}[{sequence}] is {row}: expected 0 to {most}, so that rotary_cos has a row"
                " for new tokens"
            )


def _new_counts(call: Call) -> list[int]:
    """Return the number of tokens that are appended to each sequence."""
    starts = call.all_extras.cu_seqlens_k_new
    return [call.new_tokens] * call.batch if starts is None else starts.diff().tolist()


def _check_page_numbers(call: Call, cached: list[int]) -> None:
    """Check pages up to the end of each sequence; entries past it are not read.

    -1 stands for no tokens where rows are copied one by one.
    """
    table, page_size = call.block_table, call.k_cache.shape[1]
    assert table is not None
    is_full = call.cache_seqlens is None and call.length is None
    ends = map(sum, zip(cached, _new_counts(call), strict=True))
    tokens = [call.capacity] * call.batch if is_full else [*ends]
    # The columns of an expanded table are one in memory.
    most = -(-max(tokens) // page_size) if table.stride(-1) else 1
    picked, rows = call.all_extras.cache_batch_idx, table[..., :most]
    rows = rows if picked is None else rows[picked.long()]
    least = -1 if call.latent and gathers(page_size) else 0
    for sequence, pages in enumerate(rows.tolist()):
        for place, row in enumerate(pages if call.has_table_of_heads else [pages]):
            for column, page in enumerate(row[: -(-tokens[sequence] // page_size)]):
                if not least <= page < call.k_cache.shape[0]:
                    head = f"{place}, " if call.has_table_of_heads else ""
                    raise ValueError(
                        f"block_table[{sequence}, {head}{column}] is {page}: expected 0 to"
                        f" {call.k_cache.shape[0] - 1}, the pages of the caches"
                        + (", or -1 for none" if least else "")
                    )
