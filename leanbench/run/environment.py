"""What rows were taken with: versions, driver, GPU and commit, so that two runs can be compared knowingly."""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import leanbench

#: Distributions whose kernels can be measured beside this project's, or that hold them compiled.
_LIBRARIES = ("flashinfer-python", "flashinfer-jit-cache", "apache-tvm-ffi", "flash_attn_3")


def environment_key(environment: dict[str, Any]) -> str:
    """Eight characters that differ when anything in the environment does."""
    return hashlib.sha256(json.dumps(environment, sort_keys=True).encode()).hexdigest()[:8]


def predicted_environment() -> dict[str, Any]:
    """The software alone: predictions use no driver and no GPU."""
    return {
        "python": platform.python_version(),
        "torch": _version("torch"),
        "triton": _version("triton"),
        "driver": None,
        "gpu_product": None,
        "gpu_uuid": None,
        "leanbench": leanbench.__version__,
        "commit": _commit(),
        **{name: found for name in _LIBRARIES if (found := _version(name)) is not None},
    }


def measured_environment(device_index: int) -> dict[str, Any]:
    """Software, driver and the GPU that torch calls `cuda:device_index`."""
    import torch

    from leanbench.gpu.nvml import local_gpus

    gpus = local_gpus()
    uuid = str(torch.cuda.get_device_properties(device_index).uuid)
    # NVML counts GPUs by bus, torch may put the fastest first.
    gpu = next((gpu for gpu in gpus if gpu.uuid.endswith(uuid)), gpus[device_index])
    return {
        **predicted_environment(),
        # With the CUDA version it was built for.
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "driver": gpu.driver_version,
        "gpu_product": gpu.product,
        "gpu_uuid": gpu.uuid,
    }


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of the checkout this package runs from, with ``+changes`` if files differ from it; None in a wheel."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--match=", "--dirty=+changes"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
