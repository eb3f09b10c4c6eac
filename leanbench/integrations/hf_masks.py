"""What transformers hands each layer in place of a mask: the lengths of the sequences, computed
once a step, on the device, with no mask in memory.

A model asks for the masks of a step before its first layer. Three things may come back:

- None: of several query tokens, a prompt from its start, no padding; of one, every key is seen.
- int32, (batch, 1, 1 or 2, 1 or 2): tokens in use of each sequence and, where there is padding,
  the token that it begins with; two rows, both alike, where the layers' window hides tokens, as
  not every layer passes its window on. Four dimensions: transformers passes such a tensor on as it
  is.
- bool, (batch, 1, q_len, tokens): of masks that lengths do not say, made as for sdpa.
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

#: In the source of models that index masks or join others to them: no `None`, please; of which
#: type is it; the other one in its type.
_EDITS = r"allow_is_causal_skip|attention_mask\.dtype == torch\.bool|\.to\(attention_mask\.dtype\)"

#: Models whose decoder computes attention itself, while another part asks the interface.
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
    """The mask of a step's layers of a kind; arguments and call are those of
    transformers.masking_utils.sdpa_mask.

    Args:
        q_offset: cached tokens; on the device where a static cache counts them there.
        kv_offset: tokens that a sliding window's cache has dropped.
        attention_mask: (batch, tokens), bool: False where a token is padding.
        local_size: tokens of the window, or of a chunk in models of chunked attention.

    Raises:
        UserError: the model adds masks to its scores itself, `attention_mask` has padding between
            tokens, or a CUDA graph is captured over the static cache of a sliding window while it
            fills, or with padding.
    """
    model = type(config).__module__
    if _computes_attention(model):
        raise UserError(
            f"attention of model type {config.model_type!r} does not go through transformers'"
            " attention interface, so attn_implementation='lean' would not be called: use 'eager'"
        )
    edits = _edits_masks(model)
    # Packed sequences and blocks that see one another do not allow it. A decode step over a static
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
    """Tokens in use, and the first token, of each sequence: (batch,), int32, contiguous; None for
    all, and for 0.

    Raises:
        UserError: `mask` is not one of `lean_mask`.
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
    """Whether a mask of lengths is that of layers whose window hides tokens."""
    return mask.shape[2] == 2


def dense_mask(
    mask: torch.Tensor, q_length: int, kv_length: int, window: int | None
) -> torch.Tensor:
    """What lengths and a window stand for: (batch, 1, q_length, kv_length), bool, True where a
    query token sees one of the cache.
    """
    lengths, starts = lengths_of(mask)
    assert lengths is not None
    tokens = torch.arange(kv_length, device=mask.device)
    places = lengths[:, None] - q_length + torch.arange(q_length, device=mask.device)
    seen = tokens <= places[..., None]
    if starts is not None:
        seen &= tokens >= starts[:, None, None]
    if window is not None:
        seen &= tokens > places[..., None] - window
    return seen[:, None]


def _lengths_say_it(
    local_size: int | None, use_vmap: bool, config: Any, options: dict[str, Any]
) -> bool:
    """Whether the mask is causal, with a window or without, and no more than that."""
    if use_vmap or "allow_is_bidirectional_skip" in options:
        return False
    # Another size is that of chunked attention.
    return local_size is None or local_size == getattr(config, "sliding_window", None)


# Not the cached function itself: dynamo would trace it, and so read files.
@torch.compiler.assume_constant_result
def _computes_attention(configuration: str) -> bool:
    """Whether a model adds masks to scores of its own, by the module that defines its config."""
    return _traits_of(configuration)[0]


@torch.compiler.assume_constant_result
def _edits_masks(configuration: str) -> bool:
    """Whether a model makes its own masks from what it is given, and so needs them in memory."""
    return _traits_of(configuration)[1]


@cache
def _traits_of(configuration: str) -> tuple[bool, bool]:
    """Whether a model computes attention itself, and whether it edits masks, by the source of the
    modeling module beside the config's; neither of models from elsewhere.

    transformers reads it, too, before it changes a model's `attn_implementation`, but takes any
    that a model is made with.
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
    """The first token of each sequence among those in the cache; None: 0 of all."""
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
    """Whether `causal` alone says what the query tokens see."""
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
    """A static cache of a window counts on the host: a graph would replay the length and the tokens
    dropped of its capture.
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
