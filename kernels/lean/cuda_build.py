"""Builds of LeanAttention's CUDA C++ implementation, and the resources of their CTAs."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import ClassVar

from leanbench.kernels.lean.configs import CudaConfig, LeanCudaConfig
from leanbench.kernels.lean.cuda_params import PAGE_SCALES_PARAMS_BYTES, PARAMS_BYTES

from leanbench.compile.nvrtc import CudaBinary, CudaSource
from leanbench.core.errors import DoesNotFit
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.kernel import LaunchResources
from leanbench.core.kinds import FP8_DTYPES, NO_PAGE_SCALES, SAME
from leanbench.core.problem import AttentionProblem

_FOLDER = Path(__file__).parent
#: Kernel names in lean.cu and in many_rows.cu.
ENTRY, MANY_ROWS_ENTRY = "lean", "lean_many_rows"
#: First compute capability with bulk tensor copies and thread-block clusters.
HOPPER = (9, 0)
#: Minimum tokens of a bulk copy, which must not cross a page.
BULK_TOKENS = 16
#: Maximum query tokens of a sequence that are a parameter of the build. Larger numbers are a
#: parameter of the launch.
MOST_BUILT_Q_LEN = 16
#: Dtypes, indexed by the values of `Build::kv_dtype` and `Build::q_dtype`.
FP8_NUMBERS = (SAME, *FP8_DTYPES)
#: Shared memory of every CTA reserved by the system.
_SYSTEM_SHARED_BYTES = 1024
#: Rows of an output tile per warpgroup in many_rows.cu.
WARPGROUP_ROWS = 64
#: Rows of an output tile of two KV heads whose rows are copied as one: a block of 8 for the query
#: heads of each.
HEAD_PAIR_ROWS = 16
_BLOCK_ROWS = HEAD_PAIR_ROWS // 2
#: For 8 bits: query heads per KV head, and numbers per row. Copying 64 bytes takes as long as 128.
_PAIRED_GROUP, _PAIRED_HEAD_DIM = 8, 64
#: For 16 bits: numbers per L2 line, and the row length from which the query rows of a pair do not
#: fit in registers.
_LINE_NUMBERS, _WIDE_ROW_NUMBERS = 64, 128
#: Warps that copy in many_rows.cu: one, or a whole warpgroup for copies by lanes and for two
#: multiplying warpgroups that take registers of others.
_COPY_WARPS, _COPY_WARPGROUP = 1, 4
#: 32-bit numbers of a kept work range, and place of the first copies: KEPT_NUMBERS and
#: FIRST_COPIES_AT in build.cuh.
_KEPT_NUMBERS, _FIRST_COPIES_AT = 12, 16
#: Supported head_dims of K and V in many_rows.cu: rows are whole columns of 128 bytes in shared
#: memory.
_WARPGROUP_HEAD_DIMS, _WARPGROUP_VALUE_DIMS = (64, 128, 192, 256), (64, 128, 256)
#: `sinks` of a build by the problem's dtype, which is also that of the sinks.
_SINKS = {"fp16": 2, "bf16": 3}


def rows_of(group_size: int, q_len: int, head_dim: int) -> int:
    """Return the most rows that an output tile can use, padded.

    Matrix instructions take 8 at a time. Registers hold 32, or 16 above a V head_dim of 128, or 8
    above 256.
    """
    rows = group_size * q_len
    most = 32 if head_dim <= 128 else 16 if head_dim <= 256 else 8
    return min(most, 8 if rows <= 8 else 16 if rows <= 16 else 32)


def refusal_of_fp8(
    kv_dtype: str, head_dim: int, v_head_dim: int, kernel: str = "lean_cuda"
) -> str | None:
    """Return why an fp8 cache's rows do not consist of 16-byte pieces, or None."""
    if kv_dtype == SAME or (head_dim | v_head_dim) % 16 == 0:
        return None
    return (
        f"{kernel} takes fp8 KV caches with head_dims that are multiples of 16, these are"
        f" {head_dim} and {v_head_dim}: pad them, or keep the cache in fp16 or bf16"
    )


def refusal_of_sharing(problem: AttentionProblem) -> str | None:
    """Return why GPUs cannot share the problem's sequences, or None.

    Unsupported are features that depend on a token's position in its sequence, changes of the
    caches, and page scales.
    """
    if problem.gpus.context == 1:
        return None
    refused = {
        "a causal mask over several query tokens": problem.causal and problem.q_len > 1,
        "windows": problem.window_left >= 0 or problem.window_right >= 0,
        "attention_chunk": problem.attention_chunk > 0,
        "alibi": problem.alibi,
        "appended tokens": problem.append > 0,
        "padded sequences": problem.leftpad,
        "packed queries": problem.q_lens is not None,
        "scales of pages": problem.page_scales != NO_PAGE_SCALES,
    }
    missing = [what for what, is_asked in refused.items() if is_asked]
    if not missing:
        return None
    return (
        f"lean_cuda takes no {missing[0]} where GPUs share sequences ({problem.parallel}): split"
        " heads, with tp"
    )


def takes_warpgroups(problem: AttentionProblem) -> bool:
    """Return True if many_rows.cu supports the problem."""
    return (
        problem.head_dim in _WARPGROUP_HEAD_DIMS
        and problem.value_dim in _WARPGROUP_VALUE_DIMS
        and problem.kv_dtype == SAME
        and problem.append == 0
        and problem.shared_prefix == 0
        and problem.gpus.context == 1
    )


def takes_head_pairs(problem: AttentionProblem) -> bool:
    """Return True if rows of two KV heads can be copied as one: `Build::heads_of_row`.

    They are adjacent in a token-major cache. Appended tokens and page scales belong to a single KV
    head, so neither is supported. GPUs that share sequences are not supported either.
    """
    head_dim = problem.head_dim
    if problem.kv_dtype == SAME:
        # Rows that share L2 lines, in steps of whole matrix instructions.
        split_lines = head_dim % _LINE_NUMBERS > 0 and head_dim < _WIDE_ROW_NUMBERS
        sizes = split_lines and head_dim % 16 == 0 and problem.group_size <= _BLOCK_ROWS
    else:
        sizes = head_dim == _PAIRED_HEAD_DIM and problem.group_size == _PAIRED_GROUP
    return (
        sizes
        and head_dim == problem.value_dim
        and problem.kv_layout == "NHD"
        and problem.kv_heads % 2 == 0
        and problem.q_len == 1
        and problem.q_lens is None
        and problem.append == 0
        and problem.page_scales == NO_PAGE_SCALES
        and not (problem.choice is not None and problem.choice.by_head)
        and problem.gpus.context == 1
    )


#: Properties of a build that are members of `Build` in build.cuh, too.
_COMPUTED = (
    *("box", "column_bytes", "keeps", "packs", "partial_bytes", "shared_bytes", "shared_query"),
    *("start_step", "whole_rows"),
)


@dataclass(frozen=True)
class CudaBuild:
    """Parameters of a build: `Build` in build.cuh."""

    entry: ClassVar[str] = ENTRY
    #: Maximum partials of a work range that other CTAs wait for: one at its start, one at its end.
    range_partials: ClassVar[int] = 1

    head_dim: int
    v_head_dim: int
    bf16: int
    group_size: int
    q_len: int
    rows: int
    chunk: int
    warps: int
    stages: int
    ctas_per_sm: int
    cluster: int
    bulk: int
    ragged: int
    fixed_runs: int
    page: int
    equal_splits: int = 0
    ragged_q: int = 0
    window_left: int = 0
    window_right: int = 0
    attention_chunk: int = 0
    softcap: int = 0
    alibi: int = 0
    sinks: int = 0
    prior: int = 0
    leftpad: int = 0
    batch_idx: int = 0
    kv_dtype: int = 0
    q_dtype: int = 0
    page_scales: int = 0
    append: int = 0
    rotary_dim: int = 0
    interleaved: int = 0
    peers: int = 0
    heads_of_row: int = 1
    max_events: int = 0

    @staticmethod
    def of(problem: AttentionProblem, config: CudaConfig, max_events: int = 0) -> CudaBuild:
        ragged_q = problem.q_lens is not None
        if isinstance(config, LeanCudaConfig) and config.of_warpgroups:
            config = config if takes_warpgroups(problem) else config.of_warps
        many_rows = config.of_warpgroups
        full = config.num_warps > WARPGROUP_ROWS // 16 or config.copy == "async"
        copy_warps = (_COPY_WARPGROUP if full else _COPY_WARPS) if many_rows else 0
        rows = rows_of(problem.group_size, problem.q_len, problem.value_dim)
        build = (ManyRowsBuild if many_rows else CudaBuild)(
            head_dim=problem.head_dim,
            v_head_dim=problem.value_dim,
            bf16=int(problem.dtype == "bf16"),
            group_size=problem.group_size,
            q_len=0 if ragged_q or many_rows or problem.q_len > MOST_BUILT_Q_LEN else problem.q_len,
            rows=config.tile_rows if many_rows else min(config.tile_rows, rows),
            chunk=config.chunk_tokens,
            warps=config.num_warps + copy_warps,
            stages=config.num_stages,
            ctas_per_sm=config.ctas_per_sm,
            cluster=config.cluster_size,
            bulk=int(config.copy == "bulk"),
            ragged=int(problem.lengths_on == "device" or problem.leftpad or ragged_q),
            fixed_runs=int(config.fixed_run_tiles > 0),
            equal_splits=int(config.splits > 0),
            page=problem.page_size or 0,
            ragged_q=int(ragged_q),
            kv_dtype=FP8_NUMBERS.index(problem.kv_dtype),
            q_dtype=FP8_NUMBERS.index(problem.q_dtype),
            page_scales=int(problem.page_scales != NO_PAGE_SCALES),
            window_left=int(problem.most_behind >= 0),
            attention_chunk=int(problem.attention_chunk > 0),
            window_right=int(not problem.causal),
            softcap=int(problem.softcap > 0),
            alibi=int(problem.alibi),
            sinks=_SINKS[problem.dtype] if problem.sinks else 0,
            # The launch over each sequence's own tokens.
            prior=int(problem.shared_prefix > 0),
            leftpad=int(problem.leftpad),
            batch_idx=int(problem.batch_idx),
            append=int(problem.append > 0),
            rotary_dim=problem.rotary_dim,
            interleaved=int(problem.rotary_interleaved),
            max_events=max_events,
        )
        # Equal splits and fixed runs have not been timed with pairs of heads.
        pairs = (
            config.tile_rows >= HEAD_PAIR_ROWS
            and config.splits == config.fixed_run_tiles == 0
            and takes_head_pairs(problem)
        )
        return build.of_head_pairs() if pairs else build

    def of_head_pairs(self) -> CudaBuild:
        """Return the build for two KV heads with rows copied as one: `Build::heads_of_row`.

        Raises:
            DoesNotFit: these heads are unsupported.
        """
        least_group = _BLOCK_ROWS if self.kv_dtype else 1
        takes = least_group <= self.group_size <= self.rows == _BLOCK_ROWS and self.q_len == 1
        # A load of a matrix instruction has 32 bytes of a row.
        whole_loads = (self.head_dim | self.v_head_dim) * self.kv_bytes % 32 == 0
        beyond = self.append or self.page_scales or self.peers
        if not takes or not whole_loads or beyond:
            raise DoesNotFit(
                "lean_cuda copies rows of two KV heads as one for one query token, groups of up to"
                " 8 and head_dims of a multiple of 16, of fp8 caches for groups of 8 and head_dims"
                " of a multiple of 32 without scales of pages, appends none, and takes one GPU"
            )
        pair = replace(self, heads_of_row=2, group_size=2 * self.group_size, rows=HEAD_PAIR_ROWS)
        if pair.shared_query and pair.group_size < pair.rows:
            raise DoesNotFit(
                "lean_cuda copies rows of two KV heads as one where query rows stay in registers:"
                f" not of head_dims {self.head_dim} and {self.v_head_dim}"
            )
        return pair

    @property
    def cooperative(self) -> bool:
        """True if CTAs wait in a circle, so that all of a launch must be resident."""
        return False

    @property
    def row_count(self) -> int:
        """Rows of a partial in use, as far as the build knows."""
        return min(self.group_size * self.q_len or self.rows, self.rows)

    def row_tiles(self, q_len: int) -> int:
        """Return the output tiles of one KV head of a sequence with `q_len` query tokens."""
        return -(-self.group_size * q_len // self.rows)

    @property
    def kv_bytes(self) -> int:
        """Bytes of a number of K or V."""
        return 1 if self.kv_dtype else 2

    @property
    def whole_rows(self) -> bool:
        """True if a row of K or V is a single bulk copy: `Build::whole_rows`."""
        numbers = self.head_dim
        of_no_whole_columns = numbers > 64 and numbers % 64 > 0 and numbers % 16 == 0
        is_same = self.v_head_dim == self.head_dim and not self.kv_dtype
        of_one_head = self.heads_of_row == 1
        return bool(self.bulk) and is_same and of_one_head and of_no_whole_columns

    @property
    def column_bytes(self) -> int:
        """Bytes of a row of K or V per copy to shared memory: `Build::column_bytes`."""
        if self.whole_rows:
            return 2 * self.head_dim
        row = self.heads_of_row * max(self.head_dim, self.v_head_dim)
        return 64 if self.kv_dtype and row <= 64 else 128

    @property
    def partial_bytes(self) -> int:
        """Bytes of a work range's slot in the partials workspace."""
        return 8 * self.row_count * self.v_head_dim

    @property
    def box(self) -> int:
        """Tokens per copy: `Build::box`."""
        return math.gcd(self.page, self.chunk)

    @property
    def start_step(self) -> int:
        """Divisor of the first token of a LeanTile: `Build::start_step`."""
        return self.box if self.page else 1

    @property
    def shared_query(self) -> bool:
        """True if query rows are in shared memory: `Build::shared_query`."""
        k_steps, v_steps = -(-self.head_dim // 16), -(-self.v_head_dim // 16)
        head_rows = self.rows // self.heads_of_row
        most_query = 48 if not self.kv_dtype or (self.bulk and head_rows == 8) else 47
        return self.rows // 8 * (k_steps + 2 * v_steps) > most_query

    @property
    def packs(self) -> bool:
        """True if a single warp may process a short output tile: `Build::packs`."""
        never = (
            self.ragged_q
            or self.fixed_runs
            or self.equal_splits
            or self.shared_query
            or self.rotary_dim
            or self.sinks
            or self.append
            or self.peers
        )
        return bool(self.ragged) and not never and self.cluster == 1 and self.warps > 1

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory of a CTA, as laid out in build.cuh."""
        numbers = self.column_bytes // self.kv_bytes
        heads = self.heads_of_row
        columns = -(-heads * self.head_dim // numbers) + -(-heads * self.v_head_dim // numbers)
        ring = self.warps * self.stages * columns * self.chunk * self.column_bytes
        scratch = 4 * self.warps * self.row_count * (self.v_head_dim + 4)
        total = max(ring, scratch) if self.shared_query else ring + scratch
        total += 8 * self.warps * self.rows
        if self.cluster > 1:
            total += self._inbox_bytes
        if self.shared_query or self.rotary_dim:
            total += 2 * self.rows * (16 * -(-self.head_dim // 16) + 8)
            if self.bf16 and self.kv_dtype and not self.q_dtype:
                total += 4 * self.rows
        if self.sinks:
            total += 4 * self.rows
        if self.peers:
            total += 8 * self.peers + 8
        if self.page_scales:
            total += 8 * self.warps * self.stages * (self.chunk // self.box)
        return self._with_range(total + 8 * self.warps * self.stages)

    @property
    def _inbox_bytes(self) -> int:
        """Bytes for the slices of all CTAs of a cluster, from `Shared::inbox` in build.cuh."""
        row_quads = self.v_head_dim // 4
        piece_count = -(-self.row_count * row_quads // self.cluster)
        rows = min(self.row_count, (piece_count + row_quads - 2) // row_quads + 1)
        return -(-(self.cluster * (16 * piece_count + 8 * rows) + 8) // 16) * 16

    @property
    def keeps(self) -> bool:
        """True if launches keep their work ranges: `Build::keeps`."""
        return bool(self.ragged) and not self.equal_splits

    def _with_range(self, shared_bytes: int) -> int:
        """Add a kept range to other shared memory: `Shared::kept`."""
        return -(-shared_bytes // 16) * 16 + 4 * _KEPT_NUMBERS if self.keeps else shared_bytes

    def kept_stride(self, batch: int) -> int:
        """Return the numbers kept of a CTA's work range, as in kept.cuh, in whole lines."""
        arrays = batch + (batch if self.leftpad else 0) + (batch + 1 if self.ragged_q else 0)
        first_lines = -(-(_FIRST_COPIES_AT + 4 * self.warps) // 32)
        return 32 * (first_lines + -(-arrays // 32)) if self.keeps else 0

    def fits(self, gpu: GpuSpec) -> bool:
        """Return True if the shared memory of `ctas_per_sm` CTAs fits on an SM."""
        per_sm = gpu.shared_kb_per_sm * 1024 / self.ctas_per_sm - _SYSTEM_SHARED_BYTES
        return self.shared_bytes <= min(gpu.shared_kb_per_cta * 1024, per_sm)

    def source(self, capability: tuple[int, int]) -> CudaSource:
        """Return the source to compile for a compute capability.

        Raises:
            DoesNotFit: it has neither bulk copies nor clusters.
        """
        if capability < HOPPER and (self.bulk or self.cluster > 1):
            raise DoesNotFit(
                "lean_cuda has bulk copies and clusters from compute capability 9.0 on, this is"
                f" {capability[0]}.{capability[1]}: choose copy async and cluster_size 1"
            )
        self._check_pages()
        return CudaSource(_text("lean.cu"), ENTRY, self.defines(), capability, _FOLDER)

    def defines(self, **further: int) -> tuple[tuple[str, int], ...]:
        """Return the macros of `Build` in build.cuh, sorted: fields, `_COMPUTED`, further ones."""
        computed = {name: getattr(self, name) for name in _COMPUTED}
        params_bytes = PAGE_SCALES_PARAMS_BYTES if self.page_scales else PARAMS_BYTES
        values = asdict(self) | computed | {"params_bytes": params_bytes} | further
        return tuple(sorted((name.upper(), int(value)) for name, value in values.items()))

    def _check_pages(self) -> None:
        """Raise DoesNotFit if bulk copies would cross a page."""
        if self.bulk and self.box < BULK_TOKENS:
            raise DoesNotFit(
                f"lean_cuda has bulk copies for pages of a multiple of {BULK_TOKENS} tokens, these"
                f" have {self.page}: choose copy async"
            )

    def resources(self, binary: CudaBinary, ctas: int) -> LaunchResources:
        return LaunchResources(
            launch="lean_cuda",
            ctas=ctas,
            num_warps=self.warps,
            registers_per_thread=binary.registers_per_thread,
            shared_bytes=self.shared_bytes + binary.static_shared_bytes,
            spilled_registers=binary.spilled_registers,
        )


@dataclass(frozen=True)
class ManyRowsBuild(CudaBuild):
    """Parameters of a build of many_rows.cu, a subset of those of lean.cu; see `source`."""

    entry: ClassVar[str] = MANY_ROWS_ENTRY
    range_partials: ClassVar[int] = 2

    @property
    def cooperative(self) -> bool:
        # Clusters have whole output tiles, so they wait for nothing.
        return self.cluster == 1

    @property
    def partial_bytes(self) -> int:
        """Bytes of a slot in the partials workspace, as laid out in rows_layout.cuh."""
        return 4 * self.rows * (self.v_head_dim + 4)

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory of a CTA, as laid out in rows_layout.cuh."""
        stage = 2 * self.chunk * (self.head_dim + self.v_head_dim) + 4 * 8
        queries = 2 * self.rows * max(self.head_dim, self.v_head_dim)
        return self._with_range(queries + self.stages * stage)

    def source(self, capability: tuple[int, int]) -> CudaSource:
        """Return the source to compile for a compute capability.

        Raises:
            DoesNotFit: it is not 9.0, the only one with these matrix instructions.
        """
        if capability != HOPPER:
            raise DoesNotFit(
                f"lean_cuda has tile_rows {self.rows} for compute capability 9.0, this is"
                f" {capability[0]}.{capability[1]}: choose tile_rows 8, 16 or 32"
            )
        self._check_pages()
        # Sums of a pair of CTAs overlay the ring: SUMS_AT in rows_layout.cuh.
        sums = 4 * self.rows * (self.v_head_dim + 8) + 8 * self.rows
        ring = 2 * self.stages * self.chunk * (self.head_dim + self.v_head_dim)
        if self.cluster > 1 and sums > ring:
            raise DoesNotFit(
                f"lean_cuda merges pairs of CTAs with tile_rows {self.rows} in {sums} bytes of its"
                f" stages, {self.stages} of {self.chunk} tokens have {ring}: choose more num_stages"
            )
        return CudaSource(_text("many_rows.cu"), self.entry, self.defines(), capability, _FOLDER)


@cache
def _text(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")
