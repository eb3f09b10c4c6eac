"""Calls of new sizes: laid out as a first call, after checks as strict, without preparing anew."""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from call_counts import function_calls
from depth import diagonal
from every_kind import KINDS
from fake_cuda import FakeCuda, use_fake_driver
from leanbench.kernels.lean import cuda, cuda_kernel

from leanbench import lean_attn_with_kvcache, lean_mla_with_kvcache
from leanbench.attention import fast, prepared
from leanbench.attention.prepared import PreparedLaunches
from leanbench.check.launches import api_arguments
from leanbench.core.inputs import AttentionInputs, make_inputs
from leanbench.core.problem import AttentionProblem

#: Pointers to memory of its own, and numbers of a launch.
_OWN = ("out", "lse", "epoch", "kept", "kept_key")
LATENT = {"latent": True, "kv_heads": 1, "q_heads": 32, "head_dim": 576, "v_head_dim": 512}
#: Kinds without the sizes that tests draw.
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "many query tokens": {"q_len": 40},
    "a pair of heads": {"head_dim": 80},
    "wide": {"head_dim": 256},
    "blocks of KV heads": {"select": "2x16"},
    "latent": LATENT,
    "latent in fp8": {**LATENT, "kv_dtype": "e4m3"},
    **{kind: {k: v for k, v in axes.items() if k != "context"} for kind, axes in KINDS.items()},
}


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Let CPU tensors reach a fake driver as if they were on an H200, without the C path."""
    monkeypatch.setattr(fast, "is_on", False)
    monkeypatch.setattr(cuda, "refusal", cuda.misalignment)
    monkeypatch.setattr(cuda_kernel, "missing", lambda *_: None)
    return use_fake_driver(monkeypatch)


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the calls that are checked in full."""
    calls: list[Any] = []
    check = prepared._check
    monkeypatch.setattr(prepared, "_check", lambda call: (calls.append(call), check(call)))
    return calls


def drawn(axes: dict[str, Any], draw: random.Random) -> AttentionInputs:
    """Return a call of a kind with sizes at random."""
    batch, context = draw.choice([1, 2, 3, 9]), draw.randint(50, 700)
    fixed = {"q_heads": 8, "kv_heads": 2, "head_dim": 64, "kv_layout": "NHD", **axes}
    if "page_size" in axes:
        fixed["lengths_on"] = "device"
    if axes.get("q_lens"):
        fixed["q_lens"] = (*(draw.randint(1, 4) for _ in range(batch - 1)), 4)
    if "select" in axes:
        fixed["select"] = f"{draw.randint(1, 30)}x16"
    else:
        fixed["capacity"] = context + draw.randint(0, 300)
    problem = AttentionProblem(batch=batch, context=context, **fixed)
    inputs = make_inputs(problem, "cpu", seed=1)
    if inputs.rotary_cos is not None:
        tables = inputs.q.new_ones(1200, problem.rotary_dim // 2)
        inputs = replace(inputs, rotary_cos=tables, rotary_sin=tables)
    return inputs


def call(inputs: AttentionInputs, launches: PreparedLaunches, **changed: Any) -> None:
    prepared._LAUNCHES = launches
    arguments = {**api_arguments(inputs), "k_cache": inputs.k_cache}
    arguments |= {"return_softmax_lse": False, **changed}
    if not inputs.latent:
        lean_attn_with_kvcache(inputs.q, v_cache=inputs.v_cache, **arguments)
        return
    names = ("cache_seqlens", "softmax_scale", "causal", "block_table", "k_descale")
    names += ("return_softmax_lse",)
    given = {name: arguments[name] for name in names if name in arguments}
    lean_mla_with_kvcache(inputs.q, arguments["k_cache"], **given)


def outcome(driver: FakeCuda, make: Callable[[], None]) -> list[Any]:
    """Return the launches of a call, without `_OWN`, or its error."""
    driver.launches.clear()
    try:
        make()
    except (ValueError, NotImplementedError) as error:
        return [("", repr(error))]
    for launch in driver.launches:
        for name in _OWN:
            setattr(launch.params, name, 0)
    return [(bytes(params), *launch) for params, *launch in driver.launches]


def compare(
    driver: FakeCuda,
    launches: PreparedLaunches,
    inputs: AttentionInputs,
    changed: dict[str, Any] | None = None,
) -> None:
    """Check that the outcome of a call, of a known family or not, is that of a first call.

    Where arguments are `changed`, tensors may be copies, and Triton may launch.
    """
    known, first = (
        outcome(driver, lambda of=of: call(inputs, of, **(changed or {})))
        for of in (launches, PreparedLaunches())
    )
    if changed is None:
        assert known == first != []
    else:
        assert [launch[1:] for launch in known] == [launch[1:] for launch in first]


@pytest.mark.parametrize(
    ("kind", "layout", "lengths_on"),
    diagonal(list(CALLS), ["NHD", "HND"], ["host", "device"], keep=2),
)
def test_a_new_size_is_launched_as_a_first_call(kind, layout, lengths_on, driver, checked):
    draw, launches, families = random.Random(1), PreparedLaunches(), set()
    with torch.no_grad():
        for _ in range(12):
            inputs = drawn({"lengths_on": lengths_on, "kv_layout": layout, **CALLS[kind]}, draw)
            before = len(checked)
            compare(driver, launches, inputs)
            # A first call is checked, one of a known family is not.
            families.add(len(checked) - before)
    assert 1 in families
    # A batch of 1 is another family. Each number of packed query tokens is one.
    assert len(launches.families) <= (12 if "q_lens" in CALLS[kind] else 6)


@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("kind", ["plain", "wide", "latent", "appended to pages", "packed"])
def test_sizes_of_a_family_do_not_disturb_each_other(kind, with_lse, driver):
    """The first call of a size borrows the family's launch, the second gets its own."""
    draw, launches = random.Random(4), PreparedLaunches()
    sizes = [drawn({"lengths_on": "device", **CALLS[kind]}, draw) for _ in range(6)]
    changed = {"return_softmax_lse": with_lse}
    with torch.no_grad():

        def first_calls() -> list[Any]:
            return [
                outcome(driver, lambda of=of: call(of, PreparedLaunches(), **changed))
                for of in sizes
            ]

        # The second time, the workspace is as large as any of them needs.
        _, expected = first_calls(), first_calls()
        for number in (draw.randrange(6) for _ in range(60)):
            found = outcome(driver, lambda of=sizes[number]: call(of, launches, **changed))
            assert found == expected[number] != []
    assert len({str(each) for each in expected}) == 6
    assert len(launches._recent) == 6


WRONG: dict[str, Callable[[AttentionInputs], dict[str, Any]]] = {
    "fewer lengths": lambda inputs: {"cache_seqlens": inputs.q.new_zeros(1, dtype=torch.int32)},
    "lengths apart": lambda inputs: {
        "cache_seqlens": inputs.q.new_zeros(2 * inputs.batch, dtype=torch.int32)[::2]
    },
    "a length past the end": lambda inputs: {"cache_seqlens": inputs.capacity + 1},
    "a length below 0": lambda inputs: {"cache_seqlens": -1},
    "fewer rows of K": lambda inputs: {"k_cache": inputs.k_cache[:-1]},
    "fewer tokens of K": lambda inputs: {"k_cache": inputs.k_cache[:, :-1]},
    "K apart": lambda inputs: {"k_cache": torch.cat([inputs.k_cache] * 2, 3)[..., ::2]},
    "K at 8 bytes": lambda inputs: {
        "k_cache": torch.cat([inputs.k_cache] * 2, 3)[..., 4 : 4 + inputs.head_dim]
    },
    "one row of K": lambda inputs: {"k_cache": inputs.k_cache[:1].expand(inputs.k_cache.shape)},
    "an output of fewer": lambda inputs: {"out": torch.empty_like(inputs.out)[:-1]},
    "an expanded output": lambda inputs: {"out": inputs.out[:1].expand(inputs.out.shape)},
    "another dtype": lambda inputs: {"k_cache": inputs.k_cache.float()},
    "slopes of fewer": lambda inputs: {"alibi_slopes": torch.ones(inputs.batch - 1, 8)},
    "slopes of heads": lambda inputs: {"alibi_slopes": torch.ones(8)},
    "slopes of sequences": lambda inputs: {"alibi_slopes": torch.ones(inputs.batch, 8)},
    "padding of fewer": lambda inputs: {"cache_leftpad": torch.zeros(1, dtype=torch.int32)},
    "rows of fewer": lambda inputs: {"cache_batch_idx": torch.zeros(1, dtype=torch.int32)},
    "fewer new tokens": lambda inputs: {
        "k": inputs.q.new_zeros(inputs.batch - 1, 1, 2, 64),
        "v": inputs.q.new_zeros(inputs.batch, 1, 2, 64),
    },
    "too many new tokens": lambda inputs: {
        name: inputs.q.new_zeros(inputs.batch, inputs.capacity + 1, 2, 64) for name in "kv"
    },
    "short tables": lambda inputs: {
        **{name: inputs.q.new_zeros(inputs.batch, 1, 2, 64) for name in "kv"},
        **{f"rotary_{name}": inputs.q.new_zeros(60, 16) for name in ("cos", "sin")},
    },
    "packed": lambda inputs: {"cu_seqlens_q": torch.zeros(inputs.batch, dtype=torch.int32)},
}


@pytest.mark.parametrize(
    ("name", "kind", "lengths_on"),
    diagonal(
        list(WRONG),
        ["plain", "wide", "appended", "ALiBi", "many at once"],
        ["host", "device"],
        keep=4,
    ),
)
def test_a_known_family_is_checked_as_strictly(name, kind, lengths_on, driver):
    wrong = WRONG[name]
    launches, draw = PreparedLaunches(), random.Random(2)
    with torch.no_grad():
        for _ in range(5):
            inputs = drawn({**CALLS[kind], "lengths_on": lengths_on}, draw)
            if inputs.batch > 1:
                compare(driver, launches, inputs)
                compare(driver, launches, inputs, wrong(inputs))


@pytest.mark.parametrize("kind", ["appended to pages", "scales of pages", "blocks of KV heads"])
def test_pages_are_checked_as_strictly(kind, driver):
    launches, draw = PreparedLaunches(), random.Random(2)
    with torch.no_grad():
        for _ in range(5):
            inputs = drawn(CALLS[kind], draw)
            table, pages = inputs.block_table, inputs.k_cache.shape[0]
            assert table is not None
            columns = table.shape[-1]
            wide = table.new_zeros(*table.shape[:-1], 2 * columns)
            scales = torch.ones(pages - 1)
            for changed in (
                None,
                {"block_table": table[:-1]},
                {"block_table": table[..., :0]},
                {"block_table": table[:, None, :]},
                {"block_table": table[:, 0]},
                {"block_table": table[:1].expand(table.shape)},
                {"block_table": wide[..., ::2]},
                {"block_table": wide[..., :columns]},
                {"block_table": table.long()},
                {"k_cache": inputs.k_cache[:-1]},
                {"k_page_descale": scales, "v_page_descale": scales},
            ):
                compare(driver, launches, inputs, changed)


Q, CACHE = torch.zeros(64, 1, 8, 64).half(), torch.zeros(64, 300, 2, 64).half()
TABLE, LENGTHS = torch.zeros(64 * 20, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)


def packed(batch: int, rows: int, index: bool) -> dict[str, Any]:
    """Return a call of packed query tokens, with `rows` in its block table."""
    cache = torch.zeros(8, 16, 2, 64).half()
    arguments: dict[str, Any] = {
        "k_cache": cache,
        "v_cache": cache,
        "q": cache[0, :5].repeat(1, 4, 1),
    }
    arguments["cu_seqlens_q"] = torch.arange(batch + 1, dtype=torch.int32)
    arguments["cache_seqlens"] = torch.zeros(batch, dtype=torch.int32)
    arguments["block_table"] = torch.zeros(rows, 4, dtype=torch.int32)
    if index:
        arguments["cache_batch_idx"] = torch.zeros(batch, dtype=torch.int32)
    return arguments | {"max_seqlen_q": 4}


def appended(batch: int, rows: int) -> dict[str, Any]:
    """Return a call that appends to pages that all sequences share, by a table of equal rows."""
    cache, new = torch.zeros(8, 16, 2, 64).half(), torch.zeros(batch, 1, 2, 64).half()
    zeros = torch.zeros(batch, dtype=torch.int32)
    arguments: dict[str, Any] = {"k_cache": cache, "v_cache": cache, "k": new, "v": new}
    arguments |= {"q": torch.zeros(batch, 1, 8, 64).half(), "cache_seqlens": zeros}
    table = torch.zeros(4, dtype=torch.int32).as_strided((rows, 4), (0, 1))
    return arguments | {"cache_batch_idx": zeros, "block_table": table}


def packed_new(batch: int, tokens: int) -> dict[str, Any]:
    """Return a call that appends packed tokens."""
    cache, new = torch.zeros(batch, 200, 2, 64).half(), torch.zeros(tokens, 2, 64).half()
    arguments: dict[str, Any] = {"k_cache": cache, "v_cache": cache, "k": new, "v": new}
    arguments["q"] = torch.zeros(batch, 1, 8, 64).half()
    arguments["cu_seqlens_k_new"] = torch.zeros(batch + 1, dtype=torch.int32)
    return arguments | {"cache_seqlens": torch.zeros(batch, dtype=torch.int32)}


@pytest.mark.parametrize(
    ("known", "wrong", "words"),
    [
        (packed(3, 3, False), packed(0, 0, False), "block_table is|cu_seqlens_q is"),
        (packed(3, 3, True), packed(0, 3, True), "cu_seqlens_q is"),
        (packed(3, 1, True), packed(2, 0, True), "block_table is"),
        (appended(3, 1), appended(4, 2), "all sequences have the same pages"),
        (packed_new(3, 1), packed_new(2, 0), "which has a size 0"),
    ],
    ids=["no batch", "no batch, rows by index", "no rows", "equal rows", "no new tokens"],
)
def test_sizes_of_0_and_1_are_checked(known, wrong, words, driver):
    lean_attn_with_kvcache(**known)
    with pytest.raises(ValueError, match=words):
        lean_attn_with_kvcache(**wrong)


def sized(batch: int, tokens: int, how: str) -> None:
    q, cache = Q[:batch], CACHE[:batch, :tokens]
    if how == "host":
        lean_attn_with_kvcache(q, cache, cache)
    elif how == "device":
        lean_attn_with_kvcache(q, cache, cache, cache_seqlens=LENGTHS[:batch])
    else:
        pages, columns = CACHE.view(1200, 16, 2, 64), 1 + tokens // 16
        table = TABLE[: batch * columns].view(batch, columns)
        lean_attn_with_kvcache(q, pages, pages, cache_seqlens=LENGTHS[:batch], block_table=table)


@pytest.mark.parametrize("how", ["host", "device", "paged"])
def test_a_new_size_makes_few_function_calls(how, driver):
    with torch.no_grad():
        for batch, tokens in ((2, 250), (3, 200), (5, 150), (5, 230)):
            sized(batch, tokens, how)
        # Its settings are found by now, with those of sizes nearby.
        assert function_calls(lambda: sized(6, 235, how)) - 2 <= 76


@pytest.mark.deep
def test_ten_thousand_sizes_take_no_more_memory(driver, monkeypatch):
    monkeypatch.setattr(prepared, "_KEPT", 64)
    monkeypatch.setattr(prepared, "_MOST_CHOICES", 64)
    draw = random.Random(3)

    def grow(count: int) -> int:
        for _ in range(count):
            how = draw.choice(["host", "device", "paged"])
            batch, tokens = draw.randint(2, 64), draw.randint(1, 300)
            # A size has a launch of its own from the second call on.
            for _ in range(draw.choice([1, 1, 2])):
                sized(batch, tokens, how)
            driver.launches.clear()
            driver.moved.clear()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    with torch.no_grad():
        tracemalloc.start()
        try:
            before = grow(2000)
            assert grow(10_000) < 1.05 * before
        finally:
            tracemalloc.stop()
    launches = prepared._LAUNCHES
    assert max(len(launches._once), len(launches._recent), len(launches._before)) <= 64
    assert all(len(family.choices) <= 64 for family in launches.families.values())
