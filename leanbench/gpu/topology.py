"""Links between the GPUs of this machine, by NVML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from leanbench.gpu.nvml_library import GpuLostError, ask, open_nvml
from leanbench.gpu.visible import handle_of, visible_places

#: GB/s one way of a PCIe lane, by generation.
_LANE_GB_S = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}


@dataclass(frozen=True)
class Pair:
    """Two GPUs by CUDA's index, or ranks. None if the driver has no answer."""

    first: int
    second: int
    #: True if each can write to the other's memory.
    peer_access: bool | None
    #: True if the connection is NVLink.
    nvlink: bool | None
    #: NVLinks between the two, or to the switch between them.
    nvlinks: int = 0
    #: One-way bandwidth of the NVLinks, or of PCIe.
    gb_s: float | None = None

    @property
    def words(self) -> str:
        """A phrase without the GPUs' numbers: ``18 NVLinks, 478 GB/s one way, peer access``."""
        links = {True: f"{self.nvlinks} NVLinks", False: "PCIe", None: "links not known"}
        access = {True: "peer access", False: "no peer access", None: "peer access not known"}
        speed = [] if self.gb_s is None else [f"{self.gb_s:.0f} GB/s one way"]
        return ", ".join([links[self.nvlink], *speed, access[self.peer_access]])


@dataclass(frozen=True)
class Topology:
    pairs: tuple[Pair, ...]
    #: NVLinks of a GPU that are up, the fewest of any.
    nvlinks: int


def topology(devices: Sequence[int] | None = None) -> Topology:
    """Return pairs and links of GPUs, numbered from 0. Nothing is known of an unreadable GPU.

    Args:
        devices: CUDA's indices; None for all that it would see.

    Raises:
        NvmlError: NVML cannot be used, or there is no such GPU.
    """
    with open_nvml() as nvml:
        if devices is None:
            handles = [visible.handle for visible in visible_places(nvml)]
        else:
            handles = [handle_of(nvml, device) for device in devices]
        gpus = range(len(handles))
        pairs = [_pair(nvml, handles, *numbers) for numbers in combinations(gpus, 2)]
        links = [_links_up(nvml, handle) for handle in handles]
        return Topology(tuple(pairs), min((n for n in links if n is not None), default=0))


def pairs_in_words(pairs: Iterable[Pair]) -> str:
    """Describe each kind of pair: ``GPUs 0 and 1: 18 NVLinks, peer access``."""
    named: dict[str, list[str]] = {}
    for pair in pairs:
        named.setdefault(pair.words, []).append(f"{pair.first} and {pair.second}")
    (words, numbers), *further = named.items() or [("", [])]
    if not further and len(numbers) > 1:
        return f"all pairs of GPUs: {words}"
    return "; ".join(f"GPUs {', '.join(numbers)}: {words}" for words, numbers in named.items())


def has_peer_access(first: int, second: int) -> bool:
    """Return True if two GPUs, by torch's index, can write to each other's memory.

    CUDA decides if NVML disagrees.
    """
    import torch

    can = torch.cuda.can_device_access_peer
    return can(first, second) and can(second, first)


def _pair(nvml: Any, handles: list[Any], first: int, second: int) -> Pair:
    handle, peer = handles[first], handles[second]
    if handle is None or peer is None:
        return Pair(first, second, None, None)
    try:
        peer_access = _can(nvml, handle, peer, nvml.NVML_P2P_CAPS_INDEX_WRITE)
        nvlink = _can(nvml, handle, peer, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
        if not nvlink:
            return Pair(first, second, peer_access, nvlink, 0, _pcie_gb_s(nvml, handle, peer))
        links = _nvlinks_between(nvml, handle, peer)
        link_gb_s = _nvlink_gb_s(nvml, handle)
        gb_s = None if link_gb_s is None else links * link_gb_s
        return Pair(first, second, peer_access, nvlink, links, gb_s)
    except GpuLostError:
        return Pair(first, second, None, None)


def _can(nvml: Any, first: Any, second: Any, capability: int) -> bool | None:
    status = ask(nvml, nvml.nvmlDeviceGetP2PStatus, first, second, capability)
    if status is None or status == nvml.NVML_P2P_STATUS_UNKNOWN:
        return None
    return status == nvml.NVML_P2P_STATUS_OK


def _links_up(nvml: Any, handle: Any) -> int | None:
    """Return the number of NVLinks that are up; None for a GPU that cannot be read."""
    try:
        return None if handle is None else len(_nvlinks(nvml, handle))
    except GpuLostError:
        return None


def _nvlinks(nvml: Any, handle: Any) -> list[int]:
    """Return the NVLinks of a GPU that are up."""
    links = range(nvml.NVML_NVLINK_MAX_LINKS)
    states = [ask(nvml, nvml.nvmlDeviceGetNvLinkState, handle, link) for link in links]
    return [link for link in links if states[link] == nvml.NVML_FEATURE_ENABLED]


def _nvlinks_between(nvml: Any, first: Any, second: Any) -> int:
    """Return the number of links to the other GPU; of GPUs at a switch, the fewest of the two."""
    links, address = _nvlinks(nvml, first), _address(ask(nvml, nvml.nvmlDeviceGetPciInfo, second))
    remote = nvml.nvmlDeviceGetNvLinkRemotePciInfo
    ends = [_address(ask(nvml, remote, first, link)) for link in links]
    if address is not None and address in ends:
        return ends.count(address)
    return min(len(links), len(_nvlinks(nvml, second)))


def _address(pci: Any) -> tuple[int, int, int] | None:
    """Return the PCI address of a device."""
    return None if pci is None else (pci.domain, pci.bus, pci.device)


def _nvlink_gb_s(nvml: Any, handle: Any) -> float | None:
    """Return the one-way bandwidth of an NVLink that is up."""
    field = nvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON
    values = ask(nvml, nvml.nvmlDeviceGetFieldValues, handle, [field])
    if values and values[0].nvmlReturn == nvml.NVML_SUCCESS and values[0].value.uiVal:
        return values[0].value.uiVal / 1000
    return None


def _pcie_gb_s(nvml: Any, *handles: Any) -> float | None:
    """Return the slower of the GPUs' PCIe links at full speed: an idle link reports less."""
    speeds = []
    for handle in handles:
        generation = ask(nvml, nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle)
        lanes = ask(nvml, nvml.nvmlDeviceGetMaxPcieLinkWidth, handle)
        if generation not in _LANE_GB_S or lanes is None:
            return None
        speeds.append(_LANE_GB_S[generation] * lanes)
    return min(speeds)
