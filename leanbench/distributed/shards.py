"""Tokens and heads of a GPU in a shared call."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch

from leanbench.core.errors import UserError
from leanbench.core.parallel import shard_start
from leanbench.distributed.group import (
    TIMEOUT_S,
    WORKSPACE_BYTES,
    ContextGroup,
    check_processes,
)


def contiguous_shard(length: Any, rank: int, size: int) -> tuple[Any, Any]:
    """Return the first token and the number of tokens of a rank, for contiguous shards.

    The first `length` % `size` ranks have one token more than the others.

    Args:
        length: Length of the whole sequences: an int, or an integer tensor.

    Raises:
        UserError: The length or the rank is invalid.
    """
    length = _checked(length, rank, size)
    start, end = _start(length, rank, size), _start(length, rank + 1, size)
    return start, end - start


def _start(length: Any, rank: int, size: int) -> Any:
    """Return `shard_start`, also of tensors; no intermediate value exceeds the length."""
    if isinstance(length, int):
        return shard_start(length, rank, size)
    return length // size * rank + (length % size).clamp(max=rank)


def interleaved_shard(length: Any, rank: int, size: int, page_size: int) -> Any:
    """Return the number of tokens of a rank if pages are distributed round-robin, as by vLLM's
    decode context parallelism.

    Args:
        length: Length of the whole sequences: an int, or an integer tensor.

    Raises:
        UserError: The length, the rank or the page size is invalid.
    """
    length = _checked(length, rank, size)
    page_size = _whole("page_size", page_size, at_least=1)
    turn = page_size * size
    if isinstance(length, int):
        rest = length % turn - rank * page_size
        return length // turn * page_size + min(max(rest, 0), page_size)
    # A turn may have more tokens than 32 bits count.
    wide = length.long()
    rest = (wide % turn - rank * page_size).clamp(0, page_size)
    return (wide // turn * page_size + rest).to(length.dtype)


def _checked(length: Any, rank: int, size: int) -> Any:
    """Return the length as an int, or the tensor.

    Raises:
        UserError: The length or the rank is invalid.
    """
    if _whole("rank", rank) >= _whole("size", size, at_least=1):
        raise UserError(
            f"rank {rank} is not one of {size} ranks, counted from 0: pass a lower one, or more"
            " ranks"
        )
    if not isinstance(length, torch.Tensor):
        return _whole("length", length)
    if length.is_floating_point() or length.is_complex() or length.dtype == torch.bool:
        raise UserError(f"length is a tensor of {length.dtype}: pass one of whole numbers")
    return length


def _whole(name: str, value: Any, at_least: int = 0) -> int:
    """Return an argument as an int.

    Raises:
        UserError: It is not a whole number, or below `at_least`.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or number < at_least:
        raise UserError(f"{name} is {value!r}: pass a whole number of {at_least} or more")
    return number


@dataclass(frozen=True)
class Layout:
    """`tensor` x `context` GPUs: heads are split into `tensor` shares, and the tokens of each share
    over `context` GPUs. Ranks with the same heads are consecutive.
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
        """Return the layout of all processes, with their context groups: a collective.

        Args:
            timeout_s: See `ContextGroup`; `workspace_bytes`, too.

        Raises:
            UserError: There are not `tensor` x `context` processes; or see `ContextGroup`.
        """
        import torch.distributed as dist

        check_processes()
        size, rank = dist.get_world_size(), dist.get_rank()
        if tensor < 1 or context < 1 or tensor * context != size:
            raise UserError(
                f"{tensor} shares of the heads x {context} of the tokens are {tensor * context}"
                f" GPUs, and there are {size} processes: start as many as GPUs are needed"
            )
        # Collectives of all processes, before any that a context group may refuse to its own.
        members: list[Any] = [
            dist.new_group(list(range(first, first + context))) for first in range(0, size, context)
        ]
        group = None
        if context > 1:
            group = ContextGroup(members[rank // context], timeout_s, workspace_bytes)
        return cls(tensor, context, rank, group)

    @property
    def tensor_rank(self) -> int:
        return self.rank // self.context

    def heads(self, kv_heads: int) -> range:
        """Return the KV heads of this rank.

        Raises:
            UserError: They cannot be split evenly.
        """
        if kv_heads % self.tensor:
            raise UserError(
                f"{kv_heads} KV heads do not divide by {self.tensor} tensor-parallel GPUs: choose a"
                " number of GPUs that divides them, and split tokens over the others"
            )
        share = kv_heads // self.tensor
        return range(self.tensor_rank * share, (self.tensor_rank + 1) * share)
