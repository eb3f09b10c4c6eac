"""Problem definition: shapes of one decode attention call, and its bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress
from operator import attrgetter, is_not
from typing import Any

from leanbench.core import kinds
from leanbench.core.axis import Axis, Capacity, Whole, Words, axes_of, axis, resolve_capacity
from leanbench.core.errors import InvalidValue, Reason
from leanbench.core.lengths import write_lengths
from leanbench.core.llm.layers import Layer
from leanbench.core.llm.model import WholeModel, WholeModels, read_model
from leanbench.core.parallel import NONE, GpuCounts, GpuShares, counts_of, shard_start
from leanbench.core.row_scales import GROUP, row_bytes

#: Supported by most kernels; a problem may have any multiple of 8.
HEAD_DIMS = (64, 80, 96, 128, 256)
DTYPES = ("fp16", "bf16")
KV_LAYOUTS = ("HND", "NHD")
LENGTHS_ON = ("host", "device")
#: Supported by most kernels; a problem may have any.
PAGE_SIZES = (16, 32, 64, 128, 256)
#: Maximum of most kernels: speculative decoding drafts a few tokens, a prefill chunk has more.
MAX_Q_LEN = 16
#: More sequences than fit any GPU, and few enough for a length each.
MAX_BATCH = 2**20
#: Far above any GPU's memory. 64 bits can count it.
MAX_KV_BYTES = 2**60
ELEMENT_BYTES = 2  # both dtypes
_FP8_BYTES = 1
#: Axes by which the order of tokens matters, and those of another choice.
_ORDERED = {
    *("capacity", "window_left", "window_right", "attention_chunk", "alibi", "leftpad", "append"),
    *("q_lens", "parallel", "whole_model"),
}
#: Axes by which sequences see different tokens of pages that they share, or change them.
_OWN = {
    *("window_left", "window_right", "attention_chunk", "alibi", "leftpad", "append", "select"),
    *("latent", "parallel", "whole_model"),
}
#: Maximum number of runs of equal lengths in a label; beyond, it has the maximum and the sum.
_LABEL_LENGTHS = 3


@dataclass(frozen=True)
class AttentionProblem:
    """One decode attention call: `q_len` new tokens per sequence attend to the cached tokens.

    The new tokens are the last ones of the cache. Query position i of a sequence sees the tokens
    j <= context - q_len + i (the causal tail).

    Raises:
        InvalidValue: A value that no kernel could run.
    """

    batch: int = axis(Whole(MAX_BATCH), "b", swept=(1,), help="Sequences: 1,8,64.")
    q_heads: int = axis(Whole(), part_of="heads", label="query heads")
    kv_heads: int = axis(Whole(), part_of="heads", label="KV heads")
    #: Cached tokens, new ones included: one number, or one per sequence (a ragged batch).
    context: int | tuple[int, ...] = axis(
        Whole(syntax="a whole number such as 4096, 4k (4 x 1024) or 1m (1024 x 1024)"),
        "n",
        swept=(1024, 4096, 16384),
        help="Cached tokens: 1k,4k,16k or 1k:512k:x2 or 4k:32k:+4k; k is 1024.",
    )
    head_dim: int = axis(
        Whole(1024, multiple_of=8, syntax="a multiple of 8 such as 128"),
        "d",
        swept=(128,),
        help=f"A multiple of 8; most kernels take {', '.join(map(str, HEAD_DIMS))}.",
    )
    dtype: str = axis(
        Words(DTYPES), default="fp16", always_in_label=True, always_in_json=True, help="fp16,bf16."
    )
    #: `HND`: (batch, kv_heads, tokens, head_dim), as in the paper. `NHD`: (batch, tokens, kv_heads,
    #: head_dim), as in flash-attn. A paged cache has pages for the batch, and a page's tokens.
    kv_layout: str = axis(
        Words(KV_LAYOUTS, str.upper),
        default="HND",
        always_in_label=True,
        always_in_json=True,
        help="HND,NHD.",
        label="layout",
    )
    q_len: int = axis(
        Whole(),
        "q",
        default=1,
        always_in_json=True,
        help=f"New tokens per sequence, in most kernels up to {MAX_Q_LEN}: 1,4.",
        refusal="decodes one query token per sequence",
    )
    #: Tokens of a page; None for a contiguous cache.
    page_size: int | None = axis(
        Whole(
            or_none="a contiguous cache",
            syntax="a number of tokens such as 64, or none for a contiguous cache",
        ),
        "p",
        default=None,
        help="Tokens of a page: 16,64,256; none is a contiguous cache.",
        label="page size",
        phrase="pages of {}",
        refusal="takes no paged cache",
    )
    #: Tokens allocated per sequence; None for exactly the longest sequence. A multiple of the
    #: longest, ``4x``, is converted to tokens.
    capacity: int | str | None = axis(
        Capacity(),
        "c",
        default=None,
        help="Room for each sequence in the cache: exact (for the longest one), 4x, 32k.",
        refusal="takes no cache longer than its sequences",
    )
    #: `host`: one length for all, which the caller passes as a number; `device`: a tensor, as in
    #: servers, and the host knows only the capacity. Different lengths are always on the device.
    lengths_on: str = axis(
        Words(LENGTHS_ON),
        default="host",
        help="host,device; lengths that differ are always on the device.",
        label="lengths on",
        phrase="lengths on the {}",
        refusal="takes no lengths from the device",
    )
    #: Normalized to True for one query token, which is the last.
    causal: bool = kinds.CAUSAL
    #: The query token at position p sees the tokens from p - window_left to p + window_right; -1
    #: for no limit. A causal mask is stricter to the right.
    window_left: int = kinds.WINDOW_LEFT
    window_right: int = kinds.WINDOW_RIGHT
    #: The query token at position p sees attention_chunk tokens from p - p % attention_chunk; 0
    #: for no limit.
    attention_chunk: int = kinds.ATTENTION_CHUNK
    #: 0 for none.
    softcap: float = kinds.SOFTCAP
    sinks: bool = kinds.SINKS
    alibi: bool = kinds.ALIBI
    #: Padding, a part of the context; see `leftpads`.
    leftpad: bool = kinds.LEFTPAD
    batch_idx: bool = kinds.BATCH_IDX
    #: Appended tokens, the last of the context; 0 for none.
    append: int = kinds.APPEND
    #: 0 for no rotation.
    rotary_dim: int = kinds.ROTARY_DIM
    rotary_interleaved: bool = kinds.ROTARY_INTERLEAVED
    kv_dtype: str = kinds.KV_DTYPE
    q_dtype: str = kinds.Q_DTYPE
    #: See `value_dim`.
    v_head_dim: int | None = kinds.V_HEAD_DIM
    #: Query tokens per sequence, with their maximum in `q_len`; None for `q_len` in all.
    q_lens: tuple[int, ...] | None = kinds.Q_LENS
    #: Multi-head latent attention: the cache has only K, and V is its first `value_dim` columns.
    latent: bool = kinds.LATENT
    #: fp8 caches and Q have `k_descale`, `v_descale` and `q_descale`.
    scaled: bool = kinds.SCALED
    #: GPUs that share the call; heads and contexts are the total.
    parallel: str = axis(
        GpuShares(),
        default=NONE,
        help="GPUs that share a problem: cp:2 its tokens, tp:2 its heads, cp:2xtp:2 both.",
        label="GPUs",
        refusal="runs on one GPU",
    )
    #: Model of a whole decode step, in the syntax of leanbench.core.llm.model; heads and head_dim
    #: are those of its layers. None for one call of attention.
    whole_model: str | None = axis(
        WholeModels(),
        "model=",
        default=None,
        help="A decode step of a whole model: opt-6.7b,llama-3-70b:tp=8 or a config.json; heads and"
        " head_dim follow.",
        metavar="MODEL",
        label="whole model",
        phrase="a whole step of {}",
        refusal="computes attention alone",
    )
    #: fp8 pages have `k_page_descale` and `v_page_descale`, in addition to those of `scaled`.
    page_scales: str = kinds.PAGE_SCALES
    #: Tokens that each sequence sees, of those in its cache; None for all. See `choice`, `seen`.
    select: int | str | None = kinds.SELECT
    #: See leanbench.core.row_scales; there are no other scales.
    row_scales: bool = kinds.ROW_SCALES
    #: Tokens at the beginning of every sequence, in the same pages; 0 for none.
    shared_prefix: int = kinds.SHARED_PREFIX

    def __post_init__(self) -> None:
        # Fast for defaults: every call of the API with a new shape makes a problem.
        values = _ALL(self)
        for field, value in compress(
            zip(PROBLEM_AXES, values, strict=True), map(is_not, values, _ALL_DEFAULTS)
        ):
            if field.name != "context":
                field.check(value)
        if self.q_heads % self.kv_heads:
            fix = "choose a number of KV heads that divides the query heads"
            raise InvalidValue("q_heads", self.q_heads, Reason.NOT_A_MULTIPLE, fix, self.kv_heads)
        if self.is_ragged:
            self._check_number("context lengths", self.contexts)
        least = self.context if isinstance(self.context, int) else min(self.context)
        if least < 1:
            raise InvalidValue("context", least, Reason.BELOW_MINIMUM, "write at least 1 token", 1)
        self._normalize()
        self._check_kinds(least)
        if (size := self.kv_allocated_bytes) > MAX_KV_BYTES:
            fix = "choose a shorter context, fewer KV heads or a smaller batch"
            raise InvalidValue("K and V bytes", size, Reason.ABOVE_MAXIMUM, fix, MAX_KV_BYTES)

    def _check_number(self, name: str, lengths: tuple[int, ...]) -> None:
        if len(lengths) != self.batch:
            name, fix = f"number of {name}", "give one per sequence"
            raise InvalidValue(name, len(lengths), Reason.NOT_ONE_EACH, fix, self.batch)

    def _normalize(self) -> None:
        """Canonicalize equivalent field values."""
        same: dict[str, Any] = {"capacity": resolve_capacity(self.capacity, self.max_context)}
        if self.is_ragged or self.whole_model is not None:
            same["lengths_on"] = "device"
        if self.choice is not None and self.page_size is None:
            same["page_size"] = self.choice.block_tokens
        if self.q_lens is not None:
            same["q_len"] = max(self.q_lens)
        if self.q_lens is None and self.q_len == 1:
            same["causal"] = True
        if self.causal or "causal" in same:
            same["window_right"] = -1
        if self.kv_dtype == kinds.SAME or self.row_scales:
            same["scaled"] = True
        if self.rotary_dim == 0:
            same["rotary_interleaved"] = False
        if self.v_head_dim == self.head_dim:
            same["v_head_dim"] = None
        for name, value in same.items():
            object.__setattr__(self, name, value)

    def _check_kinds(self, least: int) -> None:
        """Check that kinds are compatible. `least` is the shortest context."""
        tensor, context = self.gpus
        if self.q_lens is not None:
            self._check_number("query lengths", self.q_lens)
        if self.append > least:
            fix = "append at most the shortest context"
            raise InvalidValue("append", self.append, Reason.ABOVE_MAXIMUM, fix, least)
        if self.rotary_dim and not self.append:
            fix = "give append"
            raise InvalidValue("rotary_dim", self.rotary_dim, Reason.NEEDS, fix, "appended tokens")
        if self.rotary_dim > self.head_dim:
            fix, limit = "choose at most head_dim", self.head_dim
            raise InvalidValue("rotary_dim", self.rotary_dim, Reason.ABOVE_MAXIMUM, fix, limit)
        if self.rotary_dim and self.kv_dtype != kinds.SAME:
            fix, limit = "only fp16 and bf16 are rotated", f"kv_dtype {self.kv_dtype}"
            raise InvalidValue("rotary_dim", self.rotary_dim, Reason.CONFLICT, fix, limit)
        if self.batch_idx and self.page_size is not None:
            fix, limit = "leave one of them out", f"page_size {self.page_size}"
            raise InvalidValue("batch_idx", True, Reason.CONFLICT, fix, limit)
        if self.latent and self.kv_heads > 1:
            fix = f"a latent cache has one KV head, give heads {self.q_heads}/1"
            raise InvalidValue("kv_heads", self.kv_heads, Reason.ABOVE_MAXIMUM, fix, 1)
        if self.latent and self.value_dim > self.head_dim:
            fix, limit = "V is a part of a latent K, choose at most head_dim", self.head_dim
            raise InvalidValue("v_head_dim", self.v_head_dim, Reason.ABOVE_MAXIMUM, fix, limit)
        if self.latent and self.append:
            fix = "leave one of them out"
            raise InvalidValue("append", self.append, Reason.CONFLICT, fix, "latent")
        if self.kv_heads % tensor:
            fix = f"change {self.parallel}: tp must divide the KV heads, cp shares tokens"
            raise InvalidValue("kv_heads", self.kv_heads, Reason.NOT_A_MULTIPLE, fix, tensor)
        if least < context:
            fix = f"give each GPU of {self.parallel} at least a token"
            raise InvalidValue("context", least, Reason.BELOW_MINIMUM, fix, context)
        if self.q_dtype != kinds.SAME and self.kv_dtype == kinds.SAME:
            fix = "give kv_dtype e4m3"
            raise InvalidValue("q_dtype", self.q_dtype, Reason.NEEDS, fix, "an fp8 KV cache")
        is_fp8_pages = self.kv_dtype != kinds.SAME and self.page_size is not None
        if self.page_scales != kinds.NO_PAGE_SCALES and not is_fp8_pages:
            fix = "give kv_dtype e4m3 and page_size"
            raise InvalidValue("page_scales", self.page_scales, Reason.NEEDS, fix, "fp8 pages")
        if self.whole_model is not None:
            self._check_whole_model(self.whole_model)
        if self.choice is not None:
            self._check_choice(self.choice)
        if self.row_scales:
            self._check_row_scales()
        if self.shared_prefix:
            self._check_shared_prefix()

    def _check_choice(self, choice: kinds.Choice) -> None:
        """Check that chosen tokens have no order, and all query tokens one choice."""
        refused = _ORDERED & self.special.keys()
        if self.page_size != choice.block_tokens:
            refused.add("page_size")
        if self.q_len > 1:
            refused.add("q_len")
        if self.latent and choice.by_head:
            refused.add("latent")
        for name in sorted(refused):
            fix, limit = f"leave {name} out, or select", f"select {self.select}"
            raise InvalidValue(name, self.special.get(name), Reason.CONFLICT, fix, limit)

    def _check_whole_model(self, text: str) -> None:
        heads, expected = (self.q_heads, self.kv_heads, self.head_dim), read_model(text).heads
        if heads != expected:
            limit = "heads {}/{} and head_dim {}".format(*expected)
            fix = "leave heads and head_dim out"
            raise InvalidValue("whole_model", text, Reason.NEEDS, fix, limit)
        allowed = {"dtype", "kv_layout", "capacity", "lengths", "lengths_on", "whole_model"}
        for name, value in self.special.items():
            if name not in allowed:
                fix, limit = f"leave {name} out, or whole_model", f"whole_model {text}"
                raise InvalidValue(name, value, Reason.CONFLICT, fix, limit)

    def _check_row_scales(self) -> None:
        needed = {"latent": True, "kv_dtype": "e4m3", "dtype": "bf16"}
        for name, value in needed.items():
            if getattr(self, name) != value:
                fix = "give latent, kv_dtype e4m3 and dtype bf16"
                raise InvalidValue("row_scales", True, Reason.NEEDS, fix, f"{name} {value}")
        if self.page_size is None:
            fix = "give page_size or select"
            raise InvalidValue("row_scales", True, Reason.NEEDS, fix, "a table of pages")
        if self.value_dim % GROUP:
            fix = "rows have a scale for each group of columns of V"
            raise InvalidValue("v_head_dim", self.value_dim, Reason.NOT_A_MULTIPLE, fix, GROUP)

    def _check_shared_prefix(self) -> None:
        """Check that all query tokens see the whole prefix, and that it is the same for all."""
        name, tokens = "shared_prefix", self.shared_prefix
        if self.page_size is None:
            raise InvalidValue(name, tokens, Reason.NEEDS, "give page_size", "a paged cache")
        if tokens % self.page_size:
            fix = "choose whole pages"
            raise InvalidValue(name, tokens, Reason.NOT_A_MULTIPLE, fix, self.page_size)
        lengths = zip(self.contexts, self.query_lengths, strict=True)
        most = min(context - (q_len - 1) * self.causal for context, q_len in lengths)
        if tokens > most:
            fix = "choose at most what all query tokens of all sequences see"
            raise InvalidValue(name, tokens, Reason.ABOVE_MAXIMUM, fix, most)
        for other in sorted(_OWN & self.special.keys()):
            fix, limit = f"leave {other} out, or shared_prefix", f"shared_prefix {tokens}"
            raise InvalidValue(other, self.special[other], Reason.CONFLICT, fix, limit)

    @property
    def model(self) -> WholeModel | None:
        """Model of a whole decode step."""
        return None if self.whole_model is None else read_model(self.whole_model)

    def layer_problem(self, layer: Layer) -> AttentionProblem:
        """Return the attention of a layer of the whole model.

        The cache of a layer with a window has no more tokens than that. A layer that selects tokens
        has a cache of all of them, and reads the selected ones.
        """
        kinds = dict(layer.kinds)
        window = layer.window
        kinds.pop("window_left", None)
        if window is not None:
            kinds["capacity"] = min(self.cache_capacity, window)
        elif layer.selected is not None:
            kinds["capacity"] = self.cache_capacity
        most = window or layer.selected
        if most is not None:
            contexts = tuple(min(context, most) for context in self.contexts)
            kinds["context"] = contexts if self.is_ragged else contexts[0]
        return replace(
            self,
            whole_model=None,
            lengths_on="device",
            q_heads=layer.q_heads,
            kv_heads=layer.kv_heads,
            head_dim=layer.head_dim,
            **kinds,
        )

    def _of_all_layers(self, model: WholeModel, bytes_of: Callable[[AttentionProblem], int]) -> int:
        return sum(
            count * bytes_of(self.layer_problem(layer))
            for layer, count in model.layer_kinds.items()
        )

    @property
    def gpus(self) -> GpuCounts:
        return counts_of(self.parallel)

    def shard(self, rank: int) -> AttentionProblem:
        """Return one GPU's part: its KV heads with their query heads, and its run of each
        sequence's tokens.

        Rank 0 has the most.
        """
        tensor, context = self.gpus
        part = rank % context
        lengths = tuple(
            shard_start(length, part + 1, context) - shard_start(length, part, context)
            for length in self.contexts
        )
        return replace(
            self,
            q_heads=self.q_heads // tensor,
            kv_heads=self.kv_heads // tensor,
            context=lengths if self.is_ragged else lengths[0],
            capacity=None if self.capacity is None else -(-self.cache_capacity // context),
            parallel=NONE,
        )

    @property
    def is_ragged(self) -> bool:
        return not isinstance(self.context, int)

    @property
    def contexts(self) -> tuple[int, ...]:
        """Cached tokens of each sequence."""
        if isinstance(self.context, int):
            return (self.context,) * self.batch
        return tuple(self.context)

    @property
    def max_context(self) -> int:
        return self.context if isinstance(self.context, int) else max(self.context)

    @property
    def total_context(self) -> int:
        """Cached tokens of all sequences together."""
        return self.batch * self.context if isinstance(self.context, int) else sum(self.context)

    @property
    def cache_capacity(self) -> int:
        """Tokens allocated per sequence; whole pages of a paged cache."""
        tokens = self.capacity if isinstance(self.capacity, int) else self.max_context
        return tokens if self.page_size is None else -(-tokens // self.page_size) * self.page_size

    @property
    def choice(self) -> kinds.Choice | None:
        """Blocks that each sequence sees; None for the whole context."""
        return None if self.select is None else kinds.Choice.of(self.select)

    @property
    def seen(self) -> AttentionProblem:
        """Problem of a cache with nothing but the chosen tokens: what a call of `select` is.

        Its table has room for as many tokens as are chosen, whatever the shortest context.
        """
        if self.choice is None:
            return self
        lengths = self.visible_lengths
        context = lengths if self.is_ragged else lengths[0]
        return replace(self, context=context, capacity=self.choice.tokens, select=None)

    @property
    def known_to_host(self) -> AttentionProblem:
        """Problem as the caller's host knows it, from which launch settings can follow.

        Lengths on the device can be anything up to the capacity of the cache. With a length on the
        host, the capacity does not matter. Of a shared problem, it is the part of one GPU.
        """
        if self.parallel != NONE:
            return self.shard(0).known_to_host
        if self.select is not None:
            return self.seen.known_to_host
        if self.lengths_on == "device":
            return replace(self, context=self.cache_capacity, capacity=None)
        return self if self.capacity is None else replace(self, capacity=None)

    @property
    def page_counts(self) -> tuple[int, ...]:
        """Pages of each sequence in a paged cache."""
        assert self.page_size is not None
        return tuple(-(-context // self.page_size) for context in self.contexts)

    @property
    def pages(self) -> int:
        """Number of pages of all sequences in a paged cache."""
        assert self.page_size is not None
        shared = (self.batch - 1) * (self.shared_prefix // self.page_size)
        if isinstance(self.context, int):
            return self.batch * -(-self.context // self.page_size) - shared
        return sum(self.page_counts) - shared

    @property
    def own(self) -> AttentionProblem:
        """Problem of the tokens after a shared prefix: a launch of its own."""
        if not self.shared_prefix:
            return self
        lengths = tuple(max(1, context - self.shared_prefix) for context in self.contexts)
        capacity = self.capacity
        if isinstance(capacity, int):
            capacity = max(self.page_size or 1, self.cache_capacity - self.shared_prefix)
        context = lengths if self.is_ragged else lengths[0]
        return replace(self, context=context, capacity=capacity, shared_prefix=0)

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.q_heads // self.kv_heads

    @property
    def value_dim(self) -> int:
        """Columns of V and of the output."""
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def query_lengths(self) -> tuple[int, ...]:
        """Query tokens of each sequence."""
        return (self.q_len,) * self.batch if self.q_lens is None else self.q_lens

    @property
    def query_rows(self) -> int:
        """Rows of Q: query tokens of all sequences, times query heads."""
        tokens = self.batch * self.q_len if self.q_lens is None else sum(self.q_lens)
        return tokens * self.q_heads

    @property
    def leftpads(self) -> tuple[int, ...]:
        """Padding tokens of each sequence: 3, 6, 1, 4, ... sixteenths of the tokens cached before
        the call.
        """
        if not self.leftpad:
            return (0,) * self.batch
        shares = (3 * (sequence + 1) % 8 for sequence in range(self.batch))
        cached = (context - self.append for context in self.contexts)
        return tuple(tokens * share // 16 for tokens, share in zip(cached, shares, strict=True))

    @property
    def visible_lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence that any query token sees."""
        if self.choice is not None:
            most = self.choice.tokens
            return tuple(min(context, most) for context in self.contexts)
        if not self.leftpad and self.most_behind < 0:
            return self.contexts
        lengths = tuple(
            context - pad for context, pad in zip(self.contexts, self.leftpads, strict=True)
        )
        return tuple(map(self._visible, lengths, self.query_lengths))

    def _visible(self, length: int, q_len: int) -> int:
        """Return the visible tokens of a sequence with `length` tokens."""
        first = max(0, length - q_len)
        behind = min(first, self.window_left) if self.window_left >= 0 else first
        if self.attention_chunk:
            behind = min(behind, first % self.attention_chunk)
        return min(length, behind + q_len)

    @property
    def most_behind(self) -> int:
        """Maximum number of preceding tokens that a query token sees; -1 for all."""
        return kinds.most_behind(self.window_left, self.attention_chunk)

    @property
    def visible_tokens(self) -> int:
        """Visible tokens of all sequences."""
        if not self.leftpad and self.most_behind < 0 and self.select is None:
            return self.total_context
        return sum(self.visible_lengths)

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token and KV head; counted once if V is a part of K."""
        if self.row_scales:
            return row_bytes(self.head_dim, self.value_dim)
        number = ELEMENT_BYTES if self.kv_dtype == kinds.SAME else _FP8_BYTES
        return (self.head_dim + (0 if self.latent else self.value_dim)) * number

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that any kernel must read at least once.

        These are the visible tokens of all layers of a whole model, with appended ones, and those
        of shared pages once. Of a shared problem, this and all other bytes are those of the GPU
        with the most.
        """
        if self.parallel != NONE:
            return self.shard(0).kv_bytes
        if self.model is not None:
            return self._of_all_layers(self.model, lambda layer: layer.kv_bytes)
        repeated = (self.batch - 1) * self.shared_prefix
        return (self.visible_tokens - repeated) * self.kv_heads * self.token_bytes

    @property
    def kv_allocated_bytes(self) -> int:
        """Bytes of the allocated K and V caches. `batch_idx` adds one row."""
        if self.parallel != NONE:
            return self.shard(0).kv_allocated_bytes
        if self.model is not None:
            return self._of_all_layers(self.model, lambda layer: layer.kv_allocated_bytes)
        if self.page_size is None:
            tokens = (self.batch + self.batch_idx) * self.cache_capacity
        else:
            tokens = self.pages * self.page_size
        return tokens * self.kv_heads * self.token_bytes

    @property
    def io_bytes(self) -> int:
        """`kv_bytes`, one read of Q, and one write of the output, the LSE (fp32) and appended
        tokens.

        Scales, slopes, sinks and rotary tables are not counted.
        """
        if self.parallel != NONE:
            return self.shard(0).io_bytes
        q_bytes = ELEMENT_BYTES if self.q_dtype == kinds.SAME else _FP8_BYTES
        row_bytes = self.head_dim * q_bytes + self.value_dim * ELEMENT_BYTES + 4
        appended = self.batch * self.append * self.kv_heads * self.token_bytes
        return self.kv_bytes + self.query_rows * row_bytes + appended

    @cached_property
    def special(self) -> dict[str, Any]:
        """Optional axes that are not at their defaults, with their values. `lengths` has the
        contexts of a ragged batch.
        """
        values = {
            field.name: value
            for field, default, value in zip(PROBLEM_AXES, _ALL_DEFAULTS, _ALL(self), strict=True)
            if value is not default
            and not field.is_required
            and value != default
            and not self._follows(field.name)
        }
        return {**values, **({"lengths": self.contexts} if self.is_ragged else {})}

    def _departs(self, field: Axis) -> bool:
        """Return True for a value that is neither the default nor derived from other fields."""
        return getattr(self, field.name) != field.default and not self._follows(field.name)

    def _follows(self, name: str) -> bool:
        """Return True for an axis whose value is derived from other fields."""
        return (name == "lengths_on" and (self.is_ragged or self.whole_model is not None)) or (
            (name == "q_len" and self.q_lens is not None)
            or (
                name == "page_size"
                and self.choice is not None
                and self.page_size == self.choice.block_tokens
            )
        )

    @property
    def stated(self) -> dict[str, Any]:
        """Plain axes in labels and repeat commands, with their values."""
        return {
            field.name: getattr(self, field.name)
            for field in PLAIN_AXES
            if field.always_in_label or self._departs(field)
        }

    @property
    def label(self) -> str:
        """Short name: ``b1 h32/8 n4096 d128 fp16 HND``. Axes with a letter come first, in field
        order.
        """
        heads = f"{self.q_heads}" if self.group_size == 1 else f"{self.q_heads}/{self.kv_heads}"
        context = write_lengths(self.contexts if self.is_ragged else (self.max_context,))
        if context.count("+") >= _LABEL_LENGTHS:
            context = f"ragged{self.max_context}x{self.total_context}"
        words = {True: [f"b{self.batch}", f"h{heads}", f"n{context}"], False: []}
        for field in PLAIN_AXES:
            if field.always_in_label or self._departs(field):
                text = f"{field.letter}{field.write(getattr(self, field.name))}"
                words[field.letter != ""].append(text)
        return " ".join([*words[True], *words[False]])

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON types. `from_dict` reads it back.

        Later axes are omitted at their defaults: problems, and cell keys, stay the same as in runs
        from before the axis.
        """
        context = list(self.contexts) if self.is_ragged else self.context
        return {
            field.name: context
            if field.name == "context"
            else field.to_json(getattr(self, field.name))
            for field in PROBLEM_AXES
            if field.always_in_json or self._departs(field)
        }

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> AttentionProblem:
        """Build a problem from the output of `to_dict`, through JSON or not.

        Raises:
            KeyError: A field is missing.
            TypeError: A field is unknown or of another type.
            UserError: The problem is invalid.
        """
        if unknown := fields.keys() - {field.name for field in PROBLEM_AXES}:
            raise TypeError(f"no axis is called {', '.join(sorted(unknown))}")
        values = {}
        for field in PROBLEM_AXES:
            if field.is_required or field.name in fields:
                value = fields[field.name]
                several = field.name == "context" and isinstance(value, list | tuple)
                read = [field.from_json(item) for item in (value if several else [value])]
                values[field.name] = tuple(read) if several else read[0]
        return cls(**values)


#: Fields of AttentionProblem, in order.
PROBLEM_AXES: tuple[Axis, ...] = axes_of(AttentionProblem)
_ALL_DEFAULTS = tuple(field.default for field in PROBLEM_AXES)
_ALL = attrgetter(*[field.name for field in PROBLEM_AXES])
#: Axes that can be read one by one, unlike heads, or batch and context.
PLAIN_AXES = tuple(
    field for field in PROBLEM_AXES if not field.part_of and field.name not in ("batch", "context")
)
