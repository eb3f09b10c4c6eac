"""Arguments of a call beyond plain decode, in one object."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from leanbench.core.kinds import FP8_DTYPES, NO_PAGE_SCALES, SAME

if TYPE_CHECKING:
    import torch

    from leanbench.core.inputs import AttentionInputs


class Extras(NamedTuple):
    """Fields of AttentionInputs that a plain call leaves at their defaults. A plain call has None
    instead of this object.
    """

    k_new: torch.Tensor | None = None
    v_new: torch.Tensor | None = None
    rotary_cos: torch.Tensor | None = None
    rotary_sin: torch.Tensor | None = None
    cache_batch_idx: torch.Tensor | None = None
    cache_leftpad: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    q_descale: torch.Tensor | None = None
    k_descale: torch.Tensor | None = None
    v_descale: torch.Tensor | None = None
    k_page_descale: torch.Tensor | None = None
    v_page_descale: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k_new: torch.Tensor | None = None
    rotary_seqlens: torch.Tensor | None = None
    prior: torch.Tensor | None = None
    prior_lse: torch.Tensor | None = None
    max_seqlen_q: int | None = None
    window_left: int = -1
    window_right: int = -1
    attention_chunk: int = 0
    #: An int by default: torch.compile recompiles for expressions of a float.
    softcap: float = 0
    rotary_interleaved: bool = False
    prior_tokens: int = 0

    @property
    def new_tokens(self) -> int:
        """Tokens appended to every sequence; 0 if `cu_seqlens_k_new` has the numbers."""
        if self.k_new is None or self.cu_seqlens_k_new is not None:
            return 0
        return self.k_new.shape[1]

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Tensors that are set, by name."""
        named: Any = zip(_TENSORS, self, strict=False)
        return {name: tensor for name, tensor in named if tensor is not None}

    @property
    def asks_nothing(self) -> bool:
        for tensor in self[:EXTRA_TENSORS]:
            if tensor is not None:
                return False
        return self[EXTRA_TENSORS:] == NO_EXTRAS[EXTRA_TENSORS:]


#: Number of tensors, the first fields.
EXTRA_TENSORS = Extras._fields.index("max_seqlen_q")
_TENSORS = Extras._fields[:EXTRA_TENSORS]
NO_EXTRAS = Extras()


def extras_of(inputs: AttentionInputs) -> Extras | None:
    """Return the extras of inputs, or None for a plain call."""
    extras = Extras(*[getattr(inputs, name) for name in Extras._fields])
    return None if extras.asks_nothing else extras


def extra_tensors(inputs: AttentionInputs) -> dict[str, torch.Tensor]:
    """Return the tensors that no plain call has, by name."""
    extras = extras_of(inputs)
    return {} if extras is None else extras.tensors


def kinds_of(inputs: AttentionInputs) -> dict[str, Any]:
    """Return the fields of AttentionProblem that follow from tensors, except their sizes.

    The query lengths of a packed Q are on the device: all count as the longest.
    """
    packed = inputs.cu_seqlens_q is not None
    return {
        "causal": inputs.causal,
        "window_left": inputs.window_left,
        "window_right": inputs.window_right,
        "attention_chunk": inputs.attention_chunk,
        "softcap": inputs.softcap,
        "sinks": inputs.sinks is not None,
        "alibi": inputs.alibi_slopes is not None,
        "leftpad": inputs.cache_leftpad is not None,
        "batch_idx": inputs.cache_batch_idx is not None,
        "append": inputs.new_tokens,
        "rotary_dim": 0 if inputs.rotary_cos is None else 2 * inputs.rotary_cos.shape[1],
        "rotary_interleaved": inputs.rotary_interleaved,
        "kv_dtype": fp8_name(inputs.k_cache.dtype),
        "q_dtype": fp8_name(inputs.q.dtype),
        "v_head_dim": inputs.value_dim,
        "q_lens": (inputs.q_len,) * inputs.batch if packed else None,
        "latent": inputs.latent,
        "page_scales": _page_scales(inputs),
        "row_scales": inputs.row_scales,
    }


def _page_scales(inputs: AttentionInputs) -> str:
    k, v = inputs.k_page_descale, inputs.v_page_descale
    if k is None or v is None:
        return NO_PAGE_SCALES
    return "page" if k.dim() == v.dim() == 1 else "page-head"


@cache
def fp8_name(dtype: torch.dtype) -> str:
    """Return `e4m3` or `e5m2`; `same` for any other dtype, including other fp8 formats (`fnuz`)."""
    name = str(dtype).removeprefix("torch.float8_").removesuffix("fn")
    return name if name in FP8_DTYPES else SAME
