"""Fingerprint of the tuned configs that look-ups can choose from, so that two runs can be compared
knowingly.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection

from leanbench.configs import store
from leanbench.configs.lookup import is_off
from leanbench.core.gpu_spec import GpuSpec


def settings_hash(spec: GpuSpec, where: Collection[str] = ("yours", "shipped")) -> str:
    """Twelve characters that differ when a file of tuned configs of this GPU does, its place or its
    text; ``heuristic`` where there is none, or LEANBENCH_CONFIGS turns them off. The heuristic
    itself is among the kernels' sources, see leanbench.records.environment.kernels_hash.

    Args:
        where: the user's own files, those that come with leanbench, or both.
    """
    files = [] if is_off() else [file for file in store.tuned_for(spec) if file.where in where]
    if not files:
        return "heuristic"
    digest = hashlib.sha256()
    for file in files:
        text = file.path.read_bytes()
        digest.update(f"{file.where} {file.path.name} {len(text)}\n".encode() + text)
    return digest.hexdigest()[:12]
