"""LeanAttention over several GPUs of one host, one process per GPU: see docs/distributed.md."""

from __future__ import annotations

from leanbench.distributed.calls import lean_attn_with_kvcache
from leanbench.distributed.group import ContextGroup
from leanbench.distributed.shards import Layout, contiguous_shard, interleaved_shard

__all__ = [
    "ContextGroup",
    "Layout",
    "contiguous_shard",
    "interleaved_shard",
    "lean_attn_with_kvcache",
]
