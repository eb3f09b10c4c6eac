"""The settings of a call, their file, and the reason."""

from __future__ import annotations

from dataclasses import replace

import pytest
from depth import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from leanbench.kernels.lean.configs import BuildKey, LeanConfig, LeanTritonConfig
from leanbench.kernels.lean.cuda_settings import cuda_config
from tuned_examples import (
    FROM,
    H200,
    HEURISTIC,
    LARGE,
    LEAN,
    PROBLEM,
    SAME_BUILD,
    WIDE,
    build,
    candidate,
    family,
    problem_of,
    tuned,
)

from leanbench.configs import store
from leanbench.configs.formula import Coefficients, Shape, divide
from leanbench.configs.lookup import Choice, choose, resolve, row_fields
from leanbench.configs.store import save_families
from leanbench.configs.tuned import LEAST_GAIN, Build, Timed
from leanbench.core.errors import UserError
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel
from leanbench.gpu.catalogue import find


@pytest.fixture(autouse=True)
def _home(home):
    """Start every test without tuned settings."""


def heuristic_because(why: str, config: LeanTritonConfig = HEURISTIC) -> Choice:
    return Choice(config, "heuristic", why)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"q_len": 4}, "configs are tuned for q_len 1, not for q_len 4"),
        ({"page_size": 64}, "configs are tuned for a contiguous cache, not for page_size 64"),
    ],
)
def test_several_query_tokens_and_pages_run_with_the_heuristic(fields, why):
    save_families(H200, [family()])
    assert choose(LEAN, PROBLEM, H200).how == "tuned"
    problem = replace(PROBLEM, **fields)
    expected = Choice(LEAN.default_config(problem, H200), "heuristic", why)
    assert choose(LEAN, problem, H200) == expected == resolve(LEAN, problem, H200, "default")


def test_given_settings_win():
    save_families(H200, [family()])
    assert choose(LEAN, PROBLEM, H200, WIDE) == Choice(WIDE, "given", "the settings were given")


def test_nothing_tuned_means_the_heuristic():
    why = "nothing is tuned that fits head_dim 128, group size 4, latency on NVIDIA H200"
    assert choose(LEAN, PROBLEM, H200) == heuristic_because(why)


def test_the_users_file_then_the_shipped_one(ship):
    ship(family(large_us=8.0))
    assert choose(LEAN, PROBLEM, H200) == Choice(
        LARGE, "tuned", f"{FROM}, shipped: predicted 20.0% faster than the heuristic here"
    )
    save_families(H200, [family()])
    assert choose(LEAN, PROBLEM, H200) == Choice(
        LARGE, "tuned", f"{FROM}, yours: predicted 10.0% faster than the heuristic here"
    )


def test_the_switch_turns_them_off(monkeypatch):
    save_families(H200, [family()])
    for word in ("off", "OFF", "0", "false", "No", " off "):
        monkeypatch.setenv("LEANBENCH_CONFIGS", word)
        assert choose(LEAN, PROBLEM, H200) == heuristic_because(
            "LEANBENCH_CONFIGS turns tuned configs off"
        )
    for word in ("on", "1", "", " ", "true", "YES"):
        monkeypatch.setenv("LEANBENCH_CONFIGS", word)
        assert choose(LEAN, PROBLEM, H200).how == "tuned"
    monkeypatch.setenv("LEANBENCH_CONFIGS", "foo")
    with pytest.raises(UserError, match="LEANBENCH_CONFIGS 'foo' is neither on nor off: set it"):
        choose(LEAN, PROBLEM, H200)


@pytest.mark.parametrize(
    ("large_us", "how"),
    [(9.94, "tuned"), (9.96, "heuristic"), (10.0, "heuristic"), (12, "heuristic")],
)
def test_less_than_half_a_percent_is_no_reason(large_us, how):
    save_families(H200, [family(10.0, large_us)])
    choice = choose(LEAN, PROBLEM, H200)
    assert choice.how == how
    if how == "heuristic":
        why = (
            f"{FROM}, yours: no tuned config is predicted at least 0.5% faster than the heuristic"
            " here"
        )
        assert choice == heuristic_because(why)


def test_the_fastest_of_the_shortlist_wins_and_the_others_do_not_count():
    candidates = [
        candidate(HEURISTIC, 0),
        candidate(LARGE, 1),
        candidate(WIDE, 2),
        candidate(LeanTritonConfig(256, 8, 2, 1, 1, False), 3),
    ]
    builds = [build(10.0), build(9.0), build(8.0), build(1.0)]
    save_families(H200, [family(candidates=candidates, builds=builds, shortlist=[1, 2])])
    assert choose(LEAN, PROBLEM, H200).config == WIDE


def test_the_heuristic_is_judged_by_its_build_not_by_its_candidate():
    """Its grid need not be a candidate's, but its LeanTile, warps, stages and registers must."""
    candidates = [candidate(SAME_BUILD, 0), candidate(LARGE, 1)]
    save_families(H200, [family(candidates=candidates)])
    assert choose(LEAN, PROBLEM, H200).config == LARGE
    # With 8 warps, the heuristic's LeanTile is another build.
    candidates[0] = candidate(replace(HEURISTIC, num_warps=8), 0)
    save_families(H200, [family(candidates=candidates)])
    why = f"{FROM}, yours: the heuristic's settings have no formula, so nothing can be compared"
    assert choose(LEAN, PROBLEM, H200) == heuristic_because(why)
    # Another register cap is another build, too: 3 CTAs of 4 warps leave 168 registers, 1 CTA needs
    # no cap.
    candidates[0] = candidate(replace(HEURISTIC, ctas_per_sm=4), 0)
    save_families(H200, [family(candidates=candidates)])
    assert choose(LEAN, PROBLEM, H200).how == "heuristic"


@pytest.mark.parametrize(
    ("batch", "context", "how"),
    [
        (1, 4096, "tuned"),
        (4, 4096, "tuned"),
        (4, 8192, "tuned"),
        (4, 8256, "heuristic"),
        (5, 64, "heuristic"),
    ],
)
def test_far_beyond_what_was_timed_the_heuristic_decides(batch, context, how):
    """The largest problem had 32 KV heads of 4096 tokens.

    The formula's limit is the same heads with twice the tokens.
    """
    save_families(H200, [family(problems=[tuned(context=300), tuned(batch=4)])])
    choice = choose(LEAN, replace(PROBLEM, batch=batch, context=context), H200)
    if (batch, context) == (4, 4096):
        assert "timed at 32 x 4096 tokens" in choice.why
    elif how == "heuristic":
        why = (
            "beyond what the formula was fitted to, 32 KV heads, 131072 tokens of all of them"
            " together"
        )
        assert choice.why == f"{FROM}, yours: {why}"
    assert choice.how == how


def test_a_problem_that_was_timed_takes_what_was_chosen_there():
    """The choice holds even if the formula disagrees."""
    save_families(H200, [family(10.0, 11.0, problems=[tuned(4096)])])
    why = f"{FROM}, yours: timed at 8 x 4096 tokens, 10.0% faster than the heuristic"
    assert choose(LEAN, PROBLEM, H200) == Choice(LARGE, "tuned", why)
    # The same number of (sequence, KV head) pairs is the same launch.
    assert choose(LEAN, AttentionProblem(2, 16, 4, 4096, 128), H200) == Choice(LARGE, "tuned", why)
    assert choose(LEAN, replace(PROBLEM, context=8192), H200).how == "heuristic"
    assert choose(LEAN, replace(PROBLEM, batch=2), H200).how == "heuristic"


def test_a_problem_where_the_heuristic_was_chosen():
    save_families(H200, [family(10.0, 1.0, problems=[tuned(4096, chosen=0)])])
    assert choose(LEAN, PROBLEM, H200) == heuristic_because(
        f"{FROM}, yours: timed at 8 x 4096 tokens, where nothing was faster"
    )
    assert choose(LEAN, replace(PROBLEM, context=8192), H200).how == "tuned"


def test_a_heuristic_that_has_changed_since_leaves_the_timed_one():
    candidates = [candidate(SAME_BUILD, 0), candidate(LARGE, 1)]
    save_families(H200, [family(candidates=candidates, problems=[tuned(4096, chosen=0)])])
    assert choose(LEAN, PROBLEM, H200) == Choice(
        SAME_BUILD, "tuned", f"{FROM}, yours: timed at 8 x 4096 tokens"
    )


@pytest.mark.parametrize(
    ("name", "context", "how"),
    [
        # LeanTiles of 128 tokens in CUDA C++: 949 to 1024 tokens all have 8 of them.
        ("lean_cuda", 1024, "tuned"),
        ("lean_cuda", 896, "heuristic"),
        ("lean_cuda", 1025, "heuristic"),
        # HEURISTIC, a possible result in Triton, has LeanTiles of 64.
        ("lean_triton", 960, "tuned"),
        ("lean_triton", 961, "heuristic"),
    ],
)
def test_contexts_of_as_many_of_the_smallest_lean_tiles_share_what_was_timed(name, context, how):
    cuda = cuda_config(32, 4, 2, 1, 1, 8, "bulk", 1, False)
    candidates = [candidate(HEURISTIC, 0), candidate(LARGE, 1), candidate(cuda, None)]
    timed = [Timed(candidate=index, latency_us=9.0) for index in (1, 2)]
    problems = [tuned(949, timed=timed, ties=[1, 2])]
    save_families(H200, [family(10.0, 11.0, candidates=candidates, problems=problems)])
    choice = choose(kernel(name), replace(PROBLEM, context=context), H200)
    assert choice.how == how
    if how == "tuned":
        assert choice.config == {"lean_cuda": cuda, "lean_triton": LARGE}[name]


@pytest.mark.parametrize("name", ["lean", "lean_triton", "lean_cuda"])
def test_lengths_on_the_device_take_settings_for_any_of_them(name):
    save_families(H200, [family()])
    lean = kernel(name)
    choice = choose(lean, PROBLEM, H200, uniform=False)
    assert choice == Choice(
        lean.any_length_config(PROBLEM, H200),
        "heuristic",
        "lengths are on the device, these settings are for any of them",
    )
    # A sweep knows the lengths, but a caller's host does not, so they change nothing.
    lengths = (PROBLEM.max_context, *[16] * (PROBLEM.batch - 1))
    if PROBLEM.batch > 1:
        assert choose(lean, replace(PROBLEM, context=lengths), H200) == choice
    assert choose(lean, PROBLEM, H200, LARGE, uniform=False).how == "given"


@pytest.mark.parametrize("name", ["lean", "lean_triton", "lean_cuda"])
def test_room_beyond_a_length_that_the_host_knows_changes_nothing(name):
    save_families(H200, [family()])
    lean, roomy = kernel(name), replace(PROBLEM, capacity=131_072)
    assert choose(lean, roomy, H200) == choose(lean, PROBLEM, H200)
    assert resolve(lean, roomy, H200, "heuristic") == resolve(lean, PROBLEM, H200, "heuristic")


@pytest.mark.parametrize("context", [1001, 1024, 4001, 8964])
def test_the_heuristic_is_asked_about_the_context_itself(context):
    """Only for timed choices, sizes are rounded to whole LeanTiles."""
    problem = AttentionProblem(1, 8, 8, context, 64)
    save_families(H200, [family(head_dim=64, group_size=1, problems=[])])
    choice = choose(LEAN, problem, H200)
    assert choice.how == "heuristic"
    assert choice.config == LEAN.default_config(problem, H200)


def test_energy_and_energy_delay_have_their_own_families():
    builds = [build(10.0, power_kw=0.5), build(11.0, power_kw=0.4)]
    save_families(H200, [family(large_us=9.99), family(builds=builds, objective="energy")])
    save_families(H200, [family(builds=builds, objective="edp")])
    assert choose(LEAN, PROBLEM, H200).how == "heuristic"
    energy = choose(LEAN, PROBLEM, H200, objective="energy")
    edp = choose(LEAN, PROBLEM, H200, objective="edp")
    assert energy.config == edp.config == LARGE
    assert (
        energy.why
        == f"{FROM}, yours: predicted {1 - 4.4 / 5:.1%} lower in energy than the heuristic here"
    )
    assert f"predicted {1 - 48.4 / 50:.1%} lower in energy x latency" in edp.why
    # 21% longer at 80% of the power: less energy, more energy x latency.
    longer = [build(10.0, power_kw=0.5), build(12.1, power_kw=0.4)]
    save_families(
        H200, [family(builds=longer, objective=objective) for objective in ("energy", "edp")]
    )
    assert choose(LEAN, PROBLEM, H200, objective="energy").how == "tuned"
    assert choose(LEAN, PROBLEM, H200, objective="edp").how == "heuristic"
    # Without the heuristic's power, no comparison is possible.
    save_families(
        H200, [family(builds=[build(10.0), build(5.0, power_kw=0.1)], objective="energy")]
    )
    assert "no formula" in choose(LEAN, PROBLEM, H200, objective="energy").why


def test_a_corrupt_file_is_said_once_and_passed_over(ship):
    ship(family())
    path = store.path_of("h200")
    path.parent.mkdir(parents=True)
    path.write_text("{")
    problems = (PROBLEM, problem_of(8), problem_of(1, 64))
    with pytest.warns(
        UserWarning, match=r"h200.json is not a file of tuned configs .*; it is not used$"
    ) as warned:
        choices = [choose(LEAN, problem, H200) for problem in problems]
    assert choices[0] == Choice(
        LARGE, "tuned", f"{FROM}, shipped: predicted 10.0% faster than the heuristic here"
    )
    assert len(warned) == 1


def test_kernels_that_are_not_tuned():
    save_families(H200, [family()])
    for name in ("fa2", "fixed_split"):
        config = kernel(name).default_config(PROBLEM, H200)
        assert config is not None
        assert choose(kernel(name), PROBLEM, H200) == heuristic_because(
            f"{name} is not tuned", config
        )
    assert choose(kernel("reference"), PROBLEM, H200) == Choice(
        None, "none", "reference has no settings"
    )


@pytest.mark.parametrize("spec", [H200, find("a100")], ids=lambda spec: spec.name)
def test_a_kernel_that_always_runs_batch_invariant(spec):
    own = kernel("lean_batch_invariant")
    config = kernel("lean").batch_invariant_config(PROBLEM, spec)
    assert config is not None
    assert config.fixed_run_tiles is not None
    assert config.fixed_run_tiles * config.tile_tokens == 1024
    assert (
        own.default_config(PROBLEM, spec) == config != kernel("lean").default_config(PROBLEM, spec)
    )
    assert own.config_choice is not None
    why = "these settings do not depend on the rest of the batch"
    # Predictions replace lean by a kernel that can run.
    for lean in (own, LEAN) if spec.name == "a100" else (own,):
        assert resolve(lean, PROBLEM, spec, own.config_choice) == heuristic_because(why, config)


def test_what_a_sweep_asks_for():
    save_families(H200, [family()])
    assert resolve(LEAN, PROBLEM, H200, "default").config == LARGE
    assert resolve(LEAN, PROBLEM, H200, "heuristic") == heuristic_because(
        "the heuristic was asked for"
    )
    given = resolve(LEAN, PROBLEM, H200, WIDE)
    assert (given.config, given.how) == (WIDE, "given")


def test_the_fields_of_a_row():
    save_families(H200, [family()])
    why = f"{FROM}, yours: predicted 10.0% faster than the heuristic here"
    tuned_fields = {"config": LARGE.to_dict(), "config_choice": "tuned", "config_reason": why}
    assert row_fields(LEAN, choose(LEAN, PROBLEM, H200)) == tuned_fields
    fa2 = kernel("fa2")
    config = choose(fa2, PROBLEM, H200).config
    assert config is not None
    expected = {"config": config.to_dict(), "config_choice": "heuristic", "config_reason": None}
    assert row_fields(fa2, choose(fa2, PROBLEM, H200)) == expected
    reference = kernel("reference")
    nothing = {"config": None, "config_choice": None, "config_reason": None}
    assert row_fields(reference, choose(reference, PROBLEM, H200)) == nothing


CONFIGS = st.builds(
    LeanTritonConfig,
    st.sampled_from([64, 128, 256]),
    st.sampled_from([4, 8]),
    st.sampled_from([2, 3, 4]),
    st.integers(1, 3),
    st.sampled_from([1, 2, 4]),
    st.booleans(),
)


def _build(start_us: float, cta_bytes_per_us: float, boundary_us: float) -> Build:
    return build(
        start_us, gpu_bytes_per_us=4.2e6, cta_bytes_per_us=cta_bytes_per_us, boundary_us=boundary_us
    )


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    configs=st.lists(CONFIGS, min_size=1, max_size=6, unique=True),
    values=st.lists(
        st.tuples(st.floats(1, 10), st.floats(1e4, 1e5), st.floats(0.1, 5)), min_size=7, max_size=7
    ),
    batch=st.integers(1, 40),
    context=st.integers(1, 40_000),
)
def test_nothing_is_chosen_that_its_formula_calls_slower_than_the_heuristic(
    configs, values, batch, context
):
    problem = AttentionProblem(batch, 32, 8, context, 128)
    heuristic = LEAN.default_config(replace(problem, context=-(-context // 64) * 64), H200)
    assert heuristic is not None
    listed = [heuristic, *(config for config in configs if config != heuristic)]
    builds = [_build(*value) for value in values[: len(listed)]]
    candidates = [candidate(config, number) for number, config in enumerate(listed)]
    save_families(
        H200, [family(candidates=candidates, builds=builds, shortlist=list(range(len(listed))))]
    )
    choice = choose(LEAN, problem, H200)
    assert choice.config in listed
    rates_of: dict[BuildKey, Coefficients] = {}
    for config, made in zip(listed, builds, strict=True):
        rates_of.setdefault(config.build_key, made.coefficients)

    def latency_us(config: LeanConfig) -> float:
        # At the length used for the choice.
        granule = min(launched.tile_tokens for launched in listed)
        shape = Shape.of(replace(problem, context=-(-context // granule) * granule))
        return rates_of[config.build_key].latency_us(divide(shape, config, H200.sms, LEAN))

    if choice.how == "tuned":
        assert isinstance(choice.config, LeanConfig)
        assert latency_us(choice.config) <= latency_us(heuristic) * (1 - LEAST_GAIN) * (1 + 1e-9)
