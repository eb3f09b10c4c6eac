"""Parameters of lean.cu for appended tokens and rotary tables."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from leanbench.kernels.lean.cuda_build import CudaBuild
from leanbench.kernels.lean.cuda_params import Params

if TYPE_CHECKING:
    from leanbench.core.inputs import AttentionInputs


def with_append(build: CudaBuild, inputs: AttentionInputs) -> CudaBuild:
    """Return the build for a call that may append."""
    if inputs.k_new is None:
        return build
    if inputs.rotary_cos is None:
        return replace(build, append=1)
    rotary_dim, interleaved = 2 * inputs.rotary_cos.shape[1], int(inputs.rotary_interleaved)
    return replace(build, append=1, rotary_dim=rotary_dim, interleaved=interleaved)


def pass_append(params: Params, inputs: AttentionInputs) -> None:
    """Set the fields of `params` for appended tokens, except pointers."""
    params.new_tokens = inputs.new_tokens
    for name, new in (("k", inputs.k_new), ("v", inputs.v_new)):
        if new is not None:
            for step, stride in zip(("batch", "token", "head"), new.stride(), strict=False):
                setattr(params, f"stride_{name}_new_{step}", stride)
    if inputs.rotary_cos is not None:
        params.rotary_positions = inputs.rotary_cos.shape[0]
        # Without a causal mask or a window, all query tokens rotate by the position of the first,
        # as in flash-attn.
        is_local = inputs.most_behind >= 0 or inputs.window_right >= 0
        params.rotary_step = int(inputs.causal or is_local)
