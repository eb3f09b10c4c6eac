"""Default settings of kernels: what holds for all of the model's choices, some of them on an H200,
and those of the decompositions of FlashAttention-2 and FlashDecoding on lean.cu.
"""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from depth import diagonal, label
from every_kind import KINDS
from leanbench.kernels.fixed_split.configs import any_length_splits
from leanbench.kernels.lean import cuda_settings
from leanbench.kernels.lean.cuda_build import (
    HOPPER,
    CudaBuild,
    ManyRowsBuild,
    takes_head_pairs,
)
from leanbench.kernels.lean.cuda_settings import fill_lengths, has_many_rows
from leanbench.kernels.lean.cuda_splits import lone_build

from leanbench.core.decomposition import TileGrid
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel
from leanbench.gpu.catalogue import CATALOGUE, find

H200 = find("h200")
LEAN = kernel("lean_cuda")
PLAIN = AttentionProblem(8, 32, 8, 65_536, 128)
THREE_LONG = replace(PLAIN, context=(65_536,) * 3 + (16,) * 5)
CUDA_GPUS = [spec for spec in CATALOGUE if spec.compute_capability >= (8, 0)]
#: Every kind, sizes, and calls of head pairs, of warpgroups and of GPUs that share them.
PROBLEMS = (
    *(replace(AttentionProblem(2, 12, 3, 40, 64, q_len=3), **kind) for kind in KINDS.values()),
    *(AttentionProblem(batch, 32, 8, 4096, 128) for batch in (1, 7, 200)),
    *(AttentionProblem(4, 64, 8, 1000, dim) for dim in (8, 72, 80, 192, 256, 512)),
    AttentionProblem(1, 71, 1, 300_000, 64, "bf16", "NHD", page_size=1),
    AttentionProblem(2, 128, 1, 5000, 576, v_head_dim=512),
    AttentionProblem(8, 64, 8, 16_384, 64, "bf16", "NHD", kv_dtype="e4m3"),
    AttentionProblem(32, 32, 32, 1000, 80, "fp16", "NHD", page_size=64),
    *(AttentionProblem(1, 32, 8, 9000, 128, q_len=q_len) for q_len in (8, 9, 128)),
    AttentionProblem(1, 32, 8, 100, 128, q_len=9),
    *(AttentionProblem(2, 64, 8, 9000, 128, parallel=parallel) for parallel in ("cp:2", "tp:8")),
)
#: Settings of problems, a JSON object in each line: kernel, its method, the problem's fields, and
#: the settings. Those of lean_cuda are the model's, so that a change of them is seen; those of
#: lean_mla are at the borders of its heuristic's cases.
ROWS = Path(__file__).with_name("settings.jsonl").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("line", ROWS, ids=range(1, len(ROWS) + 1))
def test_settings_of_an_h200(line):
    row = json.loads(line)
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in row["problem"].items()
    }
    config = getattr(kernel(row["kernel"]), row["choice"])(AttentionProblem(**fields), H200)
    assert config.to_dict() == row["config"]


@pytest.mark.parametrize(
    ("problem", "lengths_on"), diagonal(PROBLEMS, ["host", "device"], keep=4), ids=label
)
def test_the_models_choice_is_a_candidate_and_fits_every_gpu(problem, lengths_on):
    problem = replace(problem, lengths_on=lengths_on)
    for spec in CUDA_GPUS:
        config = LEAN.default_config(problem, spec)
        build = CudaBuild.of(problem, config)
        assert build.fits(spec)
        assert config in LEAN.tuning_space(problem, spec)
        if spec.compute_capability < HOPPER:
            assert (config.copy, config.cluster_size) == ("async", 1)
        if isinstance(build, ManyRowsBuild):
            assert has_many_rows(problem, spec)
            # CTAs that do not wait need not be resident together.
            assert build.cooperative == (config.cluster_size == 1)
        assert build.heads_of_row == 1 or takes_head_pairs(problem)


@pytest.mark.parametrize("problem", diagonal(PROBLEMS, keep=2), ids=label)
def test_candidates_that_problems_share_are_judged_by_their_own_builds(problem):
    known = cuda_settings.known(problem)
    for spec in (H200, find("a100-80gb")):
        columns, _ = cuda_settings.predict(known, spec, cuda_settings.costs_of(spec))
        assert columns.builds == tuple(CudaBuild.of(known, each) for each in columns.configs)


@pytest.mark.parametrize("lengths_on", ["host", "device"])
@pytest.mark.parametrize(
    "axes",
    [
        {},
        {"window_left": 700},
        {"q_len": 4, "kv_heads": 1},
        {"q_len": 8, "head_dim": 64},
        {"q_lens": (1, 5), "batch": 2},
        {"append": 2},
    ],
    ids=str,
)
def test_choices_in_blocks_are_those_made_alone(axes, lengths_on, monkeypatch):
    """In any order, also where blocks are forgotten: of sizes at the ends of blocks, and of few
    tokens and very many.
    """
    monkeypatch.setattr(cuda_settings, "_MOST_BLOCKS", 3)
    cuda_settings._shared_choices.cache_clear()
    problem = replace(PLAIN, **{"batch": 3, "lengths_on": lengths_on, **axes})
    choices = cuda_settings.choices_of(problem, H200)
    draw = random.Random(1)
    drawn = [(draw.randint(1, 80), round(2 ** draw.uniform(1, 13))) for _ in range(20)]
    ends = [(1, 2), (1, 64), (1, 65), (16, 2048), (17, 2049), (64, 96), (65, 97), (3, 2**20)]
    for batch, tokens in [(2, 100), (2, 200), *drawn, *ends, *drawn[:5]]:
        q_lens = None if problem.q_lens is None else (5,) * batch
        alone = replace(problem, batch=batch, context=max(5, tokens), capacity=None, q_lens=q_lens)
        assert choices(batch, max(5, tokens)) == kernel("lean_cuda").default_config(alone, H200)
        assert len(choices._made[1]) <= 3


def test_choices_do_not_depend_on_earlier_ones():
    def choices(problems: Any) -> dict[AttentionProblem, Any]:
        cuda_settings._columns_of.cache_clear()
        cuda_settings._chosen.cache_clear()
        return {problem: LEAN.default_config(problem, H200) for problem in problems}

    assert choices(PROBLEMS) == choices(reversed(PROBLEMS))


@pytest.mark.parametrize("kind", KINDS)
def test_settings_follow_from_what_the_host_knows(kind):
    """With lengths on the device, and with paddings, it is a bound of the lengths."""
    problem = replace(PLAIN, batch=2, **{**KINDS[kind], "context": 4000})
    expected = LEAN.any_length_config(problem, H200)
    for lengths in (4000, 3500, *fill_lengths(problem.batch, 4000)):
        cached = replace(problem, context=lengths, capacity=4096, lengths_on="device")
        assert LEAN.default_config(cached, H200) == expected
    if problem.leftpad:
        assert LEAN.default_config(problem, H200) == expected


def build_of(config) -> tuple[int, ...]:
    """Return chunk, warps, stages, CTAs per SM and per cluster."""
    return (
        *(config.chunk_tokens, config.num_warps, config.num_stages),
        *(config.ctas_per_sm, config.cluster_size),
    )


@pytest.mark.parametrize("name", ["lean_cuda", "lean_triton", "fixed_split_cuda", "fixed_split"])
def test_uneven_lengths_take_the_settings_for_any_lengths(name):
    """Settings for equal lengths, as long as the longest, would be slower.

    See entry 52 of reports/performance-log.md.
    """
    own = kernel(name)
    on_device = replace(PLAIN, lengths_on="device")
    expected = own.any_length_config(on_device, H200)
    assert own.default_config(THREE_LONG, H200) == expected
    assert own.default_config(on_device, H200) == expected
    short_in_a_large_cache = replace(THREE_LONG, context=(900,) + (16,) * 7, capacity=65_536)
    assert own.default_config(short_in_a_large_cache, H200) == expected
    assert own.default_config(PLAIN, H200) != expected


@pytest.mark.parametrize(
    ("batch", "heads", "context", "each"),
    [
        (64, 48, 1024, True),
        (64, 32, 8192, True),
        # Too few of them, too long ones.
        (8, 48, 1024, False),
        (64, 32, 10_000, False),
    ],
)
def test_many_short_output_tiles_are_a_cta_each(batch, heads, context, each):
    problem = AttentionProblem(batch, heads, heads, context, 64)
    config = LEAN.default_config(problem, H200)
    schedule = LEAN.schedule(problem, config, H200)
    assert schedule is not None
    ctas = len({segment.cta for segment in schedule.segments})
    assert ctas == (batch * heads if each else config.ctas_per_sm * H200.sms)


@pytest.mark.parametrize(
    ("contexts", "kv_heads", "splits"),
    [
        ((65_536,), 1, 128),
        ((65_536, 16), 8, 16),
        ((65_536, 16, 16), 8, 44),
        ((65_536,) * 64, 8, 2),
        ((65_536,) * 64, 32, 1),
        ((1000,), 8, 4),
        ((100,), 8, 1),
    ],
)
def test_splits_for_any_lengths(contexts, kv_heads, splits):
    """There are eight waves of CTAs, or two of few output tiles.

    A split has at least two LeanTiles, and an output tile at most 128 splits.
    """
    problem = AttentionProblem(len(contexts), 4 * kv_heads, kv_heads, max(contexts), 128)
    tiles = TileGrid.of(problem, 128, 8)
    assert any_length_splits(tiles, H200) == splits
    on_device = replace(problem, context=contexts, lengths_on="device")
    config = kernel("fixed_split_cuda").default_config(on_device, H200)
    assert config is not None
    assert (config.splits, *build_of(config)) == (splits, 16, 8, 2, 1, 1)
    short_rows = kernel("fixed_split_cuda").default_config(replace(on_device, head_dim=64), H200)
    assert short_rows is not None
    assert (short_rows.splits, *build_of(short_rows)) == (splits, 32, 4, 2, 2, 1)


def test_never_split_the_longest_sequence_decides():
    """For more output tiles than SMs, one CTA per SM is faster than two.

    See entry 52 of reports/performance-log.md.
    """
    fa2 = kernel("fa2_cuda")
    equal = AttentionProblem(32, 64, 8, 8192, 128)
    uneven = replace(equal, context=(8192,) + (800,) * 31)
    builds = [build_of(fa2.default_config(problem, H200)) for problem in (equal, uneven)]
    assert builds == [(16, 4, 3, 2, 1), (16, 8, 2, 1, 1)]


@pytest.mark.parametrize(
    ("heads", "head_dim", "kv_dtype", "build"),
    [
        ((8, 8), 64, "same", (32, 8, 2, 1)),
        ((8, 8), 128, "same", (16, 8, 2, 1)),
        ((32, 1), 128, "same", (16, 8, 2, 1)),
        ((8, 8), 128, "e4m3", (32, 8, 2, 1)),
        # Chunks of 32 tokens would spill registers.
        ((32, 1), 128, "e4m3", (16, 8, 2, 1)),
        ((8, 8), 256, "same", (16, 4, 3, 1)),
    ],
)
def test_a_cta_that_has_its_sm_for_itself(heads, head_dim, kv_dtype, build):
    problem = AttentionProblem(1, heads[0], heads[1], 65_536, head_dim, kv_dtype=kv_dtype)
    fa2 = kernel("fa2_cuda").default_config(problem, H200)
    assert fa2 is not None
    assert lone_build(problem, fa2.tile_rows) == build
    assert build_of(fa2) == (*build, 1)


@pytest.mark.parametrize(
    ("batch", "heads", "context", "head_dim", "build", "splits"),
    [
        # Figure 7a.
        (1, (56, 56), 4096, 64, (32, 8, 2, 1, 1), 1),
        (1, (24, 24), 1024, 64, (64, 4, 3, 1, 4), 1),
        (1, (32, 8), 4096, 128, (32, 4, 3, 1, 8), 1),
        (1, (32, 8), 32_768, 128, (16, 8, 2, 1, 1), 16),
        (1, (40, 40), 65_536, 64, (32, 8, 2, 1, 1), 3),
        (8, (12, 12), 4096, 64, (32, 8, 2, 1, 1), 1),
        (1, (16, 16), 524_288, 64, (32, 8, 2, 1, 1), 8),
        (16, (16, 16), 4096, 64, (32, 4, 2, 2, 1), 1),
        (64, (48, 48), 2048, 64, (32, 4, 2, 2, 1), 1),
    ],
)
def test_splits_of_equal_lengths(batch, heads, context, head_dim, build, splits):
    """The splits are within 1% of the fastest (entry 52 of reports/performance-log.md)."""
    problem = AttentionProblem(batch, heads[0], heads[1], context, head_dim)
    config = kernel("fixed_split_cuda").default_config(problem, H200)
    assert config is not None
    assert (build_of(config), config.splits) == (build, splits)
