from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any

import pytest

from leanbench.check.grid import (
    CheckCase,
    case_config,
    gpu_cases,
    interpreter_cases,
    run_case,
    run_family,
)
from leanbench.core.config import TileConfig
from leanbench.core.problem import DTYPES, HEAD_DIMS, KV_LAYOUTS, PAGE_SIZES
from leanbench.gpu.catalogue import find
from leanbench.gpu.local import spec_of_device

H200 = find("h200")
GROUP_SIZES = (1, 4, 8, 5, 7, 24, 71)


def values(cases: list[CheckCase], *names: str) -> set[object]:
    found = {tuple(getattr(case.problem, name) for name in names) for case in cases}
    return {value[0] for value in found} if len(names) == 1 else set(found)


def one_token(cases: list[CheckCase]) -> list[CheckCase]:
    """Those with one query token over a contiguous cache."""
    return [case for case in cases if case.problem.q_len == 1 and case.problem.page_size is None]


def test_the_gpu_grid_is_large():
    cases = gpu_cases()
    assert len(cases) >= 300
    assert len({(case.problem, case.score_scale, case.variant) for case in cases}) == len(cases)


def test_the_gpu_grid_has_every_pair_that_is_compiled_apart():
    cases = gpu_cases()
    assert values(cases, "head_dim", "group_size") == set(itertools.product(HEAD_DIMS, GROUP_SIZES))
    assert values(cases, "head_dim", "dtype") == set(itertools.product(HEAD_DIMS, DTYPES))
    assert values(cases, "group_size", "dtype") == set(itertools.product(GROUP_SIZES, DTYPES))
    assert values(cases, "head_dim", "is_ragged") == set(
        itertools.product(HEAD_DIMS, (False, True))
    )
    assert values(cases, "group_size", "is_ragged") == set(
        itertools.product(GROUP_SIZES, (False, True))
    )


def test_the_gpu_grid_has_every_context_in_every_family():
    contexts = defaultdict(set)
    for case in one_token(gpu_cases()):
        contexts[case.problem.head_dim, case.problem.group_size].add(case.problem.context)
    for family in contexts.values():
        assert {1, 2, 127, 128, 129, 1000, 16_384, 65_537} <= family
    assert any(
        isinstance(context, tuple) and 65_537 in context
        for family in contexts.values()
        for context in family
    )


def test_the_gpu_grid_has_both_layouts_with_everything():
    cases = one_token(gpu_cases())
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
    cases = [case for case in gpu_cases() if case not in one_token(gpu_cases())]
    pages = (None, *PAGE_SIZES)
    pairs = set(itertools.product((1, 2, 4, 7, 16), pages)) - {(1, None)}
    assert values(cases, "q_len", "page_size") == pairs
    assert values(cases, "head_dim", "page_size") >= set(itertools.product(HEAD_DIMS, PAGE_SIZES))
    assert values(cases, "group_size", "q_len") >= set(itertools.product((1, 7), (1, 2, 4, 7, 16)))
    for name, all_values in {
        "q_len": (1, 2, 4, 7, 16),
        "page_size": pages,
        "head_dim": HEAD_DIMS,
    }.items():
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
    cases = gpu_cases()
    assert {case.score_scale for case in cases} == {1.0, 12.0}
    default = {case.problem: default_splits(case) for case in cases}
    configs: list[Any] = [
        case_config("fixed_split", case, H200, interpreted=False) for case in cases
    ]
    assert {1, 2, 3, 7} <= {config.splits for config in configs}
    assert any(
        config.splits == default[case.problem] for case, config in zip(cases, configs, strict=True)
    )
    lean_configs: list[Any] = [case_config("lean", case, H200, False) for case in cases]
    lean = {config.min_tiles_per_cta for config in lean_configs}

    assert lean == {1, 2, 3}


def default_splits(case: CheckCase) -> int | None:
    from leanbench.core.registry import kernel

    config = kernel("fixed_split").default_config(case.problem, H200)
    return config.splits if config else None


def test_the_interpreter_grid_is_small_and_has_both_of_everything():
    cases = interpreter_cases()
    assert 20 <= len(cases) <= 80
    assert max(case.problem.max_context for case in cases) <= 200
    assert values(cases, "head_dim") == set(HEAD_DIMS)
    assert values(cases, "q_len") == {1, 2, 4, 7, 16}
    assert values(cases, "page_size") == {None, *PAGE_SIZES}
    assert values(cases, "group_size") == {1, 5, 7, 40}
    assert values(cases, "dtype", "kv_layout") == set(itertools.product(DTYPES, KV_LAYOUTS))
    assert values(cases, "is_ragged") == {False, True}
    for case in cases:
        config = case_config("lean", case, H200, interpreted=True)
        assert isinstance(config, TileConfig)
        assert config.tile_tokens == 32
    assert case_config("reference", cases[0], H200, interpreted=True) is None


@pytest.mark.parametrize("name", ["lean", "fa2", "fixed_split", "reference"])
def test_a_case_runs(name, device):
    gpu = H200 if device == "cpu" else spec_of_device(0)
    for case in (
        interpreter_cases()[1],
        next(case for case in interpreter_cases() if case.problem.is_ragged),
    ):
        result = run_case(name, case, gpu, device)
        assert (result.kernel, result.case, result.repeats, result.failure) == (
            name,
            case,
            True,
            None,
        )
        assert 0 < result.relative_error < 1e-2


def test_an_exception_is_that_kernels_failure(monkeypatch):
    import leanbench.check.grid as module

    def explode(name: str, *_: object) -> object:
        if name == "fa2":
            raise RuntimeError("first line\nsecond line")
        return run_case(name, *_)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(module, "run_case", explode)
    bad, good = run_family(("fa2", "reference"), interpreter_cases()[:1], H200, "cpu")
    assert (bad.kernel, bad.failure, bad.repeats) == (
        "fa2",
        "raised RuntimeError: first line",
        False,
    )
    assert (good.kernel, good.failure) == ("reference", None)
