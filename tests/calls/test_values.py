"""What tensors on the device say, where it is asked for that they are checked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from every_kind import KINDS, PLAIN, called, take_every_kind

from leanbench.attention import lean_attn_with_kvcache
from leanbench.calls import values
from leanbench.core.inputs import AttentionInputs, make_inputs

Q = torch.randn(2, 1, 4, 64).half()
CACHE = torch.randn(5, 8, 2, 64).half()


def int32(*numbers: Any) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


TABLE: dict[str, Any] = {
    "k_cache": CACHE,
    "v_cache": CACHE,
    "block_table": int32([3, 1, 9], [0, -1, 9]),
}
NEW = torch.randn(2, 3, 2, 64).half()
APPEND: dict[str, Any] = {"k": NEW, "v": NEW}
PACKED = {"q": torch.randn(5, 4, 64).half(), "max_seqlen_q": 4}
#: Arguments, and the sentence.
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a length below 0": (
        {"cache_seqlens": int32(3, -1)},
        r"^cache_seqlens\[1\] is -1: expected 0 to 8, tokens, less those that are appended$",
    ),
    "an append past the cache": (
        {**APPEND, "cache_seqlens": int32(6, 2)},
        r"^cache_seqlens\[0\] is 6: expected 0 to 5, tokens",
    ),
    "padding above the length": (
        {"cache_seqlens": int32(3, 7), "cache_leftpad": int32(3, 8)},
        r"^cache_leftpad\[1\] is 8: expected 0 to the sequence's 7 tokens$",
    ),
    "new tokens without a row of the tables": (
        {
            **APPEND,
            **dict.fromkeys(("rotary_cos", "rotary_sin"), torch.randn(6, 16).half()),
            "cache_seqlens": int32(2, 4),
        },
        r"^cache_seqlens\[1\] is 4: expected 0 to 3, so that rotary_cos has a row for new tokens$",
    ),
    "a row that there is not": (
        {"cache_batch_idx": int32(1, 2)},
        r"^cache_batch_idx\[1\] is 2: expected 0 to 1, rows of the caches$",
    ),
    "a row that two sequences append to": (
        {**APPEND, "cache_seqlens": int32(3, 2), "cache_batch_idx": int32(1, 1)},
        r"^cache_batch_idx\[0\] and \[1\] are both 1: expected a row of its own for each sequence",
    ),
    "a page that there is not": (
        {**TABLE, "cache_seqlens": int32(17, 8)},
        r"^block_table\[0, 2\] is 9: expected 0 to 4, the pages of the caches$",
    ),
    "an append into a page that there is not": (
        {**TABLE, **APPEND, "cache_seqlens": int32(13, 6)},
        r"^block_table\[1, 1\] is -1: expected 0 to 4",
    ),
    "starts that fall": (
        {**PACKED, "cu_seqlens_q": int32(0, 4, 3)},
        r"^cu_seqlens_q goes from 4 to 3 in sequence 1: expected starts that rise, by at most"
        " max_seqlen_q, 4$",
    ),
    "more queries than there are": (
        {**PACKED, "cu_seqlens_q": int32(0, 4, 6)},
        "^cu_seqlens_q goes from 0 to 6: expected 0 to at most the 5 tokens that there are$",
    ),
    "more queries than the most": (
        {**PACKED, "cu_seqlens_q": int32(0, 0, 5)},
        r"^cu_seqlens_q goes from 0 to 5 in sequence 1: expected starts that rise, by at most",
    ),
    "a sequence without queries whose tokens are appended": (
        {
            **PACKED,
            "cu_seqlens_q": int32(0, 5, 5),
            "max_seqlen_q": 5,
            **APPEND,
            "cache_seqlens": int32(2, 2),
        },
        "^cu_seqlens_q has no query token for sequence 1, whose new tokens may then be left unw",
    ),
    "appended tokens of their own number past the cache": (
        {
            "k": NEW[0],
            "v": NEW[0],
            "cache_seqlens": int32(0, 7),
            "cu_seqlens_k_new": int32(0, 1, 3),
        },
        "^cu_seqlens_k_new has 2 tokens for sequence 1, which has 7: expected at most the 8 of the",
    ),
    "rotary rows that there are not": (
        {
            **APPEND,
            "cache_seqlens": int32(3, 2),
            "rotary_cos": torch.zeros(8, 8).half(),
            "rotary_sin": torch.zeros(8, 8).half(),
            "rotary_seqlens": int32(0, -1),
        },
        r"^rotary_seqlens\[1\] is -1: expected 0 to 7, rows of rotary_cos$",
    ),
    "new tokens that fall": (
        {
            "k": NEW[0],
            "v": NEW[0],
            "cache_seqlens": int32(0, 0),
            "cu_seqlens_k_new": int32(0, 3, 2),
        },
        "^cu_seqlens_k_new goes from 3 to 2 in sequence 1: expected starts that rise$",
    ),
}


@pytest.fixture(autouse=True)
def prepared_for(monkeypatch) -> list[AttentionInputs]:
    monkeypatch.setattr(values, "CHECKS_VALUES", True)
    return take_every_kind(monkeypatch)


@pytest.mark.parametrize(("arguments", "sentence"), BAD.values(), ids=BAD)
def test_what_is_outside_of_the_caches_is_one_sentence(arguments, sentence, prepared_for):
    caches = {"k_cache": CACHE[:2].clone(), "v_cache": CACHE[:2].clone()}
    with pytest.raises(ValueError, match=sentence):
        lean_attn_with_kvcache(**{"q": Q, **caches, **arguments}, causal=True)
    assert prepared_for == []


def test_padding_of_whole_caches_is_within_them(prepared_for):
    lean_attn_with_kvcache(Q, CACHE[:2], CACHE[:2], cache_leftpad=int32(3, 8))
    assert len(prepared_for) == 1


def test_entries_past_the_end_may_be_any(prepared_for):
    lean_attn_with_kvcache(Q, **TABLE, cache_seqlens=int32(16, 8))
    assert len(prepared_for) == 1


@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("lengths_on", ["host", "device"])
def test_what_is_right_is_not_refused(kinds, lengths_on, prepared_for):
    called(make_inputs(replace(PLAIN, **{"lengths_on": lengths_on, **kinds}), "cpu"))
    assert len(prepared_for) == 1
