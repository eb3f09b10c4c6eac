"""Axes of attention variants: masks, biases, appended tokens, fp8 caches.

They are fields of AttentionProblem; `leanbench.core.inputs` draws their tensors.
"""

from __future__ import annotations

from typing import NamedTuple

from leanbench.core.axis import Chosen, Decimals, Switch, Whole, Words, axis
from leanbench.core.lengths import QueryLengths

FP8_DTYPES = ("e4m3", "e5m2")
#: The dtype of another axis.
SAME = "same"
NO_PAGE_SCALES = "none"
#: A capped score is a difference of two fp32 numbers of the cap's size. At this cap its error is
#: that of fp16 inputs. Models have 30 or 50.
MOST_SOFTCAP = 1e4
_WINDOW = "a number of tokens such as 1024, or none for no window"


def most_behind(window_left: int, attention_chunk: int) -> int:
    """Return the maximum number of preceding tokens that a query token sees; -1 for all."""
    if not attention_chunk:
        return window_left
    return attention_chunk - 1 if window_left < 0 else min(window_left, attention_chunk - 1)


class Choice(NamedTuple):
    """Blocks of tokens that a sequence sees of its context."""

    blocks: int
    #: Tokens of a block, the page size of the call.
    block_tokens: int
    #: True if each KV head has blocks of its own.
    by_head: bool

    @classmethod
    def of(cls, select: int | str) -> Choice:
        """Return the choice of a value of `SELECT`."""
        if isinstance(select, int):
            return cls(select, 1, False)
        blocks, tokens = map(int, select.split("x"))
        return cls(blocks, tokens, True)

    @property
    def tokens(self) -> int:
        return self.blocks * self.block_tokens


CAUSAL = axis(
    Switch("causal", "noncausal"),
    default=True,
    help="causal,noncausal: whether a query token sees the tokens after it.",
    refusal="has a causal mask",
)
WINDOW_LEFT = axis(
    Whole(least=0, or_none="no window", none=-1, syntax=_WINDOW),
    "wl",
    default=-1,
    help="Sliding window: earlier tokens that a query token sees: none,128,4k.",
    label="window",
    phrase="window of {}",
    refusal="has no sliding window",
)
WINDOW_RIGHT = axis(
    Whole(least=0, or_none="no window to the right", none=-1, syntax=_WINDOW),
    "wr",
    default=-1,
    help="Later tokens that a query token sees without a causal mask: none,0,64.",
    label="window to the right",
    phrase="window of {} to the right",
    refusal="has no window to the right",
)
ATTENTION_CHUNK = axis(
    Whole(
        or_none="no attention chunks",
        none=0,
        syntax="a number of tokens such as 8k, or none for no attention chunks",
    ),
    "ac",
    default=0,
    help="Tokens of a chunk of the sequence, which its query tokens see alone (Llama 4): none,8k.",
    label="attention chunk",
    phrase="attention chunks of {}",
    refusal="has no attention chunks",
)
SOFTCAP = axis(
    Decimals(MOST_SOFTCAP, "a soft cap", "30 or 50", or_none="no soft cap", none=0.0),
    "cap",
    default=0.0,
    help="Scores s become softcap x tanh(s / softcap): none,50.",
    refusal="has no soft cap",
)
SINKS = axis(
    Switch("sinks", "no-sinks"),
    default=False,
    help="yes,no: a logit for each query head in the softmax's denominator (gpt-oss).",
    refusal="has no sinks",
)
ALIBI = axis(
    Switch("alibi", "no-alibi"),
    default=False,
    help="yes,no: scores less slope x distance (ALiBi).",
    label="ALiBi",
    refusal="has no ALiBi",
)
LEFTPAD = axis(
    Switch("leftpad", "no-leftpad"),
    default=False,
    help="yes,no: sequences begin behind padding in the cache.",
    refusal="takes no cache with padding in front",
)
BATCH_IDX = axis(
    Switch("batch-idx", "no-batch-idx"),
    default=False,
    help="yes,no: a tensor says which row of the cache a sequence has.",
    refusal="takes no cache_batch_idx",
)
APPEND = axis(
    Whole(
        or_none="nothing appended",
        none=0,
        syntax="a number of tokens such as 1, or none for nothing appended",
    ),
    "new",
    default=0,
    help="Tokens of the context that the call itself appends to the cache: none,1.",
    phrase="{} appended",
    refusal="appends nothing to the cache",
)
ROTARY_DIM = axis(
    Whole(
        # No head_dim is larger.
        1024,
        multiple_of=16,
        or_none="no rotary embedding",
        none=0,
        syntax="a multiple of 16 such as 64, or none for no rotary embedding",
    ),
    "rot",
    default=0,
    help="Columns of Q and of appended K that are rotated: none,64.",
    label="rotary dim",
    refusal="has no rotary embedding",
)
ROTARY_INTERLEAVED = axis(
    Switch("interleaved", "neox"),
    default=False,
    help="interleaved,neox: which columns are rotated together, 0 and 1, or 0 and rotary_dim / 2.",
    label="rotary pairs",
    refusal="rotates no neighbouring columns",
)
KV_DTYPE = axis(
    Words((SAME, *FP8_DTYPES)),
    "kv-",
    default=SAME,
    help="Of the KV cache: same (as dtype), e4m3, e5m2.",
    label="KV dtype",
    phrase="{} KV cache",
    refusal="takes no KV cache of another dtype than Q",
)
Q_DTYPE = axis(
    Words((SAME, *FP8_DTYPES)),
    "q-",
    default=SAME,
    help="Of Q: same (as dtype, which the output has), e4m3, e5m2.",
    label="Q dtype",
    phrase="{} Q",
    refusal="takes no Q of another dtype than the output",
)
SCALED = axis(
    Switch("scaled", "unscaled"),
    default=True,
    help="scaled,unscaled: whether fp8 numbers have scales, a sequence's KV head each, a latent"
    " cache one.",
    label="scales",
    refusal="takes no fp8 numbers without scales",
)
PAGE_SCALES = axis(
    Words((NO_PAGE_SCALES, "page", "page-head"), or_none="no scales of pages"),
    "ps-",
    default=NO_PAGE_SCALES,
    help="none,page,page-head: scales of an fp8 cache's pages, one for each, or for each of its KV"
    " heads.",
    label="page scales",
    phrase="scales of each {}",
    refusal="takes no scales of pages",
)
SELECT = axis(
    Chosen(),
    "sel",
    default=None,
    help="Tokens of the context that a sequence sees, chosen anywhere (DeepSeek V3.2): none,2048;"
    " their numbers are a table of pages of one token. 16x128: 16 blocks of 128 tokens for each KV"
    " head (MiniMax M3), a table of pages of each head.",
    label="chosen tokens",
    phrase="{} chosen tokens",
    refusal="takes no choice of tokens",
)
ROW_SCALES = axis(
    Switch("row-scales", "no-row-scales"),
    default=False,
    help="yes,no: rows of an fp8 latent cache have their scales inside, and 64 columns in bf16"
    " (DeepSeek V3.2, 656 bytes).",
    label="row scales",
    refusal="takes no rows with scales inside",
)
SHARED_PREFIX = axis(
    Whole(
        or_none="no shared pages",
        none=0,
        syntax="a number of tokens such as 16k, or none for no shared pages",
    ),
    "sp",
    default=0,
    help="Tokens that all sequences of a paged cache have in the same pages: none,16k.",
    label="shared prefix",
    phrase="{} tokens in shared pages",
    refusal="takes no pages that sequences share",
)
V_HEAD_DIM = axis(
    Whole(
        1024,
        multiple_of=8,
        or_none="V head_dim as K's",
        syntax="a multiple of 8 such as 128, or none for the same as head_dim",
    ),
    "dv",
    default=None,
    help="Columns of V and of the output: none (as head_dim), 128.",
    label="V head_dim",
    refusal="takes no V of another head_dim than K",
)
Q_LENS = axis(
    QueryLengths(),
    "ql",
    default=None,
    help="New tokens of each sequence, packed in one tensor (cu_seqlens_q): none, 512+1x7.",
    label="query lengths",
    refusal="takes no query lengths that differ",
)
LATENT = axis(
    Switch("latent", "no-latent"),
    default=False,
    help="yes,no: V is the first columns of K, and there is one KV head (MLA: DeepSeek, Kimi).",
    label="latent cache",
    refusal="takes no latent cache, in which V is a part of K",
)
