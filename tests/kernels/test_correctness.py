"""Every kernel against the fp64 reference, in the interpreter without a GPU and on the GPU with
one.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from depth import diagonal, label
from leanbench.kernels.fixed_split.configs import FixedSplitTritonConfig
from leanbench.kernels.lean.configs import LeanTritonConfig

from leanbench.check.reference import Reference
from leanbench.core.config import TileConfig
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


def passes(inputs: AttentionInputs, dtype: str) -> None:
    assert Reference(inputs).check(inputs).failure(dtype) is None


@pytest.mark.parametrize(("name", "problem"), diagonal(list(CONFIGS), PROBLEMS, keep=5), ids=label)
def test_matches_the_reference_and_repeats(name, problem, device):
    inputs = make_inputs(problem, device)
    launch = kernel(name).prepare(inputs, CONFIGS[name])
    launch()
    passes(inputs, problem.dtype)
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
    assert kernel(name).unsupported_reason(problem) is None
    inputs = make_inputs(problem, device)
    reference = Reference(inputs)
    for sequence, tokens in enumerate(problem.contexts):
        first = max(0, tokens - problem.q_len - problem.window_left)
        if problem.window_left >= 0 and problem.page_size is None:
            # Tokens before the window can have any value.
            inputs.k_cache[sequence, :first] = float("nan")
            inputs.v_cache[sequence, :first] = float("nan")
    kernel(name).prepare(inputs, CONFIGS[name])()
    assert reference.check(inputs).failure(problem.dtype) is None


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("score_scale", [0.0, 40.0])
def test_extreme_scores(name, score_scale, device):
    """Scores are all equal, or differ so much that softmax picks one token."""
    problem = AttentionProblem(1, 4, 2, 150, 64)
    inputs = make_inputs(problem, device, score_scale=score_scale)
    kernel(name).prepare(inputs, CONFIGS[name])()
    passes(inputs, "fp16")


@pytest.mark.parametrize("name", CONFIGS)
def test_large_negative_scores_do_not_underflow(name, device):
    """exp(score) of every token is 0 in fp32, so only the difference to the maximum may matter."""
    problem = AttentionProblem(1, 2, 2, 100, 64)
    inputs = make_inputs(problem, device)
    inputs.q.copy_(torch.full_like(inputs.q, 30.0))
    inputs.k_cache.copy_(-inputs.k_cache.abs() - 1)
    kernel(name).prepare(inputs, CONFIGS[name])()
    assert inputs.lse.max().item() < -200
    passes(inputs, "fp16")


@pytest.mark.parametrize("name", CONFIGS)
def test_empty_sequences_give_zero(name, device):
    """Kernels see a length of 0 only with lengths on the device."""
    inputs = make_inputs(AttentionProblem(3, 4, 2, (70, 1, 40), 64), device)
    lengths = torch.tensor([70, 0, 40], dtype=torch.int32, device=device)
    inputs = replace(inputs, cache_seqlens=lengths)
    kernel(name).prepare(inputs, CONFIGS[name])()
    assert (inputs.out[1] == 0).all()
    assert (inputs.lse[1] == float("-inf")).all()
    passes(inputs, "fp16")


@pytest.mark.parametrize(
    "problem",
    [
        AttentionProblem(3, 4, 2, (45, 2, 96), 64, q_len=3, page_size=16),
        AttentionProblem(2, 4, 2, 40, 80, "bf16", "NHD", page_size=64),
        AttentionProblem(2, 4, 2, (45, 100), 64, q_len=4),
    ],
    ids=lambda problem: problem.label,
)
@pytest.mark.parametrize("name", CONFIGS)
def test_garbage_past_the_context_is_not_read(name, problem, device):
    """NaN fills the tails of last pages, unused pages and the tail of a contiguous cache.

    Unused entries of the block table are wild.
    """
    inputs = make_inputs(problem, device)
    used = torch.zeros(inputs.k_cache.shape[:2], dtype=torch.bool, device=device)
    for sequence, context in enumerate(problem.contexts):
        if inputs.block_table is None:
            used[sequence, :context] = True
            continue
        for first in range(0, context, inputs.k_cache.shape[1]):
            page = inputs.block_table[sequence, first // inputs.k_cache.shape[1]].long()
            used[page, : context - first] = True
    assert not used.all()
    inputs.k_cache[~used] = float("nan")
    inputs.v_cache[~used] = float("nan")
    if inputs.block_table is not None:
        table = torch.nn.functional.pad(inputs.block_table, (0, 1), value=2**31 - 1)
        for sequence, pages in enumerate(problem.page_counts):
            table[sequence, pages:] = 2**31 - 1
        kernel(name).prepare(replace(inputs, block_table=table), CONFIGS[name])()
    else:
        kernel(name).prepare(inputs, CONFIGS[name])()
    passes(inputs, problem.dtype)


@pytest.mark.parametrize(("page_size", "name"), diagonal([None, 16], list(CONFIGS), keep=4))
def test_a_query_sees_nothing_after_itself(name, page_size, device):
    """Each query position alone, over the context up to it, gives the same as all together."""
    problem = AttentionProblem(2, 4, 2, 70, 64, q_len=5, page_size=page_size)
    inputs = make_inputs(problem, device)
    kernel(name).prepare(inputs, CONFIGS[name])()
    for position in range(5):
        alone = replace(
            inputs,
            q=inputs.q[:, position : position + 1].contiguous(),
            context=66 + position,
            out=torch.full_like(inputs.out[:, :1], torch.nan).contiguous(),
            lse=torch.full_like(inputs.lse[..., :1], torch.nan).contiguous(),
        )
        kernel(name).prepare(alone, CONFIGS[name])()
        passes(alone, "fp16")
        torch.testing.assert_close(inputs.out[:, position], alone.out[:, 0], rtol=2e-3, atol=1e-3)
        torch.testing.assert_close(
            inputs.lse[..., position], alone.lse[..., 0], rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("name", CONFIGS)
def test_pages_in_any_order_give_the_same_bits(name, device):
    """A paged cache gives the bits of the contiguous cache with the same tokens."""
    problem = AttentionProblem(2, 4, 2, 96, 64, q_len=2, page_size=32)
    paged = make_inputs(problem, device)
    assert paged.block_table is not None
    k_cache = paged.k_cache[paged.block_table.long()].flatten(1, 2)
    v_cache = paged.v_cache[paged.block_table.long()].flatten(1, 2)
    contiguous = replace(
        make_inputs(replace(problem, page_size=None), device),
        q=paged.q,
        k_cache=k_cache,
        v_cache=v_cache,
    )
    for inputs in (paged, contiguous):
        kernel(name).prepare(inputs, CONFIGS[name])()
    assert torch.equal(paged.out, contiguous.out)
    assert torch.equal(paged.lse, contiguous.lse)


@pytest.mark.parametrize("splits", [1, 2, 4, 7, 50])
def test_any_split_count(splits, device):
    inputs = make_inputs(AttentionProblem(1, 3, 1, 210, 64), device)
    kernel("fixed_split").prepare(inputs, replace(CONFIGS["fixed_split"], splits=splits))()
    passes(inputs, "fp16")


@pytest.mark.parametrize(
    ("sms", "align_grid"), diagonal([1, 2, 3, 7, 19, 50], [False, True], keep=2)
)
def test_any_grid(sms, align_grid, device):
    """Grids range from one CTA to one LeanTile per CTA.

    Some merge more partials than one wait takes.
    """
    from leanbench.kernels.lean.triton import prepare

    problem = AttentionProblem(1, 2, 2, 390, 64)
    inputs = make_inputs(problem, device)
    config = LeanTritonConfig(16, 4, 2, ctas_per_sm=1, min_tiles_per_cta=1, align_grid=align_grid)
    prepare(inputs, config, sms)()
    passes(inputs, "fp16")


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
    prepare(
        inputs,
        LeanTritonConfig(16, 4, 2, ctas_per_sm=1, min_tiles_per_cta=1, align_grid=False),
        sms=24,
    )()
    passes(inputs, "fp16")


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
        passes(inputs, problem.dtype)


def test_workspace_is_bounded():
    from leanbench.kernels.launch import PARTIAL_ROW_EXTRA
    from leanbench.kernels.lean.workspace import WORKSPACE_BYTES, lean_grid_limit

    assert WORKSPACE_BYTES <= 32e6
    for row_count, head_dim in [(1, 64), (16, 128), (64, 128), (32, 256)]:
        grid = lean_grid_limit(row_count, head_dim, 10_000)
        assert 2 * grid * row_count * (head_dim + PARTIAL_ROW_EXTRA) * 8 <= WORKSPACE_BYTES
        assert grid >= 200


def test_softmax_scale_and_negative_scale(device):
    for scale in (0.3, -0.2):
        inputs = replace(
            make_inputs(AttentionProblem(1, 2, 1, 80, 64), device), softmax_scale=scale
        )
        for name, config in CONFIGS.items():
            inputs.poison()
            kernel(name).prepare(inputs, config)()
            passes(inputs, "fp16")


def test_a_wrong_kernel_is_caught(device):
    """The check fails for a missing token, a wrong LSE and an unwritten element."""
    problem = AttentionProblem(1, 2, 2, 40, 64)
    inputs = make_inputs(problem, device)
    kernel("fa2").prepare(replace(inputs, context=39), CONFIGS["fa2"])()
    assert "relative error" in (Reference(inputs).check(inputs).failure("fp16") or "")
    kernel("fa2").prepare(inputs, CONFIGS["fa2"])()
    inputs.lse.add_(0.01)
    assert "LSE error" in (Reference(inputs).check(inputs).failure("fp16") or "")
    kernel("fa2").prepare(inputs, CONFIGS["fa2"])()
    passes(inputs, "fp16")
    inputs.out[0, 0, 1, 5] = float("nan")
    assert Reference(inputs).check(inputs).failure("fp16") is not None
