"""`torch.ops.leanbench.lean_attn_with_kvcache`: traced calls see the same shapes, and run the same
kernel.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from attention_calls import assert_right, attend, compiled
from depth import diagonal
from leanbench.kernels.lean import LEAN
from leanbench.kernels.lean.configs import LeanConfig, LeanCudaConfig, LeanTritonConfig
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._python_dispatch import TorchDispatchMode

from leanbench.attention import fast, lean_attn_with_kvcache, prepared
from leanbench.attention import operator as operators
from leanbench.attention.operator import _unflatten_config, flatten_config, operator
from leanbench.attention.prepared import PreparedLaunches
from leanbench.core.inputs import AttentionInputs, make_inputs
from leanbench.core.problem import AttentionProblem

CONFIG = LeanTritonConfig(32, 4, 2, ctas_per_sm=1, min_tiles_per_cta=1, align_grid=False)
PROBLEMS = {
    "uniform": AttentionProblem(2, 4, 2, 70, 64),
    "ragged": AttentionProblem(3, 4, 2, (70, 1, 33), 64, "bf16", "NHD"),
    "paged drafts": AttentionProblem(2, 4, 1, (48, 20), 64, q_len=3, page_size=16),
}
OPTIONS = {
    "default": {},
    "config": {"config": CONFIG},
    "batch invariant": {"batch_invariant": True},
}


def operands(inputs: AttentionInputs, config: Any = None, batch_invariant: bool = False) -> tuple:
    """Return the operator's arguments."""
    tensors = (inputs.q, inputs.k_cache, inputs.v_cache, inputs.cache_seqlens)
    length = None if inputs.cache_seqlens is not None else inputs.context
    given = (*tensors, length, inputs.block_table, None, True, batch_invariant)
    return *given, *flatten_config(config)


@pytest.mark.parametrize(("problem", "options"), diagonal(list(PROBLEMS), list(OPTIONS), keep=3))
def test_opcheck(problem, options, device):
    inputs = make_inputs(PROBLEMS[problem], device)
    torch.library.opcheck(operator, operands(inputs, **OPTIONS[options]))


def test_it_is_an_operator_of_torch(device):
    inputs = make_inputs(PROBLEMS["ragged"], device)
    out, lse = torch.ops.leanbench.lean_attn_with_kvcache(*operands(inputs))
    assert_right(inputs, out, lse)
    assert not operator._schema.is_mutable


@pytest.mark.parametrize(
    ("problem", "options", "dynamic"),
    diagonal(list(PROBLEMS), list(OPTIONS), [False, True], keep=3),
)
def test_a_call_compiles_whole(problem, options, dynamic, device):
    inputs = make_inputs(PROBLEMS[problem], device)
    call = partial(attend, **OPTIONS[options])
    out, lse = compiled(call, dynamic=dynamic)(inputs)
    assert_right(inputs, out, lse)
    eager, eager_lse = attend(inputs, **OPTIONS[options])
    assert torch.equal(out, eager)
    assert torch.equal(lse, eager_lse)


def test_other_sizes_and_lengths_need_no_compilation(device):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def call(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, length: int) -> Any:
        options: Any = {"cache_seqlens": length, "return_softmax_lse": True}
        return lean_attn_with_kvcache(q, k_cache, v_cache, **options)

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=counter)
    # torch assumes that sizes equal in the first call stay equal, so all differ there.
    for batch, tokens, length in [(3, 70, 37), (2, 90, 85), (5, 41, 30)]:
        inputs = make_inputs(AttentionProblem(batch, 4, 2, tokens, 64, kv_layout="NHD"), device)
        out, lse = compiled(inputs.q, inputs.k_cache, inputs.v_cache, length)
        assert_right(replace(inputs, context=length), out, lse)
    # torch's interface for C, on a GPU, keeps the words.
    refused = RuntimeError if device == "cuda" and fast.is_on else ValueError
    with pytest.raises(refused, match=r"^cache_seqlens 42 is outside the cache's 0 to 41 tok"):
        compiled(inputs.q, inputs.k_cache, inputs.v_cache, 42)
    assert counter.frame_count == 1


def test_fake_tensors_give_shapes_without_a_launch(monkeypatch):
    monkeypatch.setattr(prepared, "_launch", None)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with FakeTensorMode():
        q, smaller = (
            torch.empty(3, 5, 8, dim, dtype=torch.bfloat16, device="cuda") for dim in (96, 64)
        )
        cache = torch.empty(11, 16, 2, 96, dtype=torch.bfloat16, device="cuda")
        options: dict[str, Any] = {
            "cache_seqlens": torch.zeros(3, dtype=torch.int32, device="cuda"),
            "block_table": torch.zeros(3, 4, dtype=torch.int32, device="cuda"),
            "causal": True,
        }
        out, lse = lean_attn_with_kvcache(q, cache, cache, return_softmax_lse=True, **options)
        assert (out.shape, out.dtype, out.device.type) == (q.shape, torch.bfloat16, "cuda")
        assert (lse.shape, lse.dtype, lse.device.type) == ((3, 8, 5), torch.float32, "cuda")
        assert out.is_contiguous()
        assert lse.is_contiguous()
        with pytest.raises(ValueError, match="must agree in head_dim"):
            lean_attn_with_kvcache(smaller, cache, cache, **options)


def test_symbolic_sizes_stay_symbols():
    shape_env = ShapeEnv()
    mode = FakeTensorMode(shape_env=shape_env)

    def fake(tensor: torch.Tensor, *symbols: int) -> torch.Tensor:
        kinds = [
            DimDynamic.DYNAMIC if dim in symbols else DimDynamic.STATIC
            for dim in range(tensor.dim())
        ]
        return mode.from_tensor(tensor, symbolic_context=StatelessSymbolicContext(kinds))

    q = fake(torch.empty(6, 1, 8, 64, dtype=torch.float16), 0)
    cache = fake(torch.empty(6, 300, 2, 64, dtype=torch.float16), 0, 1)
    with mode:
        out, lse = lean_attn_with_kvcache(q, cache, cache, return_softmax_lse=True)
    for result in (out, lse):
        assert isinstance(result.shape[0], torch.SymInt)
        assert str(result.shape[0]) == str(q.shape[0])
    assert isinstance(cache.shape[1], torch.SymInt)


@pytest.mark.parametrize("which", ["q", "k_cache", "v_cache"])
def test_gradients_are_refused(which, device):
    inputs = make_inputs(PROBLEMS["uniform"], device)
    inputs = replace(inputs, **{which: getattr(inputs, which).detach().requires_grad_()})
    with pytest.raises(NotImplementedError, match=r"is for inference and has no gradient, .* call"):
        attend(inputs)
    for without in (torch.no_grad(), torch.inference_mode()):
        with without:
            out, lse = attend(inputs)
        assert not out.requires_grad
        assert_right(inputs, out, lse)


def test_settings_pass_through():
    cuda = LeanCudaConfig(
        128, 4, 2, 1, 8, True, chunk_tokens=32, tile_rows=16, cluster_size=8, copy="async"
    )
    for config in (CONFIG, LeanTritonConfig(64, 4, 3, 1, 2, True, 5), cuda):
        numbers, implementation = flatten_config(config)
        assert numbers is not None
        assert implementation is not None
        assert all(type(number) is int for number in numbers)
        # True is equal to 1.
        assert repr(_unflatten_config(tuple(numbers), implementation)) == repr(config)
    assert flatten_config(None) == (None, None)


@pytest.mark.deep
def test_the_settings_of_a_compiled_call_are_those_that_it_was_given(monkeypatch, device):
    """Settings of another compiled call do not matter."""
    torch._dynamo.reset()
    launched: list[LeanConfig] = []
    relaunch = LEAN.relaunch
    monkeypatch.setattr(
        LEAN,
        "relaunch",
        lambda inputs, config: launched.append(config) or relaunch(inputs, config),
    )
    inputs = make_inputs(PROBLEMS["uniform"], device)
    configs = [CONFIG, replace(CONFIG, tile_tokens=64), replace(CONFIG, fixed_run_tiles=3)]
    for dynamic in (False, True):
        monkeypatch.setattr(prepared, "_LAUNCHES", PreparedLaunches())
        compiled = torch.compile(attend, fullgraph=True, dynamic=dynamic, backend="aot_eager")
        for config in configs:
            assert_right(inputs, *compiled(inputs, config=config))
    assert launched == configs * 2


DERIVATIVE = r"^lean_attn_with_kvcache is for inference and has no derivative, .* call it outside"


@pytest.mark.parametrize("which", ["q", "k_cache", "v_cache"])
@pytest.mark.parametrize("grad", [True, False])
def test_forward_derivatives_are_refused(which, grad, device):
    """Otherwise they would silently be 0."""
    inputs = make_inputs(PROBLEMS["uniform"], device)
    primal = getattr(inputs, which)

    def call(tensor: torch.Tensor) -> torch.Tensor:
        return attend(replace(inputs, **{which: tensor}))[0]

    with torch.set_grad_enabled(grad):
        with pytest.raises(NotImplementedError, match=DERIVATIVE):
            torch.func.jvp(call, (primal,), (torch.ones_like(primal),))
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(primal, torch.ones_like(primal))
            with pytest.raises(NotImplementedError, match=DERIVATIVE):
                call(dual)
            # A call within the derivative's scope, but not part of it.
            assert_right(inputs, *attend(inputs))
        with pytest.raises(NotImplementedError, match="has no gradient"):
            torch.func.grad(lambda tensor: call(tensor).float().sum())(primal)


@pytest.mark.parametrize("which", ["q", "k_cache", "cache_seqlens"])
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_is_a_call_for_each(which, device):
    inputs = make_inputs(PROBLEMS["ragged"], device)
    several = torch.stack([getattr(inputs, which).roll(turn, 0) for turn in range(2)])

    def call(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return attend(replace(inputs, **{which: tensor}))

    outs, lses = torch.func.vmap(call)(several)
    for tensor, out, lse in zip(several, outs, lses, strict=True):
        assert_right(replace(inputs, **{which: tensor}), out, lse)
    assert not torch.equal(outs[0], outs[1])


def test_a_compiled_call_writes_to_out(device):
    torch._dynamo.reset()
    inputs = make_inputs(PROBLEMS["uniform"], device)
    out = torch.full_like(inputs.q, float("nan"))
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    _, lse = compiled(inputs, out=out)
    assert_right(inputs, out, lse)


def test_plain_calls_pass_the_operator_by(device, monkeypatch):
    """The operator is for tracing: modes, transforms and subclasses see it."""
    inputs = make_inputs(PROBLEMS["uniform"], device)
    attended: list[str] = []
    monkeypatch.setattr(
        operators, "operator", lambda *operands: attended.append("operator") or operator(*operands)
    )

    class Subclass(torch.Tensor):
        pass

    attend(inputs)
    assert attended == []
    attend(replace(inputs, q=inputs.q.as_subclass(Subclass)))
    assert attended == ["operator"]
    seen: list[Any] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None) -> Any:
            seen.append(function)
            return function(*args, **(kwargs or {}))

    with Mode():
        with pytest.raises(ValueError, match=r"^out is \(1, 1, 4, 64\)"):
            attend(inputs, out=inputs.out[:1])
        out, lse = attend(inputs)
    assert_right(inputs, out, lse)
    assert operator in seen
