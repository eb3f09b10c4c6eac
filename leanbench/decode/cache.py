"""KV cache of a decode step with the interface of transformers' caches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from leanbench.core.inputs import torch_dtype
from leanbench.core.llm.layers import Layer
from leanbench.core.problem import AttentionProblem

if TYPE_CHECKING:
    import torch


class StepCache:
    """A cache of random values in which a step writes the last token of every sequence: the
    attention of each layer does, see `leanbench.decode.attention`.

    Lengths stay, so steps can be repeated. Layers with a window have a ring of that many tokens. K
    and V of a layer are (batch, kv_heads, capacity, head_dim); with the layout NHD, tokens come
    before heads in memory.
    """

    def __init__(self, problem: AttentionProblem, device: str | torch.device) -> None:
        import torch

        assert problem.model is not None
        contexts = torch.tensor(problem.contexts, device=device)
        self._rows = torch.arange(problem.batch, device=device)
        self._windows = [
            layer.window if isinstance(layer, Layer) else None
            for layer in problem.model.every_layer
        ]
        #: Tokens of each sequence by the layer's window, (batch,), int32.
        self.lengths: dict[int | None, torch.Tensor] = {}
        #: Those of layers without a window before the step, (batch,), int32.
        self.lengths_before = (contexts - 1).int()
        #: Position of the last token in the cache by the layer's window, (batch,), int64.
        self._positions: dict[int | None, torch.Tensor] = {}
        for window in dict.fromkeys(self._windows):
            room = min(problem.cache_capacity, window or problem.cache_capacity)
            self.lengths[window] = contexts.clamp(max=room).int()
            self._positions[window] = (contexts - 1) % room
        self.layers = [self._random_layer(problem, window, device) for window in self._windows]

    def _random_layer(
        self, problem: AttentionProblem, window: int | None, device: str | torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        room = min(problem.cache_capacity, window or problem.cache_capacity)
        shape = (problem.batch, problem.kv_heads, room, problem.head_dim)
        swap = problem.kv_layout == "NHD"
        if swap:
            shape = (problem.batch, room, problem.kv_heads, problem.head_dim)
        dtype = torch_dtype(problem.dtype)
        k = torch.empty(shape, dtype=dtype, device=device).normal_()
        v = torch.empty_like(k).normal_()
        return (k.transpose(1, 2), v.transpose(1, 2)) if swap else (k, v)

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the arguments, for the attention of the layer.

        Write them if they are several tokens, a prompt.

        Args:
            key: (batch, kv_heads, new tokens, head_dim).
            value: Like `key`.
        """
        if key.shape[2] > 1:
            for cache, new in zip(self.layers[layer], (key, value), strict=True):
                cache[:, :, : key.shape[2]] = new
        return key, value

    def write(
        self, key: torch.Tensor, value: torch.Tensor, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the K and V of a token of every sequence, (batch, kv_heads, 1, head_dim), with
        torch operators. Return those of the layer.
        """
        positions = self._positions[self._windows[layer]]
        for cache, new in zip(self.layers[layer], (key, value), strict=True):
            cache[self._rows, :, positions] = new[:, :, 0]
        return self.layers[layer]

    def holds(self, key: torch.Tensor, value: torch.Tensor, layer: int) -> bool:
        """Return True if these tokens, shaped as for `write`, are in their place."""
        positions = self._positions[self._windows[layer]]
        tokens = zip(self.layers[layer], (key, value), strict=True)
        return all(cache[self._rows, :, positions].equal(new[:, :, 0]) for cache, new in tokens)

    def get_seq_length(self, layer: int = 0) -> int:
        """Return 0: the model gets positions and masks as arguments."""
        return 0
