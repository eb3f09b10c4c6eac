"""The step of linear attention that a tool times."""

import torch

from tools.gpu.linear_step import shapes, step


def test_a_step_is_the_gated_delta_rule():
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    state, q, k, v = normal(3, 4, 5), normal(3, 5, 1), normal(3, 5, 1), normal(3, 4, 1)
    decay, beta = normal(3, 1, 5).sigmoid(), normal(3, 1, 1).sigmoid()
    decayed = state * decay
    erased = torch.eye(5, dtype=torch.float64) - beta * k @ k.mT
    expected = decayed @ erased + beta * v @ k.mT
    out = step(state, q, k, v, decay, beta)
    torch.testing.assert_close(state, expected)
    torch.testing.assert_close(out, expected @ q)


def test_states_of_registered_models():
    assert "kimi-linear-48b-a3b" in shapes()[32, 128, 128]
