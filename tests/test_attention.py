"""`lean_attn_with_kvcache`: its results, and its rejection of unsupported calls."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from attention_calls import assert_right, attend, sentences
from depth import label
from forms import half
from leanbench.kernels.lean import LEAN
from leanbench.kernels.lean.configs import LeanTritonConfig

from leanbench.attention import lean_attn_with_kvcache, prepared
from leanbench.attention.prepared import PreparedLaunches
from leanbench.configs.lookup import Choice
from leanbench.core.config import TileConfig
from leanbench.core.errors import UserError
from leanbench.core.inputs import make_inputs
from leanbench.core.kernel import Kernel
from leanbench.core.problem import AttentionProblem

CONFIG = LeanTritonConfig(32, 4, 2, ctas_per_sm=1, min_tiles_per_cta=1, align_grid=False)


@pytest.mark.parametrize(
    "problem",
    [
        AttentionProblem(1, 3, 3, 200, 64),
        AttentionProblem(2, 8, 2, 90, 128, "bf16", "NHD"),
        AttentionProblem(3, 4, 2, (1, 150, 33), 80, "fp16", "NHD"),
        AttentionProblem(2, 5, 1, (77, 140), 96, "bf16"),
        AttentionProblem(2, 6, 2, 64, 64, "fp16", "HND", q_len=3),
        AttentionProblem(2, 4, 2, 96, 128, "bf16", "NHD", page_size=32),
        AttentionProblem(3, 4, 1, (2, 150, 33), 80, "fp16", "HND", 5, 16),
    ],
    ids=label,
)
@pytest.mark.parametrize("config", [None, CONFIG], ids=["default", "own"])
def test_it_is_right(problem, config, device):
    inputs = make_inputs(problem, device)
    out, lse = attend(inputs, config=config)
    assert (out.shape, out.dtype) == (inputs.q.shape, inputs.q.dtype)
    assert (lse.shape, lse.dtype) == (inputs.lse.shape, torch.float32)
    assert_right(inputs, out, lse)


@pytest.mark.parametrize(
    "problem",
    [AttentionProblem(2, 4, 2, 100, 64), AttentionProblem(2, 4, 2, 64, 64, q_len=2, page_size=32)],
    ids=["contiguous", "pages"],
)
def test_a_number_a_tensor_and_none_are_the_same_lengths(problem, device):
    inputs = make_inputs(problem, device)
    whole = attend(inputs, config=CONFIG)
    assert_right(inputs, *whole)
    lengths = torch.full((2,), inputs.context, dtype=torch.int32, device=device)
    for same in (inputs.context, lengths):
        assert_right(inputs, *attend(inputs, cache_seqlens=same, config=CONFIG))
    for part in (37, lengths - inputs.context + 37):
        out, lse = attend(inputs, cache_seqlens=part, config=CONFIG)
        assert_right(replace(inputs, context=37), out, lse)
        assert (lse < whole[1]).all()


@pytest.mark.parametrize("head_dim", [64, 60])
@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16, torch.device("meta")], ids=str)
def test_torch_defaults_of_model_loaders_change_nothing(default, head_dim, device):
    q, k, v = (
        torch.randn(2, tokens, heads, head_dim, dtype=torch.float16, device=device)
        for tokens, heads in ((1, 4), (40, 2), (40, 2))
    )
    with contextlib.ExitStack() as stack:
        if isinstance(default, torch.device):
            stack.enter_context(default)
        else:
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(default)
        results = lean_attn_with_kvcache(q, k, v, cache_seqlens=33, return_softmax_lse=True)
    expected = lean_attn_with_kvcache(q, k, v, cache_seqlens=33, return_softmax_lse=True)
    for result, usual in zip(results, expected, strict=True):
        assert (result.dtype, result.device) == (usual.dtype, usual.device)
        assert torch.equal(result, usual)


def test_a_block_table_cut_from_a_wider_one(device):
    inputs = make_inputs(AttentionProblem(3, 4, 2, 96, 64, page_size=32), device)
    whole = attend(inputs)
    assert inputs.block_table is not None
    wider = inputs.block_table.new_full((3, 50), -1)
    wider[:, :3] = inputs.block_table
    cut = replace(inputs, block_table=wider[:, :3])
    assert [torch.equal(*pair) for pair in zip(attend(cut), whole, strict=True)] == [True, True]
    shared = replace(inputs, block_table=inputs.block_table[:1].expand(3, 3))
    assert_right(shared, *attend(shared))


@pytest.mark.parametrize("q_len", [1, 3])
def test_a_query_cut_from_a_larger_tensor(q_len, device):
    """Cut Q from a fused QKV projection: heads are contiguous, tokens are not."""
    inputs = make_inputs(AttentionProblem(3, 4, 2, 45, 64, q_len=q_len), device)
    fused = torch.randn(3, q_len, 8, 64, device=device).to(inputs.q.dtype)
    inputs = replace(inputs, q=fused[:, :, 2:6])
    assert not inputs.q.is_contiguous()
    assert_right(inputs, *attend(inputs))


@pytest.mark.parametrize(
    "length", [0, torch.tensor([0], dtype=torch.int32)], ids=["number", "tensor"]
)
def test_an_empty_cache_gives_zero(length, device):
    inputs = make_inputs(AttentionProblem(1, 4, 2, 50, 64), device)
    length = length.to(device) if isinstance(length, torch.Tensor) else length
    out, lse = attend(inputs, cache_seqlens=length)
    assert (out == 0).all()
    assert (lse == float("-inf")).all()


@pytest.mark.parametrize("splits", [-1, 1, 4, 7, np.int32(3)], ids=repr)
def test_arguments_without_effect(splits, device):
    inputs = make_inputs(AttentionProblem(1, 2, 2, 40, 64), device)
    names = (
        "k v rotary_cos rotary_sin cache_batch_idx cache_leftpad alibi_slopes page_table q_descale"
        " cu_seqlens_q max_seqlen_q sinks learnable_sink qv rotary_seqlens cu_seqlens_k_new"
    ).split()
    options = {
        **dict.fromkeys(names),
        "window_size": (-1, -1),
        "softcap": 0.0,
        "attention_chunk": 0,
        "causal": True,
        "rotary_interleaved": False,
        "num_splits": splits,
        "k_descale": torch.ones(1, 2, device=device),
        "v_descale": 0.5,
        "scheduler_metadata": torch.zeros(3),
        "pack_gqa": True,
        "sm_margin": 8,
    }
    for result, expected in zip(attend(inputs, **options), attend(inputs), strict=True):
        assert torch.equal(result, expected)


@pytest.mark.parametrize(
    ("head_dim", "q_len", "page_size", "words"),
    [
        (64, 17, None, "17 query tokens .* at most 16"),
        (64, 1, 40, "pages of 40 tokens .* one of 16, 32, 64, 128, 256"),
        (72, 1, None, "head_dim 72 .* one of 64, 80, 96, 128, 256"),
    ],
)
def test_unsupported_sizes(head_dim, q_len, page_size, words, monkeypatch):
    for name in ("head_dims", "page_sizes", "max_q_len"):
        monkeypatch.setattr(LEAN, name, getattr(Kernel, name), raising=False)
    pages = None if page_size is None else torch.zeros(1, 1, dtype=torch.int32)
    q, cache = half(1, q_len, 2, head_dim), half(1, 40, 2, head_dim)
    with pytest.raises(NotImplementedError, match=words):
        lean_attn_with_kvcache(q, cache, cache, block_table=pages)


def test_an_argument_that_flash_attn_does_not_have_either(device):
    inputs = make_inputs(AttentionProblem(1, 2, 2, 40, 64), device)
    with pytest.raises(TypeError, match=r"^lean_attn_with_kvcache has no argument 'dropout'$"):
        attend(inputs, dropout=0.1)


Q, CACHE = half(2, 1, 8, 64), half(2, 30, 4, 64)


def table(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


#: 7 pages; each of two sequences has 4.
PAGES = {"k_cache": half(7, 16, 4, 64), "v_cache": half(7, 16, 4, 64), "block_table": table(2, 4)}
NO_TENSOR: list[dict[str, Any]] = [
    {"q": None},
    {"v_cache": [1.0]},
    {**PAGES, "block_table": [[0, 1, 2, 3]] * 2},
    {**PAGES, "block_table": None, "page_table": [[0] * 4] * 2},
    {"out": [0.0]},
    {"config": "lean", "batch_invariant": True},
]
#: The snapshot has the sentence of each: the argument, its value and the limit.
INCONSISTENT: list[dict[str, Any]] = [
    {"q": half(2, 8, 64)},
    *({"num_splits": splits} for splits in ("two", 0.5, [0])),
    {"cache_seqlens": np.array([3, 4])},
    {"softcap": "x"},
    {"softmax_scale": "a"},
    {"q": half(5, 8, 64), "cu_seqlens_q": torch.tensor([0, 5]).int(), "max_seqlen_q": 5},
    {"k_cache": half(2, 30, 256)},
    {"v_cache": half(2, 29, 4, 64)},
    {"k_cache": half(2, 0, 4, 64), "v_cache": half(2, 0, 4, 64), "cache_seqlens": 1},
    {"k_cache": half(2, 30, 0, 64), "v_cache": half(2, 30, 0, 64)},
    {"q": half(0, 1, 8, 64)},
    {"k_cache": half(2, 30, 256), "block_table": table(2, 1)},
    {**PAGES, "block_table": table(2)},
    {**PAGES, "block_table": table(3, 4)},
    {**PAGES, "block_table": table(2, 0)},
    {**PAGES, "block_table": table(2, 4).long()},
    {**PAGES, "block_table": table(2, 4).to("meta")},
    {**PAGES, "cache_seqlens": 65},
    {"q": half(3, 1, 8, 64)},
    {"q": half(2, 1, 8, 128)},
    {"q": half(2, 1, 6, 64)},
    {"q": Q.float()},
    {"v_cache": CACHE.bfloat16()},
    {"q": Q.float(), **dict.fromkeys(("k_cache", "v_cache"), CACHE.float())},
    {"k_cache": CACHE.to("meta")},
    {"v_cache": half(2, 30, 64, 4).transpose(2, 3)},
    {"cache_seqlens": torch.tensor([3, 4])},
    {"cache_seqlens": torch.tensor([3]).int()},
    {"cache_seqlens": table(2).to("meta")},
    {"cache_seqlens": 31},
    {"cache_seqlens": -1},
]


def test_invalid_arguments(monkeypatch, snapshot):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    call = {"q": Q, "k_cache": CACHE, "v_cache": CACHE}
    for error, cases in ((TypeError, NO_TENSOR), (ValueError, INCONSISTENT)):
        assert sentences(error, [{**call, **arguments} for arguments in cases]) == snapshot


LENGTHS = torch.full((2,), 3, dtype=torch.int32)
#: A call for each optional tensor.
WITH = {
    "q": {},
    "k_cache": {},
    "v_cache": {},
    "out": {"out": Q},
    "cache_seqlens": {"cache_seqlens": LENGTHS},
    "block_table": PAGES,
    "k": {"k": CACHE[:, :1], "v": CACHE[:, :1], "cache_seqlens": LENGTHS},
    "sinks": {"sinks": torch.zeros(8)},
    "cache_leftpad": {"cache_leftpad": LENGTHS},
    "qv": {"qv": Q},
}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *((name, layout) for name in WITH for layout in ("sparse", "nested")),
        *((name, "jagged") for name in ("q", "k_cache", "v_cache", "qv")),
    ],
)
def test_a_tensor_that_is_not_dense_is_one_sentence(name, layout, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    call = {"q": Q, "k_cache": CACHE, "v_cache": CACHE, **WITH[name]}
    if layout == "sparse":
        call[name], words = call[name].to_sparse(), "of layout torch.sparse_coo"
    else:
        form = torch.jagged if layout == "jagged" else torch.strided
        call[name], words = torch.nested.nested_tensor([*call[name]], layout=form), "nested"
    with pytest.raises(ValueError, match=f"^{name} is {words}: pass a dense tensor$"):
        lean_attn_with_kvcache(**call)


@pytest.mark.parametrize("config", [None, CONFIG], ids=["default", "own"])
def test_cpu_tensors_need_the_interpreter(config, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    words = r"^the tensors are on cpu: move them to a GPU, or set TRITON_INTERPRET=1"
    with pytest.raises(UserError, match=words):
        lean_attn_with_kvcache(Q, CACHE, CACHE, config=config)


@pytest.fixture
def looked_up(monkeypatch) -> list[tuple[AttentionProblem, bool]]:
    """Record the arguments of `Settings`: the problem, and whether all lengths are equal."""
    lookups: list[tuple[AttentionProblem, bool]] = []

    class Tuned:
        def __init__(
            self, kernel: Any, problem: AttentionProblem, spec: Any, *, uniform: bool
        ) -> None:
            assert kernel.name == "lean"
            lookups.append((problem, uniform))

        def choice(self, batch: int, tokens: int) -> Choice:
            return Choice(replace(CONFIG, num_stages=1), "tuned", "in this test")

    monkeypatch.setattr(prepared, "Settings", Tuned)
    monkeypatch.setattr(prepared, "_LAUNCHES", PreparedLaunches())
    return lookups


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_settings_are_looked_up_for_the_problem_as_it_is(looked_up, device, layout):
    problem = AttentionProblem(2, 8, 4, 90, 64, "bf16", layout)
    inputs = make_inputs(problem, device)
    assert_right(inputs, *attend(inputs))
    attend(inputs, cache_seqlens=70)
    attend(inputs, cache_seqlens=torch.tensor([90, 7], dtype=torch.int32, device=device))
    # Lengths between two multiples of 64 share theirs; a dense cache's capacity is one of them.
    longest = replace(problem, context=127)
    alike = 1 if layout == "HND" else 2
    assert looked_up == [*[(longest, True)] * alike, (problem, False)]
    several = make_inputs(replace(problem, context=128, q_len=2, page_size=16), device)
    attend(several)
    assert looked_up.pop() == (replace(problem, context=128, q_len=2, page_size=16), True)
    # Once per shape, and not for given settings.
    attend(inputs)
    attend(inputs, cache_seqlens=33, config=CONFIG)
    assert len(looked_up) == alike + 1


def test_tuned_settings_are_launched(looked_up, device, monkeypatch):
    launched: list[TileConfig] = []
    relaunch = LEAN.relaunch
    monkeypatch.setattr(
        LEAN, "relaunch", lambda inputs, config: launched.append(config) or relaunch(inputs, config)
    )
    inputs = make_inputs(AttentionProblem(1, 4, 2, 100, 64), device)
    assert_right(inputs, *attend(inputs))
    assert launched == [replace(CONFIG, num_stages=1)]


def test_what_was_tuned_since_the_last_call_is_looked_up(looked_up, device, monkeypatch):
    inputs = make_inputs(AttentionProblem(1, 4, 2, 100, 64), device)
    attend(inputs)
    monkeypatch.setenv("LEANBENCH_HOME", "elsewhere")
    attend(inputs)
    assert len(looked_up) == 2
    monkeypatch.setenv("LEANBENCH_CONFIGS", "on")
    attend(inputs)
    assert len(looked_up) == 3


def test_tuned_settings_that_do_not_fit_any_more_give_way(looked_up, device, monkeypatch):
    class OutOfResources(Exception):
        """An error with the name of Triton's."""

    relaunch = LEAN.relaunch
    tried: list[int] = []

    def relaunch_or_not(inputs: Any, config: TileConfig) -> Any:
        tried.append(config.num_stages)
        if config.num_stages == 1:
            raise OutOfResources("shared memory, 300000 of 232448 bytes\nmore")
        return relaunch(inputs, config)

    monkeypatch.setattr(LEAN, "relaunch", relaunch_or_not)
    monkeypatch.setattr(LEAN, "default_config", lambda problem, spec: CONFIG)
    tuned = replace(CONFIG, num_stages=1)
    # The refusals of another GPU and of wider rows are none of this one's.
    others = ((torch.device("cuda", 7), 64), (torch.device(device), 128))
    refused = {(each, tuned, torch.float16, width, width) for each, width in others}
    monkeypatch.setattr(prepared, "_too_large", refused)
    inputs = make_inputs(AttentionProblem(1, 4, 2, 100, 64), device)
    words = r"tuned settings do not fit any more \(shared memory, 300000 of 232448 bytes\), the"
    with pytest.warns(UserWarning, match=words):
        assert_right(inputs, *attend(inputs))
    # The warning and the attempt happen once, also for another shape with these settings.
    assert_right(inputs, *attend(inputs))
    larger = make_inputs(AttentionProblem(2, 4, 2, 100, 64), device)
    assert_right(larger, *attend(larger))
    assert tried == [1, 2, 2]
    # Given settings are not replaced.
    with pytest.raises(OutOfResources):
        attend(inputs, config=replace(CONFIG, num_stages=1))


@pytest.mark.parametrize("length", [np.int64(37), np.int32(37), torch.tensor(37).item()])
def test_any_whole_number_is_a_length(length, device):
    inputs = make_inputs(AttentionProblem(1, 4, 2, 100, 64), device)
    expected, _ = attend(inputs, cache_seqlens=37)
    out, _ = attend(inputs, cache_seqlens=length)
    assert torch.equal(out, expected)
    whole, _ = attend(inputs)
    assert not torch.equal(out, whole)


@pytest.mark.parametrize("length", [37.0, True, "37", [37]])
def test_what_is_no_number_of_tokens_is_refused(length):
    with pytest.raises(ValueError, match="expected a number of tokens, or a tensor of them"):
        lean_attn_with_kvcache(Q, CACHE, CACHE, cache_seqlens=length)
