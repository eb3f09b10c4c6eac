"""leanbench: measure, tune and explain decode attention on GPUs."""

from __future__ import annotations

import os

from leanbench.core import __version__

# typing's own would be the first import that takes a while, before Ctrl-C means anything to the
# command line.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from leanbench.attention import get_scheduler_metadata as get_scheduler_metadata
    from leanbench.attention import lean_attn_with_kvcache as lean_attn_with_kvcache
    from leanbench.attention import lean_mla_with_kvcache as lean_mla_with_kvcache
    from leanbench.attention import shared_prefix as shared_prefix
    from leanbench.tune.autotune import autotune as autotune

__all__ = [
    "__version__",
    "autotune",
    "get_scheduler_metadata",
    "lean_attn_with_kvcache",
    "lean_mla_with_kvcache",
    "shared_prefix",
]

_home = os.path.expanduser("~")
if not (os.path.isabs(_home) and os.access(_home, os.W_OK)):
    from leanbench.core.paths import redirect_compiler_caches

    redirect_compiler_caches()


def __getattr__(name: str) -> Any:
    # torch and triton take seconds to import; `leanbench --help` must not pay for them.
    if name == "autotune":
        from leanbench.tune.autotune import autotune

        return autotune
    if name in __all__:
        from leanbench import attention

        return getattr(attention, name)
    raise AttributeError(f"module 'leanbench' has no attribute {name!r}")
