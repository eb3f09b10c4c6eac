"""When tokens of a replay are another choice than the eager step's."""

from __future__ import annotations

import pytest
import torch

from leanbench.decode.tokens import token_fault


def logits_of(*rows: list[float], dtype: str = "bf16") -> torch.Tensor:
    return torch.tensor(rows, dtype={"bf16": torch.bfloat16, "fp16": torch.float16}[dtype])


@pytest.mark.parametrize(
    ("dtype", "second", "limit"),
    [
        # 2 x 2^-7 x 5.75
        ("bf16", 5.6875, None),
        ("bf16", 5.625, "0.125 below the largest, and rounding to bf16 accounts for 0.0898"),
        # 2 x 2^-10 x 5.75
        ("fp16", 5.7421875, None),
        ("fp16", 5.734375, "0.0156 below the largest, and rounding to fp16 accounts for 0.0112"),
    ],
)
def test_tokens_differ_where_their_logits_do(dtype, second, limit):
    logits = logits_of([-1.0, 5.75, second, 0.5], [3.0, 1.0, 0.0, 2.0], dtype=dtype)
    assert token_fault(logits, torch.tensor([1, 0]), dtype) is None
    fault = token_fault(logits, torch.tensor([2, 0]), dtype)
    if limit is None:
        assert fault is None
    else:
        assert fault == (
            "a replay of the CUDA graph chose 1 of 2 tokens that the eager step did not: in its"
            f" logits they are up to {limit}"
        )


def test_the_worst_token_is_told_beside_its_own_limit():
    logits = logits_of([8.0, 4.0], [1.0, 0.5], [1.0, 0.25], [2.0, 2.0])
    assert token_fault(logits, torch.tensor([0, 1, 1, 1]), "bf16") == (
        "a replay of the CUDA graph chose 2 of 4 tokens that the eager step did not: in its"
        " logits they are up to 0.75 below the largest, and rounding to bf16 accounts for 0.0156"
    )


def test_rounding_counts_from_the_largest_logit_of_either_sign():
    """Sums that nearly cancel are no more exact than the others of their row."""
    logits = logits_of([-8.0, 0.0625, 0.0])
    assert token_fault(logits, torch.tensor([2]), "bf16") is None


def test_a_token_that_was_not_written_and_a_logit_that_is_no_number():
    logits = logits_of([1.0, 2.0], [1.0, 2.0], [1.0, 2.0])
    assert token_fault(logits, torch.tensor([1, -1, -1]), "bf16") == (
        "a replay of the CUDA graph wrote no token for 2 of 3 sequences"
    )
    broken = logits_of([float("nan"), 2.0])
    assert "chose 1 of 1 tokens" in str(token_fault(broken, torch.tensor([1]), "bf16"))
