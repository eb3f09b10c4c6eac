"""What is asked of a kernel: the shapes of one decode attention call, its bytes and its
arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress
from operator import attrgetter, is_not
from typing import Any

from leanbench.core import kinds
from leanbench.core.axis import Axis, Capacity, Whole, Words, axes_of, axis, resolve_capacity
from leanbench.core.errors import UserError
from leanbench.core.lengths import write_lengths
from leanbench.core.llm.layers import Layer
from leanbench.core.llm.model import WholeModel, WholeModels, read_model
from leanbench.core.parallel import NONE, GpuCounts, GpuShares, counts_of, shard_start

#: Of most kernels; a problem may have any multiple of 8.
HEAD_DIMS = (64, 80, 96, 128, 256)
DTYPES = ("fp16", "bf16")
KV_LAYOUTS = ("HND", "NHD")
LENGTHS_ON = ("host", "device")
#: Of most kernels; a problem may have any.
PAGE_SIZES = (16, 32, 64, 128, 256)
#: Of most kernels: speculative decoding drafts a few tokens, more of them are a chunk of a prefill.
MAX_Q_LEN = 16
#: More sequences than any GPU has memory for, and few enough for a length each.
MAX_BATCH = 2**20
#: Above any GPU's memory by far, and below what 64 bits count.
MAX_KV_BYTES = 2**60
ELEMENT_BYTES = 2  # both dtypes
_FP8_BYTES = 1
#: Runs of alike lengths that a label names one by one; of more, the longest and the sum.
_LABEL_LENGTHS = 3


def _listed(values: tuple[Any, ...]) -> str:
    return ", ".join(map(str, values))


@dataclass(frozen=True)
class AttentionProblem:
    """One decode attention call: `q_len` new tokens per sequence attend to the cached tokens.

    The new tokens are the last ones of the cache, and none sees those after it (the causal tail):
    query position i of a sequence sees the tokens j <= context - q_len + i.

    Raises:
        UserError: a shape or name that no kernel here could run; the sentence says the limit and
            the fix.
    """

    batch: int = axis(Whole(MAX_BATCH), "b", swept=(1,), help="Sequences: 1,8,64.")
    q_heads: int = axis(Whole(), part_of="heads", label="query heads")
    kv_heads: int = axis(Whole(), part_of="heads", label="KV heads")
    #: Cached tokens, the new ones included: one number for all sequences, or one per sequence (a
    #: ragged batch).
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
        help=f"A multiple of 8; most kernels take {_listed(HEAD_DIMS)}.",
    )
    dtype: str = axis(
        Words(DTYPES), default="fp16", always_in_label=True, always_in_json=True, help="fp16,bf16."
    )
    #: `HND`: (batch, kv_heads, tokens, head_dim), the paper's. `NHD`: (batch, tokens, kv_heads,
    #: head_dim), flash-attn's. A paged cache has pages for the batch, and a page's tokens.
    kv_layout: str = axis(
        Words(KV_LAYOUTS, str.upper),
        default="HND",
        always_in_label=True,
        always_in_json=True,
        help="HND,NHD.",
        label="KV layout",
        heading="layout",
        meaning="of K and V: HND is heads, tokens, head_dim; NHD is tokens, heads, head_dim",
    )
    q_len: int = axis(
        Whole(),
        "q",
        default=1,
        always_in_json=True,
        help=f"New tokens per sequence, in most kernels up to {MAX_Q_LEN}: 1,4.",
        label="new tokens (q_len)",
        heading="q_len",
        meaning="new tokens per sequence",
        refusal="decodes one query token per sequence",
    )
    #: Tokens of a page; None: a sequence's tokens lie one after the other.
    page_size: int | None = axis(
        Whole(
            or_none="a contiguous cache",
            syntax="a number of tokens such as 64, or none for a contiguous cache",
        ),
        "p",
        default=None,
        help="Tokens of a page: 16,64,256; none is a contiguous cache.",
        label="page size",
        meaning="tokens of a page of K and V; none: a sequence's tokens lie in a row",
        phrase="pages of {}",
        none_phrase="no pages",
        refusal="takes no paged cache",
    )
    #: Tokens that every sequence has room for; None: as many as the longest one has. Given as a
    #: multiple of the longest, ``4x``, it becomes tokens.
    capacity: int | str | None = axis(
        Capacity(),
        "c",
        default=None,
        help="Room for each sequence in the cache: exact (for the longest one), 4x, 32k.",
        label="cache capacity",
        heading="capacity",
        meaning="tokens that each sequence has room for; exact: as many as the longest one has",
        phrase="capacity {}",
        none_phrase="exact capacity",
        refusal="takes no cache longer than its sequences",
    )
    #: `host`: one length for all, a number that the caller passes; `device`: a tensor, as servers
    #: pass it, and the host knows the cache's capacity alone. Lengths that differ are always there.
    lengths_on: str = axis(
        Words(LENGTHS_ON),
        default="host",
        help="host,device; lengths that differ are always on the device.",
        label="lengths on",
        meaning="where the lengths are: a number on the host, or a tensor on the device",
        phrase="lengths on the {}",
        refusal="takes no lengths from the device",
    )
    #: With one query token, which is the last, the same as True.
    causal: bool = kinds.CAUSAL
    #: The query token at position p sees the tokens from p - window_left to p + window_right; -1:
    #: no limit. To the right a causal mask has the stricter one.
    window_left: int = kinds.WINDOW_LEFT
    window_right: int = kinds.WINDOW_RIGHT
    #: The query token at position p sees those of the tokens from p - p % attention_chunk on that
    #: are fewer than attention_chunk further; 0: no limit.
    attention_chunk: int = kinds.ATTENTION_CHUNK
    #: 0: none.
    softcap: float = kinds.SOFTCAP
    sinks: bool = kinds.SINKS
    alibi: bool = kinds.ALIBI
    #: See `leftpads`; they are a part of the context.
    leftpad: bool = kinds.LEFTPAD
    batch_idx: bool = kinds.BATCH_IDX
    #: They are the context's last; 0: none.
    append: int = kinds.APPEND
    #: 0: nothing is rotated.
    rotary_dim: int = kinds.ROTARY_DIM
    rotary_interleaved: bool = kinds.ROTARY_INTERLEAVED
    kv_dtype: str = kinds.KV_DTYPE
    q_dtype: str = kinds.Q_DTYPE
    #: See `value_dim`.
    v_head_dim: int | None = kinds.V_HEAD_DIM
    #: Sequences may have different numbers of query tokens, and `q_len` is the largest; None: all
    #: have `q_len`.
    q_lens: tuple[int, ...] | None = kinds.Q_LENS
    #: Multi-head latent attention: the cache has K alone, and V is its first `value_dim` columns.
    latent: bool = kinds.LATENT
    #: Of fp8 caches and Q: `k_descale`, `v_descale` and `q_descale` are there.
    scaled: bool = kinds.SCALED
    #: Which GPUs share the call; heads and contexts are those of all together.
    parallel: str = axis(
        GpuShares(),
        default=NONE,
        help="GPUs that share a problem: cp:2 its tokens, tp:2 its heads, cp:2xtp:2 both.",
        label="GPUs",
        meaning="GPUs that share the problem: cp the tokens (context parallel), tp the heads",
        none_phrase="one GPU",
        refusal="runs on one GPU",
    )
    #: A model, as leanbench.core.llm.model writes it, of which a whole decode step is asked for:
    #: heads and head_dim are those of its layers. None: one call of attention alone.
    whole_model: str | None = axis(
        WholeModels(),
        "model=",
        default=None,
        help="A decode step of a whole model: opt-6.7b,llama-3-70b:tp=8 or a config.json; heads and"
        " head_dim follow.",
        metavar="MODEL",
        label="whole model",
        meaning="the model of which a whole decode step runs; none: attention alone",
        phrase="a whole step of {}",
        none_phrase="attention alone",
        refusal="computes attention alone",
    )
    #: Of fp8 caches in pages: `k_page_descale` and `v_page_descale` are there, beside what `scaled`
    #: says.
    page_scales: str = kinds.PAGE_SCALES

    def __post_init__(self) -> None:
        # Every call of the API with a new shape makes a problem, of defaults for the most part.
        values = _ALL(self)
        for field, value in compress(
            zip(PROBLEM_AXES, values, strict=True), map(is_not, values, _ALL_DEFAULTS)
        ):
            if field.name != "context":
                field.check(value)
        if self.q_heads % self.kv_heads:
            raise UserError(
                f"q_heads {self.q_heads} is not a multiple of kv_heads {self.kv_heads}: every KV"
                " head serves the same number of query heads, choose kv_heads that divides q_heads"
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
        self._write_in_one_way()
        self._check_kinds(least)
        if self.kv_allocated_bytes > MAX_KV_BYTES:
            raise UserError(
                f"K and V would take {self.kv_allocated_bytes} bytes, the limit is {MAX_KV_BYTES}: "
                "choose a shorter context, fewer KV heads or a smaller batch"
            )

    def _write_in_one_way(self) -> None:
        """Gives fields that say the same one value."""
        same: dict[str, Any] = {"capacity": resolve_capacity(self.capacity, self.max_context)}
        if self.is_ragged or self.whole_model is not None:
            same["lengths_on"] = "device"
        if self.q_lens is not None:
            same["q_len"] = max(self.q_lens)
        if self.q_lens is None and self.q_len == 1:
            same["causal"] = True
        if self.causal or "causal" in same:
            same["window_right"] = -1
        if self.kv_dtype == kinds.SAME:
            same["scaled"] = True
        if self.rotary_dim == 0:
            same["rotary_interleaved"] = False
        if self.v_head_dim == self.head_dim:
            same["v_head_dim"] = None
        for name, value in same.items():
            object.__setattr__(self, name, value)

    def _check_kinds(self, least: int) -> None:
        """Check that kinds are compatible. `least` is the shortest context."""
        if self.q_lens is not None and len(self.q_lens) != self.batch:
            raise UserError(
                f"{len(self.q_lens)} query lengths were given for a batch of {self.batch}: give one"
                " per sequence"
            )
        if self.append > least:
            raise UserError(
                f"append {self.append} is above the shortest context, {least} tokens with the"
                f" appended ones: append at most {least}"
            )
        if self.rotary_dim and not self.append:
            raise UserError(
                f"rotary_dim {self.rotary_dim} rotates appended tokens, but append is none: give"
                " append"
            )
        if self.rotary_dim > self.head_dim:
            raise UserError(
                f"rotary_dim {self.rotary_dim} is above head_dim {self.head_dim}: choose at most"
                " head_dim"
            )
        if self.rotary_dim and self.kv_dtype != kinds.SAME:
            raise UserError(
                f"rotary_dim {self.rotary_dim} rotates fp16 and bf16, appended tokens are"
                f" {self.kv_dtype} as the cache is: leave rotary_dim or kv_dtype out"
            )
        if self.batch_idx and self.page_size is not None:
            raise UserError(
                f"batch_idx picks rows of a contiguous cache, the page size is {self.page_size}:"
                " leave one of them out"
            )
        if self.latent and self.kv_heads > 1:
            raise UserError(
                f"latent has one KV head for all query heads, kv_heads is {self.kv_heads}: give"
                f" heads {self.q_heads}/1"
            )
        if self.latent and self.value_dim > self.head_dim:
            raise UserError(
                f"latent has V in the first columns of K, v_head_dim {self.v_head_dim} is above"
                f" head_dim {self.head_dim}: choose at most head_dim"
            )
        if self.latent and self.append:
            raise UserError(
                f"append {self.append} appends K and V, and latent has no V of its own: leave one"
                " of them out"
            )
        if self.kv_heads % self.gpus.tensor:
            raise UserError(
                f"{self.kv_heads} KV heads do not divide by the {self.gpus.tensor} GPUs of"
                f" {self.parallel}: choose a number that divides them, and cp for the others"
            )
        if least < self.gpus.context:
            raise UserError(
                f"context {least} is too short for the {self.gpus.context} GPUs of"
                f" {self.parallel}: choose at least a token for each"
            )
        if self.q_dtype != kinds.SAME and self.kv_dtype == kinds.SAME:
            raise UserError(f"q_dtype {self.q_dtype} needs an fp8 KV cache: give kv_dtype e4m3")
        if self.page_scales != kinds.NO_PAGE_SCALES and (
            self.kv_dtype == kinds.SAME or self.page_size is None
        ):
            raise UserError(
                f"page_scales {self.page_scales} needs pages in fp8: give kv_dtype e4m3 and"
                " page_size"
            )
        if self.whole_model is not None:
            self._check_whole_model(self.whole_model)

    def _check_whole_model(self, text: str) -> None:
        heads = (self.q_heads, self.kv_heads, self.head_dim)
        if heads != read_model(text).heads:
            own = "{}/{} heads x {}".format(*read_model(text).heads)
            raise UserError(
                f"{text} has {own}, the problem {heads[0]}/{heads[1]} x {heads[2]}: leave heads and"
                " head_dim out"
            )
        taken = {"dtype", "kv_layout", "capacity", "lengths", "lengths_on", "whole_model"}
        if others := [name for name in self.special if name not in taken]:
            raise UserError(
                f"a whole model says {others[0]} itself: leave {others[0]} out, or whole_model"
            )

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
        place = rank % context

        def tokens(length: int) -> int:
            return shard_start(length, place + 1, context) - shard_start(length, place, context)

        lengths = tuple(tokens(length) for length in self.contexts)
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
    def cache_capacity(self) -> int:
        """Tokens allocated per sequence; whole pages of a paged cache."""
        tokens = self.capacity if isinstance(self.capacity, int) else self.max_context
        return tokens if self.page_size is None else -(-tokens // self.page_size) * self.page_size

    @property
    def known_to_host(self) -> AttentionProblem:
        """Problem as the caller's host knows it, from which launch settings can follow.

        Lengths on the device can be anything up to the capacity of the cache. With a length on the
        host, the capacity does not matter. Of a shared problem, it is the part of one GPU.
        """
        if self.parallel != NONE:
            return self.shard(0).known_to_host
        if self.lengths_on == "device":
            return replace(self, context=self.cache_capacity, capacity=None)
        return self if self.capacity is None else replace(self, capacity=None)

    @property
    def page_counts(self) -> tuple[int, ...]:
        """Pages of each sequence in a paged cache."""
        assert self.page_size is not None
        return tuple(-(-context // self.page_size) for context in self.contexts)

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
        """Query tokens of each sequence, `batch` numbers."""
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
        if not self.leftpad and self.most_behind < 0:
            return self.total_context
        return sum(self.visible_lengths)

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token and KV head; counted once if V is a part of K."""
        number = ELEMENT_BYTES if self.kv_dtype == kinds.SAME else _FP8_BYTES
        return (self.head_dim + (0 if self.latent else self.value_dim)) * number

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that any kernel must read at least once.

        These are the visible tokens, appended ones included, of all layers of a whole model. Of a
        shared problem, this and all other bytes are those of the GPU with the most.
        """
        if self.parallel != NONE:
            return self.shard(0).kv_bytes
        if self.model is not None:
            return self._of_all_layers(self.model, lambda layer: layer.kv_bytes)
        return self.visible_tokens * self.kv_heads * self.token_bytes

    @property
    def kv_allocated_bytes(self) -> int:
        """Bytes of the allocated K and V caches. `batch_idx` adds one row."""
        if self.parallel != NONE:
            return self.shard(0).kv_allocated_bytes
        if self.model is not None:
            return self._of_all_layers(self.model, lambda layer: layer.kv_allocated_bytes)
        if self.page_size is None:
            tokens = (self.batch + self.batch_idx) * self.cache_capacity
        elif isinstance(self.context, int):
            tokens = self.batch * -(-self.context // self.page_size) * self.page_size
        else:
            tokens = sum(self.page_counts) * self.page_size
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
            name == "q_len" and self.q_lens is not None
        )

    @property
    def stated(self) -> dict[str, Any]:
        """Plain axes in labels and repeat commands, with their values."""
        values = {field.name: getattr(self, field.name) for field in PLAIN_AXES}
        return {
            field.name: values[field.name]
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
        stated = self.stated
        words = {True: [f"b{self.batch}", f"h{heads}", f"n{context}"], False: []}
        for field in PLAIN_AXES:
            if field.name in stated:
                text = f"{field.letter}{field.write(stated[field.name])}"
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


#: The fields of AttentionProblem, in their order.
PROBLEM_AXES: tuple[Axis, ...] = axes_of(AttentionProblem)
#: Their defaults, and a function that reads the values of a problem.
_ALL_DEFAULTS = tuple(field.default for field in PROBLEM_AXES)
_ALL = attrgetter(*[field.name for field in PROBLEM_AXES])
#: Those that mean what they say alone: batch and context make up the lengths of a batch, q_heads
#: and kv_heads the heads.
PLAIN_AXES = tuple(
    field for field in PROBLEM_AXES if not field.part_of and field.name not in ("batch", "context")
)
