"""Calls with `shared_prefix`, over the fp64 reference as their kernel."""

from __future__ import annotations

from dataclasses import replace
from statistics import geometric_mean
from typing import Any

import numpy as np
import pytest
import torch
from attention_calls import assert_right, compiled
from copied_sources import ROOT
from every_kind import CONFIG, called
from forms import half, numbers
from leanbench.kernels.lean import LEAN, LEAN_CUDA
from leanbench.kernels.lean.cuda_settings import cuda_config, shares_prefix

import leanbench
from leanbench.attention import checks, lean_attn_with_kvcache, prefix
from leanbench.check.poison import poison_unused
from leanbench.core.inputs import AttentionInputs, make_inputs
from leanbench.core.problem import AttentionProblem
from leanbench.gpu.catalogue import find
from leanbench.measure.one_gpu import settings_for

H200 = find("h200")
OWN = cuda_config(32, 2, 2, 1, 1, 8, "bulk", 1, False)
PLAIN = AttentionProblem(
    3, 8, 2, (40, 35, 60), 64, page_size=16, q_len=3, shared_prefix=32, capacity=80
)
#: Six pages; the rows of two sequences begin with the same one.
Q, PAGES = half(2, 1, 4, 64), half(6, 16, 2, 64)
TABLE = torch.tensor([[4, 0, 1], [4, 2, 3]], dtype=torch.int32)
BOTH = {"block_table": TABLE, "cache_seqlens": numbers(20, 30)}


def attend(inputs: AttentionInputs, **options: Any) -> Any:
    return called(inputs, **{"config": OWN, **options})


@pytest.mark.parametrize(
    "axes",
    [
        {},
        {"context": 60, "causal": False, "capacity": None},
        {"context": (34, 34, 34), "sinks": True, "softcap": 9.0},
        {"q_lens": (1, 4, 2), "kv_dtype": "e4m3", "page_scales": "page-head"},
    ],
)
def test_it_is_right_at_first_and_again(axes, prepared_for):
    problem = replace(PLAIN, **axes)
    for _ in range(3):
        inputs = poison_unused(make_inputs(problem, "cpu"))
        assert_right(inputs, *attend(inputs))
    of_all, own = prepared_for
    assert (of_all.batch, of_all.context, of_all.causal) == (1, 32, False)
    assert (own.batch, own.prior is None, own.capacity) == (3, False, problem.own.cache_capacity)


def test_new_sizes_are_of_one_family_and_lengths_may_change(prepared_for):
    for batch in (2, 3, 5):
        inputs = make_inputs(replace(PLAIN, batch=batch, context=(60,) * batch), "cpu")
        assert inputs.cache_seqlens is not None
        inputs.cache_seqlens.copy_(torch.arange(34, 34 + batch))
        assert_right(inputs, *attend(inputs))


def test_a_table_without_more_pages(prepared_for):
    problem = replace(PLAIN, q_len=1, context=32, capacity=None, sinks=True)
    inputs = poison_unused(make_inputs(problem, "cpu"))
    assert_right(inputs, *attend(inputs))
    lengths = torch.full((3,), 32, dtype=torch.int32)
    assert_right(inputs, *attend(inputs, cache_seqlens=lengths))


def test_columns_that_are_padded(prepared_for):
    inputs = make_inputs(PLAIN, "cpu", seed=7)
    narrow = {name: getattr(inputs, name)[..., :60] for name in ("q", "k_cache", "v_cache")}
    inputs = replace(inputs, **narrow, out=inputs.out[..., :60])
    assert_right(inputs, *attend(inputs))


def test_fp8_queries_and_an_output_in_fp16(prepared_for):
    axes: dict[str, Any] = {"kv_dtype": "e4m3", "q_dtype": "e4m3", "dtype": "bf16"}
    inputs = make_inputs(replace(PLAIN, **axes), "cpu", seed=7)
    out = inputs.out.half()
    _, lse = attend(inputs, out=out)
    assert_right(inputs, out, lse)
    assert [each.out.dtype for each in prepared_for] == [torch.float16, torch.float16]


@pytest.mark.deep
def test_torch_compile_takes_it_whole(prepared_for):
    inputs = make_inputs(PLAIN, "cpu", seed=7)
    assert_right(inputs, *compiled(attend)(inputs))


def test_none_is_the_plain_call(prepared_for):
    inputs = make_inputs(replace(PLAIN, shared_prefix=0), "cpu")
    assert all(map(torch.equal, called(inputs), called(inputs, shared_prefix=0)))
    assert [each.prior for each in prepared_for] == [None]


@pytest.mark.parametrize("is_shared", [False, True])
def test_the_predicted_faster_way_is_taken(is_shared, prepared_for, monkeypatch):
    """With slow reads from the L2, even a prefix of two pages gets a launch of its own."""
    gpu = replace(H200, sms=1, boost_clock_mhz=1) if is_shared else H200
    monkeypatch.setattr(prefix, "spec_of", lambda device: gpu)
    monkeypatch.setattr(LEAN_CUDA, "relaunch", LEAN.relaunch)
    inputs = poison_unused(make_inputs(PLAIN, "cpu"))
    assert_right(inputs, *attend(inputs, config=None))
    assert [each.prior is None for each in prepared_for] == [True, False][: 1 + is_shared]
    assert prepared_for[0].batch == (1 if is_shared else 3)


@pytest.mark.parametrize("on", ["host", "device"])
@pytest.mark.parametrize("is_shared", [False, True])
def test_a_row_has_the_settings_of_the_last_launch(is_shared, on, prepared_for, monkeypatch):
    gpu = replace(H200, sms=1, boost_clock_mhz=1) if is_shared else H200
    monkeypatch.setattr(prefix, "spec_of", lambda device: gpu)
    configs = []

    def relaunch(inputs: AttentionInputs, config: Any) -> Any:
        configs.append(config)
        return attend_relaunch(inputs, config)

    attend_relaunch = LEAN.relaunch
    monkeypatch.setattr(LEAN, "relaunch", relaunch)
    monkeypatch.setattr(LEAN_CUDA, "relaunch", relaunch)
    axes: dict[str, Any] = {"context": 1200, "capacity": None, "q_len": 1, "kv_heads": 1}
    axes |= {"page_size": 48, "shared_prefix": 1152, "lengths_on": on}
    inputs = make_inputs(replace(PLAIN, **axes), "cpu")
    attend(inputs, config=None)
    assert configs[-1] == settings_for(inputs).config
    own, plain = (settings_for(replace(inputs, shared_prefix=each)) for each in (1152, 0))
    assert (own.config != plain.config) == is_shared


@pytest.mark.parametrize(
    ("batch", "tokens", "kv_heads", "is_shared"),
    [
        (64, 16384, 8, True),
        (16, 2048, 8, True),
        (8, 2048, 8, False),
        (64, 2048, 2, True),
        (32, 2048, 2, False),
        (2000, 16, 8, True),
        (64, 16, 8, False),
        (1, 65536, 8, False),
        (2, 8192, 8, False),
        (2, 65536, 8, True),
    ],
)
def test_long_prefixes_of_many_sequences_are_shared(batch, tokens, kv_heads, is_shared):
    assert shares_prefix(tokens * kv_heads * 512, batch, H200) == is_shared


def test_the_faster_of_timed_ways_is_predicted():
    lines = (ROOT / "reports/h200/shared-prefix/calls.txt").read_text().splitlines()[3:]
    for line in lines:
        batch, tokens, _, heads, _, *times = line.split()[:11]
        shared_us, plain_us = float(times[2]), float(times[4])
        prefix_bytes = int(tokens) * int(heads.split("/")[1]) * 512
        is_shared = shares_prefix(prefix_bytes, int(batch), H200)
        assert (shared_us if is_shared else plain_us) < 1.05 * min(shared_us, plain_us), line
    assert len(lines) == 13


def test_the_way_that_is_predicted_costs_little_elsewhere():
    lines = (ROOT / "reports/h200/shared-prefix/both-ways.txt").read_text().splitlines()[1:]
    regrets = []
    for line in lines:
        batch, heads, tokens, _, shared_us, _, plain_us = line.split()
        prefix_bytes = int(tokens.split("+")[0]) * int(heads.split("/")[1]) * 512
        is_shared = shares_prefix(prefix_bytes, int(batch[1:]), H200)
        both_us = float(shared_us), float(plain_us)
        regrets.append((both_us[0] if is_shared else both_us[1]) / min(both_us))
    assert (len(regrets), regrets.count(1.0)) == (14, 10)
    assert max(regrets) < 1.16
    assert geometric_mean(regrets) < 1.025


REFUSED: dict[str, dict[str, Any]] = {
    "k and v": {"k": half(2, 1, 2, 64), "v": half(2, 1, 2, 64)},
    "cache_batch_idx": {"cache_batch_idx": numbers(0, 1)},
    "cache_leftpad": {"cache_leftpad": numbers(0, 1)},
    "alibi_slopes": {"alibi_slopes": torch.ones(4)},
    "window_size": {"window_size": (7, 0)},
    "attention_chunk": {"attention_chunk": 8},
    "batch_invariant": {"batch_invariant": True},
    "a config of Triton": {"config": CONFIG},
    "a block_table of each KV head": {"block_table": TABLE[:, None].expand(-1, 2, -1)},
    "qv": {"qv": half(2, 1, 4, 64)},
}


@pytest.mark.parametrize(("name", "arguments"), REFUSED.items(), ids=REFUSED)
def test_what_is_not_supported_is_refused(name, arguments, prepared_for):
    with pytest.raises(NotImplementedError, match=f"shared_prefix with {name}: leave") as caught:
        lean_attn_with_kvcache(Q, PAGES, PAGES, shared_prefix=16, **{**BOTH, **arguments})
    assert "\n" not in str(caught.value)
    assert prepared_for == []


@pytest.mark.parametrize(
    ("prefix", "arguments", "words"),
    [
        (True, {}, "^shared_prefix is True: expected a number of tokens, or 0 for no shared pages"),
        (-16, {}, "^shared_prefix is -16: expected a number of tokens"),
        (20, {}, "^shared_prefix is 20: expected a multiple of the page size, 16$"),
        (64, {}, "^shared_prefix is 64: expected at most the 48 tokens of a sequence"),
        (32, {"cache_seqlens": 31}, "^shared_prefix is 32: expected at most the 31 tokens"),
        (16, {"block_table": None}, "^shared_prefix is 16 and there is no block_table: pass one"),
        (16, {"q": half(2, 4, 64)}, r"^q is \(2, 4, 64\)"),
        (16, {"q": torch.nested.nested_tensor([*Q])}, "^q is nested"),
    ],
)
def test_a_prefix_that_cannot_be_is_rejected(prefix, arguments, words, prepared_for):
    given = {"q": Q, **BOTH, **arguments}
    with pytest.raises(ValueError, match=words):
        lean_attn_with_kvcache(given.pop("q"), PAGES, PAGES, shared_prefix=prefix, **given)
    assert prepared_for == []


def test_pages_without_tokens_have_no_prefix(prepared_for):
    options: dict[str, Any] = {**BOTH, "shared_prefix": 16}
    with pytest.raises(ValueError, match=r"^shared_prefix is 16: expected at most the 0 tokens"):
        lean_attn_with_kvcache(Q, PAGES[:, :0], PAGES[:, :0], **options)
    assert prepared_for == []


def test_every_query_token_sees_the_prefix(prepared_for):
    q = half(2, 3, 4, 64)
    options: dict[str, Any] = {"block_table": TABLE, "cache_seqlens": 17, "config": OWN}
    options["shared_prefix"] = 16
    with pytest.raises(ValueError, match=r"^shared_prefix is 16: .* 15 tokens"):
        lean_attn_with_kvcache(q, PAGES, PAGES, causal=True, **options)
    lean_attn_with_kvcache(q, PAGES, PAGES, **options)


def test_a_scale_of_each_sequence_is_refused(prepared_for):
    pages = PAGES.to(torch.float8_e4m3fn)
    scales, options = torch.ones(2, 2), {**BOTH, "shared_prefix": 16, "config": OWN}
    with pytest.raises(NotImplementedError, match=r"^k_descale is \(2, 2\), of each sequence"):
        lean_attn_with_kvcache(Q, pages, pages, k_descale=scales, **options)
    lean_attn_with_kvcache(Q, pages, pages, k_descale=scales[:1], **options)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"cache_seqlens": numbers(20, 15)}, "^shared_prefix is 16: expected at most 15, the"),
        ({"block_table": TABLE.flip(1)}, r"^block_table\[1\] does not begin with the pages of"),
        ({"cache_seqlens": numbers(20, 49)}, r"^cache_seqlens\[1\] is 49: expected 0 to 48"),
    ],
)
def test_checked_calls_read_lengths_and_pages(arguments, words, prepared_for, monkeypatch):
    monkeypatch.setattr(checks, "CHECKS_VALUES", True)
    options: dict[str, Any] = {**BOTH, "shared_prefix": 16, "config": OWN}
    lean_attn_with_kvcache(Q, PAGES, PAGES, **options)
    with pytest.raises(ValueError, match=words):
        lean_attn_with_kvcache(Q, PAGES, PAGES, **{**options, **arguments})


@pytest.mark.parametrize(
    ("table", "lengths", "q_len", "prefix"),
    [
        ([[4, 0, 1], [4, 2, 1]], [40, 48], 1, 16),
        ([[4, 0, 1], [4, 0, 1]], [40, 48], 1, 32),
        ([[4, 0, 1], [4, 0, 1]], 48, 1, 48),
        ([[4, 0, 1], [4, 0, 1]], 48, 2, 32),
        ([[4, 0], [3, 0]], [32, 32], 1, 0),
        ([[4, 0], [4, 0]], [15, 32], 1, 0),
        ([[4, 0]], [32], 1, 0),
    ],
)
def test_the_prefix_of_a_table(table, lengths, q_len, prefix):
    for array in (np.array(table, np.int32), torch.tensor(table)):
        assert leanbench.shared_prefix(array, np.array(lengths), 16, q_len) == prefix


@pytest.mark.parametrize(
    ("table", "lengths", "page_size", "words"),
    [
        (TABLE[0], 40, 16, r"^block_table is \(3,\)"),
        (TABLE[:, None], 40, 16, r"^block_table is \(2, 1, 3\)"),
        (TABLE, [40, 48, 48], 16, r"lengths \(3,\)"),
        (TABLE, [], 16, r"lengths \(0,\)"),
        (TABLE, 40, 0, "^page_size is 0:"),
        (TABLE, 40, 16.0, "^page_size is 16.0:"),
    ],
)
def test_the_prefix_of_what_is_no_table_is_refused(table, lengths, page_size, words):
    with pytest.raises(ValueError, match=words):
        leanbench.shared_prefix(table, lengths, page_size)
