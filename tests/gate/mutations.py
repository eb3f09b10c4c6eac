"""Mutations of single lines of the kernels' sources: a check on a GPU must fail with each.

Some lines look like candidates, but changing them has no visible effect:

- `l == 0.0f ? -INFINITE` of an LSE (partials.cuh): the logarithm of 0 is the same. - `rank <
CLUSTER ? weights.x` (reduce.cuh): clusters merge without teams, so no rank is past the last. - The
lower bound of a length on the device (schedule.cuh), without appended tokens: a negative length has
no chunk, like 0. With appended tokens, tests/kernels/test_append_on_cpu.py needs it.
"""

from __future__ import annotations

from dataclasses import dataclass

EVERY_BUILD = "tests/gpu_only/launch_every_build.py"
#: Words after `python`, with paths of the checkout.
Command = tuple[str, ...]


@dataclass(frozen=True)
class Delay:
    """An edit that delays some CTAs or warps on a GPU without changing results. Their data is then
    missing when others ask for it, or overwritten before they read it. The check must pass with
    the delay alone.
    """

    name: str
    #: Path in the checkout.
    file: str
    #: Text that occurs once.
    old: str
    new: str


@dataclass(frozen=True)
class Mutation:
    """A changed line, and the checks that fail."""

    name: str
    #: Path in the checkout.
    file: str
    #: Text that occurs once.
    old: str
    new: str
    #: Check that fails on a GPU.
    gpu: Command
    #: Test that fails without a GPU; None if `why_not_cpu` explains why none can.
    cpu: str | None
    why_not_cpu: str = ""
    #: False if a launch does not end on a GPU, so the check is killed.
    ends: bool = True
    #: Delay for an order of CTAs or warps that is otherwise rare.
    delay: Delay | None = None


def by_launches(*names: str) -> Command:
    """Return a command with launches of launch_every_build.py, selected by parts of their names."""
    return EVERY_BUILD, *names


def by_pytest(*tests: str) -> Command:
    """Return a command with tests of pytest, below tests/.

    The checkout is not put on the path, where it would hide the copy with the mutation.
    """
    words = "-m pytest -q -x -p no:cacheprovider -o pythonpath=".split()
    return *words, *(f"tests/{test}" for test in tests)


def by_sanitizer(tool: str, name: str) -> Command:
    """Return a command with a launch under compute-sanitizer."""
    return ("compute-sanitizer", tool, *by_launches(name))


LEAN, MLA = "kernels/lean", "kernels/mla"
ON_CPU = "kernels/test_lean_on_cpu.py::test_attention"
HEAD_PAIRS_ON_CPU = "kernels/test_head_pairs_on_cpu.py::test_pairs_of_heads[scales of heads]"
APPENDED = "kernels/test_append_on_cpu.py::test_appended_tokens_are_attended_to_and_stored"
ROWS_ON_CPU = "kernels/test_many_rows_on_cpu.py::test_many_rows_are_right"
MLA_ON_CPU = "kernels/test_mla_on_cpu.py::test_mla_is_right"
CORRECT = "kernels/test_correctness.py"
ROBUST = "gpu_only/test_robust_on_gpu.py"
ATTENTION = "gpu_only/test_attention_on_gpu.py"
MLA_ON_GPU = "gpu_only/test_mla_on_gpu.py"
LATENT = "test_right_and_the_same_bits_again"

#: 0.5 ms: partials are stored later by this time.
LATE_PARTIALS = Delay(
    "late partials",
    f"{LEAN}/reduce.cuh",
    "store_partial(slot, quad, piece, epoch);",
    "__nanosleep(500000), store_partial(slot, quad, piece, epoch);",
)
#: The same for latent attention: every other CTA stores its partial later. If it only published
#: later, a reader that does not wait would mostly see new data.
LATE_LATENT_PARTIALS = Delay(
    "late partials of latent attention",
    f"{MLA}/outputs.cuh",
    "  if (!has_rows(first_row)) return;\n#pragma unroll\n"
    "  for (int unit = 0; unit < UNITS; unit++)\n    reinterpret_cast<float2 *>(slot)",
    "  if (blockIdx.x / CLUSTER % 2) __nanosleep(500000);\n"
    "  if (!has_rows(first_row)) return;\n#pragma unroll\n"
    "  for (int unit = 0; unit < UNITS; unit++)\n    reinterpret_cast<float2 *>(slot)",
)
#: 2 us: the last warp of four reads a run of bytes later than the others.
LATE_BYTES = Delay(
    "late bytes of a latent cache",
    f"{MLA}/bytes.cuh",
    "mbarrier_try_wait_parity(shared + full_at(STAGE, TURN), filled % 2);",
    "mbarrier_try_wait_parity(shared + full_at(STAGE, TURN), filled % 2);\n"
    "  if (threadIdx.x / 32 % 4 == 3) __nanosleep(2000);",
)
#: The same for Triton: all except host blocks store theirs later.
LATE_TRITON_PARTIALS = Delay(
    "late partials in Triton",
    f"{LEAN}/triton.py",
    "        elif first > 0:\n",
    "        elif first > 0:\n"
    '            tl.inline_asm_elementwise("nanosleep.u32 500000; mov.u32 $0, 0;", "=r", [], '
    "dtype=tl.int32, is_pure=False, pack=1)\n",
)

#: Launches used by several mutations.
MQA = "b1 h32/1 n5000 d128 fp16 HND"
MHA = "b1 h24 n1024 d64 fp16 HND"
PAGED = "b2 h32/8 n2000+5 d128 p16 fp16 HND"
SINKS = "b3 h6 n700 d64 q3 wl128 fp16 HND sinks"
SHORT = "b3 h8 n1+70+3000 d64 q3 p64 bf16 NHD"
ROWS = "b1 h32/8 n4096 d128 q16 bf16 HND"
PAIRS = "b8 h32/8 n1500 d128 q7 bf16 HND"
PAGED_ROWS = "b2 h32/8 n2000+5 d128 q40 p16 fp16 HND"
HEAD_PAIRS = "b34 h64/8 n300 d64 kv-e4m3 bf16 NHD"
SCALED_ROWS = "b20 h32/8 n300 d128 q16 p64 kv-e4m3 ps-page-head fp16 HND"
SMALL_PAGED_ROWS = "b2 h32/8 n5000+5 d128 q40 p1 fp16 HND"

#: lean.cu and its headers: attention over a chunk.
ATTEND = (
    Mutation(
        "sums of weights are not re-scaled",
        f"{LEAN}/attend.cuh",
        "l[rows][j] *= scale;",
        "",
        by_launches(f"{MQA}, heuristic"),
        f"{ON_CPU}[device]",
    ),
    Mutation(
        "half of the output is not re-scaled",
        f"{LEAN}/attend.cuh",
        "o[step][rows][j] *= scale, o[step][rows][j + 2] *= scale;",
        "o[step][rows][j] *= scale;",
        by_launches(f"{MQA}, heuristic"),
        f"{ON_CPU}[device]",
    ),
    Mutation(
        "one token past the end is seen",
        f"{LEAN}/attend.cuh",
        "if (at >= end || (MASKED_STARTS",
        "if (at > end || (MASKED_STARTS",
        by_launches("b3 h6 n129+700+45 d64 c1400 cap20 bf16 HND"),
        f"{ON_CPU}[device]",
    ),
    Mutation(
        "values past the end are not zeroed",
        f"{LEAN}/attend.cuh",
        "if (masked) zero_values",
        "if (false) zero_values",
        by_launches("b3 h6 n129+700+45 d64 q5 c1400 bf16 HND noncausal"),
        f"{ON_CPU}[device]",
    ),
    Mutation(
        "the chunk before the last is not masked",
        f"{LEAN}/attend.cuh",
        "tokens - (part.queries.count - 1) + first_query;",
        "tokens + first_query;",
        by_launches("b2 h8 n33+66 d128 q5 fp16 HND, cp.async"),
        f"{ON_CPU}[chunks of queries]",
    ),
    Mutation(
        "a window's left edge is a token late",
        f"{LEAN}/attend.cuh",
        "own - p.window_left)",
        "own - p.window_left + 1)",
        by_launches(SINKS),
        f"{ON_CPU}[windows]",
    ),
    Mutation(
        "a window's right edge is a token early",
        f"{LEAN}/attend.cuh",
        "WINDOW_RIGHT * p.window_right",
        "WINDOW_RIGHT * (p.window_right - 1)",
        by_launches("b3 h6 n700 d128 q4 p64 c1400 wl33 wr2 fp16 NHD device noncausal"),
        f"{ON_CPU}[paged windows in clusters]",
    ),
    Mutation(
        "padding in a sequence's first page is seen",
        f"{LEAN}/attend.cuh",
        "max(part.leftpad, own - p.window_left) : part.leftpad;",
        "max(part.leftpad, own - p.window_left) : 0;",
        by_launches("b3 h6 n700 d128 p64 c1400 fp16 NHD device leftpad"),
        f"{ON_CPU}[paged padding]",
    ),
    Mutation(
        "half a soft cap",
        f"{LEAN}/attend.cuh",
        "softcap - 2.0f * softcap * rcp",
        "softcap - softcap * rcp",
        by_launches("b3 h8/2 n700 d64 cap20 fp16 HND"),
        f"{ON_CPU}[windows]",
    ),
    Mutation(
        "slopes in other units",
        f"{LEAN}/attend.cuh",
        "(distance * LOG2_E)",
        "distance",
        by_launches("b3 h8/2 n700 d128 p16 c1400 fp16 NHD device alibi"),
        f"{ON_CPU}[paged windows in clusters]",
    ),
    Mutation(
        "the scale of an fp8 K is dropped",
        f"{LEAN}/attend.cuh",
        "scale_of(p.k_descale, part.sequence, kv_head)",
        "1.0f",
        by_launches("b3 h14/1 n700 d128 kv-e4m3 fp16 NHD"),
        f"{ON_CPU}[fp8]",
    ),
    Mutation(
        "query tokens are read at the stride of heads",
        f"{LEAN}/attend.cuh",
        "(i64)(row / GROUP_SIZE) * p.stride_q_token",
        "(i64)(row / GROUP_SIZE) * p.stride_q_head",
        by_launches(SINKS),
        f"{ON_CPU}[windows]",
    ),
    Mutation(
        "all query tokens are rotated as the first",
        f"{LEAN}/attend.cuh",
        "position + row / GROUP_SIZE * p.rotary_step",
        "position",
        by_launches("b3 h6 n700 d128 q3 new3 rot32 fp16 NHD interleaved"),
        f"{APPENDED}[pages]",
    ),
    Mutation(
        "the scale of an fp8 V is dropped",
        f"{LEAN}/fp8.cuh",
        "KV_DTYPE == 0 ? 1.0f : scale_of(p.v_descale",
        "true ? 1.0f : scale_of(p.v_descale",
        by_launches("b3 h14/1 n700 d128 kv-e4m3 fp16 NHD"),
        f"{ON_CPU}[fp8]",
    ),
    Mutation(
        "values of two tokens are mixed",
        f"{LEAN}/fp8.cuh",
        "__byte_perm(loaded[part + i], 0, 0x3120)",
        "__byte_perm(loaded[part + i], 0, 0x3210)",
        by_launches("b3 h14/1 n700 d128 kv-e4m3 fp16 NHD"),
        f"{ON_CPU}[fp8]",
    ),
    Mutation(
        "both KV heads of a row take the first's keys",
        f"{LEAN}/attend.cuh",
        "k_address(stage, lane, head * K_LOADS + load, block, odd)",
        "k_address(stage, lane, load, block, odd)",
        by_launches(f"{HEAD_PAIRS}, heuristic"),
        HEAD_PAIRS_ON_CPU,
    ),
    Mutation(
        "pairs of KV heads that begin in the middle of a line are taken from its beginning",
        f"{LEAN}/attend.cuh",
        "SHIFTED_ROWS ? part.head_tile().kv_head % 2 : 0",
        "0",
        by_launches("b9 h32 n300 d80 fp16 NHD, heuristic"),
        HEAD_PAIRS_ON_CPU.replace("scales of heads", "groups of 1"),
    ),
    Mutation(
        "both KV heads of a row take the first's scale of V",
        f"{LEAN}/attend.cuh",
        "rows < HEAD_BLOCKS ? v_scale : second_v_scale",
        "v_scale",
        by_launches(f"{HEAD_PAIRS}, heuristic"),
        HEAD_PAIRS_ON_CPU,
    ),
    Mutation(
        "sums of values stay in the unit of the pages before",
        f"{LEAN}/attend.cuh",
        "scale = unit * reciprocal_of(moved);",
        "scale = 1.0f;",
        by_launches(f"{SCALED_ROWS}, heuristic"),
        f"{ON_CPU}[scales of pages]",
    ),
)

#: Copies into shared memory, and their waits.
COPY = (
    Mutation(
        "all KV heads take the scales of the first",
        f"{LEAN}/copy.cuh",
        "kv_head * of.stride_head",
        "0 * of.stride_head",
        by_launches("b3 h8/2 n129+700+45 d128 p64 kv-e4m3 ps-page-head bf16 NHD"),
        f"{ON_CPU}[scales of pages]",
    ),
    Mutation(
        "a barrier's phase is not flipped",
        f"{LEAN}/copy.cuh",
        "parity ^= 1 << stage;",
        "",
        by_launches(f"{MQA}, heuristic"),
        f"{ON_CPU}[device]",
        ends=False,
    ),
    Mutation(
        "a 16-byte copy is waited for too late",
        f"{LEAN}/copy.cuh",
        "cp_async_wait_group<STAGES - 1>",
        "cp_async_wait_group<STAGES>",
        by_launches(f"{MQA}, cp.async"),
        f"{ON_CPU}[host]",
    ),
    Mutation(
        "pages of the first chunk are taken for all",
        f"{LEAN}/copy.cuh",
        "(CHUNKS_AHEAD - known) * BOXES + box)",
        "box)",
        by_launches(f"{PAGED}, stream-K"),
        f"{ON_CPU}[paged clusters]",
    ),
    Mutation(
        "rows of the cache are not looked up",
        f"{LEAN}/copy.cuh",
        "BATCH_IDX ? __ldg(p.cache_batch_idx + position.sequence) : position.sequence",
        "position.sequence",
        by_launches("b3 h8/2 n129+700+45 d128 bf16 NHD batch-idx"),
        f"{APPENDED}[padding]",
    ),
    Mutation(
        "copies of later parts are not begun",
        f"{LEAN}/lean.cu",
        "if (SCRATCH_OVER_RING || first_part) ring.fill",
        "if (first_part) ring.fill",
        by_launches(f"{SCALED_ROWS}, heuristic"),
        f"{ON_CPU}[many rows]",
        ends=False,
    ),
    Mutation(
        "the last appended token of a chunk is read when the part begins",
        f"{LEAN}/append.cuh",
        "early = chunk;\n    load<FIRST_ROWS>(p, part, max(token, length), lane);",
        "early = chunk;\n    load<FIRST_ROWS>(p, part, stop - 1, lane);",
        by_launches("b3 h6 n700 d128 q3 new3 rot32 fp16 NHD interleaved"),
        f"{APPENDED}[rotated]",
    ),
    Mutation(
        "an appended token is stored a place late",
        f"{LEAN}/append.cuh",
        "(at + row) % PAGE_OR_1 : at + row;",
        "(at + row) % PAGE_OR_1 : at + row + 1;",
        by_launches("b3 h6 n129+700+45 d128 q5 c1400 new5 bf16 NHD"),
        f"{APPENDED}[rotated]",
    ),
)

#: Ends of output tiles: warps, clusters and CTAs merge.
REDUCE = (
    Mutation(
        "weights of a merge are left out of the sum",
        f"{LEAN}/partials.cuh",
        "sum.l += weight * l[i];",
        "sum.l += l[i];",
        by_launches(f"{MHA}, stream-K", f"{MHA}, cp.async"),
        f"{ON_CPU}[device]",
    ),
    Mutation(
        "a merge's reference is the first part's maximum",
        f"{LEAN}/partials.cuh",
        "for (int i = 0; i < COUNT; i++) reference = fmaxf(reference, m[i]);",
        "for (int i = 0; i < 1; i++) reference = fmaxf(reference, m[i]);",
        by_pytest(f"{ROBUST}::test_finite_scores_below_minus_1e30_are_scores[cuda]"),
        f"{ON_CPU}[attention chunks]",
    ),
    Mutation(
        "a merge does not wait",
        f"{LEAN}/partials.cuh",
        "missing |= first[i].w != epoch | second[i].w != epoch;",
        "missing |= false;",
        by_pytest(
            f"{ROBUST}::test_a_launch_is_right_whatever_the_workspace_holds"
            "[cuda, stream-K-many parts]"
        ),
        f"{ON_CPU}[device]",
        delay=LATE_PARTIALS,
    ),
    Mutation(
        "a sequence without a token is divided by 0",
        f"{LEAN}/partials.cuh",
        "const float scale = l > 0.0f ? rcp_approx_ftz(l) : l;",
        "const float scale = rcp_approx_ftz(l);",
        by_pytest(f"{ROBUST}::test_lengths_outside_the_cache_are_the_nearest_inside[cuda-None]"),
        f"{ON_CPU}[chunks of queries]",
    ),
    Mutation(
        "one partial of a full merge is left out",
        f"{LEAN}/reduce.cuh",
        "valid ? min(MERGE - 1,",
        "valid ? min(MERGE - 2,",
        by_launches(f"{MQA}, stream-K"),
        f"{ON_CPU}[device]",
    ),
    Mutation(
        "the first CTA's partial stands for its whole cluster's",
        f"{LEAN}/reduce.cuh",
        "mapa_shared_cluster(own + 16 * quad, peer)",
        "mapa_shared_cluster(own + 16 * quad, 0)",
        by_launches(f"{MQA}, heuristic"),
        f"{ON_CPU}[clusters]",
    ),
    Mutation(
        "another CTA writes what the cluster's first has computed alone",
        f"{LEAN}/lean.cu",
        "if (rank == 0) write_alone",
        "if (rank == 1) write_alone",
        by_launches(f"{SHORT}, pairs"),
        f"{ON_CPU}[short sequences in clusters]",
    ),
    Mutation(
        "CTAs of a cluster do not wait for one another",
        f"{LEAN}/reduce.cuh",
        "  barrier_cluster_arrive();\n  barrier_cluster_wait();\n",
        "",
        by_launches(f"{MQA}, heuristic", f"{MHA}, heuristic", f"{MHA}, clusters of 8"),
        f"{ON_CPU}[clusters]",
    ),
    Mutation(
        "a sink is added twice",
        f"{LEAN}/reduce.cuh",
        "if (SINKS) piece.add_logit(logit_of(sink));",
        "if (SINKS) piece.add_logit(logit_of(sink)), piece.add_logit(logit_of(sink));",
        by_launches(SINKS),
        f"{ON_CPU}[windows]",
    ),
    Mutation(
        "all heads have the first one's sink",
        f"{LEAN}/reduce.cuh",
        "(tile.row_offset + row) % GROUP_SIZE;",
        "0;",
        by_launches("b3 h8/2 n700 d128 q2 wl200 cap30 fp16 NHD sinks alibi"),
        f"{ON_CPU}[windows]",
    ),
    Mutation(
        "warps do not wait before their states are overwritten",
        f"{LEAN}/lean.cu",
        "if (SCRATCH_OVER_RING || !first_part) __syncthreads();",
        "",
        by_sanitizer("racecheck", "b40 h32/8 n200 d64 fp16 HND, heuristic"),
        f"{ON_CPU}[device]",
    ),
    Mutation(
        "replays of a graph share their epoch",
        f"{LEAN}/lean.cu",
        "p.epoch + replays",
        "p.epoch",
        by_pytest(f"{ATTENTION}::test_a_captured_call_follows_lengths_and_pages_that_change"),
        f"{ON_CPU}[device]",
    ),
    Mutation(
        "output tiles share the slots of their fixed runs",
        f"{LEAN}/lean.cu",
        "FIXED_RUNS ? part.at",
        "FIXED_RUNS ? part.first",
        by_launches(f"{MHA}, fixed runs"),
        f"{ON_CPU}[fixed runs]",
    ),
)

#: Distribution of LeanTiles.
SCHEDULE = (
    Mutation(
        "work ranges begin as if none were longer",
        f"{LEAN}/schedule.cuh",
        "return range * share + min(range, longer);",
        "return range * share;",
        by_launches(f"{MHA}, stream-K"),
        f"{ON_CPU}[host]",
    ),
    Mutation(
        "the last LeanTile is dropped where it is not full",
        f"{LEAN}/schedule.cuh",
        "int tiles = (tokens + (1 << shift) - 1) >> shift;",
        "int tiles = tokens >> shift;",
        by_launches(f"{PAGED}, stream-K"),
        f"{ON_CPU}[device]",
    ),
    Mutation(
        "LeanTiles of a window begin too late",
        f"{LEAN}/schedule.cuh",
        "tokens - queries - p.window_left",
        "tokens - p.window_left",
        by_launches(SINKS),
        f"{ON_CPU}[windows]",
    ),
    Mutation(
        "chunks of attention are those of the sequence's end",
        f"{LEAN}/schedule.cuh",
        "chunk_start(p, leftpad, tokens - queries)",
        "chunk_start(p, leftpad, tokens)",
        by_launches("b3 h6 n700 d64 ac100 fp16 HND"),
        f"{ON_CPU}[attention chunks]",
    ),
    Mutation(
        "an output tile's last split is not counted",
        f"{LEAN}/schedule.cuh",
        "range.share, range.longer) - host + 1;",
        "range.share, range.longer) - host;",
        by_launches(f"{MHA}, stream-K"),
        f"{ON_CPU}[host]",
    ),
    Mutation(
        "splits end a LeanTile early",
        f"{LEAN}/schedule.cuh",
        "range_start(split + 1, length, rest);",
        "range_start(split + 1, length, rest) - 1;",
        by_launches(f"{PAGED}, stream-K"),
        f"{ON_CPU}[clusters]",
    ),
    Mutation(
        "equal splits begin at the output tile's start",
        f"{LEAN}/schedule.cuh",
        "position.first = split * longest;",
        "position.first = 0;",
        by_launches(f"{MQA}, fixed_split_cuda"),
        f"{ON_CPU}[equal splits]",
    ),
    Mutation(
        "the last of equal splits ends a LeanTile early",
        f"{LEAN}/schedule.cuh",
        "min(longest, position.tiles - position.first);",
        "min(longest, position.tiles - position.first - 1);",
        by_launches(f"{MQA}, fixed_split_cuda", f"{PAGED}, fixed_split_cuda"),
        f"{ON_CPU}[equal splits]",
    ),
    Mutation(
        "a work range stays in a sequence that is done",
        f"{LEAN}/schedule.cuh",
        "if (at >= sequence_end) {",
        "if (at > sequence_end) {",
        by_pytest(f"{ATTENTION}::test_equal_lengths_on_the_device[40-8-300]"),
        f"{ON_CPU}[device]",
    ),
    Mutation(
        "lengths past the cache are believed",
        f"{LEAN}/schedule.cuh",
        "min(max(__ldg(p.cache_seqlens + sequence), 0), p.context)",
        "max(__ldg(p.cache_seqlens + sequence), 0)",
        by_pytest(f"{ROBUST}::test_lengths_outside_the_cache_are_the_nearest_inside[cuda-None]"),
        "kernels/test_lean_on_cpu.py::test_lengths_that_are_none",
    ),
    Mutation(
        "who merges starts first",
        f"{LEAN}/schedule.cuh",
        "slot = index = used - 1 - unit;",
        "slot = index = unit;",
        by_pytest(
            f"{ROBUST}::test_launches_end_beside_a_kernel_that_holds_most_sms[cuda, stream-K-1]"
        ),
        f"{ON_CPU}[device]",
        ends=False,
    ),
    Mutation(
        "a divisor is rounded down",
        f"{LEAN}/cuda_params.py",
        "(1 << (31 + bits)) // divisor + 1",
        "(1 << (31 + bits)) // divisor",
        by_launches(SINKS),
        f"{ON_CPU}[attention chunks]",
    ),
    Mutation(
        "longer work ranges are divided as the others",
        f"{LEAN}/cuda.py",
        "params.by_share_plus_1 = Divisor.of(params.share + 1)",
        "params.by_share_plus_1 = Divisor.of(params.share)",
        by_launches(f"{MHA}, stream-K"),
        "kernels/test_lean_on_cpu.py::test_row_tiles_that_share_tokens_are_in_step",
        ends=False,
    ),
    Mutation(
        "a soft cap's scores are scaled by half",
        f"{LEAN}/cuda_masks.py",
        "params.qk_scale *= 2 / inputs.softcap",
        "params.qk_scale *= 1 / inputs.softcap",
        by_launches("b3 h8/2 n700 d64 cap20 fp16 HND"),
        f"{ON_CPU}[windows]",
    ),
    Mutation(
        "tensor maps of a cache that has grown are the old ones",
        f"{LEAN}/cuda.py",
        "cache_map.resize(shape, strides)",
        "pass",
        by_pytest(f"{ATTENTION}::test_a_cache_that_grows_finds_its_launch_prepared"),
        None,
        "the driver writes tensor maps",
    ),
    Mutation(
        "a graph's counter stands still",
        f"{LEAN}/workspace.py",
        "_REPLAY_STEP = 0x9E3779B1 - (1 << 32)",
        "_REPLAY_STEP = 0",
        by_pytest(f"{ATTENTION}::test_a_captured_call_follows_lengths_and_pages_that_change"),
        None,
        "there is no CUDA graph",
    ),
)

#: many_rows.cu and its headers.
MANY_ROWS = (
    Mutation(
        "a stage is overwritten while it is read",
        f"{LEAN}/many_rows.cu",
        "  mbarrier_try_wait_parity(empty, parity ^ 1);\n",
        "",
        by_launches("b20 h32/8 n1500 d128 q16 fp16 HND, heuristic"),
        f"{ROWS_ON_CPU}[host]",
    ),
    Mutation(
        "a row sees one token too many",
        f"{LEAN}/rows_attend.cuh",
        "if (at >= end[half] ||",
        "if (at > end[half] ||",
        by_launches(ROWS),
        f"{ROWS_ON_CPU}[host]",
    ),
    Mutation(
        "values past the end of the last chunk are not zeroed",
        f"{LEAN}/rows_attend.cuh",
        "  seen.zero_values(shared, stage, part.token + last * CHUNK);\n",
        "",
        by_launches(PAGED_ROWS, "b3 h8/2 n129+700+45 d64 q17 c1400 bf16 HND"),
        f"{ROWS_ON_CPU}[device]",
    ),
    Mutation(
        "a stage is read before what lanes copy is there",
        f"{LEAN}/rows_copy.cuh",
        "cp_async_mbarrier_arrive_noinc(full)",
        "mbarrier_arrive(full)",
        by_launches(SMALL_PAGED_ROWS),
        f"{ROWS_ON_CPU}[pages of one token]",
    ),
    Mutation(
        "rows that lanes copy come from the page of another",
        f"{LEAN}/rows_copy.cuh",
        "(u64)own, i + row)",
        "(u64)own, row)",
        by_launches(SMALL_PAGED_ROWS),
        f"{ROWS_ON_CPU}[pages of one token]",
    ),
    Mutation(
        "both rows of a thread are re-scaled as the first",
        f"{LEAN}/rows_attend.cuh",
        "o[i] *= softmax.scale[i / 2 % 2]",
        "o[i] *= softmax.scale[0]",
        by_launches(ROWS),
        f"{ROWS_ON_CPU}[host]",
    ),
    Mutation(
        "sums of a row's weights are not re-scaled",
        f"{LEAN}/rows_attend.cuh",
        "l[half] *= scale[half];",
        "",
        by_launches(ROWS),
        f"{ROWS_ON_CPU}[host]",
    ),
    Mutation(
        "sums of splits are added without their weights",
        f"{LEAN}/rows_output.cuh",
        "weight * __uint_as_float(log.y) : 0.0f",
        "__uint_as_float(log.y) : 0.0f",
        by_launches(ROWS),
        f"{ROWS_ON_CPU}[host]",
    ),
    Mutation(
        "merged rows are without their sink",
        f"{LEAN}/rows_output.cuh",
        "l = SINKS ? 1.0f : 0.0f;",
        "l = 0.0f;",
        by_launches("b3 h8 n700 d64 q200 wl100 fp16 HND sinks", "ql17+1+2 fp16 HND device sinks"),
        f"{ROWS_ON_CPU}[device]",
    ),
    Mutation(
        "packed queries' LSE begins at the first sequence's",
        f"{LEAN}/rows_output.cuh",
        "(i64)head * stride_lse + part.queries.first",
        "(i64)head * stride_lse",
        by_launches("b3 h14/1 n700 d128 ql1+40+3 fp16 NHD"),
        f"{ROWS_ON_CPU}[device]",
    ),
    Mutation(
        "a pair's sums are added without their weights",
        f"{LEAN}/rows_output.cuh",
        "const float weight = ex2_approx_ftz(logs[i][peer].x - high);",
        "const float weight = 1.0f;",
        by_launches(f"{PAIRS}, heuristic"),
        f"{ROWS_ON_CPU}[pair, sinks]",
    ),
    Mutation(
        "both CTAs of a pair write the same rows",
        f"{LEAN}/rows_output.cuh",
        "first = rank * share, units",
        "first = 0 * share, units",
        by_launches(f"{PAIRS}, heuristic"),
        f"{ROWS_ON_CPU}[pair, sinks]",
    ),
    Mutation(
        "both CTAs of a pair copy the chunks of the first",
        f"{LEAN}/many_rows.cu",
        "CLUSTER > 1 ? rank : 0",
        "0",
        by_launches(f"{PAIRS}, heuristic"),
        f"{ROWS_ON_CPU}[pair, sinks]",
    ),
)

#: mla.cu and its headers.
LATENT_ATTENTION = (
    Mutation(
        "one token past the end of a latent cache is seen",
        f"{MLA}/scores.cuh",
        "if (token >= visible[i / 2 % 2])",
        "if (token > visible[i / 2 % 2])",
        by_pytest(f"{MLA_ON_GPU}::{LATENT}[b1 h128/1 n65 d576 p64 dv512 bf16 HND latent-1.0]"),
        f"{MLA_ON_CPU}[several query tokens]",
    ),
    Mutation(
        "the last query token sees one token less",
        f"{MLA}/mla.cu",
        "max(0, Q_LEN - 1 - query)",
        "max(0, Q_LEN - query)",
        by_pytest(
            f"{MLA_ON_GPU}::{LATENT}[b3 h128/1 n700+2+65 d576 q3 p64 dv512 fp16 HND latent-1.0]"
        ),
        f"{MLA_ON_CPU}[several query tokens]",
    ),
    Mutation(
        "sums of the other warpgroup's weights are not re-scaled",
        f"{MLA}/scores.cuh",
        "softmax.l[half] *= log.y;",
        "",
        by_pytest(
            f"{MLA_ON_GPU}::{LATENT}[b1 h128/1 n1000 d576 p64 dv512 bf16 HND latent-12.0]",
            f"{MLA_ON_GPU}::{LATENT}[b100 h128/1 n1024 d576 p64 dv512 bf16 NHD latent-12.0]",
        ),
        f"{MLA_ON_CPU}[crossing]",
    ),
    Mutation(
        "partials of latent attention are added without their weights",
        f"{MLA}/outputs.cuh",
        "l += log.x * log.y;",
        "l += log.y;",
        by_pytest(f"{MLA_ON_GPU}::{LATENT}[b1 h128/1 n131072 d576 p64 dv512 bf16 HND latent-12.0]"),
        f"{MLA_ON_CPU}[crossing]",
    ),
    Mutation(
        "any launch's partial is taken",
        f"{MLA}/outputs.cuh",
        "while (ld_acquire_gpu(slot + EPOCH_AT) != epoch)",
        "while (ld_acquire_gpu(slot + EPOCH_AT) == 0)",
        by_pytest(
            f"{MLA_ON_GPU}::test_a_call_takes_other_tensors_and_lengths_with_the_same_launch",
            f"{MLA_ON_GPU}::test_a_graph_is_replayed_with_other_lengths",
        ),
        f"{MLA_ON_CPU}[several query tokens]",
        delay=LATE_LATENT_PARTIALS,
    ),
    Mutation(
        "a stage of the latent cache is overwritten while it is read",
        f"{MLA}/mla.cu",
        "if (i == 0) mbarrier_try_wait_parity(shared + empty_at(STAGE, STAGE), filled % 2 ^ 1);",
        "",
        by_pytest(f"{MLA_ON_GPU}::{LATENT}[b1 h128/1 n131072 d576 p64 dv512 bf16 HND latent-12.0]"),
        f"{MLA_ON_CPU}[crossing]",
    ),
    Mutation(
        "one round merges splits as if their maxima were alike",
        f"{MLA}/outputs.cuh",
        "const float weight = ex2_approx_ftz(log[j][i].x - m);",
        "const float weight = 1.0f;",
        by_pytest(f"{MLA_ON_GPU}::{LATENT}[b1 h128/1 n1000 d576 p64 dv512 bf16 HND latent-12.0]"),
        f"{MLA_ON_CPU}[2 column groups]",
    ),
    Mutation(
        "all column groups have the first one's columns",
        f"{MLA}/layout.cuh",
        "return COLUMN_GROUPS == 1 ? 0 : head / ROW_TILES;",
        "return 0;",
        by_pytest(f"{MLA_ON_GPU}::{LATENT}[b1 h128/1 n1000 d576 p64 dv512 bf16 HND latent-1.0]"),
        f"{MLA_ON_CPU}[4 column groups]",
    ),
    Mutation(
        "warps without rows merge the units of others as their own",
        f"{MLA}/outputs.cuh",
        "thread = threadIdx.x - team * ROW_WARPS * 32;",
        "thread = threadIdx.x;",
        by_pytest(f"{MLA_ON_GPU}::{LATENT}[b1 h16/1 n1000 d576 dv512 bf16 HND latent-1.0]"),
        f"{MLA_ON_CPU}[4 column groups]",
    ),
    Mutation(
        "operands of an fp8 latent cache lie over bytes that are still to be read",
        f"{MLA}/bytes.cuh",
        "\n    bar_sync(OF_WARPGROUP + STAGE, 128);",
        "\n    ;",
        by_pytest(
            f"{MLA_ON_GPU}::{LATENT}[b1 h128/1 n131072 d576 p64 kv-e4m3 dv512 bf16 HND latent-1.0]"
        ),
        f"{MLA_ON_CPU}[e4m3]",
        delay=LATE_BYTES,
    ),
    Mutation(
        "values of an fp8 latent cache have no scale",
        f"{MLA}/outputs.cuh",
        "* KV_UNIT * scale_of(p.k_descale, part.sequence, 0)",
        "* KV_UNIT",
        by_pytest(
            f"{MLA_ON_GPU}::{LATENT}[b1 h128/1 n1000 d576 p64 kv-e4m3 dv512 bf16 HND latent-1.0]"
        ),
        f"{MLA_ON_CPU}[e4m3]",
    ),
)

#: The Triton kernels.
TRITON = (
    Mutation(
        "Triton: sums of weights are not re-scaled",
        "kernels/tile.py",
        "l = l * rescale + tl.sum(p, 1)",
        "l = l + tl.sum(p, 1)",
        by_pytest(f"{CORRECT}::test_extreme_scores"),
        f"{CORRECT}::test_extreme_scores",
    ),
    Mutation(
        "Triton: one token past the end is seen",
        "kernels/tile.py",
        "valid = start + tokens < context",
        "valid = start + tokens <= context",
        by_pytest(f"{CORRECT}::test_garbage_past_the_context_is_not_read"),
        f"{CORRECT}::test_garbage_past_the_context_is_not_read",
    ),
    Mutation(
        "Triton: a work range begins in the sequence before",
        f"{LEAN}/schedule.py",
        "before = (ends <= lean_tile)",
        "before = (ends < lean_tile)",
        by_pytest(
            f"{CORRECT}::test_matches_the_reference_and_repeats"
            "[lean-b3 h4/2 n255+1+256 d256 p256 fp16 NHD]"
        ),
        "test_attention.py::test_a_number_a_tensor_and_none_are_the_same_lengths",
        ends=False,
    ),
    Mutation(
        "Triton: a merge does not wait",
        f"{LEAN}/reduce.py",
        'f"setp.ne.or.s32 again, tag, {epoch}, again;",',
        'f"setp.ne.s32 again, tag, tag;",',
        by_pytest(
            f"{ROBUST}::test_a_launch_is_right_whatever_the_workspace_holds[triton-many parts]"
        ),
        None,
        "the interpreter runs no PTX, and one CTA after the other",
        delay=LATE_TRITON_PARTIALS,
    ),
    Mutation(
        "Triton: who merges starts first",
        f"{LEAN}/triton.py",
        "work_range = tl.num_programs(0) - 1 - tl.program_id(0)",
        "work_range = tl.program_id(0)",
        by_pytest(f"{ROBUST}::test_a_grid_ends_one_cta_after_the_other"),
        f"{CORRECT}::test_any_grid",
        ends=False,
    ),
    Mutation(
        "fixed_split: LeanTiles that are left over are nobody's",
        "kernels/fixed_split/triton.py",
        "share = (tiles - seen_from + splits - 1) // splits",
        "share = (tiles - seen_from) // splits",
        by_pytest(f"{CORRECT}::test_any_split_count"),
        f"{CORRECT}::test_any_split_count",
    ),
)

MUTATIONS = (*ATTEND, *COPY, *REDUCE, *SCHEDULE, *MANY_ROWS, *LATENT_ATTENTION, *TRITON)
