"""Number of inputs that launches rotate over, and the limits of free memory."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pretended_gpu import COLD_BYTES, H200, PROBLEM

from leanbench.core.inputs import make_inputs, make_windows, windows_in_cache
from leanbench.core.problem import AttentionProblem
from leanbench.gpu.catalogue import find
from leanbench.measure import buffers as module
from leanbench.measure import read_floor
from leanbench.measure.buffers import (
    cold_bytes,
    cold_copies,
    free_memory,
    rotating_inputs,
)
from leanbench.measure.read_floor import fingerprint, read_places

DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("cold_bytes", "l2_multiple", "l2_mib", "count"),
    # 102,400 bytes each; 6 x 0.2 MiB are 1,258,291.
    [(300_000, 0, 60, 3), (300_000, 6, 0.01, 3), (300_000, 6, 0.2, 13), (102_400, 0, 60, 1)],
)
def test_cold_inputs_exceed_the_cold_bytes_and_the_l2_several_times(
    gpu, monkeypatch, cold_bytes, l2_multiple, l2_mib, count
):
    monkeypatch.setattr(module, "COLD_BYTES", cold_bytes)
    monkeypatch.setattr(module, "COLD_L2_MULTIPLE", l2_multiple)
    assert len(rotating_inputs(PROBLEM, DEVICE, replace(H200, l2_mib=l2_mib), "cold")) == count
    assert gpu.made == [PROBLEM] * count


def test_what_cold_means_on_gpus_of_the_catalogue():
    # 6 x 60 MiB are less than 400 MB, 6 x 126 MiB are not.
    assert cold_bytes(find("h200")) == 400_000_000
    assert cold_bytes(find("b200")) == 6 * 126 * 2**20
    assert cold_copies(PROBLEM, find("h200")) == 3907


def test_a_cache_with_room_holds_several_inputs_that_share_nothing_in_use(gpu):
    # 102,400 bytes each, 128 tokens apart.
    problem = replace(PROBLEM, capacity=256)
    inputs = rotating_inputs(problem, DEVICE, H200, "cold")
    assert len(inputs) == 3
    assert gpu.made == [problem] * 2
    assert len({copy.k_cache.untyped_storage().data_ptr() for copy in inputs}) == 2
    assert all(copy.k_cache.stride() == inputs[0].k_cache.stride() for copy in inputs)
    before = [copy.k_cache[:, :100].clone() for copy in inputs]
    for copy in inputs[1:]:
        copy.k_cache[:, :100] += 1
    assert torch.equal(inputs[0].k_cache[:, :100], before[0])
    assert torch.equal(inputs[1].k_cache[:, :100], before[1] + 1)
    assert torch.equal(inputs[2].k_cache[:, :100], before[2] + 1)


@pytest.mark.parametrize(
    "kinds",
    [
        {},
        {"latent": True, "kv_heads": 1, "v_head_dim": 48},
        {"v_head_dim": 32},
        {"v_head_dim": 96, "kv_dtype": "e4m3"},
    ],
)
@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("capacity", [None, 200, 256, 1000])
def test_the_read_floor_reads_what_no_other_buffer_holds(layout, capacity, kinds):
    problem = replace(PROBLEM, capacity=capacity, kv_layout=layout, **kinds)
    count = windows_in_cache(problem)
    assert count == {None: 1, 200: 1, 256: 2, 1000: 7}[capacity]
    inputs = make_windows(problem, "cpu", count)
    words = problem.kv_bytes // 4
    of_k = words // 2 if problem.latent else words * 64 // (64 + problem.value_dim)
    places = read_places(inputs, words)
    for place, (k, v) in enumerate(places):
        k.fill_(place)
        v.fill_(place)
        assert not set(range(k.data_ptr(), k.data_ptr() + 4 * of_k, 4)) & {v.data_ptr()}
    for place, (k, v) in enumerate(places):
        assert (len(k), len(v)) == (of_k, words - of_k)
        assert (k == place).all()
        assert (v == place).all()


@pytest.mark.parametrize(("free_bytes", "copies"), [(2.5e5, 1), (2.6e5, 2), (0, 1)])
def test_copies_leave_a_fifth_of_the_memory_free(gpu, free_bytes, copies):
    gpu.free_bytes = free_bytes
    assert copies * PROBLEM.kv_bytes < COLD_BYTES
    assert len(rotating_inputs(PROBLEM, DEVICE, H200, "cold")) == copies


def test_freed_memory_is_waited_for_until_the_driver_has_cleared_it(gpu, monkeypatch):
    slept_s: list[float] = []
    monkeypatch.setattr("time.sleep", slept_s.append)
    gpu.reserved_bytes, gpu.unused_bytes = 100_000_000_000, 48_000_000_000
    free_memory(H200)
    assert gpu.reserved_bytes == 52_000_000_000
    # 7% of 4.8 TB/s.
    assert slept_s == [pytest.approx(48e9 / 0.336e12)]
    free_memory(H200)
    assert slept_s[1] == 0


@pytest.mark.parametrize(
    "kinds",
    [
        {},
        {"kv_dtype": "e4m3"},
        {"v_head_dim": 32},
        {"latent": True, "v_head_dim": 48},
        # The inputs are to change.
        {"append": 1},
    ],
    ids=lambda kinds: " ".join(kinds) or "plain",
)
@pytest.mark.parametrize("kv_layout", ["HND", "NHD"])
def test_a_fingerprint_reads_the_caches_whole_and_nothing_else(kinds, kv_layout, monkeypatch):
    """For an fp8 cache, the number of elements of a 16-bit cache would read memory behind it."""
    reads: list[tuple[int, int]] = []

    def read(places: Any, *settings: int) -> Any:
        reads.extend((place.data_ptr(), 4 * len(place)) for place in places)
        return torch.zeros(1), lambda: None

    monkeypatch.setattr(read_floor, "_read", read)
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    heads = 1 if "latent" in kinds else 2
    plain = AttentionProblem(2, 4, heads, 40, 64, "bf16", kv_layout)
    inputs = make_inputs(replace(plain, **kinds), "cpu")
    fingerprint(inputs)
    halves = []
    for cache in [] if inputs.new_tokens else [inputs.k_cache, inputs.v_cache][: 2 - inputs.latent]:
        half = cache.numel() * cache.element_size() // 2
        halves += [(cache.data_ptr(), half), (cache.data_ptr() + half, half)]
    assert reads == halves
