"""FlashAttention-3's adapter against fakes of its two builds: the source package's functions, and
operators with the schemas of vLLM's shared object.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch
from depth import label
from leanbench.kernels.libraries import flash_attn_3_builds, library
from leanbench.kernels.libraries.flash_attn_3 import FlashAttn3Config
from library_stand_ins import (
    APPENDS,
    CAPACITY,
    FP8,
    OF_FLASH_ATTN,
    PAGED,
    RAGGED,
    SEVERAL_QUERIES,
    SINKS,
    SOFTCAPS,
    UNIFORM,
    WINDOWS,
    addresses,
    attended,
    checked,
    stand_in,
)

from leanbench.check.reference import Reference
from leanbench.core.errors import UserError
from leanbench.core.inputs import make_inputs
from leanbench.core.kernel import written_by
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel
from leanbench.gpu.catalogue import find

EVERY = [
    *(*UNIFORM, *RAGGED, *PAGED, *SEVERAL_QUERIES, *CAPACITY, *WINDOWS, *SOFTCAPS, *FP8),
    *(*OF_FLASH_ATTN, replace(PAGED[1], kv_dtype="e4m3"), replace(RAGGED[1], q_lens=(3, 1, 7))),
    replace(UNIFORM[1], kv_dtype="e4m3", q_dtype="e4m3"),
    AttentionProblem(2, 4, 2, 70, 192, v_head_dim=128),
]
#: As vLLM 0.22 registers them.
FWD = (
    "fwd(Tensor! q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor!? out,"
    " Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q,"
    " Tensor? seqused_k, int? max_seqlen_q, int? max_seqlen_k, Tensor? page_table,"
    " Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos, Tensor? rotary_sin,"
    " Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale,"
    " float softmax_scale, bool is_causal, int window_size_left, int window_size_right,"
    " float softcap, bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits,"
    " bool? pack_gqa, int sm_margin, Tensor? s_aux{}) -> Tensor[]"
)
CONTEXT_PARALLEL = ", int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k"
METADATA = (
    "get_scheduler_metadata(int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads,"
    " int num_heads_k, int headdim, int headdim_v, ScalarType qkv_dtype, Tensor seqused_k,"
    " Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q,"
    " Tensor? leftpad_k, int? page_size, int max_seqlen_k_new, bool is_causal,"
    " int window_size_left, int window_size_right, bool has_softcap, int num_splits,"
    " bool? pack_gqa, int sm_margin) -> Tensor"
)


#: Fields of AttentionInputs, and their arguments in the source package and the shared object.
SAME_NAMES = ("cu_seqlens_q", "max_seqlen_q", "softcap", "q_descale", "k_descale", "v_descale")
OF_SOURCE = (
    *("causal", "cache_leftpad", "cache_batch_idx"),
    *("rotary_cos", "rotary_sin", "rotary_interleaved"),
)
FIELDS = {
    **{name: name for name in SAME_NAMES},
    "causal": "is_causal",
    "window_left": "window_size_left",
    "window_right": "window_size_right",
    "sinks": "s_aux",
    "cache_leftpad": "leftpad_k",
    "cache_batch_idx": "kv_batch_idx",
}


def names_of(schema: str) -> list[str]:
    inside = schema.partition("(")[2].partition(")")[0]
    return [argument.split()[-1] for argument in inside.split(",")]


def heuristic(problem: AttentionProblem) -> Any:
    return kernel("flash_attn_3").default_config(problem, find("h200"))


def is_masked(problem: AttentionProblem) -> bool:
    """Return whether a call is causal: with one query token, only windows need it."""
    return problem.causal and (problem.q_len > 1 or problem.window_left >= 0)


class SharedObject:
    """Operators with the shared object's names, and the arguments of their calls by name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: Path, fwd: str) -> None:
        self.calls: list[dict[str, Any]] = []
        self.plans: list[dict[str, Any]] = []
        self.loaded: list[str] = []
        self.fwd_names, self.plan_names = names_of(fwd), names_of(METADATA)
        # torch keeps operators as long as their library lives.
        self.operators = torch.library.Library("_vllm_fa3_C", "DEF")
        for schema, function in ((fwd, self.fwd), (METADATA, self.plan)):
            self.operators.define(schema)
            name = schema.partition("(")[0]
            self.operators.impl(name, function, "CompositeExplicitAutograd")
        monkeypatch.setattr(torch.ops, "load_library", self.loaded.append)
        path.write_bytes(b"not a library")
        monkeypatch.setenv("LEANBENCH_FA3_LIBRARY", str(path))

    def fwd(self, *arguments: Any) -> list[torch.Tensor]:
        call = dict(zip(self.fwd_names, arguments, strict=True))
        self.calls.append(call)
        places = ("q", "k", "v", "seqused_k", "page_table", "softmax_scale")
        kinds = {own: call[name] for own, name in FIELDS.items()}
        out, lse = attended(*(call[name] for name in places), **kinds)
        return [out, lse, torch.empty(0), torch.empty(0)]

    def plan(self, *arguments: Any) -> torch.Tensor:
        plan = dict(zip(self.plan_names, arguments, strict=True))
        self.plans.append(plan)
        return torch.tensor([len(self.plans)], dtype=torch.int32)


@pytest.fixture
def shared_object(monkeypatch, tmp_path, request):
    fwd = FWD.format(getattr(request, "param", CONTEXT_PARALLEL))
    loaded = SharedObject(monkeypatch, tmp_path / "_vllm_fa3_C.abi3.so", fwd)
    yield loaded
    loaded.operators._destroy()


@pytest.mark.parametrize("problem", [*EVERY, *SINKS], ids=label)
def test_the_shared_object_is_handed_the_tensors_and_its_schedule(problem, shared_object):
    config = heuristic(problem)
    assert kernel("flash_attn_3").unsupported_reason(problem) is None
    inputs, _ = checked("flash_attn_3", problem, config)
    call, plan = shared_object.calls[-1], shared_object.plans[-1]
    assert addresses(call["k"], call["v"]) == addresses(inputs.k_cache, inputs.v_cache)
    # Q is passed unchanged, or in the caches' dtype.
    assert call["q"].dtype == inputs.k_cache.dtype
    assert (call["q"] is inputs.q) == (inputs.q.dtype == inputs.k_cache.dtype)
    assert call["k"].stride() == inputs.k_cache.stride()
    expected = {
        "max_seqlen_q": problem.q_len,
        "max_seqlen_k": problem.cache_capacity,
        "is_causal": is_masked(problem),
        "num_splits": 0,
        "pack_gqa": problem.group_size > 1,
        "window_size_left": problem.window_left,
        "window_size_right": problem.window_right,
        "sm_margin": 0,
    }
    assert call["softmax_scale"] == problem.head_dim**-0.5
    for given in (call, plan):
        assert {name: given[name] for name in expected} == expected
    assert call["scheduler_metadata"].tolist() == [len(shared_object.plans)]
    assert plan["seqused_k"].tolist() == list(problem.contexts)
    shape = ("batch_size", "num_heads", "num_heads_k", "headdim", "headdim_v", "page_size")
    assert tuple(plan[name] for name in shape) == (
        problem.batch,
        problem.q_heads,
        problem.kv_heads,
        problem.head_dim,
        problem.value_dim,
        problem.page_size,
    )
    assert plan["qkv_dtype"] == call["q"].dtype
    assert plan["has_softcap"] == (problem.softcap > 0)


@pytest.mark.usefixtures("shared_object")
@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (APPENDS[0], "appends nothing in vLLM's build"),
        (replace(UNIFORM[0], sinks=True), "takes sinks in bf16, this problem has fp16"),
        (replace(UNIFORM[1], alibi=True), "has no ALiBi"),
        (replace(UNIFORM[1], kv_dtype="e5m2"), "takes fp8 as e4m3, this problem has e5m2"),
        (replace(UNIFORM[0], kv_dtype="e4m3"), "writes bf16 with fp8 caches, dtype is fp16"),
        (replace(UNIFORM[1], v_head_dim=64), "at 192 and 128 alone, this problem has 128 and 64"),
    ],
)
def test_what_vllms_build_does_not_take(problem, words):
    reason = kernel("flash_attn_3").unsupported_reason(problem)
    assert words in str(reason)


def test_the_source_package_has_no_sinks(monkeypatch):
    source_package(monkeypatch)
    reason = kernel("flash_attn_3").unsupported_reason(SINKS[0])
    assert reason == "flash_attn_3 has no sinks in the package flash_attn_3: leave them out"


@pytest.mark.parametrize("shared_object", [""], indirect=True)
def test_an_older_shared_object_lacks_arguments_that_say_nothing(shared_object):
    checked("flash_attn_3", UNIFORM[1], heuristic(UNIFORM[1]))
    assert "cp_world_size" not in shared_object.calls[-1]


@pytest.mark.parametrize("shared_object", [", int newer"], indirect=True)
@pytest.mark.usefixtures("shared_object")
def test_a_newer_shared_object_that_wants_more_is_told(monkeypatch):
    with pytest.raises(UserError, match=r"cannot call _vllm_fa3_C.abi3.so sha256 .* wants newer"):
        checked("flash_attn_3", UNIFORM[1], heuristic(UNIFORM[1]))


def test_what_a_caller_chooses_reaches_both_functions(shared_object):
    problem = UNIFORM[1]
    checked("flash_attn_3", problem, FlashAttn3Config(pack_gqa=False, splits=3))
    chosen = {"pack_gqa": False, "num_splits": 3}
    for call in (shared_object.calls[-1], shared_object.plans[-1]):
        assert {name: call[name] for name in chosen} == chosen


def test_planning_again_is_the_call_that_the_launch_made_once(shared_object):
    problem, config = RAGGED[0], FlashAttn3Config(pack_gqa=False, splits=2)
    inputs, _ = checked("flash_attn_3", problem, config)
    again = kernel("flash_attn_3").planner(inputs, config)
    assert again is not None
    assert len(shared_object.plans) == 1
    again()
    for plan in shared_object.plans:
        assert (plan["num_splits"], plan["seqused_k"].tolist()) == (2, list(problem.contexts))
    assert len(shared_object.plans) == 2


@pytest.mark.parametrize("problem", [RAGGED[0], PAGED[2]], ids=label)
def test_copies_of_a_call_are_planned_once(problem, shared_object):
    """All are prepared before any is launched.

    Each has its tensors and a copy of the common schedule.
    """
    copies = [make_inputs(problem, "cpu") for _ in range(3)]
    launches = kernel("flash_attn_3").prepare_all(copies, heuristic(problem))
    assert len(shared_object.plans) == 1
    assert len(shared_object.calls) == 1, "the first launch alone"
    shared_object.calls.clear()
    for inputs, launch in zip(copies, launches, strict=True):
        launch()
        written = written_by(launch, inputs)
        assert Reference(inputs).check(written).failure(problem.dtype) is None
    calls = shared_object.calls
    for name, tensor in (("q", "q"), ("k", "k_cache")):
        own = [getattr(inputs, tensor) for inputs in copies]
        assert addresses(*(call[name] for call in calls)) == addresses(*own)
    assert [call["scheduler_metadata"].tolist() for call in calls] == [[1]] * 3
    assert len({call["scheduler_metadata"].data_ptr() for call in calls}) == 3
    assert len(shared_object.plans) == 1


def source_package(monkeypatch: pytest.MonkeyPatch, **members: Any) -> list[dict[str, Any]]:
    """Install a fake of `flash_attn_interface`; return the options of its calls."""
    calls: list[dict[str, Any]] = []

    def flash_attn_with_kvcache(q, k_cache, v_cache, **options):
        calls.append(options)
        left, right = options["window_size"]
        results = attended(
            *(q, k_cache, v_cache),
            *(options[name] for name in ("cache_seqlens", "page_table", "softmax_scale")),
            k_new=options["k"],
            v_new=options["v"],
            window_left=left,
            window_right=right,
            **{name: options[name] for name in SAME_NAMES + OF_SOURCE},
        )
        return *results, torch.empty(0), torch.empty(0)

    monkeypatch.delenv("LEANBENCH_FA3_LIBRARY", raising=False)
    members["flash_attn_with_kvcache"] = flash_attn_with_kvcache
    stand_in(monkeypatch, "flash_attn_interface", **members)
    return calls


@pytest.mark.parametrize("problem", [*EVERY, *APPENDS], ids=label)
def test_the_source_package_is_handed_the_tensors_and_its_schedule(problem, monkeypatch):
    plans: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def get_scheduler_metadata(*shape: Any, **options: Any) -> torch.Tensor:
        plans.append((shape, options))
        return torch.tensor([7, 8])

    calls = source_package(monkeypatch, get_scheduler_metadata=get_scheduler_metadata)
    inputs, _ = checked("flash_attn_3", problem, heuristic(problem))
    shape, plan = plans[0]
    assert shape == (
        problem.batch,
        problem.q_len,
        problem.cache_capacity,
        problem.q_heads,
        problem.kv_heads,
        problem.head_dim,
    )
    call = calls[-1]
    cached = [context - problem.append for context in problem.contexts]
    for options in (plan, call):
        assert options["cache_seqlens"].tolist() == cached
        assert options["causal"] == is_masked(problem)
        assert options["window_size"] == (problem.window_left, problem.window_right)
        assert options["pack_gqa"] == (problem.group_size > 1)
        assert options["num_splits"] == 0
        assert options["cu_seqlens_q"] is inputs.cu_seqlens_q
        assert options["cache_leftpad"] is inputs.cache_leftpad
    assert plan["qkv_dtype"] == inputs.k_cache.dtype
    assert plan["headdim_v"] == problem.value_dim
    assert plan["page_size"] == problem.page_size
    assert plan["max_seqlen_k_new"] == problem.append
    assert plan["has_softcap"] == (problem.softcap > 0)
    assert call["page_table"] is inputs.block_table
    assert call["softmax_scale"] == problem.head_dim**-0.5
    assert call["scheduler_metadata"].tolist() == [7, 8]
    assert call["return_softmax_lse"]


def test_a_source_package_without_a_scheduler_function(monkeypatch):
    calls = source_package(monkeypatch)
    inputs, _ = checked("flash_attn_3", UNIFORM[1], heuristic(UNIFORM[1]))
    assert calls[-1]["scheduler_metadata"] is None
    assert kernel("flash_attn_3").planner(inputs, heuristic(UNIFORM[1])) is None


def test_the_path_comes_first_then_the_package_then_vllm(monkeypatch, tmp_path):
    shipped = tmp_path / "vllm" / "vllm_flash_attn" / "_vllm_fa3_C.abi3.so"
    shipped.parent.mkdir(parents=True)
    shipped.write_bytes(b"shipped")
    vllm = ModuleSpec("vllm", None, is_package=True)
    vllm.submodule_search_locations = [str(tmp_path / "vllm")]
    installed = {"vllm": vllm, "flash_attn_interface": ModuleSpec("flash_attn_interface", None)}
    monkeypatch.setattr(library, "find_spec", installed.get)
    monkeypatch.setattr(library, "version", {"vllm": "0.22.0", "flash_attn_3": "3.0.0"}.get)
    own = tmp_path / "_vllm_fa3_C.abi3.so"
    own.write_bytes(b"own")
    monkeypatch.setenv("LEANBENCH_FA3_LIBRARY", str(own))
    adapter = kernel("flash_attn_3")
    # The digest of b"own".
    assert adapter.library() == "_vllm_fa3_C.abi3.so sha256 5b397565"
    monkeypatch.delenv("LEANBENCH_FA3_LIBRARY")
    assert adapter.library() == "flash_attn_3 3.0.0"
    del installed["flash_attn_interface"]
    assert adapter.library() == "vllm 0.22.0"
    assert flash_attn_3_builds.find_build() == flash_attn_3_builds.SharedObject(
        shipped, "vllm 0.22.0"
    )
    shipped.unlink()
    assert flash_attn_3_builds.find_build() is None


def test_a_path_that_is_no_file_is_said(monkeypatch, tmp_path):
    monkeypatch.setenv("LEANBENCH_FA3_LIBRARY", str(tmp_path / "gone.so"))
    reason = str(kernel("flash_attn_3").unsupported_reason(UNIFORM[0]))
    assert reason.startswith(f"LEANBENCH_FA3_LIBRARY is {tmp_path}/gone.so, which is no file: ")


def test_a_file_that_is_no_library_is_said(monkeypatch, tmp_path):
    path = tmp_path / "text.so"
    path.write_bytes(b"text")
    monkeypatch.setenv("LEANBENCH_FA3_LIBRARY", str(path))
    with pytest.raises(UserError, match=r"^flash_attn_3 cannot call text.so sha256 .*\(OSError: "):
        kernel("flash_attn_3").prepare(make_inputs(UNIFORM[0], "cpu"), heuristic(UNIFORM[0]))


def test_the_best_of_it_is_packed_or_not_with_the_heuristics_splits_or_its_own():
    best, h200 = kernel("flash_attn_3_best"), find("h200")
    grouped = best.candidate_configs(AttentionProblem(4, 32, 8, 4096, 128), h200)
    # 32 output tiles on 132 SMs: half a wave, one, two and four.
    assert grouped == [
        FlashAttn3Config(pack, splits) for pack in (True, False) for splits in (0, 1, 2, 4, 8, 16)
    ]
    assert best.default_config(AttentionProblem(4, 32, 8, 4096, 128), h200) == grouped[0]
    alone = best.candidate_configs(AttentionProblem(1, 1, 1, 4096, 128), h200)
    assert alone == [FlashAttn3Config(False, splits) for splits in (0, 1, 66)]
    assert (best.config_choice, kernel("flash_attn_3").config_choice) == ("best", None)
