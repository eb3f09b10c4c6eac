"""many_rows.cu executed on the CPU, against the fp64 reference; see lean_on_cpu.py."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import NamedTuple

import pytest
from depth import deep
from hostile_inputs import (
    EQUAL_SCORES,
    assert_hidden,
    equal_scores,
    inf_in_last_token,
    steep_scores,
)
from lean_on_cpu import Cpu, Mutation, Workspace, failure_of, failure_over, needs_compiler
from leanbench.kernels.lean.configs import LeanCudaConfig
from leanbench.kernels.lean.cuda_settings import cuda_config

from leanbench.core.errors import UserError
from leanbench.core.inputs import make_inputs
from leanbench.core.problem import AttentionProblem

pytestmark = needs_compiler


def of_warpgroups(
    rows: int, chunk: int = 128, align_grid: bool = False, copy: str = "bulk"
) -> LeanCudaConfig:
    return cuda_config(chunk, rows // 16, 2, 1, 1, rows, copy, 1, align_grid)


def of_pairs(stages: int = 2) -> LeanCudaConfig:
    return cuda_config(64, 4, stages, 1, 2, 64, "bulk", 1, align_grid=True)


class Case(NamedTuple):
    problem: AttentionProblem
    config: LeanCudaConfig
    #: SMs of the GPUs on which the call is made.
    sms: tuple[int, ...]


CHUNK = AttentionProblem(1, 8, 2, 515, 64, q_len=40)
FEW = AttentionProblem(1, 4, 1, 515, 64, q_len=13)
RAGGED = replace(
    CHUNK, batch=3, context=(515, 700, 70), capacity=768, lengths_on="device", page_size=64
)
CHOSEN = replace(RAGGED, q_heads=80, q_len=1, capacity=None, page_size=32, select="9x32")
MANY = replace(
    FEW, batch=6, context=(515, 700, 70, 300, 140, 260), capacity=768, lengths_on="device"
)

#: 52 rows, which end within a warp's, and 28, of which one CTA of a pair has more than half.
PAIR = AttentionProblem(1, 4, 1, 1100, 64, q_len=13)
PAIRS = replace(PAIR, batch=3, q_len=7, head_dim=128, dtype="bf16", context=515, sinks=True)
CASES = {
    # Two warpgroups and two row tiles; ranges that cross output tiles; splits that are merged.
    "host": Case(CHUNK, of_warpgroups(128), (1, 3, 7)),
    # Ranges with the rest of the next range's output tile; merges of two and of more splits.
    "device": Case(replace(RAGGED, q_lens=(37, 1, 5), sinks=True), of_warpgroups(64), (2, 5, 44)),
    # Sequences in which the second warpgroup has no rows and LeanTiles are longer; ranges that
    # begin and end within an output tile of either kind. Four warps copy, each several boxes of K
    # and of V, which differ in columns; some copy none at a sequence's end.
    "chunk and decodes": Case(
        AttentionProblem(
            batch=3,
            q_heads=4,
            kv_heads=1,
            context=(1170, 1290, 70),
            head_dim=192,
            v_head_dim=128,
            q_lens=(33, 1, 5),
            page_size=16,
            capacity=1408,
            lengths_on="device",
        ),
        of_warpgroups(128, 64),
        (3,),
    ),
    # Rows are copied by lanes, each from another page. Sequences end within a chunk, and the second
    # warpgroup has no rows of some; ranges begin and end within an output tile.
    "pages of one token": Case(
        replace(RAGGED, page_size=1, q_lens=(37, 1, 5)), of_warpgroups(128, copy="async"), (2, 7)
    ),
    # Blocks of each KV head, whole ones and by lanes.
    "blocks of KV heads": Case(CHOSEN, of_warpgroups(64), (2, 5)),
    "blocks of KV heads, odd pages": Case(
        replace(CHOSEN, page_size=3, select="90x3"), of_warpgroups(64, copy="async"), (5,)
    ),
    # Pairs of CTAs with whole output tiles, more of them than resident pairs.
    "pair, rows within a warp's": Case(PAIR, of_pairs(), (132,)),
    "pair, sinks": Case(PAIRS, of_pairs(3), (2,)),
    # One CTA has a chunk more than the other, or the only one.
    "pair, one chunk": Case(replace(PAIR, context=40), of_pairs(), (132,)),
    "pair, a window": Case(
        replace(PAIR, window_left=130, softcap=2.0, batch=2), of_pairs(), (132,)
    ),
    "pair, pages": Case(
        replace(PAIRS, page_size=16, sinks=False, q_len=16, context=300), of_pairs(), (132,)
    ),
    "pair, row tiles": Case(
        replace(PAIR, q_len=40, alibi=True, causal=False, context=515), of_pairs(), (4,)
    ),
}
DEEP_CASES = {
    "in step": Case(CHUNK, of_warpgroups(128, align_grid=True), (7,)),
    "one warpgroup": Case(replace(FEW, batch=3), of_warpgroups(64), (1, 4, 12)),
    "head_dim 128": Case(replace(FEW, head_dim=128, dtype="bf16"), of_warpgroups(64), (3,)),
    "head_dim 256": Case(replace(FEW, head_dim=256, context=200), of_warpgroups(64, 64), (2,)),
    "head_dim 192 of K": Case(
        replace(CHUNK, head_dim=192, v_head_dim=128), of_warpgroups(128, 64), (4,)
    ),
    "many sequences": Case(MANY, of_warpgroups(64), (2, 4, 20)),
    "many query tokens": Case(replace(MANY, q_len=33), of_warpgroups(128), (4, 20)),
    "pages of 16": Case(replace(MANY, page_size=16), of_warpgroups(64), (4,)),
    "pages of 64": Case(RAGGED, of_warpgroups(128), (2, 12)),
    "pages of 1, one warpgroup": Case(
        replace(MANY, page_size=1), of_warpgroups(64, 64, copy="async"), (4,)
    ),
    "pages of 3, head_dim 192 of K": Case(
        replace(CHUNK, page_size=3, head_dim=192, v_head_dim=128),
        of_warpgroups(128, 64, copy="async"),
        (4,),
    ),
    "pages of 8, head_dim 256": Case(
        replace(FEW, page_size=8, head_dim=256, context=200),
        of_warpgroups(64, 64, copy="async"),
        (2,),
    ),
    "window behind padding, pages of 8": Case(
        replace(RAGGED, page_size=8, window_left=150, causal=False, window_right=3, leftpad=True),
        of_warpgroups(128, copy="async"),
        (4,),
    ),
    "rows of the cache, by lanes": Case(
        replace(MANY, batch_idx=True), of_warpgroups(64, copy="async"), (4,)
    ),
    "pages of 64, by lanes": Case(RAGGED, of_warpgroups(128, copy="async"), (12,)),
    "rows of the cache": Case(replace(MANY, batch_idx=True), of_warpgroups(64), (4,)),
    "window": Case(replace(CHUNK, window_left=150, alibi=True), of_warpgroups(128), (5,)),
    "attention chunks": Case(
        replace(RAGGED, attention_chunk=300, causal=False), of_warpgroups(64), (4,)
    ),
    "window behind padding": Case(
        replace(
            RAGGED,
            page_size=32,
            window_left=150,
            causal=False,
            window_right=3,
            leftpad=True,
            softcap=2.0,
        ),
        of_warpgroups(64),
        (4,),
    ),
    "sinks of a whole output tile": Case(
        replace(CHUNK, sinks=True, softcap=2.0), of_warpgroups(128), (2,)
    ),
}

#: Lines without which a launch is wrong, or ends in no order that a GPU allows.
MUTATIONS: list[Mutation] = [
    ("rows_attend.cuh", "token + Build::chunk <= all_to", "true"),
    ("rows_attend.cuh", "o[i] *= softmax.scale[i / 2 % 2]", "o[i] *= 1.0f"),
    ("many_rows.cu", "      if (!part.is_rest) {", "      {"),
    (
        "rows_output.cuh",
        "missing || log.w != epoch);\n        while (__any_sync(~0u, log.w != epoch))",
        "false);\n        while (false)",
    ),
    (
        "rows_output.cuh",
        "        missing = log.w != epoch;\n",
        "        missing = false;\n        continue;\n",
    ),
    ("many_rows.cu", "            add_partial(part, slots, 1, o, m, l, epoch);\n", ""),
    ("rows_attend.cuh", "    skip_part(part, stage, shared);\n", ""),
    (
        "rows_attend.cuh",
        "  bar_sync(OF_WARPGROUP + warpgroup(), 128);\n}\n\n// Starts S",
        "}\n\n// Starts S",
    ),
    (
        "rows_attend.cuh",
        "    start_values(o, weights, shared, stage);\n    pass_turn();\n",
        "    start_values(o, weights, shared, stage);\n",
    ),
    ("rows_copy.cuh", "    mbarrier_try_wait_parity(empty, parity ^ 1);\n", ""),
    ("rows_copy.cuh", "    look_up(p, part, kv_head, token + Build::chunk);\n", ""),
    ("rows_copy.cuh", "(to ^ i % 8 * 16)", "to"),
]
#: The same for pairs of CTAs.
PAIR_MUTATIONS: list[Mutation] = [
    ("rows_output.cuh", "  bar_sync(OF_CONSUMERS, CONSUMERS);  // the ring has been read\n", ""),
    ("rows_output.cuh", "  meet_cluster();\n  const RowWriter", "  const RowWriter"),
    (
        "rows_output.cuh",
        "float sum = Build::sinks ? ex2_approx_ftz(sink - high) : 0.0f;",
        "float sum = 0.0f;",
    ),
    ("rows_attend.cuh", "const int first = Build::cluster > 1 ? rank : 0;", "const int first = 0;"),
]


@pytest.mark.parametrize("name", [*CASES, *(deep(name) for name in DEEP_CASES)])
def test_many_rows_are_right(name):
    run((CASES | DEEP_CASES)[name], 3 if name in DEEP_CASES else 2 if "pair" in name else 1)


@pytest.mark.deep
@pytest.mark.parametrize("mutation", PAIR_MUTATIONS)
def test_a_missing_line_of_pairs_is_noticed(mutation):
    with pytest.raises(AssertionError):
        run(CASES["pair, sinks"], seeds=4, cpu=Cpu(mutation))


@pytest.mark.deep
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_missing_line_is_noticed(mutation):
    cpu, workspace = Cpu(mutation), Workspace(epoch=7)
    ragged = replace(RAGGED, batch=6, context=MANY.context, page_size=None)
    mixed = replace(ragged, q_lens=(40, 1, 5, 33, 1, 2))
    by_lanes = mutation[0] == "rows_copy.cuh"
    config = of_warpgroups(128, copy="async" if by_lanes else "bulk")
    if by_lanes:
        ragged, mixed = replace(ragged, page_size=1), replace(mixed, page_size=1)
    assert any(
        failure_of(cpu, workspace, problem, config, sms, seed, seed % 2 == 0)
        for problem, sms in ((ragged, 2), (ragged, 5), (mixed, 3), (CHUNK, 7), (CHUNK, 12))
        for seed in range(3)
    )


def run(case: Case, seeds: int, cpu: Cpu | None = None) -> None:
    cpu, workspace = cpu or Cpu(), Workspace(epoch=7)
    for sms, seed in product(case.sms, range(seeds)):
        launch = (cpu, workspace, case.problem, case.config, sms, seed)
        failure = failure_of(*launch, lazy=seed % 2 == 0)
        assert failure is None, failure


@pytest.mark.parametrize(
    "axes", [{"lengths_on": "device"}, {"leftpad": True}, {"q_lens": (13,)}], ids=str
)
def test_a_pair_takes_lengths_that_the_host_knows(axes):
    words = r"^cluster_size 2 with tile_rows 64 takes sequences of one length that"
    with pytest.raises(UserError, match=words):
        failure_of(Cpu(), Workspace(epoch=7), replace(PAIR, **axes), of_pairs(), 132, 0)


#: Problems in bf16 whose launches merge partials, and their settings and SMs.
LARGE_SCORES = {
    "4 query tokens": Case(
        AttentionProblem(2, 16, 1, (515, 300), 64, "bf16", q_len=4), of_warpgroups(64), (4,)
    ),
    "20, noncausal": Case(
        AttentionProblem(1, 16, 1, 515, 64, "bf16", q_len=20, causal=False),
        of_warpgroups(128),
        (7,),
    ),
    "pair": Case(replace(PAIR, dtype="bf16"), of_pairs(), (132,)),
}


@pytest.mark.parametrize("score", EQUAL_SCORES)
@pytest.mark.parametrize("name", LARGE_SCORES)
def test_equal_scores_of_any_size(cpu, name, score):
    problem, config, (sms,) = LARGE_SCORES[name]
    inputs = equal_scores(problem, "cpu", score)
    assert failure_over(cpu, Workspace(epoch=7), inputs, config, sms) is None


@pytest.mark.parametrize("scale", [1e3 / 3, 1e6 / 3])
def test_equal_scores_under_a_large_scale(cpu, scale):
    """fp16 holds no weights above 2^16."""
    inputs = replace(equal_scores(CHUNK, "cpu", 64 * 208.0), softmax_scale=scale)
    assert failure_over(cpu, Workspace(epoch=7), inputs, of_warpgroups(128), 3) is None


@pytest.mark.parametrize("cache", ["k_cache", "v_cache"])
@pytest.mark.parametrize("q_len", [4, 20])
def test_infinities_in_a_token_that_others_do_not_see(cpu, q_len, cache):
    problem = AttentionProblem(2, 32, 2, 300, 64, q_len=q_len)
    inputs, expected = inf_in_last_token(problem, "cpu", cache)
    inputs.poison()
    cpu.launch(inputs, of_warpgroups(64 if q_len == 4 else 128), 7, Workspace(epoch=7))
    assert_hidden(inputs, expected, cache)


@pytest.mark.parametrize("q_lens", [None, (33, 1, 40, 20, 2, 13)])
def test_consecutive_output_tiles_without_tokens(cpu, q_lens):
    """Nothing of theirs is read, so no barrier of a copy lies between the rows they write."""
    problem = replace(MANY, q_len=40, q_lens=q_lens)
    inputs = make_inputs(problem, "cpu", seed=1)
    assert inputs.cache_seqlens is not None
    inputs.cache_seqlens[1:] = 0
    for seed in range(3):
        assert failure_over(cpu, Workspace(7), inputs, of_warpgroups(128), 1, seed) is None


def test_scores_above_2_to_the_27th(cpu):
    inputs = steep_scores(CHUNK, "cpu")
    assert failure_over(cpu, Workspace(epoch=7), inputs, of_warpgroups(128), 3) is None


@pytest.mark.parametrize("scale", [-0.2, 0.0, 1e-40])
def test_scales_that_do_not_keep_the_order_of_scores(cpu, scale):
    problem, config, (sms,) = LARGE_SCORES["4 query tokens"]
    inputs = replace(make_inputs(problem, "cpu", seed=1), softmax_scale=scale)
    assert failure_over(cpu, Workspace(epoch=7), inputs, config, sms) is None
