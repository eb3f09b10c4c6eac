"""Which calls share their timings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from leanbench.configs.signature import signature_of
from leanbench.core.problem import AttentionProblem

BASE = AttentionProblem(4, 32, 8, 4096, 128)
PAGED = replace(BASE, page_size=128, kv_layout="NHD", lengths_on="device")
FP8 = replace(PAGED, kv_dtype="e4m3")


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (BASE, "32 tiles d128 g4 2 B HND, 4096 tokens"),
        (replace(PAGED, page_size=16), "32 tiles d128 g4 2 B NHD p16, up to 4096"),
        (
            replace(FP8, q_dtype="e4m3", q_len=3, sinks=True, v_head_dim=64),
            "32 tiles d128 v64 g4 q3 1 B fp8 q NHD p128 sinks, up to 4096",
        ),
        (
            AttentionProblem(2, 16, 1, 1000, 576, latent=True, v_head_dim=512),
            "2 tiles d576 v512 g16 2 B HND latent, 1024 tokens",
        ),
    ],
    ids=["dense", "served", "fp8", "latent"],
)
def test_a_signature_is_words(problem, expected):
    assert signature_of(problem) == expected


@pytest.mark.parametrize(
    ("problem", "fields"),
    [
        (BASE, {"dtype": "bf16"}),
        # An eighth of an octave begins above 2^11.875 = 3756.05 tokens.
        (BASE, {"context": 3757}),
        # Output tiles count, however they are divided.
        (BASE, {"batch": 8, "q_heads": 16, "kv_heads": 4}),
        (replace(BASE, batch=32, q_heads=4, kv_heads=1), {"kv_layout": "NHD"}),
        (BASE, {"capacity": 100_000}),
        (BASE, {"window_left": 4095}),
        (replace(BASE, context=1024), {"context": 4096, "window_left": 1023}),
        (replace(BASE, context=1024), {"context": 4096, "attention_chunk": 1024}),
        (replace(PAGED, context=1025), {"context": 4096}),
        (PAGED, {"context": (4096, 9, 9, 9)}),
        (PAGED, {"page_size": 256}),
        (FP8, {"kv_dtype": "e5m2"}),
        (FP8, {"scaled": False}),
    ],
    ids=lambda value: value.label if isinstance(value, AttentionProblem) else str(value),
)
def test_calls_that_share_timings(problem, fields):
    assert signature_of(replace(problem, **fields)) == signature_of(problem)


def many(problem: AttentionProblem, *fields: dict[str, Any]) -> list[AttentionProblem]:
    return [problem, *(replace(problem, **each) for each in fields)]


DISTINCT = [
    *many(
        BASE,
        {"context": 3756},
        {"context": 4097},
        {"batch": 5},
        {"q_heads": 64},
        {"head_dim": 64},
        {"v_head_dim": 64},
        {"q_len": 2},
        {"kv_layout": "NHD"},
        {"page_size": 128},
        {"lengths_on": "device"},
        {"window_left": 1023},
        {"kv_dtype": "e4m3"},
        {"kv_dtype": "e4m3", "q_dtype": "e4m3"},
        {"softcap": 20.0},
        {"sinks": True},
        {"alibi": True},
        {"leftpad": True},
        {"batch_idx": True},
        {"append": 1},
        {"append": 1, "rotary_dim": 64},
        {"q_len": 4, "q_lens": (1, 2, 3, 4)},
    ),
    *many(
        PAGED,
        {"context": 4097},
        {"context": 1024},
        {"page_size": 64},
        {"page_size": 16},
        {"kv_layout": "HND"},
    ),
    *many(FP8, {"page_scales": "page"}),
]


def test_calls_that_do_not():
    signatures = [signature_of(problem) for problem in DISTINCT]
    assert len(set(signatures)) == len(DISTINCT)


def test_lengths_of_a_growing_sequence_change_their_signature_eight_times_an_octave():
    growing = {signature_of(replace(BASE, context=context)) for context in range(4097, 8193)}
    assert len(growing) == 8
    on_device = {signature_of(replace(PAGED, context=context)) for context in range(4097, 16385)}
    assert on_device == {"32 tiles d128 g4 2 B NHD p128, up to 16384"}
