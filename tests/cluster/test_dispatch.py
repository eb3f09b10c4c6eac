"""Dispatch of jobs on a cluster: assignment, lost agents, and boards that can join."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest
from fake_cluster import Call, FakeCluster, nodes

from leanbench.cluster import dispatch
from leanbench.cluster.cluster import Alike
from leanbench.cluster.dispatch import Dispatcher, Lost
from leanbench.core.errors import UserError
from leanbench.gpu.catalogue import find
from leanbench.gpu.local import Target
from leanbench.records.boards import Board

H200 = Target(find("h200"), 0)
BOARD = Board("measured", asdict(find("h200")), {"kernels": "aa", "driver": "580"}, 63.0)


class Doubling:
    """Agent that doubles a number."""

    def __init__(self, *answers: Any) -> None:
        self._target, self._board = answers or (H200, BOARD)

    def target(self) -> Target:
        return _or_raise(self._target)

    def board(self) -> Board:
        return _or_raise(self._board)

    def work(self, number: int, /) -> int:
        return _or_raise(2 * number if number >= 0 else UserError("the disk is full"))


def _or_raise(answer: Any) -> Any:
    if isinstance(answer, Exception):
        raise answer
    return answer


def go(
    cluster: FakeCluster, jobs: Sequence[int], said: list[str] | None = None, **options: Any
) -> list[tuple[int, Any]]:
    said = [] if said is None else said
    dispatcher: Dispatcher[int] = Dispatcher(cluster, Doubling, (), said.append)
    alike = Alike(H200, options.get("first"), options.get("mix", False), said.append)
    return list(dispatcher.run(iter(jobs), lambda job: job, alike))


def test_jobs_are_taken_when_an_agent_is_free():
    cluster = FakeCluster(nodes(1))
    taken: list[int] = []

    def jobs():
        for number in range(3):
            taken.append(number)
            yield number

    dispatcher: Dispatcher[int] = Dispatcher(cluster, Doubling, (), print)
    answers = dispatcher.run(jobs(), lambda job: job, lambda board: None)
    assert next(answers) == (0, 0)
    assert taken == [0]


def test_every_job_is_answered_once_and_agents_that_end_are_replaced():
    ended: list[int] = []

    def end_once(cluster: FakeCluster, call: Call) -> None:
        if call.arguments[0] == 1 and not ended:
            ended.append(1)
            call.actor.alive = False

    cluster = FakeCluster(nodes(2, 1), end_once)
    assert sorted(go(cluster, range(9))) == [(number, 2 * number) for number in range(9)]
    assert [actor.node.name for actor in cluster.actors[:3]] == ["a", "a", "b"]
    assert sum(actor.alive for actor in cluster.actors) == 3
    assert (len(cluster.works), len(cluster.actors)) == (10, 4)


def test_a_job_whose_node_ended_runs_elsewhere_once():
    def end_b(cluster: FakeCluster, call: Call) -> None:
        if call.actor.node.name == "b":
            cluster.end_node("b")

    said: list[str] = []
    cluster = FakeCluster(nodes(1, 1), end_b)
    assert sorted(go(cluster, range(6), said)) == [(number, 2 * number) for number in range(6)]
    lost = [number for name, number in cluster.works if name == "b"]
    assert len(lost) == 1
    assert [name for name, number in cluster.works if number == lost[0]] == ["b", "a"]
    assert said == [
        "! an agent on host-b was lost (ActorDiedError): what it was at runs elsewhere."
    ]


def test_a_job_that_takes_two_agents_along_is_given_up():
    def end_at_three(cluster: FakeCluster, call: Call) -> None:
        if call.arguments[0] == 3:
            call.actor.alive = False

    answers = dict(go(FakeCluster(nodes(1, 1, 1), end_at_three), range(6)))
    lost = answers.pop(3)
    assert answers == {number: 2 * number for number in (0, 1, 2, 4, 5)}
    assert isinstance(lost, Lost)
    assert lost.reason.count("was lost (ActorDiedError)") == 2
    assert lost.board == BOARD


def test_an_agent_that_cannot_go_on_is_left_out_and_keeps_its_gpu():
    said: list[str] = []
    cluster = FakeCluster(nodes(1, 1, 1))
    answers = dict(go(cluster, [-1, 5, 6], said))
    assert (answers[5], answers[6]) == (10, 12)
    assert "could not go on (the disk is full)" in answers[-1].reason
    assert [actor.alive for actor in cluster.actors] == [True] * 3
    assert said[0] == "! host-a is left out (the disk is full)."


def test_nobody_left_or_no_target_is_one_sentence(monkeypatch):
    def end_all(cluster: FakeCluster, call: Call) -> None:
        for name in "ab":
            cluster.end_node(name)

    with pytest.raises(UserError, match=r"10.0.0.1:6379 can work: an agent on host-\w was lost"):
        go(FakeCluster(nodes(1, 1), end_all), range(3))
    cluster = FakeCluster(nodes(1), lambda cluster, call: setattr(call.actor, "alive", False))
    with pytest.raises(UserError, match="can work: an agent on host-a was lost"):
        go(cluster, range(99))
    assert len(cluster.actors) == dispatch.MOST_LOSSES_OF_A_NODE
    refuses = (UserError("--require-gpu: there is no GPU"), BOARD)
    dispatcher: Dispatcher[int] = Dispatcher(FakeCluster(nodes(1)), Doubling, refuses, print)
    with pytest.raises(UserError, match=r"can work: host-a is left out .--require-gpu: there is"):
        dispatcher.target()


def test_a_node_that_comes_later_takes_part():
    added = nodes(1, 1)[1]

    def add(cluster: FakeCluster, call: Call) -> None:
        if call.arguments[0] == 0:
            cluster.add(added)

    cluster = FakeCluster(nodes(1), add)
    go(cluster, range(8))
    assert {name for name, _ in cluster.works} == {"a", "b"}


def with_own(**environment: str) -> Board:
    return replace(BOARD, environment={**BOARD.environment, **environment})


@pytest.mark.parametrize(
    ("board", "words", "mixable"),
    [
        (replace(BOARD, calibration_us=66.5), "the calibration cell takes 66.5 us, not 63.0", True),
        (with_own(driver="570"), "driver is 570", True),
        (replace(BOARD, gpu={**BOARD.gpu, "power_limit_w": 600}), "power_limit_w is 600", True),
        (with_own(kernels="bb"), "kernels is bb", False),
        (replace(BOARD, source="predicted"), "would be predicted for h200", False),
        (replace(BOARD, gpu=asdict(find("b200"))), "would be measured for b200", False),
    ],
)
def test_a_board_that_differs_is_left_out_or_mixed_knowingly(board, words, mixable):
    said: list[str] = []
    why = Alike(H200, BOARD, False, said.append)(board)
    assert why is not None
    assert words in why
    assert ("--mix-boards" in why) == mixable
    assert said == []
    mixed = Alike(H200, BOARD, True, said.append)(board)
    assert (mixed is None) == mixable
    assert len(said) == int(mixable)


def test_boards_alike_differ_in_host_uuid_and_a_little_in_speed():
    alike = Alike(H200, None, False, print)
    assert alike(BOARD) is None
    assert alike(replace(with_own(host="b", gpu_uuid="GPU-2"), calibration_us=65.5)) is None


def test_the_target_is_measured_where_any_agent_has_a_gpu():
    predicted = Target(find("h200"), None)
    targets = iter([predicted, H200, UserError("the driver is broken")])
    said: list[str] = []

    class Mixed(Doubling):
        def target(self) -> Target:
            return _or_raise(next(targets))

    dispatcher: Dispatcher[int] = Dispatcher(FakeCluster(nodes(1, 1, 1)), Mixed, (), said.append)
    assert dispatcher.target() == H200
    assert said == ["! host-c is left out (the driver is broken)."]


@pytest.mark.parametrize(
    ("gpus", "wanted", "words"),
    [
        ((0, 0), 1, "has no GPUs on its 2 nodes"),
        ((1, 1), 2, "2 GPUs of one host are needed, and no node .* has more than 1"),
    ],
)
def test_a_cluster_without_enough_gpus_is_refused(gpus, wanted, words):
    with pytest.raises(UserError, match=words):
        Dispatcher(FakeCluster(nodes(*gpus)), Doubling, (), print, wanted)


def test_agents_for_problems_of_two_gpus_take_two():
    cluster = FakeCluster(nodes(4, 1))
    dispatcher: Dispatcher[int] = Dispatcher(cluster, Doubling, (), print, 2)
    assert len(list(dispatcher.run(iter(range(3)), lambda job: job, lambda board: None))) == 3
    assert [actor.node.name for actor in cluster.actors] == ["a", "a"]
    dispatcher.close()
    assert cluster.closed
    assert not any(actor.alive for actor in cluster.actors)
