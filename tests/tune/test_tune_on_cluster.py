"""A tuning on a cluster: each family on one GPU, lost ones elsewhere, and what an interruption
leaves. The timings are stand-ins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from fake_cluster import Call, FakeCluster, nodes

from leanbench.configs.space import FamilyKey
from leanbench.core.errors import UserError
from leanbench.core.registry import kernel
from leanbench.gpu.catalogue import find
from leanbench.gpu.local import Target
from leanbench.measure import calibration, instruments
from leanbench.records import environment
from leanbench.tune import cluster as module
from leanbench.tune.cluster import AgentRequest, ClusterTuner
from leanbench.tune.plan import Plan
from leanbench.tune.run import Request, journal_of
from leanbench.tune.stopwatch import Time

H200, LEAN = find("h200"), kernel("lean")
FAMILIES = [FamilyKey(head_dim, group) for head_dim in (64, 128) for group in (1, 4)]
ENVIRONMENT = {"leanbench": "1", "kernels": "aa", "torch": "2", "driver": "4", "gpu_uuid": "GPU-1"}


@pytest.fixture
def timed(tmp_path, monkeypatch) -> list[tuple[FamilyKey, float, int]]:
    """Family, budget and problems timed, of every tuning that was begun."""
    tunings: list[tuple[FamilyKey, float, int]] = []

    def tune(request: Request, observer: object) -> list[tuple[Any, Any]]:
        (family,) = request.families
        journal = journal_of(request)
        noted = {problem for _, problem, _ in journal.read([family])}
        problems = [family.problem(8, 1024 * number) for number in (1, 2, 3)]
        fresh = [problem for problem in problems if problem not in noted]
        tunings.append((family, request.plan.budget_s, len(fresh)))
        if family.group_size == 16:
            raise UserError("--budget 3s is too small")
        config = LEAN.default_config(problems[0], H200)
        for problem in fresh:
            journal.add(family, problem, {config: Time(1.0)})  # pyright: ignore[reportArgumentType]
        return [(f"summary of {family.label}", f"settings of {family.label}")]

    monkeypatch.setenv("LEANBENCH_HOME", str(tmp_path))
    monkeypatch.setattr(module, "tune", tune)
    monkeypatch.setattr(module, "choose", lambda gpu, require_gpu: Target(H200, 0))
    monkeypatch.setattr(instruments, "open_instruments", lambda index: None)
    monkeypatch.setattr(calibration, "calibrate", lambda opened: 63.0)
    monkeypatch.setattr(environment, "measured_environment", lambda index: ENVIRONMENT)
    return tunings


def go(
    gpus: Sequence[int],
    families: Sequence[FamilyKey] = FAMILIES,
    before: Callable[[FakeCluster, Call], None] | None = None,
) -> tuple[list[Any], Callable[[], None]]:
    """What a tuning returns, and what forgets its notes."""
    cluster = FakeCluster(nodes(*gpus), before)
    tuner = ClusterTuner(cluster, AgentRequest(None, False, {}), False, lambda text: None)
    request = Request(LEAN, families, tuner.target(), Plan(60.0))
    return tuner.tune(request), lambda: tuner.forget(request)


def test_each_family_is_tuned_on_one_gpu_within_its_share_of_the_budget(timed, tmp_path):
    results, forget = go((1, 1))
    assert results == [
        (f"summary of {family.label}", f"settings of {family.label}") for family in FAMILIES
    ]
    assert timed == [(family, 30.0, 3) for family in FAMILIES]
    assert list(tmp_path.glob("tuning/*.jsonl"))
    forget()
    assert not list(tmp_path.glob("tuning/*.jsonl"))


def test_a_family_whose_node_ended_is_tuned_elsewhere(timed):
    def end_b(cluster: FakeCluster, call: Call) -> None:
        if call.actor.node.name == "b":
            cluster.end_node("b")

    results, _ = go((1, 1), before=end_b)
    assert [settings for _, settings in results] == [
        f"settings of {family.label}" for family in FAMILIES
    ]
    assert sorted(family.label for family, _, _ in timed) == sorted(
        family.label for family in FAMILIES
    )


def test_families_that_were_tuned_before_an_interruption_are_not_timed_again(timed):
    def interrupt(cluster: FakeCluster, call: Call) -> None:
        if len(cluster.works) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        go((1,), before=interrupt)
    assert [problems for _, _, problems in timed] == [3, 3]
    timed.clear()
    results, forget = go((1,))
    assert [problems for _, _, problems in timed] == [0, 0, 3, 3]
    assert len(results) == 4
    forget()
    timed.clear()
    go((1,))
    assert [problems for _, _, problems in timed] == [3, 3, 3, 3]


def test_a_refusal_is_the_commands(timed):
    with pytest.raises(UserError, match=r"^--budget 3s is too small$"):
        go((1, 1), [FamilyKey(64, 16)])
    assert len(timed) == 1


def test_a_family_that_takes_two_agents_along_ends_the_tuning(timed):
    def end(cluster: FakeCluster, call: Call) -> None:
        call.actor.alive = False

    with pytest.raises(UserError, match=r"64.* could not be tuned: an agent on host-a was lost"):
        go((1, 1), FAMILIES[:1], end)
    assert timed == []
