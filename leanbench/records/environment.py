"""Environment of rows: versions, driver, GPU and commit."""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leanbench.core.paths import KERNELS
from leanbench.core.version import __version__

if TYPE_CHECKING:
    from leanbench.gpu.visible import LocalGpu

#: Distributions that affect timings if installed: the run-time compiler of `lean_cuda`, and
#: libraries with kernels of their own.
_LIBRARIES = (
    "nvidia-cuda-nvrtc",
    "flash-attn",
    "flash_attn_3",
    "vllm",
    "nvidia-cudnn-frontend",
    "sgl-flash-mla",
    "flashinfer-python",
    "flashinfer-jit-cache",
    "apache-tvm-ffi",
    "xformers",
)
#: Suffixes of the kernels' sources.
_SOURCES = (".py", ".cu", ".cuh")


def environment_key(environment: dict[str, Any]) -> str:
    """Return eight characters that identify an environment."""
    return hashlib.sha256(json.dumps(environment, sort_keys=True).encode()).hexdigest()[:8]


def kernels_hash(room: Path = KERNELS) -> str:
    """Return twelve characters that identify names and content of all sources under kernels/."""
    digest = hashlib.sha256()
    for path in sorted(room.rglob("*")):
        if path.suffix in _SOURCES:
            text = path.read_bytes()
            digest.update(f"{path.relative_to(room).as_posix()} {len(text)}\n".encode() + text)
    return digest.hexdigest()[:12]


def predicted_environment() -> dict[str, Any]:
    """Return the software alone. Predictions use no driver and no GPU."""
    return {
        "python": platform.python_version(),
        "torch": _version("torch"),
        "triton": _version("triton"),
        "driver": None,
        "gpu_product": None,
        "gpu_uuid": None,
        "leanbench": __version__,
        "commit": _commit(),
        "kernels": kernels_hash(),
        **{name: installed for name in _LIBRARIES if (installed := _version(name)) is not None},
    }


def software() -> dict[str, Any]:
    """Return the versions that all rows of a run share, without the hash of tuned settings."""
    return {"leanbench": __version__, "kernels": kernels_hash()}


def measured_environment(device_index: int) -> dict[str, Any]:
    """Return software, driver and GPU of `cuda:device_index`. Without NVML, the driver is None."""
    import torch

    return {
        **predicted_environment(),
        "host": platform.node(),
        # Includes the CUDA version.
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        **_gpu_fields(device_index),
    }


def environment_of_several(devices: Sequence[int]) -> dict[str, Any]:
    """Return additional fields for rows of several GPUs: the GPUs and their links.

    Args:
        devices: torch's numbers of the ranks' GPUs.
    """
    from leanbench.gpu.nvml_library import NvmlError
    from leanbench.gpu.topology import has_peer_access, topology

    gpus = [_gpu_fields(device) for device in devices]
    try:
        links = [
            asdict(pair)
            | {"peer_access": has_peer_access(devices[pair.first], devices[pair.second])}
            for pair in topology(devices).pairs
        ]
    except NvmlError:
        links = None
    return {
        "gpu_products": [gpu["gpu_product"] for gpu in gpus],
        "gpu_uuids": [gpu["gpu_uuid"] for gpu in gpus],
        "gpu_links": links,
    }


def _gpu_fields(device_index: int) -> dict[str, Any]:
    """Return GPU and driver of `cuda:device_index`."""
    import torch

    device = torch.cuda.get_device_properties(device_index)
    gpu = _by_nvml(str(getattr(device, "uuid", "")), device_index)
    return {
        "driver": gpu and gpu.driver_version,
        "gpu_product": gpu.product if gpu else device.name,
        "gpu_uuid": gpu and gpu.uuid,
    }


def _by_nvml(uuid: str, index: int) -> LocalGpu | None:
    from leanbench.gpu.nvml_library import NvmlError
    from leanbench.gpu.visible import local_gpus

    try:
        gpus = local_gpus()
    except NvmlError:
        return None
    # NVML counts GPUs by bus. torch can put the fastest first.
    named = [gpu for gpu in gpus if uuid and gpu.uuid.endswith(uuid)]
    in_place = [gpu for gpu in gpus[index : index + 1] if gpu.fault is None]
    return (named or in_place or [None])[0]


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Return the commit of the checkout, with ``+changes`` if files differ; None in a wheel."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    options = ("--always", "--abbrev=40", "--match=", "--dirty=+changes")
    command = ["git", "-C", str(root), "describe", *options]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
