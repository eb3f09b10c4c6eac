"""The tensors of one decode attention call, and random ones for a problem."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from leanbench.core.problem import AttentionProblem

if TYPE_CHECKING:
    import torch


#: Windows of a cache start at multiples of this many tokens, as caches do.
_WINDOW_GRANULE = 64


@dataclass(frozen=True)
class AttentionInputs:
    """Shapes are flash-attn's; the layout (NHD or HND) is in the strides of `k_cache` and
    `v_cache`.
    """

    #: (batch, q_len, q_heads, head_dim)
    q: torch.Tensor
    #: (batch, capacity, kv_heads, head_dim): room for `capacity` tokens of each sequence, the
    #: longest context or more; head_dim is contiguous. What lies past a sequence's end may be
    #: anything, NaN too. With a `block_table`: (pages, page_size, kv_heads, head_dim), the pages of
    #: all sequences.
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    #: (batch,), int32, on the device: real lengths, clamped to 0..`context`. None: every sequence
    #: has `context` tokens.
    cache_seqlens: torch.Tensor | None
    #: Tokens of every sequence, which the host knows; with `cache_seqlens`, the cache's capacity.
    context: int
    softmax_scale: float
    #: (batch, q_len, q_heads, head_dim), same dtype as `q`.
    out: torch.Tensor
    #: (batch, q_heads, q_len), fp32, natural logarithm.
    lse: torch.Tensor
    #: (batch, pages of the cache's capacity), int32, contiguous, on the device: which page of the
    #: caches holds a sequence's page. Entries past its end may be any page. None: the cache is
    #: contiguous.
    block_table: torch.Tensor | None = None

    @property
    def q_len(self) -> int:
        return self.q.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.k_cache.shape[2]

    @property
    def group_size(self) -> int:
        return self.q.shape[2] // self.kv_heads

    @property
    def page_size(self) -> int | None:
        """Tokens of a page; None for a contiguous cache."""
        return None if self.block_table is None else self.k_cache.shape[1]

    @property
    def head_dim(self) -> int:
        return self.q.shape[3]

    def read_lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence, read from the device where they are there: for checks and
        planners, not for launches.
        """
        if self.cache_seqlens is None:
            return (self.context,) * self.q.shape[0]
        return tuple(self.cache_seqlens.clamp(0, self.context).tolist())

    def poison(self) -> None:
        """Fills the outputs with NaN, so that an element nobody wrote cannot pass a check."""
        self.out.fill_(math.nan)
        self.lse.fill_(math.nan)


def torch_dtype(name: str) -> torch.dtype:
    import torch

    return {"fp16": torch.float16, "bf16": torch.bfloat16}[name]


def cache_shape(problem: AttentionProblem) -> tuple[int, int, int, int]:
    """K and V as they lie in memory, with room for the capacity; of a paged cache, the pages in
    use.
    """
    rows, tokens = problem.batch, problem.cache_capacity
    if problem.page_size is not None:
        rows, tokens = sum(problem.page_counts), problem.page_size
    if problem.kv_layout == "HND":
        return rows, problem.kv_heads, tokens, problem.head_dim
    return rows, tokens, problem.kv_heads, problem.head_dim


def query_shape(problem: AttentionProblem) -> tuple[int, int, int, int]:
    return problem.batch, problem.q_len, problem.q_heads, problem.head_dim


def deal_pages(
    problem: AttentionProblem, device: str | torch.device, generator: torch.Generator | None = None
) -> torch.Tensor | None:
    """A block table of the capacity's length that gives each page of `cache_shape` to one sequence,
    in random order; None for a contiguous cache.

    Entries past a sequence's end are 0.
    """
    import torch

    if problem.page_size is None:
        return None
    pages = torch.randperm(
        sum(problem.page_counts), generator=generator, device=device, dtype=torch.int32
    )
    columns = problem.cache_capacity // problem.page_size
    table = torch.zeros(problem.batch, columns, dtype=torch.int32, device=device)
    for row, own in zip(table, pages.split(problem.page_counts), strict=True):
        row[: len(own)] = own
    return table


def inputs_over(
    problem: AttentionProblem,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor | None = None,
) -> AttentionInputs:
    """The call of `problem` on these tensors, outputs not yet written.

    Args:
        q: of `query_shape`.
        k_cache: of `cache_shape`, on the device of `q`.
        v_cache: like `k_cache`.
        block_table: of `deal_pages`, for a problem with a page size.
    """
    import torch

    assert (block_table is None) == (problem.page_size is None), (
        f"{problem.label} and its block table do not agree"
    )
    if problem.kv_layout == "HND":
        k_cache, v_cache = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    on_device = problem.lengths_on == "device"
    lengths = (
        torch.tensor(problem.contexts, dtype=torch.int32, device=q.device) if on_device else None
    )
    return AttentionInputs(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        cache_seqlens=lengths,
        context=problem.cache_capacity if on_device else problem.max_context,
        softmax_scale=problem.head_dim**-0.5,
        out=torch.empty_like(q),
        lse=torch.empty(
            problem.batch, problem.q_heads, problem.q_len, dtype=torch.float32, device=q.device
        ),
        block_table=block_table,
    )


def make_inputs(
    problem: AttentionProblem,
    device: str | torch.device,
    seed: int | None = None,
    score_scale: float = 1.0,
) -> AttentionInputs:
    """Standard normal Q, K and V in the problem's layout, and poisoned outputs.

    Args:
        seed: None draws fresh inputs every time, which is what a check wants.
        score_scale: multiplies Q; 1 gives scores of standard deviation 1, large values make softmax
            pick single tokens.
    """
    return make_windows(problem, device, 1, seed, score_scale)[0]


def windows_in_cache(problem: AttentionProblem) -> int:
    """Inputs that share one cache of the problem's capacity without sharing a token in use: the
    sequences of each lie behind those of the one before.
    """
    if problem.page_size is not None:
        return 1
    return max(1, problem.cache_capacity // _window_tokens(problem))


def _window_tokens(problem: AttentionProblem) -> int:
    """Tokens from one window's sequences to the next one's, in whole blocks of memory."""
    return -(-problem.max_context // _WINDOW_GRANULE) * _WINDOW_GRANULE


def make_windows(
    problem: AttentionProblem,
    device: str | torch.device,
    count: int,
    seed: int | None = None,
    score_scale: float = 1.0,
) -> list[AttentionInputs]:
    """Inputs as of `make_inputs` over one pool of memory, each with the strides of a cache of its
    own; what lies past a sequence's end may be in use in another window.

    Args:
        count: at most `windows_in_cache`.
    """
    import torch

    dtype = torch_dtype(problem.dtype)
    generator = torch.Generator(device)
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device).normal_(generator=generator)

    shape = cache_shape(problem)
    token_heads = problem.kv_heads if problem.kv_layout == "NHD" else 1
    step = _window_tokens(problem) * token_heads * problem.head_dim
    # The last window's last row ends behind a cache.
    numbers = math.prod(shape)
    k_pool = normal(numbers + (count - 1) * step)
    v_pool = normal(numbers + (count - 1) * step)
    windows = []
    for place in range(0, count * step, step):
        k_cache = k_pool[place : place + numbers].view(shape)
        v_cache = v_pool[place : place + numbers].view(shape)
        q = normal(*query_shape(problem)).mul_(score_scale)
        table = deal_pages(problem, device, generator)
        windows.append(inputs_over(problem, q, k_cache, v_cache, table))
        windows[-1].poison()
    return windows


def shape_only(problem: AttentionProblem) -> AttentionInputs:
    """Inputs of a problem without memory behind them: shapes, strides and dtypes are what a
    compiler asks for.
    """
    import torch

    dtype = torch_dtype(problem.dtype)
    q = torch.empty(query_shape(problem), dtype=dtype, device="meta")
    k_cache = torch.empty(cache_shape(problem), dtype=dtype, device="meta")
    v_cache = torch.empty_like(k_cache)
    return inputs_over(problem, q, k_cache, v_cache, deal_pages(problem, "meta"))
