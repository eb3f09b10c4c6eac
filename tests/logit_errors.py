"""Errors of logits with `attn_implementation="lean"`, relative to the same weights in fp32 with
eager attention, next to the errors of eager attention in the model's own dtype:

    python tests/logit_errors.py [KIND...]

Two layers, random weights. The tokens are given (the fp32 model's greedy ones), so that steps do
not depend on the rounding of others.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from decoders import KINDS, captured_logits_of, decoder, logits_of
from transformers.cache_utils import DynamicCache, StaticCache

from leanbench.integrations.transformers import register

PROMPT, NEW_TOKENS = 150, 64
#: Tokens of each prompt of a batch, padded on the left.
LENGTHS = (150, 97, 33, 140)
BATCHES = (1, 4)


@dataclass(frozen=True)
class LogitErrors:
    """Logits of the prompt and of each token after it, (batch, steps, vocabulary), fp32."""

    #: "dynamic" or "static", from the host; "captured", a static cache and one graph of the step.
    cache: str
    lean: torch.Tensor
    eager: torch.Tensor
    reference: torch.Tensor

    @property
    def lean_error(self) -> float:
        return float((self.lean - self.reference).abs().max())

    @property
    def eager_error(self) -> float:
        return float((self.eager - self.reference).abs().max())

    @property
    def clear(self) -> torch.Tensor:
        """Return (batch, steps): True if the reference's best logits differ beyond rounding."""
        best = self.reference.topk(2).values
        return best[..., 0] - best[..., 1] > 2 * self.eager_error

    @property
    def same_tokens(self) -> torch.Tensor:
        """Return (batch, steps): True if the greedy token is the reference's."""
        return self.lean.argmax(-1) == self.reference.argmax(-1)


def prompts(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (batch, PROMPT) tokens, and their mask with capacity for the new ones."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(2, 128, (batch, PROMPT), generator=generator)
    mask = torch.zeros(batch, PROMPT + NEW_TOKENS, dtype=torch.long)
    for row, length in enumerate(LENGTHS[:batch]):
        mask[row, PROMPT - length :] = 1
    return tokens.cuda(), mask.cuda()


def static_cache(model: Any) -> StaticCache:
    return StaticCache(config=model.config, max_cache_len=PROMPT + NEW_TOKENS + 50)


def logit_errors(kind: str, batch: int) -> Iterator[LogitErrors]:
    model = decoder(kind)
    exact = copy.deepcopy(model).float()
    exact.set_attn_implementation("eager")
    tokens, mask = prompts(batch)
    tokens = exact.generate(
        tokens, attention_mask=mask[:, :PROMPT], max_new_tokens=NEW_TOKENS, do_sample=False
    )
    step = tokens, mask, PROMPT
    reference = logits_of(exact, "eager", *step, DynamicCache(config=exact.config))
    eager = logits_of(model, "eager", *step, DynamicCache(config=model.config))
    for name, cache in {
        "dynamic": DynamicCache(config=model.config),
        "static": static_cache(model),
    }.items():
        yield LogitErrors(name, logits_of(model, "lean", *step, cache), eager, reference)
    pair = static_cache(model), static_cache(model)
    captured = captured_logits_of(model, "lean", *step, pair)
    yield LogitErrors("captured", captured, eager, reference)


def main(kinds: list[str]) -> None:
    transformers = import_module("transformers")

    from leanbench.records.environment import kernels_hash

    register()
    print(
        f"Largest difference of logits from the fp32 model's over {NEW_TOKENS + 1} steps (a prompt,"
        f" {NEW_TOKENS} tokens; the fp32 model's greedy tokens are given), of"
        ' attn_implementation="lean" and of eager attention in the model\'s dtype; the'
        " largest logit; shares of steps whose greedy token is the fp32 model's, and whose best two"
        " logits rounding cannot swap."
    )
    lengths = ", ".join(map(str, LENGTHS))
    print(f"2 layers, random weights, prompts of {lengths} tokens padded on the left to {PROMPT}.")
    print(
        f"{torch.cuda.get_device_name()}, transformers {transformers.__version__}, torch"
        f" {torch.__version__}, kernels {kernels_hash()}"
    )
    print("model     batch  cache     lean      eager     largest  same   clear")
    for kind in kinds:
        for batch in BATCHES:
            for errors in logit_errors(kind, batch):
                print(
                    f"{kind:<9} {batch:>5}  {errors.cache:<8}  {errors.lean_error:<8.4g} "
                    f" {errors.eager_error:<8.4g}  {float(errors.reference.abs().max()):<7.3g} "
                    f" {float(errors.same_tokens.float().mean()):.3f} "
                    f" {float(errors.clear.float().mean()):.3f}",
                    flush=True,
                )


if __name__ == "__main__":
    main(sys.argv[1:] or list(KINDS))
