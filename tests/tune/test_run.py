"""A tuning from start to end on a fake GPU."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from typing import Any

import pytest
from world import H200, LEAN, Here, Silent, World, builds_of, no_ranking

from leanbench.configs.space import Candidate, FamilyKey
from leanbench.core.errors import UserError
from leanbench.gpu.local import Target
from leanbench.records import environment
from leanbench.tune import power, run, stopwatch
from leanbench.tune.plan import Plan, Progress
from leanbench.tune.run import Request, forget, tune
from leanbench.tune.search import Search

FAMILY, OTHER = FamilyKey(128, 4), FamilyKey(128, 8)


@pytest.fixture
def worlds(tmp_path, monkeypatch):
    """Return the timings: a stopwatch per tuning."""
    made: list[World] = []

    class Watch(World):
        most_bytes = 1e12

        def __init__(self, kernel, index, spec):
            super().__init__()
            made.append(self)

    def compile(self, families, pool):
        compiled = []
        for family in families:
            # Every sixth build, because the result does not matter.
            space = LEAN.tuning_space(family.problem(8, 4096), H200)
            few = list(dict.fromkeys(config.build_key for config in space))[::6]
            able = [
                Candidate(config, config.build_key) for config in space if config.build_key in few
            ]
            compiled.append((Progress(family, able, {}), builds_of(family)))
        return compiled

    described = {
        "leanbench": "1",
        "torch": "2",
        "triton": "3",
        "driver": "4",
        "gpu_uuid": "GPU-1",
        "commit": None,
    }
    monkeypatch.setenv("LEANBENCH_HOME", str(tmp_path))
    monkeypatch.setattr(stopwatch, "GpuStopwatch", Watch)
    monkeypatch.setattr(Search, "compile", compile)
    monkeypatch.setattr(run, "process_pool", lambda preload: contextlib.nullcontext(Here()))
    monkeypatch.setattr(run, "model_ranker", lambda kernel, spec, pool: no_ranking)
    monkeypatch.setattr(environment, "measured_environment", lambda index: described)
    return made


def request(families=(FAMILY,), objective: Any = "latency", **plan):
    return Request(
        LEAN,
        list(families),
        Target(H200, 0),
        Plan(**{"budget_s": 1e9, "problems": 8, **plan}),
        objective,
    )


def tuned(wanted, observer):
    result = tune(wanted, observer)
    assert result.left_out == {}
    return result.families


@pytest.mark.deep
def test_what_was_timed_is_measured_and_forgotten_once_it_is_saved(worlds, tmp_path):
    wanted = request()
    ((summary, family),) = tuned(wanted, Silent())
    assert family.source == "measured"
    assert family.versions == {"leanbench": "1", "torch": "2", "triton": "3", "driver": "4"}
    assert summary.problems == len(family.problems) == 8
    assert list(tmp_path.glob("tuning/*.jsonl"))
    forget(wanted)
    assert not list(tmp_path.glob("tuning/*.jsonl"))


def test_an_interrupted_tuning_goes_on_and_leaves_others_alone(worlds):
    class Interrupted(Silent):
        def timing(self, family, problem, done, total):
            super().timing(family, problem, done, total)
            if self.timed == 6:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(request(), Interrupted())
    assert len(worlds[0].calls) == 5
    tune(request([OTHER], problems=5), Silent())
    forget(request([OTHER]))
    # Another plan and a further family: known timings count, the rest is timed.
    results = tuned(request([FAMILY, OTHER], problems=4), Silent())
    assert [summary.problems for summary, _ in results] == [5, 4]
    assert len(worlds[2].calls) == 4
    # `every_candidate` requires more than the known timings.
    tune(request(problems=3, every_candidate=True), Silent())
    assert len(worlds[3].calls) == 3


@pytest.mark.deep
def test_energy_goes_by_power(worlds, monkeypatch):
    work_seen = []

    def measure(kernel, index, watch, work, announce):
        work_seen.extend(work)
        return [
            {config.build_key: 0.5 if config.tile_tokens == 64 else 5.0 for config in configs}
            for _, configs in work
        ]

    monkeypatch.setattr(power, "measure_power", measure)
    ((summary, family),) = tuned(request(objective="energy"), Silent())
    assert family.objective == "energy"
    assert summary.tile_tokens == {64: 8}
    assert summary.gain >= 1
    ((problem, configs),) = work_seen
    largest = max(family.problems, key=lambda tuned: tuned.batch * tuned.kv_heads * tuned.context)
    assert (problem.batch, problem.kv_heads, problem.max_context) == (
        largest.batch,
        largest.kv_heads,
        largest.context,
    )
    # Builds used for comparisons are among those with a measured power.
    heuristics = {family.candidates[tuned.heuristic].config.build_key for tuned in family.problems}
    assert heuristics <= {config.build_key for config in configs[: power.MOST_BUILDS]}


def test_windows_must_fit_the_budget(worlds):
    with pytest.raises(
        UserError,
        match=r"--objective edp measures the power .* --budget 30s is too small, give it 41s",
    ):
        tune(request(objective="edp", budget_s=30.0), Silent())
    with pytest.raises(UserError, match="--objective energy cannot be predicted yet"):
        tune(Request(LEAN, [FAMILY], Target(H200, None), Plan(1e9), "energy"), Silent())


#: Runs in a process with the imports of a tuning's processes.
PREDICTING = """
import importlib, json, sys
from leanbench.compile import build
from leanbench.tune import run
for name in (*build._COMPILING, *run._PREDICTING):
    importlib.import_module(name)
before = {*sys.modules}
from leanbench.configs.space import FamilyKey
from leanbench.core.inputs import shape_only
from leanbench.core.registry import kernel
from leanbench.gpu.catalogue import find
from leanbench.tune.predicted import predict_us
problem, h200 = FamilyKey(64, 4).problem(8, 1024), find("h200")
shape_only(problem)
predict_us("lean", problem, kernel("lean").tuning_space(problem, h200)[:1], h200, [1])
print(json.dumps([*{name.partition(".")[0] for name in {*sys.modules} - before}]))
"""


@pytest.mark.deep
def test_processes_predict_without_importing_libraries():
    """The process they are forked from has imported them once for all."""
    result = subprocess.run(
        [sys.executable, "-c", PREDICTING], capture_output=True, text=True, check=True
    )
    assert {*json.loads(result.stdout)} <= {"leanbench", "pydantic"}
