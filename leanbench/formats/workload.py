"""Workloads of FlashInfer-Bench: batch and lengths of a call, with index tensors in a file."""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from leanbench.core.errors import short
from leanbench.core.files import FileFault, UnreadableFile, read_file, short_json
from leanbench.core.lengths import MAX_SEQUENCES
from leanbench.core.problem import AttentionProblem
from leanbench.formats.safetensors import read_integers

#: Namespace of workloads. Equal problems have equal names.
_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_URL, "leanbench")
#: Folder of tensors in a dataset.
_BLOBS = "blob/workloads"
_BLOB_MB = 500


def workload_of(problem: AttentionProblem, definition: Mapping[str, Any]) -> dict[str, Any]:
    """Return the workload of a problem. The file at `blob_path` has its `index_tensors`."""
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
    """Return the file of a workload's tensors in its dataset."""
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
    """Return the lengths of a call, and the pages in random order like `leanbench.core.inputs`."""
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


def read_workload(
    workload: Any, definition: Mapping[str, tuple[Any, ...]], root: Path
) -> dict[str, tuple[Any, ...]]:
    """Read the axes that a workload fixes: lengths of the sequences, and capacity.

    Index tensors can be random. Pages are then dealt evenly, and the last one is full.

    Args:
        definition: Axes of the definition.
        root: Folder of the dataset.

    Raises:
        ValueError: It is no workload of decode attention, or a file cannot be read.
    """
    axes = workload.get("axes") if isinstance(workload, dict) else None
    inputs = workload.get("inputs") if isinstance(workload, dict) else None
    if not isinstance(axes, dict) or not isinstance(inputs, dict):
        raise ValueError("it has no axes and inputs")
    given = _Given(axes, inputs, root)
    capacity = None
    if "batch" in definition:
        # A single sequence: the cache has its length.
        lengths = [given.count("kv_len")]
    elif definition["page_size"] == (None,):
        capacity = given.count("capacity")
        lengths = _contiguous(given, capacity, is_uniform=definition["lengths_on"] == ("host",))
    else:
        lengths = _paged(given, *definition["page_size"])
    if min(lengths) < 1:
        raise ValueError("a sequence has no token")
    return {"lengths": (tuple(lengths),), "capacity": (capacity,)}


@dataclass(frozen=True)
class _Given:
    """Numbers of axes and inputs of a workload."""

    axes: Mapping[str, Any]
    inputs: Mapping[str, Any]
    root: Path

    def count(self, axis: str) -> int:
        value = self.axes.get(axis)
        if type(value) is not int or value < 1:
            raise ValueError(f"its axis {axis} is {short_json(value)}, not a number from 1 on")
        return value

    @property
    def batch(self) -> int:
        batch = self.count("batch_size")
        if batch > MAX_SEQUENCES:
            raise ValueError(f"its axis batch_size is {batch}, above the limit of {MAX_SEQUENCES}")
        return batch

    def numbers(self, name: str) -> list[int] | None:
        """Return the numbers of an input. None: they are random, or not given."""
        tensor = self.inputs.get(name)
        if tensor is None:
            return None
        match tensor:
            case {"type": "random"}:
                return None
            case {"type": "scalar", "value": int(value)} if not isinstance(value, bool):
                return [value]
            case {"type": "safetensors", "path": str(path), "tensor_key": str(key)}:
                return self._read(name, self.root / path, key)
        raise ValueError(f"its {name} is {short_json(tensor)}, not random, a number or a tensor")

    def _read(self, name: str, path: Path, key: str) -> list[int]:
        shown = short(str(path), 200)
        try:
            return read_integers(read_file(path, _BLOB_MB, _boundary(self.root)), key)
        except UnreadableFile as error:
            is_missing = error.fault is FileFault.MISSING
            fix = ": fetch the dataset's blob folder, too" if is_missing else ""
            raise ValueError(
                f"{shown}, which has its {name}, cannot be read ({error.reason}){fix}"
            ) from None
        except ValueError as error:
            raise ValueError(f"{shown}: {error}") from None


def _boundary(root: Path) -> Path:
    """Return the folder that holds all files of a dataset, links followed.

    Files of ``snapshots/REVISION`` in a cache of Hugging Face are links into ``blobs``.
    """
    return root.parent.parent if root.parent.name == "snapshots" else root


def _contiguous(given: _Given, capacity: int, is_uniform: bool) -> Sequence[int]:
    """Return the tokens of each sequence: all that the cache has room for, if nothing is given.

    Args:
        is_uniform: The definition takes one length for all. A workload may still give each.
    """
    lengths = given.numbers("cache_seqlens")
    if lengths is None:
        return [capacity] * given.batch
    if is_uniform and len(lengths) == 1:
        return lengths * given.batch
    _check_number(given, lengths)
    return lengths


def _paged(given: _Given, page_size: int) -> Sequence[int]:
    starts = given.numbers("kv_indptr")
    if starts is None:
        batch, pages = given.batch, given.count("num_kv_indices")
        starts = [pages * sequence // batch for sequence in range(batch + 1)]
    counts = [end - start for start, end in pairwise(starts)]
    _check_number(given, counts)
    total = given.axes.get("num_kv_indices", starts[-1])
    if starts[0] != 0 or min(counts) < 0 or total != starts[-1]:
        raise ValueError(
            f"its kv_indptr is {short_json(starts)}, which does not ascend from 0 to its"
            f" num_kv_indices, {short_json(total)}"
        )
    last = given.numbers("kv_last_page_len")
    if last is None:
        last = [page_size] * len(counts)
    _check_number(given, last)
    for tokens in (min(last), max(last)):
        if not 1 <= tokens <= page_size:
            raise ValueError(f"a last page has {tokens} tokens, not from 1 to {page_size}")
    return [(pages - 1) * page_size + tokens for pages, tokens in zip(counts, last, strict=True)]


def _check_number(given: _Given, lengths: Sequence[int]) -> None:
    if len(lengths) != given.batch:
        raise ValueError(f"it has a batch of {given.batch} and {len(lengths)} lengths")
