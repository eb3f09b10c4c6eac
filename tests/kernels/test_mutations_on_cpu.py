"""Mutations of kernels' sources that their tests on the CPU detect, besides those of tests/gate."""

from __future__ import annotations

import pytest
import test_append_on_cpu
import test_head_pairs_on_cpu
import test_lean_on_cpu
import test_many_rows_on_cpu
import test_mla_on_cpu
import test_peers_on_cpu
from lean_on_cpu import Cpu, Mutation, Workspace, attend, failure_over

from leanbench.core.inputs import make_inputs
from leanbench.core.paths import KERNELS

#: Mutations by the case that detects them: file, line, and what takes its place.
LEAN: dict[str, list[Mutation]] = {
    "fixed runs": [
        ("partials.cuh", "first[i].w != epoch | second[i].w", "first[i].w"),
        ("position.cuh", "at -= 1, first -= 1;", "at += 1, first += 1;"),
        ("position.cuh", "merging = lowest == highest;", "merging = true;"),
        ("attend.cuh", "head != part.head;", "false;"),
        ("schedule.cuh", "tiles, mine = part.first", "tiles, mine = 0"),
    ],
    "device": [
        ("partials.cuh", "first[i].w != epoch | second[i].w", "second[i].w"),
        ("lean.cu", "stored(output_tile);\n      __syncthreads();", "stored(output_tile);"),
        ("attend.cuh", "if (masked) mask_scores", "if (false) mask_scores"),
        ("reduce.cuh", "slot + stride, stride", "slot, stride"),
        ("tiles.cuh", "divide(n, early ? share + 1 : share)", "divide(n, share)"),
        ("position.cuh", "tiles - from <= short_rest(p) +", "tiles - from <= 1 +"),
        ("schedule.cuh", "part.end_tiles + short_rest(p) : 0", "0 : 0"),
    ],
    "many rows": [
        ("lean.cu", "__syncthreads();  // the states have been read", ""),
        (
            "lean.cu",
            "query.load_shared(p, shared);\n        __syncthreads();",
            "query.load_shared(p, shared);",
        ),
    ],
    "clusters": [
        ("reduce.cuh", "barrier_cluster_wait();  // the peers have started", "// the peers have"),
        ("reduce.cuh", "exchanges % 2", "0"),
        ("lean.cu", "stores, too.\n      barrier_cluster_arrive_relaxed();", "stores, too."),
        ("copy.cuh", "miss this phase.\n    __syncwarp();", "miss this phase."),
        ("copy.cuh", "mbarrier_try_wait_parity(warp.barriers, 0);", ""),
        ("copy.cuh", "parity = 1;", "parity = 0;"),
        ("copy.cuh", "if (drops && next_stage == 0) {", "if (false) {"),
        ("copy.cuh", "sequence == other.sequence &&", "true &&"),
        ("copy.cuh", "stage = next_stage = 1;", "next_stage = 1;"),
    ],
    "short sequences in clusters": [
        ("lean.cu", "chunks <= Build::warps", "chunks <= 2 * Build::warps"),
        ("lean.cu", "if (Build::cluster > 1 && !arrived) {", "if (Build::cluster > 1) {"),
        ("lean.cu", "exchanges++, p.epoch", "0, p.epoch"),
    ],
    "paged clusters": [
        ("reduce.cuh", "if (within == 0 || quad", "if (quad"),
        ("copy.cuh", "(CHUNKS_AHEAD - known) * BOXES + box", "box"),
        ("attend.cuh", "queries.count + query_of(", "queries.count + 0 * query_of("),
    ],
    "windows": [
        ("attend.cuh", "own - p.window_left)", "own - p.window_left - 1)"),
        ("attend.cuh", "if constexpr (MASKED_STARTS)", "if (false)"),
        ("attend.cuh", "if constexpr (Build::softcap) cap_scores", "if (false) cap_scores"),
        ("lean.cu", "    if (Build::sinks && threadIdx.x < Build::rows)", "    if (false)"),
        ("partials.cuh", "l = l * scale + ex2", "l = l + ex2"),
    ],
    "attention chunks": [
        ("attend.cuh", "max(first, chunk)", "first"),
        ("attend.cuh", "min(end, chunk + p.attention_chunk)", "end"),
        ("tiles.cuh", "place < 0 ? -1", "place < 0 ? 0"),
    ],
    "paged windows in clusters": [
        ("attend.cuh", "part.first_seen(p, 0) - token", "0"),
        ("attend.cuh", "Build::window_right * p.window_right", "0"),
        ("attend.cuh", "max(part.leftpad, own", "max(0, own"),
        ("attend.cuh", "fabsf(ahead +", "(ahead +"),
        ("tiles.cuh", "return token / Build::start_step * Build::start_step", "return token"),
    ],
    "short output tiles": [
        ("lean.cu", "if (Build::packs && is_shared && part.packed)", "if (false)"),
        ("copy.cuh", "position.first_chunk(range_warp)", "range_warp"),
        ("position.cuh", "chunk = mine ? 0 : chunks;", ""),
    ],
    "blocks of KV heads": [("params.cuh", " + (i64)kv_head * p.stride_table_head", "")],
    "pages of one token": [("copy.cuh", "position.chunk + position.step());", "position.chunk);")],
    "head_dim 72": [
        ("attend.cuh", "if (step * 16 + 8 < Build::v_head_dim) to[SECOND]", "to[SECOND]")
    ],
    "head_dim 56, async": [("copy.cuh", "column + i < DIM / PIECE_NUMBERS);", "true);")],
    "chunks of queries": [
        ("position.cuh", "row_tile_in_turn(head - kv_head * tiles, tiles) * Build::rows", "0"),
        ("attend.cuh", "query.row_offset / Build::group_size;", "query.row_offset;"),
    ],
    "a large batch": [("lengths.cuh", ", longer_than_one += tiles > 1;", ";")],
    "ragged queries": [
        ("reduce.cuh", "p.total_queries + part.queries.first", "p.total_queries"),
        ("lengths.cuh", "rows += rows_of(p, i);", "rows += 1;"),
    ],
    "equal splits": [
        ("schedule.cuh", "slot = output_tile * most + split;", "slot = unit;"),
        ("schedule.cuh", "split = most - 1 - turn;", "split = turn;"),
    ],
    "equal splits, host": [
        ("schedule.cuh", "if (Build::equal_splits || (Build::ragged", "if ((Build::ragged")
    ],
    "V of its own head_dim": [("copy.cuh", "if (column < V_COLUMNS)", "")],
    "scales of pages": [
        ("attend.cuh", "if constexpr (Build::page_scales) scale *=", "if (false) scale *="),
        ("attend.cuh", "if (__any_sync(~0u, top > unit))", "if (false)"),
        ("attend.cuh", "if constexpr (Build::page_scales) v_scale *= unit;", ""),
        ("copy.cuh", "(CHUNKS_AHEAD - known) * BOXES, stage);", "0, stage);"),
        ("copy.cuh", "Build::page_scales) {\n      cp_async_wait", "false) {\n      cp_async_wait"),
    ],
    "scales of tokens": [("attend.cuh", "(Build::box < 8 ? lane / 4 : 0)", "0")],
    "scales of pages in clusters": [("copy.cuh", "warp.copy_scales(p, next, 0, 0);", ";")],
}
APPEND: dict[str, list[Mutation]] = {
    "rotated": [
        ("append.cuh", "load<APPEND_ROWS>(p, part, at,", "load<APPEND_ROWS>(p, part, first,"),
        ("append.cuh", "swizzle_of(row % 8)", "swizzle_of(0)"),
        ("rotary.cuh", "low ? Build::rotary_dim / 4 : -Build::rotary_dim / 4", "low ? 2 : -2"),
        ("tiles.cuh", "length + min(p.new_tokens, p.context - length)", "length"),
    ],
    "chunks of a warp": [
        ("append.cuh", "if (any && part.chunk != early)", "if (any && early < 0)"),
        ("append.cuh", "outer_of(p, part, at + row);", "outer_of(p, part, at);"),
    ],
    "clusters": [("rotary.cuh", "x.y * c.x + x.x * s.x)", "x.y * c.x - x.x * s.x)")],
    "pages": [("append.cuh", "+ at / PAGE_OR_1);", "+ (at + 1) / PAGE_OR_1);")],
    "host": [("tiles.cuh", "max(p.context - p.new_tokens, 0) :", "p.context :")],
    "row tiles": [
        ("append.cuh", "tile.row_offset + Build::rows >= all_rows", "0 * all_rows"),
        ("append.cuh", "tile.row_offset + Build::rows >=", "tile.row_offset == 0 * "),
    ],
    "windows": [("position.cuh", "Build::window_left && Build::append ?", "false ?")],
    "fp8": [("append.cuh", "WORD_NUMBERS = 4 / KV_BYTES", "WORD_NUMBERS = 2")],
    "padding": [("append.cuh", "return Build::batch_idx ? __ldg", "return false ? __ldg")],
}
HEAD_PAIRS: dict[str, list[Mutation]] = {
    "groups of 1": [("attend.cuh", "within = rows * BLOCK", "within = (1 - rows) * BLOCK")],
    "groups of 2": [
        ("attend.cuh", "int row = rows * BLOCK", "int row = (1 - rows) * BLOCK"),
        ("attend.cuh", "head * K_LOADS + load", "(1 - head) * K_LOADS + load"),
        ("build.cuh", "place < BLOCK_ROWS;", "place + 1 < BLOCK_ROWS;"),
    ],
    "ALiBi": [("attend.cuh", "(row_offset + rows * BLOCK_ROWS", "(row_offset + rows * 8")],
    "windows in pages": [
        ("attend.cuh", "query.row_offset + rows * BLOCK_ROWS", "query.row_offset + rows * 8")
    ],
}
#: Missing barriers of a warp and proxy fences.
LEAN_BARRIERS: dict[str, list[Mutation]] = {
    "many rows": [
        ("attend.cuh", "_cta();\n  __syncwarp();", "_cta();"),
        ("copy.cuh", "      fence_proxy_async_shared_cta();\n", ""),
        ("copy.cuh", "release() {\n    __syncwarp();", "release() {"),
        ("lean.cu", "      if constexpr (Build::bulk) fence_proxy_async_shared_cta();\n", ""),
    ],
    "clusters": [
        ("attend.cuh", "  if constexpr (Build::bulk) fence_proxy_async_shared_cta();\n", "")
    ],
    "host": [("copy.cuh", "- 1>();\n      __syncwarp();", "- 1>();")],
    "host, a CTA each": [("copy.cuh", "    __syncwarp();\n  }\n\n  // Reads", "  }\n\n  // Reads")],
    "short output tiles": [("lean.cu", "__syncwarp();\n        write_packed", "write_packed")],
}
APPEND_BARRIERS: dict[str, list[Mutation]] = {
    "row tiles": [
        (
            "append.cuh",
            "    if constexpr (Build::bulk) fence_proxy_async_shared_cta();  // before",
            "// before",
        )
    ],
    "rotated": [("append.cuh", "copy\n    __syncwarp();", "copy\n")],
}
MANY_ROWS_BARRIERS: dict[str, list[Mutation]] = {
    "host": [
        ("many_rows.cu", "  }\n  __syncwarp();\n  if (own < copies)", "  }\n  if (own < copies)"),
        ("many_rows.cu", "    fence_proxy_async_shared_cta();\n", ""),
        ("rows_attend.cuh", "u32 barrier) {\n  __syncwarp();", "u32 barrier) {"),
        ("rows_attend.cuh", "    }\n  }\n  fence_proxy_async_shared_cta();", "    }\n  }\n"),
        ("rows_output.cuh", "  __syncwarp();\n  constexpr int STEPS", "  constexpr int STEPS"),
    ],
    "device": [("rows_attend.cuh", "    fence_proxy_async_shared_cta();\n", "")],
    "pages of one token": [
        ("rows_attend.cuh", "if constexpr (!Build::bulk) fence_proxy_async_shared_cta();", "")
    ],
}
MLA_BARRIERS: dict[str, list[Mutation]] = {
    "crossing": [
        ("mla.cu", "    fence_mbarrier_init_release_cluster();\n", ""),
        ("mla.cu", "    fence_proxy_async_shared_cta();\n", ""),
        ("outputs.cuh", "u32 barrier) {\n  __syncwarp();", "u32 barrier) {"),
        ("outputs.cuh", "release(barrier);\n  __syncwarp();", "release(barrier);"),
        ("scores.cuh", "  fence_proxy_async_shared_cta();\n  __syncwarp();", "  __syncwarp();"),
        ("scores.cuh", "_cta();\n  __syncwarp();", "_cta();"),
    ],
    "several query tokens": [
        ("scores.cuh", "  fence_proxy_async_shared_cta();\n  bar_sync", "  bar_sync"),
    ],
    "4 column groups": [("outputs.cuh", "epoch);\n    __syncwarp();", "epoch);")],
    # Products read their operands when they start.
    "rows with scales, long ranges": [
        ("row_scales.cuh", "  fence_proxy_async_shared_cta();\n  bar_sync", "  bar_sync")
    ],
    "e4m3": [
        ("bytes.cuh", "  fence_proxy_async_shared_cta();\n  bar_sync(OF_W", "  bar_sync(OF_W")
    ],
}
PACKED_BARRIER = ("lean.cu", "logs);\n        __syncwarp();\n      }", "logs);\n      }")
CASES = test_lean_on_cpu.CASES | test_lean_on_cpu.DEEP_CASES
ALL = [
    (cases[name], mutation)
    for cases, mutations in (
        (CASES, LEAN),
        (CASES, LEAN_BARRIERS),
        (test_append_on_cpu.CASES, APPEND),
        (test_append_on_cpu.CASES, APPEND_BARRIERS),
        (test_head_pairs_on_cpu.CASES, HEAD_PAIRS),
    )
    for name, found in mutations.items()
    for mutation in found
]


@pytest.mark.deep
@pytest.mark.parametrize(("case", "mutation"), ALL)
def test_a_changed_line_is_noticed(case, mutation):
    """Detection is a wrong output, other bits, or an error on a GPU."""
    with pytest.raises(AssertionError, match=r"failure\(|torch\.equal|is_same|^CTA |deadlock"):
        attend(Cpu(mutation), case)


@pytest.mark.deep
@pytest.mark.parametrize(
    ("name", "mutation"),
    [(name, mutation) for name, found in MANY_ROWS_BARRIERS.items() for mutation in found],
)
def test_a_missing_barrier_of_many_rows_is_noticed(name, mutation):
    with pytest.raises(AssertionError, match=r"^CTA |error"):
        test_many_rows_on_cpu.run(test_many_rows_on_cpu.CASES[name], 2, Cpu(mutation))


@pytest.mark.deep
@pytest.mark.parametrize(
    ("name", "mutation"),
    [(name, mutation) for name, found in MLA_BARRIERS.items() for mutation in found],
)
def test_a_missing_barrier_of_mla_is_noticed(name, mutation):
    cpu, workspace = Cpu(mutation), Workspace(epoch=7)
    case = (test_mla_on_cpu.CASES | test_mla_on_cpu.DEEP_CASES)[name]
    assert any(case.failure(cpu, workspace, seed) for seed in range(2))


@pytest.mark.deep
def test_a_missing_barrier_between_output_tiles_of_a_warp_is_noticed():
    """Chunks have barriers of their own; an empty sequence has none."""
    inputs = make_inputs(test_lean_on_cpu.MANY_SHORT, "cpu", 1)
    assert inputs.cache_seqlens is not None
    inputs.cache_seqlens[2:] = 0
    config = CASES["short output tiles"].config
    for cpu, is_whole in ((Cpu(), True), (Cpu(PACKED_BARRIER), False)):
        assert (failure_over(cpu, Workspace(1000), inputs, config, 2) is None) == is_whole


def test_every_mutation_is_of_a_line_that_is_there():
    peers = [("peers.cuh", old, new) for old, new, _ in test_peers_on_cpu.MUTATIONS.values()]
    rows = test_many_rows_on_cpu.MUTATIONS + test_many_rows_on_cpu.PAIR_MUTATIONS
    latent = test_mla_on_cpu.MUTATIONS + test_mla_on_cpu.FP8_MUTATIONS
    latent += [mutation for _, mutation in test_mla_on_cpu.COLUMN_MUTATIONS]
    latent += [mutation for found in MLA_BARRIERS.values() for mutation in found]
    rows += [mutation for found in MANY_ROWS_BARRIERS.values() for mutation in found]
    lean = [*(mutation for _, mutation in ALL), *peers, *rows, PACKED_BARRIER]
    for family, mutations in (("lean", lean), ("mla", latent)):
        for file, old, _ in mutations:
            assert (KERNELS / family / file).read_text(encoding="utf-8").count(old) == 1, old
