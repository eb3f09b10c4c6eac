"""mla.cu executed on the CPU, against the fp64 reference; see lean_on_cpu.py."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from depth import deep
from hostile_inputs import (
    EQUAL_SCORES,
    equal_scores,
    error_by_halves,
    steep_scores,
    values_of_two_sizes,
)
from lean_on_cpu import Cpu, Mutation, Workspace, failure_of, failure_over, needs_compiler
from leanbench.kernels.mla.configs import MlaConfig
from library_stand_ins import LATENT

from leanbench.check.grid import drop_pages
from leanbench.check.poison import poison_unused
from leanbench.check.reference import Reference
from leanbench.core.inputs import make_inputs
from leanbench.core.problem import AttentionProblem

pytestmark = needs_compiler
#: Two CTAs of 64 rows that share copies; one CTA.
PAIR = replace(LATENT, batch=3, q_heads=128, context=300)
SINGLE = replace(LATENT, batch=3, context=200)
#: Lengths of four sequences, for some of the cases.
FOUR = {"batch": 4, "context": (1, 64, 430, 90), "capacity": 512}
UNALIGNED = {**FOUR, "context": (1, 80, 430, 111)}
OF_512 = {"head_dim": 512, "v_head_dim": None}
OF_320, OF_288 = ({"head_dim": columns, "v_head_dim": 256} for columns in (320, 288))
OF_160 = {"head_dim": 160, "v_head_dim": 128}


class Case(NamedTuple):
    problem: AttentionProblem
    #: Minimum length of work ranges, in stages of 64 tokens.
    min_tiles: int
    sms: int
    lazy: bool = True
    #: With 12, softmax picks few tokens, and the maximum moves more than once.
    score_scale: float = 1.0
    column_groups: int = 1

    def failure(self, cpu: Cpu, workspace: Workspace, seed: int) -> str | None:
        config = MlaConfig(self.min_tiles, False, self.column_groups)
        launch = (cpu, workspace, self.problem, config, self.sms, seed)
        return failure_of(*launch, self.lazy, self.score_scale)


CASES = {
    # A range that crosses output tiles; output tiles of two partials, and of three.
    "crossing": Case(replace(PAIR, batch=2), 1, 8, score_scale=12.0),
    # The first query token of the first sequence sees nothing; the previous range has a rest.
    "several query tokens": Case(replace(SINGLE, **FOUR, q_len=2), 1, 6),
    # Three stages stay whole, five of the next sequence do not.
    "short sequences": Case(
        replace(SINGLE, **{**FOUR, "context": (160, 300, 1, 64)}, q_len=2), 1, 10
    ),
    # Pairs of CTAs, output tiles of four partials and of three, and ranges that cross.
    "2 column groups": Case(replace(PAIR, batch=1), 1, 14, score_scale=12.0, column_groups=2),
    # Single CTAs with a whole output tile, two splits, or more of the longest sequence.
    "4 column groups": Case(
        replace(SINGLE, **FOUR, page_size=64), 1, 96, score_scale=12.0, column_groups=4
    ),
    # Pairs of CTAs, output tiles of several partials; Q in bf16 is divided.
    "e4m3": Case(replace(PAIR, batch=2, kv_dtype="e4m3"), 1, 8, score_scale=12.0),
    # Bytes arrive immediately; sequences end in all quarters of a stage.
    "e5m2 pages": Case(
        replace(SINGLE, **UNALIGNED, page_size=64, kv_dtype="e5m2", dtype="fp16"), 1, 6, lazy=False
    ),
    # Chosen tokens.
    "pages of 1": Case(replace(SINGLE, **UNALIGNED, page_size=1), 1, 6, score_scale=12.0),
    "160 columns": Case(replace(SINGLE, **OF_160, batch=2), 1, 5, score_scale=12.0),
    "e4m3 pages of 1": Case(replace(SINGLE, **UNALIGNED, page_size=1, kv_dtype="e4m3"), 1, 6),
    "rows with scales": Case(
        replace(SINGLE, **UNALIGNED, page_size=1, kv_dtype="e4m3", row_scales=True), 1, 6
    ),
}
DEEP_CASES = {
    # Rows without columns beyond V, with 64 of them, and with 32.
    "512 columns": Case(replace(PAIR, **OF_512, context=200), 1, 8, score_scale=12.0),
    "512 columns, e4m3": Case(replace(SINGLE, **OF_512, **UNALIGNED, kv_dtype="e4m3"), 1, 6),
    "512 columns, pages of 3": Case(replace(SINGLE, **OF_512, **UNALIGNED, page_size=3), 1, 6),
    "512 columns, e5m2 pages of 1": Case(
        replace(SINGLE, **OF_512, **UNALIGNED, page_size=1, kv_dtype="e5m2"), 1, 6
    ),
    "320 columns": Case(replace(PAIR, **OF_320, **FOUR, page_size=64), 1, 8, lazy=False),
    "288 columns": Case(replace(SINGLE, **OF_288, batch=2), 1, 5, score_scale=12.0),
    # As many splits as SMs of a GPU: their weights fill the memory of Q and both stages.
    "160 columns, split over all": Case(replace(SINGLE, **OF_160, batch=1, context=9216), 1, 144),
    "160 columns, pairs": Case(replace(PAIR, **OF_160, **FOUR, page_size=64), 1, 8, lazy=False),
    "160 columns, pages of 1": Case(replace(SINGLE, **OF_160, **UNALIGNED, page_size=1), 1, 6),
    "320 columns, split over many": Case(replace(SINGLE, **OF_320, batch=1, context=900), 1, 16),
    "320 columns, 2 column groups": Case(
        replace(SINGLE, **OF_320, dtype="fp16"), 1, 16, score_scale=12.0, column_groups=2
    ),
    "288 columns, pages of 1": Case(replace(SINGLE, **OF_288, **UNALIGNED, page_size=1), 1, 6),
    # Splits longer than the mean by a stage; and so unequal lengths that work ranges cross.
    "longer splits": Case(
        replace(SINGLE, batch=3, context=(832, 830, 770), capacity=1408, page_size=64), 1, 7
    ),
    "crossing pairs": Case(
        replace(PAIR, batch=4, context=(1408, 1400, 1380, 190), capacity=1408, page_size=64), 1, 10
    ),
    "single CTAs": Case(SINGLE, 1, 6),
    "a sequence each": Case(PAIR, 5, 6),
    "split": Case(replace(PAIR, batch=1), 1, 12),
    "split over many": Case(replace(SINGLE, batch=1, context=36 * 64), 1, 36),
    "single CTAs, early copies": Case(replace(SINGLE, dtype="fp16"), 1, 4, lazy=False),
    "pages": Case(replace(PAIR, **FOUR, page_size=64), 1, 8),
    "noncausal": Case(replace(SINGLE, q_len=3, causal=False), 1, 5),
    "4 column groups of pairs": Case(
        replace(PAIR, batch=1), 1, 40, lazy=False, score_scale=12.0, column_groups=4
    ),
    "2 column groups, lengths of their own": Case(
        replace(PAIR, batch=4, context=(1, 64, 520, 90), capacity=576, page_size=64),
        *(1, 60),
        column_groups=2,
    ),
    # Lengths on the device that have no groups, and ranges that cross output tiles in groups.
    "4 column groups for shorter lengths": Case(
        replace(PAIR, **FOUR, page_size=64), 1, 20, score_scale=12.0, column_groups=4
    ),
    "4 column groups, crossing": Case(
        replace(SINGLE, **FOUR, q_heads=64), 1, 20, score_scale=12.0, column_groups=4
    ),
    # Stages that are refilled as soon as they are free.
    "2 column groups, long ranges": Case(
        replace(SINGLE, batch=2, context=400, capacity=512), 1, 4, False, 30.0, column_groups=2
    ),
    # More splits than one round merges, and exactly that number.
    "2 column groups, split over many": Case(
        replace(SINGLE, batch=1, context=20 * 64), 1, 40, score_scale=12.0, column_groups=2
    ),
    "4 column groups, split over many": Case(
        replace(SINGLE, batch=1, context=16 * 64, dtype="fp16"), 1, 64, column_groups=4
    ),
    # Rows of two warps, and of three row tiles.
    "4 column groups, several query tokens": Case(
        replace(SINGLE, batch=2, context=300, q_len=2), 1, 32, score_scale=12.0, column_groups=4
    ),
    "2 column groups, row tiles": Case(
        replace(PAIR, batch=1, context=200, q_len=3, causal=False), 1, 26, column_groups=2
    ),
    "e4m3, split over many": Case(
        replace(SINGLE, batch=1, context=36 * 64, kv_dtype="e4m3", dtype="fp16"), 1, 36
    ),
    "e5m2, noncausal, no scale": Case(
        replace(PAIR, q_len=2, causal=False, kv_dtype="e5m2", scaled=False), 1, 7, lazy=False
    ),
    "e4m3, pages": Case(replace(PAIR, **FOUR, page_size=128, kv_dtype="e4m3"), 1, 8),
    # Two row tiles without a cluster; the same with column groups.
    "pages of 1, 128 heads": Case(replace(PAIR, **FOUR, page_size=1), 1, 8, lazy=False),
    "4 column groups, pages of 1": Case(
        replace(PAIR, batch=1, page_size=1, dtype="fp16"), 1, 40, column_groups=4
    ),
    "rows with scales, 128 heads": Case(
        replace(PAIR, page_size=16, kv_dtype="e4m3", row_scales=True), 1, 7, score_scale=12.0
    ),
    "rows with scales, long ranges": Case(
        replace(SINGLE, context=500, page_size=1, kv_dtype="e4m3", row_scales=True), 1, 2, False
    ),
    "pages of 48, several query tokens": Case(
        replace(SINGLE, **FOUR, q_len=2, page_size=48, lengths_on="device"), 1, 5
    ),
    "e5m2, pages of 16": Case(
        replace(PAIR, **UNALIGNED, page_size=16, kv_dtype="e5m2", dtype="fp16"), 1, 9, lazy=False
    ),
}
#: Those with tokens that can be without a page.
GATHERED = ("pages of 1", "e4m3 pages of 1", "rows with scales")
DEEP_GATHERED = (
    *("pages of 1, 128 heads", "4 column groups, pages of 1"),
    *("pages of 48, several query tokens", "e5m2, pages of 16"),
)


#: Lines without which a launch is wrong, or ends in no order that a GPU allows.
MUTATIONS: list[Mutation] = [
    ("scores.cuh", "overwritten.\n  bar_sync(OF_WARPGROUP + STAGE, 128);", "overwritten."),
    (
        "scores.cuh",
        "st_shared_v4(shared + STAGE_AT<STAGE> + column * COLUMN",
        "st_shared_v4(shared + STAGE_AT<STAGE>",
    ),
    (
        "mla.cu",
        "take_over<OTHER>(shared, memory, filled[OTHER], softmax);\n    if (softmax.rescales)",
        "take_over<OTHER>(shared, memory, filled[OTHER], softmax);\n    if (false)",
    ),
    ("outputs.cuh", "!= epoch", "== 0"),
]
#: Mutations of column groups, each with the case that detects it.
COLUMN_MUTATIONS: list[tuple[str, Mutation]] = [
    (
        "4 column groups",
        ("outputs.cuh", "slot * GROUPS + group_of_cta<GROUPS>()", "slot * GROUPS"),
    ),
    (
        "2 column groups, long ranges",
        ("mla.cu", "if (i == OwnColumns<GROUPS>::FIRST_OF_OTHER)", "if (i == HALF_COLUMNS)"),
    ),
]
#: Mutations of fp8 caches.
FP8_MUTATIONS: list[Mutation] = [
    (
        "mla.cu",
        "mbarrier_try_wait_parity(shared + empty_at(STAGE, STAGE), filled % 2 ^ 1);\n"
        "#pragma unroll\n  for (int turn",
        "\n#pragma unroll\n  for (int turn",
    ),
    (
        "bytes.cuh",
        "fence_proxy_async_shared_cta();\n  bar_sync(OF_WARPGROUP + STAGE, 128);",
        "fence_proxy_async_shared_cta();",
    ),
    ("bytes.cuh", "if (token < tokens)", "if (true)"),
    ("mla.cu", "if constexpr (DIVIDED_QUERY) own.x *=", "if (false) own.x *="),
]
#: Mutations of copies by lanes.
GATHER_MUTATIONS: list[Mutation] = [
    ("gather.cuh", "if (token >= part.tokens) return -1;", ""),
    ("gather.cuh", "exists[i] && has_piece(column)", "has_piece(column)"),
    ("mla.cu", "if constexpr (GATHERS) tokens.mask(s);", ""),
    ("gather.cuh", "turn == OwnColumns<GROUPS>::FIRST_OF_OTHER", "false"),
]


@pytest.mark.parametrize("name", [*CASES, *(deep(name) for name in DEEP_CASES)])
def test_mla_is_right(name, cpu):
    # Slots then also hold another launch's partials.
    seeds = 3 if name in DEEP_CASES else 1 if name == "crossing" else 2
    workspace = Workspace(epoch=7)
    for seed in range(seeds):
        assert (CASES | DEEP_CASES)[name].failure(cpu, workspace, seed) is None


@pytest.mark.deep
def test_ranges_of_equal_sequences_end_where_output_tiles_do(cpu):
    """Eight CTAs have two sequences each, a ninth is idle. Nobody writes a partial."""
    problem = replace(SINGLE, batch=16, context=250, lengths_on="device")
    inputs, workspace = make_inputs(problem, "cpu", seed=1), Workspace(epoch=7)
    written = workspace.slots
    for _ in range(2):
        inputs.poison()
        written = workspace.slots.clone()
        cpu.launch(inputs, MlaConfig(1, align_grid=False), 9, workspace)
        assert Reference(inputs).check(inputs).failure(problem.dtype) is None
    assert torch.equal(workspace.slots, written)


@pytest.mark.parametrize(
    ("name", "sms", "lengths"),
    [
        ("several query tokens", 6, (0, -5, 430, 100_000)),
        ("several query tokens", 1, (0, 0, 0, 0)),
        ("4 column groups", 144, (0, -5, 430, 100_000)),
        ("4 column groups", 1, (0, 0, 0, 0)),
        deep("2 column groups, lengths of their own", 76, (0, -5, 430, 100_000)),
        deep("pages", 8, (0, -5, 430, 100_000)),
        deep("pages", 8, (0, 0, 0, 0)),
        ("pages of 1", 6, (0, -5, 430, 100_000)),
        deep("pages of 1, 128 heads", 8, (0, -5, 430, 100_000)),
        deep("e5m2, pages of 16", 8, (0, 0, 0, 0)),
    ],
)
def test_lengths_that_are_none(cpu, name, sms, lengths):
    """Lengths are 0, below 0 and past the cache; an empty sequence has output 0 and LSE -inf."""
    case = (CASES | DEEP_CASES)[name]
    inputs = make_inputs(case.problem, "cpu", seed=1)
    assert inputs.cache_seqlens is not None
    inputs.cache_seqlens.copy_(torch.tensor(lengths))
    inputs = poison_unused(inputs)
    inputs.poison()
    config = MlaConfig(case.min_tiles, False, case.column_groups)
    cpu.launch(inputs, config, sms, Workspace(epoch=7))
    assert Reference(inputs).check(inputs).failure(case.problem.dtype) is None
    empty = torch.tensor(lengths) <= 0
    assert not inputs.out[empty].any()
    assert inputs.lse[empty].isneginf().all()


@pytest.mark.parametrize("name", [*GATHERED, *(deep(name) for name in DEEP_GATHERED)])
@pytest.mark.parametrize("lazy", [True, False])
def test_tokens_without_a_page_have_no_weight(cpu, name, lazy):
    """Rows that nobody chose are NaN."""
    case, workspace = (CASES | DEEP_CASES)[name], Workspace(epoch=7)
    config = MlaConfig(case.min_tiles, False, case.column_groups)
    for seed in range(2):
        inputs = make_inputs(case.problem, "cpu", seed, score_scale=case.score_scale)
        inputs = drop_pages(inputs, seed)
        assert failure_over(cpu, workspace, inputs, config, case.sms, seed, lazy) is None
        assert not inputs.out[0].any()
        assert inputs.lse[0].isneginf().all()


@pytest.mark.parametrize(
    "name", ["crossing", "2 column groups", "4 column groups", deep("split over many")]
)
def test_partials_hold_values_of_any_size(cpu, name):
    case = (CASES | DEEP_CASES)[name]
    inputs = values_of_two_sizes(case.problem, "cpu")
    inputs.poison()
    config = MlaConfig(case.min_tiles, False, case.column_groups)
    cpu.launch(inputs, config, case.sms, Workspace(epoch=7))
    assert error_by_halves(inputs) < 5e-3


#: A call that detects mutations; sequences of an fp8 cache.
MUTATED = Case(replace(SINGLE, batch=2, context=300, capacity=512), 1, 4, score_scale=30.0)
FP8 = replace(SINGLE, batch=2, context=430, capacity=512, kv_dtype="e4m3")


@pytest.mark.deep
@pytest.mark.parametrize(
    ("case", "mutation"),
    [
        *((MUTATED, mutation) for mutation in MUTATIONS),
        *(((CASES | DEEP_CASES)[name], mutation) for name, mutation in COLUMN_MUTATIONS),
        *(
            (Case(FP8, 1, 2, lazy, score_scale=4.0), mutation)
            for mutation in FP8_MUTATIONS
            for lazy in (True, False)
        ),
    ],
)
def test_a_missing_line_is_noticed(case, mutation):
    cpu, workspace = Cpu(mutation), Workspace(epoch=7)
    assert any(case.failure(cpu, workspace, seed) for seed in range(6))


@pytest.mark.deep
@pytest.mark.parametrize("mutation", GATHER_MUTATIONS, ids=lambda mutation: mutation[1])
def test_a_missing_line_of_copies_by_lanes_is_noticed(mutation):
    problem = replace(SINGLE, **UNALIGNED, page_size=1)
    cpu, workspace = Cpu(mutation), Workspace(epoch=7)

    def failure(seed: int) -> str | None:
        inputs = drop_pages(make_inputs(problem, "cpu", seed, score_scale=4.0), seed)
        config = MlaConfig(1, align_grid=False)
        return failure_over(cpu, workspace, inputs, config, 3, seed, lazy=seed % 2 == 0)

    assert any(map(failure, range(6)))


@pytest.mark.parametrize("kv_dtype", ["e4m3", "e5m2"])
def test_every_number_of_fp8(kv_dtype, cpu):
    """The output of a sequence of one token is its V, times the scale."""
    problem = replace(SINGLE, batch=1, context=1, kv_dtype=kv_dtype, dtype="fp16")
    inputs = make_inputs(problem, "cpu", seed=1)
    numbers = torch.arange(256, dtype=torch.uint8)
    # NaN and infinities have no valid scores.
    numbers = numbers[numbers.view(inputs.k_cache.dtype).float().isfinite()].tile(3)[:576]
    inputs.k_cache.copy_(numbers.view(inputs.k_cache.dtype).expand(1, 1, 1, 576))
    assert inputs.k_descale is not None
    inputs.k_descale.fill_(0.5)
    inputs.q.zero_()
    cpu.launch(inputs, MlaConfig(1, align_grid=False), 1, Workspace(epoch=7))
    expected = inputs.k_cache[..., :512].float() * 0.5
    assert torch.equal(inputs.out.float(), expected.expand(1, 1, 16, 512))


def test_a_query_beyond_the_range_of_fp16(cpu):
    """Rows of Q in bf16 have separate units."""
    inputs = make_inputs(replace(CASES["e4m3"].problem, context=100), "cpu", seed=1)
    powers = torch.arange(-60, 68, dtype=torch.float32)[:, None]
    inputs.q.mul_(powers.exp2().to(inputs.q.dtype))
    scaled = replace(inputs, softmax_scale=2.0**-66)
    cpu.launch(scaled, MlaConfig(1, align_grid=False), 8, Workspace(epoch=7))
    assert Reference(scaled).check(scaled).failure("bf16") is None


@pytest.mark.parametrize("scale", [1e-7, 1e-30])
def test_a_query_of_zeros_beside_a_scale_near_0(cpu, scale):
    """Scores of hidden tokens are -inf, and times a row unit of 0 they would be NaN."""
    inputs = make_inputs(replace(CASES["e4m3"].problem, context=100), "cpu", seed=1)
    assert inputs.k_descale is not None
    inputs.k_descale.fill_(scale)
    inputs.q[:, :, ::2] = 0
    cpu.launch(inputs, MlaConfig(1, align_grid=False), 8, Workspace(epoch=7))
    assert inputs.out.isfinite().all()
    assert Reference(inputs).check(inputs).failure("bf16") is None


@pytest.mark.parametrize("score", EQUAL_SCORES)
@pytest.mark.parametrize(
    "axes",
    [{}, deep({"q_len": 2}), deep({"q_heads": 128, "q_len": 2, "causal": False})],
    ids=str,
)
def test_equal_scores_of_any_size(cpu, axes, score):
    inputs = equal_scores(replace(SINGLE, batch=2, **axes), "cpu", score)
    assert failure_over(cpu, Workspace(epoch=7), inputs, MlaConfig(1, False, 1), 6) is None


@pytest.mark.parametrize("kv_dtype", ["same", "e4m3"])
def test_equal_scores_under_a_large_scale(cpu, kv_dtype):
    """fp16 holds no weights above 2^16."""
    problem = replace(SINGLE, batch=2, dtype="fp16", kv_dtype=kv_dtype, scaled=False)
    inputs = replace(equal_scores(problem, "cpu", 64 * 208.0), softmax_scale=1e6 / 3)
    assert failure_over(cpu, Workspace(epoch=7), inputs, MlaConfig(1, False, 1), 6) is None


@pytest.mark.parametrize("sms", [1, 6])
def test_scales_of_empty_sequences_do_not_matter(cpu, sms):
    problem = replace(SINGLE, **FOUR, lengths_on="device", kv_dtype="e4m3")
    inputs = make_inputs(problem, "cpu", 1)
    assert inputs.cache_seqlens is not None
    inputs.cache_seqlens[0], inputs.cache_seqlens[-1] = 0, -1
    assert failure_over(cpu, Workspace(epoch=7), inputs, MlaConfig(1, False, 1), sms) is None


def test_a_scale_that_fp32_rounds_to_0(cpu):
    inputs = replace(make_inputs(replace(SINGLE, q_len=2), "cpu", 1), softmax_scale=1e-60)
    assert failure_over(cpu, Workspace(epoch=7), inputs, MlaConfig(1, False, 1), 6) is None


def test_scores_above_2_to_the_27th(cpu):
    inputs = steep_scores(replace(SINGLE, dtype="fp16", context=300), "cpu")
    assert failure_over(cpu, Workspace(epoch=7), inputs, MlaConfig(1, False, 1), 2) is None
