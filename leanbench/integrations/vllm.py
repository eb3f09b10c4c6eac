"""vLLM's plugin: `--attention-backend CUSTOM` decodes with LeanAttention.

The entry point `vllm.general_plugins` calls `register` in every process of a server.
"""

from __future__ import annotations

import warnings

#: The class of the backend, imported where a server uses it.
BACKEND = "leanbench.integrations.vllm_backend.LeanBackend"


def register() -> None:
    """Make LeanAttention vLLM's CUSTOM backend. Repeated calls have no effect.

    Servers without CUSTOM are unaffected. Warn if another plugin is CUSTOM already, which it stays,
    or if this vLLM has no such registry. Never raise, because that would end vLLM.
    """
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ImportError as error:
        warnings.warn(
            f"leanbench is no attention backend of this vLLM ({error}): install vllm 0.25 or newer",
            stacklevel=2,
        )
        return
    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden() and custom.get_path() != BACKEND:
        warnings.warn(
            f"vLLM's CUSTOM attention backend is {custom.get_path()} and not leanbench: choose with"
            " VLLM_PLUGINS=leanbench",
            stacklevel=2,
        )
        return
    register_backend(custom, BACKEND)
