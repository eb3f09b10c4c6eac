"""Axes of the kinds of decode attention that are not plain: masks, biases, appended tokens, fp8
caches. `leanbench.core.problem` has them as fields; `leanbench.core.inputs` draws their
tensors.
"""

from __future__ import annotations

from leanbench.core.axis import Decimals, Switch, Whole, Words, axis
from leanbench.core.lengths import QueryLengths

FP8_DTYPES = ("e4m3", "e5m2")
#: A dtype that is another axis' own.
SAME = "same"
#: No scales of pages.
NO_PAGE_SCALES = "none"
#: Capped scores are a difference of two numbers as large as the cap, in fp32: at this one their
#: error is that of fp16 inputs, at a hundred times as much it is larger. Models have 30 or 50.
MOST_SOFTCAP = 1e4
_WINDOW = "a number of tokens such as 1024, or none for no window"


def most_behind(window_left: int, attention_chunk: int) -> int:
    """Return the maximum number of preceding tokens that a query token sees; -1 for all."""
    if not attention_chunk:
        return window_left
    return attention_chunk - 1 if window_left < 0 else min(window_left, attention_chunk - 1)


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
    help="Tokens before a query token that it sees: none,128,4k.",
    label="window",
    meaning="tokens before a query token that it sees; none: all",
    phrase="window of {}",
    none_phrase="no window",
    refusal="has no sliding window",
)
WINDOW_RIGHT = axis(
    Whole(least=0, or_none="no window", none=-1, syntax=_WINDOW),
    "wr",
    default=-1,
    help="Tokens after a query token that it sees without a causal mask: none,0,64.",
    label="window to the right",
    meaning="tokens after a query token that it sees; none: all, or none of them if causal",
    phrase="window of {} to the right",
    none_phrase="no window to the right",
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
    meaning="tokens of a chunk of the sequence, which its query tokens see alone; none: no chunks",
    phrase="attention chunks of {}",
    none_phrase="no attention chunks",
    refusal="has no attention chunks",
)
SOFTCAP = axis(
    Decimals(MOST_SOFTCAP, "a soft cap", "30 or 50", or_none="no soft cap", none=0.0),
    "cap",
    default=0.0,
    help="Scores s become softcap x tanh(s / softcap): none,50.",
    meaning="scores s become softcap x tanh(s / softcap)",
    phrase="softcap {}",
    none_phrase="no softcap",
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
    label="appended tokens",
    heading="append",
    meaning="tokens of the context that the call itself appends to the cache",
    phrase="{} appended",
    none_phrase="nothing appended",
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
    meaning="columns of Q and of appended K that are rotated",
    phrase="rotary dim {}",
    none_phrase="no rotary embedding",
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
    heading="KV",
    phrase="{} KV cache",
    refusal="takes no KV cache of another dtype than Q",
)
Q_DTYPE = axis(
    Words((SAME, *FP8_DTYPES)),
    "q-",
    default=SAME,
    help="Of Q: same (as dtype, which the output has), e4m3, e5m2.",
    label="Q dtype",
    heading="Q",
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
    Words((NO_PAGE_SCALES, "page", "page-head")),
    "ps-",
    default=NO_PAGE_SCALES,
    help="none,page,page-head: scales of an fp8 cache's pages, one for each, or for each of its KV"
    " heads.",
    label="page scales",
    meaning="scales of an fp8 cache's pages: one for each page, or for each of its KV heads",
    phrase="scales of each {}",
    none_phrase="no scales of pages",
    refusal="takes no scales of pages",
)
V_HEAD_DIM = axis(
    Whole(
        1024,
        multiple_of=8,
        or_none="as head_dim",
        syntax="a multiple of 8 such as 128, or none for the same as head_dim",
    ),
    "dv",
    default=None,
    help="Columns of V and of the output: none (as head_dim), 128.",
    label="V head_dim",
    meaning="columns of V and of the output; none: as many as K's",
    phrase="V head_dim {}",
    none_phrase="V head_dim as K's",
    refusal="takes no V of another head_dim than K",
)
Q_LENS = axis(
    QueryLengths(),
    "ql",
    default=None,
    help="New tokens of each sequence, packed in one tensor (cu_seqlens_q): none, 512+1x7.",
    label="query lengths",
    meaning="new tokens of each sequence, packed in one tensor; none: q_len for all",
    phrase="query lengths {}",
    none_phrase="equal query lengths",
    refusal="takes no query lengths that differ",
)
LATENT = axis(
    Switch("latent", "no-latent"),
    default=False,
    help="yes,no: V is the first columns of K, and there is one KV head (MLA: DeepSeek, Kimi).",
    label="latent cache",
    refusal="takes no latent cache, in which V is a part of K",
)
