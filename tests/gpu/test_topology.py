"""Pairs of GPUs, as a pretended NVML tells them."""

from __future__ import annotations

from typing import Any

import pynvml
import pytest

from leanbench.gpu.topology import Pair, Topology, topology

UUIDS = [f"GPU-{letter * 8}-0000-0000-0000-000000000000" for letter in "abc"]


def test_pairs_and_links(fake_nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml(*({"uuid": uuid} for uuid in UUIDS))

    def p2p_status(first: Any, second: Any, capability: int) -> int:
        if UUIDS[2] in (first.uuid, second.uuid):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        assert capability in (pynvml.NVML_P2P_CAPS_INDEX_WRITE, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
        is_write = capability == pynvml.NVML_P2P_CAPS_INDEX_WRITE
        return pynvml.NVML_P2P_STATUS_OK if is_write else pynvml.NVML_P2P_STATUS_NOT_SUPPORTED

    def link_state(gpu: Any, link: int) -> int:
        up = {UUIDS[0]: 18, UUIDS[1]: 12, UUIDS[2]: 18}[gpu.uuid]
        if link >= 18:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return pynvml.NVML_FEATURE_ENABLED if link < up else pynvml.NVML_FEATURE_DISABLED

    monkeypatch.setattr(pynvml, "nvmlDeviceGetP2PStatus", p2p_status)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetNvLinkState", link_state)
    pairs = (Pair(0, 1, True, False), Pair(0, 2, None, None), Pair(1, 2, None, None))
    assert topology() == Topology(pairs, 12)
