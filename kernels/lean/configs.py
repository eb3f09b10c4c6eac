"""The launch settings of LeanAttention: one class for each implementation."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

from leanbench.kernels.launch import registers_per_thread

from leanbench.core.config import TileConfig, number, optional_number, switch, word

#: Warps that an SM of any GPU here holds at once.
_WARPS_PER_SM = 64
#: `tile_rows` up to which warps multiply by themselves, above it warpgroups.
_MOST_WARP_ROWS = 32
#: Rows of all CTAs of an SM at most where warpgroups multiply, for their registers.
_MOST_WARPGROUP_ROWS = 128
#: 16 rows to a warp, chunks of 64 tokens at least, two CTAs to an SM at most, with one warpgroup;
#: CTAs of a cluster, or one of a pair with one warpgroup and bulk copies; fixed runs.
_OF_WARPGROUPS = (True, True, True, 1, 0)


def too_many_warps(config: TileConfig) -> str | None:
    """One sentence where an SM does not hold the warps of `ctas_per_sm` CTAs, or None."""
    warps = config.num_warps * config.ctas_per_sm
    if warps <= _WARPS_PER_SM:
        return None
    return (
        f"num_warps {config.num_warps} times ctas_per_sm {config.ctas_per_sm} is {warps}, an SM"
        f" holds {_WARPS_PER_SM} warps: lower one of them"
    )


def chunk_contradiction(config: CudaConfig) -> str | None:
    """One sentence on a chunk that ends in the LeanTile of the next work range, where both would
    count it, or None.
    """
    if config.chunk_tokens <= config.tile_tokens:
        return None
    return (
        f"chunk_tokens {config.chunk_tokens} is more than tile_tokens {config.tile_tokens}: a"
        " LeanTile is made of whole chunks"
    )


class BuildKey(NamedTuple):
    """The settings that distinguish compiled kernels of a head_dim, dtype and group size."""

    implementation: str
    settings: tuple[Any, ...]


@dataclass(frozen=True)
class LeanConfig(TileConfig):
    """The settings that both implementations have: how a grid of stream-K is made."""

    #: CTAs launched per SM; the grid is this times the SMs.
    ctas_per_sm: int = number(1, 32)  # pyright: ignore[reportIncompatibleVariableOverride]
    #: A CTA, or a cluster of them, with fewer LeanTiles than this is not worth waking.
    min_tiles_per_cta: int = number(1, 2**31 - 1)
    #: The grid is rounded down to a multiple of the output tiles, so that no CTA crosses from one
    #: to the next; in CUDA C++ many short output tiles are a CTA's each, however many that makes.
    align_grid: bool = switch()
    #: Output tiles are split into fixed runs of this many LeanTiles at most, whatever the GPU holds
    #: at once: the parts of a sequence, and so the bits of its output, depend on its own length
    #: alone. `min_tiles_per_cta` and `align_grid` say nothing. 0: the LeanTiles are dealt to the
    #: grid.
    fixed_run_tiles: int = optional_number(1, 2**16, unused=0)

    @property
    @abstractmethod
    def build_key(self) -> BuildKey:
        """Configs with the same key differ in their grid only."""

    def contradiction(self) -> str | None:
        return too_many_warps(self)


@dataclass(frozen=True)
class LeanTritonConfig(LeanConfig):
    """The settings of the implementation in Triton."""

    implementation = "triton"

    @property
    def build_key(self) -> BuildKey:
        cap = registers_per_thread(self.num_warps * self.ctas_per_sm)
        return BuildKey("triton", (self.num_warps, self.num_stages, self.tile_tokens, cap))


@dataclass(frozen=True, kw_only=True)
class CudaBody:
    """The settings of lean.cu's body, which copies and attends; its macros are made of them."""

    implementation = "cuda"

    #: Tokens that a warp takes at a time.
    chunk_tokens: int = number(16, 128, power_of_two=True)
    #: Query rows of an output tile at most. Fewer make more output tiles of the same K and V, which
    #: the L2 then holds for them. Where rows of two KV heads lie side by side, 16 are those of
    #: both, copied as one: in fp8 of 8 query heads each, in 16 bits of up to 8
    #: (`takes_head_pairs`). 64 and 128 are those of a kernel with the matrix instructions of
    #: warpgroups, on Hopper alone, with 4 warps to 64 rows.
    tile_rows: int = number(8, 128, power_of_two=True)
    #: CTAs of a thread-block cluster, which share a work range. `ctas_per_sm` counts CTAs, not
    #: clusters. With 64 rows a cluster, of 2, has a whole output tile.
    cluster_size: int = number(1, 8, power_of_two=True)
    #: How K and V get to shared memory: bulk tensor copies, or 16-byte cp.async.
    copy: str = word("bulk", "async")

    @property
    def of_warpgroups(self) -> bool:
        """Whether warpgroups multiply: many_rows.cu."""
        return self.tile_rows > _MOST_WARP_ROWS


@dataclass(frozen=True, kw_only=True)
class LeanCudaConfig(CudaBody, LeanConfig):
    """The settings of the implementation in CUDA C++."""

    implementation = "cuda"

    #: Splits of every output tile; 0: the LeanTiles are dealt to the grid.
    splits: ClassVar[int] = 0

    @property
    def build_key(self) -> BuildKey:
        settings = (self.num_warps, self.num_stages, self.ctas_per_sm, self.chunk_tokens)
        return BuildKey("cuda", (*settings, self.tile_rows, self.cluster_size, self.copy))

    @property
    def of_warps(self) -> LeanCudaConfig:
        """What of these settings holds in calls that many_rows.cu does not take, for lean.cu."""
        return replace(
            self,
            tile_rows=_MOST_WARP_ROWS,
            num_warps=4,
            num_stages=2,
            chunk_tokens=16,
            ctas_per_sm=1,
        )

    def _settings_of_warpgroups(self) -> tuple[object, ...]:
        """What `_OF_WARPGROUPS` has."""
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
    """The settings of lean.cu where every output tile has as many splits of equal length, each a
    CTA's or a cluster's.
    """

    implementation = "cuda"

    #: Splits of every output tile.
    splits: ClassVar[int] = 1
    fixed_run_tiles: ClassVar[int] = 0

    #: CTAs that an SM holds at once.
    ctas_per_sm: int = number(1, 32)  # pyright: ignore[reportIncompatibleVariableOverride]

    def contradiction(self) -> str | None:
        if self.of_warpgroups:
            return (
                f"tile_rows {self.tile_rows} is of warpgroups, which deal LeanTiles as lean_cuda"
                " does alone: choose 8, 16 or 32"
            )
        return too_many_warps(self) or chunk_contradiction(self)


#: Settings of a launch of lean.cu.
CudaConfig = LeanCudaConfig | EqualSplitsConfig

#: The union that files hold, distinguished by `implementation`.
LEAN_CONFIGS: tuple[type[LeanConfig], ...] = (LeanTritonConfig, LeanCudaConfig)
