"""How the GPUs of this machine reach one another, by NVML."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import Any

from leanbench.gpu.nvml_library import ask, open_nvml
from leanbench.gpu.visible import visible_handles


@dataclass(frozen=True)
class Pair:
    """Two GPUs, as CUDA counts them. None: the driver does not say."""

    first: int
    second: int
    #: Whether each may write to the other's memory.
    peer_access: bool | None
    #: Whether it does so over NVLink.
    nvlink: bool | None


@dataclass(frozen=True)
class Topology:
    pairs: tuple[Pair, ...]
    #: NVLinks of a GPU that are up, the fewest of any.
    nvlinks: int


def topology() -> Topology:
    """That of the GPUs that CUDA would see.

    Raises:
        NvmlError: NVML cannot be used.
    """
    with open_nvml() as nvml:
        handles = visible_handles(nvml)
        pairs = [
            Pair(
                first,
                second,
                _can(nvml, handles[first], handles[second], nvml.NVML_P2P_CAPS_INDEX_WRITE),
                _can(nvml, handles[first], handles[second], nvml.NVML_P2P_CAPS_INDEX_NVLINK),
            )
            for first, second in combinations(range(len(handles)), 2)
        ]
        return Topology(tuple(pairs), min((_nvlinks(nvml, own) for own in handles), default=0))


def _can(nvml: Any, first: Any, second: Any, capability: int) -> bool | None:
    status = ask(nvml, nvml.nvmlDeviceGetP2PStatus, first, second, capability)
    return None if status is None else status == nvml.NVML_P2P_STATUS_OK


def _nvlinks(nvml: Any, handle: Any) -> int:
    links = range(nvml.NVML_NVLINK_MAX_LINKS)
    states = [ask(nvml, nvml.nvmlDeviceGetNvLinkState, handle, link) for link in links]
    return sum(state == nvml.NVML_FEATURE_ENABLED for state in states)
