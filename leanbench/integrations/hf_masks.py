"""Masks of transformers models as lengths, computed on the device once per step.

A model requests the masks of a step before its first layer. The result is one of:

- None: a prompt without padding, or a single query token that sees all keys.
- int32, (batch, 1, 1 or 2, 1 or 2): the length of each sequence and, with padding, its first token.
Two equal rows mean that the layers' window hides tokens, because not every layer passes its window.
transformers keeps a tensor of four dimensions as it is.
- bool, (batch, 1, q_len, tokens): an sdpa mask, where lengths do not suffice.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers.masking_utils import causal_mask_function, sdpa_mask
from transformers.utils.import_utils import is_cuda_stream_capturing, is_tracing

from leanbench.core.errors import UserError

#: Expressions in the source of models that index masks or combine them: they need a mask, not None.
_EDITS = r"allow_is_causal_skip|attention_mask\.dtype == torch\.bool|\.to\(attention_mask\.dtype\)"

#: Models with attention of their own in the decoder; only another part uses the interface.
_OWN_DECODER = ("git", "informer")


def lean_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    config: Any = None,
    **options: Any,
) -> torch.Tensor | None:
    """Return the mask of a step for one kind of layer.

    Arguments are those of transformers.masking_utils.sdpa_mask.

    Args:
        q_offset: Number of cached tokens; a tensor with a static cache.
        kv_offset: Number of tokens that a sliding window's cache has dropped.
        attention_mask: (batch, tokens), bool: False for padding.
        local_size: Number of tokens of the window, or of a chunk.

    Raises:
        UserError: The model adds masks to its scores itself; `attention_mask` has padding between
            tokens; or a CUDA graph is captured over the static cache of a sliding window while it
            fills, or with padding.
    """
    model = type(config).__module__
    if _computes_attention(model):
        raise UserError(
            f"attention of model type {config.model_type!r} does not go through transformers'"
            " attention interface, so attn_implementation='lean' would not be called: use 'eager'"
        )
    edits = _edits_masks(model)
    # Packed sequences and bidirectional blocks do not allow it. A decode step over a static
    # cache does not either, whatever its mask.
    is_causal = (allow_is_causal_skip or q_length == 1) and not edits
    if is_causal and _lengths_say_it(local_size, use_vmap, config, options):
        tokens = q_offset + q_length - kv_offset
        starts = _starts(attention_mask, q_length, kv_offset)
        if starts is None and _sees_all(q_length, kv_length, q_offset, tokens, local_size, config):
            return None
        _refuse_captured(kv_length, tokens, kv_offset, starts)
        windowed = local_size is not None and kv_length > local_size
        return _packed(batch_size, tokens, starts, windowed, device)
    return sdpa_mask(
        batch_size,
        q_length,
        kv_length,
        q_offset,  # pyright: ignore[reportArgumentType]
        kv_offset,
        mask_function,
        attention_mask,
        local_size=local_size,
        allow_is_causal_skip=allow_is_causal_skip and not edits,
        use_vmap=use_vmap,
        device=device,
        config=config,
        **options,
    )


def lengths_of(mask: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the length and the first token of each sequence, (batch,), int32, contiguous.

    None means the whole cache, and 0.

    Raises:
        UserError: The mask is not one of `lean_mask`.
    """
    if mask is None:
        return None, None
    _, _, rows, columns = mask.shape
    if rows == columns == 1:
        return mask.view(-1), None
    if columns > 2:
        raise UserError(
            f"the last size of an int32 attention_mask is {columns}, and that of lengths is 1 or 2:"
            " pass masks as bool, or use attn_implementation='eager' if the model makes its own"
        )
    return mask[:, 0, 0, 0], mask[:, 0, 0, 1] if columns == 2 else None


def is_windowed(mask: torch.Tensor) -> bool:
    """Return True for a mask of layers with a window that hides tokens."""
    return mask.shape[2] == 2


def dense_mask(
    mask: torch.Tensor, q_length: int, kv_length: int, window: int | None
) -> torch.Tensor:
    """Convert lengths and a window to a bool mask, (batch, 1, q_length, kv_length)."""
    lengths, starts = lengths_of(mask)
    assert lengths is not None
    tokens = torch.arange(kv_length, device=mask.device)
    positions = lengths[:, None] - q_length + torch.arange(q_length, device=mask.device)
    seen = tokens <= positions[..., None]
    if starts is not None:
        seen &= tokens >= starts[:, None, None]
    if window is not None:
        seen &= tokens > positions[..., None] - window
    return seen[:, None]


def _lengths_say_it(
    local_size: int | None, use_vmap: bool, config: Any, options: dict[str, Any]
) -> bool:
    """Return True if the mask is causal, with or without a window."""
    if use_vmap or "allow_is_bidirectional_skip" in options:
        return False
    # Another size is that of chunked attention.
    return local_size is None or local_size == getattr(config, "sliding_window", None)


# Not the cached function itself: dynamo would trace it, and so read files.
@torch.compiler.assume_constant_result
def _computes_attention(configuration: str) -> bool:
    """Return True if a model adds masks to its scores itself, by the module of its config."""
    return _traits_of(configuration)[0]


@torch.compiler.assume_constant_result
def _edits_masks(configuration: str) -> bool:
    """Return True if a model builds its masks from others, and so needs them in memory."""
    return _traits_of(configuration)[1]


@cache
def _traits_of(configuration: str) -> tuple[bool, bool]:
    """Return `_computes_attention` and `_edits_masks` by the source of the modeling module next to
    the config's; False for models from elsewhere.

    transformers checks the first one, too, when a model's `attn_implementation` changes, but not
    when a model is made.
    """
    name = configuration.rpartition(".")[2]
    path = getattr(sys.modules.get(configuration), "__file__", None)
    if path is None or not configuration.startswith("transformers.models."):
        return False, False
    path = Path(path).with_name(name.replace("configuration_", "modeling_") + ".py")
    source = path.read_text(encoding="utf-8") if path.is_file() else ""
    attends = re.search(r"^class \w*Attention\w*\(nn\.Module\):", source, re.MULTILINE)
    asks = "ALL_ATTENTION_FUNCTIONS" in source and path.parent.name not in _OWN_DECODER
    return attends is not None and not asks, re.search(_EDITS, source) is not None


def _starts(
    attention_mask: torch.Tensor | None, q_length: int, kv_offset: int
) -> torch.Tensor | None:
    """Return the first token of each sequence in the cache; None: 0 for all."""
    if attention_mask is None:
        return None
    if not is_tracing(attention_mask):
        if attention_mask.all():
            return None
        _refuse_holes(attention_mask)
    starts = attention_mask.int().argmax(-1)
    if kv_offset:
        starts = (starts - kv_offset).clamp(min=0)
    return starts.to(torch.int32)


def _refuse_holes(attention_mask: torch.Tensor) -> None:
    tokens = attention_mask.sum(-1)
    first = attention_mask.int().argmax(-1)
    past_last = attention_mask.shape[-1] - attention_mask.flip(-1).int().argmax(-1)
    holes = (tokens > 0) & (tokens != past_last - first)
    if holes.any():
        raise UserError(
            f"attention_mask of sequence {int(holes.int().argmax())} has padding between tokens:"
            " attn_implementation='lean' takes it before and after them, so pad prompts on the left"
        )


def _sees_all(
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor,
    tokens: int | torch.Tensor,
    local_size: int | None,
    config: Any,
) -> bool:
    """Return True if `causal` alone describes the mask."""
    if q_length == 1:
        if isinstance(tokens, torch.Tensor) or tokens != kv_length:
            return False
        return local_size is None or kv_length <= local_size
    if local_size is not None and q_length > local_size:
        return False
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "is_decoder", False):
        # Layers of some decoders, UMT5's among them, say that they are not causal.
        return False
    if isinstance(q_offset, torch.Tensor) and is_tracing(q_offset):
        return False
    return bool(q_offset == 0)


def _refuse_captured(
    kv_length: int, tokens: int | torch.Tensor, kv_offset: int, starts: torch.Tensor | None
) -> None:
    """Reject captures over a static cache of a window, which counts on the host.

    A graph would replay the length and the dropped tokens of its capture.
    """
    # Dynamo compiles again for other numbers of the host's.
    is_on_host = not isinstance(tokens, torch.Tensor) and not torch.compiler.is_compiling()
    if not is_on_host or not is_cuda_stream_capturing():
        return
    if tokens < kv_length:
        raise UserError(
            f"a CUDA graph is captured with {tokens} of {kv_length} tokens in a sliding window's"
            " static cache, and would keep that length: capture it once the window is full"
        )
    if starts is not None:
        raise UserError(
            f"a CUDA graph is captured with an attention_mask over a sliding window's static cache"
            f" that has dropped {kv_offset} tokens, and would keep that number: make each step's"
            " masks outside of the graph (transformers.masking_utils.create_masks_for_generate)"
            " and copy them into the captured ones"
        )


def _packed(
    batch_size: int,
    tokens: int | torch.Tensor,
    starts: torch.Tensor | None,
    windowed: bool,
    device: torch.device | str,
) -> torch.Tensor:
    if isinstance(tokens, torch.Tensor):
        lengths = tokens.to(torch.int32).expand(batch_size).contiguous()
    else:
        lengths = torch.full((batch_size,), tokens, dtype=torch.int32, device=device)
    # Columns of the result are contiguous, as the kernel reads them.
    columns = lengths[None] if starts is None else torch.stack((lengths, starts))
    rows = columns.expand(2, -1, -1).contiguous() if windowed else columns[None]
    return rows.permute(2, 0, 1)[:, None]
