"""`attn_implementation="lean"` for models of Hugging Face transformers 5."""

from __future__ import annotations

import re
from importlib import metadata

from leanbench.core.errors import UserError

#: What a model's `attn_implementation` is called.
NAME = "lean"
#: The first version that hands over lengths as `leanbench.integrations.hf_masks` reads them, and
#: the first major version that nobody has tried.
_OLDEST, _UNTRIED = (5, 14), 6
_FIX = f"pip install 'transformers>={_OLDEST[0]}.{_OLDEST[1]},<{_UNTRIED}'"


def register() -> None:
    """Register `attn_implementation="lean"`, and "paged|lean" for continuous batching.

    Repeated calls have no effect.

    Raises:
        UserError: transformers is missing or unsupported.
    """
    if (fault := version_fault()) is not None:
        raise UserError(fault)
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    from leanbench.integrations.hf_attention import lean_attention
    from leanbench.integrations.hf_masks import lean_mask
    from leanbench.integrations.hf_paged import lean_paged_attention

    AttentionInterface.register(NAME, lean_attention)
    AttentionInterface.register(f"paged|{NAME}", lean_paged_attention)
    AttentionMaskInterface.register(NAME, lean_mask)


def version_fault() -> str | None:
    """Return a sentence if transformers is missing or unsupported, or None; import nothing."""
    try:
        version = metadata.version("transformers")
    except metadata.PackageNotFoundError:
        return f"transformers is not installed: {_FIX}"
    if _OLDEST <= _release(version) < (_UNTRIED, 0):
        return None
    return (
        f"transformers {version} is not supported, from {_OLDEST[0]}.{_OLDEST[1]} to below"
        f" {_UNTRIED} is: {_FIX}"
    )


def _release(version: str) -> tuple[int, int]:
    """Return major and minor version: (5, 14) of 5.14rc1, (6, 0) of 6; (0, 0) if invalid."""
    numbers = re.match(r"(\d+)(?:\.(\d+))?", version)
    return (int(numbers[1]), int(numbers[2] or 0)) if numbers else (0, 0)
