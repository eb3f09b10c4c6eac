"""A decode step of tiny models on the CPU: transformers' code, with any kernel as the attention."""

from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from decode.tiny_models import CONFIGS, problem_of, written

from leanbench import attention
from leanbench.core.errors import UserError
from leanbench.core.llm.model import read_model
from leanbench.core.registry import kernel
from leanbench.decode import model as models
from leanbench.decode.cache import StepCache
from leanbench.decode.measure import attention_of, checked
from leanbench.decode.model import random_model
from leanbench.decode.prefill import causal_attention
from leanbench.decode.step import DecodeStep
from leanbench.gpu.catalogue import find

#: A GPU on which `lean` and `fixed_split` are Triton's, which the CPU interprets.
INSTRUMENTS: Any = SimpleNamespace(spec=find("a100"))


@pytest.fixture(autouse=True)
def _transformers():
    pytest.importorskip("transformers")


def chosen_by(step: DecodeStep, name: str) -> list[int]:
    attention, _ = attention_of(INSTRUMENTS, step, kernel(name), "default")
    step.attend_with(attention)
    step()
    return step.chosen.tolist()


#: `lean` goes through its public call, fixed_split by its launch.
OWN = [(own, name) for own in ("lean", "fixed_split") for name in ("opt", "gemma", "mistral")]


@pytest.mark.parametrize(("own", "name"), [*(("eager", name) for name in CONFIGS), *OWN])
def test_attention_of_the_step_is_the_references(tmp_path, own, name):
    step = DecodeStep(problem_of(written(tmp_path, name), 37, 90), "cpu")
    own_attention, chosen = attention_of(INSTRUMENTS, step, kernel(own), "default")
    outcome = checked(step, kernel(own), own_attention)
    assert outcome.status is None
    assert 0 < (outcome.relative_error or 0) < (2e-3 if own == "eager" else 1e-3)
    heads = 2 if name != "opt" else 1
    kinds = 2 if name in ("gemma", "gpt-oss", "qwen2") else 1
    assert outcome.total_heads == kinds * 2 * heads
    assert (chosen.config is None) == (own == "eager")


def test_a_step_can_be_repeated_and_attention_matters(tmp_path):
    step = DecodeStep(problem_of(written(tmp_path, "llama"), 37, 90), "cpu")
    eager = chosen_by(step, "eager")
    assert chosen_by(step, "eager") == chosen_by(step, "sdpa") == eager
    assert chosen_by(step, "no_attention") != eager


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_the_order_of_sums_moves_logits_by_less_than_what_tells_tokens_apart(tmp_path, dtype):
    """In the dtype's epsilon times the largest logit; leanbench.decode.measure allows 2."""
    step = DecodeStep(problem_of(written(tmp_path, "llama"), 37, 90, dtype=dtype), "cpu")
    logits = []
    for own in ("eager", "sdpa"):
        attention, _ = attention_of(INSTRUMENTS, step, kernel(own), "default")
        step.attend_with(attention)
        logits.append(step.logits().clone())
    unit = torch.finfo(logits[0].dtype).eps * logits[0].abs().amax(dim=-1, keepdim=True).float()
    moved = (logits[0].float() - logits[1].float()) / unit
    assert 0 < float(moved.square().mean().sqrt()) < 0.5
    assert float(moved.abs().max()) < 2


def test_wrong_attention_is_caught(tmp_path):
    step = DecodeStep(problem_of(written(tmp_path, "gpt-oss"), 37, 90), "cpu")
    own, _ = attention_of(INSTRUMENTS, step, kernel("eager"), "default")

    def wrong(*tensors: Any, **call: Any) -> Any:
        out = own(*tensors, **call)
        return out * 1.05 if call["sliding_window"] else out

    outcome = checked(step, kernel("eager"), wrong)
    assert outcome.status == "incorrect"
    assert "against the fp64 reference is above" in str(outcome.reason)


@pytest.mark.parametrize(
    ("name", "in_launch"),
    [
        ("opt", [True, True]),
        ("llama", [True, True]),
        # Windows are rings, in which a launch does not know the token's place.
        ("gemma", [False, True]),
        ("mistral", [False, False]),
    ],
)
@pytest.mark.parametrize("writes", [True, False])
def test_a_launch_writes_the_token_where_the_kernel_can(
    tmp_path, monkeypatch, name, in_launch, writes
):
    plain, appended = attention.lean_attn_with_kvcache, []

    def appending(
        q: torch.Tensor,
        *caches: torch.Tensor,
        cache_seqlens: torch.Tensor,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        **options: Any,
    ) -> Any:
        appended.append(k is not None)
        if k is not None and v is not None:
            for cache, new in zip(caches, (k, v), strict=True):
                if writes:
                    cache[torch.arange(len(q)), cache_seqlens.long()] = new[:, 0]
            cache_seqlens = cache_seqlens + 1
        return plain(q, *caches, cache_seqlens=cache_seqlens, **options)

    monkeypatch.setattr(attention, "lean_attn_with_kvcache", appending)
    step = DecodeStep(problem_of(written(tmp_path, name), 37, 90), "cpu")
    hopper: Any = SimpleNamespace(spec=find("h200"))
    own, chosen = attention_of(hopper, step, kernel("lean"), "default")
    outcome = checked(step, kernel("lean"), own)
    assert appended == in_launch
    assert (chosen.config or {})["implementation"] == "cuda"
    if writes or not any(in_launch):
        assert outcome.status is None
        assert 0 < (outcome.relative_error or 0) < 1e-3
    else:
        layer = in_launch.index(True)
        assert outcome.status == "incorrect"
        assert outcome.reason == f"layer {layer} did not write the step's token into the cache"


def test_the_bound_writes_nothing(tmp_path):
    step = DecodeStep(problem_of(written(tmp_path, "llama"), 37, 90), "cpu")
    before = [(k.clone(), v.clone()) for k, v in step.cache.layers]
    chosen_by(step, "no_attention")
    for (k, v), (old_k, old_v) in zip(step.cache.layers, before, strict=True):
        assert torch.equal(k, old_k)
        assert torch.equal(v, old_v)


def test_the_last_token_is_written_in_its_place(tmp_path):
    other = problem_of(written(tmp_path, "llama"), 30, kv_layout="NHD")
    k, _ = StepCache(other, "cpu").layers[0]
    assert (k.shape, k.stride()) == ((1, 2, 30, 64), (30 * 2 * 64, 64, 2 * 64, 1))
    problem = problem_of(written(tmp_path, "gpt-oss"), 5, 40, capacity=64)
    cache = StepCache(problem, "cpu")
    lengths = {window: own.tolist() for window, own in cache.lengths.items()}
    assert lengths == {16: [5, 16], None: [5, 40]}
    new = torch.arange(2 * 2 * 64.0).view(2, 2, 1, 64).half()
    for layer, places in ((0, (4, 39 % 16)), (1, (4, 39))):
        before = [tensor.clone() for tensor in cache.layers[layer]]
        key, value = cache.update(new, -new, layer)
        assert not cache.holds(new, -new, layer)
        k, v = cache.write(key, value, layer)
        assert cache.holds(new, -new, layer)
        for cached, old, written_rows in ((k, before[0], new), (v, before[1], -new)):
            for row, place in enumerate(places):
                assert torch.equal(cached[row, :, place], written_rows[row, :, 0])
                old[row, :, place] = cached[row, :, place]
            assert torch.equal(cached, old)


@pytest.mark.parametrize("name", ["opt", "llama"])
def test_a_prompt_is_causal_attention_and_fills_the_cache(tmp_path, name):
    step = DecodeStep(problem_of(written(tmp_path, name), 24), "cpu")
    step.attend_with(causal_attention)
    step.prefill()
    before = [(k.clone(), v.clone()) for k, v in step.cache.layers]
    # The step after it takes the prompt's last token in again: K and V stay, to rounding.
    step._tokens[:] = 5
    chosen_by(step, "eager")
    for (k, v), (old_k, old_v) in zip(step.cache.layers, before, strict=True):
        assert torch.allclose(k, old_k, atol=2e-3)
        assert torch.allclose(v, old_v, atol=2e-3)


def test_one_model_is_kept(tmp_path):
    first, second = written(tmp_path, "llama"), written(tmp_path, "opt")
    one = random_model(first, "fp16", "cpu")
    assert sum(weight.numel() for weight in one.parameters()) == read_model(first).weights
    assert random_model(first, "fp16", "cpu") is one
    assert models.kept_bytes(first, "fp16", "cpu") == 2 * read_model(first).weights
    assert models.kept_bytes(second, "fp16", "cpu") == 0
    assert random_model(first, "fp16", "cpu") is not one


def test_configs_and_versions_that_are_refused(tmp_path, monkeypatch):
    path = written(tmp_path, "llama", hidden_act="nonsense")
    with pytest.raises(UserError, match="transformers refuses the config of"):
        random_model(path, "fp16", "cpu")
    monkeypatch.setattr(metadata, "version", lambda name: "5.0.0")
    with pytest.raises(UserError, match=r"transformers 5\.0\.0 is not supported, from 5\.14 to"):
        random_model(written(tmp_path, "llama"), "fp16", "cpu")
