"""One call of `lean_attn_with_kvcache`, and the conversion of its arguments."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch

from leanbench.core.extras import NO_EXTRAS, Extras
from leanbench.core.inputs import AttentionInputs, Peers
from leanbench.kernels.lean.configs import LeanConfig

#: 16-bit dtypes, which kernels compute in.
HALVES = (torch.float16, torch.bfloat16)
#: Symbols of a tracer stay symbols. A union of types takes longer to build than to check.
WHOLE_NUMBERS = (int, torch.SymInt)
#: flash-attn's default window.
NO_WINDOW = (-1, -1)
#: Most tokens of a chunk: kernels count in 32 bits.
_MOST_CHUNK = (1 << 31) - 1
#: Exceptions of `float` for non-numbers, huge numbers and tensors without data.
NOT_A_NUMBER = (TypeError, ValueError, OverflowError, RuntimeError)


class Call(NamedTuple):
    """Arguments that reach the kernel; shapes as in leanbench.attention.decode."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    #: Lengths on the device; None: `length`.
    cache_seqlens: torch.Tensor | None = None
    #: Tokens of every sequence, appended ones included; None: all.
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
    #: GPUs that share the sequences; None: this GPU only.
    peers: Peers | None = None
    #: True for `lean_mla_with_kvcache`: `k_cache` and `v_cache` are both its latent cache.
    latent: bool = False
    #: Number of the call for `leanbench.attention.fast` to take over later ones; 0: it does not.
    learns: int = 0

    @property
    def capacity(self) -> int:
        """Maximum number of tokens of one sequence in the cache."""
        pages = 1 if self.block_table is None else self.block_table.shape[-1]
        return self.k_cache.shape[1] * pages

    @property
    def has_table_of_heads(self) -> bool:
        """True if each KV head has its own pages."""
        return self.block_table is not None and self.block_table.dim() == 3

    @property
    def context(self) -> int:
        """Number of tokens of every sequence; with lengths on the device, the capacity."""
        return self.capacity if self.length is None else self.length

    @property
    def all_extras(self) -> Extras:
        """Extras of the call, never None."""
        return NO_EXTRAS if self.extras is None else self.extras

    @property
    def q_len(self) -> int:
        """Maximum number of query tokens of one sequence."""
        if self.extras is not None and self.extras.max_seqlen_q is not None:
            return self.extras.max_seqlen_q
        return self.q.shape[1] if self.q.dim() == 4 else 1

    @property
    def batch(self) -> int:
        """Number of sequences."""
        starts = self.all_extras.cu_seqlens_q
        return self.q.shape[0] if starts is None else starts.shape[0] - 1

    @property
    def new_tokens(self) -> int:
        """Number of tokens appended to every sequence; 0 with `cu_seqlens_k_new`."""
        return self.all_extras.new_tokens

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Shape of the output."""
        return (*self.q.shape[:-1], self.v_cache.shape[3])

    @property
    def out_dtype(self) -> torch.dtype:
        """Dtype of the output: that of `q`, or bf16 for fp8."""
        return self.q.dtype if self.q.dtype in HALVES else torch.bfloat16

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """Shape of the LSE."""
        if self.all_extras.cu_seqlens_q is not None:
            return self.q.shape[1], self.q.shape[0]
        return self.q.shape[0], self.q.shape[2], self.q.shape[1]

    def without_spare_rows(self) -> Call:
        """Drop rows of contiguous caches past the batch, which flash-attn does not read.

        Returns the same object if there are none.
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

    def inputs(self, out: torch.Tensor, lse: torch.Tensor) -> AttentionInputs:
        """Return the tensors of a launch that writes `out` and `lse`."""
        scale = self.softmax_scale
        return AttentionInputs(
            q=self.q,
            k_cache=self.k_cache,
            v_cache=self.v_cache,
            cache_seqlens=self.cache_seqlens,
            context=self.capacity if self.length is None else self.length,
            softmax_scale=self.q.shape[-1] ** -0.5 if scale is None else scale,
            out=out,
            lse=lse,
            block_table=self.block_table,
            # The last query token sees all tokens either way.
            causal=self.causal or self.q_len == 1,
            peers=self.peers,
            latent=self.latent,
            **({} if self.extras is None else self.extras._asdict()),
        )


def check_types(**tensors: Any) -> None:
    """Raise TypeError for the first argument that is not a tensor."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is of type {type(tensor).__name__}: expected a torch.Tensor")


def short_repr(value: Any) -> str:
    """Return the repr of a value, or its type if that is long."""
    text = repr(value)
    is_short = len(text) < 100 and "\n" not in text
    return text if is_short else f"of type {type(value).__name__}"


def flag(name: str, value: Any, function: str = "lean_attn_with_kvcache") -> bool:
    """Convert 0, 1, a numpy bool or a one-element CPU tensor to a bool.

    Raises:
        NotImplementedError: A tensor with one value per sequence.
        ValueError: Any other value.
    """
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        raise NotImplementedError(
            f"{function} does not support {name} of each sequence, a tensor {tuple(value.shape)}:"
            " pass True or False, and the sequences in two calls"
        )
    on_device = isinstance(value, torch.Tensor) and value.device.type != "cpu"
    try:
        if not on_device and value in (0, 1):
            return bool(value)
    except ValueError:
        # An array with several elements.
        pass
    raise ValueError(f"{name} is {short_repr(value)}: expected True or False")


def is_fp8(tensor: torch.Tensor) -> bool:
    """Return True for fp8. torch.compile warns of cached functions such as `fp8_name`."""
    return tensor.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)


def check_splits(num_splits: Any) -> None:
    """Check the hint `num_splits`, which is ignored.

    Raises:
        ValueError: It is not a whole number.
    """
    if isinstance(num_splits, bool) or not hasattr(type(num_splits), "__index__"):
        raise ValueError(
            f"num_splits is {short_repr(num_splits)}: expected a whole number, which is ignored"
        )


def host_length(cache_seqlens: Any) -> int | None:
    """Convert a length on the host; None, for all tokens, stays None.

    Raises:
        ValueError: It is not a whole number.
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


def effective_max_seqlen_q(q: torch.Tensor, cu_seqlens_q: Any, max_seqlen_q: Any) -> Any:
    """Return `max_seqlen_q` limited to the tokens of packed queries; None without them.

    Values that are not whole numbers are left for `check_tensors`.
    """
    if cu_seqlens_q is None or q.dim() != 3:
        return None if cu_seqlens_q is None else max_seqlen_q
    if max_seqlen_q is None:
        return q.shape[0]
    if not isinstance(max_seqlen_q, WHOLE_NUMBERS):
        max_seqlen_q = as_int(max_seqlen_q)
        if not isinstance(max_seqlen_q, int):
            return max_seqlen_q
    is_symbol = isinstance(max_seqlen_q, torch.SymInt) or isinstance(q.shape[0], torch.SymInt)
    return max_seqlen_q if is_symbol else min(max_seqlen_q, q.shape[0])


def cap_from(softcap: Any) -> float:
    """Convert a soft cap; negative ones mean 0, as in flash-attn.

    Raises:
        ValueError: It is not a number.
    """
    try:
        cap = float(softcap)
    except NOT_A_NUMBER:
        raise ValueError(
            f"softcap is {short_repr(softcap)}: expected 0 for none, or a number above it"
        ) from None
    # NaN stays NaN and is rejected later.
    return 0.0 if cap < 0 else cap


def chunk_from(attention_chunk: Any) -> int:
    """Convert the tokens of a chunk.

    Raises:
        ValueError: They are no whole number of 0 to `_MOST_CHUNK`.
    """
    chunk = as_int(attention_chunk)
    # A bool is no number.
    if type(chunk) not in WHOLE_NUMBERS or not 0 <= chunk <= _MOST_CHUNK:
        raise ValueError(
            f"attention_chunk is {short_repr(chunk)}: expected a number of tokens, at most"
            f" {_MOST_CHUNK}, or 0 for no chunks"
        )
    return chunk


def as_int(number: Any) -> Any:
    """Convert a whole number of another type, such as numpy's.

    Other values are left for `check_tensors`. So are tensors: their number could change under a
    prepared launch.
    """
    # torch.compile's symbols are ints without the attributes of one.
    is_done = isinstance(number, (int, torch.SymInt, torch.Tensor))
    if is_done or not hasattr(number, "__index__"):
        return number
    try:
        return operator.index(number)
    except TypeError:
        # An array with several elements.
        return number


def expand_scales(scales: Any, q: torch.Tensor, k_cache: torch.Tensor, cu_seqlens_q: Any) -> Any:
    """Expand scales to (batch, kv_heads) if possible; others are left for the checks to reject."""
    if not isinstance(scales, torch.Tensor) or k_cache.dim() != 4 or not q.dim():
        return scales
    batch = q.shape[0]
    if isinstance(cu_seqlens_q, torch.Tensor) and cu_seqlens_q.dim() == 1:
        batch = cu_seqlens_q.shape[0] - 1
    shape = (batch, k_cache.shape[2])
    if scales.shape == shape or scales.dim() > 2 or scales.layout is not torch.strided:
        return scales
    sizes = zip(reversed(scales.shape), reversed(shape), strict=False)
    return scales.expand(shape) if all(size in (1, full) for size, full in sizes) else scales


def effective_window(
    window_size: Any,
    causal: bool,
    q: torch.Tensor,
    max_seqlen_q: int | None,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
) -> tuple[int, int]:
    """Return (left, right) of a window; -1 for a side that hides no token.

    Raises:
        ValueError: It is not a pair of whole numbers.
    """
    if window_size is NO_WINDOW or window_size is None:
        return NO_WINDOW
    try:
        left, right = (-1 if side is None else side for side in window_size)
        left = left if isinstance(left, WHOLE_NUMBERS) else operator.index(left)
        right = right if isinstance(right, WHOLE_NUMBERS) else operator.index(right)
    except (TypeError, ValueError):
        raise ValueError(
            f"window_size is {window_size!r}: expected (left, right), two whole numbers, -1 or None"
            " for no limit"
        ) from None
    q_len = q.shape[1] if q.dim() == 4 else max_seqlen_q
    # What is no number is rejected later.
    q_len = q_len if isinstance(q_len, WHOLE_NUMBERS) else None
    capacity = k_cache.shape[1] if k_cache.dim() == 4 else 0
    if block_table is not None and block_table.dim() in (2, 3):
        capacity *= block_table.shape[-1]
    left = left if 0 <= left < capacity else -1
    # The first query token is q_len - 1 tokens before the last, before all tokens of a shorter
    # cache. A narrower side stays even if it hides nothing: it makes flash-attn rotate each query
    # by its own position.
    reach = capacity if q_len is None or capacity >= q_len else q_len - 1
    right = -1 if causal or q_len == 1 or not 0 <= right < reach else right
    return left, right  # pyright: ignore[reportReturnType]
