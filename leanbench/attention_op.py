"""The operator under `lean_attn_with_kvcache`: `torch.ops.leanbench.lean_attn_with_kvcache`.

Graphs that torch traces hold it as one node: shapes are checked while they are traced, settings are
chosen and the kernel is launched when they run.
"""

from __future__ import annotations

import os
import warnings
from functools import lru_cache

import torch

from leanbench.configs.lookup import State, choose, state
from leanbench.core.config import TAG, Switch, Words, limits, read_config
from leanbench.core.errors import UserError
from leanbench.core.inputs import AttentionInputs
from leanbench.core.problem import HEAD_DIMS, MAX_Q_LEN, PAGE_SIZES, AttentionProblem
from leanbench.core.registry import kernel
from leanbench.kernels.launch import spec_of
from leanbench.kernels.lean.configs import LEAN_CONFIGS, LeanConfig

_DTYPE_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16"}


@torch.library.custom_op("leanbench::lean_attn_with_kvcache", mutates_args=())
def attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cache_seqlens: torch.Tensor | None,
    length: int | None,
    block_table: torch.Tensor | None,
    softmax_scale: float | None,
    causal: bool,
    batch_invariant: bool,
    config: list[int] | None,
    implementation: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE; arguments and errors as in leanbench.attention.

    Args:
        cache_seqlens: a tensor, or None for what `length` says.
        length: tokens in use of every sequence; None: all.
        config: with `implementation` what `taken_apart` made of a LeanConfig; None: the default.
    """
    _check(q, k_cache, v_cache, cache_seqlens, block_table, causal)
    capacity = _cache_capacity(k_cache, block_table)
    # Not while a call is traced, where neither may be known.
    if length is not None and not 0 <= length <= capacity:
        raise ValueError(f"cache_seqlens {length} is outside the cache's 0 to {capacity} tokens")
    if q.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise UserError(
            f"the tensors are on {q.device}: move them to a GPU, or set TRITON_INTERPRET=1 before"
            " triton is imported to try it there"
        )
    out, lse = _outputs(q)
    inputs = AttentionInputs(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        cache_seqlens=cache_seqlens,
        context=capacity if length is None else length,
        softmax_scale=q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale,
        out=out,
        lse=lse,
        block_table=block_table,
    )
    if config is None or implementation is None:
        _launch_chosen(inputs, *_chosen(inputs, batch_invariant))
    else:
        _launch(inputs, _put_together(tuple(config), implementation))
    return out, lse


@attend.register_fake
def _(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cache_seqlens: torch.Tensor | None,
    length: int | None,
    block_table: torch.Tensor | None,
    softmax_scale: float | None,
    causal: bool,
    batch_invariant: bool,
    config: list[int] | None,
    implementation: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    _check(q, k_cache, v_cache, cache_seqlens, block_table, causal)
    return _outputs(q)


def _outputs(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    batch, q_len, q_heads, _ = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    return out, torch.empty(batch, q_heads, q_len, dtype=torch.float32, device=q.device)


#: By implementation: what its settings take, by name.
_LIMITS = {str(config_type.implementation): limits(config_type) for config_type in LEAN_CONFIGS}
#: Places of the words that settings may be.
_PLACES = {
    word: place
    for named in _LIMITS.values()
    for limit in named.values()
    if isinstance(limit, Words)
    for place, word in enumerate(limit.words)
}


def taken_apart(config: LeanConfig | None) -> tuple[list[int] | None, str | None]:
    """The config as an operator can take it: its values as numbers in the order of its fields, and
    its implementation; (None, None) for the default.
    """
    # All of it in one string would not do: where torch.compile makes symbols of sizes, it makes
    # them of these numbers.
    if config is None or config.implementation is None:
        return None, None
    values = [getattr(config, name) for name in _LIMITS[config.implementation]]
    numbers = [_PLACES[value] if isinstance(value, str) else int(value) for value in values]
    return numbers, config.implementation


@lru_cache(maxsize=1024)
def _put_together(numbers: tuple[int, ...], implementation: str) -> LeanConfig:
    values: dict[str, int | bool | str] = {}
    for (name, limit), number in zip(_LIMITS[implementation].items(), numbers, strict=True):
        match limit:
            case Words(words):
                values[name] = words[number]
            case Switch():
                values[name] = bool(number)
            case _:
                values[name] = number
    return read_config(LEAN_CONFIGS, {TAG: implementation, **values})


def _cache_capacity(k_cache: torch.Tensor, block_table: torch.Tensor | None) -> int:
    """Tokens that the cache holds for each sequence at most."""
    return k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])


def _check(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cache_seqlens: torch.Tensor | None,
    block_table: torch.Tensor | None,
    causal: bool,
) -> None:
    _check_tensors(q, k_cache, v_cache, block_table)
    if q.shape[1] > 1 and not causal:
        raise NotImplementedError(
            f"q has {q.shape[1]} tokens per sequence and causal is False, only a causal mask is"
            " supported: pass causal=True"
        )
    if cache_seqlens is not None:
        _check_lengths(cache_seqlens, q)


def _check_tensors(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor | None
) -> None:
    caches = (
        "(batch, tokens, kv_heads, head_dim)"
        if block_table is None
        else "(pages, page_size, kv_heads, head_dim)"
    )
    if (
        q.dim() != 4
        or k_cache.dim() != 4
        or v_cache.shape != k_cache.shape
        or 0 in (*q.shape, *k_cache.shape)
    ):
        raise ValueError(
            f"q is {tuple(q.shape)}, k_cache {tuple(k_cache.shape)}, v_cache"
            f" {tuple(v_cache.shape)}: expected (batch, q_len, q_heads, head_dim) and twice"
            f" {caches}, no size 0"
        )
    if q.shape[1] > MAX_Q_LEN:
        raise NotImplementedError(
            f"q has {q.shape[1]} tokens per sequence, at most {MAX_Q_LEN} are supported: pass fewer"
            " at a time"
        )
    if block_table is not None:
        _check_pages(block_table, q, k_cache.shape[1])
    elif q.shape[0] != k_cache.shape[0]:
        raise ValueError(
            f"q {tuple(q.shape)} and k_cache {tuple(k_cache.shape)} must agree in batch"
        )
    if q.shape[3] != k_cache.shape[3] or q.shape[2] % k_cache.shape[2]:
        raise ValueError(
            f"q {tuple(q.shape)} and k_cache {tuple(k_cache.shape)} must agree in head_dim, and"
            " q_heads must be a multiple of kv_heads"
        )
    if q.shape[3] not in HEAD_DIMS:
        raise ValueError(
            f"head_dim {q.shape[3]} is not supported, choose one of"
            f" {', '.join(map(str, HEAD_DIMS))}"
        )
    if q.dtype not in _DTYPE_NAMES or {k_cache.dtype, v_cache.dtype} != {q.dtype}:
        raise ValueError(
            f"q is {q.dtype}, the caches {k_cache.dtype} and {v_cache.dtype}: all fp16 or all bf16,"
            " please"
        )
    if not q.device == k_cache.device == v_cache.device:
        raise ValueError(
            f"q is on {q.device}, the caches on {k_cache.device} and {v_cache.device}: use one"
            " device"
        )
    if q.stride(3) != 1 or k_cache.stride(3) != 1 or v_cache.stride(3) != 1:
        raise ValueError(
            f"the last strides of q and of the caches are {q.stride(3)}, {k_cache.stride(3)} and"
            f" {v_cache.stride(3)}: head_dim must be contiguous, its stride 1"
        )


def _check_pages(block_table: torch.Tensor, q: torch.Tensor, page_size: int) -> None:
    if page_size not in PAGE_SIZES:
        raise ValueError(
            f"the caches have pages of {page_size} tokens: choose one of"
            f" {', '.join(map(str, PAGE_SIZES))}, or leave block_table out"
        )
    if (
        block_table.dim() != 2
        or block_table.shape[0] != q.shape[0]
        or block_table.shape[1] == 0
        or block_table.dtype != torch.int32
        or not block_table.is_contiguous()
    ):
        raise ValueError(
            f"block_table is {tuple(block_table.shape)} {block_table.dtype}: expected"
            f" ({q.shape[0]}, pages of a sequence) contiguous torch.int32"
        )
    if block_table.device != q.device:
        raise ValueError(f"block_table is on {block_table.device}, q on {q.device}: move it there")


def _check_lengths(cache_seqlens: torch.Tensor, q: torch.Tensor) -> None:
    if (
        cache_seqlens.shape != q.shape[:1]
        or cache_seqlens.dtype != torch.int32
        or not cache_seqlens.is_contiguous()
    ):
        raise ValueError(
            f"cache_seqlens is {tuple(cache_seqlens.shape)} {cache_seqlens.dtype}: expected"
            f" ({q.shape[0]},) contiguous torch.int32"
        )
    if cache_seqlens.device != q.device:
        raise ValueError(
            f"cache_seqlens is on {cache_seqlens.device}, q on {q.device}: move it there"
        )


def _chosen(inputs: AttentionInputs, batch_invariant: bool) -> tuple[LeanConfig, LeanConfig]:
    batch, q_len, q_heads, head_dim = inputs.q.shape
    _, token_stride, head_stride, _ = inputs.k_cache.stride()
    return _default_config(
        batch,
        q_heads,
        inputs.kv_heads,
        inputs.context,
        head_dim,
        _DTYPE_NAMES[inputs.q.dtype],
        # HND: a head's tokens lie next to each other.
        "HND" if head_stride > token_stride else "NHD",
        q_len,
        inputs.page_size,
        inputs.cache_seqlens is None,
        batch_invariant,
        inputs.q.device,
        state(),
    )


@lru_cache(maxsize=4096)
def _default_config(
    batch: int,
    q_heads: int,
    kv_heads: int,
    context: int,
    head_dim: int,
    dtype: str,
    kv_layout: str,
    q_len: int,
    page_size: int | None,
    uniform: bool,
    batch_invariant: bool,
    device: torch.device,
    state: State,
) -> tuple[LeanConfig, LeanConfig]:
    """The settings to use, and the heuristic's.

    Args:
        state: what was chosen before is out of date when it changes.
    """
    problem = AttentionProblem(
        batch, q_heads, kv_heads, max(1, context), head_dim, dtype, kv_layout, q_len, page_size
    )
    if batch_invariant:
        config = kernel("lean").batch_invariant_config(problem, spec_of(device))
        assert config is not None
        return config, config
    lean, spec = kernel("lean"), spec_of(device)
    config = choose(lean, problem, spec, uniform=uniform).config
    heuristic = (lean.default_config if uniform else lean.any_length_config)(problem, spec)
    assert config is not None
    assert heuristic is not None
    return config, heuristic


def _launch(inputs: AttentionInputs, config: LeanConfig) -> None:
    device = inputs.q.device
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        kernel("lean").prepare(inputs, config)()
        return
    # Triton launches on the current device.
    with torch.cuda.device(device):
        kernel("lean").prepare(inputs, config)()


def _launch_chosen(inputs: AttentionInputs, config: LeanConfig, heuristic: LeanConfig) -> None:
    """Tuned settings were timed with the compiler and on the GPU of their day: where they do not
    fit any more, the heuristic's run.
    """
    if config in _refused:
        config = heuristic
    try:
        _launch(inputs, config)
    except Exception as error:
        if config == heuristic or type(error).__name__ not in ("OutOfResources", "DoesNotFit"):
            raise
        _refused.add(config)
        reason = str(error).partition("\n")[0]
        warnings.warn(
            f"tuned settings do not fit any more ({reason}), the heuristic's are used: tune again",
            stacklevel=2,
        )
        _launch(inputs, heuristic)


#: Tuned settings that did not fit this GPU.
_refused: set[LeanConfig] = set()
