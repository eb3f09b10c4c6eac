"""A cluster in this process: agents are objects, calls run when their end is waited for, and tests
end nodes and actors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from leanbench.cluster.cluster import ActorLost, Node
from leanbench.core.errors import UserError


@dataclass(eq=False)
class Actor:
    node: Node
    agent: Any
    alive: bool = True


@dataclass(eq=False)
class Call:
    actor: Actor
    method: str
    arguments: tuple[Any, ...]
    number: int
    answer: Any = None


class FakeCluster:
    """A cluster of these nodes.

    Args:
        before: called with this cluster before each `work` of an agent, to end nodes or actors.
    """

    address = "10.0.0.1:6379"

    def __init__(
        self, nodes: Sequence[Node], before: Callable[[FakeCluster, Call], None] | None = None
    ) -> None:
        self._nodes = list(nodes)
        self._before = before
        self._numbers = count()
        self.actors: list[Actor] = []
        #: (node, job) of every started work.
        self.works: list[tuple[str, Any]] = []
        self.closed = False

    def nodes(self) -> list[Node]:
        return list(self._nodes)

    def add(self, node: Node) -> None:
        self._nodes.append(node)

    def end_node(self, name: str) -> None:
        self._nodes = [node for node in self._nodes if node.name != name]
        for actor in self.actors:
            if actor.node.name == name:
                actor.alive = False

    def start(self, node: Node, gpus: int, agent: type[Any], arguments: Sequence[Any]) -> Actor:
        on_node = [actor for actor in self.actors if actor.alive and actor.node == node]
        assert len(on_node) < node.gpus // gpus
        self.actors.append(Actor(node, agent(*arguments)))
        return self.actors[-1]

    def call(self, actor: Actor, method: str, *arguments: Any) -> Call:
        return Call(actor, method, arguments, next(self._numbers))

    def done(self, calls: Sequence[Call], timeout_s: float) -> list[Call]:
        """Complete only the call that started first."""
        call = min(calls, key=lambda call: call.number)
        if call.method == "work":
            self.works.append((call.actor.node.name, call.arguments[0]))
            if self._before is not None:
                self._before(self, call)
        try:
            if call.actor.alive:
                call.answer = getattr(call.actor.agent, call.method)(*call.arguments)
        except (UserError, ActorLost) as error:
            call.answer = error
        return [call]

    def result(self, call: Call) -> Any:
        if not call.actor.alive:
            raise ActorLost("ActorDiedError")
        if isinstance(call.answer, Exception):
            raise call.answer
        return call.answer

    def stop(self, actor: Actor) -> None:
        actor.alive = False

    def close(self) -> None:
        self.closed = True


def nodes(*gpus: int) -> list[Node]:
    """Return nodes a, b and so on with these numbers of GPUs."""
    return [Node(name, f"host-{name}", own) for name, own in zip("abcdef", gpus, strict=False)]
