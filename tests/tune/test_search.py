"""Tuning with a fake stopwatch: what is timed, kept, left out, and learned."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from statistics import geometric_mean
from types import SimpleNamespace
from typing import Any

import pytest
from depth import label
from fake_watch import FakeWatch, Us
from leanbench.kernels.lean.configs import BuildKey
from leanbench.kernels.lean.cuda_build import CudaBuild
from leanbench.kernels.lean.cuda_cost import Costs
from leanbench.kernels.lean.cuda_settings import for_any_length, ranked
from leanbench.kernels.mla.configs import MlaConfig
from timed_examples import (
    CUDA,
    H200,
    LATENT,
    LATENT_SERVED,
    LEAN,
    MODELS,
    OF_TRITON,
    OTHERS,
    OTHERS_OF_LATENT,
    PROBLEM,
    RULES,
    SERVED,
    timed,
)

from leanbench.compile.build import Job
from leanbench.configs.lookup import choose, tuned_kernel
from leanbench.configs.store import TimedCall, path_for, read, save
from leanbench.core.errors import OutOfMemory, UserError
from leanbench.core.problem import AttentionProblem
from leanbench.gpu.catalogue import find
from leanbench.tune import power, search
from leanbench.tune.calls import fills
from leanbench.tune.fit import Timed, timed_of
from leanbench.tune.search import (
    MEASURED,
    Request,
    Tuning,
    compile_calls,
    energies,
    first_candidates,
    gains,
    measured_constants,
)
from leanbench.tune.stopwatch import GpuStopwatch

A, B, C, D = OTHERS


def tuning_of(us: Us, **request: Any) -> Tuning:
    """Return a tuning that saves in the user's folder."""
    made = Request(**{"spec": H200, "index": 0, "candidates": 5, **request})
    watch: Any = FakeWatch(us)
    return Tuning(made, watch, {"torch": "2.12"}, lambda calls: save(H200, calls) and None)


def watch_of(tuning: Tuning) -> FakeWatch:
    watch: Any = tuning.watch
    return watch


def saved() -> list[TimedCall]:
    return read(path_for(H200)).calls()


def made_up_us(problem: AttentionProblem, config: Any) -> float:
    """Return a latency that grows with the warps and the tokens."""
    return 10.0 + config.num_warps + problem.max_context / 1e4


@pytest.mark.parametrize("spec", [H200, find("a100")], ids=lambda spec: spec.name)
@pytest.mark.parametrize("call", [PROBLEM, SERVED, replace(PROBLEM, q_len=4)], ids=label)
def test_the_first_candidate_is_the_models_choice(spec, call):
    on_device = call.lengths_on == "device"
    known = for_any_length(call) if on_device else call
    everything = first_candidates(call, spec, None)
    assert everything[0] == LEAN.default_config(known, spec)
    assert len(set(everything)) == len(everything) >= 10
    assert set(everything) == {everything[0], *LEAN.tuning_space(known, spec)}
    assert first_candidates(call, spec, 4) == everything[:4]
    if spec is H200:
        assert {config.implementation for config in everything} == {"cuda"}


def test_all_candidates_of_a_latent_call_are_timed():
    for most in (None, 3):
        everything = first_candidates(LATENT, H200, most)
        assert everything[0] == RULES
        assert set(everything[1:]) == set(OTHERS_OF_LATENT)
        assert len(everything) == 14
    # The rules' choice is none of the 14.
    longer = first_candidates(replace(LATENT, batch=1, context=65536), H200, 3)
    assert longer[0].to_dict()["min_tiles_per_cta"] == 16
    assert len(longer) == 15
    in_fp8 = first_candidates(replace(LATENT, kv_dtype="e4m3"), H200, 3)
    assert len(in_fp8) == 8


def test_a_calls_candidates_are_timed_on_each_fill_and_kept(home):
    served = replace(SERVED, batch=4)
    tuning = tuning_of(made_up_us)
    for call in (PROBLEM, served):
        configs = tuple(first_candidates(call, H200, 5))
        watch_of(tuning).timed.clear()
        results = tuning.time(call)
        assert watch_of(tuning).timed == [(fill, configs) for fill in fills(call)]
        assert [result.problem for result in results] == fills(call)
        for result in results:
            expected = {config: made_up_us(result.problem, config) for config in configs}
            assert result.costs == expected
            assert list(result.costs) == list(configs)
            assert (result.objective, result.versions) == ("latency", {"torch": "2.12"})
    assert {signature: len(calls) for signature, calls in tuning.timed.items()} == {
        "8 tiles d128 g4 2 B HND, 4096 tokens": 1,
        "32 tiles d128 g4 2 B HND, up to 4096": 4,
    }
    assert saved() == [call for calls in tuning.timed.values() for call in calls]
    assert tuning.left_out == {}


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "room": {"capacity": 9000},
    "paged": {"page_size": 16, "lengths_on": "device", "capacity": 5000},
    "recorded lengths": {"context": (4000, 70), "capacity": 5000},
    "a window": {"window_left": 511},
    "a window on the device": {"window_left": 511, "lengths_on": "device", "capacity": 5000},
    "query tokens": {"q_len": 4, "page_size": 64, "lengths_on": "device"},
    "packed": {"q_len": 3, "q_lens": (3, 1)},
    "padding": {"leftpad": True},
    "appended": {"append": 2, "rotary_dim": 64},
    "fp8": {"kv_dtype": "e4m3", "q_dtype": "e4m3", "dtype": "bf16"},
    "everything": {"sinks": True, "alibi": True, "softcap": 9.0, "batch_idx": True},
}


def test_tuned_latent_calls_find_their_winner(home):
    best = OTHERS_OF_LATENT[4]
    tuning = tuning_of(lambda problem, config: 1.0 if config in (best, A) else 2.0)
    for call in (LATENT, LATENT_SERVED, PROBLEM):
        tuning.time(call)
        choice = choose(tuned_kernel(call), call, H200)
        assert (choice.how, choice.config) == ("tuned", best if call.latent else A)
    problems = [problem for problem, _ in watch_of(tuning).timed]
    assert problems == [LATENT, *fills(LATENT_SERVED), PROBLEM]
    assert [call.problem for call in saved()] == problems
    assert tuning.left_out == {}
    assert [gain.ratio for gain in gains(tuning.timed)] == [2.0, 2.0, 2.0]


@pytest.mark.parametrize(
    "kind",
    [
        *(pytest.param(kind, id=name) for name, kind in KINDS.items()),
        pytest.param({"parallel": "tp:2"}, id="heads on GPUs"),
        pytest.param({"parallel": "cp:2"}, id="tokens on GPUs"),
    ],
)
def test_a_tuned_call_finds_its_winner(home, kind):
    call = replace(PROBLEM, batch=2, **kind)
    assert LEAN.unsupported_reason(call) is None
    assert choose(LEAN, call, H200).how == "heuristic"
    configs = first_candidates(call, H200, 5)
    tuning = tuning_of(lambda problem, config: 1.0 if config == configs[3] else 2.0)
    tuning.time(call)
    choice = choose(LEAN, call, H200)
    assert (choice.how, choice.config) == ("tuned", configs[3])
    # A call of the API knows the bound of its lengths alone.
    if call.lengths_on == "device":
        bound = replace(call, context=call.cache_capacity, capacity=None, lengths_on="host")
        assert choose(LEAN, bound, H200, uniform=False) == choice


def test_untimed_calls_are_left_out_with_a_reason(home):
    large, unsupported = replace(PROBLEM, batch=64), replace(PROBLEM, head_dim=1024)
    reason = LEAN.unsupported_reason(unsupported)
    assert reason is not None
    broken = replace(PROBLEM, batch=3)
    # Over a latent cache, where the kernel does not run.
    on_a100 = tuning_of(made_up_us, spec=find("a100"))
    assert on_a100.time(LATENT) == []
    assert on_a100.left_out[LATENT].startswith("lean_mla is written for compute capability 9.0,")

    def us(problem: AttentionProblem, config: Any) -> float | str:
        if problem == large:
            raise OutOfMemory("it needs 99 GB")
        if problem == broken or config == A:
            return "it spills"
        return 5.0

    tuning = tuning_of(us)
    for call in (large, unsupported, broken):
        assert tuning.time(call) == []
    assert tuning.left_out == {
        large: "it needs 99 GB",
        unsupported: reason,
        broken: "it spills",
    }
    assert not path_for(H200).exists()
    # A candidate that fails leaves the others.
    (result,) = tuning.time(PROBLEM)
    assert list(result.costs) == [MODELS, B, C, D]
    assert PROBLEM not in tuning.left_out


class Observer:
    """The progress of a tuning."""

    def __init__(self) -> None:
        self.compiled: list[tuple[int, int]] = []
        self.timed: list[tuple[AttentionProblem, int, int]] = []

    def compiling(self, done: int, total: int) -> None:
        self.compiled.append((done, total))

    def timing(self, call: AttentionProblem, done: int, total: int) -> None:
        self.timed.append((call, done, total))


POOL: Any = "pool"


@pytest.fixture
def jobs(monkeypatch) -> list[list[Job]]:
    """Replace compiling; return the jobs of each time."""
    done: list[list[Job]] = []

    def build_all(
        wanted: Any, capability: Any, pool: Any, progress: Callable[[int, int], None]
    ) -> None:
        assert (capability, pool) == ((9, 0), POOL)
        done.append(wanted)
        for finished in range(len(wanted) + 1):
            progress(finished, len(wanted))

    monkeypatch.setattr(search, "build_all", build_all)
    return done


@pytest.mark.usefixtures("home", "jobs")
def test_the_budget(monkeypatch):
    """Each call takes 10 s here, by a clock that only the stopwatch moves."""
    now = [100.0]
    monkeypatch.setattr(search, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def us(problem: AttentionProblem, config: Any) -> float:
        now[0] += 2.0
        return 5.0

    calls = [replace(PROBLEM, batch=batch) for batch in (1, 2, 3, 4)]
    observer = Observer()
    tuning = tuning_of(us)
    words = tuning.run(calls, 15.0, POOL, observer)
    assert words == "the budget of 15 s was spent after 2 of 4"
    assert observer.timed == [(calls[0], 0, 4), (calls[1], 1, 4)]
    assert [call.problem for call in saved()] == calls[:2]
    assert tuning.run(calls[2:], 1000.0, POOL, observer) == "all calls were timed"
    assert [call.problem for call in saved()] == calls


@pytest.mark.usefixtures("home", "jobs")
def test_an_interrupt_keeps_finished_calls():
    calls = [replace(PROBLEM, batch=batch) for batch in (1, 2, 3)]

    def us(problem: AttentionProblem, config: Any) -> float:
        if problem == calls[2]:
            raise KeyboardInterrupt
        return 5.0

    tuning = tuning_of(us)
    with pytest.raises(KeyboardInterrupt):
        tuning.run(calls, 1e9, POOL, Observer())
    assert [call.problem for call in saved()] == calls[:2]
    assert len(tuning.timed) == 2


@pytest.mark.usefixtures("home")
def test_calls_are_compiled_some_at_a_time_before_they_are_timed(jobs):
    calls = [replace(PROBLEM, batch=batch) for batch in range(1, 40)]
    timed_at: list[int] = []

    def us(problem: AttentionProblem, config: Any) -> float:
        timed_at.append(len(jobs))
        return 5.0

    observer = Observer()
    tuning_of(us, candidates=1).run(calls, 1e9, POOL, observer)
    assert timed_at == [1] * 16 + [2] * 16 + [3] * 7
    assert observer.compiled == [
        (done, len(each)) for each in jobs for done in range(len(each) + 1)
    ]


@pytest.mark.parametrize(
    "other",
    [
        {"batch": 2, "context": 99},
        {"head_dim": 64},
        {"q_len": 2},
        {"dtype": "bf16"},
        {"page_size": 128},
        {"window_left": 99},
        {"attention_chunk": 512},
        {"lengths_on": "device", "capacity": 8192},
        {"kv_dtype": "e5m2"},
    ],
    ids=str,
)
def test_there_is_one_job_for_each_build(other, jobs):
    first = replace(PROBLEM, kv_dtype="e4m3") if "kv_dtype" in other else PROBLEM
    calls = [first, replace(first, **other)]
    compile_calls(tuning_of(made_up_us, candidates=16).request, calls, POOL)
    compiled = [CudaBuild.of(job.problem, job.config) for job in jobs[0]]
    wanted = {
        CudaBuild.of(fills(call)[0], config)
        for call in calls
        for config in first_candidates(call, H200, 16)
    }
    assert set(compiled) == wanted
    assert len(compiled) == len(wanted)


def test_there_is_one_job_for_each_build_of_a_latent_call(jobs):
    calls = [LATENT_SERVED, replace(LATENT_SERVED, batch=3), LATENT, PROBLEM]
    compile_calls(tuning_of(made_up_us).request, calls, POOL)
    latent = [job for job in jobs[0] if job.kernel == "lean_mla"]
    builds = [(job.problem.q_len, job.config.to_dict().get("column_groups", 1)) for job in latent]
    assert len(latent) == 6
    assert set(builds) == {(q_len, groups) for q_len in (1, 2) for groups in (1, 2, 4)}
    assert {job.kernel for job in jobs[0]} == {"lean", "lean_mla"}


def test_gains_by_hand():
    """The model's choice is the first. Of two fills, each gets the winner of the other."""
    alone = [timed(12.0, 10.0, 11.0)]
    best = [timed(10.0, 12.0)]
    several = [timed(12.0, 10.0, 8.0), timed(9.0, 6.0, 9.0)]
    found = gains({"alone": alone, "best": best, "several": several})
    assert [gain.signature for gain in found] == ["alone", "best", "several"]
    # Of the third: 12/10 and 9/9.
    assert [gain.ratio for gain in found] == pytest.approx([1.2, 1.0, 1.2**0.5])


TRUTH = Costs()._replace(cluster=2.0, merge=0.5)


def synthetic(costs: Costs, count: int = 40) -> dict[str, list[TimedCall]]:
    """Return timings of eager calls as the model predicts them with these constants."""
    calls = [
        AttentionProblem(batch, 8 * group, 8, context, 128)
        for batch, group, context in [
            (1 + at % 5, 1 + at % 8, 700 + 977 * at) for at in range(count)
        ]
    ]
    signatures: dict[str, list[TimedCall]] = {}
    for call in calls:
        # Those that the model tells apart, the fastest by prediction.
        apart = {(each.build_key, us): each for each, us in reversed(ranked(call, H200, Costs()))}
        configs = list(reversed(apart.values()))[:24]
        each = timed_of(call, dict.fromkeys(configs, 1.0), H200)
        assert each is not None
        us = each.predicted_us(costs).tolist()
        one = timed(*us, problem=call, configs=configs)
        signatures.setdefault(one.signature, []).append(one)
    return signatures


def test_constants_of_a_gpu_are_recovered_from_its_timings():
    timings = synthetic(TRUTH)
    constants, before, after = measured_constants(timings, H200)
    assert list(constants) == list(MEASURED) == ["cluster", "merge"]
    assert constants["merge"] == pytest.approx(TRUTH.merge, rel=0.02)
    # Choices hardly depend on this one.
    assert constants["cluster"] > 1.2 * Costs().cluster
    # Shares on calls left out.
    assert len(before) == len(after) == sum(map(len, timings.values()))
    assert geometric_mean(after) > geometric_mean(before)
    assert geometric_mean(after) > 0.998


def test_constants_without_timings_of_lean_cuda():
    assert measured_constants({}, H200) == ({}, [], [])
    of_triton = timed(5.0, 6.0, configs=[OF_TRITON, replace(OF_TRITON, num_warps=8)])
    assert timed_of(PROBLEM, of_triton.costs, H200) is None
    assert measured_constants({"": [of_triton]}, H200) == ({}, [], [])
    of_latent = timed(5.0, 6.0, problem=LATENT, configs=OTHERS_OF_LATENT)
    few = synthetic(TRUTH, count=10)
    many = {f"latent {number}": [of_latent] for number in range(20)}
    assert measured_constants(few | many, H200) == ({}, [], [])
    energies = {
        signature: [replace(call, objective="energy") for call in calls]
        for signature, calls in synthetic(TRUTH).items()
    }
    assert measured_constants(energies, H200) == ({}, [], [])


def test_the_share_by_hand():
    """The model's choice takes 12 us, the best 9."""
    each = timed_of(PROBLEM, timed(12.0, 9.0, 10.0).costs, H200)
    assert isinstance(each, Timed)
    assert each.share(Costs()) == 0.75
    assert timed_of(PROBLEM, timed(12.0).costs, H200) is None
    lone = timed_of(PROBLEM, timed(12.0).costs, H200, least=1)
    assert lone is not None
    assert lone.share(Costs()) == 1.0


@pytest.mark.parametrize(("objective", "exponent"), [("energy", 1), ("edp", 2)])
def test_energies_replace_latencies(objective, exponent, home, monkeypatch):
    tuning = tuning_of(lambda problem, config: 10.0 if config == MODELS else 8.0)
    tuning.request = replace(tuning.request, objective=objective)
    small, large = PROBLEM, replace(PROBLEM, batch=4)
    for call in (small, large):
        tuning.time(call)
    assert not path_for(H200).exists()
    measured: list[Any] = []
    of_large = first_candidates(large, H200, 5)[0]
    kw = {MODELS: 0.4, A: 0.6}

    def measure_power(index: int, watch: Any, work: Any) -> list[dict[Any, float]]:
        measured.extend(work)
        assert (index, watch) == (0, tuning.watch)
        return [{config.build_key: power for config, power in kw.items()} for _ in work]

    monkeypatch.setattr(power, "measure_power", measure_power)
    energies(tuning)
    # Only the larger: a build draws the same power on any call of a kind.
    ((problem, configs),) = measured
    assert problem == large
    assert configs[:2] == [MODELS, of_large]
    assert len({config.build_key for config in configs}) == len(configs)
    calls = {call.problem: call for call in saved()}
    assert {call.objective for call in calls.values()} == {objective}
    expected = {MODELS: 0.4 * 10.0**exponent, A: 0.6 * 8.0**exponent}
    assert calls[small].costs == pytest.approx(expected)
    winner = choose(CUDA, small, H200, objective=objective).config
    assert winner == (MODELS if objective == "energy" else A)
    assert choose(CUDA, small, H200).how == "heuristic"


def test_energies_of_a_latent_call(home, monkeypatch):
    """Builds differ in their column groups. The rules' is of four."""
    tuning = tuning_of(lambda problem, config: 10.0 if config == RULES else 9.0, objective="energy")
    tuning.time(LATENT)
    measured: list[Any] = []

    def measure_power(index: int, watch: Any, work: Any) -> list[dict[Any, float]]:
        measured.extend(work)
        kw = {BuildKey("cuda", (groups,)): 0.1 * groups for groups in (1, 2, 4)}
        return [kw for _ in work]

    monkeypatch.setattr(power, "measure_power", measure_power)
    energies(tuning)
    ((problem, configs),) = measured
    assert problem == LATENT
    assert [config.build_key.settings for config in configs] == [(4,), (1,), (2,)]
    (call,) = saved()
    assert (call.objective, call.costs[RULES]) == ("energy", pytest.approx(0.4 * 10.0))
    assert call.costs[MlaConfig(1, align_grid=True)] == pytest.approx(0.1 * 9.0)


@pytest.mark.parametrize("energy_mj", [4.0, None])
def test_power_is_energy_by_time(energy_mj, monkeypatch):
    windows: list[Any] = []

    def replay(launches: Any, sample_ms: float) -> Any:
        windows.append(launches[0])
        return SimpleNamespace(launches=3, graph=SimpleNamespace(replay=None))

    def measure_window(replay: Any, launches: int, *given: Any) -> Any:
        assert (launches, *given) == (3, "GPU-1", "calibrated", power.WINDOW_S)
        return SimpleNamespace(energy_mj=energy_mj, sustained_us=8.0)

    gpu = SimpleNamespace(uuid="GPU-1")
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: gpu)
    monkeypatch.setattr("leanbench.gpu.nvml.Nvml", nullcontext)
    monkeypatch.setattr("leanbench.measure.energy_meter.calibrate", lambda nvml: "calibrated")
    monkeypatch.setattr("leanbench.measure.energy.measure_window", measure_window)
    monkeypatch.setattr("leanbench.measure.timing.Replay", replay)
    watch: Any = FakeWatch(made_up_us)
    many = list({config.build_key: config for config in CUDA.tuning_space(PROBLEM, H200)}.values())
    first = many[: power.MOST_BUILDS]
    assert len(many) > len(first)
    work = [(PROBLEM, many), (SERVED, [A])]
    if energy_mj is None:
        with pytest.raises(UserError, match="no energy counter that can be read"):
            power.measure_power(0, watch, work)
    else:
        kw = power.measure_power(0, watch, work)
        assert kw == [{each.build_key: 0.5 for each in first}, {A.build_key: 0.5}]
        assert windows == [*first, A]


def test_the_tuning_of_a_gpu(home, monkeypatch):
    made: list[Any] = []
    monkeypatch.setattr(GpuStopwatch, "__init__", lambda self, *given: made.append(given))
    monkeypatch.setattr(search, "versions", lambda index: {"driver": str(index)})
    request = Request(find("h100"), 3)
    tuning = Tuning.of(request)
    assert tuning.about == {"driver": "3"}
    assert not path_for(request.spec).exists()
    tuning.keep([timed(1.0)])
    assert path_for(request.spec).exists()
    assert made == [(3, request.spec)]
