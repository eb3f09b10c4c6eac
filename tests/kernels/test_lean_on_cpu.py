"""lean.cu computes attention: the kernel itself, on a fake GPU (cuda_on_cpu.cpp), against the fp64
reference. Mutations of its source do not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from depth import deep
from hostile_inputs import EQUAL_SCORES, assert_hidden, equal_scores, inf_in_last_token
from lean_on_cpu import (
    Cpu,
    Workspace,
    attend,
    case,
    failure_over,
    fixed,
    needs_compiler,
    on_device,
    settings,
    with_cut_table,
    with_queries,
)
from leanbench.kernels.fa2.configs import Fa2CudaConfig
from leanbench.kernels.fixed_split.cuda_configs import FixedSplitCudaConfig
from leanbench.kernels.lean.configs import LeanCudaConfig

from leanbench.check.poison import poison_unused
from leanbench.check.reference import Reference
from leanbench.core.inputs import AttentionInputs, make_inputs
from leanbench.core.problem import AttentionProblem

pytestmark = needs_compiler


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
#: Blocks of each KV head: a sequence with all of its own, one with a block's part.
CHOSEN = replace(ONE_LONG, capacity=None, page_size=32, select="10x32")
#: settings takes chunk, warps, stages, CTAs per SM, cluster, rows, copy.
BULK = settings(32, 4, 2, 1, 1, 8, "bulk")
BULK_OF_2 = settings(32, 2, 2, 1, 1, 8, "bulk")
ASYNC = settings(32, 2, 2, 1, 1, 8, "async")
ASYNC_16 = settings(16, 2, 2, 1, 1, 8, "async")
ROWS = settings(16, 2, 2, 1, 1, 32, "bulk")
CLUSTERS = settings(32, 2, 2, 1, 2, 8, "bulk")
CLUSTERS_16 = settings(16, 2, 2, 1, 2, 16, "bulk")
DEEP_ASYNC = settings(16, 2, 3, 1, 1, 8, "async")
CASES = {
    # Work ranges that cross output tiles; one CTA per LeanTile; a single CTA.
    "host": case(ASYNC, (EQUAL, 7), (EQUAL, 99), (EQUAL, 1)),
    # Eight output tiles and more, a CTA each; an SM holds one at a time.
    "host, a CTA each": case(
        settings(32, 2, 2, 1, 1, 8, "bulk", align=True),
        (AttentionProblem(4, 2, 2, 300, 64), 1),
        (AttentionProblem(8, 4, 2, 300, 64, page_size=16), 2),
    ),
    # K of 72 pieces of 16 bytes, not a multiple of the lanes.
    "K of 576, 16-byte copies": case(
        settings(16, 2, 1, 1, 1, 8, "async"),
        (on_device((300, 77), "8/2", 576, 320, v_head_dim=128, page_size=1), 7),
        (on_device((300, 77), "4/2", 576, 320, v_head_dim=512, kv_dtype="e4m3"), 7),
    ),
    # On 8 SMs two of the longer work ranges share an output tile.
    "device": case(
        BULK, (ONE_LONG, 7), (ONE_LONG, 8), (on_device((4700,), "4/1", 64, 5120), 37), (ONE_LONG, 1)
    ),
    # The guess is discarded if ranges cross output tiles or the sequence is too short for it, and
    # right if each output tile has its own range.
    "clusters": case(
        CLUSTERS, (ONE_LONG, 12), (ONE_LONG, 22), (on_device((700, 650), "8/2", 64, 768), 8)
    ),
    # The first CTA alone writes those of up to two chunks, between others that all CTAs merge.
    "short sequences in clusters": case(
        settings(16, 2, 2, 1, 5, 8, "bulk"),
        (SHORT_AND_LONG, 10),
        (SHORT_AND_LONG, 5),
        (SHORT_AND_LONG, 70),
        (SHORT_AND_LONG, 80),
    ),
    "paged clusters": case(
        settings(32, 2, 3, 1, 3, 16, "bulk"), (PAGED, 6), (PAGED, 9), (PAGED, 3)
    ),
    # Query rows in shared memory, states over the ring, two row tiles.
    "many rows": case(ROWS, (SEVERAL_TOKENS, 5), (SEVERAL_TOKENS, 2)),
    # Rows of 160 and 224 bytes, each a single copy.
    "whole rows": case(
        BULK_OF_2,
        (on_device((300, 77, 515), "3/3", 80, 640), 7),
        (replace(PAGED_WINDOWS, head_dim=112), 5),
    ),
    # A page per token; boxes of 16 tokens; of 8, by 16-byte copies.
    "pages of one token": case(ASYNC, (ODD_PAGES, 9)),
    "pages of 48": case(
        settings(64, 2, 2, 1, 2, 16, "bulk"),
        (replace(PAGED, page_size=48), 8),
        (replace(PAGED, page_size=48), 22),
    ),
    # Output tiles of one sequence with other pages; boxes of a chunk, and of half a chunk.
    "blocks of KV heads": case(
        BULK, (CHOSEN, 7), (replace(CHOSEN, page_size=16, select="9x16"), 12)
    ),
    # The last matrix instruction along head_dim is half zeros.
    "head_dim 72": case(
        settings(16, 2, 3, 1, 1, 8, "bulk"), (on_device((300, 77, 515), "3/3", 72, 640), 7)
    ),
    # The number of query tokens is a parameter of the launch.
    "chunks of queries": case(
        settings(32, 2, 2, 1, 1, 32, "bulk"), (CHUNK, 5), (replace(CHUNK, q_len=17), 9)
    ),
    "ragged queries": case(
        settings(32, 2, 2, 1, 1, 32, "bulk"),
        (MIXED, 5),
        (MIXED, 20),
        (MIXED, 40),
        (replace(MIXED, q_lens=(1, 3, 1, 2)), 9),
    ),
    "V of its own head_dim": case(
        settings(16, 2, 2, 1, 1, 8, "bulk"),
        (on_device((300, 77, 515), "6/2", 192, 640, v_head_dim=128), 7),
    ),
    "fp8": case(BULK, (FP8, 7), (replace(FP8, q_dtype="e5m2"), 7)),
    "fp8, bf16 queries": case(
        settings(32, 2, 3, 1, 4, 16, "bulk"), (replace(PAGED, kv_dtype="e5m2"), 8)
    ),
    # Copies of whole chunks and of half a chunk, each with its scales.
    "scales of pages": case(
        BULK, (replace(SCALED_PAGES, page_size=64), 7), (replace(SCALED_PAGES, dtype="bf16"), 8)
    ),
    "scales of tokens": case(
        ASYNC, (replace(ODD_PAGES, kv_dtype="e5m2", scaled=False, page_scales="page"), 9)
    ),
    # Guesses begin before the lengths are known; their scales come later.
    "scales of pages in clusters": case(CLUSTERS, (SCALED_PAGES, 12), (SCALED_PAGES, 22)),
    # Output tiles of a single warp, among others.
    "short output tiles": case(
        settings(16, 4, 2, 1, 1, 8, "bulk"),
        (replace(MANY_SHORT, page_size=16), 2),
        (MANY_SHORT, 5),
        (replace(MANY_SHORT, page_size=16, kv_layout="NHD"), 1),
    ),
    "a large batch": case(settings(16, 2, 2, 1, 1, 8, "bulk"), (LARGE_BATCH, 7), (LARGE_BATCH, 99)),
    # The one stage is full before the lengths are known.
    "clusters of one stage": case(settings(16, 2, 1, 1, 2, 8, "bulk"), (ONE_LONG, 22)),
    "fixed runs": case(
        fixed(BULK), (ONE_LONG, 7), (ONE_LONG, 99), (on_device((512,) * 5, "4/1", 64, 768), 3)
    ),
    "windows": case(BULK, (WINDOWS, 7), (WINDOWS, 1)),
    # The first page of a sequence holds padding, too.
    "paged padding": case(BULK_OF_2, (replace(ONE_LONG, page_size=16, leftpad=True), 3)),
    "attention chunks": case(BULK_OF_2, (CHUNKED, 7)),
    "paged windows in clusters": case(
        settings(32, 2, 3, 1, 2, 16, "bulk"), (PAGED_WINDOWS, 8), (PAGED_WINDOWS, 2)
    ),
    # Splits of 2 LeanTiles, the last one of 1; a sequence with fewer LeanTiles than splits; a CTA
    # per split.
    "equal splits, host": case(splits_of(3, ASYNC), (EQUAL, 7)),
    "equal splits": case(
        splits_of(4, BULK), (ONE_LONG, 7), (on_device((900, 1, 128), "4/1", 64, 5120), 7)
    ),
    # More of them than a CTA merges at once.
    "many equal splits": case(splits_of(37, BULK), (on_device((4700, 300), "4/1", 64, 5120), 7)),
    "whole output tiles": case(whole(BULK), (ONE_LONG, 7)),
    "equal splits of clusters": case(
        splits_of(2, CLUSTERS), (ONE_LONG, 7), (replace(ONE_LONG, leftpad=True, batch_idx=True), 7)
    ),
}
DEEP_CASES = {
    # Rows of two KV heads that are adjacent in the cache, from different pages.
    "blocks of KV heads, token-major": case(
        settings(32, 2, 2, 1, 1, 16, "bulk"),
        (replace(CHOSEN, head_dim=80, kv_layout="NHD", sinks=True), 7),
    ),
    "blocks of KV heads, odd pages": case(
        ASYNC,
        (replace(CHOSEN, page_size=3, select="40x3"), 9),
        (replace(CHOSEN, page_size=1, select="90x1"), 5),
    ),
    "blocks of KV heads, clusters": case(
        CLUSTERS, (CHOSEN, 12), (replace(CHOSEN, page_size=16, select="9x16", softcap=2.0), 22)
    ),
    "blocks of KV heads, fixed runs": case(fixed(BULK), (CHOSEN, 7)),
    "blocks of KV heads, short output tiles": case(
        settings(16, 4, 2, 1, 1, 8, "bulk"),
        (replace(MANY_SHORT, capacity=None, select="5x16"), 2),
    ),
    "blocks of KV heads, scales of pages": case(
        BULK, (replace(CHOSEN, kv_dtype="e4m3", page_scales="page-head"), 7)
    ),
    "blocks of KV heads, splits": case(splits_of(3, BULK), (CHOSEN, 7)),
    "blocks of KV heads, whole output tiles": case(whole(BULK), (CHOSEN, 7)),
    "whole output tiles, pages": case(
        whole(settings(32, 2, 3, 1, 1, 16, "bulk")), (PAGED, 8), (PAGED_WINDOWS, 2)
    ),
    "whole output tiles, many rows": case(whole(ROWS), (SEVERAL_TOKENS, 5), (CHUNK, 5)),
    "equal splits, fp8": case(splits_of(3, BULK), (FP8, 7)),
    "equal splits, odd pages": case(splits_of(3, ASYNC), (ODD_PAGES, 7)),
    "equal splits, windows": case(
        splits_of(2, BULK), (WINDOWS, 7), (replace(WINDOWS, q_len=3, causal=False), 7), (CHUNKED, 7)
    ),
    "equal splits of clusters of 8": case(
        splits_of(2, settings(16, 1, 2, 1, 8, 8, "bulk")), (ONE_LONG, 7), (PAGED_WINDOWS, 7)
    ),
    "equal splits, head_dim 96": case(
        splits_of(3, settings(16, 2, 2, 1, 1, 8, "bulk")),
        (on_device((300, 77, 515), "6/2", 96, 640), 7),
    ),
    "equal splits, chunks of queries": case(
        splits_of(2, CLUSTERS_16), (replace(CHUNK, page_size=16), 7)
    ),
    **{
        f"clusters of {size}": case(
            settings(16, 1, 2, 1, size, 8, "bulk"),
            *((problem, size * ranges) for problem in (EQUAL, ONE_LONG) for ranges in (3, 8)),
        )
        for size in (6, 7, 8)
    },
    "fixed runs, host": case(fixed(ASYNC_16), (EQUAL, 7), (EQUAL, 99)),
    "narrow heads": case(
        settings(16, 2, 3, 1, 1, 8, "async", tiles=2),
        (on_device((300, 77, 515), "3/3", 80, 640), 7),
    ),
    **{
        f"pages of {page}": case(
            settings(chunk, 2, 2, 1, 1, 16, "async"),
            (replace(PAGED, page_size=page, head_dim=head_dim), 5),
        )
        for page, chunk, head_dim in ((2, 16, 72), (12, 64, 128), (24, 32, 40), (1, 128, 256))
    },
    "pages of 544": case(settings(64, 2, 2, 1, 2, 16, "bulk"), (replace(PAGED, page_size=544), 8)),
    **{
        f"head_dim {head_dim}, {copy}": case(
            settings(16, 2, stages, 1, 1, rows, copy),
            (on_device((300, 77, 515), "6/2", head_dim, 640, q_len=rows // 4), 7),
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
    "chunks of queries, clusters": case(CLUSTERS_16, (replace(CHUNK, page_size=16), 22)),
    "chunks of queries, fixed runs": case(fixed(settings(16, 2, 2, 1, 1, 32, "async")), (CHUNK, 7)),
    "chunks of queries, host": case(ASYNC_16, (AttentionProblem(2, 6, 2, 200, 128, q_len=19), 7)),
    "ragged queries, clusters": case(
        CLUSTERS_16, (replace(MIXED, page_size=16), 22), (replace(MIXED, page_size=16), 50)
    ),
    "ragged queries, 16-byte copies": case(
        settings(16, 2, 2, 1, 1, 32, "async"), (replace(MIXED, page_size=1, head_dim=72), 22)
    ),
    **{
        f"V of {v_head_dim} and K of {head_dim}": case(
            settings(16, 2, 2, 1, cluster, rows, copy),
            (
                on_device(
                    (300, 77, 515), "8/2", head_dim, 640, v_head_dim=v_head_dim, q_len=rows // 4
                ),
                14,
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
    "head_dim 512, clusters": case(
        settings(16, 2, 2, 1, 4, 8, "bulk"), (on_device((300, 77, 515), "12/2", 512, 640), 7)
    ),
    # A layer of DeepSeek V4: one tensor is K and V.
    "latent, window, sinks": case(
        settings(16, 2, 2, 1, 1, 32, "bulk"),
        (
            on_device((300, 77, 515), "64/1", 512, 640, latent=True, window_left=127, sinks=True),
            7,
        ),
    ),
    "fp8, 16-byte copies": case(
        DEEP_ASYNC,
        (replace(EQUAL, kv_dtype="e4m3"), 7),
        (replace(EQUAL, dtype="bf16", kv_dtype="e5m2"), 7),
    ),
    "fp8, narrow heads": case(
        DEEP_ASYNC, (on_device((300, 77, 515), "3/3", 80, 640, kv_dtype="e4m3"), 7)
    ),
    "fp8, many rows": case(
        ROWS,
        (replace(SEVERAL_TOKENS, dtype="bf16", kv_dtype="e4m3"), 5),
        (replace(SEVERAL_TOKENS, dtype="bf16", kv_dtype="e4m3", q_dtype="e4m3"), 5),
    ),
    # A lane has the pages of two tokens of a chunk.
    "scales of tokens of large chunks": case(
        settings(64, 2, 2, 1, 1, 16, "async"),
        (replace(ODD_PAGES, q_len=2, kv_dtype="e4m3", page_scales="page-head"), 9),
    ),
    "scales of pages, many rows": case(
        ROWS, (replace(SEVERAL_TOKENS, kv_dtype="e4m3", page_size=16, page_scales="page"), 5)
    ),
    "scales of pages, short output tiles": case(
        settings(16, 4, 2, 1, 1, 8, "bulk"),
        (replace(MANY_SHORT, kv_dtype="e4m3", page_size=16, page_scales="page-head"), 2),
    ),
    "scales of pages, windows": case(
        settings(32, 2, 3, 1, 2, 16, "bulk"),
        (replace(PAGED_WINDOWS, kv_dtype="e4m3", page_scales="page-head"), 8),
        (replace(PAGED_WINDOWS, kv_dtype="e5m2", page_scales="page", softcap=5.0), 2),
    ),
    "scales of pages, fixed runs": case(
        fixed(settings(32, 4, 2, 1, 1, 8, "async")), (replace(SCALED_PAGES, page_size=8), 7)
    ),
    "scales of pages, equal splits of clusters": case(splits_of(2, CLUSTERS), (SCALED_PAGES, 7)),
    "scales of pages, ragged queries": case(
        CLUSTERS_16, (replace(MIXED, kv_dtype="e4m3", page_size=48, page_scales="page-head"), 22)
    ),
    "scales of pages, appended to": case(
        BULK, (replace(SCALED_PAGES, context=(300, 5, 700, 64), append=3), 7)
    ),
    "windows, host": case(ASYNC_16, (replace(EQUAL, window_left=300, sinks=True, dtype="bf16"), 7)),
    "windows, fixed runs": case(
        fixed(settings(32, 2, 2, 1, 1, 16, "async")),
        (replace(WINDOWS, window_left=400, leftpad=True, batch_idx=True), 5),
    ),
    "windows of many query tokens": case(
        fixed(ROWS), (on_device((700, 77, 10), "4/1", 64, 768, q_len=37, window_left=290), 99)
    ),
    "padding of lengths that the host knows": case(
        CLUSTERS, (replace(EQUAL, leftpad=True, alibi=True, q_len=2, causal=False), 9)
    ),
    "short output tiles, 16-byte copies": case(DEEP_ASYNC, (MANY_SHORT, 3), (MANY_SHORT, 7)),
    "pages, 16-byte copies": case(settings(32, 2, 2, 1, 1, 16, "async"), (PAGED, 5), (PAGED, 9)),
}
#: Cases with every mechanism; the others are of deep runs.
ALWAYS = (
    *("device", "clusters", "short sequences in clusters", "paged clusters", "many rows", "fp8"),
    *("chunks of queries", "ragged queries", "scales of pages", "short output tiles", "windows"),
    *("pages of one token", "fixed runs", "equal splits", "whole output tiles"),
    "blocks of KV heads",
)


@pytest.mark.parametrize(
    "name", [name if name in ALWAYS else deep(name) for name in CASES | DEEP_CASES]
)
def test_attention(cpu: Cpu, name: str) -> None:
    attend(cpu, (CASES | DEEP_CASES)[name])


@pytest.mark.parametrize("q_len", [3, 20])
def test_several_query_tokens_see_the_blocks_as_listed(cpu: Cpu, q_len: int) -> None:
    """Blocks of each KV head, the causal tail over them, and two row tiles of a KV head."""
    inputs = with_queries(make_inputs(CHOSEN, "cpu", 1, score_scale=6.0), q_len)
    assert failure_over(cpu, Workspace(1000), inputs, ROWS, 7) is None


def first_and_last(tokens: int) -> list[int]:
    """Return the tokens that StreamingLLM keeps."""
    return [*range(4), *range(max(4, tokens - 40), tokens)]


def ancestors(tokens: int) -> list[int]:
    """Return the tokens that a draft sees with two siblings before it."""
    return [*range(tokens - 3), tokens - 1]


@pytest.mark.parametrize("seen", [first_and_last, ancestors])
def test_a_table_of_some_tokens_is_attention_to_them(
    cpu: Cpu, seen: Callable[[int], list[int]]
) -> None:
    problem = replace(ODD_PAGES, context=(300, 77, 30, 515))
    full = make_inputs(problem, "cpu", 1, score_scale=6.0)
    assert full.block_table is not None
    table, lengths = full.block_table.clone().fill_(1 << 30), []
    for row, pages, tokens in zip(table, full.block_table, full.read_lengths(), strict=True):
        places = seen(tokens)
        row[: len(places)] = pages[places]
        lengths.append(len(places))
    some = replace(full, block_table=table, cache_seqlens=torch.tensor(lengths, dtype=torch.int32))
    cpu.launch(some, CASES["pages of one token"].config, 9, Workspace(1000))
    for sequence, tokens in enumerate(full.read_lengths()):
        rows = full.block_table[sequence, seen(tokens)].long()
        k, v = (cache[rows, 0].double() for cache in (full.k_cache, full.v_cache))
        q = full.q[sequence, 0].double().unflatten(0, (2, 4))
        scores = torch.einsum("hgd,nhd->hgn", q, k) * full.softmax_scale
        out = torch.einsum("hgn,nhd->hgd", scores.softmax(-1), v).flatten(0, 1)
        torch.testing.assert_close(some.out[sequence, 0].double(), out, atol=2e-3, rtol=2e-3)


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
    inputs.v_descale.fill_(-2.0)
    expected = (-2 * inputs.v_cache.float()).half()
    config = settings(16, 1, 1, 1, 1, 8, "async")
    Cpu(architecture=architecture).launch(inputs, config, 1, Workspace(1000))
    finite = expected.isfinite()
    assert torch.equal(inputs.out[finite], expected[finite])
    assert not inputs.out[~finite].isfinite().any()


def test_fp8_without_an_instruction_for_it() -> None:
    """e4m3 is in both operands of the scores, as in compute capability 8.0."""
    problem = AttentionProblem(1, 2, 1, 300, 64, kv_dtype="e4m3", q_dtype="e4m3")
    inputs = with_cut_table(poison_unused(make_inputs(problem, "cpu", 1, score_scale=6.0)))
    reference = Reference(inputs)
    config = ASYNC_16
    Cpu(architecture=800).launch(inputs, config, 2, Workspace(1000))
    assert reference.check(inputs).failure("fp16") is None


@pytest.mark.parametrize("power", [-120, 0, 100])
def test_queries_in_bf16_that_fp16_cannot_hold(cpu: Cpu, power: int) -> None:
    """Scores stay the same with queries multiplied, and their scale divided, by -2^power."""
    problem = replace(PAGED, kv_dtype="e4m3")
    inputs = with_cut_table(poison_unused(make_inputs(problem, "cpu", 1, score_scale=6.0)))
    assert inputs.k_descale is not None
    reference = Reference(inputs)
    inputs.q.mul_(-(2.0**power))
    inputs.k_descale.mul_(-(2.0**-power))
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
    config = settings(32, 2, 2, 1, cluster, 8, "bulk")
    cpu.launch(moved, config, 11 * cluster, Workspace(1000))
    assert reference.check(moved).failure("fp16") is None


@pytest.mark.parametrize("cache", ["k_cache", "v_cache"])
def test_infinities_in_a_token_that_others_do_not_see(cpu: Cpu, cache: str) -> None:
    inputs, expected = inf_in_last_token(replace(EQUAL, head_dim=64, q_len=4), "cpu", cache)
    inputs.poison()
    cpu.launch(inputs, BULK, 7, Workspace(1000))
    assert_hidden(inputs, expected, cache)


@pytest.mark.parametrize("score", EQUAL_SCORES)
def test_equal_scores_of_any_size(cpu: Cpu, score: float) -> None:
    config, ((_, sms), *_) = CASES["paged clusters"].config, CASES["paged clusters"].calls
    inputs = equal_scores(PAGED, "cpu", score)
    assert failure_over(cpu, Workspace(1000), inputs, config, sms) is None


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("fp8", FP8),
        # A warp has an output tile alone; a cluster's first CTA does.
        ("short output tiles", replace(MANY_SHORT, kv_dtype="e4m3")),
        ("short sequences in clusters", replace(SHORT_AND_LONG, kv_dtype="e4m3")),
        ("fixed runs", replace(FP8, dtype="bf16")),
        ("scales of pages", replace(SCALED_PAGES, page_size=64)),
        ("many rows", replace(SEVERAL_TOKENS, kv_dtype="e5m2", dtype="bf16")),
    ],
)
def test_scales_of_empty_sequences_do_not_matter(
    cpu: Cpu, name: str, problem: AttentionProblem
) -> None:
    inputs = make_inputs(problem, "cpu", 1)
    assert inputs.cache_seqlens is not None
    inputs.cache_seqlens[0], inputs.cache_seqlens[-1] = 0, -1
    for sms in (1, 8):
        assert failure_over(cpu, Workspace(1000), inputs, CASES[name].config, sms) is None


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
