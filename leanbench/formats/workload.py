"""Workloads of FlashInfer-Bench: the batch and the lengths of one call, with its index tensors in a
safetensors file.
"""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from leanbench.core.lengths import write_lengths
from leanbench.core.problem import AttentionProblem
from leanbench.formats.safetensors import read_integers

#: In which names of workloads are unique; the same problem has the same name everywhere.
_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_URL, "leanbench")
#: Where a dataset keeps the tensors of workloads.
_BLOBS = "blob/workloads"

#: Descriptions of inputs by name.
_Inputs = Mapping[str, Mapping[str, Any]]


def workload_of(problem: AttentionProblem, definition: Mapping[str, Any]) -> dict[str, Any]:
    """The workload of a problem, whose tensors `index_tensors` are in the file of `blob_path`."""
    identity = json.dumps(problem.to_dict(), sort_keys=True)
    name = str(uuid.uuid5(_NAMESPACE, identity))
    blob = blob_path(definition, name)
    tensors = index_tensors(problem)

    scalars = {"sm_scale": problem.head_dim**-0.5, "cache_seqlens": problem.max_context}

    def described(tensor: str) -> dict[str, Any]:
        if definition["inputs"][tensor]["shape"] is None:
            return {"type": "scalar", "value": scalars[tensor]}
        if tensor in tensors:
            return {"type": "safetensors", "path": blob, "tensor_key": tensor}
        return {"type": "random"}

    return {
        "uuid": name,
        "axes": _axes(problem),
        "inputs": {tensor: described(tensor) for tensor in definition["inputs"]},
    }


def blob_path(definition: Mapping[str, Any], name: str) -> str:
    """The file of a workload's tensors in its dataset."""
    folder = f"{_BLOBS}/{definition['op_type']}/{definition['name']}"
    return f"{folder}/{definition['name']}_{name}.safetensors"


def _axes(problem: AttentionProblem) -> dict[str, int]:
    if problem.page_size is None:
        return {"batch_size": problem.batch, "capacity": problem.cache_capacity}
    pages = sum(problem.page_counts)
    return {
        "batch_size": problem.batch,
        "num_pages": pages,
        "len_indptr": problem.batch + 1,
        "num_kv_indices": pages,
    }


def index_tensors(problem: AttentionProblem) -> dict[str, list[int]]:
    """What tells a call the lengths of its sequences, and in a paged cache where they are: pages in
    random order, as `leanbench.core.inputs` deals them.
    """
    if problem.page_size is None:
        return {"cache_seqlens": list(problem.contexts)} if problem.lengths_on == "device" else {}
    pages = list(range(sum(problem.page_counts)))
    random.Random(0).shuffle(pages)
    tensors = {"kv_indptr": [0, *accumulate(problem.page_counts)], "kv_indices": pages}
    if problem.page_size > 1:
        tensors["kv_last_page_len"] = [
            (context - 1) % problem.page_size + 1 for context in problem.contexts
        ]
    return tensors


def read_lengths(workload: Any, page_size: int | None, root: Path) -> dict[str, tuple[Any, ...]]:
    """The axes of a sweep that a workload fixes: lengths, which say the batch, and capacity. Where
    index tensors are random, as in workloads made of logs, pages are dealt evenly, and the last one
    is full.

    Args:
        root: the dataset's folder, which paths of tensors begin in.

    Raises:
        ValueError: it is no workload of a decode call, a file of tensors cannot be read, or a
            sequence has no token.
    """
    axes = workload.get("axes") if isinstance(workload, dict) else None
    inputs = workload.get("inputs") if isinstance(workload, dict) else None
    if not isinstance(axes, dict) or not isinstance(inputs, dict):
        raise ValueError("it has no axes and inputs")
    given = {name: tensor for name, tensor in inputs.items() if isinstance(tensor, dict)}
    batch = _count("axis batch_size", axes.get("batch_size"))
    if page_size is None:
        capacity = _count("axis capacity", axes.get("capacity"))
        lengths = _contiguous(given, batch, capacity, root)
    else:
        capacity = None
        pages = _count("axis num_kv_indices", axes.get("num_kv_indices"))
        lengths = _paged(given, batch, pages, page_size, root)
    if len(lengths) != batch:
        raise ValueError(f"it has a batch of {batch} and {len(lengths)} lengths")
    if min(lengths) < 1:
        raise ValueError("a sequence has no token")
    return {"lengths": (write_lengths(tuple(lengths)),), "capacity": (capacity,)}


def _contiguous(given: _Inputs, batch: int, capacity: int, root: Path) -> Sequence[int]:
    """Tokens of each sequence; as many as there is room for where nothing says them."""
    one = given.get("cache_seqlens", {}).get("value", capacity)
    return _tensor(given, "cache_seqlens", root) or [_count("cache_seqlens", one)] * batch


def _paged(given: _Inputs, batch: int, pages: int, page_size: int, root: Path) -> Sequence[int]:
    even = [pages * sequence // batch for sequence in range(batch + 1)]
    starts = _tensor(given, "kv_indptr", root) or even
    last = _tensor(given, "kv_last_page_len", root) or [page_size] * (len(starts) - 1)
    return [
        (end - start - 1) * page_size + tokens
        for (start, end), tokens in zip(pairwise(starts), last, strict=False)
    ]


def _count(name: str, value: object) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"its {name} is {value!r}, not a number from 1 on")
    return value


def _tensor(given: _Inputs, name: str, root: Path) -> Sequence[int] | None:
    """Its numbers; None where they are random or not given."""
    tensor = given.get(name, {})
    if tensor.get("type") != "safetensors":
        return None
    path = root / str(tensor.get("path"))
    try:
        return read_integers(path.read_bytes(), str(tensor.get("tensor_key")))
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ValueError(
            f"{path}, which has its {name}, cannot be read ({reason}): fetch the dataset's blob"
            " folder, too"
        ) from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
