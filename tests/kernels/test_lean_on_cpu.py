"""lean.cu computes attention: the kernel itself, on a fake GPU (cuda_on_cpu.cpp), against the fp64
reference. Mutations of its source do not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from depth import DEEP, deep
from lean_on_cpu import COMPILER, Cpu, Mutation, Workspace, with_cut_table
from leanbench.kernels.fa2.configs import Fa2CudaConfig
from leanbench.kernels.fixed_split.cuda_configs import FixedSplitCudaConfig
from leanbench.kernels.lean.configs import CudaConfig, LeanCudaConfig
from leanbench.kernels.lean.cuda_heuristic import cuda_config

from leanbench.check.poison import poison_unused
from leanbench.check.reference import Reference
from leanbench.core.inputs import AttentionInputs, make_inputs
from leanbench.core.problem import AttentionProblem

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++ to compile lean.cu")


@dataclass(frozen=True)
class Case:
    """Calls of one build, each on a GPU with its number of SMs."""

    config: CudaConfig
    calls: tuple[tuple[AttentionProblem, int], ...]


def on_device(
    lengths: tuple[int, ...], heads: str, head_dim: int, capacity: int, **axes: object
) -> AttentionProblem:
    """Return a problem with its lengths on the device.

    Args:
        heads: query heads and KV heads, as in "8/2".
    """
    q_heads, kv_heads = map(int, heads.split("/"))
    problem = AttentionProblem(
        len(lengths),
        q_heads,
        kv_heads,
        lengths,
        head_dim,
        capacity=capacity,
        lengths_on="device",
    )
    return replace(problem, **axes)


def fixed(config: LeanCudaConfig) -> LeanCudaConfig:
    """Return the config with fixed runs of 128 to 512 tokens."""
    return replace(config, fixed_run_tiles=4)


def splits_of(count: int, config: LeanCudaConfig) -> FixedSplitCudaConfig:
    """Return settings of FlashDecoding with copies, warps and clusters of a lean_cuda config."""
    settings = config.to_dict()
    for name in ("implementation", "min_tiles_per_cta", "align_grid"):
        del settings[name]
    return FixedSplitCudaConfig(**settings, splits=count)


def whole(config: LeanCudaConfig) -> Fa2CudaConfig:
    """Return settings of FlashAttention-2 with copies, warps and clusters of a lean_cuda config."""
    settings = splits_of(1, config).to_dict()
    for name in ("implementation", "cluster_size", "splits"):
        del settings[name]
    return Fa2CudaConfig(**settings)


EQUAL = AttentionProblem(3, 2, 2, 515, 128)
ONE_LONG = on_device((300, 1, 700, 64), "8/2", 64, 768)
PAGED = on_device((700, 130), "8/1", 64, 1024, page_size=16, dtype="bf16", q_len=2)
ODD_PAGES = on_device((300, 77, 1, 515), "8/2", 64, 640, page_size=1)
CHUNK = on_device((300, 77, 30), "8/2", 64, 384, q_len=37)
MIXED = on_device((300, 77, 30, 515), "8/2", 64, 640, q_lens=(37, 1, 5, 1))
FP8 = replace(ONE_LONG, kv_dtype="e4m3")
#: A scale per KV head and page.
SCALED_PAGES = replace(FP8, page_size=16, page_scales="page-head")
MANY_SHORT = on_device((5, 100, 2, 300, 128, 64, 16, 129, 33, 1, 127, 15), "8/2", 64, 512)
#: More sequences than a warp has lanes.
LARGE_BATCH = on_device((3, 20, 150, 1, 40) * 10, "2/1", 64, 192)
SEVERAL_TOKENS = on_device((300, 77), "16/1", 128, 384, q_len=3)
#: Sequences shorter and longer than the window, and one with a row that sees only its sink.
WINDOWS = on_device(
    (700, 1, 300, 64), "8/2", 64, 768, q_len=2, window_left=130, sinks=True, softcap=2.0
)
#: A sequence with its last query token at the start of a chunk, one with fewer tokens than query
#: tokens.
CHUNKED = on_device((301, 1, 640), "4/1", 64, 768, q_len=2, causal=False, attention_chunk=100)
#: Windows that start within a page, behind padding.
PAGED_WINDOWS = replace(
    PAGED,
    context=(700, 140),
    q_len=3,
    causal=False,
    window_left=200,
    window_right=1,
    alibi=True,
    leftpad=True,
)
SHORT_AND_LONG = on_device((20, 700, 5, 1, 32, 33, 400), "8/2", 64, 768, sinks=True)
#: cuda_config takes chunk, warps, stages, CTAs per SM, cluster, rows, copy, LeanTiles per CTA.
CASES = {
    # Work ranges that cross output tiles; one CTA per LeanTile; a single CTA.
    "host": Case(
        cuda_config(32, 2, 2, 1, 1, 8, "async", 1, False), ((EQUAL, 7), (EQUAL, 99), (EQUAL, 1))
    ),
    # Eight output tiles and more, a CTA each; an SM holds one at a time.
    "host, a CTA each": Case(
        cuda_config(32, 2, 2, 1, 1, 8, "bulk", 1, True),
        (
            (AttentionProblem(4, 2, 2, 300, 64), 1),
            (AttentionProblem(8, 4, 2, 300, 64, page_size=16), 2),
        ),
    ),
    # K of 72 pieces of 16 bytes, not a multiple of the lanes.
    "K of 576, 16-byte copies": Case(
        cuda_config(16, 2, 1, 1, 1, 8, "async", 1, False),
        (
            (on_device((300, 77), "8/2", 576, 320, v_head_dim=128, page_size=1), 7),
            (on_device((300, 77), "4/2", 576, 320, v_head_dim=512, kv_dtype="e4m3"), 7),
        ),
    ),
    # On 8 SMs two of the longer work ranges share an output tile.
    "device": Case(
        cuda_config(32, 4, 2, 1, 1, 8, "bulk", 1, False),
        ((ONE_LONG, 7), (ONE_LONG, 8), (on_device((4700,), "4/1", 64, 5120), 37), (ONE_LONG, 1)),
    ),
    # The guess is discarded if ranges cross output tiles or the sequence is too short for it, and
    # right if each output tile has its own range.
    "clusters": Case(
        cuda_config(32, 2, 2, 1, 2, 8, "bulk", 1, False),
        ((ONE_LONG, 12), (ONE_LONG, 22), (on_device((700, 650), "8/2", 64, 768), 8)),
    ),
    # The first CTA alone writes those of up to two chunks, between others that all CTAs merge.
    "short sequences in clusters": Case(
        cuda_config(16, 2, 2, 1, 4, 8, "bulk", 1, False),
        ((SHORT_AND_LONG, 8), (SHORT_AND_LONG, 4), (SHORT_AND_LONG, 56), (SHORT_AND_LONG, 64)),
    ),
    "paged clusters": Case(
        cuda_config(32, 2, 3, 1, 4, 16, "bulk", 1, False), ((PAGED, 8), (PAGED, 12), (PAGED, 4))
    ),
    # Query rows in shared memory, states over the ring, two row tiles.
    "many rows": Case(
        cuda_config(16, 2, 2, 1, 1, 32, "bulk", 1, False),
        ((SEVERAL_TOKENS, 5), (SEVERAL_TOKENS, 2)),
    ),
    # Rows of 160 and 224 bytes, each a single copy.
    "whole rows": Case(
        cuda_config(32, 2, 2, 1, 1, 8, "bulk", 1, False),
        (
            (on_device((300, 77, 515), "3/3", 80, 640), 7),
            (replace(PAGED_WINDOWS, head_dim=112), 5),
        ),
    ),
    # A page per token; boxes of 16 tokens; of 8, by 16-byte copies.
    "pages of one token": Case(
        cuda_config(32, 2, 2, 1, 1, 8, "async", 1, False), ((ODD_PAGES, 9),)
    ),
    "pages of 48": Case(
        cuda_config(64, 2, 2, 1, 2, 16, "bulk", 1, False),
        ((replace(PAGED, page_size=48), 8), (replace(PAGED, page_size=48), 22)),
    ),
    # The last matrix instruction along head_dim is half zeros.
    "head_dim 72": Case(
        cuda_config(16, 2, 3, 1, 1, 8, "bulk", 1, False),
        ((on_device((300, 77, 515), "3/3", 72, 640), 7),),
    ),
    # The number of query tokens is a parameter of the launch.
    "chunks of queries": Case(
        cuda_config(32, 2, 2, 1, 1, 32, "bulk", 1, False),
        ((CHUNK, 5), (replace(CHUNK, q_len=17), 9)),
    ),
    "ragged queries": Case(
        cuda_config(32, 2, 2, 1, 1, 32, "bulk", 1, False),
        ((MIXED, 5), (MIXED, 20), (MIXED, 40), (replace(MIXED, q_lens=(1, 3, 1, 2)), 9)),
    ),
    "V of its own head_dim": Case(
        cuda_config(16, 2, 2, 1, 1, 8, "bulk", 1, False),
        ((on_device((300, 77, 515), "6/2", 192, 640, v_head_dim=128), 7),),
    ),
    "fp8": Case(
        cuda_config(32, 4, 2, 1, 1, 8, "bulk", 1, False),
        ((FP8, 7), (replace(FP8, q_dtype="e5m2"), 7)),
    ),
    "fp8, bf16 queries": Case(
        cuda_config(32, 2, 3, 1, 4, 16, "bulk", 1, False), ((replace(PAGED, kv_dtype="e5m2"), 8),)
    ),
    # Copies of whole chunks and of half a chunk, each with its scales.
    "scales of pages": Case(
        cuda_config(32, 4, 2, 1, 1, 8, "bulk", 1, False),
        ((replace(SCALED_PAGES, page_size=64), 7), (replace(SCALED_PAGES, dtype="bf16"), 8)),
    ),
    "scales of tokens": Case(
        cuda_config(32, 2, 2, 1, 1, 8, "async", 1, False),
        ((replace(ODD_PAGES, kv_dtype="e5m2", scaled=False, page_scales="page"), 9),),
    ),
    # Guesses begin before the lengths are known; their scales come later.
    "scales of pages in clusters": Case(
        cuda_config(32, 2, 2, 1, 2, 8, "bulk", 1, False), ((SCALED_PAGES, 12), (SCALED_PAGES, 22))
    ),
    # Output tiles of a single warp, among others.
    "short output tiles": Case(
        cuda_config(16, 4, 2, 1, 1, 8, "bulk", 1, False),
        (
            (replace(MANY_SHORT, page_size=16), 2),
            (MANY_SHORT, 5),
            (replace(MANY_SHORT, page_size=16, kv_layout="NHD"), 1),
        ),
    ),
    "a large batch": Case(
        cuda_config(16, 2, 2, 1, 1, 8, "bulk", 1, False), ((LARGE_BATCH, 7), (LARGE_BATCH, 99))
    ),
    # The one stage is full before the lengths are known.
    "clusters of one stage": Case(
        cuda_config(16, 2, 1, 1, 2, 8, "bulk", 1, False), ((ONE_LONG, 22),)
    ),
    "fixed runs": Case(
        fixed(cuda_config(32, 4, 2, 1, 1, 8, "bulk", 1, False)),
        ((ONE_LONG, 7), (ONE_LONG, 99), (on_device((512,) * 5, "4/1", 64, 768), 3)),
    ),
    "windows": Case(cuda_config(32, 4, 2, 1, 1, 8, "bulk", 1, False), ((WINDOWS, 7), (WINDOWS, 1))),
    # The first page of a sequence holds padding, too.
    "paged padding": Case(
        cuda_config(32, 2, 2, 1, 1, 8, "bulk", 1, False),
        ((replace(ONE_LONG, page_size=16, leftpad=True), 3),),
    ),
    "attention chunks": Case(cuda_config(32, 2, 2, 1, 1, 8, "bulk", 1, False), ((CHUNKED, 7),)),
    "paged windows in clusters": Case(
        cuda_config(32, 2, 3, 1, 2, 16, "bulk", 1, False), ((PAGED_WINDOWS, 8), (PAGED_WINDOWS, 2))
    ),
    # Splits of 2 LeanTiles, the last one of 1; a sequence with fewer LeanTiles than splits; a CTA
    # per split.
    "equal splits, host": Case(
        splits_of(3, cuda_config(32, 2, 2, 1, 1, 8, "async", 1, True)), ((EQUAL, 7),)
    ),
    "equal splits": Case(
        splits_of(4, cuda_config(32, 4, 2, 1, 1, 8, "bulk", 1, True)),
        ((ONE_LONG, 7), (on_device((900, 1, 128), "4/1", 64, 5120), 7)),
    ),
    # More of them than a CTA merges at once.
    "many equal splits": Case(
        splits_of(37, cuda_config(32, 4, 2, 1, 1, 8, "bulk", 1, True)),
        ((on_device((4700, 300), "4/1", 64, 5120), 7),),
    ),
    "whole output tiles": Case(
        whole(cuda_config(32, 4, 2, 1, 1, 8, "bulk", 1, True)), ((ONE_LONG, 7),)
    ),
    "equal splits of clusters": Case(
        splits_of(2, cuda_config(32, 2, 2, 1, 2, 8, "bulk", 1, True)),
        ((ONE_LONG, 7), (replace(ONE_LONG, leftpad=True, batch_idx=True), 7)),
    ),
}
DEEP_CASES = {
    "whole output tiles, pages": Case(
        whole(cuda_config(32, 2, 3, 1, 1, 16, "bulk", 1, True)), ((PAGED, 8), (PAGED_WINDOWS, 2))
    ),
    "whole output tiles, many rows": Case(
        whole(cuda_config(16, 2, 2, 1, 1, 32, "bulk", 1, True)), ((SEVERAL_TOKENS, 5), (CHUNK, 5))
    ),
    "equal splits, fp8": Case(
        splits_of(3, cuda_config(32, 4, 2, 1, 1, 8, "bulk", 1, True)), ((FP8, 7),)
    ),
    "equal splits, odd pages": Case(
        splits_of(3, cuda_config(32, 2, 2, 1, 1, 8, "async", 1, True)), ((ODD_PAGES, 7),)
    ),
    "equal splits, windows": Case(
        splits_of(2, cuda_config(32, 4, 2, 1, 1, 8, "bulk", 1, True)),
        ((WINDOWS, 7), (replace(WINDOWS, q_len=3, causal=False), 7), (CHUNKED, 7)),
    ),
    "equal splits of clusters of 8": Case(
        splits_of(2, cuda_config(16, 1, 2, 1, 8, 8, "bulk", 1, True)),
        ((ONE_LONG, 7), (PAGED_WINDOWS, 7)),
    ),
    "equal splits, head_dim 96": Case(
        splits_of(3, cuda_config(16, 2, 2, 1, 1, 8, "bulk", 1, True)),
        ((on_device((300, 77, 515), "6/2", 96, 640), 7),),
    ),
    "equal splits, chunks of queries": Case(
        splits_of(2, cuda_config(16, 2, 2, 1, 2, 16, "bulk", 1, True)),
        ((replace(CHUNK, page_size=16), 7),),
    ),
    "clusters of 8": Case(
        cuda_config(16, 1, 2, 1, 8, 8, "bulk", 1, False), ((ONE_LONG, 64), (ONE_LONG, 24))
    ),
    "fixed runs, host": Case(
        fixed(cuda_config(16, 2, 2, 1, 1, 8, "async", 1, False)), ((EQUAL, 7), (EQUAL, 99))
    ),
    "narrow heads": Case(
        cuda_config(16, 2, 3, 1, 1, 8, "async", 2, False),
        ((on_device((300, 77, 515), "3/3", 80, 640), 7),),
    ),
    **{
        f"pages of {page}": Case(
            cuda_config(chunk, 2, 2, 1, 1, 16, "async", 1, False),
            ((replace(PAGED, page_size=page, head_dim=head_dim), 5),),
        )
        for page, chunk, head_dim in ((2, 16, 72), (12, 64, 128), (24, 32, 40), (1, 128, 256))
    },
    "pages of 544": Case(
        cuda_config(64, 2, 2, 1, 2, 16, "bulk", 1, False), ((replace(PAGED, page_size=544), 8),)
    ),
    **{
        f"head_dim {head_dim}, {copy}": Case(
            cuda_config(16, 2, stages, 1, 1, rows, copy, 1, False),
            ((on_device((300, 77, 515), "6/2", head_dim, 640, q_len=rows // 4), 7),),
        )
        for head_dim, stages, rows in (
            (8, 2, 8),
            (56, 3, 32),
            (136, 2, 16),
            (200, 2, 16),
            (512, 2, 8),
        )
        for copy in ("bulk", "async")
    },
    "chunks of queries, clusters": Case(
        cuda_config(16, 2, 2, 1, 2, 16, "bulk", 1, False), ((replace(CHUNK, page_size=16), 22),)
    ),
    "chunks of queries, fixed runs": Case(
        fixed(cuda_config(16, 2, 2, 1, 1, 32, "async", 1, False)), ((CHUNK, 7),)
    ),
    "chunks of queries, host": Case(
        cuda_config(16, 2, 2, 1, 1, 8, "async", 1, False),
        ((AttentionProblem(2, 6, 2, 200, 128, q_len=19), 7),),
    ),
    "ragged queries, clusters": Case(
        cuda_config(16, 2, 2, 1, 2, 16, "bulk", 1, False),
        ((replace(MIXED, page_size=16), 22), (replace(MIXED, page_size=16), 50)),
    ),
    "ragged queries, 16-byte copies": Case(
        cuda_config(16, 2, 2, 1, 1, 32, "async", 1, False),
        ((replace(MIXED, page_size=1, head_dim=72), 22),),
    ),
    **{
        f"V of {v_head_dim} and K of {head_dim}": Case(
            cuda_config(16, 2, 2, 1, cluster, rows, copy, 1, False),
            (
                (
                    on_device(
                        (300, 77, 515), "8/2", head_dim, 640, v_head_dim=v_head_dim, q_len=rows // 4
                    ),
                    14,
                ),
            ),
        )
        for head_dim, v_head_dim, rows, copy, cluster in (
            (192, 128, 32, "async", 1),
            (64, 256, 16, "bulk", 2),
            (40, 512, 8, "async", 1),
            (512, 24, 8, "bulk", 1),
            (576, 512, 8, "bulk", 1),
            (576, 128, 8, "async", 1),
        )
    },
    "head_dim 512, clusters": Case(
        cuda_config(16, 2, 2, 1, 4, 8, "bulk", 1, False),
        ((on_device((300, 77, 515), "12/2", 512, 640), 7),),
    ),
    "fp8, 16-byte copies": Case(
        cuda_config(16, 2, 3, 1, 1, 8, "async", 1, False),
        ((replace(EQUAL, kv_dtype="e4m3"), 7), (replace(EQUAL, dtype="bf16", kv_dtype="e5m2"), 7)),
    ),
    "fp8, narrow heads": Case(
        cuda_config(16, 2, 3, 1, 1, 8, "async", 1, False),
        ((on_device((300, 77, 515), "3/3", 80, 640, kv_dtype="e4m3"), 7),),
    ),
    "fp8, many rows": Case(
        cuda_config(16, 2, 2, 1, 1, 32, "bulk", 1, False),
        (
            (replace(SEVERAL_TOKENS, dtype="bf16", kv_dtype="e4m3"), 5),
            (replace(SEVERAL_TOKENS, dtype="bf16", kv_dtype="e4m3", q_dtype="e4m3"), 5),
        ),
    ),
    # A lane has the pages of two tokens of a chunk.
    "scales of tokens of large chunks": Case(
        cuda_config(64, 2, 2, 1, 1, 16, "async", 1, False),
        ((replace(ODD_PAGES, q_len=2, kv_dtype="e4m3", page_scales="page-head"), 9),),
    ),
    "scales of pages, many rows": Case(
        cuda_config(16, 2, 2, 1, 1, 32, "bulk", 1, False),
        ((replace(SEVERAL_TOKENS, kv_dtype="e4m3", page_size=16, page_scales="page"), 5),),
    ),
    "scales of pages, short output tiles": Case(
        cuda_config(16, 4, 2, 1, 1, 8, "bulk", 1, False),
        ((replace(MANY_SHORT, kv_dtype="e4m3", page_size=16, page_scales="page-head"), 2),),
    ),
    "scales of pages, windows": Case(
        cuda_config(32, 2, 3, 1, 2, 16, "bulk", 1, False),
        (
            (replace(PAGED_WINDOWS, kv_dtype="e4m3", page_scales="page-head"), 8),
            (replace(PAGED_WINDOWS, kv_dtype="e5m2", page_scales="page", softcap=5.0), 2),
        ),
    ),
    "scales of pages, fixed runs": Case(
        fixed(cuda_config(32, 4, 2, 1, 1, 8, "async", 1, False)),
        ((replace(SCALED_PAGES, page_size=8), 7),),
    ),
    "scales of pages, equal splits of clusters": Case(
        splits_of(2, cuda_config(32, 2, 2, 1, 2, 8, "bulk", 1, True)), ((SCALED_PAGES, 7),)
    ),
    "scales of pages, ragged queries": Case(
        cuda_config(16, 2, 2, 1, 2, 16, "bulk", 1, False),
        ((replace(MIXED, kv_dtype="e4m3", page_size=48, page_scales="page-head"), 22),),
    ),
    "scales of pages, appended to": Case(
        cuda_config(32, 4, 2, 1, 1, 8, "bulk", 1, False),
        ((replace(SCALED_PAGES, context=(300, 5, 700, 64), append=3), 7),),
    ),
    "windows, host": Case(
        cuda_config(16, 2, 2, 1, 1, 8, "async", 1, False),
        ((replace(EQUAL, window_left=300, sinks=True, dtype="bf16"), 7),),
    ),
    "windows, fixed runs": Case(
        fixed(cuda_config(32, 2, 2, 1, 1, 16, "async", 1, False)),
        ((replace(WINDOWS, window_left=400, leftpad=True, batch_idx=True), 5),),
    ),
    "windows of many query tokens": Case(
        fixed(cuda_config(16, 2, 2, 1, 1, 32, "bulk", 1, False)),
        ((on_device((700, 77, 10), "4/1", 64, 768, q_len=37, window_left=290), 99),),
    ),
    "padding of lengths that the host knows": Case(
        cuda_config(32, 2, 2, 1, 2, 8, "bulk", 1, False),
        ((replace(EQUAL, leftpad=True, alibi=True, q_len=2, causal=False), 9),),
    ),
    "short output tiles, 16-byte copies": Case(
        cuda_config(16, 2, 3, 1, 1, 8, "async", 1, False), ((MANY_SHORT, 3), (MANY_SHORT, 7))
    ),
    "pages, 16-byte copies": Case(
        cuda_config(32, 2, 2, 1, 1, 16, "async", 1, False), ((PAGED, 5), (PAGED, 9))
    ),
}
#: Late copies, resident CTAs, seed of the order.
ORDERS = [
    (True, 1 << 20, 1),
    (False, 1 << 20, 2),
    # The second cluster has to wait for the end of the first.
    (True, 0, 3),
    *((bool(seed % 2), 16 * (seed % 3), seed) for seed in range(4, 24 if DEEP else 4)),
]


@pytest.fixture(scope="module")
def cpu() -> Cpu:
    return Cpu()


def attend(cpu: Cpu, case: Case) -> None:
    """Make all calls of a case, each in every order, on one workspace.

    Checks that results are right, and have the same bits each time.
    """
    for problem, sms in case.calls:
        inputs = with_cut_table(poison_unused(make_inputs(problem, "cpu", 1, score_scale=6.0)))
        reference, workspace = Reference(inputs), Workspace(1000, replays=1)
        outputs = []
        for lazy, ctas, seed in ORDERS:
            inputs.poison()
            most_ctas = max(ctas, case.config.cluster_size)
            cpu.launch(inputs, case.config, sms, workspace, most_ctas, lazy, seed)
            assert reference.check(inputs).failure(problem.dtype) is None
            outputs.append(inputs.out.clone())
        assert all(torch.equal(output, outputs[0]) for output in outputs)


#: Cases that others cover.
MET_IN_OTHERS = (
    *("pages of 48", "V of its own head_dim", "host", "clusters of one stage", "fp8, bf16 queries"),
    *("scales of tokens", "equal splits, host", "many equal splits", "paged windows in clusters"),
)


@pytest.mark.parametrize(
    "name",
    [deep(name) if name in (*MET_IN_OTHERS, *DEEP_CASES) else name for name in CASES | DEEP_CASES],
)
def test_attention(cpu: Cpu, name: str) -> None:
    attend(cpu, (CASES | DEEP_CASES)[name])


def alone(inputs: AttentionInputs, sequence: int) -> AttentionInputs:
    """Return the call of one sequence of a batch."""
    own = slice(sequence, sequence + 1)
    assert inputs.cache_seqlens is not None
    return replace(
        inputs,
        q=inputs.q[own],
        k_cache=inputs.k_cache[own],
        v_cache=inputs.v_cache[own],
        cache_seqlens=inputs.cache_seqlens[own],
        out=torch.full_like(inputs.out[own], torch.nan),
        lse=torch.full_like(inputs.lse[own], torch.nan),
    )


def test_bits_of_fixed_runs_are_those_of_the_sequence_alone(cpu: Cpu) -> None:
    config = CASES["fixed runs"].config
    batch = poison_unused(make_inputs(ONE_LONG, "cpu", 1))
    workspace = Workspace(1000)
    cpu.launch(batch, config, 5, workspace)
    for sequence in range(ONE_LONG.batch):
        lone = alone(batch, sequence)
        cpu.launch(lone, config, 8, workspace, seed=sequence)
        assert torch.equal(lone.out[0], batch.out[sequence])
        assert torch.equal(lone.lse[0], batch.lse[sequence])


@pytest.mark.parametrize("architecture", [800, 900])
@pytest.mark.parametrize("kv_dtype", ["e4m3", "e5m2"])
def test_every_fp8_number(kv_dtype: str, architecture: int) -> None:
    """The output of a sequence of one token is its V.

    GPUs with an instruction for e4m3 and without give the same.
    """
    inputs = make_inputs(AttentionProblem(1, 1, 1, 1, 256, kv_dtype=kv_dtype), "cpu", 1)
    bits = torch.arange(256, dtype=torch.uint8)
    inputs.v_cache.view(torch.uint8).copy_(bits.view(1, 1, 1, 256))
    assert inputs.v_descale is not None
    inputs.v_descale.fill_(2.0)
    expected = (2 * inputs.v_cache.float()).half()
    config = cuda_config(16, 1, 1, 1, 1, 8, "async", 1, False)
    Cpu(architecture=architecture).launch(inputs, config, 1, Workspace(1000))
    finite = expected.isfinite()
    assert torch.equal(inputs.out[finite], expected[finite])
    assert not inputs.out[~finite].isfinite().any()


def test_fp8_without_an_instruction_for_it() -> None:
    """e4m3 is in both operands of the scores, as in compute capability 8.0."""
    problem = AttentionProblem(1, 2, 1, 300, 64, kv_dtype="e4m3", q_dtype="e4m3")
    inputs = with_cut_table(poison_unused(make_inputs(problem, "cpu", 1, score_scale=6.0)))
    reference = Reference(inputs)
    config = cuda_config(16, 2, 2, 1, 1, 8, "async", 1, False)
    Cpu(architecture=800).launch(inputs, config, 2, Workspace(1000))
    assert reference.check(inputs).failure("fp16") is None


@pytest.mark.parametrize("power", [-120, 0, 100])
def test_queries_in_bf16_that_fp16_cannot_hold(cpu: Cpu, power: int) -> None:
    """Scores stay the same with queries multiplied, and their scale divided, by 2^power."""
    problem = replace(PAGED, kv_dtype="e4m3")
    inputs = with_cut_table(poison_unused(make_inputs(problem, "cpu", 1, score_scale=6.0)))
    assert inputs.k_descale is not None
    reference = Reference(inputs)
    inputs.q.mul_(2.0**power)
    inputs.k_descale.mul_(2.0**-power)
    cpu.launch(inputs, CASES["fp8, bf16 queries"].config, 8, Workspace(1000))
    assert reference.check(inputs).failure("bf16") is None


@pytest.mark.parametrize("power", [-100, 0, 100])
def test_scales_that_fp16_cannot_hold(cpu: Cpu, power: int) -> None:
    """Values stay the same if scales of pages grow by 2^power and those of sequences shrink.

    The scales vary by a factor of a thousand along a sequence.
    """
    inputs = poison_unused(make_inputs(SCALED_PAGES, "cpu", 1))
    assert inputs.v_descale is not None
    assert inputs.v_page_descale is not None
    assert inputs.block_table is not None
    for row in inputs.block_table.long():
        inputs.v_page_descale[row] *= 2.0 ** (10 * torch.linspace(0, 6, len(row)).sin())[:, None]
    # Unused memory stays NaN.
    reference = Reference(inputs)
    inputs.v_page_descale.mul_(2.0**power)
    inputs.v_descale.mul_(2.0**-power)
    cpu.launch(inputs, CASES["scales of pages"].config, 7, Workspace(1000))
    assert reference.check(inputs).failure("fp16") is None


@pytest.mark.parametrize("cluster", [1, 2])
def test_scales_of_pages_of_nobody_are_not_read(cpu: Cpu, cluster: int) -> None:
    """The unused page 0 is NaN, and page numbers past a sequence's end are invalid."""
    inputs = poison_unused(make_inputs(SCALED_PAGES, "cpu", 1))
    assert inputs.block_table is not None
    pages = inputs.k_cache.shape[0]
    last = inputs.block_table == pages - 1
    behind = {
        name: torch.cat([own[-1:], own[:-1]])
        for name in ("k_page_descale", "v_page_descale")
        if (own := getattr(inputs, name)) is not None
    }
    for name in ("k_cache", "v_cache"):
        cache = getattr(inputs, name).view(torch.uint8)
        behind[name] = torch.cat([cache[-1:], cache[:-1]]).view(inputs.k_cache.dtype)
    table = (inputs.block_table + 1).masked_fill(last, 1 << 28)
    moved = replace(inputs, block_table=table, **behind)
    reference = Reference(moved)
    config = cuda_config(32, 2, 2, 1, cluster, 8, "bulk", 1, False)
    cpu.launch(moved, config, 11 * cluster, Workspace(1000))
    assert reference.check(moved).failure("fp16") is None


def test_lengths_that_are_none(cpu: Cpu) -> None:
    """Lengths are below 0, 0 and past the cache; an empty sequence has output 0 and LSE -inf."""
    inputs = make_inputs(ONE_LONG, "cpu", 1)
    assert inputs.cache_seqlens is not None
    inputs.cache_seqlens[:3] = torch.tensor([-5, 0, 100_000])
    reference = Reference(poison_unused(inputs))
    cpu.launch(inputs, CASES["clusters"].config, 22, Workspace(1000))
    assert reference.check(inputs).failure("fp16") is None
    assert not inputs.out[:2].any()
    assert inputs.lse[:2].isneginf().all()


@pytest.mark.parametrize(
    ("problem", "sms", "ctas"),
    [
        # 30 output tiles: six per CTA, and one; with 40 slots, splits of one length.
        (CHUNK, 5, 5),
        (CHUNK, 40, 40),
        (MIXED, 7, 7),
        # 20 output tiles, lengths on the host: four for each of 5 CTAs, two CTAs for each.
        (AttentionProblem(2, 8, 2, 200, 64, q_len=33), 6, 5),
        (AttentionProblem(2, 8, 2, 300, 64, q_len=33), 45, 40),
    ],
)
def test_row_tiles_that_share_tokens_are_in_step(
    cpu: Cpu, monkeypatch: pytest.MonkeyPatch, problem: AttentionProblem, sms: int, ctas: int
) -> None:
    """The fake L2 holds none of the tokens."""
    monkeypatch.setattr("leanbench.kernels.lean.cuda_schedule._MOST_L2_BYTES", 0)
    inputs = poison_unused(make_inputs(problem, "cpu", 1))
    reference = Reference(inputs)
    launch = cpu.launch(inputs, CASES["chunks of queries"].config, sms, Workspace(1000))
    assert launch.grid == ctas
    assert reference.check(inputs).failure("fp16") is None


def test_sequences_without_query_tokens_write_nothing(cpu: Cpu) -> None:
    inputs = poison_unused(make_inputs(MIXED, "cpu", 1))
    assert inputs.cu_seqlens_q is not None
    config = CASES["ragged queries"].config
    starts = torch.tensor([0, 0, 37, 37, 44], dtype=torch.int32)
    inputs.cu_seqlens_q.copy_(starts)
    reference = Reference(inputs)
    for sms in (3, 20):
        inputs.poison()
        cpu.launch(inputs, config, sms, Workspace(1000))
        assert reference.check(inputs).failure("fp16") is None
    inputs.cu_seqlens_q.zero_()
    inputs.poison()
    cpu.launch(inputs, config, 3, Workspace(1000))
    assert inputs.out.isnan().all()
    assert inputs.lse.isnan().all()


def test_query_starts_that_are_none_stay_within_q(cpu: Cpu) -> None:
    """Starts are below 0, past all query tokens, and decreasing; the most query tokens are 37."""
    inputs = poison_unused(make_inputs(MIXED, "cpu", 1))
    assert inputs.cu_seqlens_q is not None
    inputs.cu_seqlens_q.copy_(torch.tensor([-9, 5, 1000, 3, 44], dtype=torch.int32))
    past = torch.full_like(inputs.out, 7.0)
    pool = torch.cat([past, inputs.out, past])
    inputs = replace(inputs, out=pool[len(past) : 2 * len(past)])
    cpu.launch(inputs, CASES["ragged queries"].config, 5, Workspace(1000))
    assert torch.equal(pool[: len(past)], past)
    assert torch.equal(pool[2 * len(past) :], past)
    assert inputs.out[:42].isfinite().all()
    assert inputs.out[42:].isnan().all()


def test_a_launch_that_cannot_end_is_an_error() -> None:
    """A CTA waits for a partial that carries another launch's epoch."""
    mutation = ("partials.cuh", "second[i].w != epoch;", "second[i].w != epoch + 1;")
    cpu = Cpu(mutation)
    with pytest.raises(AssertionError, match="waits for a partial that nobody stores"):
        attend(cpu, CASES["fixed runs"])


#: Evidence that a mutation is detected: a wrong output, other bits, or an error on a GPU. A line
#: that is missing in the source is no evidence.
NOTICED = r"failure\(|torch\.equal|^CTA |deadlock"
#: Mutations, each with the case that detects it.
MUTATIONS: list[tuple[str, Mutation]] = [
    ("fixed runs", ("partials.cuh", "first[i].w != epoch | second[i].w", "first[i].w")),
    ("device", ("partials.cuh", "first[i].w != epoch | second[i].w", "second[i].w")),
    ("device", ("lean.cu", "p.epoch + replays", "p.epoch")),
    ("device", ("lean.cu", "if (SCRATCH_OVER_RING || !first_part) __syncthreads();", "")),
    ("device", ("lean.cu", "#endif\n      __syncthreads();", "#endif")),
    ("many rows", ("lean.cu", "__syncthreads();  // the states have been read", "")),
    (
        "many rows",
        (
            "lean.cu",
            "query.load_shared(p, shared);\n        __syncthreads();",
            "query.load_shared(p, shared);",
        ),
    ),
    ("clusters", ("lean.cu", "if (exchanged) barrier_cluster_wait();", "if (exchanged)")),
    ("clusters", ("reduce.cuh", "if (!first_part) barrier_cluster_wait();", "")),
    ("clusters", ("reduce.cuh", "  barrier_cluster_arrive();\n  barrier_cluster_wait();", "")),
    ("short sequences in clusters", ("lean.cu", "chunks <= WARPS", "chunks <= 2 * WARPS")),
    ("short sequences in clusters", ("lean.cu", "!exchanged, p.epoch", "false, p.epoch")),
    (
        "short sequences in clusters",
        ("lean.cu", "if (exchanged) barrier", "if (!first_part) barrier"),
    ),
    ("clusters", ("copy.cuh", "miss this phase.\n    __syncwarp();", "miss this phase.")),
    ("clusters", ("copy.cuh", "mbarrier_try_wait_parity(warp.barriers, 0);", "")),
    ("clusters", ("copy.cuh", "parity = 1;", "parity = 0;")),
    ("clusters", ("lean.cu", " && part.chunk < part.chunks)", ")")),
    ("clusters", ("lean.cu", "works && range.is_first_split()", "works")),
    ("clusters", ("copy.cuh", "(STAGES - empty_stages) * RANGE_WARPS", "0")),
    ("clusters", ("schedule.cuh", "head = unit - position.sequence * each", "head = 0")),
    ("paged clusters", ("copy.cuh", "(CHUNKS_AHEAD - known) * BOXES + box", "box")),
    (
        "paged clusters",
        ("attend.cuh", "queries.count + query_of(", "queries.count + 0 * query_of("),
    ),
    ("windows", ("schedule.cuh", "tokens - queries - p.window_left", "tokens - p.window_left")),
    ("windows", ("attend.cuh", "own - p.window_left)", "own - p.window_left - 1)")),
    ("windows", ("attend.cuh", "if (MASKED_STARTS) masked |=", "if (false) masked |=")),
    ("windows", ("attend.cuh", "if (SOFTCAP) cap_scores", "if (false) cap_scores")),
    ("windows", ("lean.cu", "    if (SINKS && threadIdx.x < ROWS)", "    if (false)")),
    ("windows", ("reduce.cuh", "(tile.row_offset + row) % GROUP_SIZE;", "0;")),
    ("windows", ("partials.cuh", "l = l * scale + ex2", "l = l + ex2")),
    ("attention chunks", ("attend.cuh", "max(first, chunk)", "first")),
    ("attention chunks", ("attend.cuh", "min(end, chunk + p.attention_chunk)", "end")),
    ("attention chunks", ("schedule.cuh", "place < 0 ? -1", "place < 0 ? 0")),
    ("paged windows in clusters", ("attend.cuh", "part.first_seen(p, 0) - token", "0")),
    ("paged windows in clusters", ("attend.cuh", "WINDOW_RIGHT * p.window_right", "0")),
    ("paged windows in clusters", ("attend.cuh", "max(part.leftpad, own", "max(0, own")),
    (
        "paged windows in clusters",
        (
            "schedule.cuh",
            "position.token = copy_start(position.",
            "position.token = 0 * (position.",
        ),
    ),
    ("paged windows in clusters", ("attend.cuh", "fabsf(ahead +", "(ahead +")),
    (
        "paged windows in clusters",
        ("schedule.cuh", "return token / START_STEP * START_STEP", "return token"),
    ),
    ("host", ("copy.cuh", "cp_async_wait_group<STAGES - 1>", "cp_async_wait_group<STAGES>")),
    (
        "host",
        ("schedule.cuh", "return range * share + min(range, longer);", "return range * share;"),
    ),
    ("device", ("copy.cuh", "parity ^= 1 << stage;", "")),
    ("device", ("attend.cuh", "if (masked) zero_values", "if (false) zero_values")),
    ("device", ("attend.cuh", "if (masked) mask_scores", "if (false) mask_scores")),
    ("device", ("attend.cuh", "l[rows][j] *= scale;", "")),
    ("device", ("reduce.cuh", "slot + stride, stride", "slot, stride")),
    ("device", ("schedule.cuh", "divide(n, early ? share + 1 : share)", "divide(n, share)")),
    ("fixed runs", ("schedule.cuh", "at -= 1, first -= 1;", "at += 1, first += 1;")),
    ("fixed runs", ("schedule.cuh", "merging = lowest == highest;", "merging = true;")),
    ("fixed runs", ("attend.cuh", "head != part.head;", "false;")),
    ("short output tiles", ("lean.cu", "if (PACKS && is_shared && part.packed)", "if (false)")),
    ("short output tiles", ("copy.cuh", "position.first_chunk(range_warp)", "range_warp")),
    ("short output tiles", ("schedule.cuh", "chunk = mine ? 0 : chunks;", "")),
    ("device", ("schedule.cuh", "tiles - from <= short_rest(p) +", "tiles - from <= 1 +")),
    ("device", ("schedule.cuh", "part.end_tiles + short_rest(p) : 0", "0 : 0")),
    ("fixed runs", ("lean.cu", "FIXED_RUNS ? part.at", "FIXED_RUNS ? part.first")),
    ("fixed runs", ("schedule.cuh", "tiles, mine = part.first", "tiles, mine = 0")),
    ("pages of one token", ("copy.cuh", "position.chunk + position.step());", "position.chunk);")),
    ("pages of 48", ("build.cuh", "while (page % box != 0) box /= 2;", "")),
    ("head_dim 72", ("attend.cuh", "if (step * 16 + 8 < V_HEAD_DIM) to[SECOND]", "to[SECOND]")),
    ("head_dim 56, async", ("copy.cuh", "column + i < DIM / PIECE_NUMBERS);", "true);")),
    (
        "chunks of queries",
        ("schedule.cuh", "row_tile_in_turn(head - kv_head * tiles, tiles) * ROWS", "0"),
    ),
    ("chunks of queries", ("attend.cuh", "query.row_offset / GROUP_SIZE;", "query.row_offset;")),
    ("a large batch", ("schedule.cuh", ", longer_than_one += tiles > 1;", ";")),
    ("ragged queries", ("reduce.cuh", "p.total_queries + part.queries.first", "p.total_queries")),
    ("ragged queries", ("schedule.cuh", "rows += rows_of(p, i);", "rows += 1;")),
    ("equal splits", ("schedule.cuh", "slot = output_tile * most + split;", "slot = unit;")),
    ("equal splits", ("schedule.cuh", "split = most - 1 - turn;", "split = turn;")),
    ("equal splits", ("schedule.cuh", "position.first = split * longest;", "position.first = 0;")),
    ("equal splits, host", ("schedule.cuh", "if (EQUAL_SPLITS || (RAGGED", "if ((RAGGED")),
    (
        "equal splits of clusters",
        ("schedule.cuh", "(EQUAL_SPLITS ? ranges - output_tiles : 0)", "0"),
    ),
    ("V of its own head_dim", ("copy.cuh", "if (column < V_COLUMNS)", "")),
    ("scales of pages", ("attend.cuh", "if (PAGE_SCALES) scale *=", "if (false) scale *=")),
    ("scales of pages", ("attend.cuh", "if (__any_sync(~0u, top > unit))", "if (false)")),
    ("scales of pages", ("attend.cuh", "scale = unit * reciprocal_of(moved);", "scale = 1.0f;")),
    ("scales of pages", ("attend.cuh", "if (PAGE_SCALES) v_scale *= unit;", "")),
    ("scales of pages", ("copy.cuh", "kv_head * of.stride_head", "0 * of.stride_head")),
    ("scales of pages", ("copy.cuh", "(CHUNKS_AHEAD - known) * BOXES, stage);", "0, stage);")),
    (
        "scales of pages",
        ("copy.cuh", "#if !BULK || PAGE_SCALES\n    cp_async_wait", "#if !BULK\n    cp_async_wait"),
    ),
    ("scales of tokens", ("attend.cuh", "(BOX < 8 ? lane / 4 : 0)", "0")),
    ("scales of pages in clusters", ("lean.cu", "ring.complete_guess(p, warp, part);", ";")),
]


@pytest.mark.deep
@pytest.mark.parametrize(("name", "mutation"), MUTATIONS)
def test_a_changed_line_is_noticed(name: str, mutation: Mutation) -> None:
    with pytest.raises(AssertionError, match=NOTICED):
        attend(Cpu(mutation), (CASES | DEEP_CASES)[name])
