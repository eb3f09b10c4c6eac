"""One decode step of a whole model on the GPU, with any kernel as its attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from leanbench.core.problem import AttentionProblem
from leanbench.decode.attention import Attention
from leanbench.decode.cache import StepCache
from leanbench.decode.model import random_model

if TYPE_CHECKING:
    import torch


class DecodeStep:
    """A model, its KV cache and one token of every sequence; a call is a step, with the greedy
    choice of the next tokens.
    """

    def __init__(self, problem: AttentionProblem, device: str | torch.device) -> None:
        import torch

        assert problem.whole_model is not None
        self.problem = problem
        self.model = random_model(problem.whole_model, problem.dtype, str(device))
        self.cache = StepCache(problem, device)
        contexts = torch.tensor(problem.contexts, device=device)
        #: (batch, 1): the tokens that the step takes in, and where they stand.
        self._tokens = torch.arange(problem.batch, device=device)[:, None] + 5
        self._positions = contexts[:, None] - 1
        self._masks = self._all_masks(device)
        #: (batch,): what the latest step, or the latest replay of its graph, chose.
        self.chosen = torch.zeros(problem.batch, dtype=torch.int64, device=device)

    def _all_masks(self, device: str | torch.device) -> Any:
        """True where a token is seen, (batch, 1, 1, capacity) by kind of layer, as models with
        kinds take it, or of all layers.
        """
        import torch

        masks = {}
        for window, lengths in self.cache.lengths.items():
            room = min(self.problem.cache_capacity, window or self.problem.cache_capacity)
            seen = torch.arange(room, device=device) < lengths[:, None]
            kind = "full_attention" if window is None else "sliding_attention"
            masks[kind] = seen[:, None, None]
        return masks if len(masks) > 1 else masks["full_attention"]

    def attend_with(self, attention: Attention) -> None:
        """Call `attention` in every layer from the next step on."""
        self.model.config.leanbench_attention = attention  # pyright: ignore

    def run_with(self, attention: Attention) -> None:
        """Run a step with `attention` in every layer."""
        self.attend_with(attention)
        self()

    def __call__(self) -> None:
        import torch

        torch.argmax(self.logits(), dim=-1, out=self.chosen)

    def logits(self) -> torch.Tensor:
        """The logits of a step, (batch, vocabulary): all of it but the choice."""
        import torch

        with torch.no_grad():
            return self.model(
                input_ids=self._tokens,
                position_ids=self._positions,
                attention_mask=self._masks,
                past_key_values=self.cache,
                use_cache=True,
            ).logits[:, -1]

    def prefill(self) -> None:
        """The prompts of all sequences, as long as their contexts; K and V of the cache become
        theirs.
        """
        import torch

        context = self.problem.max_context
        tokens = self._tokens.expand(-1, context)
        positions = torch.arange(context, device=tokens.device).expand_as(tokens)
        with torch.no_grad():
            self.model(
                input_ids=tokens,
                position_ids=positions,
                # Of four dimensions: the model makes none, and the attention looks at none.
                attention_mask=tokens.new_ones((1, 1, 1, 1), dtype=torch.bool),
                past_key_values=self.cache,
                use_cache=True,
                logits_to_keep=1,
            )
