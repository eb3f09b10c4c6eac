"""`attn_implementation="lean"` on a GPU: tokens and logits of models with random weights, against
the same weights in fp32 with eager attention.

A low-precision model differs from the fp32 one by its rounding everywhere. Lean's logits may differ
by 1.5 times the difference of eager attention in the same dtype. The token must be the fp32 model's
if that model's margin exceeds eager attention's difference.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

from decoders import KINDS, decoder
from logit_errors import BATCHES, LENGTHS, PROMPT, logit_errors, prompts
from transformers.generation.configuration_utils import ContinuousBatchingConfig, GenerationConfig

from leanbench.integrations.transformers import register

pytestmark = pytest.mark.gpu

ROUNDING = 1.5


@pytest.fixture(autouse=True)
def _registered() -> None:
    register()


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_greedy_tokens(kind, batch):
    """Steps run from the host with both caches, and in one graph replayed while its cache grows."""
    seen = []
    for errors in logit_errors(kind, batch):
        assert errors.clear.float().mean() > 0.2
        assert errors.lean_error <= ROUNDING * errors.eager_error
        assert errors.same_tokens[errors.clear].all()
        seen.append(errors.cache)
    assert seen == ["dynamic", "static", "captured"]


@pytest.mark.parametrize("padded", [False, True])
def test_generate_compiles_its_steps_with_a_static_cache(padded):
    """transformers compiles them with CUDA graphs. Logits are compared until tokens differ."""
    torch._dynamo.reset()
    model = decoder("llama")
    model.set_attn_implementation("lean")
    tokens, mask = prompts(4)
    results = []
    for own in ({}, {"cache_implementation": "static"}):
        result = model.generate(
            tokens,
            attention_mask=mask[:, :PROMPT] if padded else torch.ones_like(tokens),
            max_new_tokens=16,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            **own,
        )
        results.append((result.sequences, torch.stack(result.logits, dim=1).float()))
    (eager_tokens, eager), (compiled_tokens, compiled) = results
    agree = (eager_tokens == compiled_tokens)[:, PROMPT - 1 : -1].cumprod(-1).bool()
    assert agree.float().mean() > 0.3
    torch.testing.assert_close(compiled[agree], eager[agree], rtol=0, atol=0.3)


def test_continuous_batching():
    """OPT in fp16 makes choices with far larger margins than its rounding."""
    model = decoder("opt")
    tokens, _ = prompts(4)
    requests = [row[:length].tolist() for row, length in zip(tokens, LENGTHS, strict=True)]
    results = []
    for implementation in ("paged|eager", "paged|lean"):
        model.set_attn_implementation(implementation)
        batch = model.generate_batch(
            requests,
            generation_config=GenerationConfig(
                max_new_tokens=16, do_sample=False, eos_token_id=-1, pad_token_id=0
            ),
            continuous_batching_config=ContinuousBatchingConfig(
                block_size=16, num_blocks=256, max_batch_tokens=256
            ),
            progress_bar=False,
        )
        results.append(torch.tensor([result.generated_tokens for result in batch.values()]))
    assert results[1].shape == (4, 16)
    assert torch.equal(*results)
