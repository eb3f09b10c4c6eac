"""Fingerprint of the tuned configs that look-ups can choose from, so that two runs can be compared
knowingly.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from leanbench.configs import store
from leanbench.configs.switch import is_off
from leanbench.core.gpu_spec import GpuSpec

#: In place of a hash: no file, or LEANBENCH_CONFIGS turns them off. The heuristic itself is among
#: the kernels' sources, see leanbench.records.environment.kernels_hash.
HEURISTIC = "heuristic"


def settings_hash(spec: GpuSpec) -> str:
    """Twelve characters that differ when a file of tuned configs of this GPU does, its place or its
    text; or `HEURISTIC`.
    """
    return HEURISTIC if is_off() else _hash(store.tuned_for(spec))


def shipped_settings_hash(spec: GpuSpec) -> str:
    """The same of what comes with leanbench, whatever the user has."""
    return _hash([file for file in store.tuned_for(spec) if file.where == "shipped"])


def _hash(files: Sequence[store.File]) -> str:
    if not files:
        return HEURISTIC
    digest = hashlib.sha256()
    for file in files:
        text = file.path.read_bytes()
        digest.update(f"{file.where} {file.path.name} {len(text)}\n".encode() + text)
    return digest.hexdigest()[:12]
