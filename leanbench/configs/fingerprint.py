"""Fingerprint of the tuned configs available to lookups, recorded to compare runs."""

from __future__ import annotations

import hashlib

from leanbench.configs import store
from leanbench.configs.switch import is_off
from leanbench.core.gpu_spec import GpuSpec

#: Replaces the hash if there is no file, or if LEANBENCH_CONFIGS turns them off. The heuristic
#: belongs to the kernels' sources, see leanbench.records.environment.kernels_hash.
HEURISTIC = "heuristic"


def settings_hash(spec: GpuSpec) -> str:
    """Return 12 characters that depend on this GPU's files of tuned configs, or `HEURISTIC`.

    Both the path and the text of a file count.
    """
    if is_off() or not (files := store.tuned_for(spec)):
        return HEURISTIC
    digest = hashlib.sha256()
    for file in files:
        text = file.path.read_bytes()
        digest.update(f"{file.where} {file.path.name} {len(text)}\n".encode() + text)
    return digest.hexdigest()[:12]
