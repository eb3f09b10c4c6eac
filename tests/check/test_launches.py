"""A launch of this project's kernel is a call of the API, told no more than a caller tells it."""

from typing import Any

import pytest
import torch
from attention_calls import assert_right
from leanbench.kernels.lean.configs import LeanTritonConfig

from leanbench import attention
from leanbench.check.launches import ApiCall, launch_of, launches_of
from leanbench.core.inputs import make_inputs
from leanbench.core.kernel import BATCH_INVARIANT, caller, written_by
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel

CONFIG = LeanTritonConfig(32, 4, 1, ctas_per_sm=1, min_tiles_per_cta=1, align_grid=False)
UNIFORM = AttentionProblem(2, 4, 2, 40, 64, capacity=70)
RAGGED = AttentionProblem(2, 4, 2, (40, 33), 64, q_len=2, page_size=16)


@pytest.fixture
def calls(monkeypatch) -> list[dict[str, Any]]:
    """Collect the arguments of each call of the API, without its tensors."""
    calls: list[dict[str, Any]] = []
    attend = attention.lean_attn_with_kvcache

    def note(q: Any, k_cache: Any, v_cache: Any, **options: Any) -> Any:
        calls.append(options)
        return attend(q, k_cache, v_cache, **options)

    monkeypatch.setattr(attention, "lean_attn_with_kvcache", note)
    return calls


@pytest.mark.parametrize(
    ("name", "request_", "config", "settings"),
    [
        ("lean", "default", CONFIG, {}),
        ("lean", "heuristic", CONFIG, {"config": CONFIG}),
        ("lean", CONFIG, CONFIG, {"config": CONFIG}),
        ("lean", None, CONFIG, {"config": CONFIG}),
        ("lean_triton", "default", CONFIG, {"config": CONFIG}),
        ("lean_batch_invariant", BATCH_INVARIANT, CONFIG, {"batch_invariant": True}),
    ],
)
@pytest.mark.parametrize("problem", [UNIFORM, RAGGED], ids=["uniform", "ragged"])
def test_lean_is_called_as_users_call_it(name, request_, config, settings, problem, device, calls):
    inputs = make_inputs(problem, device)
    launch = launch_of(kernel(name), inputs, config, request_)
    launch()
    written = written_by(launch, inputs)
    assert_right(inputs, written.out, written.lse)
    assert written.out is inputs.out
    out, lse = caller(launch)()
    assert out is not inputs.out
    assert torch.equal(out, written.out)
    assert torch.equal(lse, written.lse)
    lengths = 40 if problem is UNIFORM else inputs.cache_seqlens
    always = {"cache_seqlens": lengths, "causal": True, "return_softmax_lse": True}
    always |= {"softmax_scale": 0.125, "block_table": inputs.block_table}
    assert calls == [{**always, **settings, "out": inputs.out}, {**always, **settings}]


def test_other_kernels_prepare_their_own(device, calls):
    inputs = make_inputs(UNIFORM, device)
    launch = launch_of(kernel("reference"), inputs, None)
    assert not isinstance(launch, ApiCall)
    launch()
    assert_right(inputs, inputs.out, inputs.lse)
    assert calls == []
    assert caller(launch) is launch


def test_copies_of_a_call_are_prepared_together_unless_they_are_calls_of_the_api(monkeypatch):
    copies = [make_inputs(UNIFORM, "cpu") for _ in range(2)]
    made = launches_of(kernel("lean"), copies, CONFIG)
    assert [type(launch) for launch in made] == [ApiCall, ApiCall]
    for inputs, launch in zip(copies, made, strict=True):
        assert written_by(launch, inputs) is inputs
    for inputs, launch in zip(copies, launches_of(kernel("reference"), copies, None), strict=True):
        launch()
        assert_right(inputs, inputs.out, inputs.lse)
    reference = kernel("reference")
    monkeypatch.setattr(reference, "prepare_all", lambda copies, config: [len(copies), config])
    assert launches_of(reference, copies, None) == [2, None]
