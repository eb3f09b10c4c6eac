"""Definitions of FlashInfer-Bench: inputs and outputs of a call, and the axes that they fix.

FlashInfer's own are `gqa_paged` (a paged cache, kv_indptr and kv_indices), `mla_paged` and
`single_decode`. `gqa_contiguous` is a contiguous cache of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from leanbench.core.problem import AttentionProblem
from leanbench.core.strict_json import short_json
from leanbench.formats import sources

#: dtypes of Q and the output, and further ones of a cache.
DTYPES = {"float16": "fp16", "bfloat16": "bf16"}
FP8_DTYPES = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}
_PAGED_CONSTRAINTS = ["len_indptr == batch_size + 1", "num_kv_indices == kv_indptr[-1].item()"]
_NAMES = {ours: theirs for theirs, ours in DTYPES.items()}
#: Axes of definitions with a contiguous and with a paged cache. The latter has lengths in tensors.
_CONTIGUOUS = {"dtype", "kv_layout", "capacity", "lengths", "lengths_on"}
_PAGED = {"dtype", "kv_layout", "page_size", "lengths", "lengths_on"}

#: Tensors by name.
_Inputs = Mapping[str, Mapping[str, Any]]

_DESCRIPTIONS = {
    "batch_size": "Sequences, one query token each.",
    "num_qo_heads": "Query heads.",
    "num_kv_heads": "KV heads, each for num_qo_heads / num_kv_heads query heads.",
    "head_dim": "Numbers of a head.",
    "num_pages": "Pages of the cache.",
    "page_size": "Tokens of a page.",
    "len_indptr": "batch_size + 1.",
    "num_kv_indices": "Pages of all sequences together.",
    "capacity": "Tokens that the cache has room for, of each sequence.",
    "q": "Query tokens, the last of their sequences.",
    "k_cache": "Keys.",
    "v_cache": "Values.",
    "kv_indptr": "Where a sequence's pages begin in kv_indices.",
    "kv_indices": "Pages of the sequences, one sequence after the other.",
    "kv_last_page_len": "Tokens in the last page of each sequence.",
    "cache_seqlens": "Tokens of each sequence; one number where all have as many.",
    "sm_scale": "What scores are multiplied by before the softmax, 1 / sqrt(head_dim).",
    "output": "Attention output.",
    "lse": "Logarithm to base 2 of the sum of the exponentials of the scores.",
}


class NoDecode(ValueError):
    """A definition without decode attention that leanbench has axes for."""


def can_be_defined(problem: AttentionProblem) -> bool:
    """Return True for one query token a sequence over a contiguous cache, or over a paged one with
    lengths on the device, without window, bias or the like.
    """
    if problem.page_size is None:
        return not problem.special.keys() - _CONTIGUOUS
    return problem.lengths_on == "device" and not problem.special.keys() - _PAGED


def definition_of(problem: AttentionProblem) -> dict[str, Any]:
    """Return the definition of a problem; see `can_be_defined`."""
    paged = problem.page_size is not None
    inputs = _inputs(problem)
    query = ["batch_size", "num_qo_heads", "head_dim"]
    return {
        "name": _name(problem),
        "op_type": "gqa_paged" if paged else "gqa_contiguous",
        "description": f"Decode attention of one query token a sequence over a"
        f" {'paged' if paged else 'contiguous'} KV cache, {problem.kv_layout}.",
        "tags": ["stage:decode", "from:leanbench"],
        "axes": {name: {**axis, **_described(name)} for name, axis in _axes(problem).items()},
        "constraints": _PAGED_CONSTRAINTS if paged else [],
        "inputs": inputs,
        "outputs": {
            "output": _tensor("output", query, _NAMES[problem.dtype]),
            "lse": _tensor("lse", query[:2], "float32"),
        },
        "reference": sources.reference(list(inputs), problem),
    }


def _name(problem: AttentionProblem) -> str:
    """Return a name like those of FlashInfer-Bench. Differences from bf16, NHD and lengths in
    tensors come last.
    """
    differs = {
        problem.dtype: problem.dtype != "bf16",
        problem.kv_layout.lower(): problem.kv_layout != "NHD",
        "uniform": problem.lengths_on == "host",
    }
    size = [f"h{problem.q_heads}", f"kv{problem.kv_heads}", f"d{problem.head_dim}"]
    size += [] if problem.page_size is None else [f"ps{problem.page_size}"]
    kind = "gqa_decode" if problem.page_size is None else "gqa_paged_decode"
    return "_".join([kind, *size, *(word for word, does in differs.items() if does)])


def _axes(problem: AttentionProblem) -> dict[str, dict[str, Any]]:
    consts = {
        "num_qo_heads": problem.q_heads,
        "num_kv_heads": problem.kv_heads,
        "head_dim": problem.head_dim,
    }
    variables = ["batch_size", "capacity"]
    if problem.page_size is not None:
        consts["page_size"] = problem.page_size
        variables = ["batch_size", "num_pages", "len_indptr", "num_kv_indices"]
    constants = {name: {"type": "const", "value": value} for name, value in consts.items()}
    return {**{name: {"type": "var"} for name in variables}, **constants}


def _inputs(problem: AttentionProblem) -> dict[str, Any]:
    """Return the inputs in the order of `run`."""
    dtype = _NAMES[problem.dtype]
    rows, tokens = (
        ("num_pages", "page_size") if problem.page_size is not None else ("batch_size", "capacity")
    )
    cache = [rows, tokens, "num_kv_heads", "head_dim"]
    if problem.kv_layout == "HND":
        cache[1:3] = reversed(cache[1:3])
    on_device = problem.lengths_on == "device"
    lengths: dict[str, list[str] | None] = {"cache_seqlens": ["batch_size"] if on_device else None}
    if problem.page_size is not None:
        lengths = {"kv_indptr": ["len_indptr"], "kv_indices": ["num_kv_indices"]}
        # As in the datasets: a page of one token is full.
        lengths |= {"kv_last_page_len": ["batch_size"]} if problem.page_size > 1 else {}
    return {
        "q": _tensor("q", ["batch_size", "num_qo_heads", "head_dim"], dtype),
        "k_cache": _tensor("k_cache", cache, dtype),
        "v_cache": _tensor("v_cache", cache, dtype),
        **{name: _tensor(name, shape, "int32") for name, shape in lengths.items()},
        "sm_scale": _tensor("sm_scale", None, "float32"),
    }


def _tensor(name: str, shape: list[str] | None, dtype: str) -> dict[str, Any]:
    return {"shape": shape, "dtype": dtype, **_described(name)}


def _described(name: str) -> dict[str, str]:
    return {"description": _DESCRIPTIONS[name]}


def read_axes(definition: Any) -> dict[str, tuple[Any, ...]]:
    """Read the axes that a definition fixes, without batch, lengths and capacity.

    Optional inputs count as not given. The rest is not read: FLASHINFER_TRACE_DUMP writes
    references without a `run`, and unknown dtypes.

    Raises:
        NoDecode: It is something else, or no axis describes it.
        ValueError: It is no definition.
    """
    inputs, consts = _parts(definition)
    if {"q_nope", "q_pe", "ckv_cache", "kpe_cache"} <= inputs.keys():
        return _read_latent(inputs, consts)
    if inputs.keys() == {"q", "k", "v"} and _shape(inputs, "k")[:1] == ["kv_len"]:
        return _read_single(inputs, consts)
    if not {"q", "k_cache", "v_cache"} <= inputs.keys():
        raise NoDecode("its inputs are not those of gqa_paged, mla_paged or single_decode")
    lengths = {"kv_indptr", "kv_indices", "kv_last_page_len", "cache_seqlens"}
    _refuse_others(inputs, {"q", "k_cache", "v_cache", "sm_scale", *lengths})
    query = _shape(inputs, "q")
    if query != ["batch_size", "num_qo_heads", "head_dim"]:
        raise NoDecode(f"its q is {short_json(query)}, not one query token a sequence")
    cache = _shape(inputs, "k_cache")
    rows, tokens = (
        ("num_pages", "page_size") if "page_size" in cache else ("batch_size", "capacity")
    )
    layouts = {
        "NHD": [rows, tokens, "num_kv_heads", "head_dim"],
        "HND": [rows, "num_kv_heads", tokens, "head_dim"],
    }
    layout = next((name for name, shape in layouts.items() if shape == cache), None)
    if layout is None or _shape(inputs, "v_cache") != cache:
        shapes = map(short_json, (cache, _shape(inputs, "v_cache")))
        raise NoDecode(f"its caches are {' and '.join(shapes)}")
    one_length = "cache_seqlens" in inputs and not _shape(inputs, "cache_seqlens")
    axes = {
        "heads": ((_const(consts, "num_qo_heads"), _const(consts, "num_kv_heads")),),
        "head_dim": (_const(consts, "head_dim"),),
        "kv_layout": (layout,),
        "page_size": (_const(consts, "page_size") if tokens == "page_size" else None,),
        "lengths_on": ("host" if one_length else "device",),
    }
    return {**axes, **_read_dtypes(inputs, "q", "k_cache")}


def _read_single(inputs: _Inputs, consts: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Read a single sequence, with the length of its tensors."""
    return {
        "heads": ((_const(consts, "num_qo_heads"), _const(consts, "num_kv_heads")),),
        "head_dim": (_const(consts, "head_dim"),),
        "batch": (1,),
        "kv_layout": ("NHD",),
        **_read_dtypes(inputs, "q", "k"),
    }


def _read_latent(inputs: _Inputs, consts: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Read multi-head latent attention: columns of V and K, then columns of K alone."""
    lengths = {"kv_indptr", "kv_indices", "kv_last_page_len"}
    _refuse_others(inputs, {"q_nope", "q_pe", "ckv_cache", "kpe_cache", "sm_scale", *lengths})
    if _shape(inputs, "q_nope")[:1] != ["batch_size"]:
        shape = short_json(_shape(inputs, "q_nope"))
        raise NoDecode(f"its q_nope is {shape}, not one query token a sequence")
    value_dim = _const(consts, "head_dim_ckv")
    return {
        "heads": ((_const(consts, "num_qo_heads"), 1),),
        "head_dim": (value_dim + _const(consts, "head_dim_kpe"),),
        "v_head_dim": (value_dim,),
        "latent": (True,),
        "page_size": (_const(consts, "page_size"),),
        "lengths_on": ("device",),
        **_read_dtypes(inputs, "q_nope", "ckv_cache"),
    }


def _parts(definition: Any) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Return inputs by name, and values of constant axes."""
    inputs = definition.get("inputs") if isinstance(definition, dict) else None
    axes = definition.get("axes") if isinstance(definition, dict) else None
    if not isinstance(inputs, dict) or not isinstance(axes, dict):
        raise ValueError("it has no inputs and axes")
    if not all(isinstance(part, dict) for part in (*inputs.values(), *axes.values())):
        raise ValueError("an input or an axis is no object")
    return inputs, {name: axis.get("value") for name, axis in axes.items()}


def _const(consts: Mapping[str, Any], name: str) -> int:
    value = consts.get(name)
    if type(value) is not int:
        raise NoDecode(f"its axis {name} is {short_json(value)}, not a whole number")
    return value


def _shape(inputs: _Inputs, name: str) -> list[str]:
    shape = inputs[name].get("shape")
    return shape if isinstance(shape, list) else []


def _refuse_others(inputs: _Inputs, known: set[str]) -> None:
    needed = {name for name, tensor in inputs.items() if not tensor.get("optional")}
    if others := sorted(needed - known):
        raise NoDecode(f"it takes {', '.join(others)}, which no axis describes")


def _read_dtypes(inputs: _Inputs, q: str, cache: str) -> dict[str, tuple[Any, ...]]:
    of_q, of_cache = (_words(inputs[name].get("dtype")) for name in (q, cache))
    if of_q not in DTYPES:
        raise NoDecode(f"its {q} is {of_q}, not {' or '.join(DTYPES)}")
    if of_cache in FP8_DTYPES:
        # No input has scales.
        return {"dtype": (DTYPES[of_q],), "kv_dtype": (FP8_DTYPES[of_cache],), "scaled": (False,)}
    if of_cache != of_q:
        raise NoDecode(f"its {cache} is {of_cache} and its {q} {of_q}")
    return {"dtype": (DTYPES[of_q],)}


def _words(value: object) -> str:
    """Return text as it is, and anything else as JSON."""
    return value if isinstance(value, str) else short_json(value)
