"""Builds of mla.cu, and the resources of their CTAs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar

from leanbench.kernels.lean.cuda_build import FP8_NUMBERS, HOPPER, CudaBuild

from leanbench.compile.nvrtc import CudaSource
from leanbench.core.errors import DoesNotFit
from leanbench.core.kinds import SAME
from leanbench.core.row_scales import GROUP, row_bytes

#: Numbers of a token's latent row: K is all of them, V the first VALUE_DIM (DeepSeek, Kimi).
LATENT_DIM, VALUE_DIM = 576, 512
#: All of them: V by K. V has 128, 256 or 512 numbers, and K up to 64 more. A cache in fp8 has 512.
LATENTS = {LATENT_DIM: VALUE_DIM, 512: 512, 320: 256, 288: 256, 160: 128}
#: Rows per CTA, and tokens per stage.
TILE = 64
#: Splits merged in one round with several column groups, or few rows: `merge_few` in outputs.cuh
#: holds a number of each in registers.
ONE_ROUND = 16
#: Maximum rows for which warps without rows take a share of merges: ROW_WARPS in outputs.cuh.
FEW_ROWS = 32
#: Maximum stages per split for each number of column groups, with more rows than FEW_ROWS and with
#: at most that. Each group computes the scores of all tokens (H200; reports/performance-log.md,
#: entry 59).
MOST_GROUPED_STAGES = {4: (5, 1), 2: (4, 2), 1: (0, 0)}
#: Minimum splits of two groups, except for a single split. Fewer were slower than one group.
LEAST_GROUPED_SPLITS = 8
#: Rows of a CTA whose merge takes as long as a stage.
MERGED_ROWS = 16
#: Maximum splits of one stage. With more, splits have two stages or more.
MOST_SHORT_SPLITS = 32
_STAGES = 2
#: Bytes of a row with scales inside, and of its scales.
SCALED_ROW_BYTES, _SCALES_BYTES = row_bytes(LATENT_DIM, VALUE_DIM), 4 * VALUE_DIM // GROUP
#: Columns per copy of a cache in 8 bits: RUN_ROW in layout.cuh.
_RUN_COLUMNS = 192
#: Warps of both computing warpgroups and of the copying one.
_WARPS = 12

_FOLDER = Path(__file__).parent


def refusal_of_gpu(capability: tuple[int, int]) -> str | None:
    """Return why mla.cu does not run on a compute capability, or None.

    Only 9.0 has its matrix instructions.
    """
    if capability == HOPPER:
        return None
    return (
        "lean_mla is written for compute capability 9.0, this is"
        f" {capability[0]}.{capability[1]}: run it on a Hopper GPU"
    )


def gathers(page: int | None) -> bool:
    """Return True if rows are copied one by one, for pages of `page` tokens: GATHERS."""
    return (page or 0) % TILE > 0


def cluster_of(rows: int, page: int | None) -> int:
    """Return the CTAs of an output tile that share copies, for this many rows of a sequence."""
    return 2 if rows > TILE and not gathers(page) else 1


def most_groups(value_dim: int, kv_dtype: str) -> int:
    """Return the limit of the column groups: each warpgroup has 64 columns at least."""
    return 1 if kv_dtype != SAME else max(1, value_dim // 128)


@dataclass(frozen=True)
class MlaBuild(CudaBuild):
    """Parameters of a build of mla.cu: `Build` in lean/build.cuh."""

    entry: ClassVar[str] = "mla"

    causal: int = 1
    #: CTAs that share the columns of an output tile; ragged: 1 or that many, by the lengths:
    #: `Build::column_groups`.
    column_groups: int = 1
    #: 1: rows have scales inside; `Build::row_scales`.
    row_scales: int = 0

    @property
    def keeps(self) -> bool:
        # mla.cu searches in every launch.
        return False

    @property
    def cooperative(self) -> bool:
        return True

    @classmethod
    def of_shape(
        cls,
        heads: int,
        q_len: int,
        bf16: bool,
        causal: bool,
        ragged: bool,
        page: int,
        kv_dtype: str = SAME,
        column_groups: int = 1,
        row_scales: bool = False,
        head_dim: int = LATENT_DIM,
    ) -> MlaBuild:
        """Return the build for these query heads and positions.

        Two CTAs with rows of the same sequences share bulk copies.

        Args:
            kv_dtype: of the cache: same (as Q), e4m3, e5m2.
            row_scales: rows in e4m3 have scales inside.
            head_dim: one of `LATENTS`.

        Raises:
            DoesNotFit: more than `most_groups`.
        """
        most = most_groups(LATENTS[head_dim], kv_dtype)
        if column_groups > most:
            raise DoesNotFit(
                f"lean_mla takes column_groups up to {most} of a cache in {kv_dtype} with"
                f" {LATENTS[head_dim]} columns of V, this is {column_groups}: choose {most}"
            )
        cluster = cluster_of(heads * q_len, page)
        return cls(
            head_dim=head_dim,
            v_head_dim=LATENTS[head_dim],
            bf16=int(bf16),
            group_size=heads,
            q_len=q_len,
            rows=TILE * cluster,
            chunk=TILE,
            warps=_WARPS,
            stages=_STAGES,
            ctas_per_sm=1,
            cluster=cluster,
            bulk=1,
            ragged=int(ragged),
            fixed_runs=0,
            page=page,
            # Rows with scales become operands in the dtype of Q.
            kv_dtype=0 if row_scales else FP8_NUMBERS.index(kv_dtype),
            causal=int(causal),
            column_groups=column_groups,
            row_scales=int(row_scales),
        )

    @property
    def partial_bytes(self) -> int:
        """Bytes of a CTA's partial: PARTIAL in layout.cuh."""
        groups = 1 if self.ragged else self.column_groups
        return 4 * (TILE * self.v_head_dim // groups // 2 + 4 * TILE + 32)

    @property
    def column_bytes(self) -> int:
        """Bytes of a cache token per copy."""
        return _RUN_COLUMNS if self.kv_dtype else super().column_bytes

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory of a CTA, as laid out in layout.cuh."""
        columns = self.v_head_dim // 64 + 1
        rows = 128 * TILE * columns
        every = (1 + _STAGES) * rows + 40 * TILE
        if not self.kv_dtype:
            return every + self.row_scales * _STAGES * TILE * _SCALES_BYTES + (2 * columns + 8) * 8
        # Bytes of a stage that exceed the values of its warpgroup, in units of rows.
        return every + _STAGES * (rows // 2 - TILE * VALUE_DIM) + 4 * TILE + 14 * 8

    def source(self, capability: tuple[int, int]) -> CudaSource:
        """Return the source to compile for a compute capability.

        Raises:
            DoesNotFit: `refusal_of_gpu`.
        """
        if (reason := refusal_of_gpu(capability)) is not None:
            raise DoesNotFit(reason)
        few = self.group_size * self.q_len <= FEW_ROWS
        defines = self.defines(
            one_round=ONE_ROUND,
            most_grouped_stages=MOST_GROUPED_STAGES[self.column_groups][few],
            least_grouped_splits=LEAST_GROUPED_SPLITS,
            most_short_splits=MOST_SHORT_SPLITS,
        )
        return CudaSource(_text(), self.entry, defines, capability, _FOLDER.parent)


@cache
def _text() -> str:
    return (_FOLDER / "mla.cu").read_text(encoding="utf-8")
