"""Calls with the pages of each KV head: a block table of three dimensions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_calls import assert_right, compiled
from every_kind import CONFIG, called
from forms import half, numbers

from leanbench.attention import checks, lean_attn_with_kvcache
from leanbench.check.poison import poison_unused
from leanbench.core.inputs import make_inputs
from leanbench.core.problem import AttentionProblem

CHOSEN = AttentionProblem(3, 8, 2, (140, 7, 300), 64, select="5x16")
#: Six pages for two sequences of two KV heads.
Q, PAGES = half(2, 1, 4, 64), half(6, 16, 2, 64)
TABLE = torch.zeros(2, 2, 3, dtype=torch.int32)


@pytest.mark.parametrize("axes", [{}, {"sinks": True, "softcap": 9.0, "kv_dtype": "e4m3"}])
def test_it_is_right_at_first_and_again(axes, prepared_for):
    for _ in range(2):
        inputs = poison_unused(make_inputs(replace(CHOSEN, **axes), "cpu"))
        assert_right(inputs, *called(inputs))
    assert len(prepared_for) == 1


@pytest.mark.parametrize("q_len", [1, 4])
def test_tritons_kernel(q_len, device):
    inputs = poison_unused(make_inputs(CHOSEN, device))
    q = inputs.q.expand(-1, q_len, -1, -1) + torch.arange(q_len, device=device)[:, None, None]
    lse = inputs.lse.expand(-1, -1, q_len).contiguous()
    inputs = replace(inputs, q=q.half(), out=torch.empty_like(q), lse=lse)
    assert_right(inputs, *called(inputs))


def test_the_same_pages_of_all_heads_are_those_of_the_sequence(device):
    inputs = make_inputs(CHOSEN, device)
    assert inputs.block_table is not None
    table = inputs.block_table[:, 0]
    same = replace(inputs, block_table=table[:, None].expand(-1, 2, -1))
    whole = called(replace(inputs, block_table=table))
    assert all(map(torch.equal, called(same), whole))


def test_torch_compile_takes_it_whole(prepared_for):
    inputs = make_inputs(CHOSEN, "cpu", seed=7)
    assert_right(inputs, *compiled(called)(inputs))


def test_rows_of_the_table_and_packed_queries(prepared_for):
    inputs = make_inputs(CHOSEN, "cpu", seed=7)
    assert inputs.block_table is not None
    assert inputs.cache_seqlens is not None
    whole = called(inputs)
    order = torch.tensor([2, 0, 1])
    rows = inputs.block_table[order.argsort()]
    assert all(
        map(torch.equal, called(inputs, block_table=rows, cache_batch_idx=order.int()), whole)
    )
    packed = {"cu_seqlens_q": numbers(0, 1, 2, 3), "max_seqlen_q": 1}
    out, lse = called(replace(inputs, q=inputs.q[:, 0]), **packed)
    assert out.equal(whole[0][:, 0])
    assert lse.equal(whole[1][..., 0].T)


def test_columns_with_numbers_between(prepared_for):
    inputs = make_inputs(CHOSEN, "cpu", seed=7)
    assert inputs.block_table is not None
    wide = inputs.block_table.repeat_interleave(2, dim=-1)[..., ::2]
    assert all(map(torch.equal, called(inputs, block_table=wide), called(inputs)))


POSITIONS: dict[str, dict[str, Any]] = {
    "window_size": {"window_size": (7, 0)},
    "attention_chunk": {"attention_chunk": 8},
    "alibi_slopes": {"alibi_slopes": torch.ones(4)},
    "cache_leftpad": {"cache_leftpad": numbers(0, 1)},
    "k and v": {"k": half(2, 1, 2, 64), "v": half(2, 1, 2, 64), "cache_seqlens": 3},
}


@pytest.mark.parametrize(("name", "arguments"), POSITIONS.items(), ids=POSITIONS)
def test_what_depends_on_positions_is_refused(name, arguments, prepared_for):
    words = rf"^.* block_table \(2, 2, 3\), of each KV head, together with {name}: its tokens have"
    with pytest.raises(NotImplementedError, match=words) as caught:
        lean_attn_with_kvcache(Q, PAGES, PAGES, block_table=TABLE, **arguments)
    assert "\n" not in str(caught.value)
    assert prepared_for == []


def test_a_window_as_wide_as_the_chosen_tokens_is_none(prepared_for):
    inputs = make_inputs(CHOSEN, "cpu")
    assert all(map(torch.equal, called(inputs, window_size=(80, 0)), called(inputs)))


def test_query_values_are_refused(prepared_for):
    arguments: dict[str, Any] = {"block_table": TABLE, "qv": half(2, 1, 4, 64)}
    with pytest.raises(NotImplementedError, match="qv together with a block_table of each KV head"):
        lean_attn_with_kvcache(Q, PAGES, PAGES, **arguments)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (TABLE[:, :1], r"^block_table is \(2, 1, 3\) .* \(2, 2 KV heads, pages of each\)"),
        (TABLE[:1], r"^block_table is \(1, 2, 3\) .*: expected \(2, pages of a sequence\)"),
        (TABLE[None], r"^block_table is \(1, 2, 2, 3\) "),
        (TABLE[..., :0], r"^block_table is \(2, 2, 0\) "),
        (TABLE.long(), r"^block_table is \(2, 2, 3\) torch.int64: "),
        (TABLE.to("meta"), "^block_table is on meta"),
        (
            torch.empty_strided((2, 2, 3), (1, 1 << 31, 0), dtype=torch.int32, device="meta"),
            "^block_table steps by 2147483648 numbers",
        ),
    ],
    ids=["heads", "batch", "dimensions", "nothing", "dtype", "device", "stride"],
)
def test_other_tables_are_refused(table, words, prepared_for):
    with pytest.raises(ValueError, match=words):
        lean_attn_with_kvcache(Q, PAGES, PAGES, block_table=table)
    assert prepared_for == []


def test_pages_are_checked_by_head(prepared_for, monkeypatch):
    monkeypatch.setattr(checks, "CHECKS_VALUES", True)
    table = TABLE.clone()
    table[1, 1] = numbers(0, 6, -1)
    arguments: dict[str, Any] = {"block_table": table, "config": CONFIG}
    # Entries past the end may be any.
    lean_attn_with_kvcache(Q, PAGES, PAGES, cache_seqlens=numbers(48, 16), **arguments)
    with pytest.raises(ValueError, match=r"^block_table\[1, 1, 1\] is 6: expected 0 to 5"):
        lean_attn_with_kvcache(Q, PAGES, PAGES, cache_seqlens=numbers(48, 17), **arguments)
