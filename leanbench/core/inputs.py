"""Tensors of one decode attention call, and random ones for a problem."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from leanbench.core.kinds import NO_PAGE_SCALES, SAME, most_behind
from leanbench.core.problem import AttentionProblem
from leanbench.core.row_scales import encode_rows

if TYPE_CHECKING:
    import torch


#: Alignment of windows in a cache, in tokens.
_WINDOW_GRANULE = 64


class Peers(NamedTuple):
    """GPUs that share every sequence's tokens and merge their results."""

    #: Number of GPUs, and the rank of this one.
    ranks: int
    rank: int
    #: Address of PeerGroup in kernels/lean/params.cuh, in this GPU's memory.
    group: int
    #: torch.distributed.ProcessGroup.
    processes: Any = None


@dataclass(frozen=True)
class AttentionInputs:
    """Shapes and meanings are those of flash-attn's `flash_attn_with_kvcache`. The layout (NHD or
    HND) is in the strides of `k_cache` and `v_cache`.

    Query i of a sequence has position p = tokens - q_len + i. Tokens count from the end of
    `cache_leftpad` and include appended ones.
    """

    #: (batch, q_len, q_heads, head_dim); with `cu_seqlens_q`: (all query tokens, q_heads,
    #: head_dim).
    q: torch.Tensor
    #: (batch, capacity, kv_heads, head_dim), head_dim contiguous; past a sequence's end anything,
    #: even NaN. With a `block_table`: (pages, page_size, kv_heads, head_dim), the pages of all
    #: sequences. Dtype of `q`, float8_e4m3fn or float8_e5m2.
    k_cache: torch.Tensor
    #: Like `k_cache`; head_dim can differ.
    v_cache: torch.Tensor
    #: (batch,), int32, on the device: tokens in the cache before the call, padding included,
    #: clamped to 0..`context`. None: every sequence has `context` tokens.
    cache_seqlens: torch.Tensor | None
    #: Tokens of every sequence, appended ones included; with `cache_seqlens`, the capacity.
    context: int
    softmax_scale: float
    #: Like `q`, with head_dim of `v_cache`; bf16 or fp16 if `q` is fp8.
    out: torch.Tensor
    #: (batch, q_heads, q_len), fp32, natural logarithm; with `cu_seqlens_q`: (q_heads, all query
    #: tokens).
    lse: torch.Tensor
    #: (batch, pages of the capacity), int32, contiguous, on the device: page of the caches for each
    #: page of a sequence; any page past its end. (batch, kv_heads, pages): of each KV head its own.
    #: None for a contiguous cache.
    block_table: torch.Tensor | None = None
    #: A query sees the tokens j <= p; False: all tokens.
    causal: bool = True
    #: A query sees the tokens j >= p - window_left and j <= p + window_right; -1 for no limit.
    window_left: int = -1
    window_right: int = -1
    #: The query at p sees attention_chunk tokens from p - p % attention_chunk; 0 for no limit.
    attention_chunk: int = 0
    #: Scores s = scale x q.k become softcap x tanh(s / softcap), before the ALiBi bias; 0 for none.
    softcap: float = 0.0
    #: (q_heads,), fp32, fp16 or bf16: extra logit in a row's denominator and in the LSE.
    sinks: torch.Tensor | None = None
    #: (q_heads,) or (batch, q_heads), fp32: scores less slope x |p - j|.
    alibi_slopes: torch.Tensor | None = None
    #: (batch,), int32: first token of a sequence in the cache.
    cache_leftpad: torch.Tensor | None = None
    #: (batch,), int32: row of a sequence in contiguous caches.
    cache_batch_idx: torch.Tensor | None = None
    #: (batch, new tokens, kv_heads, head_dim), in the caches' dtype: written to the caches from
    #: `cache_seqlens` on, then attended to. Tokens beyond the capacity are ignored, and so are
    #: those of a sequence without query tokens (`cu_seqlens_q`).
    k_new: torch.Tensor | None = None
    v_new: torch.Tensor | None = None
    #: (batch + 1,), int32: first new token of each sequence in `k_new` and `v_new`, which are then
    #: (new tokens, kv_heads, head_dim). None for equal numbers.
    cu_seqlens_k_new: torch.Tensor | None = None
    #: (positions, rotary_dim / 2), in the dtype of `q`: rotation of `k_new` and `q`, rounded to
    #: their dtype. Token i of `k_new`, and query i with a causal mask or a window, uses row
    #: `cache_seqlens` + i; every query uses row `cache_seqlens` otherwise.
    rotary_cos: torch.Tensor | None = None
    rotary_sin: torch.Tensor | None = None
    #: (batch,), int32: first rows of the tables, instead of `cache_seqlens`.
    rotary_seqlens: torch.Tensor | None = None
    #: Columns 0 and 1 are rotated together, and so on; False: 0 and rotary_dim / 2 (GPT-NeoX).
    rotary_interleaved: bool = False
    #: (batch, kv_heads), fp32, any strides: factor of fp8 numbers; a query head uses its KV head's.
    #: None for 1.
    q_descale: torch.Tensor | None = None
    k_descale: torch.Tensor | None = None
    v_descale: torch.Tensor | None = None
    #: (pages,) or (pages, kv_heads), fp32, any strides: additional factor of the fp8 numbers of
    #: each page, including `k_new` and `v_new` written to it. Both or neither.
    k_page_descale: torch.Tensor | None = None
    v_page_descale: torch.Tensor | None = None
    #: (batch + 1,), int32: first query token of each sequence in `q`, and their total. None for
    #: equal numbers.
    cu_seqlens_q: torch.Tensor | None = None
    #: Maximum number of query tokens of a sequence, with `cu_seqlens_q`.
    max_seqlen_q: int | None = None
    #: Output and LSE over other tokens of the sequences, which the call's include. Contiguous: (all
    #: query tokens, q_heads, head_dim of V), in the dtype of `out`, and (q_heads x query tokens,).
    prior: torch.Tensor | None = None
    prior_lse: torch.Tensor | None = None
    #: Tokens of `prior` that `cache_seqlens` counts; `context` and the table are without them.
    prior_tokens: int = 0
    #: Tokens in the pages that all rows of the `block_table` begin with; 0 for none.
    shared_prefix: int = 0
    #: True if `v_cache` is a view of the first columns of `k_cache`.
    latent: bool = False
    #: GPUs that share the sequences. The caches have this GPU's tokens, `out` and `lse` are those
    #: of all. None for one GPU.
    peers: Peers | None = None

    @property
    def batch(self) -> int:
        return self.q.shape[0] if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1

    @property
    def q_len(self) -> int:
        """Query tokens of a sequence; the maximum of a packed Q."""
        return self.q.shape[1] if self.max_seqlen_q is None else self.max_seqlen_q

    @property
    def q_heads(self) -> int:
        return self.q.shape[-2]

    @property
    def kv_heads(self) -> int:
        return self.k_cache.shape[2]

    @property
    def group_size(self) -> int:
        return self.q_heads // self.kv_heads

    @property
    def page_size(self) -> int | None:
        """Tokens of a page; None for a contiguous cache."""
        return None if self.block_table is None else self.k_cache.shape[1]

    @property
    def has_table_of_heads(self) -> bool:
        """True if each KV head has its own pages."""
        return self.block_table is not None and self.block_table.dim() == 3

    @property
    def head_dim(self) -> int:
        return self.q.shape[-1]

    @property
    def row_scales(self) -> bool:
        """True if rows have scales inside: see leanbench.core.row_scales."""
        return self.latent and self.k_cache.shape[3] != self.head_dim

    @property
    def value_dim(self) -> int:
        """Columns of V and of the output."""
        return self.v_cache.shape[3]

    @property
    def most_behind(self) -> int:
        """Maximum number of preceding tokens that a query sees; -1 for all."""
        return most_behind(self.window_left, self.attention_chunk)

    @property
    def new_tokens(self) -> int:
        """Tokens that the call appends to each sequence; 0 if `cu_seqlens_k_new` has the
        numbers.
        """
        if self.k_new is None or self.cu_seqlens_k_new is not None:
            return 0
        return self.k_new.shape[1]

    @property
    def capacity(self) -> int:
        """Tokens that the caches have room for in each sequence."""
        pages = 1 if self.block_table is None else self.block_table.shape[-1]
        return self.k_cache.shape[1] * pages

    def read_lengths(self) -> tuple[int, ...]:
        """Return the tokens of each sequence in the cache after the call, padding included.

        Reads the device: for checks and planners, not for launches.
        """
        if self.cu_seqlens_k_new is None and self.cache_seqlens is None:
            return (self.context,) * self.batch
        most = self.context if self.cu_seqlens_k_new is None else self.capacity
        starts = self.read_new_starts()
        return tuple(
            min(cached + end - start, most)
            for cached, start, end in zip(self.read_cached(), starts, starts[1:], strict=False)
        )

    def read_cached(self) -> tuple[int, ...]:
        """Return the tokens of each sequence in the cache before the call. Reads the device."""
        if self.cache_seqlens is None:
            return (self.context - self.new_tokens,) * self.batch
        return tuple((self.cache_seqlens - self.prior_tokens).clamp(0, self.context).tolist())

    def read_new_starts(self) -> tuple[int, ...]:
        """Return the first new token of each sequence, and their total. Reads the device."""
        if self.cu_seqlens_k_new is not None:
            return tuple(self.cu_seqlens_k_new.tolist())
        return tuple(sequence * self.new_tokens for sequence in range(self.batch + 1))

    def read_query_starts(self) -> tuple[int, ...]:
        """Return the first query token of each sequence, and their total. Reads the device."""
        if self.cu_seqlens_q is None:
            return tuple(range(0, (self.batch + 1) * self.q_len, self.q_len))
        return tuple(self.cu_seqlens_q.tolist())

    def poison(self) -> None:
        """Fill the outputs with NaN: an element that no kernel writes then fails every check."""
        self.out.fill_(math.nan)
        self.lse.fill_(math.nan)


def torch_dtype(name: str) -> torch.dtype:
    import torch

    return {
        "fp16": torch.float16,
        "bf16": torch.bfloat16,
        "e4m3": torch.float8_e4m3fn,
        "e5m2": torch.float8_e5m2,
    }[name]


def dtype_name(dtype: torch.dtype) -> str:
    """Return `fp16` or `bf16`."""
    import torch

    return "bf16" if dtype == torch.bfloat16 else "fp16"


def cache_shape(problem: AttentionProblem, columns: int | None = None) -> tuple[int, int, int, int]:
    """Return the shape of K in memory, with room for the capacity; of a paged cache, the pages in
    use.

    Args:
        columns: Columns of V, if they differ from K's.
    """
    rows, tokens = problem.batch + problem.batch_idx, problem.cache_capacity
    if problem.page_size is not None:
        rows, tokens = problem.pages, problem.page_size
    if columns is None:
        columns = problem.token_bytes if problem.row_scales else problem.head_dim
    if problem.kv_layout == "HND":
        return rows, problem.kv_heads, tokens, columns
    return rows, tokens, problem.kv_heads, columns


def query_shape(problem: AttentionProblem) -> tuple[int, ...]:
    if problem.q_lens is not None:
        return sum(problem.q_lens), problem.q_heads, problem.head_dim
    return problem.batch, problem.q_len, problem.q_heads, problem.head_dim


def deal_pages(
    problem: AttentionProblem, device: str | torch.device, generator: torch.Generator | None = None
) -> torch.Tensor | None:
    """Return a block table that gives each page of `cache_shape` to one sequence, in random order,
    or to all of them: those of a shared prefix.

    Entries past a sequence's end are 0. With `select`, the others are no more than that; blocks of
    KV heads are each head's own, and all full but the last one. A contiguous cache has no table:
    None.
    """
    import torch

    if problem.page_size is None:
        return None
    pages = torch.randperm(problem.pages, generator=generator, device=device, dtype=torch.int32)
    shared, pages = pages.tensor_split([problem.shared_prefix // problem.page_size])
    counts = [count - len(shared) for count in problem.page_counts]
    columns, choice = problem.seen.cache_capacity // problem.page_size, problem.choice
    of_heads = (problem.kv_heads,) if choice is not None and choice.by_head else ()
    table = torch.zeros(problem.batch, *of_heads, columns, dtype=torch.int32, device=device)
    owned = zip(table, pages.split(counts), problem.contexts, strict=True)
    for rows, used, context in owned:
        for row in rows.unbind() if of_heads else ():
            full, rest = used.tensor_split([context // problem.page_size])
            order = torch.randperm(len(full), generator=generator, device=device)
            listed = torch.cat([full[order], rest])[:columns]
            row[: len(listed)] = listed
        if not of_heads:
            used = torch.cat([shared, used])[:columns]
            rows[: len(used)] = used
    return table


def inputs_over(
    problem: AttentionProblem,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor | None = None,
    **kinds: Any,
) -> AttentionInputs:
    """Return the call of `problem` on these tensors, outputs not yet written.

    Args:
        q: Shape `query_shape`.
        k_cache: Shape `cache_shape`, on the device of `q`.
        v_cache: Like `k_cache`.
        block_table: Result of `deal_pages`, for a problem with a page size.
        **kinds: Result of `kind_inputs`, and the appended tokens.
    """
    import torch

    assert (block_table is None) == (problem.page_size is None), (
        f"{problem.label} and its block table do not agree"
    )
    if problem.kv_layout == "HND":
        k_cache, v_cache = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    on_device, seen = problem.lengths_on == "device", problem.seen
    lengths = None
    if on_device:
        cached = [context - problem.append for context in seen.contexts]
        lengths = torch.tensor(cached, dtype=torch.int32, device=q.device)
    rows = (problem.batch, problem.q_heads, problem.q_len)
    if problem.q_lens is not None:
        rows = (problem.q_heads, sum(problem.q_lens))
    return AttentionInputs(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        cache_seqlens=lengths,
        context=seen.cache_capacity if on_device else seen.max_context,
        softmax_scale=problem.head_dim**-0.5,
        out=q.new_empty((*q.shape[:-1], problem.value_dim), dtype=torch_dtype(problem.dtype)),
        lse=torch.empty(rows, dtype=torch.float32, device=q.device),
        block_table=block_table,
        **kinds,
    )


def make_inputs(
    problem: AttentionProblem,
    device: str | torch.device,
    seed: int | None = None,
    score_scale: float = 1.0,
) -> AttentionInputs:
    """Return standard normal Q, K and V in the problem's layout, and poisoned outputs.

    Args:
        seed: None for other inputs every time, as checks want them.
        score_scale: Factor of Q. 1 gives scores of standard deviation 1, large values make softmax
            pick single tokens.
    """
    return make_windows(problem, device, 1, seed, score_scale)[0]


def windows_in_cache(problem: AttentionProblem) -> int:
    """Return how many inputs fit in one cache without sharing a token in use, one after the
    other.
    """
    if problem.page_size is not None:
        return 1
    return max(1, problem.cache_capacity // _window_tokens(problem))


def _window_tokens(problem: AttentionProblem) -> int:
    """Return the tokens from one window to the next, in whole blocks of memory."""
    return -(-problem.max_context // _WINDOW_GRANULE) * _WINDOW_GRANULE


def make_windows(
    problem: AttentionProblem,
    device: str | torch.device,
    count: int,
    seed: int | None = None,
    score_scale: float = 1.0,
) -> list[AttentionInputs]:
    """Return inputs as of `make_inputs` over one pool of memory.

    Each has the strides of its own cache. Memory past the end of a sequence can be in use in
    another window.

    Args:
        count: At most `windows_in_cache`.
    """
    import torch

    plain = torch.empty((), dtype=torch_dtype(problem.dtype), device=device)
    kv_dtype, q_dtype = _dtype(problem.kv_dtype, problem), _dtype(problem.q_dtype, problem)
    generator = _generator(device, seed)

    def normal(dtype: torch.dtype, *shape: int, scale: float = 1.0) -> torch.Tensor:
        return plain.new_empty(shape).normal_(0.0, scale, generator=generator).to(dtype)

    shape, v_shape = cache_shape(problem), cache_shape(problem, problem.value_dim)
    token_heads = problem.kv_heads if problem.kv_layout == "NHD" else 1
    step = _window_tokens(problem) * token_heads
    # The last window's last row ends behind a cache.
    last = (count - 1) * step
    if problem.row_scales:
        latents = normal(plain.dtype, math.prod(shape) // shape[-1], problem.head_dim)
        k_pool = encode_rows(latents, problem.value_dim).flatten()
    else:
        k_pool = normal(kv_dtype, math.prod(shape) + last * problem.head_dim)
    v_pool = None
    if not problem.latent:
        v_pool = normal(kv_dtype, math.prod(v_shape) + last * problem.value_dim)
    windows = []
    for start in range(0, count * step, step):
        k_cache = k_pool[start * problem.head_dim :][: math.prod(shape)].view(shape)
        v_cache = k_cache[..., : problem.value_dim]
        if v_pool is not None:
            v_cache = v_pool[start * problem.value_dim :][: math.prod(v_shape)].view(v_shape)
        q = normal(q_dtype, *query_shape(problem), scale=score_scale)
        table = deal_pages(problem, device, generator)
        kinds = kind_inputs(problem, plain, generator)
        if problem.append:
            new = (problem.batch, problem.append, problem.kv_heads)
            kinds["k_new"] = normal(kv_dtype, *new, problem.head_dim)
            kinds["v_new"] = normal(kv_dtype, *new, problem.value_dim)
        windows.append(inputs_over(problem, q, k_cache, v_cache, table, **kinds))
        windows[-1].poison()
    return windows


def _generator(device: str | torch.device, seed: int | None) -> torch.Generator | None:
    """Return a generator; None without memory to fill."""
    import torch

    if torch.device(device).type == "meta":
        return None
    generator = torch.Generator(device)
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return generator


def _dtype(name: str, problem: AttentionProblem) -> torch.dtype:
    return torch_dtype(problem.dtype if name == SAME else name)


def shape_only(problem: AttentionProblem) -> AttentionInputs:
    """Return inputs without memory. A compiler needs only shapes, strides and dtypes."""
    return make_inputs(problem, "meta")


#: As in flash-attn's tests.
_LARGEST_SLOPE = 0.3


def kind_inputs(
    problem: AttentionProblem, like: torch.Tensor, generator: torch.Generator | None = None
) -> dict[str, Any]:
    """Draw the tensors that only some kinds have. Return the fields of AttentionInputs that are not
    at their defaults.

    Args:
        like: Tensor with the device and the problem's dtype.
    """
    import torch

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(shape, dtype=torch.float32, device=like.device, generator=generator)

    def int32(numbers: Any) -> torch.Tensor:
        return torch.tensor(tuple(numbers), dtype=torch.int32, device=like.device)

    fields: dict[str, Any] = {
        "causal": problem.causal,
        "window_left": problem.window_left,
        "window_right": problem.window_right,
        "attention_chunk": problem.attention_chunk,
        "softcap": problem.softcap,
        "rotary_interleaved": problem.rotary_interleaved,
        "latent": problem.latent,
        "shared_prefix": problem.shared_prefix,
    }
    if problem.sinks:
        fields["sinks"] = like.new_empty(problem.q_heads).normal_(generator=generator)
    if problem.alibi:
        fields["alibi_slopes"] = _LARGEST_SLOPE * uniform(problem.batch, problem.q_heads)
    if problem.leftpad:
        fields["cache_leftpad"] = int32(problem.leftpads)
    if problem.batch_idx:
        # One cycle through all rows: no sequence has the row of its own number, so that a kernel
        # without the index is always wrong.
        order = torch.randperm(problem.batch + 1, device=like.device, generator=generator)
        rows = torch.empty_like(order)
        rows[order] = order.roll(1)
        fields["cache_batch_idx"] = rows[: problem.batch].int()
    if problem.rotary_dim:
        # More queries than appended tokens stand at positions past the cache's end.
        positions = problem.cache_capacity + problem.q_len
        angle = 2 * math.pi * uniform(positions, problem.rotary_dim // 2)
        fields["rotary_cos"] = angle.cos().to(like.dtype)
        fields["rotary_sin"] = angle.sin().to(like.dtype)
    scales = ("q_descale",) if problem.q_dtype != SAME else ()
    scales += ("k_descale", "v_descale") if problem.kv_dtype != SAME else ()
    for name in scales if problem.scaled and not problem.row_scales else ():
        if problem.latent and name == "v_descale":
            fields[name] = fields["k_descale"]
        elif problem.latent and name == "k_descale":
            # One number for the whole cache, which includes V.
            fields[name] = (0.5 + uniform(1, 1)).expand(problem.batch, 1)
        elif problem.shared_prefix:
            # One number for all sequences, which read the same pages.
            fields[name] = (0.5 + uniform(1, problem.kv_heads)).expand(problem.batch, -1)
        else:
            fields[name] = 0.5 + uniform(problem.batch, problem.kv_heads)
    if problem.page_scales != NO_PAGE_SCALES:
        for name in ("k_page_descale", "v_page_descale"):
            per_page = 2.0 ** (4 * uniform(problem.pages, problem.kv_heads) - 2)
            of_heads = problem.page_scales == "page-head"
            fields[name] = per_page if of_heads else per_page[:, 0].clone()
    if problem.q_lens is not None:
        fields["cu_seqlens_q"] = int32(itertools.accumulate(problem.q_lens, initial=0))
        fields["max_seqlen_q"] = problem.q_len
    return fields
