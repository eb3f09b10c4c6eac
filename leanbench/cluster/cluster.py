"""A cluster as leanbench needs it: nodes with GPUs, actors on them, and calls of actors.

`leanbench.cluster.ray_cluster` is Ray's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from leanbench.gpu.local import Target
from leanbench.records.boards import Board, difference

#: Environment variables that decide which kernels and settings there are, on every node as here.
_SHARED_VARIABLES = ("LEANBENCH_CONFIGS", "LEANBENCH_KERNEL_PATH")


def shared_variables() -> dict[str, str]:
    """Environment variables that agents get, too."""
    return {name: os.environ[name] for name in _SHARED_VARIABLES if name in os.environ}


class ActorLost(Exception):
    """An actor that ended before it answered, or gave up. The message says how, as a phrase."""


@dataclass(frozen=True)
class Node:
    """One machine of the cluster that is alive."""

    name: str
    host: str
    gpus: int


class Agent(Protocol):
    """An actor on one GPU, or on as many as its jobs share. Bad input and a machine that cannot
    work are UserErrors in all of its methods.
    """

    def target(self) -> Target:
        """What its jobs are about: its GPU, or the model of one."""
        ...

    def board(self) -> Board:
        """What its results stand for, calibrated."""
        ...

    def work(self, job: Any, /) -> Any:
        """What comes of a job.

        Raises:
            ActorLost: this agent is of no more use, another may have more luck.
        """
        ...


class Cluster(Protocol):
    """A cluster that this process is connected to."""

    @property
    def address(self) -> str: ...

    def nodes(self) -> Sequence[Node]:
        """Those that are alive, in an order that stays."""
        ...

    def start(self, node: Node, gpus: int, agent: type[Agent], arguments: Sequence[Any]) -> Any:
        """An actor on that node with so many GPUs of its own; it ends with this process."""
        ...

    def call(self, actor: Any, method: str, *arguments: Any) -> Any:
        """A call that was begun."""
        ...

    def done(self, calls: Sequence[Any], timeout_s: float) -> Sequence[Any]:
        """Those of these calls that have ended, after a wait for the first."""
        ...

    def result(self, call: Any) -> Any:
        """What a call that has ended returned.

        Raises:
            UserError: that of the actor.
            ActorLost: that of the actor; or it ended, or was not to be reached.
        """
        ...

    def stop(self, actor: Any) -> None: ...

    def close(self) -> None: ...


class Alike:
    """Why a board may not take part beside the first one: a `refusal` of Dispatcher.run.

    Args:
        first: of the run so far; None: the first that comes.
        mix: differences that may be put up with are said, and no refusal.
    """

    def __init__(
        self, target: Target, first: Board | None, mix: bool, say: Callable[[str], None]
    ) -> None:
        self._target, self._first, self._mix, self._say = target, first, mix, say

    def __call__(self, board: Board) -> str | None:
        source = "predicted" if self._target.local_index is None else "measured"
        if (board.source, board.gpu["name"]) != (source, self._target.spec.name):
            return (
                f"its rows would be {board.source} for {board.gpu['name']}, those of this run are"
                f" {source} for {self._target.spec.name}"
            )
        if self._first is None:
            self._first = board
        found = difference(self._first, board)
        if found is None:
            return None
        if not found.mixable or not self._mix:
            hint = ", --mix-boards takes it all the same" if found.mixable else ""
            return f"{found.phrase} as of {self._first.label}{hint}"
        self._say(f"! {board.label} takes part, and {found.phrase} as of {self._first.label}.")
        return None
