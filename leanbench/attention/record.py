"""Record of the signatures that a process calls, for `leanbench tune --calls`."""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import replace
from typing import Any

import torch

from leanbench.configs.lookup import ENVIRONMENT
from leanbench.core.inputs import AttentionInputs
from leanbench.core.problem import AttentionProblem

#: Variable with the file to append to; ``lengths:FILE`` also records the lengths of each
#: signature's first call.
RECORD = "LEANBENCH_RECORD"
_WITH_LENGTHS, _RECORD = "lengths:", RECORD.encode()

#: Signatures that this process wrote.
_written: set[tuple[str, AttentionProblem]] = set()


def record(inputs: AttentionInputs, problem: AttentionProblem) -> None:
    """Append a call's shapes, dtypes, layout and pages to the file, once; no numbers of tensors.

    A file that cannot be written costs a warning, not the call.
    """
    target = os.environ.get(RECORD, "")
    path = target.removeprefix(_WITH_LENGTHS)
    if not path:
        return
    if (path, problem) in _written:
        return
    _written.add((path, problem))
    if path != target and inputs.cache_seqlens is not None and not is_captured(inputs):
        lengths = tuple(max(1, problem.append, length) for length in inputs.read_lengths())
        problem = replace(problem, context=lengths, capacity=problem.cache_capacity)
    line: dict[str, Any] = {"problem": problem.to_dict()}
    try:
        # A pipe that nobody reads is an error then, and does not wait.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK
        with open(os.open(path, flags, 0o666), "w", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    except OSError as error:
        warnings.warn(f"{RECORD}: cannot write {path} ({error.strerror})", stacklevel=2)


def is_recorded() -> bool:
    """Return True if there is a file to append to."""
    return bool(ENVIRONMENT.get(_RECORD))


def is_captured(inputs: AttentionInputs) -> bool:
    """Return True in the capture of a CUDA graph, in which nothing can be read or timed."""
    return inputs.q.is_cuda and torch.cuda.is_current_stream_capturing()
