"""Public attention calls; torch and triton are imported when one of them is looked up."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from leanbench.attention.decode import get_scheduler_metadata as get_scheduler_metadata
    from leanbench.attention.decode import lean_attn_with_kvcache as lean_attn_with_kvcache
    from leanbench.attention.mla import lean_mla_with_kvcache as lean_mla_with_kvcache
    from leanbench.attention.prefix import shared_prefix as shared_prefix

__all__ = [
    "get_scheduler_metadata",
    "lean_attn_with_kvcache",
    "lean_mla_with_kvcache",
    "shared_prefix",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'leanbench.attention' has no attribute {name!r}")
    from leanbench.attention import decode, mla, prefix

    homes = {"lean_mla_with_kvcache": mla, "shared_prefix": prefix}
    return getattr(homes.get(name, decode), name)
