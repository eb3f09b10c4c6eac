"""The C path of calls: which calls C takes, and that it launches what Python would."""

from __future__ import annotations

import gc
import inspect
import math
import pickle
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest
import torch
from argument_calls import draw_call, run_call
from argument_grid import COMPILED, calls_of, pairwise_rows
from every_kind import KINDS, PLAIN
from fake_cuda import FakeCuda, Launched, use_fake_cuda
from leanbench.kernels.lean import cuda_driver
from leanbench.kernels.lean.workspace import WORKSPACES
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from leanbench.attention import (
    checks,
    fast,
    lean_attn_with_kvcache,
    lean_mla_with_kvcache,
    prepared,
)
from leanbench.attention.compat import Steps
from leanbench.check.launches import api_arguments
from leanbench.configs import store
from leanbench.core.inputs import make_inputs

pytestmark = pytest.mark.skipif(not fast.is_on, reason=f"no C path: {fast.why_not}")

Arguments = dict[str, Any]
FP8 = torch.float8_e4m3fn


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    with torch.no_grad():
        yield use_fake_cuda(monkeypatch)
    fast.clear()


def of_kind(without_lse: bool = False, out: bool = False, **kind: Any) -> Arguments:
    """Return new tensors for a call of a kind."""
    inputs = make_inputs(replace(PLAIN, **kind), "cpu")
    arguments: Arguments = {"q": inputs.q, "k_cache": inputs.k_cache, "v_cache": inputs.v_cache}
    arguments |= api_arguments(inputs)
    if without_lse:
        arguments["return_softmax_lse"] = False
    return arguments | ({"out": torch.empty_like(inputs.out)} if out else {})


PAGES: Arguments = {"page_size": 16, "context": (40, 17)}
ALL_KINDS: dict[str, Arguments] = {
    "plain": {"q_len": 1},
    "without the LSE": {"without_lse": True},
    "an output": {"without_lse": True, "out": True},
    "an output and the LSE": {"out": True},
    "pages": PAGES,
    "blocks of KV heads": {"q_len": 1, "context": (40, 17), "select": "2x16"},
    **KINDS,
}


def of_latent(
    pages: bool = False, flat: bool = False, fp8: bool = False, length: Any = None, **options: Any
) -> Arguments:
    q = torch.zeros(2, options.pop("q_len", 1), 16, 576).bfloat16()
    page_size = options.pop("page_size", 64)
    cache = torch.zeros(4 if pages else 2, page_size, 1, 576).to(FP8 if fp8 else torch.bfloat16)
    arguments = {"q": q, "kv_cache": cache.squeeze(2) if flat else cache, **options}
    if fp8:
        arguments["k_descale"] = torch.ones(2, 1)
    if pages:
        arguments["block_table"] = torch.zeros(2, 128 // page_size, dtype=torch.int32)
    lengths = torch.full((2,), 9, dtype=torch.int32)
    if arguments.pop("has_out", False):
        arguments["out"] = torch.empty(*q.shape[:3], 512).bfloat16()
    return arguments | {"cache_seqlens": lengths if length is None else length}


LATENT_KINDS: dict[str, Arguments] = {
    "plain": {},
    "causal queries with the LSE": {"q_len": 2, "causal": True, "return_softmax_lse": True},
    "pages": {"pages": True},
    "chosen tokens": {"pages": True, "page_size": 1},
    "flat pages": {"pages": True, "flat": True},
    "flat": {"flat": True},
    "fp8": {"fp8": True},
    "an output": {"has_out": True},
    "a length": {"length": 9},
}


def same(ours: Launched, theirs: Launched, *own: str) -> None:
    """Compare two launches but for the epoch and the fields of new tensors."""
    assert (ours.in_c, theirs.in_c) == (True, False)
    assert 0 != ours.params.epoch != theirs.params.epoch != 0
    for launched in (ours, theirs):
        for name in ("epoch", *own):
            setattr(launched.params, name, 0)
    assert bytes(ours.params) == bytes(theirs.params)
    assert ours[1:4] == theirs[1:4]


CASES = [
    *((lean_attn_with_kvcache, of_kind, name, kind) for name, kind in ALL_KINDS.items()),
    *((lean_mla_with_kvcache, of_latent, name, kind) for name, kind in LATENT_KINDS.items()),
]


@pytest.mark.parametrize(
    ("function", "make", "kind"),
    [(function, make, kind) for function, make, _, kind in CASES],
    ids=[f"{make.__name__}: {name}" for _, make, name, _ in CASES],
)
def test_c_launches_what_python_launches(function, make, kind, fake, monkeypatch):
    # All tensors live on, so each call has other addresses.
    calls = [make(**kind) for _ in range(4)]
    arguments, result = calls[-1], [function(**call) for call in calls][-1]
    assert [launched.in_c for launched in fake.launches] == [False, False, True, True]
    ours = fake.launches[-1]
    monkeypatch.setattr(fast, "is_on", False)
    expected = function(**arguments)
    results = [value if isinstance(value, tuple) else (value,) for value in (result, expected)]
    forms = [[(t.shape, t.stride(), t.dtype, t.device) for t in each] for each in results]
    assert forms[0] == forms[1]
    addresses = [tensor.data_ptr() for tensor in results[0]]
    assert addresses == [ours.params.out, ours.params.lse][: len(addresses)]
    own = ("out", "lse")[: len(addresses)]
    same(ours, fake.launches[-1], *own[1:] if "out" in arguments else own)


def known(arguments: Arguments) -> bool:
    """Return True if C takes the call, which it then makes."""
    return not isinstance(fast._extension.attention((), arguments), int)


def make_known(arguments: Arguments, function: Any = lean_attn_with_kvcache) -> None:
    for _ in range(2):
        function(**arguments)


def test_arguments_are_taken_by_position_and_by_name(fake):
    arguments = of_kind(q_len=1)
    make_known(arguments)
    names = list(inspect.signature(lean_attn_with_kvcache).parameters)[:19]
    defaults = inspect.signature(lean_attn_with_kvcache).parameters
    values = [arguments.get(name, defaults[name].default) for name in names]
    hints = {"scheduler_metadata": object(), "pack_gqa": None, "sm_margin": 0}
    for count in range(20):
        rest = {name: value for name, value in arguments.items() if name not in names[:count]}
        lean_attn_with_kvcache(*values[:count], **rest, **hints)
        assert fake.launches[-1].in_c
    refused: list[tuple[list[Any], Arguments]] = [
        ([*values, None], {}),
        (values, {"q": arguments["q"]}),
        (values, {"another": None}),
        (values[:2], {}),
    ]
    for given, named in refused:
        with pytest.raises(TypeError, match=r"lean_attn_with_kvcache(\(\))? "):
            lean_attn_with_kvcache(*given, **named)


@pytest.mark.parametrize("function", [lean_attn_with_kvcache, lean_mla_with_kvcache])
def test_a_public_function_looks_like_a_function_of_python(function):
    signature = inspect.signature(function)
    assert next(iter(signature.parameters)) == "q"
    assert {*function.__annotations__} - {"return"} == {*signature.parameters}
    assert function.__doc__.startswith("Compute decode attention")
    assert function.__module__.startswith("leanbench.attention.")
    assert pickle.loads(pickle.dumps(function)) is function


MANY = KINDS["many at once"] | {"without_lse": True, "out": True}
ARGUMENTS = [
    name for name in inspect.signature(lean_attn_with_kvcache).parameters if "flash" not in name
]
TENSORS = (
    *("q", "k_cache", "v_cache", "k", "v", "rotary_cos", "rotary_sin", "cache_batch_idx"),
    *("cache_leftpad", "alibi_slopes", "sinks", "out"),
)
EXACT = ("q", "k_cache", "v_cache")


class Subclass(torch.Tensor):
    pass


def misaligned(tensor: torch.Tensor) -> torch.Tensor:
    memory = torch.zeros(tensor.numel() + 16, dtype=tensor.dtype)
    start = -memory.data_ptr() % 16 // tensor.element_size() + 1
    return memory[start:].as_strided(tensor.shape, tensor.stride())


OTHER_TENSORS: dict[str, Any] = {
    "none": lambda tensor: None,
    "a number": lambda tensor: 1.5,
    "dtype": lambda tensor: (
        tensor.view(torch.int16)
        if tensor.element_size() == 2
        else tensor.view(torch.float32 if tensor.dtype == torch.int32 else torch.int32)
    ),
    "shape": lambda tensor: torch.cat([tensor, tensor]),
    "dimensions": lambda tensor: tensor[None],
    "strides": lambda tensor: torch.stack([tensor, tensor], dim=-1)[..., 0],
    "alignment": misaligned,
    "device": lambda tensor: tensor.to("meta"),
    "class": lambda tensor: tensor.as_subclass(Subclass),
    "no strides": lambda tensor: tensor.to_sparse(),
}


@pytest.fixture
def many(fake) -> Arguments:
    """Return the arguments of a call that C knows, with nearly all tensors."""
    arguments = of_kind(**MANY)
    make_known(arguments)
    assert known(arguments)
    return arguments


@pytest.mark.parametrize("name", TENSORS)
def test_another_form_of_a_tensor_is_another_call(name, many):
    for change in OTHER_TENSORS.values():
        assert not known(many | {name: change(many[name])})
    assert known(many | {name: torch.empty_like(many[name])})
    parameter = torch.nn.Parameter(many[name], requires_grad=False)
    assert known(many | {name: parameter}) == (name not in EXACT)


#: Arguments that are not given above, or other values.
OTHER_VALUES: dict[str, tuple[Any, ...]] = {
    "cache_seqlens": (None, 39, -3, True, torch.full((2,), 3, dtype=torch.int32)),
    "softmax_scale": (None, 0.25, 1, torch.tensor(0.5)),
    "causal": (False, 1, None),
    "window_size": (None, (11, 1), (11, -1, 0), [11, -1], (11.0, -1), (None, -1), (True, -1)),
    "softcap": (0, 8.0, 9, "9"),
    "rotary_interleaved": (True, 0),
    "num_splits": (1, 2**70, False),
    "return_softmax_lse": (True, 0),
    "attention_chunk": (16, False),
    "batch_invariant": (True, 0),
    "max_seqlen_q": (3,),
    "config": (object(),),
    **{
        name: (torch.zeros(2, dtype=torch.int32), "a word")
        for name in ARGUMENTS
        if name.endswith(("table", "descale", "_q", "_new", "rotary_seqlens")) or name == "qv"
    },
    "learnable_sink": (torch.zeros(4),),
    "shared_prefix": (16, True),
}


def test_every_argument_is_changed():
    assert {*TENSORS, *OTHER_VALUES} == {*ARGUMENTS}


@pytest.mark.parametrize("name", OTHER_VALUES)
def test_another_value_is_another_call(name, many):
    for value in OTHER_VALUES[name]:
        assert not known(many | {name: value}), value
    assert known(many)


@pytest.mark.parametrize("name", ["sinks", "block_table"])
def test_the_other_name_of_an_argument_is_taken(name, fake):
    other = {"sinks": "learnable_sink", "block_table": "page_table"}[name]
    arguments = of_kind(sinks=True, **PAGES)
    arguments[other] = arguments.pop(name)
    make_known(arguments)
    lean_attn_with_kvcache(**arguments)
    assert fake.launches[-1].in_c
    assert getattr(fake.launches[-1].params, name) == arguments[other].data_ptr()


def test_what_settings_depend_on_makes_a_call_unknown(many, monkeypatch):
    for change in (
        lambda: monkeypatch.setenv("LEANBENCH_HOME", "/elsewhere"),
        lambda: monkeypatch.delenv("LEANBENCH_HOME"),
        lambda: monkeypatch.setenv("LEANBENCH_CONFIGS", "on"),
        lambda: monkeypatch.setenv("XDG_DATA_HOME", "/elsewhere"),
        lambda: monkeypatch.setattr(store, "_saves", store.saves() + 1000),
    ):
        change()
        assert not known(many)
        make_known(many)
        assert known(many)


def test_a_hook_on_signatures_sees_calls_that_c_knows(many):
    before = prepared.replace_hook(None)
    prepared._LAUNCHES.has_unseen = True
    prepared.replace_hook(lambda problem: None)
    assert not known(many)
    prepared.replace_hook(before)


def test_a_known_call_runs_no_python_but_the_question_for_a_compiler(many):
    names: list[str] = []

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            names.append(frame.f_code.co_name)

    sys.setprofile(profile)
    try:
        lean_attn_with_kvcache(**many)
    finally:
        sys.setprofile(None)
    # Then the driver.
    assert names[:3] == ["call", "is_dynamo_compiling", "_launch"]


def test_modes_transforms_and_checks_are_pythons(many, monkeypatch):
    modes: list[Any] = [FakeTensorMode(allow_non_fake_inputs=True), forward_ad.dual_level()]
    for mode in modes:
        with mode:
            assert not known(many)
    taken = []
    torch.vmap(lambda x: taken.append(known(many)) or x)(torch.zeros(2))
    torch.jit.trace(lambda x: taken.append(known(many)) or x + 1, torch.zeros(2), check_trace=False)
    assert taken == [False, False]
    with monkeypatch.context() as patch:
        patch.setattr(checks, "CHECKS_VALUES", True)
        assert not known(many)
    assert known(many)


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_that_requires_a_gradient_is_pythons_outside_of_no_grad(name, many):
    tensor = many[name]
    if tensor.is_floating_point():
        arguments = many | {name: tensor.detach().requires_grad_()}
        assert known(arguments)
        with torch.enable_grad():
            assert known(many)
            assert not known(arguments)
            with pytest.raises(NotImplementedError, match="for inference"):
                lean_attn_with_kvcache(**arguments)


def test_lengths_that_share_a_launch_are_written_to_it(fake):
    arguments: Any = of_kind(append=2, context=200)
    lengths = {}
    for length in (129, 130, 150, 188):
        make_known(arguments | {"cache_seqlens": length})
        lean_attn_with_kvcache(**arguments | {"cache_seqlens": length})
        lengths[length] = fake.launches[-1].params.context
        assert fake.launches[-1].in_c
    assert lengths == {length: length + 2 for length in lengths}
    assert known(arguments | {"cache_seqlens": 160})
    for length in (128, 190, 192, 199, 2**40):
        assert not known(arguments | {"cache_seqlens": length})
    with pytest.raises(ValueError, match="cache_seqlens 199"):
        lean_attn_with_kvcache(**arguments | {"cache_seqlens": 199})


def test_a_cache_with_spare_rows_is_taken(fake):
    arguments = of_kind(q_len=1)
    for name in ("k_cache", "v_cache"):
        arguments[name] = torch.cat([arguments[name]] * 2)
    make_known(arguments)
    assert known(arguments)


@pytest.mark.parametrize("kind", ["fp8 q", "KV heads", "steps", "qv"])
def test_calls_of_several_steps_are_pythons(kind, fake, monkeypatch):
    function: Any = lean_mla_with_kvcache
    arguments = of_latent(pages=True)
    if kind == "fp8 q":
        arguments = of_latent(fp8=True)
        arguments["q"] = arguments["q"].to(FP8)
    elif kind == "KV heads":
        arguments["kv_cache"] = arguments["kv_cache"].expand(4, 64, 2, 576)
    else:
        function = lean_attn_with_kvcache
        arguments = of_kind(q_len=1)
        if kind == "steps":
            arguments["cache_seqlens"] = torch.full((2, 2), 9, dtype=torch.int32)[:, 0]
        else:
            arguments["qv"] = torch.zeros_like(arguments["q"])
    for _ in range(4):
        function(**arguments)
    assert not any(launched.in_c for launched in fake.launches)


def test_what_the_driver_refuses_is_an_error(many, fake, monkeypatch):
    fake.status = 1
    monkeypatch.setattr(
        cuda_driver._driver(), "cuGetErrorString", lambda status: (0, b"invalid argument")
    )
    with pytest.raises(RuntimeError, match=r"^CUDA driver: invalid argument$"):
        lean_attn_with_kvcache(**many)
    fake.status = 0
    assert known(many)


def test_a_call_leaves_no_reference_behind(fake):
    arguments: Any = of_kind(**MANY) | {"return_softmax_lse": True}
    del arguments["out"]
    make_known(arguments)
    refused = arguments | {"q": arguments["q"].as_subclass(Subclass)}
    values = [value for value in arguments.values() if isinstance(value, torch.Tensor)]
    counts = [sys.getrefcount(value) for value in values]

    def call(times: int) -> int:
        for _ in range(times):
            assert known(arguments)
            assert not known(refused)
            fake.launches.clear()
        gc.collect()
        return sys.getallocatedblocks()

    before = call(100)
    assert call(10_000) - before < 50
    assert counts == [sys.getrefcount(value) for value in values]


def test_tensors_of_a_call_are_not_kept(fake):
    arguments = of_kind(**MANY)
    make_known(arguments)
    assert known(arguments)
    tensors = [
        weakref.ref(value) for value in arguments.values() if isinstance(value, torch.Tensor)
    ]
    arguments.clear()
    gc.collect()
    assert [tensor() for tensor in tensors] == [None] * len(tensors)


def test_calls_that_were_not_made_lately_are_forgotten(fake):
    arguments = of_kind(q_len=1)
    for splits in range(1500):
        make_known(arguments | {"num_splits": splits})
    taken = [known(arguments | {"num_splits": splits}) for splits in range(1500)]
    # Some keys share a place with fewer others, and stay longer.
    assert taken[-1]
    assert sum(taken[:300]) < 100 < 200 < sum(taken[-300:])
    assert sum(taken) <= 1024


def test_threads_call_at_the_same_time(fake):
    calls = [of_kind(**PAGES) for _ in range(4)]
    failures: list[BaseException] = []

    def make_calls(arguments: Arguments) -> None:
        try:
            with torch.no_grad():
                make_known(arguments)
                for _ in range(300):
                    assert known(arguments)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=make_calls, args=(arguments,)) for arguments in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    epochs = {launched.params.epoch for launched in fake.launches}
    assert len(epochs) == len(fake.launches) == 4 * 302
    pointers = [(each["q"].data_ptr(), each["k_cache"].data_ptr()) for each in calls]
    for launched in fake.launches:
        params = launched.params
        assert (params.q, params.k) in pointers
        assert params.k_map.words[0] == params.k


def test_c_and_python_have_one_counter_of_epochs(many, fake):
    before = WORKSPACES.next_epoch()
    assert known(many)
    assert (fake.launches[-1].params.epoch - before) % 2**32 == 1


class Reentrant(TorchFunctionMode):
    """Makes a call in the first use of a function."""

    def __init__(self, name: str, call: Callable[[], Any]) -> None:
        super().__init__()
        self._name, self._call = name, call

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._name in f"{func} {getattr(func, '__self__', None)}":
            self._name = "no function"
            self._call()
        return func(*args, **(kwargs or {}))


def test_a_call_in_the_middle_of_another_changes_nothing(fake):
    """A mode sees that gradients are read, and that the output is made."""
    outer, inner = (of_kind(q_len=1, without_lse=True) for _ in range(2))
    make_known(outer)
    for name in ("requires_grad", "empty_like"):
        fake.launches.clear()
        with torch.enable_grad(), Reentrant(name, lambda: lean_attn_with_kvcache(**inner)):
            lean_attn_with_kvcache(**outer)
        pointers = [(launched.in_c, launched.params.q) for launched in fake.launches]
        assert sorted(pointers) == sorted((True, each["q"].data_ptr()) for each in (inner, outer))


def test_a_call_is_learned_with_its_own_arguments(fake):
    """Not with those of a call that was made in the middle of it."""
    call = of_kind(q_len=1, without_lse=True)

    def scaled(scale: float) -> Any:
        arguments: Any = call | {"softmax_scale": scale}
        return lean_attn_with_kvcache(**arguments)

    scaled(1.0)
    with Reentrant("empty_like", lambda: scaled(2.0)):
        scaled(1.0)
    scaled(2.0)
    assert fake.launches[-1].params.qk_scale == pytest.approx(2.0 * math.log2(math.e))


def test_signatures_in_turn_are_learned(fake):
    """Also those whose keys fall into the same set of keys seen."""
    calls = [of_kind(q_len=1, batch=batch, context=64) for batch in range(1, 97)]
    for _ in range(4):
        fake.launches.clear()
        for arguments in calls:
            lean_attn_with_kvcache(**arguments)
    assert sum(launch.in_c for launch in fake.launches) == len(calls)


@pytest.mark.parametrize("known_length", [None, 150])
def test_a_length_past_the_rotary_table_is_refused(fake, known_length):
    """Also in the group of lengths of a known call."""
    table = torch.zeros(190, 16).half()
    arguments: Any = of_kind(append=2, rotary_dim=32, context=200)
    arguments |= {"rotary_cos": table, "rotary_sin": table}
    for _ in range(3 if known_length else 0):
        lean_attn_with_kvcache(**arguments | {"cache_seqlens": known_length})
    lean_attn_with_kvcache(**arguments | {"cache_seqlens": 188})
    with pytest.raises(ValueError, match=r"rotary_cos is \(190, 16\).* 191 tokens"):
        lean_attn_with_kvcache(**arguments | {"cache_seqlens": 189})


def test_a_thread_does_not_inherit_the_calls_of_another(fake):
    """Its memory can."""
    arguments = of_kind(q_len=1)
    for _ in range(20):
        taken: list[bool] = []

        def call(taken: list[bool] = taken) -> None:
            with torch.no_grad():
                taken += [known(arguments)]
                make_known(arguments)
                taken += [known(arguments)]

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        assert taken == [False, True]


def test_a_keyword_that_compares_as_it_likes_is_pythons(fake):
    class Word(str):
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            raise KeyError("mine")

    arguments: Any = of_kind(q_len=1) | {Word("caus"): True}
    with pytest.raises(KeyError, match="mine"):
        lean_attn_with_kvcache(**arguments)


def moved(value: Any) -> Any:
    """Copy a tensor to other memory, with its strides and alignment."""
    if not isinstance(value, torch.Tensor):
        return value
    memory = value.untyped_storage().clone()
    copy = torch.empty(0, dtype=value.dtype).set_(memory)
    return copy.as_strided(value.shape, value.stride(), value.storage_offset())


#: Values for which kernels take many calls as they are.
WITHOUT_STEPS = {
    "head_dim": 64,
    "v_head_dim": None,
    "capacity": 60,
    "cu_seqlens_k_new": False,
    "rotary_seqlens": False,
    "batch_invariant": False,
    "cache_batch_idx": False,
}


@pytest.mark.parametrize("part", range(2))
def test_c_takes_all_calls_without_steps_and_launches_what_python_launches(part, fake, monkeypatch):
    taken, steps = 0, []
    steps_of = Steps.of
    monkeypatch.setattr(Steps, "of", lambda *given: steps.append(steps_of(*given)) or steps[-1])
    for number, row in enumerate(pairwise_rows(COMPILED, seed=part)):
        (call,) = calls_of({**row, **WITHOUT_STEPS, "q_len": min(row["q_len"], 5)}, 1, part)
        drawn, results = draw_call(call, number, "cpu"), []
        kept = [drawn.arguments]
        fake.launches.clear()
        for turn in range(4):
            monkeypatch.setattr(fast, "is_on", turn < 3)
            if turn < 3:
                kept.append({name: moved(value) for name, value in kept[0].items()})
            drawn.arguments = kept[-1]
            results.append(run_call(drawn, lean_attn_with_kvcache))
        in_c = [launched.in_c for launched in fake.launches]
        assert in_c == [False, False, not any(steps[-1]), False]
        if in_c[2]:
            taken += 1
            ours, theirs = fake.launches[2:]
            (out, lse), (like, _) = results[2:]
            assert (out.shape, out.stride(), out.dtype) == (like.shape, like.stride(), like.dtype)
            addresses = {"out": out, "lse": lse}
            own = [name for name, tensor in addresses.items() if tensor is not None]
            for name in own:
                assert getattr(ours.params, name) == addresses[name].data_ptr()
            same(ours, theirs, *(name for name in own if not (name == "out" and call["out"])))
    assert taken > 40
