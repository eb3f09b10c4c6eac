"""SGLang's plugin: `--attention-backend lean` decodes with LeanAttention.

The entry point `sglang.srt.plugins` calls `register` in every process of a server.
"""

from __future__ import annotations

from typing import Any

#: What `--attention-backend` calls it.
NAME = "lean"


def register() -> None:
    """Make `lean` a choice of `--attention-backend`. Repeated calls have no effect.

    Raises:
        ImportError: This SGLang registers attention backends in another way; SGLang logs it.
    """
    from sglang.srt.arg_groups.choices import (
        ATTENTION_BACKEND_CHOICES,
        add_attention_backend_choices,
    )
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    register_attention_backend(NAME)(_backend)
    if NAME not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([NAME])


def _backend(runner: Any) -> Any:
    # Imports the server's kernels, which its processes without a GPU may lack.
    from leanbench.integrations.sglang_backend import LeanBackend

    return LeanBackend(runner)
