"""`attn_implementation="lean"` on a GPU: tokens and logits of models with random weights, against
the same weights in fp32 with eager attention.

A low-precision model differs from the fp32 one by its rounding everywhere. Lean's logits may differ
by 1.5 times as much as eager attention's do in the same dtype; where the fp32 model's choice is
clearer than eager attention's difference, the token must be its own. Tokens are given, so that no
step follows from another one's rounding.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

from decoders import KINDS, decoder, logits_of
from transformers import (
    ContinuousBatchingConfig,
    DynamicCache,
    GenerationConfig,
    StaticCache,
)

from leanbench.integrations.transformers import register

pytestmark = pytest.mark.gpu

PROMPT, NEW_TOKENS = 150, 64
#: Tokens of each prompt of a batch, padded on the left.
LENGTHS = (150, 97, 33, 140)
ROUNDING = 1.5


@pytest.fixture(autouse=True)
def _registered() -> None:
    register()


def prompts(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(batch, PROMPT) tokens, and their mask with room for the new ones."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(2, 128, (batch, PROMPT), generator=generator)
    mask = torch.zeros(batch, PROMPT + NEW_TOKENS, dtype=torch.long)
    for row, length in enumerate(LENGTHS[:batch]):
        mask[row, PROMPT - length :] = 1
    return tokens.cuda(), mask.cuda()


def caches(model: Any) -> dict[str, Any]:
    return {
        "dynamic": DynamicCache(config=model.config),
        "static": StaticCache(config=model.config, max_cache_len=PROMPT + NEW_TOKENS + 50),
    }


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_greedy_tokens(kind, batch):
    model = decoder(kind)
    exact = copy.deepcopy(model).float()
    exact.set_attn_implementation("eager")
    tokens, mask = prompts(batch)
    tokens = exact.generate(
        tokens, attention_mask=mask[:, :PROMPT], max_new_tokens=NEW_TOKENS, do_sample=False
    )
    step = tokens, mask, PROMPT
    reference = logits_of(exact, "eager", *step, caches(exact)["dynamic"])
    eager = logits_of(model, "eager", *step, caches(model)["dynamic"])
    best = reference.topk(2).values
    eager_error = float((eager - reference).abs().max())
    clear = best[..., 0] - best[..., 1] > 2 * eager_error
    assert clear.float().mean() > 0.2
    for cache in caches(model).values():
        lean = logits_of(model, "lean", *step, cache)
        assert float((lean - reference).abs().max()) <= ROUNDING * eager_error
        assert torch.equal(lean.argmax(-1)[clear], reference.argmax(-1)[clear])


@torch.no_grad()
def test_a_captured_step_decodes_as_its_cache_grows():
    """One graph of the whole model over a static cache, replayed for every token."""
    model = decoder("llama")
    tokens, mask = prompts(4)
    tokens = torch.cat((tokens, tokens[:, :NEW_TOKENS]), dim=1)
    step = tokens, torch.ones_like(mask), PROMPT
    expected = logits_of(model, "lean", *step, caches(model)["static"])
    cache: Any = caches(model)["static"]
    model(tokens[:, :PROMPT], past_key_values=cache)
    token, position = tokens[:, PROMPT : PROMPT + 1].clone(), tokens.new_full((4, 1), PROMPT)

    def run() -> torch.Tensor:
        return model(token, position_ids=position, past_key_values=cache).logits[:, -1].float()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = run()
    for layer in cache.layers:
        layer.cumulative_length.fill_(PROMPT)
    for count in range(NEW_TOKENS - 1):
        token.copy_(tokens[:, PROMPT + count : PROMPT + count + 1])
        position.fill_(PROMPT + count)
        graph.replay()
        torch.testing.assert_close(logits, expected[:, count + 1], rtol=0, atol=0.1)


@pytest.mark.parametrize("padded", [False, True])
def test_generate_compiles_its_steps_with_a_static_cache(padded):
    """transformers compiles them with CUDA graphs by itself. Logits are compared as long as the
    tokens before them agree.
    """
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
    """OPT in fp16, whose choices are far clearer than its rounding."""
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
