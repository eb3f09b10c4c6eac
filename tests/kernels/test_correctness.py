"""Triton's kernels against the fp64 reference, in the interpreter without a GPU and on the GPU with
one. tests/gpu_only/test_robust_on_gpu.py has the hostile inputs for CUDA C++.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from depth import diagonal, label
from hostile_inputs import (
    EQUAL_SCORES,
    assert_hidden,
    assert_nan_of_kv_head_0,
    equal_scores,
    inf_in_last_token,
    nan_in_k,
    very_low_scores,
    wild_lengths,
)
from leanbench.kernels.fixed_split.configs import FixedSplitTritonConfig
from leanbench.kernels.launch import cache_strides
from leanbench.kernels.lean.configs import LeanTritonConfig

from leanbench.check.poison import poison_unused
from leanbench.check.reference import Reference
from leanbench.core.config import TileConfig
from leanbench.core.errors import UserError
from leanbench.core.inputs import AttentionInputs, make_inputs
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel

#: A unified maximum overflows on purpose before it is recomputed.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")

CONFIGS = {
    "lean": LeanTritonConfig(32, 4, 2, ctas_per_sm=1, min_tiles_per_cta=1, align_grid=False),
    "fa2": TileConfig(32, 4, 2),
    "fixed_split": FixedSplitTritonConfig(32, 4, 2, splits=3),
    "unified_max": FixedSplitTritonConfig(32, 4, 2, splits=3),
}
PROBLEMS = [
    AttentionProblem(1, 2, 2, 1, 64),
    AttentionProblem(1, 3, 3, 200, 64, "bf16", "NHD"),
    AttentionProblem(2, 5, 1, 97, 80),
    AttentionProblem(1, 14, 2, 130, 96, "fp16", "NHD"),
    AttentionProblem(1, 8, 1, 64, 128, "bf16"),
    AttentionProblem(1, 71, 1, 70, 64),
    AttentionProblem(1, 4, 2, 65, 256),
    AttentionProblem(4, 4, 2, (1, 190, 33, 64), 64, "fp16", "NHD"),
    # Pages smaller than a LeanTile, equal, larger; contexts before, on and after a page's border.
    AttentionProblem(2, 4, 2, 97, 64, page_size=16),
    AttentionProblem(1, 6, 2, 96, 128, "bf16", "NHD", page_size=32),
    AttentionProblem(2, 3, 3, 127, 80, page_size=64),
    AttentionProblem(1, 8, 1, 257, 96, "bf16", page_size=128),
    AttentionProblem(3, 4, 2, (255, 1, 256), 256, "fp16", "NHD", page_size=256),
    # Several query tokens: one row tile and more, a tail over two LeanTiles, contexts below q_len.
    AttentionProblem(1, 3, 3, 65, 64, "bf16", q_len=2),
    AttentionProblem(1, 5, 1, 70, 128, q_len=16),
    AttentionProblem(1, 14, 2, 130, 80, "fp16", "NHD", q_len=7),
    AttentionProblem(1, 4, 2, 40, 256, q_len=16),
    AttentionProblem(4, 4, 2, (5, 190, 33, 1), 64, "bf16", q_len=6),
    # Both.
    AttentionProblem(1, 9, 1, 150, 64, q_len=8, page_size=16),
    AttentionProblem(3, 4, 2, (3, 145, 64), 96, "fp16", "NHD", 4, 16),
    AttentionProblem(3, 2, 2, (7, 145, 64), 128, "bf16", "HND", 8, 64),
]


def passes(inputs: AttentionInputs) -> None:
    dtype = "bf16" if inputs.out.dtype == torch.bfloat16 else "fp16"
    assert Reference(inputs).check(inputs).failure(dtype) is None


@pytest.mark.parametrize(("name", "problem"), diagonal(list(CONFIGS), PROBLEMS, keep=5), ids=label)
def test_matches_the_reference_and_repeats(name, problem, device):
    inputs = make_inputs(problem, device)
    launch = kernel(name).prepare(inputs, CONFIGS[name])
    launch()
    passes(inputs)
    out, lse = inputs.out.clone(), inputs.lse.clone()
    inputs.poison()
    launch()
    assert torch.equal(inputs.out, out)
    assert torch.equal(inputs.lse, lse)


#: For kernels without splits or with even ones: windows that begin within a LeanTile, at its
#: border, in the first one, and with only the last token.
WINDOWS_AND_CAPS = [
    AttentionProblem(2, 4, 2, 190, 64, window_left=70),
    AttentionProblem(1, 8, 1, 160, 128, "bf16", "NHD", window_left=31),
    AttentionProblem(3, 4, 2, (255, 1, 40), 64, "fp16", "NHD", page_size=16, window_left=50),
    AttentionProblem(1, 6, 2, 150, 96, q_len=5, window_left=60),
    AttentionProblem(2, 2, 2, (33, 130), 80, q_len=3, window_left=0, softcap=5.0),
    AttentionProblem(1, 5, 1, 97, 64, "bf16", softcap=20.0),
]


@pytest.mark.parametrize("problem", WINDOWS_AND_CAPS, ids=label)
@pytest.mark.parametrize("name", ["fa2", "fixed_split", "unified_max"])
def test_windows_and_soft_caps(name, problem, device):
    """Tokens before the windows are NaN."""
    assert kernel(name).unsupported_reason(problem) is None
    inputs = poison_unused(make_inputs(problem, device))
    kernel(name).prepare(inputs, CONFIGS[name])()
    passes(inputs)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("score_scale", [0.0, 40.0])
def test_extreme_scores(name, score_scale, device):
    """Scores are all equal, or differ so much that softmax picks one token."""
    problem = AttentionProblem(1, 4, 2, 150, 64)
    inputs = make_inputs(problem, device, score_scale=score_scale)
    kernel(name).prepare(inputs, CONFIGS[name])()
    passes(inputs)


@pytest.mark.parametrize("name", CONFIGS)
def test_large_negative_scores_do_not_underflow(name, device):
    """exp(score) of every token is 0 in fp32, so only the difference to the maximum may matter."""
    inputs = make_inputs(AttentionProblem(1, 2, 2, 100, 64), device)
    inputs.q.fill_(30.0)
    inputs.k_cache.copy_(-inputs.k_cache.abs() - 1)
    kernel(name).prepare(inputs, CONFIGS[name])()
    assert inputs.lse.max().item() < -200
    passes(inputs)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("page_size", [None, 16])
def test_lengths_outside_the_cache_are_the_nearest_inside(name, page_size, device):
    """An empty sequence has output 0 and LSE -inf."""
    inputs = wild_lengths(device, page_size)
    kernel(name).prepare(inputs, CONFIGS[name])()
    passes(inputs)
    lengths = torch.tensor((96, 0, 96, 33, 0), dtype=torch.int32, device=device)
    results = {"out": torch.empty_like(inputs.out), "lse": torch.empty_like(inputs.lse)}
    inside = replace(inputs, cache_seqlens=lengths, **results)
    kernel(name).prepare(inside, CONFIGS[name])()
    assert torch.equal(inputs.out, inside.out)
    assert torch.equal(inputs.lse, inside.lse)
    assert (inputs.out[lengths == 0] == 0).all()
    assert inputs.lse[lengths == 0].isneginf().all()


#: A unified maximum takes no such scores.
@pytest.mark.parametrize("name", ["lean", "fa2", "fixed_split"])
def test_finite_scores_below_minus_1e30_are_scores(name, device):
    inputs = very_low_scores(device)
    kernel(name).prepare(inputs, CONFIGS[name])()
    assert inputs.lse.max().item() < -1e31
    assert inputs.lse.isfinite().all()
    passes(inputs)


@pytest.mark.parametrize("name", ["lean", "fa2", "fixed_split"])
@pytest.mark.parametrize("token", [0, 250, 499])
def test_nan_in_k_shows_in_output_and_lse(name, token, device):
    inputs = nan_in_k(device, token)
    kernel(name).prepare(inputs, CONFIGS[name])()
    assert_nan_of_kv_head_0(inputs)


@pytest.mark.parametrize("score", EQUAL_SCORES)
@pytest.mark.parametrize("name", CONFIGS)
def test_equal_scores_of_any_size(name, score, device):
    inputs = equal_scores(AttentionProblem(1, 8, 2, 150, 64, "bf16", q_len=2), device, score)
    kernel(name).prepare(inputs, CONFIGS[name])()
    passes(inputs)


@pytest.mark.parametrize("cache", ["k_cache", "v_cache"])
@pytest.mark.parametrize("name", CONFIGS)
def test_infinities_in_a_token_that_others_do_not_see(name, cache, device):
    problem = AttentionProblem(2, 4, 2, 100, 64, q_len=4)
    inputs, expected = inf_in_last_token(problem, device, cache)
    kernel(name).prepare(inputs, CONFIGS[name])()
    assert_hidden(inputs, expected, cache)


@pytest.mark.parametrize(
    "problem",
    [
        AttentionProblem(3, 4, 2, (45, 2, 96), 64, q_len=3, page_size=16),
        AttentionProblem(2, 4, 2, 40, 80, "bf16", "NHD", page_size=64),
        AttentionProblem(2, 4, 2, (45, 100), 64, q_len=4),
    ],
    ids=label,
)
@pytest.mark.parametrize("name", CONFIGS)
def test_garbage_past_the_context_is_not_read(name, problem, device):
    """NaN fills the tails of last pages, unused pages and the tail of a contiguous cache.

    Unused entries of the block table are wild.
    """
    inputs = poison_unused(make_inputs(problem, device))
    assert inputs.k_cache.isnan().any()
    if inputs.block_table is not None:
        nobody = inputs.k_cache.shape[0] - 1
        table = torch.nn.functional.pad(inputs.block_table, (0, 1), value=nobody)
        inputs = replace(inputs, block_table=table.masked_fill(table == nobody, 2**31 - 1))
    kernel(name).prepare(inputs, CONFIGS[name])()
    passes(inputs)


@pytest.mark.parametrize("name", CONFIGS)
def test_pages_in_any_order_give_the_same_bits(name, device):
    """A paged cache gives the bits of the contiguous cache with the same tokens."""
    problem = AttentionProblem(2, 4, 2, 96, 64, q_len=2, page_size=32)
    paged = make_inputs(problem, device)
    assert paged.block_table is not None
    own = {
        name: getattr(paged, name)[paged.block_table.long()].flatten(1, 2)
        for name in ("k_cache", "v_cache")
    }
    whole = make_inputs(replace(problem, page_size=None), device)
    contiguous = replace(whole, q=paged.q, **own)
    for inputs in (paged, contiguous):
        kernel(name).prepare(inputs, CONFIGS[name])()
    assert torch.equal(paged.out, contiguous.out)
    assert torch.equal(paged.lse, contiguous.lse)


@pytest.mark.parametrize("splits", [1, 2, 4, 7, 50])
def test_any_split_count(splits, device):
    inputs = make_inputs(AttentionProblem(1, 3, 1, 210, 64), device)
    kernel("fixed_split").prepare(inputs, replace(CONFIGS["fixed_split"], splits=splits))()
    passes(inputs)


@pytest.mark.parametrize(
    ("sms", "align_grid"), diagonal([1, 2, 3, 7, 19, 50], [False, True], keep=2)
)
def test_any_grid(sms, align_grid, device):
    """Grids range from one CTA to one LeanTile per CTA.

    Some merge more partials than one wait takes.
    """
    from leanbench.kernels.lean.triton import prepare

    inputs = make_inputs(AttentionProblem(1, 2, 2, 390, 64), device)
    prepare(inputs, replace(CONFIGS["lean"], tile_tokens=16, align_grid=align_grid), sms)()
    passes(inputs)


@pytest.mark.parametrize(
    "problem",
    [
        AttentionProblem(1, 6, 1, 390, 64),
        AttentionProblem(1, 40, 1, 200, 128),
        AttentionProblem(1, 6, 1, 390, 64, q_len=3, page_size=16),
        AttentionProblem(1, 5, 1, 200, 128, q_len=16, page_size=64),
    ],
)
def test_merges_of_many_rows_and_partials(problem, device):
    from leanbench.kernels.lean.triton import prepare

    inputs = make_inputs(problem, device)
    prepare(inputs, replace(CONFIGS["lean"], tile_tokens=16), sms=24)()
    passes(inputs)


def test_one_workspace_serves_different_problems(device):
    """Previous launches do not matter."""
    from leanbench.kernels.lean.triton import prepare

    for problem, sms in [
        (AttentionProblem(1, 5, 1, 300, 80), 9),
        (AttentionProblem(2, 4, 4, 100, 64, "bf16"), 14),
        (AttentionProblem(3, 4, 2, (5, 170, 60), 128), 6),
        (AttentionProblem(1, 5, 1, 300, 80), 9),
    ]:
        inputs = make_inputs(problem, device)
        prepare(inputs, CONFIGS["lean"], sms)()
        passes(inputs)


def test_workspace_is_bounded():
    from leanbench.kernels.launch import PARTIAL_ROW_EXTRA
    from leanbench.kernels.lean.workspace import WORKSPACE_BYTES, lean_grid_limit

    assert WORKSPACE_BYTES <= 32e6
    for row_count, head_dim in [(1, 64), (16, 128), (64, 128), (32, 256)]:
        grid = lean_grid_limit(row_count, head_dim, 10_000)
        assert 2 * grid * row_count * (head_dim + PARTIAL_ROW_EXTRA) * 8 <= WORKSPACE_BYTES
        assert grid >= 200


@pytest.mark.parametrize(
    ("page_size", "most"), [(None, (2**31 - 1) // 64), (256, (2**31 - 1) // 256)]
)
def test_tokens_beyond_32_bits_of_each_other_are_refused(page_size, most):
    """Such caches are larger than memory here, so nothing is launched."""
    inputs = make_inputs(AttentionProblem(1, 2, 2, 256, 64, page_size=page_size), "cpu")
    far = [
        torch.empty_strided(inputs.v_cache.shape, (1, step, 64, 1), device="meta")
        for step in (most, most + 1)
    ]
    assert cache_strides(replace(inputs, v_cache=far[0]), "v_cache", 64)[2] == most
    with pytest.raises(UserError, match=rf"^v_cache steps by {most + 1} numbers .* at most {most}"):
        cache_strides(replace(inputs, v_cache=far[1]), "v_cache", 64)


@pytest.mark.parametrize("scale", [0.3, -0.2])
@pytest.mark.parametrize("name", CONFIGS)
def test_softmax_scale_and_negative_scale(name, scale, device):
    inputs = make_inputs(AttentionProblem(1, 2, 1, 80, 64), device)
    inputs = replace(inputs, softmax_scale=scale)
    kernel(name).prepare(inputs, CONFIGS[name])()
    passes(inputs)
