"""Packed query tokens, each sequence in a row of its own, and their outputs packed again."""

from __future__ import annotations

import torch


class Rows:
    """Where the query tokens of `cu_seqlens_q` are in rows of `most` tokens, each sequence at the
    end of its own: so its tokens stand where they stood, seen from the sequence's end.

    Args:
        starts: (batch + 1,) int32.
        tokens: of all sequences.
    """

    def __init__(self, starts: torch.Tensor, tokens: int, most: int) -> None:
        self._ends = starts[1:].long()
        self._tokens, self._most = tokens, most

    def unpack(self, q: torch.Tensor) -> torch.Tensor:
        """(batch, most, q_heads, head_dim); rows before a sequence's first are any query tokens."""
        steps = torch.arange(self._most, device=q.device) - self._most
        return q[(self._ends[:, None] + steps).clamp(0, self._tokens - 1)]

    def pack(
        self, out: torch.Tensor, lse: torch.Tensor, to: torch.Tensor, to_lse: torch.Tensor | None
    ) -> None:
        """Writes an output (batch, most, q_heads, head_dim) and LSE (batch, q_heads, most) to
        packed ones; `to_lse` is None where nobody reads it. Those of a sequence's tokens beyond
        `most` are left as they are.
        """
        tokens = torch.arange(self._tokens, device=out.device)
        owner = torch.searchsorted(self._ends, tokens, right=True)
        owner = owner.clamp(max=self._ends.shape[0] - 1)
        place = (tokens - self._ends[owner]).clamp(max=-1) + self._most
        has_one, place = place >= 0, place.clamp(min=0)
        to.copy_(torch.where(has_one[:, None, None], out[owner, place], to))
        if to_lse is not None:
            to_lse.copy_(torch.where(has_one, lse[owner, :, place].T, to_lse))
