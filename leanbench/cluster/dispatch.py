"""Jobs to the GPUs of a cluster: an agent on each, a job to whoever is free, a job whose agent was
lost once more elsewhere.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from leanbench.cluster.cluster import ActorLost, Agent, Cluster, Node
from leanbench.core.errors import UserError
from leanbench.gpu.local import Target
from leanbench.records.boards import Board

J = TypeVar("J")

#: Seconds between two looks at which nodes there are.
LOOK_S = 5.0
#: Until the first agent has said what its GPU is, and for how long the others are waited for then.
START_TIMEOUT_S = 300.0
OTHERS_TIMEOUT_S = 30.0
#: Agents that a job may take along, and a node may lose.
MOST_LOSSES, MOST_LOSSES_OF_A_NODE = 2, 3


@dataclass(frozen=True)
class Lost:
    """Answer of a job that took `MOST_LOSSES` agents along; the reason is a sentence."""

    reason: str
    board: Board


@dataclass
class _Task(Generic[J]):
    """A job, and how its agents were lost."""

    job: J
    losses: list[str]


@dataclass(eq=False)
class _Place(Generic[J]):
    """An agent on a node. One that is left out keeps its GPU, so that no other agent gets it."""

    node: Node
    actor: Any
    state: Literal["new", "joining", "idle", "busy", "left out"] = "new"
    call: Any = None
    task: _Task[J] | None = None
    board: Board | None = None


class Dispatcher(Generic[J]):
    """Agents on all GPUs of a cluster, so many GPUs to each.

    Args:
        say: receives a sentence about what the user does not expect.

    Raises:
        UserError: the cluster has no GPU, or no node has so many.
    """

    def __init__(
        self,
        cluster: Cluster,
        agent: type[Agent],
        arguments: Sequence[Any],
        say: Callable[[str], None],
        gpus: int = 1,
    ) -> None:
        self._cluster, self._agent, self._arguments, self._say = cluster, agent, arguments, say
        self._gpus = gpus
        self._places: list[_Place[J]] = []
        self._losses: Counter[str] = Counter()
        self._again: deque[_Task[J]] = deque()
        self._why_left_out = ""
        self._refuse_too_few_gpus()

    def target(self) -> Target:
        """What jobs are about: the GPU of the first agent that has one, or else the model that they
        predict for.

        Raises:
            UserError: no agent can work, or none starts in time.
        """
        self._fill()
        asked = {self._cluster.call(place.actor, "target"): place for place in self._places}
        targets: list[tuple[Node, Target]] = []
        end_s = time.monotonic() + START_TIMEOUT_S
        while asked and (left_s := end_s - time.monotonic()) > 0:
            for call in self._cluster.done(list(asked), left_s):
                place = asked.pop(call)
                try:
                    targets.append((place.node, self._cluster.result(call)))
                except UserError as error:
                    self._leave_out(place, str(error))
                except ActorLost as lost:
                    self._drop(place, str(lost))
            if targets:
                end_s = min(end_s, time.monotonic() + OTHERS_TIMEOUT_S)
        if not targets:
            raise self._nobody_left()
        measured = [target for _, target in targets if target.local_index is not None]
        return (measured or [target for _, target in targets])[0]

    def run(
        self,
        jobs: Iterator[J],
        sent: Callable[[J], Any],
        refusal: Callable[[Board], str | None],
    ) -> Iterator[tuple[J, Any]]:
        """Every job with what an agent's `work` answered, or Lost, in the order in which they end.
        A job is taken from `jobs` when an agent is free.

        Args:
            sent: what the agent gets for a job.
            refusal: why a board may not take part, as a phrase.

        Raises:
            UserError: no agent is left.
        """
        tasks = (_Task(job, []) for job in jobs)
        waited_s = 0.0
        while True:
            self._fill()
            for place in self._in("new"):
                self._ask(place, "joining", "board")
            all_are_out = self._hand_out(tasks, sent)
            busy, joining = self._in("busy"), self._in("joining")
            if all_are_out and not busy:
                return
            if not (busy or joining) or waited_s > START_TIMEOUT_S:
                raise self._nobody_left()
            answered = self._answered([*busy, *joining])
            waited_s = 0.0 if busy or answered else waited_s + LOOK_S
            for place in answered:
                if place.state == "joining":
                    self._join(place, refusal)
                else:
                    yield from self._take(place)

    def close(self) -> None:
        """Ends all agents and what they started."""
        for place in self._places:
            self._cluster.stop(place.actor)
        self._places.clear()
        self._cluster.close()

    def _hand_out(self, tasks: Iterator[_Task[J]], sent: Callable[[J], Any]) -> bool:
        """Gives each agent that is free a task, those that were put back first; whether there are
        no more.
        """
        for place in self._in("idle"):
            task = self._again.popleft() if self._again else next(tasks, None)
            if task is None:
                return True
            place.task = task
            self._ask(place, "busy", "work", sent(task.job))
        return False

    def _in(self, state: str) -> list[_Place[J]]:
        return [place for place in self._places if place.state == state]

    def _ask(self, place: _Place[J], state: Any, method: str, *arguments: Any) -> None:
        place.state = state
        place.call = self._cluster.call(place.actor, method, *arguments)

    def _answered(self, places: Sequence[_Place[J]]) -> list[_Place[J]]:
        by_call = {place.call: place for place in places}
        return [by_call[call] for call in self._cluster.done(list(by_call), LOOK_S)]

    def _join(self, place: _Place[J], refusal: Callable[[Board], str | None]) -> None:
        try:
            place.board = self._cluster.result(place.call)
        except ActorLost as lost:
            self._drop(place, str(lost))
            return
        except UserError as error:
            self._leave_out(place, str(error))
            return
        assert place.board is not None
        why = refusal(place.board)
        if why is None:
            place.state = "idle"
        else:
            self._leave_out(place, why)

    def _take(self, place: _Place[J]) -> Iterator[tuple[J, Any]]:
        """The answer of a place that was busy, if its job is done with."""
        task = place.task
        assert task is not None
        assert place.board is not None
        try:
            answer = self._cluster.result(place.call)
        except ActorLost as lost:
            self._drop(place, str(lost))
            task.losses.append(f"an agent on {place.node.host} was lost ({lost})")
        except UserError as error:
            self._leave_out(place, str(error))
            task.losses.append(f"an agent on {place.node.host} could not go on ({error})")
        else:
            place.state, place.task = "idle", None
            yield task.job, answer
            return
        if len(task.losses) < MOST_LOSSES:
            self._say(f"! {task.losses[-1]}: what it was at runs elsewhere.")
            self._again.append(task)
        else:
            yield task.job, Lost("; then ".join(task.losses), place.board)

    def _fill(self) -> None:
        """An agent on every GPU that has none."""
        for node in self._cluster.nodes():
            if self._losses[node.name] >= MOST_LOSSES_OF_A_NODE:
                continue
            there = sum(place.node.name == node.name for place in self._places)
            for _ in range(node.gpus // self._gpus - there):
                actor = self._cluster.start(node, self._gpus, self._agent, self._arguments)
                self._places.append(_Place(node, actor))

    def _drop(self, place: _Place[J], why: str) -> None:
        self._losses[place.node.name] += 1
        self._why_left_out = f"an agent on {place.node.host} was lost ({why})"
        self._places.remove(place)
        self._cluster.stop(place.actor)

    def _leave_out(self, place: _Place[J], why: str) -> None:
        place.state = "left out"
        uuid = place.board and place.board.environment.get("gpu_uuid")
        named = f"{place.node.host} {uuid}" if uuid else place.node.host
        self._why_left_out = f"{named} is left out ({why})"
        self._say(f"! {self._why_left_out}.")

    def _nobody_left(self) -> UserError:
        why = self._why_left_out or "none became free in time"
        return UserError(
            f"no GPU of the Ray cluster at {self._cluster.address} can work: {why}; mend that and"
            " repeat the command, with --resume where a run has begun"
        )

    def _refuse_too_few_gpus(self) -> None:
        nodes = self._cluster.nodes()
        most = max((node.gpus for node in nodes), default=0)
        if most == 0:
            raise UserError(
                f"the Ray cluster at {self._cluster.address} has no GPUs on its {len(nodes)} nodes:"
                " start them with `ray start --num-gpus N`, or leave --executor ray out"
            )
        if most < self._gpus:
            raise UserError(
                f"{self._gpus} GPUs of one host are needed, and no node of the Ray cluster at"
                f" {self._cluster.address} has more than {most}: choose problems for fewer GPUs"
            )
