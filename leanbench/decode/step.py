"""Decode step of a whole model on the GPU, with any kernel as its attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from leanbench.core.problem import AttentionProblem
from leanbench.decode.attention import Attention
from leanbench.decode.cache import StepCache
from leanbench.decode.model import random_model

if TYPE_CHECKING:
    import torch


class DecodeStep:
    """Model, KV cache and one token of every sequence.

    A call runs a step and chooses the next tokens greedily.
    """

    def __init__(self, problem: AttentionProblem, device: str | torch.device) -> None:
        import torch

        assert problem.whole_model is not None
        self.problem = problem
        self.model = random_model(problem.whole_model, problem.dtype, str(device))
        self.cache = StepCache(problem, device)
        contexts = torch.tensor(problem.contexts, device=device)
        #: Input tokens of the step and their positions, (batch, 1).
        self._tokens = torch.arange(problem.batch, device=device)[:, None] + 5
        self._positions = contexts[:, None] - 1
        self._masks = self._all_masks(device)
        #: Tokens chosen by the latest step or replay, (batch,).
        self.chosen = torch.zeros(problem.batch, dtype=torch.int64, device=device)

    def _all_masks(self, device: str | torch.device) -> Any:
        """Return masks of the visible tokens, (batch, 1, 1, capacity): one for all layers, or a
        dictionary by kind of layer.
        """
        import torch

        masks = {}
        for window, lengths in self.cache.lengths.items():
            room = min(self.problem.cache_capacity, window or self.problem.cache_capacity)
            seen = torch.arange(room, device=device) < lengths[:, None]
            kind = "full_attention" if window is None else "sliding_attention"
            masks[kind] = seen[:, None, None]
        return masks if len(masks) > 1 else next(iter(masks.values()))

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
        """Run a step without the choice. Return logits, (batch, vocabulary)."""
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
        """Run prompts as long as the contexts. Their K and V overwrite the cache."""
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


def products_of(step: DecodeStep) -> Callable[[], None]:
    """Return a launch of the step's linear layers and experts alone, on the inputs of a step.

    Not from a profiler: after one has attached to the process, a step of 1,400 kernels without
    attention took 6.82 ms instead of 6.26 (an H200, reports/h200/decode-models).
    """
    import torch

    calls: list[tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]] = []

    def record(module: torch.nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        calls.append((module, args, named))

    hooks = [
        module.register_forward_pre_hook(record, with_kwargs=True)
        for module in step.model.modules()
        if isinstance(module, torch.nn.Linear) or type(module).__name__.endswith("Experts")
    ]
    try:
        step()
    finally:
        for hook in hooks:
            hook.remove()

    def launch() -> None:
        with torch.no_grad():
            for module, args, named in calls:
                module(*args, **named)

    return launch
