"""What tensors on the device say, where it is asked for that they are checked."""

from __future__ import annotations

import runpy
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_calls import sentences
from every_kind import KINDS, PLAIN, called, take_every_kind

from leanbench.attention import checks, lean_attn_with_kvcache, lean_mla_with_kvcache
from leanbench.core.errors import UserError
from leanbench.core.inputs import AttentionInputs, make_inputs

Q = torch.randn(2, 1, 4, 64).half()
CACHE = torch.randn(5, 8, 2, 64).half()


def int32(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


TABLE: dict[str, Any] = {
    "k_cache": CACHE,
    "v_cache": CACHE,
    "block_table": int32([3, 1, 9], [0, -1, 9]),
}
NEW = torch.randn(2, 3, 2, 64).half()
APPEND: dict[str, Any] = {"k": NEW, "v": NEW}
PACKED = {"q": torch.randn(5, 4, 64).half(), "max_seqlen_q": 4}


def rotary(rows: int, columns: int) -> dict[str, Any]:
    return dict.fromkeys(("rotary_cos", "rotary_sin"), torch.zeros(rows, columns).half())


#: Two sequences with new tokens of their own number.
UNEVEN: dict[str, Any] = {"k": NEW[0], "v": NEW[0]}
#: The snapshot has the sentence of each: the value, its sequence and the limit.
BAD: list[dict[str, Any]] = [
    {"cache_seqlens": int32(3, -1)},
    {**APPEND, "cache_seqlens": int32(6, 2)},
    {"cache_seqlens": int32(3, 7), "cache_leftpad": int32(3, 8)},
    {**APPEND, **rotary(6, 16), "cache_seqlens": int32(2, 4)},
    {**APPEND, **rotary(8, 8), "cache_seqlens": int32(3, 2), "rotary_seqlens": int32(0, -1)},
    {**APPEND, **rotary(8, 8), "cache_seqlens": int32(3, 2), "rotary_seqlens": int32(5, 6)},
    {
        **UNEVEN,
        **rotary(4, 8),
        "cache_seqlens": int32(2, 3),
        "cu_seqlens_k_new": int32(0, 1, 3),
    },
    {"cache_batch_idx": int32(1, 2)},
    {**APPEND, "cache_seqlens": int32(3, 2), "cache_batch_idx": int32(1, 1)},
    {**TABLE, "cache_seqlens": int32(17, 8)},
    {**TABLE, **APPEND, "cache_seqlens": int32(13, 6)},
    {**PACKED, "cu_seqlens_q": int32(0, 4, 3)},
    {**PACKED, "cu_seqlens_q": int32(0, 4, 6)},
    {**PACKED, "cu_seqlens_q": int32(0, 0, 5)},
    {
        **PACKED,
        **APPEND,
        "cu_seqlens_q": int32(0, 5, 5),
        "max_seqlen_q": 5,
        "cache_seqlens": int32(2, 2),
    },
    {**UNEVEN, "cache_seqlens": int32(0, 7), "cu_seqlens_k_new": int32(0, 1, 3)},
    {**UNEVEN, "cache_seqlens": int32(0, 0), "cu_seqlens_k_new": int32(0, 3, 2)},
]


@pytest.fixture(autouse=True)
def prepared_for(monkeypatch) -> list[AttentionInputs]:
    monkeypatch.setattr(checks, "CHECKS_VALUES", True)
    return take_every_kind(monkeypatch)


@pytest.mark.parametrize(("word", "checks_calls"), [("on", True), ("1", True), ("0", False)])
def test_the_switch_has_the_words_of_other_switches(word, checks_calls, monkeypatch):
    monkeypatch.setenv("LEANBENCH_CHECK_CALLS", word)
    assert runpy.run_path(checks.__file__)["CHECKS_VALUES"] is checks_calls


def test_values_out_of_range(prepared_for, snapshot):
    call = {"q": Q, "k_cache": CACHE[:2], "v_cache": CACHE[:2], "causal": True}
    assert sentences(ValueError, [{**call, **arguments} for arguments in BAD]) == snapshot
    assert prepared_for == []


@pytest.mark.parametrize(
    "arguments",
    [
        # Padding of whole caches is within them; entries past the end may be any.
        {"k_cache": CACHE[:2], "v_cache": CACHE[:2], "cache_leftpad": int32(3, 8)},
        {**TABLE, "cache_seqlens": int32(16, 8)},
    ],
)
def test_values_at_the_limits(arguments, prepared_for):
    lean_attn_with_kvcache(Q, **arguments)
    assert len(prepared_for) == 1


def test_a_table_whose_columns_are_one_in_memory():
    table = int32(4).expand(2, 1 << 20)
    lean_attn_with_kvcache(Q, CACHE, CACHE, cache_seqlens=int32(16, 8), block_table=table)
    with pytest.raises(ValueError, match=r"^block_table\[0, 0\] is 5: expected 0 to 4"):
        lean_attn_with_kvcache(Q, CACHE, CACHE, block_table=int32(5).expand(2, 1 << 31))


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan")])
def test_the_scale_of_a_latent_cache_is_positive(scale):
    cache, query = torch.zeros(2, 64, 576).to(torch.float8_e4m3fn), torch.zeros(2, 1, 16, 576)
    scales = torch.tensor([[1.0], [scale]])
    with pytest.raises(ValueError, match=rf"^k_descale\[1\] is {scale}: expected a number above 0"):
        lean_mla_with_kvcache(query.bfloat16(), cache, k_descale=scales)


@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("lengths_on", ["host", "device"])
def test_what_is_right_is_not_refused(kinds, lengths_on, prepared_for):
    called(make_inputs(replace(PLAIN, **{"lengths_on": lengths_on, **kinds}), "cpu"))
    assert len(prepared_for) == 1


@pytest.mark.parametrize(
    ("page_size", "pages", "error", "words"),
    [
        (1, [5, -1, 0, 6], UserError, "runs on Hopper GPUs"),
        (
            1,
            [5, -1, 6, 0],
            ValueError,
            r"^block_table\[0, 2\] is 6: .* 0 to 5, .*, or -1 for none$",
        ),
        (16, [5, -2], ValueError, r"^block_table\[0, 1\] is -2: expected 0 to 5"),
        (
            64,
            [-1],
            ValueError,
            r"^block_table\[0, 0\] is -1: expected 0 to 5, the pages of the cach",
        ),
    ],
)
def test_chosen_tokens_of_a_latent_cache(page_size, pages, error, words):
    """-1 stands for no token, unless copies take whole stages."""
    cache, lengths = (
        torch.zeros(6, page_size, 576).bfloat16(),
        int32(min(3, len(pages)) * page_size),
    )
    query = torch.zeros(1, 1, 16, 576).bfloat16()
    with pytest.raises(error, match=words):
        lean_mla_with_kvcache(query, cache, lengths, block_table=int32(pages))
