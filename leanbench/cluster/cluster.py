"""Interface of a cluster: nodes with GPUs, actors on them, and calls of actors.

`leanbench.cluster.ray_cluster` implements it with Ray.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from leanbench.gpu.local import Target
from leanbench.records.boards import Board, difference

#: Environment variables that select kernels and settings, on every node.
_SHARED_VARIABLES = ("LEANBENCH_CONFIGS", "LEANBENCH_KERNEL_PATH")


def shared_variables() -> dict[str, str]:
    """Return environment variables for agents."""
    return {name: os.environ[name] for name in _SHARED_VARIABLES if name in os.environ}


class ActorLost(Exception):
    """An actor that ended before it answered. The message is a phrase."""


@dataclass(frozen=True)
class Node:
    """A machine of the cluster that is alive."""

    name: str
    host: str
    gpus: int


class Agent(Protocol):
    """Actor on the GPUs of a job. Methods raise UserError for bad input and unusable machines."""

    def target(self) -> Target:
        """Return the target of its jobs: its GPU, or the model of one."""
        ...

    def board(self) -> Board:
        """Return the board of its results, calibrated."""
        ...

    def work(self, job: Any, /) -> Any:
        """Run a job.

        Raises:
            ActorLost: This agent is unusable. Another can retry.
        """
        ...


class Cluster(Protocol):
    """A cluster that this process is connected to."""

    @property
    def address(self) -> str: ...

    def nodes(self) -> Sequence[Node]:
        """Return the nodes that are alive, in a stable order."""
        ...

    def start(self, node: Node, gpus: int, agent: type[Agent], arguments: Sequence[Any]) -> Any:
        """Start an actor with GPUs on a node. It ends with this process."""
        ...

    def call(self, actor: Any, method: str, *arguments: Any) -> Any:
        """Start a call."""
        ...

    def done(self, calls: Sequence[Any], timeout_s: float) -> Sequence[Any]:
        """Wait for one of the calls and return all that have ended."""
        ...

    def result(self, call: Any) -> Any:
        """Return the result of a call that has ended.

        Raises:
            UserError: The actor raised it.
            ActorLost: The actor raised it, ended or cannot be reached.
        """
        ...

    def stop(self, actor: Any) -> None: ...

    def close(self) -> None: ...


class Alike:
    """Check of boards: why one cannot join a run. A `refusal` of Dispatcher.run.

    Args:
        first: First board of the run; None for the first that joins.
        mix: Only report differences that --mix-boards accepts.
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
