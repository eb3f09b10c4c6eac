"""Dispatch of jobs to agents on the GPUs of a cluster, with one retry of lost jobs."""

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

#: Seconds between two queries of the nodes.
LOOK_S = 5.0
#: Maximum seconds until the first agent reports its GPU, and then for the others.
START_TIMEOUT_S = 300.0
OTHERS_TIMEOUT_S = 30.0
#: Maximum agents lost by a job, and by a node.
MOST_LOSSES, MOST_LOSSES_OF_A_NODE = 2, 3


@dataclass(frozen=True)
class Lost:
    """Answer of a job that lost `MOST_LOSSES` agents. The reason is a sentence."""

    reason: str
    board: Board


@dataclass
class _Task(Generic[J]):
    """A job, and the reasons why its agents were lost."""

    job: J
    losses: list[str]


@dataclass(eq=False)
class _Slot(Generic[J]):
    """A GPU slot with its agent. One that is left out keeps its GPU reserved."""

    node: Node
    actor: Any
    state: Literal["new", "joining", "idle", "busy", "left out"] = "new"
    call: Any = None
    task: _Task[J] | None = None
    board: Board | None = None


class Dispatcher(Generic[J]):
    """Agents on all GPUs of a cluster, with `gpus` each.

    Args:
        say: Receives a sentence about each unexpected event.

    Raises:
        UserError: The cluster has no GPU, or no node has enough.
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
        self._slots: list[_Slot[J]] = []
        self._losses: Counter[str] = Counter()
        self._again: deque[_Task[J]] = deque()
        self._why_left_out = ""
        self._refuse_too_few_gpus()

    def target(self) -> Target:
        """Return the target of the jobs: a GPU if any agent has one, or a model.

        Raises:
            UserError: No agent can work, or none starts in time.
        """
        self._fill()
        calls = {self._cluster.call(slot.actor, "target"): slot for slot in self._slots}
        targets: list[tuple[Node, Target]] = []
        end_s = time.monotonic() + START_TIMEOUT_S
        while calls and (left_s := end_s - time.monotonic()) > 0:
            for call in self._cluster.done(list(calls), left_s):
                slot = calls.pop(call)
                try:
                    targets.append((slot.node, self._cluster.result(call)))
                except UserError as error:
                    self._leave_out(slot, str(error))
                except ActorLost as lost:
                    self._drop(slot, str(lost))
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
        """Yield every job with the answer of an agent, or Lost, as they end.

        Takes a job from `jobs` when an agent is free.

        Args:
            sent: Converts a job for the agent.
            refusal: Returns why a board cannot join, as a phrase.

        Raises:
            UserError: No agent is left.
        """
        tasks = (_Task(job, []) for job in jobs)
        waited_s = 0.0
        while True:
            self._fill()
            for slot in self._in("new"):
                self._ask(slot, "joining", "board")
            all_are_out = self._hand_out(tasks, sent)
            busy, joining = self._in("busy"), self._in("joining")
            if all_are_out and not busy:
                return
            if not (busy or joining) or waited_s > START_TIMEOUT_S:
                raise self._nobody_left()
            answered = self._answered([*busy, *joining])
            waited_s = 0.0 if busy or answered else waited_s + LOOK_S
            for slot in answered:
                if slot.state == "joining":
                    self._join(slot, refusal)
                else:
                    yield from self._take(slot)

    def close(self) -> None:
        """End all agents and what they started."""
        for slot in self._slots:
            self._cluster.stop(slot.actor)
        self._slots.clear()
        self._cluster.close()

    def _hand_out(self, tasks: Iterator[_Task[J]], sent: Callable[[J], Any]) -> bool:
        """Give each idle agent a task, retries first. Return True if there are no more."""
        for slot in self._in("idle"):
            task = self._again.popleft() if self._again else next(tasks, None)
            if task is None:
                return True
            slot.task = task
            self._ask(slot, "busy", "work", sent(task.job))
        return False

    def _in(self, state: str) -> list[_Slot[J]]:
        return [slot for slot in self._slots if slot.state == state]

    def _ask(self, slot: _Slot[J], state: Any, method: str, *arguments: Any) -> None:
        slot.state = state
        slot.call = self._cluster.call(slot.actor, method, *arguments)

    def _answered(self, slots: Sequence[_Slot[J]]) -> list[_Slot[J]]:
        by_call = {slot.call: slot for slot in slots}
        return [by_call[call] for call in self._cluster.done(list(by_call), LOOK_S)]

    def _join(self, slot: _Slot[J], refusal: Callable[[Board], str | None]) -> None:
        try:
            slot.board = self._cluster.result(slot.call)
        except ActorLost as lost:
            self._drop(slot, str(lost))
            return
        except UserError as error:
            self._leave_out(slot, str(error))
            return
        assert slot.board is not None
        why = refusal(slot.board)
        if why is None:
            slot.state = "idle"
        else:
            self._leave_out(slot, why)

    def _take(self, slot: _Slot[J]) -> Iterator[tuple[J, Any]]:
        """Yield the answer of an agent, if its job is finished."""
        task = slot.task
        assert task is not None
        assert slot.board is not None
        try:
            answer = self._cluster.result(slot.call)
        except ActorLost as lost:
            self._drop(slot, str(lost))
            task.losses.append(f"an agent on {slot.node.host} was lost ({lost})")
        except UserError as error:
            self._leave_out(slot, str(error))
            task.losses.append(f"an agent on {slot.node.host} could not go on ({error})")
        else:
            slot.state, slot.task = "idle", None
            yield task.job, answer
            return
        if len(task.losses) < MOST_LOSSES:
            self._say(f"! {task.losses[-1]}: what it was at runs elsewhere.")
            self._again.append(task)
        else:
            yield task.job, Lost("; then ".join(task.losses), slot.board)

    def _fill(self) -> None:
        """Start an agent on every free GPU."""
        for node in self._cluster.nodes():
            if self._losses[node.name] >= MOST_LOSSES_OF_A_NODE:
                continue
            there = sum(slot.node.name == node.name for slot in self._slots)
            for _ in range(node.gpus // self._gpus - there):
                actor = self._cluster.start(node, self._gpus, self._agent, self._arguments)
                self._slots.append(_Slot(node, actor))

    def _drop(self, slot: _Slot[J], why: str) -> None:
        self._losses[slot.node.name] += 1
        self._why_left_out = f"an agent on {slot.node.host} was lost ({why})"
        self._slots.remove(slot)
        self._cluster.stop(slot.actor)

    def _leave_out(self, slot: _Slot[J], why: str) -> None:
        slot.state = "left out"
        uuid = slot.board and slot.board.environment.get("gpu_uuid")
        named = f"{slot.node.host} {uuid}" if uuid else slot.node.host
        self._why_left_out = f"{named} is left out ({why})"
        self._say(f"! {self._why_left_out}.")

    def _nobody_left(self) -> UserError:
        why = self._why_left_out or "none became free in time"
        return UserError(
            f"no GPU of the Ray cluster at {self._cluster.address} can work: {why}; fix it and"
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
