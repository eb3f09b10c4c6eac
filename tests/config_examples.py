"""Launch settings used by tests of several rooms."""

from __future__ import annotations

from leanbench.kernels.fixed_split.cuda_configs import FixedSplitCudaConfig

FLASH_DECODING = FixedSplitCudaConfig(
    tile_tokens=128,
    num_warps=4,
    num_stages=2,
    ctas_per_sm=1,
    chunk_tokens=32,
    tile_rows=8,
    cluster_size=1,
    copy="bulk",
    splits=4,
)
