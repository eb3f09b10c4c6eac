import itertools
import math
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
import torch
from leanbench.kernels.fa2 import Fa2Triton
from leanbench.kernels.mla.configs import MlaConfig
from leanbench.kernels.reference import Reference
from leanbench.kernels.reference.torch import attend

from leanbench.check import grid
from leanbench.check.fuzz import fuzz_cases
from leanbench.check.poison import poison_unused
from leanbench.core.axes import KINDS
from leanbench.core.config import TileConfig
from leanbench.core.inputs import AttentionInputs, make_inputs
from leanbench.core.problem import DTYPES, HEAD_DIMS, KV_LAYOUTS, PAGE_SIZES, AttentionProblem
from leanbench.core.registry import kernel
from leanbench.gpu.catalogue import find
from leanbench.gpu.local import spec_of_device

H200 = find("h200")
GROUP_SIZES = (1, 4, 8, 5, 7, 24, 71)


def values(cases: list[grid.CheckCase], *names: str) -> set[object]:
    combinations = {tuple(getattr(case.problem, name) for name in names) for case in cases}
    return {value[0] for value in combinations} if len(names) == 1 else set(combinations)


def one_token(cases: list[grid.CheckCase]) -> list[grid.CheckCase]:
    """Return problems with one query token over a contiguous cache."""
    return [case for case in cases if case.problem.q_len == 1 and case.problem.page_size is None]


def test_the_gpu_grid_has_every_pair_context_and_layout():
    every = grid.gpu_cases()
    assert len(set(every)) == len(every)
    cases = grid.plain_cases()
    axes = {"head_dim": HEAD_DIMS, "group_size": GROUP_SIZES}
    others = {"dtype": DTYPES, "is_ragged": (False, True)}
    for (name, own), (other, all_values) in itertools.product(axes.items(), others.items()):
        assert values(cases, name, other) == set(itertools.product(own, all_values))
    assert values(cases, *axes) == set(itertools.product(*axes.values()))
    contexts = defaultdict(set)
    for case in one_token(grid.plain_cases()):
        contexts[case.problem.head_dim, case.problem.group_size].add(case.problem.context)
    for family in contexts.values():
        assert {1, 2, 127, 128, 129, 1000, 16_384, 65_537} <= family
    ragged = {own for family in contexts.values() for own in family if isinstance(own, tuple)}
    assert any(65_537 in lengths for lengths in ragged)
    cases = one_token(grid.plain_cases())
    pairs = {
        "head_dim": HEAD_DIMS,
        "group_size": GROUP_SIZES,
        "dtype": DTYPES,
        "is_ragged": (False, True),
        "context": (1, 2, 127, 128, 129, 1000, 16_384, 65_537),
    }
    for name, all_values in pairs.items():
        uniform = [case for case in cases if name != "context" or not case.problem.is_ragged]
        assert values(uniform, name, "kv_layout") == set(itertools.product(all_values, KV_LAYOUTS))
    uniform = [case for case in cases if not case.problem.is_ragged]
    assert values(uniform, "batch", "kv_layout") == set(itertools.product((1, 2), KV_LAYOUTS))


def test_the_gpu_grid_has_pages_and_query_tokens_with_everything():
    every = grid.plain_cases()
    others = one_token(every)
    cases = [case for case in every if case not in others]
    pages = (None, *PAGE_SIZES)
    pairs = set(itertools.product((1, 2, 4, 7, 16), pages)) - {(1, None)}
    assert values(cases, "q_len", "page_size") == pairs
    assert values(cases, "head_dim", "page_size") >= set(itertools.product(HEAD_DIMS, PAGE_SIZES))
    assert values(cases, "group_size", "q_len") >= set(itertools.product((1, 7), (1, 2, 4, 7, 16)))
    axes = {"q_len": (1, 2, 4, 7, 16), "page_size": pages, "head_dim": HEAD_DIMS}
    for name, all_values in axes.items():
        assert values(cases, name, "kv_layout") == set(itertools.product(all_values, KV_LAYOUTS))
        assert values(cases, name, "is_ragged") == set(itertools.product(all_values, (False, True)))
    shorter = {
        case.problem.q_len for case in cases if min(case.problem.contexts) < case.problem.q_len
    }
    assert shorter == {2, 4, 7, 16}
    around = {
        context % page
        for case in cases
        if (page := case.problem.page_size)
        for context in case.problem.contexts
    }
    assert {0, 1, 15, 255} <= around


def test_the_gpu_grid_varies_what_needs_no_compilation():
    cases = grid.plain_cases()
    assert {case.score_scale for case in cases} == {1.0, 12.0}
    configs: list[Any] = [grid.case_config("fixed_split", case, H200, False) for case in cases]
    assert {1, 2, 3, 7} <= {config.splits for config in configs}
    own: Any = kernel("fixed_split")
    both = zip(cases, configs, strict=True)
    assert any(c.splits == own.default_config(case.problem, H200).splits for case, c in both)
    lean: list[Any] = [grid.case_config("lean", case, H200, False) for case in cases]
    assert {config.min_tiles_per_cta for config in lean} == {1, 2, 3}


def test_the_interpreter_grid_is_small_and_has_both_of_everything():
    cases = grid.interpreter_cases()
    assert 20 <= len(cases) <= 80
    assert max(case.problem.max_context for case in cases) <= 200
    assert values(cases, "head_dim") == set(HEAD_DIMS)
    assert values(cases, "q_len") == {1, 2, 4, 7, 16}
    assert values(cases, "page_size") == {None, *PAGE_SIZES}
    assert values(cases, "group_size") == {1, 5, 7, 40}
    assert values(cases, "dtype", "kv_layout") == set(itertools.product(DTYPES, KV_LAYOUTS))
    assert values(cases, "is_ragged") == {False, True}
    for case in cases:
        config = grid.case_config("lean", case, H200, interpreted=True)
        assert isinstance(config, TileConfig)
        assert config.tile_tokens == 32
    assert grid.case_config("reference", cases[0], H200, interpreted=True) is None


@pytest.mark.parametrize("name", ["lean", "fa2", "fixed_split", "reference"])
def test_a_case_runs(name, device):
    gpu = H200 if device == "cpu" else spec_of_device(0)
    cases = grid.interpreter_cases()
    for case in (cases[1], next(case for case in cases if case.problem.is_ragged)):
        result = grid.run_case(name, case, gpu, device)
        assert (result.kernel, result.case) == (name, case)
        assert (result.repeats, result.failure) == (True, None)
        assert 0 < result.relative_error < 1e-2


def test_an_exception_is_that_kernels_failure(monkeypatch):
    run_case = grid.run_case

    def explode(name: str, *rest: Any) -> object:
        if name == "fa2":
            raise RuntimeError("first line\nsecond line")
        return run_case(name, *rest)

    monkeypatch.setattr(grid, "run_case", explode)
    bad, good = grid.run_family(("fa2", "reference"), grid.interpreter_cases()[:1], H200, "cpu")
    assert (bad.kernel, bad.repeats) == ("fa2", False)
    assert bad.failure == "raised RuntimeError: first line"
    assert (good.kernel, good.failure) == ("reference", None)


def test_the_gpu_grid_has_calls_as_servers_make_them():
    cases = [case for case in grid.plain_cases() if case.problem.capacity is not None]
    assert values(cases, "lengths_on") == {"device"}
    assert values(cases, "page_size") == {None, *PAGE_SIZES}
    assert values(cases, "kv_layout", "dtype") == set(itertools.product(KV_LAYOUTS, DTYPES))
    both = set(itertools.product(HEAD_DIMS, (False, True)))
    assert values(cases, "head_dim", "is_ragged") == both
    assert all(case.problem.cache_capacity >= 5 * case.problem.max_context for case in cases)


@pytest.mark.parametrize("cases", [grid.gpu_cases(), grid.interpreter_cases(), fuzz_cases(300, 5)])
def test_some_cases_say_lengths_that_the_cache_does_not_have(cases):
    wild = [case for case in cases if case.lengths]
    assert {case.problem.page_size is None for case in wild} == {False, True}
    for case in wild:
        lengths = case.lengths
        assert lengths is not None
        assert len(lengths) == case.problem.batch
        assert {0, -1, 2**31 - 1} < {*lengths}
        # Full where the tensor says more: pages are there for what is read.
        full = case.problem.cache_capacity
        for length, context in zip(lengths, case.problem.contexts, strict=True):
            new = case.problem.append
            assert context == min(max(1, new, length + new), full)


@pytest.mark.parametrize("cases", [grid.gpu_cases(), fuzz_cases(6000, 2)], ids=["grid", "fuzz"])
def test_every_kind_is_tried_alone_and_with_others(cases):
    seen: dict[str, set[Any]] = defaultdict(set)
    together = set()
    for case in cases:
        kinds = [name for name in KINDS if name in case.problem.special]
        together.add(len(kinds))
        for name in kinds:
            seen[name].add(case.problem.special[name])
    # Latent caches and chosen tokens are lean_mla's; several GPUs and whole models have checks of
    # their own.
    assert set(KINDS) - set(seen) <= {"latent", "select", "row_scales", "parallel", "whole_model"}
    assert seen["kv_dtype"] == {"e4m3", "e5m2"}
    assert seen["rotary_interleaved"] == {True}
    assert {0, 1, 2, 3, 5} <= together
    assert {case.problem.page_size for case in cases} > {1, None}
    assert max(case.problem.q_len for case in cases) > 60
    plain = sum(not set(KINDS) & case.problem.special.keys() for case in cases)
    assert len(cases) < 6000 or 0.4 < plain / len(cases) < 0.65
    assert any(case.problem.append for case in cases if case.lengths is not None)


def test_kinds_that_triton_lacks_are_passed_over_in_the_interpreter():
    cases = [case for case in grid.gpu_cases() if case.problem.sinks][:1]
    cases = [replace(cases[0], problem=replace(cases[0].problem, context=40))]
    (result,) = grid.run_family(("lean", "reference"), cases, H200, "cpu")
    assert (result.kernel, result.failure) == ("reference", None)


def test_fuzz_has_every_kind_of_lengths_and_what_the_interpreter_can_run():
    cases = fuzz_cases(300, 5, interpreted=True)
    problems = [case.problem for case in cases]
    for name in ("lean_triton", "fa2_triton", "fixed_split_triton"):
        assert {kernel(name).unsupported_reason(problem) for problem in problems} == {None}
    plain = [case.problem for case in cases if case.lengths is None]
    assert max(problem.kv_heads * sum(problem.contexts) for problem in plain) <= 600
    assert {problem.head_dim for problem in problems} == {*HEAD_DIMS}
    assert len({case.compiled_for for case in cases}) > 200
    cases = [case for case in fuzz_cases(400, 1) if case.lengths is None]
    problems = [case.problem for case in cases]
    kinds = {(problem.lengths_on, problem.is_ragged) for problem in problems}
    assert kinds == {("host", False), ("device", False), ("device", True)}
    for of_kind in ("host", "device"):
        room = {problem.capacity is None for problem in problems if problem.lengths_on == of_kind}
        assert room == {False, True}
    assert max(problem.cache_capacity / problem.max_context for problem in problems) >= 4


def poisoned_with_same_attention(inputs: AttentionInputs) -> AttentionInputs:
    """Return the poisoned inputs, with the same attention of every sequence."""
    before = [attend(inputs, sequence, 1) for sequence in range(inputs.batch)]
    poisoned = poison_unused(inputs)
    for sequence, expected in enumerate(before):
        assert all(map(torch.equal, attend(poisoned, sequence, 1), expected))
    return poisoned


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("layout", KV_LAYOUTS)
def test_poison_is_past_every_sequence_and_nowhere_else(page_size, layout):
    problem = AttentionProblem(
        3, 4, 2, (33, 80, 1), 64, kv_layout=layout, page_size=page_size, capacity=96
    )
    inputs = make_inputs(problem, "cpu")
    strides = inputs.k_cache.stride()
    poisoned = poisoned_with_same_attention(inputs)
    assert poisoned.k_cache.stride() == strides
    for cache in (poisoned.k_cache, poisoned.v_cache):
        used = (33 + 80 + 1) * 2 * 64
        assert int(cache.isfinite().sum()) == used
    if poisoned.block_table is not None:
        beyond = poisoned.block_table[2, 1:].long()
        assert not poisoned.k_cache[beyond].isfinite().any()


@pytest.mark.parametrize(
    ("kv_dtype", "other"), [("same", math.inf), ("e5m2", math.inf), ("e4m3", math.nan)]
)
def test_tokens_that_no_query_sees_are_nan_and_infinite_in_turn(kv_dtype, other):
    problem = AttentionProblem(
        1, 2, 2, 5, 64, q_len=2, capacity=8, window_left=2, kv_dtype=kv_dtype
    )
    inputs = poison_unused(make_inputs(problem, "cpu"))
    for cache in (inputs.k_cache, inputs.v_cache):
        unseen = cache.float()[0, [0, 5, 6, 7]]
        expected = torch.tensor([math.nan, other, math.nan, other])[:, None, None]
        torch.testing.assert_close(unseen, expected.expand_as(unseen), equal_nan=True)
        assert cache.float()[0, 1:5].isfinite().all()


@pytest.mark.parametrize("latent", [False, True])
def test_scales_of_empty_sequences_are_poisoned(latent):
    problem = AttentionProblem(3, 4, 2, 40, 64, kv_dtype="e4m3", lengths_on="device")
    if latent:
        sizes = {"kv_heads": 1, "head_dim": 576, "v_head_dim": 512}
        problem = replace(problem, latent=True, **sizes)
    inputs = make_inputs(problem, "cpu", seed=1)
    assert inputs.cache_seqlens is not None
    inputs.cache_seqlens[1] = -7
    poisoned = poison_unused(inputs)
    for before, after in (
        (inputs.k_descale, poisoned.k_descale),
        (inputs.v_descale, poisoned.v_descale),
    ):
        assert before is not None
        assert after is not None
        assert after[1].isnan().all()
        assert torch.equal(after[::2], before[::2])


class Leaky(Fa2Triton):
    """Follows one token past each sequence's end, where the cache has one."""

    def prepare(self, inputs, config):
        return super().prepare(replace(inputs, context=inputs.context + 1), config)


@pytest.mark.parametrize(("guards", "failure"), [(True, "relative error inf"), (False, "relative")])
def test_a_kernel_that_reads_past_a_sequence_fails(guards, failure, monkeypatch, device):
    leaky = Leaky()
    leaky.guards_lengths = guards
    monkeypatch.setattr("leanbench.check.grid.kernel", lambda name: leaky)
    gpu = H200 if device == "cpu" else spec_of_device(0)
    case = grid.CheckCase(AttentionProblem(2, 4, 2, 33, 64, capacity=96), 1.0, 0)
    result = grid.run_case("fa2", case, gpu, device)
    assert (result.failure or "").startswith(failure)


@pytest.mark.parametrize("cases", [grid.gpu_cases(), grid.interpreter_cases()])
def test_calls_take_a_batch_of_0_with_a_block_table(cases, monkeypatch):
    (case,) = (case for case in cases if case.lengths == ())
    assert case.problem.page_size is not None
    (result,) = grid.run_family(("lean", "fa2", "reference"), [case], H200, "cpu")
    assert (result.kernel, result.failure) == ("lean", None)
    monkeypatch.setattr("leanbench.attention.run.attend_nothing", lambda call, _: (call.q, call.q))
    (result,) = grid.run_family(("lean",), [case], H200, "cpu")
    assert result.failure is not None


class Seeing(Reference):
    """Keeps the call that it was given."""

    def prepare(self, inputs, config):
        self.inputs = inputs
        return super().prepare(inputs, config)


@pytest.mark.parametrize("config_types", [(), (MlaConfig,)])
def test_only_lean_mla_is_given_missing_pages(config_types, monkeypatch):
    seeing = Seeing()
    seeing.config_types = config_types
    monkeypatch.setattr("leanbench.check.grid.kernel", lambda name: seeing)
    problem = AttentionProblem(
        2, 24, 1, 500, 576, page_size=1, capacity=600, v_head_dim=512, latent=True
    )
    assert grid.run_case("it", grid.wild_case(problem, 1.0, 3), H200, "cpu").failure is None
    table = seeing.inputs.block_table
    pages = len(seeing.inputs.k_cache)
    assert bool(((table < 0) | (table >= pages)).any()) == bool(config_types)


@pytest.mark.parametrize(
    "kinds",
    [
        {"leftpad": True, "batch_idx": True, "append": 2},
        {"page_size": 16, "append": 3, "leftpad": True},
        {"kv_dtype": "e4m3", "append": 1},
        {"q_lens": (3, 1)},
    ],
)
def test_poison_spares_what_kinds_have(kinds):
    problem = replace(AttentionProblem(2, 4, 2, (40, 33), 64, capacity=50), **kinds)
    inputs = make_inputs(problem, "cpu", seed=1)
    poisoned = poisoned_with_same_attention(inputs)
    tokens = sum(problem.contexts) - sum(problem.leftpads) - 2 * problem.append
    finite = poisoned.k_cache.double().isfinite().all(-1)
    assert finite.sum() == 2 * tokens


def test_the_reference_passes_its_own_check_with_every_kind_at_once():
    kinds = {"q_lens": (4, 1, 9), "causal": False, "window_left": 12, "window_right": 2}
    kinds |= {"softcap": 5.0, "append": 3, "rotary_dim": 32, "v_head_dim": 32}
    kinds |= dict.fromkeys(("sinks", "alibi", "leftpad", "batch_idx"), True)
    problem = replace(AttentionProblem(3, 8, 2, (40, 7, 33), 64), **kinds)
    assert grid.run_case("reference", grid.CheckCase(problem, 1.0, 0), H200, "cpu").failure is None
