"""Choices against every candidate: problems, launches and times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from leanbench.kernels.lean.configs import LeanConfig, LeanCudaConfig
from typer.testing import CliRunner
from world import H200, LEAN, Here

from leanbench.cli.main import app
from leanbench.configs.lookup import choose
from leanbench.core.memory import needed_bytes
from leanbench.core.problem import AttentionProblem
from leanbench.run.sweep_file import load_sweep
from leanbench.tune import validate as module
from leanbench.tune.stopwatch import Result, Time
from leanbench.tune.validate import compile_launches, fitting, launches_of, validate

#: A problem in a cache of 32k tokens, lengths on the device.
SERVED = AttentionProblem(
    4, 32, 8, (900, 5000, 100, 2000), 128, capacity=32768, lengths_on="device"
)
KNOWN = AttentionProblem(4, 32, 8, 5000, 128)


def test_a_draws_first_problems_that_the_kernel_takes_and_that_fit():
    draw = load_sweep("serving").draw
    assert draw is not None
    drawn = list(replace(draw, count=40, seed=5).problems())
    fits = [problem for problem in drawn if needed_bytes(problem) <= 4e9]
    assert 3 < len(fits) < 40
    assert fitting(drawn, LEAN, 3, 4e9) == fits[:3]
    unpaged = SimpleNamespace(
        unsupported_reason=lambda problem: "takes no pages" if problem.page_size else None
    )
    assert fitting(drawn, unpaged, 40, 4e9) == [  # pyright: ignore[reportArgumentType]
        problem for problem in fits if problem.page_size is None
    ]


def test_lengths_on_the_device_have_no_aligned_grid_and_what_a_caller_gets_among_them():
    launches = launches_of(LEAN, SERVED, H200)
    assert not any(config.align_grid for config in launches)
    assert choose(LEAN, SERVED, H200).config in launches
    clusters = {config.cluster_size for config in launches if isinstance(config, LeanCudaConfig)}
    assert clusters == {1, 2, 4, 8}
    known = launches_of(LEAN, KNOWN, H200)
    assert {config.align_grid for config in known} == {True, False}


def test_each_build_is_compiled_once(monkeypatch):
    asked: list[Any] = []
    monkeypatch.setattr(module, "build_all", lambda jobs, *rest: asked.append((jobs, *rest)))
    pool = Here()
    compile_launches(LEAN, [SERVED], H200, pool)
    [(jobs, capability, used)] = asked
    assert (capability, used) == ((9, 0), pool)
    keys = [job.config.build_key for job in jobs]
    assert len(keys) == len(set(keys))
    assert set(keys) == {config.build_key for config in launches_of(LEAN, SERVED, H200)}


@pytest.mark.parametrize("problem", [SERVED, KNOWN], ids=["device", "host"])
def test_the_best_is_of_the_choice_the_heuristics_and_the_fastest_few_timed_again(
    problem: AttentionProblem, monkeypatch
):
    choice = choose(LEAN, problem, H200).config
    launches = launches_of(LEAN, problem, H200)
    fastest = [config for config in launches if config != choice][3]

    class Watch:
        def time(self, problem: AttentionProblem, configs: Sequence[LeanConfig]) -> Result:
            times = {config: Time(20.0 + place) for place, config in enumerate(configs)}
            return Result({**times, fastest: Time(9.0)}, {})

    again: list[list[LeanConfig]] = []

    def time_again(
        kernel: Any, problem: Any, configs: list[LeanConfig], watch: Any
    ) -> dict[LeanConfig, float]:
        again.append(configs)
        return {config: 8.0 if config == fastest else 10.0 for config in configs}

    monkeypatch.setattr(module, "_again", time_again)
    unseen = validate(LEAN, problem, H200, Watch())  # pyright: ignore[reportArgumentType]
    assert (unseen.best, unseen.best_us, unseen.chosen_us) == (fastest, 8.0, 10.0)
    assert unseen.share == unseen.heuristic_share == 0.8
    assert unseen.candidates == len(dict.fromkeys([*launches, choice]))
    assert again[0][0] == choice
    assert fastest in again[0]
    assert len(again[0]) <= 7


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["--seed", "3"],
            "--seed 3 is of the problems that a sweep draws: give --sweep serving too, or leave"
            " --seed out",
        ),
        (
            ["--sweep", "peers"],
            "--sweep peers draws no problems: name one with a [draw] table, such as serving",
        ),
        (["--sweep", "servng"], "there is no sweep 'servng', did you mean 'serving'?"),
    ],
)
def test_what_draws_nothing_is_refused(arguments, sentence):
    result = CliRunner().invoke(app, ["configs", "validate", *arguments])
    assert result.exit_code == 2
    assert sentence in " ".join(result.output.split())
