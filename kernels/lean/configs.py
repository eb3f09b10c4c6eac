"""Launch settings of LeanAttention, one class per implementation."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

from leanbench.kernels.launch import registers_per_thread

from leanbench.core.config import TileConfig, number, optional_number, switch, word

#: Resident warps of an SM, on every supported GPU.
_WARPS_PER_SM = 64
#: Largest `tile_rows` with matrix instructions of warps; warpgroups multiply above it.
MOST_WARP_ROWS = 32
#: Maximum rows of all CTAs on an SM with warpgroups, limited by registers.
_MOST_WARPGROUP_ROWS = 128
#: Required values of `_settings_of_warpgroups`: 16 rows per warp, chunks of at least 64 tokens,
#: rows that fit an SM; a cluster size of 1, also for a pair of CTAs with one warpgroup and bulk
#: copies; no fixed runs.
_OF_WARPGROUPS = (True, True, True, 1, 0)


def too_many_warps(config: TileConfig) -> str | None:
    """Return why an SM cannot hold the warps of `ctas_per_sm` CTAs, or None."""
    warps = config.num_warps * config.ctas_per_sm
    if warps <= _WARPS_PER_SM:
        return None
    return (
        f"num_warps {config.num_warps} times ctas_per_sm {config.ctas_per_sm} is {warps}, an SM"
        f" holds {_WARPS_PER_SM} warps: lower one of them"
    )


def chunk_contradiction(config: CudaConfig) -> str | None:
    """Return why a chunk is too large for a LeanTile, or None.

    It would end in the LeanTile of the next work range, and both would count it.
    """
    if config.chunk_tokens <= config.tile_tokens:
        return None
    return (
        f"chunk_tokens {config.chunk_tokens} is more than tile_tokens {config.tile_tokens}: a"
        " LeanTile is made of whole chunks"
    )


class BuildKey(NamedTuple):
    """Settings that distinguish compiled kernels of a head_dim, dtype and group size."""

    implementation: str
    settings: tuple[Any, ...]


@dataclass(frozen=True)
class LeanConfig(TileConfig):
    """Settings common to both implementations: the grid of stream-K."""

    #: CTAs per SM; the grid is this times the number of SMs.
    ctas_per_sm: int = number(1, 32)  # pyright: ignore[reportIncompatibleVariableOverride]
    #: Minimum number of LeanTiles for a CTA or a cluster. With fewer, its start costs more than it
    #: saves.
    min_tiles_per_cta: int = number(1, 2**31 - 1)
    #: Round the grid down to a multiple of the output tiles, so that no CTA crosses a tile
    #: boundary. In CUDA C++, each of many short output tiles gets a CTA, so the grid may be larger.
    align_grid: bool = switch()
    #: Maximum LeanTiles of a fixed run; 0: LeanTiles are distributed over the grid. Fixed runs do
    #: not depend on the number of resident CTAs: the parts of a sequence, and so the bits of its
    #: output, depend only on its length. They ignore `min_tiles_per_cta` and `align_grid`.
    fixed_run_tiles: int = optional_number(1, 2**16, unused=0)

    @property
    @abstractmethod
    def build_key(self) -> BuildKey:
        """Key of the compiled kernel. Configs with the same key differ only in their grid."""

    def contradiction(self) -> str | None:
        return too_many_warps(self)


@dataclass(frozen=True)
class LeanTritonConfig(LeanConfig):
    implementation = "triton"

    @property
    def build_key(self) -> BuildKey:
        cap = registers_per_thread(self.num_warps * self.ctas_per_sm)
        return BuildKey("triton", (self.num_warps, self.num_stages, self.tile_tokens, cap))


@dataclass(frozen=True, kw_only=True)
class CudaBody:
    """Settings of the body of lean.cu, which copies and attends. `Build` derives from them."""

    implementation = "cuda"

    #: Tokens that a warp processes at a time.
    chunk_tokens: int = number(16, 128, power_of_two=True)
    #: Maximum query rows of an output tile. Fewer rows make more output tiles that share K and V
    #: through the L2. With adjacent rows of two KV heads, 16 covers both, copied as one: in fp8 for
    #: 8 query heads each, in 16 bits for up to 8 (`takes_head_pairs`). 64 and 128 select the kernel
    #: with matrix instructions of warpgroups, only on Hopper, with 4 warps per 64 rows.
    tile_rows: int = number(8, 128, power_of_two=True)
    #: CTAs of a thread-block cluster that share a work range. `ctas_per_sm` counts CTAs, not
    #: clusters. With 64 rows, a cluster of 2 has a whole output tile.
    cluster_size: int = number(1, 8)
    #: Copies of K and V to shared memory: bulk tensor copies, or 16-byte cp.async.
    copy: str = word("bulk", "async")

    @property
    def of_warpgroups(self) -> bool:
        """True if warpgroups multiply, in many_rows.cu."""
        return self.tile_rows > MOST_WARP_ROWS


@dataclass(frozen=True, kw_only=True)
class LeanCudaConfig(CudaBody, LeanConfig):
    implementation = "cuda"

    #: Splits per output tile; 0: LeanTiles are distributed over the grid.
    splits: ClassVar[int] = 0

    @property
    def build_key(self) -> BuildKey:
        settings = (self.num_warps, self.num_stages, self.ctas_per_sm, self.chunk_tokens)
        return BuildKey("cuda", (*settings, self.tile_rows, self.cluster_size, self.copy))

    @property
    def of_warps(self) -> LeanCudaConfig:
        """Equivalent settings of lean.cu, for calls that many_rows.cu does not support."""
        return replace(
            self,
            tile_rows=MOST_WARP_ROWS,
            num_warps=4,
            num_stages=2,
            chunk_tokens=16,
            ctas_per_sm=1,
        )

    def _settings_of_warpgroups(self) -> tuple[object, ...]:
        """Return the values to compare with `_OF_WARPGROUPS`."""
        fits = self.ctas_per_sm * self.tile_rows <= _MOST_WARPGROUP_ROWS
        alone = (self.tile_rows, self.ctas_per_sm, self.copy) == (64, 1, "bulk")
        pair = alone and self.cluster_size == 2
        shape = (self.num_warps * 16 == self.tile_rows, self.chunk_tokens >= 64, fits)
        return (*shape, 1 if pair else self.cluster_size, self.fixed_run_tiles)

    def contradiction(self) -> str | None:
        if (reason := chunk_contradiction(self)) is not None:
            return reason
        if self.fixed_run_tiles & (self.fixed_run_tiles - 1):
            return (
                f"fixed_run_tiles {self.fixed_run_tiles} is not a power of two, as lean_cuda"
                " counts tokens of a run in shifts"
            )
        if self.of_warpgroups and self._settings_of_warpgroups() != _OF_WARPGROUPS:
            return (
                f"tile_rows {self.tile_rows} is of warpgroups, with num_warps"
                f" {self.tile_rows // 16}, chunk_tokens 64 or 128, ctas_per_sm up to"
                f" {_MOST_WARPGROUP_ROWS // self.tile_rows}, cluster_size 1 (or 2 with tile_rows"
                " 64, ctas_per_sm 1 and copy bulk) and fixed_run_tiles 0: set these, or choose"
                " tile_rows 8, 16 or 32"
            )
        return super().contradiction()


@dataclass(frozen=True, kw_only=True)
class EqualSplitsConfig(CudaBody, TileConfig):
    """Settings of lean.cu with equal splits: the same number for every output tile.

    A CTA or a cluster computes a split.
    """

    implementation = "cuda"

    splits: ClassVar[int] = 1
    fixed_run_tiles: ClassVar[int] = 0

    #: Resident CTAs per SM.
    ctas_per_sm: int = number(1, 32)  # pyright: ignore[reportIncompatibleVariableOverride]

    def contradiction(self) -> str | None:
        if self.of_warpgroups:
            return (
                f"tile_rows {self.tile_rows} is of warpgroups, which deal LeanTiles as lean_cuda"
                " does alone: choose 8, 16 or 32"
            )
        return too_many_warps(self) or chunk_contradiction(self)


CudaConfig = LeanCudaConfig | EqualSplitsConfig

#: Union of the configs in files, distinguished by `implementation`.
LEAN_CONFIGS: tuple[type[LeanConfig], ...] = (LeanTritonConfig, LeanCudaConfig)
