"""The arguments of a call of `lean_attn_with_kvcache`, and whether they fit together."""

from __future__ import annotations

import math
import operator
from typing import Any, NamedTuple

import torch

from leanbench.core.extras import NO_EXTRAS, Extras, fp8_name
from leanbench.core.inputs import Peers
from leanbench.core.kinds import SAME
from leanbench.kernels.lean.configs import LeanConfig

_DTYPES = (torch.float16, torch.bfloat16)
#: What a tracer holds stays a symbol. A union of types takes longer to make than to ask.
WHOLE_NUMBERS = (int, torch.SymInt)
#: Numbers from one row of a block table to the next: kernels have 32 bits for them.
_LARGEST_STEP = (1 << 31) - 1


class Call(NamedTuple):
    """The arguments as far as they reach the kernel; shapes as in leanbench.attention."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    #: A tensor of lengths, or None for what `length` says.
    cache_seqlens: torch.Tensor | None = None
    #: Tokens in use of every sequence, appended ones included; None: all.
    length: int | None = None
    block_table: torch.Tensor | None = None
    #: None: a new tensor.
    out: torch.Tensor | None = None
    softmax_scale: float | None = None
    causal: bool = False
    batch_invariant: bool = False
    #: None: the default.
    config: LeanConfig | None = None
    #: None: a plain call.
    extras: Extras | None = None
    #: GPUs that share the sequences; None: this one alone.
    peers: Peers | None = None
    #: Whether it is one of leanbench.latent: `k_cache` and `v_cache` are its latent cache then.
    latent: bool = False

    @property
    def capacity(self) -> int:
        """Tokens that the cache holds for each sequence at most."""
        pages = 1 if self.block_table is None else self.block_table.shape[1]
        return self.k_cache.shape[1] * pages

    @property
    def all_extras(self) -> Extras:
        """The extras, those of a plain call with nothing in them."""
        return NO_EXTRAS if self.extras is None else self.extras

    @property
    def q_len(self) -> int:
        """Query tokens of a sequence, or the most of one."""
        if self.extras is not None and self.extras.max_seqlen_q is not None:
            return self.extras.max_seqlen_q
        return self.q.shape[1] if self.q.dim() == 4 else 1

    @property
    def batch(self) -> int:
        starts = self.all_extras.cu_seqlens_q
        return self.q.shape[0] if starts is None else starts.shape[0] - 1

    @property
    def new_tokens(self) -> int:
        """Appended to every sequence; 0 where `cu_seqlens_k_new` says how many."""
        return self.all_extras.new_tokens

    @property
    def out_shape(self) -> tuple[int, ...]:
        return (*self.q.shape[:-1], self.v_cache.shape[3])

    @property
    def out_dtype(self) -> torch.dtype:
        """That of `q`; where that is fp8, bf16 unless `out` is fp16."""
        return self.q.dtype if self.q.dtype in _DTYPES else torch.bfloat16

    @property
    def lse_shape(self) -> tuple[int, ...]:
        if self.all_extras.cu_seqlens_q is not None:
            return self.q.shape[1], self.q.shape[0]
        return self.q.shape[0], self.q.shape[2], self.q.shape[1]

    def check(self) -> None:
        """Whether the tensors fit together, by what a tracer knows of them.

        Raises:
            ValueError: they do not; the sentence names what was given and what is expected.
        """
        _check_shapes(self)
        _check_memory(self.q, self.k_cache, self.v_cache)
        if self.block_table is not None:
            # `cache_batch_idx` picks the rows then.
            batch = self.batch if self.all_extras.cache_batch_idx is None else None
            check_pages(self.block_table, self.q, batch)
        if self.cache_seqlens is not None:
            check_numbers("cache_seqlens", self.cache_seqlens, self.q, (self.batch,))
        if self.softmax_scale is not None and not math.isfinite(self.softmax_scale):
            raise ValueError(
                f"softmax_scale is {self.softmax_scale}: expected a finite number, or None for"
                " head_dim ** -0.5"
            )
        if self.out is not None:
            self.check_out(self.out)

    def with_own_rows(self) -> Call:
        """The call without the rows of contiguous caches that no sequence has, as of a cache for a
        larger batch: flash-attn does not read them. The same object where there are none.
        """
        q, k_cache, v_cache = self.q, self.k_cache, self.v_cache
        if (
            not q.dim() == k_cache.dim() == v_cache.dim() == 4
            or not 0 < q.shape[0] < k_cache.shape[0]
            or k_cache.shape[0] != v_cache.shape[0]
            or self.block_table is not None
        ):
            return self
        extras = self.all_extras
        if extras.cache_batch_idx is not None or extras.cu_seqlens_q is not None:
            return self
        return self._replace(k_cache=k_cache[: self.batch], v_cache=v_cache[: self.batch])

    def check_length(self) -> None:
        """Whether the length fits the cache; neither may be known while a call is traced.

        Raises:
            ValueError: it does not.
        """
        if self.length is None or self.new_tokens <= self.length <= self.capacity:
            return
        if self.new_tokens:
            raise ValueError(
                f"cache_seqlens {self.length - self.new_tokens} and {self.new_tokens} appended"
                f" tokens are outside the cache's 0 to {self.capacity} tokens: append at most what"
                " there is room for"
            )
        raise ValueError(
            f"cache_seqlens {self.length} is outside the cache's 0 to {self.capacity} tokens"
        )

    def check_out(self, out: torch.Tensor) -> None:
        """Whether the output can be written to `out`.

        Raises:
            ValueError: it cannot.
        """
        shape, dtype, device = self.out_shape, self.out_dtype, self.q.device
        dtypes = (dtype,) if self.q.dtype == dtype else _DTYPES
        if out.shape != shape or out.dtype not in dtypes or out.device != device:
            raise ValueError(
                f"out is {tuple(out.shape)} {out.dtype} on {out.device}: expected {tuple(shape)}"
                f" {dtype} on {device}, as q is"
            )
        if out.stride(-1) != 1:
            raise ValueError(
                f"the last stride of out is {out.stride(-1)}: head_dim must be contiguous, its"
                " stride 1"
            )
        sizes = zip(out.shape, out.stride(), strict=True)
        if any(size > 1 and stride == 0 for size, stride in sizes):
            raise ValueError(
                f"out has strides {tuple(out.stride())}, so that some of its rows are one in"
                " memory: pass a tensor that is not expanded"
            )


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
    is_own = call.block_table is None and extras.cache_batch_idx is None
    if packed and is_own and call.batch != k_cache.shape[0]:
        raise ValueError(
            f"cu_seqlens_q has {call.batch + 1} numbers, k_cache {tuple(k_cache.shape)} has"
            f" {k_cache.shape[0]} sequences: expected {k_cache.shape[0] + 1} numbers"
        )
    if is_own and call.batch != k_cache.shape[0]:
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
    fits = kv_is_fp8 if q_is_fp8 else q.dtype in _DTYPES and (kv_is_fp8 or k_cache.dtype == q.dtype)
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


def check_layouts(call: Call, **others: torch.Tensor | None) -> None:
    """Check that no tensor of a call, nor another one, is sparse or nested.

    torch fails in its own words on these. A call asks only once it has: the check takes time.

    Raises:
        ValueError: One is.
    """
    caches = {"k_cache": call.k_cache, "v_cache": call.v_cache}
    if call.latent:
        caches = {"kv_cache": call.k_cache}
    names = {"k_new": "k", "v_new": "v"}
    tensors = {
        "q": call.q,
        **caches,
        "cache_seqlens": call.cache_seqlens,
        "block_table": call.block_table,
        "out": call.out,
        **{names.get(name, name): tensor for name, tensor in call.all_extras.tensors.items()},
        **others,
    }
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor) and (
            tensor.is_nested or tensor.layout is not torch.strided
        ):
            layout = "nested" if tensor.is_nested else f"of layout {tensor.layout}"
            raise ValueError(f"{name} is {layout}: pass a dense tensor")


def check_pages(block_table: torch.Tensor, q: torch.Tensor, batch: int | None) -> None:
    """Whether a block table has a row for each sequence, or any number of them, at any strides, and
    lies on the device of `q`.

    Args:
        batch: None: any number.

    Raises:
        ValueError: it does not.
    """
    if (
        block_table.dim() != 2
        or (batch is not None and block_table.shape[0] != batch)
        or 0 in block_table.shape
        or block_table.dtype != torch.int32
    ):
        raise ValueError(
            f"block_table is {tuple(block_table.shape)} {block_table.dtype}: expected"
            f" ({'rows' if batch is None else batch}, pages of a sequence) torch.int32"
        )
    row = block_table.stride(0) if block_table.shape[0] > 1 else 0
    if row > _LARGEST_STEP:
        raise ValueError(
            f"block_table steps by {row} numbers from row to row, at most {_LARGEST_STEP} are"
            " taken: pass a contiguous one"
        )
    check_device("block_table", block_table, q)


def check_numbers(
    name: str,
    tensor: torch.Tensor,
    q: torch.Tensor,
    *shapes: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...] = (torch.int32,),
) -> None:
    """Whether a tensor has one of the shapes and dtypes, at any strides, on the device of `q`.

    Raises:
        ValueError: it does not.
    """
    if tensor.shape not in shapes or tensor.dtype not in dtypes:
        raise ValueError(
            f"{name} is {tuple(tensor.shape)} {tensor.dtype}: expected"
            f" {' or '.join(str(tuple(shape)) for shape in shapes)}"
            f" {' or '.join(map(str, dtypes))}"
        )
    check_device(name, tensor, q)


def check_device(name: str, tensor: torch.Tensor, q: torch.Tensor) -> None:
    """Whether a tensor is on the device of `q`.

    Raises:
        ValueError: it is not.
    """
    if tensor.device != q.device:
        raise ValueError(f"{name} is on {tensor.device}, q on {q.device}: move it there")


def whole_number(cache_seqlens: Any) -> int | None:
    """A length on the host; None, which stands for all tokens, stays None.

    Raises:
        ValueError: it is no whole number.
    """
    if cache_seqlens is None or (
        isinstance(cache_seqlens, WHOLE_NUMBERS) and not isinstance(cache_seqlens, bool)
    ):
        return cache_seqlens  # pyright: ignore[reportReturnType]
    try:
        if not isinstance(cache_seqlens, bool):
            return operator.index(cache_seqlens)
    except TypeError:
        pass
    raise ValueError(
        f"cache_seqlens is {cache_seqlens!r}: expected a number of tokens, or a tensor of them"
    )
