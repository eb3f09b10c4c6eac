"""`attn_implementation="lean"` on a GPU: tokens and logits of models with random weights, against
the same weights in fp32 with eager attention.

A low-precision model differs from the fp32 one by its rounding everywhere. Lean's logits may differ
by 1.5 times as much as eager attention's do in the same dtype; where the fp32 model's choice is
clearer than both differences, the token must be its own.
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
    tokens = torch.randint(2, 1024, (batch, PROMPT), generator=generator)
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
    for cache in caches(model).values():
        lean = logits_of(model, "lean", *step, cache)
        errors = [float((logits - reference).abs().max()) for logits in (lean, eager)]
        assert errors[0] <= ROUNDING * errors[1]
        clear = best[..., 0] - best[..., 1] > 2 * max(errors)
        assert clear.float().mean() > 0.5
        assert torch.equal(lean.argmax(-1)[clear], reference.argmax(-1)[clear])


@torch.no_grad()
def test_a_captured_step_decodes_as_its_cache_grows():
    """One graph of the whole model over a static cache, replayed for every token."""
    model = decoder("llama")
    model.set_attn_implementation("lean")
    tokens, _ = prompts(4)
    new = 32
    expected = model.generate(tokens, max_new_tokens=new, do_sample=False)[:, PROMPT:]
    cache: Any = StaticCache(config=model.config, max_cache_len=PROMPT + new)
    first = model(tokens, past_key_values=cache).logits[:, -1:].argmax(-1)
    token, position = first.clone(), torch.full((4, 1), PROMPT, device="cuda")
    lengths = [layer.cumulative_length for layer in cache.layers]

    def step() -> None:
        logits = model(token, position_ids=position, past_key_values=cache).logits
        token.copy_(logits[:, -1:].argmax(-1))
        position.add_(1)

    def rewind() -> None:
        token.copy_(first)
        position.fill_(PROMPT)
        for length in lengths:
            length.fill_(PROMPT)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    rewind()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    rewind()
    decoded = [first.clone()]
    for _ in range(new - 1):
        graph.replay()
        decoded.append(token.clone())
    assert torch.equal(torch.cat(decoded, dim=1), expected)


@pytest.mark.parametrize("padded", [False, True])
def test_generate_compiles_its_steps_with_a_static_cache(padded):
    """transformers compiles them with CUDA graphs by itself."""
    torch._dynamo.reset()
    model = decoder("llama")
    model.set_attn_implementation("lean")
    tokens, mask = prompts(4)
    mask = mask[:, :PROMPT] if padded else torch.ones_like(tokens)
    options = {"max_new_tokens": 16, "do_sample": False, "attention_mask": mask}
    eager = model.generate(tokens, **options)
    compiled = model.generate(tokens, cache_implementation="static", **options)
    assert (eager == compiled).float().mean() > 0.99


def test_continuous_batching():
    model = decoder("gpt-oss")
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
    assert (results[0] == results[1]).float().mean() > 0.9
