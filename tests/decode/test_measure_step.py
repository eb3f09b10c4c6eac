"""How a step is measured: tiny models and kernels are real, times and the GPU are made up."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from decode.tiny_models import problem_of, written

from leanbench.core.errors import OutOfMemory, SuspectResult
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel
from leanbench.decode import measure, prefill
from leanbench.decode.attention import written_first
from leanbench.decode.measure import ModelStep, token_fault
from leanbench.decode.prefill import prefill_fields
from leanbench.decode.step import DecodeStep, products_of
from leanbench.gpu.catalogue import find
from leanbench.measure import timing
from leanbench.measure.options import MeasureOptions
from leanbench.measure.protocol import measure_problem
from leanbench.measure.timing import Replay
from leanbench.records.outcome import Outcome
from leanbench.records.row import Row


class PretendedReplay:
    """A graph that runs the step again; its samples are those of its kernel."""

    launches = 2

    def __init__(self, world: World, launches: Sequence[Any]) -> None:
        self._world, self._launch = world, launches[0]
        self.graph = self

    def replay(self) -> None:
        self._launch()
        self._world.spoil(self._launch.func.__self__)

    def sample_us(self) -> float:
        if not isinstance(self._launch, partial):
            return 250.0
        (attention,) = self._launch.args
        # The bound's own, or transformers' behind the write of the token.
        own = attention.args[0] if isinstance(attention, partial) else attention
        return self._world.times_us[own.__self__.name]


class World:
    """What the GPU answers; tests change it."""

    def __init__(self) -> None:
        self.times_us = {"eager": 500.0, "sdpa": 400.0, "no_attention": 300.0}
        self.announced: list[str | None] = []
        self.refused: list[int] = []

    def spoil(self, step: DecodeStep) -> None:
        """Fail as a broken capture does."""

    def instruments(self, **options: Any) -> Any:
        return SimpleNamespace(
            spec=find("h200"),
            device=torch.device("cpu"),
            options=MeasureOptions(**options),
            nvml=None,
            calibration=None,
            announce=self.announced.append,
            gpu_state=lambda: None,
        )


@pytest.fixture
def world(monkeypatch) -> World:
    pytest.importorskip("transformers")
    own = World()
    fakes = {
        "Replay": lambda launches, sample_ms, is_slow_to_start: PretendedReplay(own, launches),
        "free_memory": lambda spec: None,
        "refuse_shortage": lambda problem, device, held: own.refused.append(held),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(measure, name, fake)
    for name in ("reset_peak_memory_stats", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 12_345)
    return own


@pytest.fixture
def llama(tmp_path) -> AttentionProblem:
    return problem_of(written(tmp_path, "llama"), 37)


def measured(
    world: World, problem: AttentionProblem, *names: str, request: str = "default", **options: Any
) -> dict[str, Any]:
    """Rows by kernel."""
    subject = ModelStep(world.instruments(**options), problem)
    return measure_problem(subject, [kernel(name) for name in names], request)


def test_a_row_of_each_kernel(world, tmp_path):
    problem = problem_of(written(tmp_path, "llama"), 37, 90)
    rows = measured(world, problem, "eager", "sdpa", "cudnn")
    assert [row.get("status") for row in rows.values()] == ["ok", "ok", "unsupported"]
    eager = rows["eager"]
    assert eager["latency_us"] == 500.0
    assert eager["no_attention_us"] == 300.0
    assert eager["attention_share"] == pytest.approx(0.4)
    assert eager["gemm_us"] == 250.0
    assert eager["tokens_per_s"] == pytest.approx(4000.0)
    assert eager["bandwidth_tb_s"] == problem.kv_bytes / 500.0 / 1e6
    assert eager["memory_bytes"] == 12_345
    assert eager["total_heads"] == 4
    assert eager["raw_samples"]["samples_us"][0] == 500.0
    assert rows["sdpa"]["attention_share"] == pytest.approx(0.25)
    assert world.announced[-1] is None
    # The bound is nobody's where it was not asked for.
    assert "no_attention" not in world.announced
    fixed = {"cell": "one", "problem": problem.to_dict(), "kernel": "eager", "wall_s": 1.0}
    stamp = {"time": "2026-01-01T00:00:00+00:00", "environment": "e", "source": "measured"}
    del eager["raw_samples"]
    assert Row.model_validate({**eager, **fixed, **stamp}).attention_share == pytest.approx(0.4)


def test_the_bound_can_have_a_row_and_a_step_below_it_is_suspect(world, llama):
    world.times_us["sdpa"] = 200.0
    rows = measured(world, llama, "no_attention", "sdpa")
    assert (rows["no_attention"]["status"], rows["no_attention"]["attention_share"]) == ("ok", 0)
    assert rows["no_attention"].get("bandwidth_tb_s") is None
    assert rows["sdpa"]["status"] == "suspect"
    assert "beats the same step without attention (300.00 µs)" in rows["sdpa"]["reason"]


def test_occupancy_and_quantised_weights_are_warnings(world, llama, tmp_path):
    assert measured(world, llama, "sdpa")["sdpa"]["warnings"] == []
    path = written(tmp_path, "opt", quantization_config={"quant_method": "fp8"})
    rows = measured(world, problem_of(path, 37), "eager", "sdpa", occupancy=True)
    for row in rows.values():
        assert len(row["warnings"]) == 2
        for words in ("(fp8)", "not measured of whole models"):
            assert any(words in warning for warning in row["warnings"])


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda step: step.chosen.fill_(-1), "wrote no token for 2 of 2 sequences"),
        (
            lambda step: torch.argmin(step.logits(), dim=-1, out=step.chosen),
            "chose 2 of 2 tokens that the eager step did not",
        ),
    ],
    ids=["nothing written", "other tokens"],
)
def test_a_replay_that_chooses_other_tokens_is_no_result(
    world, tmp_path, monkeypatch, spoil, sentence
):
    monkeypatch.setattr(world, "spoil", spoil)
    problem = problem_of(written(tmp_path, "llama"), 37, 37)
    with pytest.raises(SuspectResult, match=sentence):
        measured(world, problem, "sdpa")
    assert world.announced[-1] == "sdpa"


def test_a_replay_may_choose_another_token_of_the_same_logit(world, llama, monkeypatch):
    twins: list[int] = []

    def choose_the_twin(step: DecodeStep) -> None:
        step.chosen.fill_(sum(twins) - int(step.chosen))

    def with_a_twin(problem: Any, device: Any) -> DecodeStep:
        """Two rows of the output matrix are the same, the eager choice's and the next."""
        step = DecodeStep(problem, "cpu")
        own: Any = kernel("sdpa")
        step.attend_with(partial(written_first, own.attend, step.cache))
        step()
        head: Any = step.model.lm_head
        first = int(step.chosen)
        twins[:] = first, (first + 1) % 96
        with torch.no_grad():
            head.weight[twins[1]] = head.weight[first]
        return step

    monkeypatch.setattr(measure, "DecodeStep", with_a_twin)
    monkeypatch.setattr(world, "spoil", choose_the_twin)
    assert measured(world, llama, "sdpa")["sdpa"]["status"] == "ok"


def test_a_step_that_does_not_fit_is_a_row_of_all(world, llama, monkeypatch):
    def refuse(problem: Any, device: Any, held: int) -> None:
        raise OutOfMemory("needs 99 GB")

    monkeypatch.setattr(measure, "refuse_shortage", refuse)
    rows = measured(world, llama, "eager", "sdpa")
    expected = ("out_of_memory", "needs 99 GB")
    assert [(row["status"], row["reason"]) for row in rows.values()] == [expected] * 2


def test_settings_are_not_searched_and_kept_weights_count_as_free(world, llama):
    for _ in range(2):
        measured(world, llama, "sdpa")
    assert llama.model is not None
    assert world.refused == [0, 2 * llama.model.weights]
    rows = measured(world, llama, "fixed_split_oracle", "sdpa")
    assert (rows["fixed_split_oracle"]["status"], rows["sdpa"]["status"]) == ("unsupported", "ok")
    assert rows["sdpa"]["no_attention_us"] == 300.0
    assert measured(world, llama, "sdpa", request="best")["sdpa"]["status"] == "unsupported"


def test_unsupported_models_and_versions_are_rows(world, llama, monkeypatch):
    gemma = problem_of("gemma-4-26b-a4b:layers=6", 37)
    assert gemma.model is not None
    row = measured(world, gemma, "sdpa")["sdpa"]
    assert (row["status"], row["reason"]) == ("unsupported", gemma.model.only_predicted)
    monkeypatch.setattr(measure, "version_fault", lambda: "transformers is not installed")
    row = measured(world, llama, "sdpa")["sdpa"]
    assert (row["status"], row["reason"]) == ("unsupported", "transformers is not installed")


def test_the_time_of_a_prompt_is_asked_for(world, tmp_path):
    problem = problem_of(written(tmp_path, "gpt-oss"), 37)
    step = DecodeStep(problem, "cpu")
    assert prefill_fields(world.instruments(), step) == (Outcome(), [])
    _, (warning,) = prefill_fields(world.instruments(prefill=37), step)
    assert "where prompts are equally long and every layer sees all of them" in warning


@pytest.mark.parametrize(
    ("seconds", "counted"),
    [((9.0, 0.1, 0.3, 0.2), 0.2), ((9.0, 1.5, 2.0), 1.75), ((9.0, 4.0), 4.0)],
)
def test_a_prompt_is_repeated_while_it_is_short(world, llama, monkeypatch, seconds, counted):
    """The first does not count."""
    times_us = iter([1e6 * own for own in seconds])
    monkeypatch.setattr(prefill, "_prompt_us", lambda step: next(times_us))
    step = DecodeStep(llama, "cpu")
    assert prefill_fields(world.instruments(prefill=36), step) == (Outcome(), [])
    outcome, warnings = prefill_fields(world.instruments(prefill=37), step)
    assert outcome.prefill_us == pytest.approx(1e6 * counted)
    assert warnings == []
    assert next(times_us, None) is None
    monkeypatch.setattr(prefill, "_prompt_us", lambda step: 1 / 0)
    missing, warnings = prefill_fields(world.instruments(prefill=37), step)
    assert missing == Outcome()
    assert warnings == ["no time to first token (ZeroDivisionError: division by zero)"]


@pytest.mark.parametrize(("name", "products"), [("llama", 15), ("opt", 13), ("gpt-oss", 11)])
def test_matrix_products_run_on_what_the_step_gives_them(world, tmp_path, name, products):
    """Run two layers' matrices: q, k, v, o and the MLP's, or experts; and the output matrix."""
    step = DecodeStep(problem_of(written(tmp_path, name), 37, 90, dtype="bf16"), "cpu")
    own: Any = kernel("no_attention")
    step.attend_with(own.attend)
    launch = products_of(step)
    seen: list[Any] = []
    for module in step.model.modules():
        if type(module).__name__ in ("Linear", "GptOssExperts"):
            module.register_forward_hook(lambda module, args, out: seen.append(out))
    launch()
    alone, seen[:] = list(seen), []
    step()
    assert len(alone) == len(seen) == products
    assert all(torch.equal(one, other) for one, other in zip(alone, seen, strict=True))


def test_a_sample_is_taken_behind_a_replay(monkeypatch):
    """Time the second of two replays: the first would include the host's start of the graph."""
    events: list[str] = []

    event = SimpleNamespace(record=lambda: events.append("event"), synchronize=lambda: None)
    event.elapsed_time = lambda end: 1.0
    graph = SimpleNamespace(replay=lambda: events.append("replay"))
    monkeypatch.setattr("torch.cuda.Event", lambda enable_timing: event)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    monkeypatch.setattr(timing, "capture", lambda launches, count: graph)
    replay = Replay([lambda: None], 0.001, is_slow_to_start=True)
    events.clear()
    assert replay.sample_us() == 1000.0
    assert events == ["replay", "event", "replay", "event"]


def logits_of(*rows: list[float], dtype: str = "bf16") -> torch.Tensor:
    return torch.tensor(rows, dtype={"bf16": torch.bfloat16, "fp16": torch.float16}[dtype])


@pytest.mark.parametrize(
    ("dtype", "second", "values"),
    [
        # 2 x 2^-7 x 5.75
        ("bf16", 5.6875, None),
        ("bf16", 5.625, ("0.125", "bf16", "0.0898")),
        # 2 x 2^-10 x 5.75
        ("fp16", 5.7421875, None),
        ("fp16", 5.734375, ("0.0156", "fp16", "0.0112")),
    ],
)
def test_tokens_differ_where_their_logits_do(dtype, second, values):
    logits = logits_of([-1.0, 5.75, second, 0.5], [3.0, 1.0, 0.0, 2.0], dtype=dtype)
    assert token_fault(logits, torch.tensor([1, 0]), dtype) is None
    fault = token_fault(logits, torch.tensor([2, 0]), dtype)
    assert (fault is None) == (values is None)
    if values is not None:
        assert all(value in str(fault) for value in ("1 of 2", *values))


def test_the_worst_token_is_reported_with_its_own_limit():
    logits = logits_of([8.0, 4.0], [1.0, 0.5], [1.0, 0.25], [2.0, 2.0])
    fault = str(token_fault(logits, torch.tensor([0, 1, 1, 1]), "bf16"))
    assert all(value in fault for value in ("2 of 4", "0.75", "0.0156"))
    # Sums that nearly cancel are no more exact than the others of their row.
    assert token_fault(logits_of([-8.0, 0.0625, 0.0]), torch.tensor([2]), "bf16") is None
    # Missing tokens and NaN are faults.
    logits = logits_of([1.0, 2.0], [1.0, 2.0], [1.0, 2.0])
    assert "2 of 3" in str(token_fault(logits, torch.tensor([1, -1, -1]), "bf16"))
    broken = logits_of([float("nan"), 2.0])
    assert "1 of 1" in str(token_fault(broken, torch.tensor([1]), "bf16"))
