"""Which tokens and heads a GPU has where several share a call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from leanbench.core.errors import UserError
from leanbench.distributed.group import TIMEOUT_S, WORKSPACE_BYTES, ContextGroup


def contiguous_shard(length: Any, rank: int, size: int) -> tuple[Any, Any]:
    """The first token, and the number of tokens, that a rank has of sequences that are cut into
    `size` shards one after the other; the first shards are the longer ones.

    Args:
        length: of the whole sequences: a number, or an integer tensor.
    """
    start, end = _shard_start(length, rank, size), _shard_start(length, rank + 1, size)
    return start, end - start


def _shard_start(length: Any, rank: int, size: int) -> Any:
    """ceil(length x rank / size)."""
    return -(-length * rank // size)


def interleaved_shard(length: Any, rank: int, size: int, page_size: int) -> Any:
    """The number of tokens that a rank has of sequences whose pages of `page_size` tokens are dealt
    to the ranks in turn, as vLLM's decode context parallelism does.

    Args:
        length: of the whole sequences: a number, or an integer tensor.
    """
    turn = page_size * size
    whole = length // turn * page_size
    rest = length % turn - rank * page_size
    if isinstance(rest, int):
        return whole + min(max(rest, 0), page_size)
    return whole + rest.clamp(0, page_size)


@dataclass(frozen=True)
class Layout:
    """`tensor` x `context` GPUs: the heads are split into `tensor` shares, and the tokens of each
    share over `context` GPUs. Ranks with the same heads follow one another.
    """

    tensor: int
    context: int
    #: Of this process.
    rank: int
    #: Who has the other tokens of this rank's heads; None: nobody.
    group: ContextGroup | None = None

    @classmethod
    def make(
        cls,
        tensor: int = 1,
        context: int = 1,
        timeout_s: float = TIMEOUT_S,
        workspace_bytes: int = WORKSPACE_BYTES,
    ) -> Layout:
        """The layout of all processes, with their context groups: a collective.

        Args:
            timeout_s: as of `ContextGroup`; `workspace_bytes`, too.

        Raises:
            UserError: there are not `tensor` x `context` processes; or see `ContextGroup`.
        """
        import torch.distributed as dist

        size, rank = dist.get_world_size(), dist.get_rank()
        if tensor < 1 or context < 1 or tensor * context != size:
            raise UserError(
                f"{tensor} shares of the heads x {context} of the tokens are {tensor * context}"
                f" GPUs, and there are {size} processes: start as many as GPUs are needed"
            )
        group = None
        for first in range(0, size, context):
            # A collective of all processes, for every group.
            members: Any = dist.new_group(list(range(first, first + context)))
            if context > 1 and first <= rank < first + context:
                group = ContextGroup(members, timeout_s, workspace_bytes)
        return cls(tensor, context, rank, group)

    @property
    def tensor_rank(self) -> int:
        return self.rank // self.context

    @property
    def context_rank(self) -> int:
        return self.rank % self.context

    def heads(self, kv_heads: int) -> range:
        """KV heads of this rank, of a call's.

        Raises:
            UserError: they cannot be shared out evenly.
        """
        if kv_heads % self.tensor:
            raise UserError(
                f"{kv_heads} KV heads do not divide by {self.tensor} tensor-parallel GPUs: choose a"
                " number of GPUs that divides them, and split tokens over the others"
            )
        share = kv_heads // self.tensor
        return range(self.tensor_rank * share, (self.tensor_rank + 1) * share)
