"""What is asked of a kernel: the shapes of one decode attention call, its bytes and its
arithmetic.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from leanbench.core.errors import UserError

HEAD_DIMS = (64, 80, 96, 128, 256)
DTYPES = ("fp16", "bf16")
KV_LAYOUTS = ("HND", "NHD")
PAGE_SIZES = (16, 32, 64, 128, 256)
#: Speculative decoding drafts a few tokens; more of them are a prefill, which other kernels are
#: made for.
MAX_Q_LEN = 16
#: More sequences than any GPU has memory for, and few enough for a length each.
MAX_BATCH = 2**20
#: Above any GPU's memory by far, and below what 64 bits count.
MAX_KV_BYTES = 2**60
ELEMENT_BYTES = 2  # both dtypes


@dataclass(frozen=True)
class AttentionProblem:
    """One decode attention call: `q_len` new tokens per sequence attend to the cached tokens.

    The new tokens are the last ones of the cache, and none sees those after it (the causal tail):
    query position i of a sequence sees the tokens j <= context - q_len + i.

    Raises:
        UserError: a shape or name that no kernel here could run; the sentence says the limit and
            the fix.
    """

    batch: int
    q_heads: int
    kv_heads: int
    #: Cached tokens, the new ones included: one number for all sequences, or one per sequence (a
    #: ragged batch).
    context: int | tuple[int, ...]
    head_dim: int
    dtype: str = "fp16"
    #: `HND`: (batch, kv_heads, tokens, head_dim), the paper's. `NHD`: (batch, tokens, kv_heads,
    #: head_dim), flash-attn's. A paged cache has pages for the batch, and a page's tokens.
    kv_layout: str = "HND"
    q_len: int = 1
    #: Tokens of a page; None: a sequence's tokens lie one after the other.
    page_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("batch", "q_heads", "kv_heads", "q_len"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}, it must be at least 1")
        if self.batch > MAX_BATCH:
            raise UserError(
                f"batch {self.batch} is above the limit of {MAX_BATCH}: choose a smaller number"
            )
        if self.q_heads % self.kv_heads:
            raise UserError(
                f"q_heads {self.q_heads} is not a multiple of kv_heads {self.kv_heads}: every KV"
                " head serves the same number of query heads, choose kv_heads that divides q_heads"
            )
        if self.head_dim not in HEAD_DIMS:
            raise UserError(
                f"head_dim {self.head_dim} is not supported, choose one of {_either(HEAD_DIMS)}"
            )
        if self.dtype not in DTYPES:
            raise UserError(f"dtype {self.dtype!r} is not supported, choose {_either(DTYPES)}")
        if self.kv_layout not in KV_LAYOUTS:
            raise UserError(
                f"kv_layout {self.kv_layout!r} is not supported, choose {_either(KV_LAYOUTS)}"
            )
        if self.q_len > MAX_Q_LEN:
            raise UserError(
                f"q_len {self.q_len} is above {MAX_Q_LEN}: decode adds a few tokens at a time,"
                f" choose 1 to {MAX_Q_LEN}"
            )
        if self.page_size is not None and self.page_size not in PAGE_SIZES:
            raise UserError(
                f"page_size {self.page_size} is not supported, choose {_either(PAGE_SIZES)}, or"
                " none for a contiguous cache"
            )
        if self.is_ragged and len(self.contexts) != self.batch:
            raise UserError(
                f"{len(self.contexts)} context lengths were given for a batch of {self.batch}: give"
                " one per sequence"
            )
        least = self.context if isinstance(self.context, int) else min(self.context)
        if least < 1:
            raise UserError(
                f"context {least} is below 1: decode attends to at least one cached token"
            )
        if self.kv_allocated_bytes > MAX_KV_BYTES:
            raise UserError(
                f"K and V would take {self.kv_allocated_bytes} bytes, the limit is {MAX_KV_BYTES}: "
                "choose a shorter context, fewer KV heads or a smaller batch"
            )

    @property
    def is_ragged(self) -> bool:
        return not isinstance(self.context, int)

    @property
    def contexts(self) -> tuple[int, ...]:
        """Cached tokens of each sequence, `batch` numbers."""
        return (
            (self.context,) * self.batch if isinstance(self.context, int) else tuple(self.context)
        )

    @property
    def max_context(self) -> int:
        return self.context if isinstance(self.context, int) else max(self.context)

    @property
    def total_context(self) -> int:
        """Cached tokens of all sequences together."""
        return self.batch * self.context if isinstance(self.context, int) else sum(self.context)

    @property
    def page_counts(self) -> tuple[int, ...]:
        """Pages of each sequence; of a paged cache."""
        assert self.page_size is not None
        return tuple(-(-context // self.page_size) for context in self.contexts)

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.q_heads // self.kv_heads

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that any kernel must read at least once."""
        return 2 * self.total_context * self.kv_heads * self.head_dim * ELEMENT_BYTES

    @property
    def kv_allocated_bytes(self) -> int:
        """Bytes of the K and V caches as allocated: every sequence has room for the longest, or its
        pages.
        """
        if self.page_size is None:
            tokens = self.batch * self.max_context
        elif isinstance(self.context, int):
            tokens = self.batch * -(-self.context // self.page_size) * self.page_size
        else:
            tokens = sum(self.page_counts) * self.page_size
        return 2 * tokens * self.kv_heads * self.head_dim * ELEMENT_BYTES

    @property
    def io_bytes(self) -> int:
        """`kv_bytes` plus one read of Q and one write of the output and of the LSE (fp32)."""
        rows = self.batch * self.q_len * self.q_heads
        return self.kv_bytes + 2 * rows * self.head_dim * ELEMENT_BYTES + 4 * rows

    @property
    def flops(self) -> int:
        """Multiply and add counted apart, Q·K and P·V of the tokens that a query sees, softmax not
        counted.
        """
        # The last query sees n tokens, the one before it n - 1, and so on while there are any.
        seen = sum(
            n * rows - rows * (rows - 1) // 2
            for n in self.contexts
            for rows in (min(n, self.q_len),)
        )
        return 4 * self.q_heads * seen * self.head_dim

    @property
    def label(self) -> str:
        """A short name for people: ``b1 h32/8 n4096 d128 fp16 HND``."""
        heads = f"{self.q_heads}" if self.group_size == 1 else f"{self.q_heads}/{self.kv_heads}"
        context = (
            f"ragged{self.max_context}x{self.total_context}"
            if self.is_ragged
            else f"{self.max_context}"
        )
        q_len = "" if self.q_len == 1 else f" q{self.q_len}"
        page_size = "" if self.page_size is None else f" p{self.page_size}"
        return (
            f"b{self.batch} h{heads} n{context} d{self.head_dim}{q_len}{page_size} {self.dtype}"
            f" {self.kv_layout}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; `from_dict` reads it back. Without a page size there is no such key: a
        problem reads, and its cell is named, as in runs from before there were pages.
        """
        fields = asdict(self)
        fields["context"] = list(self.contexts) if self.is_ragged else self.context
        if self.page_size is None:
            del fields["page_size"]
        return fields

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> AttentionProblem:
        """What `to_dict` gave, through JSON or not.

        Raises:
            KeyError, TypeError: a field is missing, unknown or of another type.
            UserError: the fields are no problem.
        """
        context = fields["context"]
        lengths = [context] if isinstance(context, int) else context
        page_size = fields.get("page_size")
        numbers = [
            *lengths,
            *(fields[name] for name in ("batch", "q_heads", "kv_heads", "head_dim")),
            page_size or 1,
        ]
        # JSON from elsewhere: 8.0 and true compare as numbers do, and would go far.
        if any(type(number) is not int for number in (*numbers, fields.get("q_len", 1))):
            raise TypeError("a shape is no whole number")
        return cls(**{**fields, "context": context if isinstance(context, int) else tuple(context)})


def _either(values: tuple[Any, ...]) -> str:
    return ", ".join(map(str, values[:-1])) + f" or {values[-1]}"
