"""Pairs of GPUs, as a pretended NVML tells them."""

from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from leanbench.gpu.nvml_library import GpuNotFoundError
from leanbench.gpu.topology import Pair, Topology, has_peer_access, pairs_in_words, topology

UUIDS = [f"GPU-{letter * 8}-0000-0000-0000-000000000000" for letter in "abc"]
UNSUPPORTED = pynvml.NVML_ERROR_NOT_SUPPORTED
#: NVLinks of each that are up.
UP = dict(zip(UUIDS, (18, 12, 18), strict=True))


class Links:
    """NVLinks and peer access of three GPUs: the known capabilities, by the pair's UUIDs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.can: dict[tuple[str, str], set[int]] = {}
        #: The bus of the device at a link's other end, by UUID; of no one: a switch's.
        self.ends: dict[str, list[int]] = {}
        monkeypatch.setattr(pynvml, "nvmlDeviceGetP2PStatus", self._status)
        monkeypatch.setattr(pynvml, "nvmlDeviceGetNvLinkState", self._state)
        monkeypatch.setattr(pynvml, "nvmlDeviceGetNvLinkRemotePciInfo", self._end)

    def _status(self, first: Any, second: Any, capability: int) -> int:
        first_uuid, second_uuid = sorted((first.uuid, second.uuid))
        if (first_uuid, second_uuid) not in self.can:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        if capability in self.can[first_uuid, second_uuid]:
            return pynvml.NVML_P2P_STATUS_OK
        return pynvml.NVML_P2P_STATUS_NOT_SUPPORTED

    def _state(self, gpu: Any, link: int) -> int:
        if link >= 18:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        is_up = link < UP[gpu.uuid]
        return pynvml.NVML_FEATURE_ENABLED if is_up else pynvml.NVML_FEATURE_DISABLED

    def _end(self, gpu: Any, link: int) -> Any:
        buses = self.ends.get(gpu.uuid, [99] * 18)
        return SimpleNamespace(domain=0, bus=buses[link], device=0)


WRITE, NVLINK = pynvml.NVML_P2P_CAPS_INDEX_WRITE, pynvml.NVML_P2P_CAPS_INDEX_NVLINK


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> Links:
    return Links(monkeypatch)


def gpus(**fields: Any) -> list[dict[str, Any]]:
    return [{"uuid": uuid, "bus": index, **fields} for index, uuid in enumerate(UUIDS)]


def test_pairs_links_and_speeds(fake_nvml, links):
    fake_nvml(*gpus())
    links.can = {(UUIDS[0], UUIDS[1]): {WRITE, NVLINK}, (UUIDS[0], UUIDS[2]): {WRITE}}
    # 12 links of 26.562 GB/s to the switch; PCIe 5 with 16 lanes.
    assert topology() == Topology(
        (
            Pair(0, 1, True, True, 12, 12 * 26.562),
            Pair(0, 2, True, False, 0, 16 * 3.938),
            Pair(1, 2, None, None, 0, 16 * 3.938),
        ),
        12,
    )
    assert [pair.words for pair in topology().pairs] == [
        "12 NVLinks, 319 GB/s one way, peer access",
        "PCIe, 63 GB/s one way, peer access",
        "links not known, 63 GB/s one way, peer access not known",
    ]


def test_links_that_end_at_the_other_gpu(fake_nvml, links):
    fake_nvml(*gpus())
    links.can = {(UUIDS[0], UUIDS[1]): {WRITE, NVLINK}, (UUIDS[0], UUIDS[2]): {WRITE, NVLINK}}
    links.ends = {UUIDS[0]: [1] * 4 + [2] * 14}
    first, second, _ = topology().pairs
    assert (first.nvlinks, first.gb_s) == (4, pytest.approx(106.248))
    assert (second.nvlinks, second.gb_s) == (14, pytest.approx(371.868))


@pytest.mark.parametrize(
    "fields",
    [
        {"nvlink_mb_s": 0, "pcie": (9, 16)},
        {"errors": dict.fromkeys(("field 90", "nvmlDeviceGetMaxPcieLinkWidth"), UNSUPPORTED)},
    ],
)
def test_speeds_that_the_driver_does_not_say(fake_nvml, links, fields):
    fake_nvml(*gpus(**fields))
    links.can = {(UUIDS[0], UUIDS[1]): {WRITE, NVLINK}, (UUIDS[0], UUIDS[2]): set()}
    pairs = topology().pairs
    assert pairs[:2] == (Pair(0, 1, True, True, 12, None), Pair(0, 2, False, False, 0, None))
    assert pairs[0].words == "12 NVLinks, peer access"
    assert pairs[1].words == "PCIe, no peer access"


def test_links_of_lost_gpus_and_peer_access_are_not_known(fake_nvml, links, monkeypatch):
    fields = gpus()
    fields[1]["errors"] = {"nvmlDeviceGetMaxPcieLinkGeneration": pynvml.NVML_ERROR_GPU_IS_LOST}
    fake_nvml(*fields)
    links.can = {(UUIDS[0], UUIDS[1]): {WRITE}, (UUIDS[0], UUIDS[2]): {WRITE}}
    assert topology().pairs == (
        Pair(0, 1, None, None),
        Pair(0, 2, True, False, 0, 16 * 3.938),
        Pair(1, 2, None, None),
    )
    fake_nvml(*gpus()[:2])
    unknown = pynvml.NVML_P2P_STATUS_UNKNOWN
    monkeypatch.setattr(pynvml, "nvmlDeviceGetP2PStatus", lambda *arguments: unknown)
    (pair,) = topology().pairs
    assert (pair.peer_access, pair.nvlink) == (None, None)


def test_peer_access_is_that_of_both_ways(monkeypatch):
    ways = {(0, 1), (1, 0), (0, 2)}
    monkeypatch.setattr(
        "torch.cuda.can_device_access_peer", lambda device, peer: (device, peer) in ways
    )
    for pair in ((0, 1), (1, 0), (0, 2), (2, 0), (1, 2)):
        assert has_peer_access(*pair) == (2 not in pair)


def test_gpus_that_are_named(fake_nvml, links):
    fake_nvml(*gpus())
    links.can = {(UUIDS[0], UUIDS[2]): {WRITE, NVLINK}}
    # Numbered by their places, as ranks are.
    assert topology([2, 0]).pairs == (Pair(0, 1, True, True, 18, 18 * 26.562),)
    with pytest.raises(GpuNotFoundError, match="there is no GPU 3"):
        topology([0, 3])


def test_pairs_in_words():
    alike = [Pair(*two, True, True, 18) for two in ((0, 1), (0, 2), (1, 2))]
    assert pairs_in_words(alike[:1]) == "GPUs 0 and 1: 18 NVLinks, peer access"
    assert pairs_in_words(alike) == "all pairs of GPUs: 18 NVLinks, peer access"
    assert pairs_in_words([*alike[:2], Pair(1, 2, False, False)]) == (
        "GPUs 0 and 1, 0 and 2: 18 NVLinks, peer access; GPUs 1 and 2: PCIe, no peer access"
    )
    assert pairs_in_words([]) == ""
