"""All kinds, and a kernel for every kind and size that replaces `lean`: the fp64 reference over the
tensors it gets.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from leanbench.kernels.lean import LEAN
from leanbench.kernels.lean.configs import LeanTritonConfig
from leanbench.kernels.mla import LEAN_MLA
from leanbench.kernels.reference.torch import attend_all

from leanbench.attention import lean_attn_with_kvcache, lean_mla_with_kvcache, mla, prepared, qv
from leanbench.attention.call import Call
from leanbench.attention.checks import check_length
from leanbench.attention.mla_launch import as_attention, check_latent
from leanbench.attention.prepared import PreparedLaunches
from leanbench.check.launches import api_arguments
from leanbench.core.axes import AXES
from leanbench.core.extras import Extras
from leanbench.core.inputs import AttentionInputs
from leanbench.core.problem import AttentionProblem

CONFIG = LeanTritonConfig(32, 4, 2, ctas_per_sm=1, min_tiles_per_cta=1, align_grid=False)
PLAIN = AttentionProblem(2, 4, 2, 40, 64, q_len=3)
KINDS: dict[str, dict[str, Any]] = {
    "not causal": {"causal": False},
    "a window": {"window_left": 7},
    "a window on both sides": {"causal": False, "window_left": 7, "window_right": 1},
    "attention chunks": {"attention_chunk": 16},
    "softcap": {"softcap": 20.0},
    "sinks": {"sinks": True},
    "ALiBi": {"alibi": True},
    "padding": {"leftpad": True},
    "rows of the cache": {"batch_idx": True},
    "appended": {"append": 2},
    "appended to pages": {"append": 2, "page_size": 16, "context": (40, 17)},
    "rotated": {"append": 3, "rotary_dim": 32},
    "rotated neighbours": {"append": 3, "rotary_dim": 32, "rotary_interleaved": True},
    "fp8": {"kv_dtype": "e4m3"},
    "fp8 throughout": {"kv_dtype": "e5m2", "q_dtype": "e4m3", "dtype": "bf16"},
    "scales of pages": {
        "kv_dtype": "e4m3",
        "page_scales": "page",
        "page_size": 16,
        "context": (40, 17),
    },
    "scales of heads of pages, appended to": {
        "kv_dtype": "e5m2",
        "scaled": False,
        "page_scales": "page-head",
        "page_size": 1,
        "context": (40, 17),
        "append": 2,
    },
    "V of another head_dim": {"v_head_dim": 32},
    "packed": {"q_lens": (1, 4)},
    "many at once": {
        "leftpad": True,
        "batch_idx": True,
        "append": 2,
        "rotary_dim": 16,
        "alibi": True,
        "sinks": True,
        "softcap": 9.0,
        "window_left": 11,
    },
}


class Relaunched:
    """A launch of the reference over tensors of the prepared strides."""

    tile_tokens = 32
    any_capacity = False

    def __init__(self, inputs: AttentionInputs) -> None:
        self._scalars = {"softmax_scale": inputs.softmax_scale, "causal": inputs.causal}
        self._strides = [inputs.q.stride(), inputs.k_cache.stride(), inputs.v_cache.stride()]

    def __call__(
        self, q: Any, k: Any, v: Any, lengths: Any, context: Any, table: Any, out: Any, lse: Any,
        extras: Any = None,
    ) -> None:  # fmt: skip
        if not self.any_capacity:
            assert [q.stride(), k.stride(), v.stride()] == self._strides
        asked = {} if extras is None else extras._asdict()
        fields = {"q": q, "k_cache": k, "v_cache": v, "cache_seqlens": lengths, "context": context}
        results = {"block_table": table, "out": out, "lse": lse}
        attend_all(AttentionInputs(**fields, **results, **self._scalars, **asked))


class Launched:
    """A launch that nothing comes of."""

    any_capacity = True
    tile_tokens = 64

    def __call__(self, *tensors: Any) -> None:
        pass


def launch_nothing(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Let `lean` and `lean_mla` launch nothing; return the settings of prepared launches."""
    seen: list[Any] = []

    def relaunch(inputs: AttentionInputs, config: Any) -> Launched:
        seen.append(config)
        return Launched()

    for kernel in (LEAN, LEAN_MLA):
        monkeypatch.setattr(kernel, "relaunch", relaunch)
    monkeypatch.setattr(prepared, "check_latent_launch", lambda call: None)
    monkeypatch.setattr(prepared, "check_runs_on", lambda device: None)
    monkeypatch.setattr(prepared, "_LAUNCHES", PreparedLaunches())
    return seen


def take_every_kind(monkeypatch: pytest.MonkeyPatch) -> list[AttentionInputs]:
    """Replace `lean` by that kernel; return the inputs of prepared launches."""
    seen: list[AttentionInputs] = []

    def relaunch(inputs: AttentionInputs, config: Any) -> Relaunched:
        seen.append(inputs)
        return Relaunched(inputs)

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(LEAN, "relaunch", relaunch)
    monkeypatch.setattr(LEAN, "axes", frozenset(AXES), raising=False)
    monkeypatch.setattr(LEAN, "head_dims", range(8, 584, 8), raising=False)
    monkeypatch.setattr(LEAN, "page_sizes", range(1, 1025), raising=False)
    monkeypatch.setattr(LEAN, "max_q_len", 64, raising=False)
    monkeypatch.setattr(LEAN, "refusal", lambda problem: None)
    monkeypatch.setattr(prepared, "_LAUNCHES", PreparedLaunches())
    return seen


def take_latent_calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Replace `lean_mla` in the same way, for problems of mla.cu; return the calls reaching it."""
    seen: list[Call] = []

    def attend(call: Call, with_lse: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        check_latent(call)
        check_length(call)
        seen.append(call)
        call = as_attention(call)
        out = call.out
        if out is None:
            out = call.q.new_empty(call.out_shape)
        lse = call.q.new_empty(call.lse_shape, dtype=torch.float32)
        scale = call.all_extras.k_descale
        if scale is not None:
            scale = scale.expand(call.batch, 1)
            call = call._replace(extras=Extras(k_descale=scale, v_descale=scale))
        attend_all(call.inputs(out, lse))
        return out, lse if with_lse else None

    monkeypatch.setattr(mla, "attend", attend)
    monkeypatch.setattr(qv, "unavailable_reason", lambda q: None)
    return seen


def latent_called(inputs: AttentionInputs) -> None:
    """Call `lean_mla_with_kvcache` with the inputs."""
    lengths = inputs.context if inputs.cache_seqlens is None else inputs.cache_seqlens
    options = {"block_table": inputs.block_table, "causal": inputs.causal}
    lean_mla_with_kvcache(inputs.q, inputs.k_cache, lengths, **options)


def called(inputs: AttentionInputs, **options: Any) -> Any:
    """Return output and LSE of a call with the features of the inputs."""
    arguments = {**api_arguments(inputs), "config": CONFIG, **options}
    return lean_attn_with_kvcache(inputs.q, inputs.k_cache, inputs.v_cache, **arguments)
