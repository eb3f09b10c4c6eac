"""The arguments of a call of `lean_attn_with_kvcache`, and whether they fit together."""

from __future__ import annotations

from typing import NamedTuple

import torch

from leanbench.core.problem import HEAD_DIMS, MAX_Q_LEN, PAGE_SIZES
from leanbench.kernels.lean.configs import LeanConfig

DTYPE_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16"}


class Call(NamedTuple):
    """The arguments as far as they reach the kernel; shapes as in leanbench.attention."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    #: A tensor of lengths, or None for what `length` says.
    cache_seqlens: torch.Tensor | None = None
    #: Tokens in use of every sequence; None: all.
    length: int | None = None
    block_table: torch.Tensor | None = None
    #: None: a new tensor.
    out: torch.Tensor | None = None
    softmax_scale: float | None = None
    causal: bool = False
    batch_invariant: bool = False
    #: None: the default.
    config: LeanConfig | None = None

    @property
    def capacity(self) -> int:
        """Tokens that the cache holds for each sequence at most."""
        pages = 1 if self.block_table is None else self.block_table.shape[1]
        return self.k_cache.shape[1] * pages

    def check(self) -> None:
        """Whether the tensors fit together, by what a tracer knows of them.

        Raises:
            ValueError: they do not; the sentence names what was given and what is expected.
            NotImplementedError: more query tokens than there is a kernel for, or no causal mask.
        """
        _check_tensors(self.q, self.k_cache, self.v_cache, self.block_table)
        if self.q.shape[1] > 1 and not self.causal:
            raise NotImplementedError(
                f"q has {self.q.shape[1]} tokens per sequence and causal is False, only a causal"
                " mask is supported: pass causal=True"
            )
        if self.cache_seqlens is not None:
            _check_lengths(self.cache_seqlens, self.q)
        if self.out is not None:
            check_out(self.out, self.q)

    def check_length(self) -> None:
        """Whether the length fits the cache; neither may be known while a call is traced.

        Raises:
            ValueError: it does not.
        """
        if self.length is not None and not 0 <= self.length <= self.capacity:
            raise ValueError(
                f"cache_seqlens {self.length} is outside the cache's 0 to {self.capacity} tokens"
            )


def _check_tensors(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor | None
) -> None:
    caches = (
        "(batch, tokens, kv_heads, head_dim)"
        if block_table is None
        else "(pages, page_size, kv_heads, head_dim)"
    )
    if (
        q.dim() != 4
        or k_cache.dim() != 4
        or v_cache.shape != k_cache.shape
        or 0 in (*q.shape, *k_cache.shape)
    ):
        raise ValueError(
            f"q is {tuple(q.shape)}, k_cache {tuple(k_cache.shape)}, v_cache"
            f" {tuple(v_cache.shape)}: expected (batch, q_len, q_heads, head_dim) and twice"
            f" {caches}, no size 0"
        )
    if q.shape[1] > MAX_Q_LEN:
        raise NotImplementedError(
            f"q has {q.shape[1]} tokens per sequence, at most {MAX_Q_LEN} are supported: pass fewer"
            " at a time"
        )
    if block_table is not None:
        _check_pages(block_table, q, k_cache.shape[1])
    elif q.shape[0] != k_cache.shape[0]:
        raise ValueError(
            f"q {tuple(q.shape)} and k_cache {tuple(k_cache.shape)} must agree in batch"
        )
    if q.shape[3] != k_cache.shape[3] or q.shape[2] % k_cache.shape[2]:
        raise ValueError(
            f"q {tuple(q.shape)} and k_cache {tuple(k_cache.shape)} must agree in head_dim, and"
            " q_heads must be a multiple of kv_heads"
        )
    if q.shape[3] not in HEAD_DIMS:
        raise ValueError(
            f"head_dim {q.shape[3]} is not supported, choose one of"
            f" {', '.join(map(str, HEAD_DIMS))}"
        )
    if q.dtype not in DTYPE_NAMES or {k_cache.dtype, v_cache.dtype} != {q.dtype}:
        raise ValueError(
            f"q is {q.dtype}, the caches {k_cache.dtype} and {v_cache.dtype}: all fp16 or all bf16,"
            " please"
        )
    if not q.device == k_cache.device == v_cache.device:
        raise ValueError(
            f"q is on {q.device}, the caches on {k_cache.device} and {v_cache.device}: use one"
            " device"
        )
    if q.stride(3) != 1 or k_cache.stride(3) != 1 or v_cache.stride(3) != 1:
        raise ValueError(
            f"the last strides of q and of the caches are {q.stride(3)}, {k_cache.stride(3)} and"
            f" {v_cache.stride(3)}: head_dim must be contiguous, its stride 1"
        )


def _check_pages(block_table: torch.Tensor, q: torch.Tensor, page_size: int) -> None:
    if page_size not in PAGE_SIZES:
        raise ValueError(
            f"the caches have pages of {page_size} tokens: choose one of"
            f" {', '.join(map(str, PAGE_SIZES))}, or leave block_table out"
        )
    if (
        block_table.dim() != 2
        or block_table.shape[0] != q.shape[0]
        or block_table.shape[1] == 0
        or block_table.dtype != torch.int32
        or not block_table.is_contiguous()
    ):
        raise ValueError(
            f"block_table is {tuple(block_table.shape)} {block_table.dtype}: expected"
            f" ({q.shape[0]}, pages of a sequence) contiguous torch.int32"
        )
    if block_table.device != q.device:
        raise ValueError(f"block_table is on {block_table.device}, q on {q.device}: move it there")


def _check_lengths(cache_seqlens: torch.Tensor, q: torch.Tensor) -> None:
    if (
        cache_seqlens.shape != q.shape[:1]
        or cache_seqlens.dtype != torch.int32
        or not cache_seqlens.is_contiguous()
    ):
        raise ValueError(
            f"cache_seqlens is {tuple(cache_seqlens.shape)} {cache_seqlens.dtype}: expected"
            f" ({q.shape[0]},) contiguous torch.int32"
        )
    if cache_seqlens.device != q.device:
        raise ValueError(
            f"cache_seqlens is on {cache_seqlens.device}, q on {q.device}: move it there"
        )


def check_out(out: torch.Tensor, q: torch.Tensor) -> None:
    """Whether the output of `q` can be written to `out`.

    Raises:
        ValueError: it cannot.
    """
    if out.shape != q.shape or out.dtype != q.dtype or out.device != q.device:
        raise ValueError(
            f"out is {tuple(out.shape)} {out.dtype} on {out.device}: expected {tuple(q.shape)}"
            f" {q.dtype} on {q.device}, as q is"
        )
    if out.stride(3) != 1:
        raise ValueError(
            f"the last stride of out is {out.stride(3)}: head_dim must be contiguous, its stride 1"
        )
    if any(size > 1 and stride == 0 for size, stride in zip(out.shape, out.stride(), strict=True)):
        raise ValueError(
            f"out has strides {tuple(out.stride())}, so that some of its rows are one in memory:"
            " pass a tensor that is not expanded"
        )
