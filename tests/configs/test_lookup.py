"""Choice of a call's settings: given, timed, or the model's."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from math import exp

import pytest
from call_counts import function_calls
from leanbench.kernels.lean.cuda_cost import Costs
from leanbench.kernels.lean.cuda_settings import chosen, costs_of, for_any_length
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
    TRITON,
    timed,
)

from leanbench.configs import store
from leanbench.configs.lookup import (
    Choice,
    choose,
    ranked,
    refusal,
    resolve,
    row_fields,
    tuned_kernel,
)
from leanbench.configs.signature import signature_of
from leanbench.configs.store import TimedCall, save
from leanbench.core.kernel import BATCH_INVARIANT
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel
from leanbench.gpu.catalogue import find

SIGNATURE = "8 tiles d128 g4 2 B HND, 4096 tokens"
SERVED_SIGNATURE = "8 tiles d128 g4 2 B HND, up to 4096"
FROM = "timed 2026-11-28 on NVIDIA H200"
A, B, C, D = OTHERS


@pytest.fixture(autouse=True)
def _home(home):
    """Start every test without timings."""


def ship(*calls: TimedCall, **constants: float) -> None:
    save(H200, calls, constants, store.SHIPPED / "h200.json")


@pytest.mark.parametrize("spec", [H200, find("a100")], ids=lambda spec: spec.name)
def test_without_timings_the_model_chooses(spec):
    expected = Choice(LEAN.default_config(PROBLEM, spec), "heuristic", "nothing was timed here")
    assert choose(LEAN, PROBLEM, spec) == expected


def test_a_timed_signature_gets_its_winner_and_others_the_models():
    save(H200, [timed(10.0, 9.5, 9.0, 9.2)])
    assert choose(LEAN, PROBLEM, H200) == Choice(B, "tuned", f"{FROM}, yours: {SIGNATURE}")
    # Of the same signature: another dtype, a length within an eighth of an octave.
    for fields in ({"dtype": "bf16"}, {"context": 3800}, {"capacity": 9999}):
        assert choose(LEAN, replace(PROBLEM, **fields), H200).config == B
    longer = replace(PROBLEM, context=5000)
    untimed = Choice(chosen(longer, H200), "heuristic", "not timed here")
    assert choose(LEAN, longer, H200) == untimed
    assert choose(LEAN, PROBLEM, find("h100")).why == "nothing was timed here"
    given = Choice(C, "given", "the settings were given")
    assert choose(LEAN, PROBLEM, H200, C) == given


def fills(*regrets: dict) -> list[TimedCall]:
    """Return a fill for each argument, of costs that are `exp` of the regrets."""
    return [
        timed(
            *(10 * exp(regret) for regret in each.values()),
            configs=list(each),
            problem=replace(SERVED, context=4096 - number),
            signature=SERVED_SIGNATURE,
        )
        for number, each in enumerate(regrets)
    ]


def test_fills_count_by_their_mean_and_the_worst():
    """By hand, mean + worst / 2: B .16 + .08, A .15 + .15, C .29 + .145, D .45 + .45."""
    calls = fills(
        {A: 0.0, B: 0.16, C: 0.29, D: 0.9, MODELS: 0.01}, {D: 0.0, C: 0.29, A: 0.30, B: 0.16}
    )
    # The model's choice, of a single fill, is left out.
    assert ranked(calls) == [B, A, C, D]
    save(H200, calls)
    assert choose(LEAN, SERVED, H200) == Choice(B, "tuned", f"{FROM}, yours: {SERVED_SIGNATURE}")
    # Regrets are relative to the best of a fill: long fills count no more than short ones.
    assert ranked([timed(100.0, 101.0), timed(1.2, 1.0)])[0] == A


def test_timings_of_older_kernels_do_not_count():
    older, newer = fills({A: 0.0, B: 0.9}, {A: 0.01, B: 0.0})
    save(H200, [replace(older, versions={"kernels": "1"})])
    assert choose(LEAN, SERVED, H200).config == A
    newer = replace(newer, versions={"kernels": "2"}, time="2026-11-29T09:30:00+00:00")
    save(H200, [newer])
    assert choose(LEAN, SERVED, H200).config == B


@pytest.mark.parametrize(
    ("problem", "uniform"),
    [
        (SERVED, True),
        (replace(SERVED, context=17, capacity=4096), True),
        (replace(SERVED, context=1500, capacity=1500), True),
        (replace(SERVED, context=4000, capacity=None), True),
        (PROBLEM, False),
        (replace(PROBLEM, context=3000), False),
    ],
    ids=["full", "short", "a smaller cache", "without capacity", "a bound", "a lower bound"],
)
def test_lengths_on_the_device_are_looked_up_by_their_bound(problem, uniform):
    save(H200, [timed(10.0, 9.0), timed(10.0, 12.0, 8.0, problem=SERVED)])
    choice = choose(LEAN, problem, H200, uniform=uniform)
    assert choice == Choice(B, "tuned", f"{FROM}, yours: {SERVED_SIGNATURE}")


def test_untimed_lengths_on_the_device_get_the_models():
    save(H200, [timed(10.0, 9.0)])
    choice = choose(CUDA, SERVED, H200)
    expected = chosen(for_any_length(SERVED), H200)
    assert choice == Choice(expected, "heuristic", "not timed here")


def test_the_users_timings_before_shipped_ones():
    other = replace(PROBLEM, batch=2)
    ship(timed(10.0, 5.0), timed(10.0, 5.0, problem=other))
    save(H200, [timed(10.0, 12.0, 9.0)])
    assert choose(LEAN, PROBLEM, H200).config == B
    choice = choose(LEAN, other, H200)
    assert (choice.config, choice.why.partition(":")[0]) == (A, f"{FROM}, shipped")


def test_candidates_of_another_kernel_are_passed_over(monkeypatch):
    save(H200, [timed(10.0, 9.0, 8.0, configs=[MODELS, A, OF_TRITON])])
    why = f"{FROM}, yours: {SIGNATURE}"
    assert choose(LEAN, PROBLEM, H200) == Choice(OF_TRITON, "tuned", why)
    assert choose(TRITON, PROBLEM, H200) == Choice(OF_TRITON, "tuned", why)
    assert choose(CUDA, PROBLEM, H200) == Choice(A, "tuned", why)
    save(H200, [timed(10.0, 9.0)])
    assert choose(TRITON, PROBLEM, H200).how == "heuristic"
    # Nor what cannot run on this machine.
    monkeypatch.setattr(type(CUDA), "unavailable_reason", lambda self: "there is no NVRTC")
    assert choose(LEAN, PROBLEM, H200).config == TRITON.default_config(PROBLEM, H200)


@pytest.mark.parametrize("objective", store.OBJECTIVES)
def test_each_objective_has_its_own_timings(objective):
    winners = dict(zip(store.OBJECTIVES, (A, B, C), strict=True))
    for each, winner in winners.items():
        save(H200, [timed(10.0, 1.0, configs=[MODELS, winner], objective=each)])
    assert choose(LEAN, PROBLEM, H200, objective=objective).config == winners[objective]
    assert resolve(LEAN, PROBLEM, H200, objective).config == winners[objective]
    assert resolve(LEAN, PROBLEM, H200, "default").config == A


def test_constants_measured_here_change_the_models_choice_on_this_gpu_alone():
    assert MODELS.cluster_size > 1
    save(H200, [], {"cluster": 500.0})
    choice = choose(LEAN, PROBLEM, H200)
    assert (choice.how, choice.config) == ("heuristic", chosen(PROBLEM, H200))
    assert chosen(PROBLEM, H200).cluster_size == 1
    assert costs_of(H200) == Costs(cluster=500.0)
    h100 = find("h100")
    assert choose(LEAN, PROBLEM, h100).config == chosen(PROBLEM, h100)
    assert costs_of(h100) == Costs()


def test_the_users_constants_before_shipped_ones():
    ship(cluster=2.0, merge=3.0)
    save(H200, [], {"merge": 4.0})
    choose(LEAN, PROBLEM, H200)
    assert costs_of(H200) == Costs(cluster=2.0, merge=4.0)


def test_constants_follow_the_switch(monkeypatch):
    save(H200, [], {"cluster": 500.0})
    for word, cluster in [("on", 500.0), ("off", Costs().cluster), ("on", 500.0)]:
        monkeypatch.setenv("LEANBENCH_CONFIGS", word)
        choose(LEAN, PROBLEM, H200)
        assert costs_of(H200).cluster == cluster


def test_a_sweep_of_the_models_choices_uses_measured_constants():
    save(H200, [], {"cluster": 500.0})
    assert resolve(LEAN, PROBLEM, H200, "heuristic").config != MODELS


def test_requests_of_a_sweep():
    save(H200, [timed(10.0, 9.0)])
    assert resolve(LEAN, PROBLEM, H200, "default").config == A
    model = Choice(MODELS, "heuristic", "the heuristic was asked for")
    assert resolve(LEAN, PROBLEM, H200, "heuristic") == model
    assert resolve(LEAN, PROBLEM, H200, C) == Choice(C, "given", "the settings were given")
    why = "these settings do not depend on the rest of the batch"
    invariant = Choice(LEAN.batch_invariant_config(PROBLEM, H200), "heuristic", why)
    assert resolve(LEAN, PROBLEM, H200, BATCH_INVARIANT) == invariant


@pytest.mark.parametrize("spec", [H200, find("a100")], ids=lambda spec: spec.name)
def test_a_kernel_that_always_runs_batch_invariant(spec):
    own = kernel("lean_batch_invariant")
    config = LEAN.batch_invariant_config(PROBLEM, spec)
    assert config is not None
    assert config.fixed_run_tiles * config.tile_tokens == 1024
    assert own.default_config(PROBLEM, spec) == config != LEAN.default_config(PROBLEM, spec)
    assert own.config_choice == BATCH_INVARIANT


def test_kernels_without_timings():
    save(H200, [timed(10.0, 9.0)])
    for name in ("fa2", "fixed_split"):
        config = kernel(name).default_config(PROBLEM, H200)
        assert choose(kernel(name), PROBLEM, H200) == Choice(
            config, "heuristic", f"{name} is not tuned"
        )
    nothing = Choice(None, "none", "reference has no settings")
    assert choose(kernel("reference"), PROBLEM, H200) == nothing


def test_the_fields_of_a_row():
    def fields(name: str) -> tuple[object, ...]:
        return tuple(row_fields(kernel(name), choose(kernel(name), PROBLEM, H200)).values())

    save(H200, [timed(10.0, 9.0)])
    assert fields("lean") == (A.to_dict(), "tuned", f"{FROM}, yours: {SIGNATURE}")
    fa2 = kernel("fa2").default_config(PROBLEM, H200)
    assert fa2 is not None
    assert fields("fa2") == (fa2.to_dict(), "heuristic", None)
    assert fields("reference") == (None, None, None)
    assert list(row_fields(LEAN, choose(LEAN, PROBLEM, H200))) == [
        "config",
        "config_choice",
        "config_reason",
    ]


def test_a_look_up_costs_few_calls():
    """A call takes about 0.1 us."""
    save(H200, [timed(10.0, 9.0)])
    choose(LEAN, PROBLEM, H200)
    similar = AttentionProblem(1, 32, 8, 4001, 128)
    assert 0 < function_calls(lambda: choose(LEAN, similar, H200)) < 100
    fresh = AttentionProblem(1, 32, 8, 128 * 77, 128)
    assert 0 < function_calls(lambda: choose(LEAN, fresh, H200)) < 500


def test_a_look_up_imports_no_torch():
    save(H200, [timed(10.0, 9.0)])
    script = (
        "import sys; from leanbench.configs.lookup import choose; from leanbench.core.registry"
        " import kernel; from leanbench.gpu.catalogue import find; from leanbench.core.problem"
        " import AttentionProblem as Problem; choices = [choose(kernel('lean_cuda'),"
        " Problem(batch, 32, 8, 4096, 128), find('h200')).how for batch in (1, 2)];"
        " print(choices, {'torch', 'triton'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "['tuned', 'heuristic'] set()\n", done.stderr


def test_a_winner_is_passed_over_where_its_kernel_refuses(home):
    """Triton takes no windows, which signatures leave out."""
    windowed = replace(PROBLEM, context=8192, window_left=PROBLEM.max_context - PROBLEM.q_len)
    assert signature_of(windowed) == signature_of(PROBLEM)
    save(H200, [timed(5.0, 9.0, configs=(OF_TRITON, A))])
    assert choose(LEAN, PROBLEM, H200).config == OF_TRITON
    assert choose(LEAN, windowed, H200).config == A


def test_calls_of_a_signature_with_other_candidates_keep_a_winner():
    """Candidates follow from a call's size, of which a signature knows less."""
    first, other = timed(5.0, 4.0), timed(9.0, 8.0, configs=(C, D))
    assert ranked([first, other])[:2] == [A, D]
    # Those timed for both calls come before.
    assert ranked([first, timed(9.0, 8.0, configs=(MODELS, D))]) == [MODELS]


def test_gpus_that_share_sequences_get_settings_of_cuda():
    shared, a100 = replace(PROBLEM, parallel="cp:2"), find("a100")
    for choice in (choose(LEAN, shared, a100), resolve(LEAN, shared, a100, "heuristic")):
        assert choice.config is not None
        assert CUDA.takes(choice.config)


LEAN_MLA = kernel("lean_mla")


def test_a_latent_call_gets_its_winner_and_others_the_rules():
    assert choose(LEAN_MLA, LATENT, H200) == Choice(RULES, "heuristic", "nothing was timed here")
    latent = timed(20.4, 16.0, 15.6, problem=LATENT, configs=[RULES, *OTHERS_OF_LATENT])
    save(H200, [latent, timed(10.0, 9.0)])
    winner = Choice(OTHERS_OF_LATENT[1], "tuned", f"{FROM}, yours: {signature_of(LATENT)}")
    assert choose(LEAN_MLA, LATENT, H200) == winner
    assert resolve(LEAN_MLA, LATENT, H200, "default") == winner
    assert resolve(LEAN_MLA, LATENT, H200, "heuristic").config == RULES
    longer = replace(LATENT, context=2000)
    rules = Choice(LEAN_MLA.default_config(longer, H200), "heuristic", "not timed here")
    assert choose(LEAN_MLA, longer, H200) == rules
    assert choose(LEAN, PROBLEM, H200).config == A
    assert (tuned_kernel(LATENT), tuned_kernel(PROBLEM)) == (LEAN_MLA, LEAN)


def test_rules_for_lengths_on_the_device_are_those_of_their_bound():
    """Choose for the capacity; 4352 tokens on the host would have longer splits."""
    call = replace(LATENT_SERVED, batch=1, q_heads=128, context=4352)
    at_bound = replace(call, context=6144)
    known = replace(call, lengths_on="host")
    filled = replace(call, context=9, capacity=4352)
    assert LEAN_MLA.default_config(known, H200) == MlaConfig(4, align_grid=True, column_groups=4)
    for each, uniform in ((call, True), (at_bound, True), (filled, True), (known, False)):
        config = choose(LEAN_MLA, each, H200, uniform=uniform).config
        assert config == LEAN_MLA.default_config(each if uniform else call, H200)
        assert config == MlaConfig(2, align_grid=True, column_groups=4)
    save(H200, [timed(5.0, 4.0, problem=call, configs=OTHERS_OF_LATENT)])
    for each in (call, at_bound, filled):
        assert choose(LEAN_MLA, each, H200).config == OTHERS_OF_LATENT[1]


def test_which_gpus_run_a_call():
    a100 = find("a100")
    words = "lean_mla is written for compute capability 9.0, this is 8.0: run it on a Hopper GPU"
    assert [refusal(LATENT, spec) for spec in (H200, a100)] == [None, words]
    assert [refusal(PROBLEM, spec) for spec in (H200, a100)] == [None, None]
    wide = replace(LATENT, q_len=40)
    assert refusal(wide, H200) == LEAN_MLA.unsupported_reason(wide) is not None


def test_a_shared_prefix_is_launched_alone_by_cuda_cpp():
    """Settings of the API are those of the other launch; to other kernels its pages are any."""
    problem = AttentionProblem(
        *(8, 32, 8, 5120, 128, "bf16", "NHD"), page_size=16, shared_prefix=4096, lengths_on="device"
    )
    a100 = find("a100")
    assert resolve(kernel("lean"), problem, a100, "default") == resolve(
        kernel("lean_cuda"), problem.own, a100, "default"
    )
    whole = replace(problem, shared_prefix=0)
    of_fa2 = (resolve(kernel("fa2"), each, a100, "default") for each in (problem, whole))
    assert len({choice.config for choice in of_fa2}) == 1
    assert [
        kernel(name).unsupported_reason(problem) for name in ("lean_triton", "lean_batch_invariant")
    ] == [
        "lean_triton takes no pages that sequences share, this problem has shared_prefix 4096:"
        " leave it out",
        "lean_batch_invariant merges no shared prefix: choose lean, or leave shared_prefix out",
    ]
