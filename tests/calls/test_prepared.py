"""Prepared launches: what a call finds again, what it does not, and what it keeps alive."""

from __future__ import annotations

import gc
import threading
import weakref
from dataclasses import replace
from typing import Any

import every_kind
import pytest
import torch
from attention_calls import assert_right, attend
from depth import label
from forms import half, misaligned
from leanbench.kernels.lean import LEAN
from leanbench.kernels.lean.configs import LeanTritonConfig

from leanbench.attention import lean_attn_with_kvcache, prepared
from leanbench.attention.prepared import PreparedLaunches, lengths_with
from leanbench.core.inputs import AttentionInputs, make_inputs
from leanbench.core.problem import AttentionProblem

CONFIG = LeanTritonConfig(64, 4, 1, ctas_per_sm=1, min_tiles_per_cta=1, align_grid=False)
PROBLEM = AttentionProblem(2, 4, 2, 140, 64)


@pytest.fixture(autouse=True)
def prepared_for(monkeypatch) -> list[int]:
    """Contexts that launches were prepared for in this test."""
    contexts: list[int] = []
    relaunch = LEAN.relaunch

    def prepare(inputs: AttentionInputs, config: Any) -> Any:
        contexts.append(inputs.context)
        return relaunch(inputs, config)

    monkeypatch.setattr(LEAN, "relaunch", prepare)
    monkeypatch.setattr(prepared, "_LAUNCHES", PreparedLaunches())
    return contexts


@pytest.mark.parametrize(
    "problem",
    [
        PROBLEM,
        AttentionProblem(2, 4, 2, (70, 33), 64, "bf16", "NHD"),
        AttentionProblem(2, 4, 2, (96, 20), 64, q_len=2, page_size=32),
    ],
    ids=label,
)
def test_other_tensors_of_the_same_shapes_are_launched_as_before(problem, device, prepared_for):
    outputs = []
    for _ in range(3):
        inputs = make_inputs(problem, device)
        out, lse = attend(inputs, config=CONFIG)
        assert_right(inputs, out, lse)
        outputs.append(out)
    assert len(prepared_for) == 1
    assert not torch.equal(outputs[0], outputs[1])


@pytest.mark.parametrize(
    ("tile_tokens", "lengths", "expected"),
    [
        # Lengths between two multiples of 64 share a launch.
        (64, (1, 37, 63, 2), [1]),
        (64, (1, 64, 65, 127, 128, 129, 140, 64, 129), [1, 64, 65, 128, 129]),
        # Those of more LeanTiles have another one.
        (16, (10, 16, 17, 32, 33, 63, 1), [10, 17, 33, 63, 1]),
    ],
)
def test_lengths_that_share_a_launch(tile_tokens, lengths, expected, device, prepared_for):
    inputs, config = make_inputs(PROBLEM, device), replace(CONFIG, tile_tokens=tile_tokens)
    for length in lengths:
        out, lse = attend(inputs, cache_seqlens=length, config=config)
        assert_right(replace(inputs, context=length), out, lse)
    assert prepared_for == expected


@pytest.mark.parametrize(
    ("length", "lengths"),
    [(0, range(1)), (1, range(1, 64)), (63, range(1, 64)), (64, range(64, 65))],
)
def test_lengths_that_share_their_settings(length, lengths):
    assert lengths_with(length) == lengths


def test_a_length_outside_the_cache_is_refused_after_one_inside(device):
    inputs = make_inputs(PROBLEM, device)
    attend(inputs, cache_seqlens=135, config=CONFIG)
    words = r"^cache_seqlens 141 is outside the cache's 0 to 140 tokens$"
    with pytest.raises(ValueError, match=words):
        attend(inputs, cache_seqlens=141, config=CONFIG)


def strided(cache: torch.Tensor) -> torch.Tensor:
    """The same numbers, a head_dim apart."""
    return torch.cat([cache, cache], dim=3)[..., : cache.shape[3]]


def test_what_decides_a_launch_is_another_launch(device, prepared_for):
    inputs = make_inputs(PROBLEM, device)
    lengths = torch.full((2,), 140, dtype=torch.int32, device=device)
    halves = {
        "q_len": (make_inputs(replace(PROBLEM, q_len=2), device), {}),
        "dtype": (make_inputs(replace(PROBLEM, dtype="bf16"), device), {}),
        "strides": (replace(inputs, k_cache=strided(inputs.k_cache)), {}),
        "alignment": (replace(inputs, q=misaligned(inputs.q)), {}),
        "scale": (replace(inputs, softmax_scale=0.3), {"softmax_scale": 0.3}),
        "a tensor of lengths": (inputs, {"cache_seqlens": lengths}),
        "settings": (inputs, {"config": replace(CONFIG, num_warps=2)}),
        "out": (inputs, {"out": torch.empty_like(inputs.q)}),
    }
    assert_right(inputs, *attend(inputs, config=CONFIG))
    for turn in range(2):
        for number, (changed, options) in enumerate(halves.values(), start=2):
            assert_right(changed, *attend(changed, **{"config": CONFIG, **options}))
            assert len(prepared_for) == (number if turn == 0 else 1 + len(halves))


def test_an_unsupported_call_is_refused_again(device, monkeypatch):
    monkeypatch.setattr(LEAN, "axes", LEAN.axes - {"causal"}, raising=False)
    inputs = make_inputs(replace(PROBLEM, q_len=2), device)
    attend(inputs, config=CONFIG)
    for _ in range(2):
        with pytest.raises(NotImplementedError, match="noncausal"):
            attend(inputs, causal=False, config=CONFIG)


def test_tensors_of_a_call_are_not_kept(device):
    inputs = make_inputs(AttentionProblem(2, 4, 2, (96, 20), 64, page_size=32), device)
    out, lse = attend(inputs, config=CONFIG)
    given = (inputs.q, inputs.k_cache, inputs.v_cache)
    kept: dict[str, Any] = {
        "cache_seqlens": inputs.cache_seqlens,
        "block_table": inputs.block_table,
    }
    alone = lean_attn_with_kvcache(*given, **kept, config=CONFIG)
    assert isinstance(alone, torch.Tensor)
    assert torch.equal(alone, out)
    watched = [weakref.ref(tensor) for tensor in (*given, *kept.values(), out, lse, alone)]
    del inputs, out, lse, alone, given, kept
    gc.collect()
    assert [tensor() for tensor in watched] == [None] * 8


def test_launches_are_forgotten_after_as_many_others(device, prepared_for, monkeypatch):
    monkeypatch.setattr(prepared, "_KEPT", 4)
    inputs = make_inputs(AttentionProblem(1, 2, 2, 40, 64), device)

    def call(number: int) -> None:
        attend(inputs, softmax_scale=number / 100, config=CONFIG)

    for number in range(20):
        call(number)
        # Used again and again, it stays.
        call(0)
    assert len(prepared_for) == 20
    launches = prepared._LAUNCHES
    assert len(launches._recent) + len(launches._before) <= 8
    call(1)
    assert len(prepared_for) == 21


def test_threads_prepare_their_own(device, prepared_for):
    inputs = make_inputs(PROBLEM, device)
    expected = attend(inputs, config=CONFIG)
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.extend(attend(inputs, config=CONFIG)))
    thread.start()
    thread.join()
    assert all(torch.equal(*both) for both in zip(results, expected, strict=True))
    assert len(prepared_for) == 2


def test_out_takes_the_output(device):
    inputs = make_inputs(replace(PROBLEM, q_len=2), device)
    wide = torch.full((2, 2, 8, 64), float("nan"), dtype=torch.float16, device=device)
    out = wide[:, :, 2:6]
    for _ in range(2):
        wide.fill_(float("nan"))
        result, lse = attend(inputs, out=out, config=CONFIG)
        assert result is out
        assert_right(inputs, out, lse)
        assert wide[:, :, :2].isnan().all()
        assert wide[:, :, 6:].isnan().all()


Q, CACHE = half(2, 1, 4, 64), half(2, 30, 2, 64)


@pytest.mark.parametrize(
    ("out", "words"),
    [
        (Q[:1], r"^out is \(1, 1, 4, 64\) torch.float16 on cpu: expected \(2, 1, 4, 64\)"),
        (Q.bfloat16(), "^out is .* torch.bfloat16 on cpu: expected .* torch.float16 on cpu"),
        (Q.to("meta"), "^out is .* on meta: expected .* on cpu"),
        (Q.transpose(2, 3).contiguous().transpose(2, 3), "^the last stride of out is 4: .* 1$"),
        (Q[:1].expand(2, -1, -1, -1), r"^out has strides \(0, 256, 64, 1\)"),
    ],
    ids=["shape", "dtype", "device", "stride", "expanded"],
)
def test_an_out_that_does_not_fit_is_refused(out, words, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ValueError, match=words):
        lean_attn_with_kvcache(Q, CACHE, CACHE, out=out)


def grown(tokens: int, device: str) -> AttentionInputs:
    """Caches as torch.cat makes them: dense, with no room for more tokens."""
    return make_inputs(replace(PROBLEM, context=tokens), device)


@pytest.mark.parametrize(("any_capacity", "expected"), [(True, [65, 128, 129]), (False, None)])
def test_caches_that_grow_share_a_launch(any_capacity, expected, monkeypatch):
    """Share a launch that takes their strides; otherwise each capacity has its own."""
    monkeypatch.setattr(every_kind.Relaunched, "any_capacity", any_capacity)
    seen = every_kind.take_every_kind(monkeypatch)
    tokens = [65, 66, 96, 128, 129, 130, 65]
    for count in tokens:
        inputs = grown(count, "cpu")
        assert_right(inputs, *attend(inputs))
        assert_right(replace(inputs, context=count), *attend(inputs, cache_seqlens=count))
    assert [inputs.context for inputs in seen] == (tokens if expected is None else expected)


@pytest.mark.parametrize("appends", [False, True])
def test_caches_that_grow_by_what_a_call_appends_share_none(appends, monkeypatch):
    monkeypatch.setattr(every_kind.Relaunched, "any_capacity", True)
    seen = every_kind.take_every_kind(monkeypatch)
    for count in (65, 66, 96):
        inputs = grown(count, "cpu")
        new = torch.randn_like(inputs.k_cache[:, -1:])
        more: dict[str, Any] = {"k": new, "v": new, "cache_seqlens": count - 1} if appends else {}
        attend(inputs, softcap=30.0, **more)
    assert len(seen) == (3 if appends else 1)


def test_a_length_past_a_cache_that_shares_a_launch_is_refused(monkeypatch):
    monkeypatch.setattr(every_kind.Relaunched, "any_capacity", True)
    every_kind.take_every_kind(monkeypatch)
    attend(grown(100, "cpu"))
    with pytest.raises(ValueError, match=r"cache_seqlens 80 is outside the cache's 0 to 70 tokens"):
        attend(grown(70, "cpu"), cache_seqlens=80)


def test_a_tensor_in_another_role_is_another_launch(monkeypatch):
    seen = every_kind.take_every_kind(monkeypatch)
    inputs, numbers = make_inputs(PROBLEM, "cpu"), torch.tensor([0.5, 0.25, 1.0, 2.0])
    for role in ("sinks", "alibi_slopes") * 2:
        asked: dict[str, Any] = {role: numbers}
        assert_right(replace(inputs, **asked), *attend(inputs, **asked))
    assert [inputs.sinks is numbers for inputs in seen] == [True, False]


@pytest.mark.parametrize("seen_before", [False, True])
def test_what_is_no_tensor_is_refused_by_name(seen_before, monkeypatch):
    every_kind.take_every_kind(monkeypatch)
    inputs = make_inputs(PROBLEM, "cpu")
    if seen_before:
        attend(inputs, sinks=torch.ones(4), attention_chunk=1)
    for asked, words in (
        ({"sinks": [1.0] * 4}, r"^sinks is \[1.0, 1.0, 1.0, 1.0\]: expected a tensor$"),
        ({"sinks": torch.ones(4), "attention_chunk": True}, r"^attention_chunk is True: expected"),
    ):
        with pytest.raises(ValueError, match=words):
            attend(inputs, **asked)
