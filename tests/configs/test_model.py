"""The model that chooses settings of lean.cu: its closed form, next to the schedule that runs."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from math import log
from statistics import geometric_mean
from typing import Any, NamedTuple

import pytest
from depth import examples
from leanbench.kernels.lean.configs import LeanCudaConfig
from leanbench.kernels.lean.cuda_build import CudaBuild, takes_head_pairs
from leanbench.kernels.lean.cuda_cost import Columns, Costs, parts_us, total_us, work_of
from leanbench.kernels.lean.cuda_masks import as_seen, dealt_lengths
from leanbench.kernels.lean.cuda_schedule import cuda_schedule
from leanbench.kernels.lean.cuda_settings import (
    bound_of,
    choices_of,
    chosen,
    fill_lengths,
    for_any_length,
    has_many_rows,
    predict,
    ranked,
    space,
)

from leanbench.core.decomposition import cluster_slots
from leanbench.core.errors import UserError
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.problem import AttentionProblem
from leanbench.gpu.catalogue import CATALOGUE, find
from tools import fit_costs

H200 = find("h200")
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "lengths on the device": {"lengths_on": "device"},
    "a window": {"window_left": 1023},
    "query tokens": {"q_len": 4},
    "fp8": {"kv_dtype": "e4m3"},
    "another gpu": {},
}


class Longest(NamedTuple):
    """The longest CTA or cluster of a launch, and the most partials of an output tile."""

    rounds: float
    segments: float
    splits: float


def drawn(kind: str) -> Iterator[tuple[AttentionProblem, list[LeanCudaConfig], GpuSpec]]:
    """Draw problems, some of their candidates, and a GPU."""
    rng = random.Random(kind)
    gpu = find("h100-pcie") if kind == "another gpu" else H200
    for _ in range(examples(100)):
        kv_heads, group = rng.choice([1, 2, 4, 8]), rng.choice([1, 4, 5, 8])
        batch, head_dim = rng.choice([1, 2, 3, 7, 16, 33, 64]), rng.choice([64, 128, 256])
        context = round(2 ** rng.uniform(5, 14))
        problem = AttentionProblem(
            *(batch, kv_heads * group, kv_heads, context, head_dim),
            kv_layout=rng.choice(["HND", "NHD"]),
            **KINDS[kind],
        )
        able = [config for config in space(problem, gpu) if not config.of_warpgroups]
        yield problem, rng.sample(able, 5), gpu


def of_schedule(problem: AttentionProblem, config: LeanCudaConfig, gpu: GpuSpec) -> Longest:
    """Count the segments of the schedule that runs."""
    build, schedule = CudaBuild.of(problem, config), cuda_schedule(problem, config, gpu)
    assert schedule is not None
    step = build.chunk * build.warps * build.cluster
    lengths = dealt_lengths(build, problem)
    per_sequence = schedule.output_tiles // problem.batch
    rounds: Counter[int] = Counter()
    segments: Counter[int] = Counter()
    splits: Counter[int] = Counter()
    for segment in schedule.segments:
        length = lengths[segment.output_tile // per_sequence]
        tokens = min(segment.last * config.tile_tokens, length) - segment.first * config.tile_tokens
        rounds[segment.cta] += max(0, -(-tokens // step))
        segments[segment.cta] += 1
        splits[segment.output_tile] += 1
    slots = cluster_slots(gpu.sms, build.ctas_per_sm, build.cluster)
    waves = -(-schedule.grid // slots)
    return Longest(
        waves * max(rounds.values()), waves * max(segments.values()), max(splits.values())
    )


def of_model(problem: AttentionProblem, config: LeanCudaConfig, gpu: GpuSpec) -> Longest:
    seen = as_seen(problem)
    fill = tuple(sorted(Counter(seen.contexts).items(), reverse=True))
    work = work_of(seen, [fill], Columns.of(problem, [config], gpu), gpu)
    return Longest(float(work.rounds.max()), float(work.segments.max()), float(work.splits.item()))


@pytest.mark.parametrize("kind", KINDS)
def test_the_closed_form_is_near_the_schedule(kind):
    """Agree at one length: rounds within 2 or 5%, segments within 1, and at most one partial more,
    or half the number: a range that begins anywhere can cut an output tile once more.
    """
    kinds: Counter[str] = Counter()
    for problem, configs, gpu in drawn(kind):
        for config in configs:
            exact, model = of_schedule(problem, config, gpu), of_model(problem, config, gpu)
            where = problem.label, config
            assert abs(model.rounds - exact.rounds) <= max(2, 0.05 * exact.rounds), where
            assert abs(model.segments - exact.segments) <= 1, where
            assert exact.splits / 2 <= model.splits <= exact.splits + 1, where
            kinds["whole" if exact.splits == 1 else "split"] += 1
            kinds["several" if exact.segments > 1 else "one"] += 1
            kinds["equal"] += exact == model
    assert min(kinds.values()) > 5
    assert kinds["equal"] > 0.5 * (kinds["whole"] + kinds["split"])


def test_no_ragged_batch_is_longer_than_its_closed_form():
    """It takes CTAs as if each had sequences of one length, so mixed ones are shorter."""
    for problem, configs, gpu in drawn("lengths on the device"):
        for lengths in fill_lengths(problem.batch, problem.max_context):
            fill = replace(problem, context=lengths, capacity=problem.max_context)
            for config in configs:
                exact, model = of_schedule(fill, config, gpu), of_model(fill, config, gpu)
                assert model.rounds >= min(exact.rounds - 3, 0.95 * exact.rounds), (fill, config)
                assert model.segments >= exact.segments - 1, (fill, config)


@pytest.mark.parametrize(
    ("batch", "lean_tiles", "cluster", "expected"),
    [
        # 8 output tiles: 16 CTAs, or 8 clusters of 2, for each.
        (1, 128, 1, Longest(8, 1, 16)),
        (1, 128, 2, Longest(8, 1, 8)),
        (1, 16, 1, Longest(1, 1, 16)),
        # 3 clusters of 4 for each.
        (1, 48, 4, Longest(4, 1, 3)),
        # 128 output tiles: a CTA for each.
        (16, 10, 1, Longest(10, 1, 1)),
        # 264: two for each of 132 CTAs.
        (33, 5, 1, Longest(10, 2, 1)),
        # 728 output tiles, more than 5.5 for each CTA: 6 waves of one.
        (91, 3, 1, Longest(18, 6, 1)),
    ],
)
def test_the_closed_form_is_exact_if_the_grid_divides_evenly(batch, lean_tiles, cluster, expected):
    problem = AttentionProblem(batch, 32, 8, 128 * lean_tiles, 128)
    configs = {
        (each.chunk_tokens * each.num_warps, each.ctas_per_sm, each.cluster_size, each.tile_tokens):
        each
        for each in space(problem, H200)
    }  # fmt: skip
    config = replace(configs[128, 1, 1, 128], cluster_size=cluster)
    assert of_schedule(problem, config, H200) == expected
    assert of_model(problem, config, H200) == expected


@pytest.mark.parametrize(
    ("kv_heads", "batch", "sizes"),
    [
        # An H200 holds 39 clusters of 3 and 30 of 4.
        (16, 1, ()),
        (30, 1, ()),
        (31, 1, (3,)),
        (13, 3, (3,)),
        (40, 1, ()),
    ],
)
def test_clusters_between_powers_of_two_have_an_output_tile_each(kv_heads, batch, sizes):
    problem = AttentionProblem(batch, 4 * kv_heads, kv_heads, 4096, 128)
    for call in (problem, for_any_length(problem)):
        candidates = space(call, H200)
        assert {each.cluster_size for each in candidates} == {1, 2, 4, 8, *sizes}
        assert chosen(call, H200) == candidates[0]
        assert choices_of(call, H200)(batch, 4096) == chosen(call, H200)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_are_positive_and_grow_with_the_tokens(kind):
    """Twice the tokens may divide more evenly: then they cost less, at most by a quarter."""
    for problem, configs, gpu in drawn(kind):
        columns = Columns.of(problem, configs, gpu)
        us = []
        for factor in (1, 2, 4, 16):
            fill = ((factor * problem.max_context, problem.batch),)
            longer = replace(problem, context=factor * problem.max_context)
            parts = parts_us(longer, work_of(longer, [fill], columns, gpu), columns, Costs())
            assert list(parts) == ["start", "memory", "warps", "ends", "merge"]
            for name, part in parts.items():
                assert (part >= 0).all()
                assert name == "merge" or (part > 0).all()
            memory_us = longer.kv_bytes / (gpu.bandwidth_tb_s * 1e6)
            assert (parts["memory"] >= 0.999 * memory_us).all()
            us.append(total_us(parts))
            assert (us[-1] > parts["start"] + parts["memory"]).all()
        assert all((more > 0.75 * less).all() for less, more in pairwise(us))


def test_the_parts_by_hand():
    """One CTA of 4 warps for each of 128 output tiles, 10 rounds of chunks of 32 tokens."""
    problem = AttentionProblem(16, 32, 8, 1280, 128)
    config = LeanCudaConfig(
        *(128, 4, 2, 1, 1, True), chunk_tokens=32, tile_rows=8, cluster_size=1, copy="bulk"
    )
    columns = Columns.of(problem, [config], H200)
    work = work_of(problem, [((1280, 16),)], columns, H200)
    costs = Costs(start=3, stage=0.5, chunk=0.25, block=0.0625, latency=0.5, end=1, end_kn=2)
    parts = {name: us.item() for name, us in parts_us(problem, work, columns, costs).items()}
    chunk_us = 0.25 + 0.0625 * 2 * 2  # 32 tokens and 256 columns of K and V
    assert parts == pytest.approx(
        {
            "start": 3 + 0.5 + chunk_us,
            "memory": 16 * 8 * 1280 * 512 / 4.8e6,
            "warps": 10 * max(chunk_us, (0.5 + chunk_us) / 2),
            "ends": 1 + 2 * 4 * 128 / 1024,
            "merge": 0,
        }
    )
    memory, busy = parts["memory"], parts["warps"] + parts["ends"]
    together = (memory**1.2 + busy**1.2) ** (1 / 1.2)
    assert float(total_us(parts)) == pytest.approx(parts["start"] + together)


@pytest.mark.parametrize("gpu", CATALOGUE, ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("kv_dtype", ["same", "e4m3"])
def test_every_gpu_has_candidates_that_fit(gpu, head_dim, kv_dtype):
    problem = AttentionProblem(4, 32, 8, 5000, head_dim, kv_dtype=kv_dtype)
    for call in (problem, for_any_length(problem), replace(problem, kv_layout="NHD")):
        candidates = space(call, gpu)
        assert len(set(candidates)) == len(candidates) >= 3
        assert all(CudaBuild.of(call, config).fits(gpu) for config in candidates)
        assert chosen(call, gpu) == candidates[0]
        if gpu.compute_capability < (9, 0):
            assert {(each.cluster_size, each.copy) for each in candidates} == {(1, "async")}


def test_a_cta_that_holds_nothing_is_refused():
    tiny = replace(H200, shared_kb_per_cta=1)
    with pytest.raises(UserError, match="lean_cuda finds no room in the 1 KB of shared memory"):
        chosen(AttentionProblem(1, 8, 8, 77, 256), tiny)


def test_candidates_are_ranked_by_the_mean_and_the_worst_of_the_fills():
    call = for_any_length(AttentionProblem(8, 32, 8, 4000, 128))
    columns, parts = predict(call, H200, Costs())
    us = dict(zip(columns.configs, total_us(parts).T.tolist(), strict=True))
    fastest = [min(fill) for fill in zip(*us.values(), strict=True)]
    assert len(fastest) == len(fill_lengths(8, 4096)) == 4

    def regret(config: LeanCudaConfig) -> float:
        ratios = [each / least for each, least in zip(us[config], fastest, strict=True)]
        return log(geometric_mean(ratios)) + log(max(ratios)) / 2

    def is_never_chosen(config: LeanCudaConfig) -> bool:
        return config.cluster_size > 1 and config.tile_tokens != 128

    order = ranked(call, H200, Costs())
    never = [is_never_chosen(config) for config, _ in order]
    assert never == sorted(never)
    for which in (False, True):
        expected = sorted(regret(each) for each in us if is_never_chosen(each) == which)
        found = [regret(each) for each, _ in order if is_never_chosen(each) == which]
        assert len(found) > 5
        assert found == pytest.approx(expected)
    assert [each for _, each in order] == pytest.approx(
        [geometric_mean(us[config]) for config, _ in order]
    )
    assert chosen(call, H200) == order[0][0]


@pytest.mark.parametrize(
    ("tokens", "bound"), [(1, 1), (2, 2), (3, 3), (4, 4), (5, 6), (7, 8), (97, 128), (96, 96)]
)
def test_bounds_of_lengths(tokens, bound):
    assert bound_of(tokens) == bound


def test_fills_of_a_cache():
    assert fill_lengths(4, 1000) == [
        *((1000,) * 4, (62,) * 4),
        *((1000, 62, 62, 62), (1000, 400, 100, 20)),
    ]
    assert fill_lengths(1, 1000) == [(1000,), (62,)]
    assert fill_lengths(2, 3) == [(3, 3), (1, 1), (3, 1)]


def test_special_rows():
    many = AttentionProblem(8, 128, 1, 4096, 128, q_len=8)
    assert has_many_rows(many, H200)
    assert chosen(many, H200).of_warpgroups
    assert space(many, H200)[0] == chosen(many, H200)
    assert not has_many_rows(many, find("a100"))
    pairs = AttentionProblem(8, 64, 8, 4096, 64, kv_layout="NHD", kv_dtype="e4m3")
    assert takes_head_pairs(pairs)
    assert {config.tile_rows for config in space(pairs, H200)} == {8, 16}


@pytest.mark.parametrize("gpu", ["h100", "h200"])
def test_the_models_choices_among_the_committed_timings(gpu):
    timed = fit_costs.timings(gpu)
    assert len(timed) > 200
    shares = [each.share(Costs()) for each in timed]
    assert geometric_mean(shares) > 0.95
    assert min(shares) > 0.75
    # Settings of a moment's guess are worse.
    assert geometric_mean([float(each.us.min() / each.us[0]) for each in timed]) < 0.95
