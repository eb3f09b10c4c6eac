"""`attn_implementation="lean"` for models of Hugging Face transformers 5."""

from __future__ import annotations

from importlib import metadata

from leanbench.core.errors import UserError

#: What a model's `attn_implementation` is called.
NAME = "lean"
#: The first version that hands over lengths as `leanbench.integrations.hf_masks` reads them, and
#: the first major version that nobody has tried.
_OLDEST, _UNTRIED = (5, 14), 6


def register() -> None:
    """Makes `attn_implementation="lean"` known to transformers, and "paged|lean" to its continuous
    batching; calling it again changes nothing.

    Raises:
        UserError: transformers is missing, or a version that this does not fit.
    """
    _check_version()
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    from leanbench.integrations.hf_attention import lean_attention
    from leanbench.integrations.hf_masks import lean_mask
    from leanbench.integrations.hf_paged import lean_paged_attention

    AttentionInterface.register(NAME, lean_attention)
    AttentionInterface.register(f"paged|{NAME}", lean_paged_attention)
    AttentionMaskInterface.register(NAME, lean_mask)


def _check_version() -> None:
    try:
        version = metadata.version("transformers")
    except metadata.PackageNotFoundError:
        raise UserError(
            "transformers is not installed: pip install 'leanbench[transformers]'"
        ) from None
    major, minor = version.split(".")[:2]
    if not _OLDEST <= (int(major), int(minor)) < (_UNTRIED, 0):
        oldest = ".".join(map(str, _OLDEST))
        raise UserError(
            f"transformers {version} is not supported: install 'transformers>={oldest},<{_UNTRIED}'"
        )
