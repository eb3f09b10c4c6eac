"""Arithmetic of problems, against the reference's own masks, and limits of GPUs."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from leanbench.kernels.reference.torch import distance_behind, hidden_tokens

from leanbench.core.inputs import AttentionInputs
from leanbench.core.problem import AttentionProblem
from leanbench.core.work import Roofs, flops
from leanbench.gpu.catalogue import CATALOGUE, find

PLAIN = AttentionProblem(2, 8, 2, 100, 64)
MASKS: dict[str, dict[str, Any]] = {
    "one query token": {},
    "causal": {"q_len": 7},
    "square": {"q_len": 100},
    "more query tokens than tokens": {"context": 5, "q_len": 9},
    "not causal": {"q_len": 7, "causal": False},
    "window": {"q_len": 7, "window_left": 11},
    "window on both sides": {"q_len": 7, "causal": False, "window_left": 11, "window_right": 3},
    "attention chunks": {"q_len": 7, "attention_chunk": 16},
    "ragged": {"context": (3, 90), "q_len": 7},
    "ragged queries": {"context": (30, 90), "q_lens": (7, 60)},
    "padding": {"q_len": 7, "leftpad": True},
}


class Masks:
    """Fields that `hidden_tokens` reads."""

    def __init__(self, problem: AttentionProblem) -> None:
        self.causal, self.attention_chunk = problem.causal, problem.attention_chunk
        self.window_left, self.window_right = problem.window_left, problem.window_right


@pytest.mark.parametrize("mask", MASKS)
def test_every_token_that_a_query_token_sees_counts(mask: str) -> None:
    problem = replace(PLAIN, **MASKS[mask])
    masks: Any = Masks(problem)
    seen = 0
    for context, pad, queries in zip(
        problem.contexts, problem.leftpads, problem.query_lengths, strict=True
    ):
        distance = distance_behind(queries, context - pad, torch.device("cpu"))
        hidden: AttentionInputs = masks
        seen += int((~hidden_tokens(hidden, distance)).sum())
    assert flops(problem) == 4 * 8 * seen * 64


def test_a_latent_cache_counts_the_columns_of_k_and_of_v() -> None:
    problem = AttentionProblem(1, 128, 1, 1000, 576, v_head_dim=512, latent=True)
    assert flops(problem) == 2 * 128 * 1000 * (576 + 512)


def test_of_chosen_tokens_only_those_count() -> None:
    chosen = AttentionProblem(2, 16, 1, (500, 3000), 576, v_head_dim=512, latent=True, select=2048)
    assert flops(chosen) == 2 * 16 * (500 + 2048) * (576 + 512)


def test_of_a_shared_problem_it_is_the_mean_of_a_gpu() -> None:
    assert flops(replace(PLAIN, parallel="cp:2")) == 4 * 8 * 2 * 100 * 64 // 2


def test_a_whole_model_has_none() -> None:
    assert flops(AttentionProblem(1, 32, 32, 1024, 128, whole_model="opt-6.7b")) is None


@pytest.mark.parametrize(("gpu", "tflop_s"), [("a100-80gb", 312), ("h100-sxm", 1071), ("l4", 121)])
def test_roofs_are_the_datasheets_at_the_boost_clock(gpu: str, tflop_s: int) -> None:
    """NVIDIA's 989 for an H100 are at 1830 MHz."""
    roofs = Roofs.of(find(gpu))
    assert roofs is not None
    assert roofs.bandwidth_tb_s == find(gpu).bandwidth_tb_s
    assert round(roofs.tflop_s) == tflop_s


def test_every_gpu_of_the_catalogue_has_roofs() -> None:
    assert all(map(Roofs.of, CATALOGUE))
