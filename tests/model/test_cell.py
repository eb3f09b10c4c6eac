import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from depth import diagonal, label

from leanbench.core.config import TileConfig
from leanbench.core.decomposition import Schedule, TileGrid, one_cta_per_tile
from leanbench.core.errors import UserError
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.inputs import AttentionInputs
from leanbench.core.kernel import Kernel
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernels
from leanbench.gpu.catalogue import find
from leanbench.model.calibration import calibration_for
from leanbench.model.predict import energy_mj, predict_cell, predict_latency_us
from leanbench.model.rates import floor_us
from leanbench.model.simulate import latency_us
from leanbench.records.row import Row

H200 = find("h200")
PROBLEM = AttentionProblem(batch=1, q_heads=56, kv_heads=56, context=65_536, head_dim=64)
SLOW = TileConfig(tile_tokens=64, num_warps=4, num_stages=1)
FAST = TileConfig(tile_tokens=128, num_warps=4, num_stages=3)
TOO_LARGE = TileConfig(tile_tokens=256, num_warps=4, num_stages=6)


class Plain(Kernel):
    name = "plain"
    title = "one CTA per tile"
    decomposition = "one_cta_per_tile"
    source = "test"
    axes = Kernel.axes | {"page_size", "lengths"}

    def __init__(self, *configs: TileConfig) -> None:
        self.configs = configs

    def refusal(self, problem: AttentionProblem) -> str | None:
        return "plain knows no head_dim 256" if problem.head_dim == 256 else None

    def default_config(self, problem: AttentionProblem, gpu: GpuSpec) -> TileConfig | None:
        return self.configs[0] if self.configs else None

    def candidate_configs(self, problem: AttentionProblem, gpu: GpuSpec) -> list[TileConfig]:
        return list(self.configs)

    def schedule(self, problem, config, gpu) -> Schedule | None:
        assert config is not None
        return one_cta_per_tile(TileGrid.of(problem, config.tile_tokens))

    def prepare(self, inputs: AttentionInputs, config: TileConfig | None) -> Callable[[], Any]:
        raise AssertionError("a prediction prepares nothing")


class Secret(Plain):
    name = "secret"

    def schedule(self, problem, config, gpu):
        return None


def row(fields: dict[str, Any]) -> Row:
    """The row that a run would make of these fields."""
    fields = {**fields, "cell": "c", "problem": PROBLEM.to_dict(), "kernel": "k"}
    fields |= {"wall_s": 0.1, "time": "t", "environment": "e"}
    return Row.model_validate(json.loads(json.dumps(fields)))


def test_default():
    fields = predict_cell(PROBLEM, Plain(FAST, SLOW), "default", H200)
    predicted_us = latency_us(one_cta_per_tile(TileGrid.of(PROBLEM, 128)), PROBLEM, FAST, H200)
    costs = calibration_for(H200).constants
    read_us = floor_us(PROBLEM.kv_bytes, H200, costs)
    assert fields == {
        "decomposition": "one_cta_per_tile",
        "source": "predicted",
        "status": "ok",
        "config": {"tile_tokens": 128, "num_warps": 4, "num_stages": 3},
        "config_choice": "heuristic",
        "config_reason": None,
        "latency_us": predicted_us,
        "kv_bytes": 2 * 65_536 * 56 * 64 * 2,
        "bandwidth_tb_s": PROBLEM.kv_bytes / predicted_us / 1e6,
        "read_floor_us": read_us,
        "read_floor_share": read_us / predicted_us,
        # A CTA for each of 56 heads, each on an SM of its own.
        "energy_mj": energy_mj(predicted_us, PROBLEM.kv_bytes, 56, H200, costs, 700),
        "schedule": "one CTA a tile",
        "quantisation_efficiency": pytest.approx(56 / 132),
        "fixed_runs_us": None,
        "workspace_bytes": 0,
    }
    assert row(fields).samples is None


def test_best_keeps_the_fastest_that_fits():
    fields = predict_cell(PROBLEM, Plain(SLOW, TOO_LARGE, FAST), "best", H200)
    assert (fields["config"], fields["config_choice"]) == (FAST.to_dict(), "best of 2")
    default_us = predict_cell(PROBLEM, Plain(SLOW), "default", H200)["latency_us"]
    assert fields["latency_us"] < default_us / 2


@pytest.mark.deep
@pytest.mark.parametrize(
    ("share_of_lead", "implementation"), [(1.1, "cuda"), (0.9, "triton")], ids=["within", "beyond"]
)
def test_best_is_of_the_implementation_that_runs_there_within_the_model_s_error(
    monkeypatch, share_of_lead, implementation
):
    # 16 query heads to a KV head: Triton is predicted ahead.
    problem = AttentionProblem(16, 128, 8, 1024, 128)
    cuda = predict_cell(problem, kernels()["lean_cuda"], "best", H200)
    triton = predict_cell(problem, kernels()["lean_triton"], "best", H200)
    lead = cuda["latency_us"] / triton["latency_us"] - 1
    assert lead > 0.005
    monkeypatch.setattr(
        "leanbench.model.predict.model_error", lambda gpu, names: share_of_lead * lead
    )
    lean = predict_cell(problem, kernels()["lean"], "best", H200)
    assert lean["config"]["implementation"] == implementation
    assert lean["latency_us"] == {"cuda": cuda, "triton": triton}[implementation]["latency_us"]
    assert lean["config_reason"].endswith(
        "lean_cuda unless another is ahead by more than the model's error"
    )
    # On an A100 one implementation alone is predicted.
    on_a100 = predict_cell(problem, kernels()["lean"], "best", find("a100"))
    assert on_a100["config_reason"].endswith("that were predicted for this cell")


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (Secret(FAST), "secret has no schedule to predict from: measure it, or leave it out"),
        (Plain(), "plain has no schedule to predict from: measure it, or leave it out"),
        (Plain(TOO_LARGE), "plain has no config that fits the 227 KB of shared memory of h200"),
    ],
)
@pytest.mark.parametrize("configs", ["default", "best"])
def test_nothing_to_predict_from(kernel, reason, configs):
    fields = predict_cell(PROBLEM, kernel, configs, H200)
    assert (fields["status"], fields["reason"]) == ("unsupported", reason)
    assert row(fields).latency_us is None


LATENT = {"dtype": "bf16", "latent": True, "q_heads": 64, "kv_heads": 1, "head_dim": 512}


@pytest.mark.parametrize(
    ("name", "fields", "unknown", "fix"),
    [
        ("lean_cuda", {"append": 1}, "append", "run it on a GPU"),
        ("lean_cuda", {"v_head_dim": 64}, "v_head_dim", "run it on a GPU"),
        ("lean_cuda", {"q_lens": (4,)}, "q_lens", "run it on a GPU"),
        ("lean", LATENT, "latent caches", "run it on a GPU"),
        (
            "lean_cuda",
            {"q_len": 17},
            "how long the arithmetic of 17 query tokens takes",
            "choose q_len up to 16",
        ),
    ],
)
def test_problems_that_are_not_predicted(name, fields, unknown, fix):
    problem = replace(AttentionProblem(1, 32, 8, 4096, 128), **fields)
    row = predict_cell(problem, kernels()[name], "heuristic", H200)
    reason = f"the performance model does not know {unknown}: {fix}"
    assert (row["status"], row["reason"]) == ("unsupported", reason)


def test_a_later_axis_is_not_predicted(monkeypatch):
    problem = AttentionProblem(1, 32, 8, 4096, 128, page_size=64)
    assert predict_cell(problem, kernels()["fa2"], "heuristic", H200)["status"] == "ok"
    monkeypatch.setattr("leanbench.model.predict.AXES", {"dtype", "kv_layout"})
    reason = predict_cell(problem, kernels()["fa2"], "heuristic", H200)["reason"]
    assert reason.startswith("the performance model does not know page_size: ")


def test_out_of_memory_says_both_numbers_and_comes_after_the_kernels_own_reason():
    huge = AttentionProblem(64, 64, 64, 10**7, 256)
    fields = predict_cell(huge, Plain(FAST), "default", H200)
    assert (fields["status"], fields["reason"]) == ("unsupported", "plain knows no head_dim 256")
    ragged = AttentionProblem(4, 32, 32, (1, 1, 1, 2_000_000), 64)
    fields = predict_cell(ragged, Plain(FAST), "default", find("l4"))
    assert fields["status"] == "out_of_memory"
    # What is allocated counts: four sequences as long as the longest.
    assert fields["reason"].startswith(
        "needs 68.1 GB (K and V 65.5 GB, the rest for Q, the output and the check) and l4 has 24.0"
    )
    assert row(fields).kv_bytes == 2 * 2_000_003 * 32 * 64 * 2
    assert predict_cell(ragged, Plain(FAST), "default", find("a100-80gb"))["status"] == "ok"


@pytest.mark.parametrize("name", ["lean", "lean_triton", "fa2", "fixed_split"])
def test_capacity_takes_memory_and_no_time(name):
    """4k tokens in a cache of 4k, and of 128k: the same bytes, and so the same latency."""
    exact, own = AttentionProblem(8, 32, 8, 4096, 128, lengths_on="device"), kernels()[name]
    roomy = replace(exact, capacity=131_072)
    # Those of lean_cuda are chosen by the capacity.
    settings = own.default_config(roomy, H200)
    first, second = (predict_cell(each, own, settings, H200) for each in (exact, roomy))
    assert second["kv_bytes"] == first["kv_bytes"] == 2 * 8 * 4096 * 8 * 128 * 2
    assert second["latency_us"] == first["latency_us"]
    full = predict_cell(replace(exact, context=131_072), kernels()[name], "default", H200)
    assert full["latency_us"] > 20 * second["latency_us"]
    too_large = predict_cell(replace(exact, capacity=5 * 2**20), kernels()[name], "default", H200)
    assert too_large["status"] == "out_of_memory"
    assert "K and V 171.8 GB" in too_large["reason"]


@pytest.mark.parametrize(
    ("gpu", "problem"),
    diagonal(
        ["a100", "h200", "l4", "b200"],
        [
            PROBLEM,
            AttentionProblem(1, 32, 8, 4096, 128),
            AttentionProblem(
                8, 40, 8, (1, 127, 128, 129, 1000, 4096, 5000, 8192), 80, "bf16", "NHD"
            ),
            AttentionProblem(2, 8, 1, 1000, 256),
        ],
        keep=2,
    ),
    ids=label,
)
def test_this_project_s_kernels(problem, gpu):
    spec = find(gpu)
    for name in ("lean", "fa2", "fixed_split"):
        default = predict_cell(problem, kernels()[name], "default", spec)
        best = predict_cell(problem, kernels()[name], "best", spec)
        assert (default["status"], best["status"]) == ("ok", "ok"), (name, default, best)
        costs = calibration_for(spec).constants
        assert floor_us(problem.kv_bytes, spec, costs) < best["latency_us"] <= default["latency_us"]
        row(best)


def test_lean_wins_where_heads_are_few_and_contexts_long():
    """16 heads leave most SMs of one CTA per tile idle, and fixed splits fit badly."""
    problem = AttentionProblem(1, 16, 16, 524_288, 64)
    us = {
        name: predict_cell(problem, kernels()[name], "best", H200)["latency_us"]
        for name in ("lean", "fa2", "fa2_triton")
    }
    # reports/h200/decompositions: 1,177 and 474 us.
    assert us["fa2"] / us["lean"] == pytest.approx(2.49, rel=0.1)
    assert us["fa2_triton"] > 4 * us["lean"]


def test_energy_is_capped_by_the_power_limit():
    for name, least_w, most_w in (("lean", 690, 700), ("fa2_triton", 450, 560)):
        row = predict_cell(PROBLEM, kernels()[name], "default", H200)
        assert least_w < row["energy_mj"] / row["latency_us"] * 1e3 < most_w


def test_one_config_for_the_tuner():
    kernel = kernels()["lean_triton"]
    config = kernel.default_config(PROBLEM, H200)
    assert config is not None
    row = predict_cell(PROBLEM, kernel, "default", H200)
    assert predict_latency_us(PROBLEM, kernel, config, H200) == row["latency_us"]
    # What the compiler found counts: one CTA on an SM cannot keep as many bytes on their way as
    # two.
    alone_us = predict_latency_us(PROBLEM, kernel, config, H200, resident=1)
    together_us = predict_latency_us(PROBLEM, kernel, config, H200, resident=2)
    assert alone_us > together_us
    with pytest.raises(UserError, match="secret has no schedule to predict from"):
        predict_latency_us(PROBLEM, Secret(FAST), FAST, H200)
    with pytest.raises(UserError, match="do not fit the 227 KB"):
        predict_latency_us(PROBLEM, Plain(TOO_LARGE), TOO_LARGE, H200)
    with pytest.raises(UserError, match="do not fit"):
        predict_latency_us(PROBLEM, Plain(FAST), FAST, H200, resident=0)


@pytest.mark.parametrize(
    ("name", "fields", "features"),
    [
        ("lean", {}, None),
        ("lean", {"page_size": 64}, None),
        ("lean", {"lengths_on": "device", "capacity": 65_536}, None),
        ("lean", {"q_len": 3}, "q_len 3"),
        ("lean_triton", {"page_size": 64}, "a paged cache"),
        ("fa2_triton", {"q_len": 4}, "q_len 4"),
        ("lean_cuda", {"window_left": 1023, "sinks": True}, None),
        ("lean_cuda", {"kv_dtype": "e4m3"}, None),
        ("fa2_cuda", {"softcap": 30.0, "alibi": True}, "softcap or ALiBi"),
        ("fixed_split_cuda", {"kv_dtype": "e4m3"}, "an fp8 cache"),
        ("fixed_split_oracle", {"q_len": 4}, "q_len 4"),
        # Nothing is known of its error anywhere, and the run says so.
        ("unified_max", {"q_len": 4}, None),
    ],
)
def test_a_row_says_where_the_model_s_error_is_not_known(name, fields, features):
    problem = replace(AttentionProblem(1, 32, 8, 4096, 128), **fields)
    warnings: Any = predict_cell(problem, kernels()[name], "default", H200).get("warnings")
    if features is None:
        assert warnings is None
    else:
        assert len(warnings) == 1
        assert warnings[0].endswith(f"rows of this kernel with {features}: its error is unknown")


@pytest.mark.parametrize("fields", [{}, {"lengths_on": "device", "capacity": 65_536}])
def test_windows_and_fp8_caches_are_predicted_by_their_bytes(fields):
    plain = AttentionProblem(8, 32, 8, 8192, 128, "bf16", **fields)
    window = replace(plain, context=32_768, window_left=8191)
    fp8 = replace(plain, kv_dtype="e4m3")
    assert (window.kv_bytes, fp8.kv_bytes) == (plain.kv_bytes, plain.kv_bytes // 2)
    lean = kernels()["lean_cuda"]
    # A window bounds lengths on the device, by which settings are chosen.
    settings = lean.default_config(plain, H200)
    of_plain, of_window = (
        predict_cell(problem, lean, settings, H200) for problem in (plain, window)
    )
    of_fp8 = predict_cell(fp8, lean, "heuristic", H200)
    assert of_window["latency_us"] == of_plain["latency_us"]
    # 63.1 and 34.2 us; measured 35.3 (performance log, entry 40).
    for figure, share in (("latency_us", 0.54), ("read_floor_us", 0.52), ("energy_mj", 0.54)):
        assert of_fp8[figure] / of_plain[figure] == pytest.approx(share, abs=0.03)
