"""A cluster as leanbench needs it: nodes with GPUs, actors on them, and calls of actors.

`leanbench.cluster.ray_cluster` is Ray's.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from leanbench.gpu.local import Target
from leanbench.records.boards import Board

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
