"""What no kernel here takes, refused by name before anything else is said of a call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from leanbench.calls.call import Call
from leanbench.calls.padding import padded_dim
from leanbench.core.extras import Extras, fp8_name
from leanbench.core.kernel import size_choices
from leanbench.core.kinds import SAME
from leanbench.core.problem import AttentionProblem
from leanbench.kernels.lean import LEAN
from leanbench.kernels.lean.cuda_kernel import VALUE_DIMS

#: Of arguments that are tensors: the axis that each asks for.
_AXES = {
    "k": "append",
    "v": "append",
    "rotary_cos": "rotary_dim",
    "rotary_sin": "rotary_dim",
    "cache_batch_idx": "batch_idx",
    "cache_leftpad": "leftpad",
    "alibi_slopes": "alibi",
    "sinks": "sinks",
    "k_page_descale": "page_scales",
    "v_page_descale": "page_scales",
    "cu_seqlens_q": "q_lens",
}
_FIELDS = {"k": "k_new", "v": "v_new"}


def refuse_kinds(call: Call) -> None:
    """Asks the kernel by its `axes` and sizes, whatever else is wrong with the call.

    Raises:
        NotImplementedError: names the argument and its value.
    """
    for axis, argument, fix in _arguments(call):
        if axis not in LEAN.axes:
            raise NotImplementedError(_sentence(argument, fix))
    if call.q.dim() == 0 or call.k_cache.dim() != 4:
        return
    head_dim = padded_dim(int(call.q.shape[-1]), call.k_cache)
    page_size = 0 if call.block_table is None else int(call.k_cache.shape[1])
    if head_dim and head_dim not in LEAN.head_dims:
        fix = _head_dims(head_dim, LEAN.head_dims)
        raise NotImplementedError(_sentence(f"head_dim {call.q.shape[-1]}", fix))
    if call.v_cache.dim() == 4:
        value_dim = padded_dim(int(call.v_cache.shape[3]), call.v_cache)
        if value_dim and value_dim not in VALUE_DIMS:
            dim = f"a v_cache of head_dim {call.v_cache.shape[3]}"
            raise NotImplementedError(_sentence(dim, _head_dims(value_dim, VALUE_DIMS)))
    if page_size and page_size not in LEAN.page_sizes:
        raise NotImplementedError(
            _sentence(
                f"pages of {page_size} tokens",
                f"choose {size_choices(LEAN.page_sizes)}, or leave block_table out",
            )
        )
    if call.q_len > LEAN.max_q_len:
        raise NotImplementedError(
            _sentence(f"{call.q_len} query tokens", f"pass at most {LEAN.max_q_len} at a time")
        )


def _head_dims(given: int, taken: Sequence[int]) -> str:
    """What to choose in place of one."""
    return f"choose {max(taken)} at most" if given > max(taken) else f"choose {size_choices(taken)}"


def refuse_problem(problem: AttentionProblem) -> None:
    """Asks the kernel about the problem of a call whose tensors fit together.

    Raises:
        NotImplementedError: what the kernel says.
    """
    reason = LEAN.unsupported_reason(problem)
    if reason is not None:
        raise NotImplementedError(f"lean_attn_with_kvcache does not support this yet: {reason}")


def _arguments(call: Call) -> Iterator[tuple[str, str, str]]:
    """(axis, argument with its value, what to do instead) of what is not plain."""
    if not call.causal and call.q_len > 1:
        yield (
            "causal",
            f"causal=False with {call.q_len} query tokens per sequence",
            "pass causal=True",
        )
    if call.extras is not None:
        yield from _extra_arguments(call.extras)
    for axis, name, tensor in (("kv_dtype", "k_cache", call.k_cache), ("q_dtype", "q", call.q)):
        if fp8_name(tensor.dtype) != SAME:
            yield axis, f"a {name} of {tensor.dtype}", "pass fp16 or bf16"
    k_cache, v_cache = call.k_cache, call.v_cache
    if k_cache.dim() == v_cache.dim() == 4 and k_cache.shape[3] != v_cache.shape[3]:
        dims = f"{v_cache.shape[3]} beside a k_cache of {k_cache.shape[3]}"
        yield "v_head_dim", f"a v_cache of head_dim {dims}", "pass caches of one head_dim"


def _extra_arguments(extras: Extras) -> Iterator[tuple[str, str, str]]:
    window = f"window_size=({extras.window_left}, {extras.window_right})"
    for axis in ("window_left", "window_right"):
        if getattr(extras, axis) >= 0:
            yield axis, window, "leave it at its default, (-1, -1)"
    if extras.attention_chunk:
        chunk = f"attention_chunk={extras.attention_chunk}"
        yield "attention_chunk", chunk, "leave it at its default, 0"
    if extras.softcap:
        yield "softcap", f"softcap={extras.softcap}", "leave it at its default, 0.0"
    for argument, axis in _AXES.items():
        if getattr(extras, _FIELDS.get(argument, argument)) is not None:
            yield axis, f"a {argument} tensor", "leave it at its default, None"
    if extras.rotary_cos is not None and extras.rotary_interleaved:
        yield "rotary_interleaved", "rotary_interleaved=True", "pass rotary_interleaved=False"


def _sentence(argument: str, fix: str) -> str:
    return f"lean_attn_with_kvcache does not support {argument} yet: {fix}"
