"""Bytes of the read floor. Every published share divides by their time."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from leanbench.core.inputs import AttentionInputs, make_inputs, make_windows
from leanbench.core.problem import AttentionProblem
from leanbench.measure import read_floor
from leanbench.measure.read_floor import _VARIANTS, Variant

#: 2 sequences of 100 tokens, 2 KV heads of 64 numbers in 16 bits.
PLAIN = AttentionProblem(2, 4, 2, 100, 64)
PLAIN_BYTES = 102_400

SumsOf = Callable[[Sequence[AttentionInputs], int, Variant], list[int]]


@pytest.fixture
def sums_of(monkeypatch, device) -> SumsOf:
    """Launch the floor's reads; return the sum of each."""
    sums: list[torch.Tensor] = []
    read = read_floor._read

    def recorded(*arguments):
        of_launch, launch = read(*arguments)
        sums.append(of_launch)
        return of_launch, launch

    def launch_all(buffers: Sequence[AttentionInputs], kv_bytes: int, variant: Variant):
        sums.clear()
        for launch in read_floor._launches(buffers, kv_bytes, variant):
            launch()
        return [int(of_launch.sum()) for of_launch in sums]

    monkeypatch.setattr(read_floor, "_read", recorded)
    if device == "cpu":
        gpu = SimpleNamespace(multi_processor_count=2)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    return launch_all


def fill(inputs: AttentionInputs, word: int) -> None:
    for cache in (inputs.k_cache,) if inputs.latent else (inputs.k_cache, inputs.v_cache):
        torch.empty(0, dtype=torch.int32, device=cache.device).set_(cache.untyped_storage()).fill_(
            word
        )


@pytest.mark.parametrize(
    ("kinds", "kv_bytes"),
    [
        ({}, PLAIN_BYTES),
        ({"kv_layout": "NHD"}, PLAIN_BYTES),
        ({"dtype": "bf16", "head_dim": 80}, 2 * 2 * 100 * 2 * 80 * 2),
        ({"context": (100, 30)}, 2 * 130 * 2 * 64 * 2),
        # Neither spare capacity behind the tokens is read nor the rest of a page.
        ({"capacity": 256}, PLAIN_BYTES),
        ({"page_size": 16}, PLAIN_BYTES),
        ({"page_size": 64, "kv_layout": "NHD", "kv_dtype": "e4m3"}, PLAIN_BYTES // 2),
        # The query token sees itself and the 31 preceding tokens.
        ({"window_left": 31}, 2 * 2 * 32 * 2 * 64 * 2),
        ({"kv_dtype": "e5m2"}, PLAIN_BYTES // 2),
        ({"v_head_dim": 32}, 2 * 100 * 2 * (64 + 32) * 2),
        # V consists of columns of K.
        ({"latent": True, "kv_heads": 1, "v_head_dim": 32}, PLAIN_BYTES // 4),
        ({"latent": True, "kv_heads": 1, "v_head_dim": 32, "kv_dtype": "e4m3"}, PLAIN_BYTES // 8),
    ],
    ids=str,
)
def test_the_floor_reads_as_many_bytes_as_k_and_v_have(sums_of, device, kinds, kv_bytes):
    """A cache of ones adds up to its number of 32-bit words."""
    problem = replace(PLAIN, **kinds)
    inputs = make_inputs(problem, device)
    fill(inputs, 1)
    assert sums_of([inputs], problem.kv_bytes, _VARIANTS[0]) == [kv_bytes // 4]


def test_every_buffer_of_one_cache_is_read_in_full(sums_of, device):
    buffers = make_windows(replace(PLAIN, capacity=512), device, 4)
    assert len({inputs.k_cache.untyped_storage().data_ptr() for inputs in buffers}) == 1
    fill(buffers[0], 1)
    assert sums_of(buffers, PLAIN_BYTES, _VARIANTS[0]) == [PLAIN_BYTES // 4] * 4


@pytest.mark.gpu
@pytest.mark.parametrize("variant", _VARIANTS, ids=str)
@pytest.mark.parametrize("context", [1024, 40_000], ids=str)
def test_every_grid_reads_all_words(sums_of, context, variant):
    """Grids include a truncated last block, and caches larger than the L2."""
    problem = AttentionProblem(4, 32, 8, context, 128)
    kv_bytes = 2 * 4 * 8 * context * 128 * 2
    inputs = make_inputs(problem, "cuda")
    fill(inputs, 1)
    assert sums_of([inputs], problem.kv_bytes, variant) == [kv_bytes // 4]
    assert sums_of([inputs], problem.kv_bytes - 52, variant) == [kv_bytes // 4 - 13]
