"""The plugins of vLLM and SGLang, with stand-ins of servers that are not installed."""

import importlib
import importlib.util
import inspect
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from dense_attention import DenseAttention, dense_attention
from interfaces import faults, fields_read, methods, overridden
from server_stubs import (
    FROM_FLASH_ATTENTION,
    SglangMetadata,
    VllmMetadata,
    sglang_layer,
    sglang_modules,
    vllm_modules,
)

import leanbench
from leanbench.gpu.catalogue import find
from leanbench.integrations import sglang, vllm

BACKENDS = ("leanbench.integrations.vllm_backend", "leanbench.integrations.sglang_backend")
LENGTHS = torch.tensor([9, 4, 16], dtype=torch.int32)
TABLE = torch.tensor([[3, 0, 6, 1], [2, 5, 4, 7], [8, 9, 10, 11]], dtype=torch.int32)
PAGE, HEADS, KV_HEADS, DIM = 4, 4, 2, 8


def backend(
    name: str, stubs: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[ModuleType, DenseAttention]]:
    for module, stub in stubs.items():
        monkeypatch.setitem(sys.modules, module, stub)
    made = importlib.import_module(name)
    dense = DenseAttention()
    monkeypatch.setattr(made, "lean_attn_with_kvcache", dense)
    yield made, dense
    del sys.modules[name]


@pytest.fixture
def vllm_backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ModuleType, DenseAttention]]:
    yield from backend(BACKENDS[0], vllm_modules(), monkeypatch)


@pytest.fixture
def sglang_backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ModuleType, DenseAttention]]:
    yield from backend(BACKENDS[1], sglang_modules(), monkeypatch)


def pages(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V, (12 blocks, block_size, kv_heads, head_size)."""
    generator = torch.Generator().manual_seed(seed)
    shape = (12, PAGE, KV_HEADS, DIM)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def expected(q: torch.Tensor, **options: Any) -> torch.Tensor:
    k, v = [cache[TABLE.long()].flatten(1, 2) for cache in pages()]
    return dense_attention(q, k, v, cache_seqlens=LENGTHS, softmax_scale=0.25, **options)


def batch(**changes: Any) -> VllmMetadata:
    """FlashAttention's metadata of vLLM for a decode step."""
    starts = torch.arange(4, dtype=torch.int32)
    metadata = VllmMetadata(3, 1, starts, LENGTHS, TABLE, "slots")
    # Those that one version has, too.
    for name, value in changes.items():
        setattr(metadata, name, value)
    return metadata


def impl_of(
    made: ModuleType, window: int | None = None, dtype: str = "auto", **options: Any
) -> Any:
    return made.LeanImpl(HEADS, DIM, 0.25, KV_HEADS, None, window, dtype, **options)


def kv_caches() -> dict[str, torch.Tensor]:
    k, v = pages()
    return {
        "0.25": torch.stack((k, v), dim=1),
        "0.33": torch.cat((k, v), dim=-1).transpose(1, 2).contiguous(),
    }


def run(impl: Any, query: torch.Tensor, metadata: Any, version: str = "0.33") -> Any:
    """Return the output of `forward`."""
    output = torch.full_like(query, torch.nan)
    layer = SimpleNamespace(_q_scale=torch.ones(()), _k_scale=torch.ones(()))
    return impl.forward(layer, query, None, None, kv_caches()[version], metadata, output)


def test_vllm_finds_the_backend_by_its_name(vllm_backend):
    vllm.register()
    vllm.register()
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    module, class_name = AttentionBackendEnum.CUSTOM.get_path().rsplit(".", 1)
    found = getattr(importlib.import_module(module), class_name)
    assert found is vllm_backend[0].LeanBackend
    assert AttentionBackendEnum[found.get_name()] is AttentionBackendEnum.CUSTOM
    assert found.__abstractmethods__ == frozenset()
    assert found().get_impl_cls() is vllm_backend[0].LeanImpl


def test_another_custom_backend_of_vllm_stays(vllm_backend):
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, "others.Backend")
    with pytest.warns(UserWarning, match=r"is others.Backend and not leanbench: choose with"):
        vllm.register()
    assert AttentionBackendEnum.CUSTOM.get_path() == "others.Backend"


def test_a_vllm_without_a_registry_goes_on(monkeypatch):
    for module in ("vllm", "vllm.v1.attention.backends.registry"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.warns(UserWarning, match=r"no attention backend of this vLLM.*0\.25 or newer"):
        vllm.register()


@pytest.mark.parametrize("version", ["0.25", "0.33"])
@pytest.mark.parametrize("window", [None, 5])
def test_a_decode_step_of_vllm(version, window, vllm_backend):
    sinks = torch.randn(HEADS)
    own = {"logits_soft_cap": 3.0, "sinks": sinks}
    impl = impl_of(vllm_backend[0], window, **own)
    query = torch.randn(3, HEADS, DIM)
    seen = (-1, -1) if window is None else (window - 1, -1)
    wanted = expected(query[:, None], window_size=seen, softcap=3.0, sinks=sinks)[:, 0]
    # None of its images is seen.
    field = {"0.25": "mm_prefix_range_tensor", "0.33": "mm_prefix_query_range_tensor"}[version]
    torch.testing.assert_close(run(impl, query, batch(**{field: None}), version), wanted)


def new_tokens() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Q, K and V of 3 tokens and one that pads the graph, columns of one tensor."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(4, HEADS + 2 * KV_HEADS, DIM, generator=generator)
    q, k, v = rows.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
    return q, k, v


@pytest.mark.parametrize("version", ["0.25", "0.33"])
def test_the_kernel_writes_the_new_tokens(version, vllm_backend):
    made, dense = vllm_backend
    q, k, v = new_tokens()
    cache = kv_caches()[version]
    wanted = cache.clone()
    of_layer = impl_of(made)
    for own, new in zip(of_layer._caches(wanted), (k, v), strict=True):
        for row, length in enumerate(LENGTHS.tolist()):
            own[TABLE[row, (length - 1) // PAGE], (length - 1) % PAGE] = new[row]
    metadata = batch(may_append=True)
    output = torch.full_like(q, torch.nan)
    of_layer.forward(None, q, k, v, cache, metadata, output)
    assert of_layer.written == []
    torch.testing.assert_close(cache, wanted, rtol=0, atol=0)
    k_seen, v_seen = [own[TABLE.long()].flatten(1, 2) for own in of_layer._caches(wanted)]
    seen = dense_attention(q[:3, None], k_seen, v_seen, cache_seqlens=LENGTHS, softmax_scale=0.25)
    torch.testing.assert_close(output[:3], seen[:, 0])
    assert output[3].isnan().all()
    # Lengths are computed once a step, for all layers.
    impl_of(made).forward(None, q, k, v, cache, metadata, output)
    first, second = [call["cache_seqlens"] for call in dense.calls]
    assert first is second
    assert first.tolist() == [8, 3, 15]


def test_rows_that_pad_a_graph_write_to_the_null_block(vllm_backend):
    made, dense = vllm_backend
    q, k, v = new_tokens()
    table = torch.cat((TABLE[1:], torch.zeros_like(TABLE[:2])))
    lengths = torch.tensor([4, 16, 0, 0], dtype=torch.int32)
    cache = kv_caches()["0.33"]
    before = cache.clone()
    padded = {"num_actual_tokens": 4, "seq_lens": lengths, "block_table": table}
    impl_of(made).forward(
        None, q, k, v, cache, batch(may_append=True, **padded), torch.empty_like(q)
    )
    changed = (cache != before).any(dim=-1).any(dim=1).nonzero().tolist()
    assert changed == [[0, 0], [2, 3], [11, 3]]
    assert dense.calls[0]["cache_seqlens"].tolist() == [3, 15, 0, 0]


def test_no_graph_serves_both_single_tokens_and_prompts(vllm_backend):
    support = vllm_backend[0].LeanMetadataBuilder.get_cudagraph_support(None, None)
    assert support is importlib.import_module(VLLM).AttentionCGSupport.UNIFORM_BATCH


@pytest.mark.parametrize(
    ("changes", "cache_dtype"),
    [
        ({"may_append": False}, torch.float32),
        ({}, torch.float32),
        ({"may_append": True, "num_actual_tokens": 4, "max_query_len": 2}, torch.float32),
        ({"may_append": True}, torch.uint8),
        # Not LeanAttention's.
        ({"may_append": True, "max_query_len": 17}, torch.float32),
        ({"may_append": True, "causal": False}, torch.float32),
    ],
)
def test_other_tokens_are_written_by_vllm(changes, cache_dtype, vllm_backend):
    made, dense = vllm_backend
    impl = impl_of(made, dtype="fp8" if cache_dtype == torch.uint8 else "auto")
    q, k, v = new_tokens()
    cache = torch.zeros(12, 2, PAGE, KV_HEADS, DIM).to(cache_dtype)
    starts = torch.tensor([0, 1, 2, 4], dtype=torch.int32)
    scales = dict.fromkeys(("_q_scale", "_k_scale", "_v_scale"), torch.ones(()))
    metadata = batch(query_start_loc=starts, **changes)
    impl.forward(SimpleNamespace(**scales), q, k, v, cache, metadata, torch.empty_like(q))
    assert impl.written == [(k, v, "slots")]
    assert [call["k"] for call in dense.calls] in ([], [None])
    for call in dense.calls:
        assert call["cache_seqlens"] is LENGTHS


@pytest.mark.parametrize("takes", [True, False])
def test_layers_that_share_a_cache_or_have_no_token_write_nothing(takes, vllm_backend):
    made, dense = vllm_backend
    metadata = batch(may_append=True, causal=takes)
    q, k, v = new_tokens()
    for impl, new in (
        (impl_of(made, kv_sharing_target_layer_name="first"), (k, v)),
        (impl_of(made), (None, None)),
    ):
        impl.forward(None, q, *new, kv_caches()["0.33"], metadata, torch.empty_like(q))
        assert impl.written == []
    assert [call["k"] for call in dense.calls] == [None, None] * takes


def test_tokens_that_speculation_verifies_are_packed(vllm_backend):
    impl = impl_of(vllm_backend[0])
    starts = torch.tensor([0, 3, 4, 6], dtype=torch.int32)
    query = torch.randn(8, HEADS, DIM)
    metadata = batch(num_actual_tokens=6, max_query_len=3, query_start_loc=starts)
    output = run(impl, query, metadata)
    k, v = [cache[TABLE.long()].flatten(1, 2) for cache in pages()]
    for i, (start, end) in enumerate([(0, 3), (3, 4), (4, 6)]):
        one = slice(i, i + 1)
        own = {"cache_seqlens": LENGTHS[one], "softmax_scale": 0.25, "causal": True}
        wanted = dense_attention(query[None, start:end], k[one], v[one], **own)
        torch.testing.assert_close(output[start:end], wanted[0])
    assert output[6:].isnan().all()


def test_fp8_caches_of_vllm_are_read_with_their_scales(vllm_backend):
    made, dense = vllm_backend
    impl = impl_of(made, dtype="fp8")
    k, v = pages()
    cache = torch.stack((k, v), dim=1).to(torch.float8_e4m3fn).view(torch.uint8)
    scales = {"_q_scale": 1.0, "_k_scale": 0.5, "_v_scale": 2.0}
    layer = SimpleNamespace(**{name: torch.tensor(scale) for name, scale in scales.items()})
    query = torch.randn(3, HEADS, DIM)
    impl.forward(layer, query, None, None, cache, batch(), torch.empty_like(query))
    assert dense.calls[0]["k_descale"].tolist() == [[0.5] * KV_HEADS] * 3
    assert dense.calls[0]["v_descale"].tolist() == [[2.0] * KV_HEADS] * 3


@pytest.mark.parametrize(
    "changes",
    [
        {"max_query_len": 17},
        {"causal": False},
        {"rswa_prefix_lens": LENGTHS},
        # A prompt's last tokens, an image among them.
        {"max_query_len": 3, "mm_prefix_range_tensor": torch.tensor([[[2, 8]]])},
        {"max_query_len": 3, "mm_prefix_query_range_tensor": torch.tensor([[2, 8]])},
    ],
)
def test_other_batches_are_flash_attentions(changes, vllm_backend):
    impl = impl_of(vllm_backend[0])
    assert run(impl, torch.randn(3, HEADS, DIM), batch(**changes)) == FROM_FLASH_ATTENTION
    assert run(impl, torch.randn(3, HEADS, DIM), None) == FROM_FLASH_ATTENTION


def test_a_batch_invariant_server_never_packs_and_schedules_prompts_only(vllm_backend):
    made, dense = vllm_backend
    impl = impl_of(made)
    impl.batch_invariant_enabled = True
    run(impl, torch.randn(3, HEADS, DIM), batch())
    assert dense.calls[0]["batch_invariant"] is True
    packed = batch(num_actual_tokens=6, max_query_len=2)
    assert run(impl, torch.randn(6, HEADS, DIM), packed) == FROM_FLASH_ATTENTION
    builder = builder_of(made)
    assert builder.build(32, batch()).built == (0, True)
    assert builder.build(32, batch(max_query_len=17)).built == (32, False)


def builder_of(
    made: ModuleType,
    specs: tuple[str, ...] = ("FullAttentionSpec",),
    ranks: int = 1,
    prefixes: bool = False,
    **own: Any,
) -> Any:
    """A builder of metadata for a model with layers of these kinds."""
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    interface = importlib.import_module("vllm.v1.kv_cache_interface")

    class Layer(AttentionLayerBase):
        def __init__(self, spec: str) -> None:
            self.spec = getattr(interface, spec)()

        def get_kv_cache_spec(self, vllm_config: Any) -> Any:
            return self.spec

    layers: dict[str, Any] = {f"layer.{at}": Layer(spec) for at, spec in enumerate(specs)}
    config = SimpleNamespace(
        **{"speculative_config": None, **own},
        parallel_config=SimpleNamespace(data_parallel_size=ranks),
        cache_config=SimpleNamespace(enable_prefix_caching=prefixes),
        compilation_config=SimpleNamespace(static_forward_context={**layers, "mlp": object()}),
    )
    return made.LeanMetadataBuilder(None, list(layers), config, torch.device("cpu"))


@pytest.mark.parametrize(
    ("options", "may_append"),
    [
        ({}, True),
        ({"specs": ("FullAttentionSpec",) * 2}, True),
        ({"specs": ("FullAttentionSpec", "SlidingWindowSpec")}, False),
        ({"ranks": 2}, False),
        # A request reads a block of another in the step that fills it.
        ({"prefixes": True}, False),
        ({"speculative_config": "drafts"}, False),
    ],
)
def test_the_kernel_writes_only_where_each_row_owns_its_place(
    options, may_append, vllm_backend, monkeypatch
):
    builder = builder_of(vllm_backend[0], **options)
    assert builder.build(0, batch()).may_append is may_append
    assert builder.build_for_cudagraph_capture(batch()).may_append is may_append
    # Elsewhere Triton's kernel attends.
    monkeypatch.setattr(vllm_backend[0], "spec_of", lambda device: find("a100"))
    assert builder_of(vllm_backend[0], **options).may_append is False
    # Prompts are FlashAttention's.
    assert not hasattr(builder.build(0, batch(max_query_len=17)), "may_append")


@pytest.mark.parametrize(
    ("word", "times"), [("1", True), ("true", True), ("0", False), ("", False)]
)
def test_the_warm_up_of_a_graph_is_tuned_on_request(word, times, vllm_backend, monkeypatch):
    made, dense = vllm_backend
    inside: list[int] = []

    @contextmanager
    def autotune() -> Iterator[None]:
        before = len(dense.calls)
        yield
        inside.append(len(dense.calls) - before)

    monkeypatch.setattr(leanbench, "autotune", autotune, raising=False)
    monkeypatch.setenv("LEANBENCH_AUTOTUNE", word)
    builder, impl = builder_of(made), impl_of(made)
    run(impl, torch.randn(3, HEADS, DIM), builder.build_for_cudagraph_capture(batch()))
    assert inside == [1] * times
    # Steps outside of a warm-up.
    run(impl, torch.randn(3, HEADS, DIM), batch())
    assert inside == [1] * times
    assert len(dense.calls) == 2


class Pool:
    """SGLang's KV cache: a runner's, and what was written to it."""

    def __init__(self) -> None:
        self.caches = pages()
        self.written: list[Any] = []

    def set_kv_buffer(self, layer: Any, place: Any, k: Any, v: Any, *scales: Any) -> None:
        self.written.append((place, k, v))


def step(made: ModuleType, layer: Any, spec_info: Any = None, **options: Any) -> tuple[Any, Pool]:
    """Return the output of `forward_decode` for 3 sequences, and the cache."""
    pool = Pool()
    own = made.LeanBackend(pool)
    own.forward_metadata = SglangMetadata(page_table=TABLE, cache_seqlens_int32=LENGTHS)
    layer.attn_type = made.AttentionType.DECODER
    forward_batch = SimpleNamespace(spec_info=spec_info, batch_size=3, out_cache_loc="places")
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(3, HEADS * DIM, generator=generator)
    return own.forward_decode(q, "k", "v", layer, forward_batch, **options), pool


@pytest.mark.parametrize("window", [-1, 4])
def test_a_decode_step_of_sglang(window, sglang_backend):
    sinks = torch.randn(HEADS)
    result, pool = step(sglang_backend[0], sglang_layer(sliding_window_size=window), sinks=sinks)
    assert pool.written == [("places", "k", "v")]
    q = torch.randn(3, HEADS * DIM, generator=torch.Generator().manual_seed(2))
    wanted = expected(q.view(3, 1, HEADS, DIM), window_size=(window, -1), sinks=sinks)
    torch.testing.assert_close(result, wanted.view(3, -1))


@pytest.mark.parametrize(
    ("layer", "options"),
    [
        ({}, {"score_mod": "relative"}),
        ({}, {"return_lse": True}),
        ({}, {"spec_info": "drafts"}),
        ({"is_cross_attention": True}, {}),
        ({"head_dim": 320}, {}),
    ],
)
def test_other_steps_are_flash_attentions(layer, options, sglang_backend):
    result, pool = step(sglang_backend[0], sglang_layer(**layer), **options)
    assert result == FROM_FLASH_ATTENTION
    assert pool.written == []


def test_sglang_has_lean_among_its_choices(sglang_backend):
    sglang.register()
    sglang.register()
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    assert ATTENTION_BACKEND_CHOICES.count("lean") == 1
    assert isinstance(ATTENTION_BACKENDS["lean"](Pool()), sglang_backend[0].LeanBackend)


@pytest.mark.parametrize(
    ("group", "register"),
    [("vllm.general_plugins", vllm.register), ("sglang.srt.plugins", sglang.register)],
)
def test_servers_find_the_plugins(group, register):
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    module, name = project["entry-points"][group]["leanbench"].split(":")
    assert getattr(importlib.import_module(module), name) is register


STAND_INS: dict[str, Callable[[], dict[str, ModuleType]]] = {
    BACKENDS[0]: vllm_modules,
    BACKENDS[1]: sglang_modules,
}
#: Methods of the servers' classes that the backends replace.
REPLACED = {
    BACKENDS[0]: {
        *("get_name", "get_impl_cls", "get_builder_cls", "build", "forward"),
        "build_for_cudagraph_capture",
    },
    BACKENDS[1]: {"forward_decode"},
}
#: What the backends call metadata, and the class of it.
VLLM = "vllm.v1.attention.backend"
METADATA = {
    BACKENDS[0]: {
        "attn_metadata": (f"{VLLM}s.flash_attn", "FlashAttentionMetadata"),
        "common_attn_metadata": (VLLM, "CommonAttentionMetadata"),
    },
    BACKENDS[1]: {
        "metadata forward_metadata": (
            "sglang.srt.layers.attention.flashattention_backend",
            "FlashAttentionMetadata",
        )
    },
}


def skip_without(name: str) -> None:
    server = "vllm" if name == BACKENDS[0] else "sglang"
    if importlib.util.find_spec(server) is None:
        pytest.skip(f"{server} is not installed: its stand-ins are compared with nothing")


@pytest.fixture(params=[(name, of) for name in BACKENDS for of in ("stand-ins", "installed")])
def made(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A backend's module, made from stand-ins or from the installed server."""
    name, of = request.param
    if of == "installed":
        skip_without(name)
        yield importlib.import_module(name)
        return
    for module, _ in backend(name, STAND_INS[name](), monkeypatch):
        yield module


def replaced_by(made: ModuleType) -> Iterator[tuple[str, Callable[..., Any], Callable[..., Any]]]:
    """Methods of the server that a backend replaces: name, the backend's, the server's."""
    for own in vars(made).values():
        if isinstance(own, type) and own.__module__ == made.__name__:
            yield from overridden(own)


@pytest.mark.parametrize(
    ("own", "found"),
    [
        (lambda q, k, scale=1, *, out=None: 0, []),
        (lambda q, k, *, scale=1, **options: 0, []),
        (lambda q, k, scale=1: 0, ["does not take out"]),
        (lambda k, q, scale=1, out=None: 0, ["has k in the place of q", "has q in the place of k"]),
        (lambda q, k, scale, out=None: 0, ["needs scale"]),
        (lambda q, k, scale, out, more: 0, ["needs scale", "needs out", "needs more"]),
    ],
)
def test_calls_that_a_method_does_not_take_are_found(own, found):
    def base(q: Any, k: Any, scale: float = 1, *, out: Any = None) -> None: ...

    assert faults(own, base) == found


def test_methods_take_what_those_that_they_replace_take(made):
    found = {name: faults(own, base) for name, own, base in replaced_by(made)}
    assert found == {name: [] for name in REPLACED[made.__name__]}
    assert getattr(made.LeanBackend, "__abstractmethods__", frozenset()) == frozenset()


def test_fields_that_are_read_are_the_metadatas(made):
    for variables, (module, class_name) in METADATA[made.__name__].items():
        metadata = getattr(importlib.import_module(module), class_name)
        read = fields_read(made, *variables.split())
        assert len(read) > 0
        assert read - {field.name for field in fields(metadata)} == set()


@pytest.mark.parametrize("name", BACKENDS)
def test_stand_ins_are_as_the_installed_server(name):
    skip_without(name)
    for module, stub in STAND_INS[name]().items():
        for class_name, own in vars(stub).items():
            if class_name.startswith("__"):
                continue
            real = getattr(importlib.import_module(module), class_name)
            if inspect.isfunction(own):
                assert (class_name, faults(real, own)) == (class_name, [])
            elif is_dataclass(own):
                assert {one.name for one in fields(own)} <= {one.name for one in fields(real)}
            elif isinstance(own, type):
                for method, stands_in in methods(own).items():
                    of_real = getattr(real, method)
                    found = faults(of_real, stands_in)
                    if method in REPLACED[name]:
                        found += faults(stands_in, of_real)
                    assert (class_name, method, found) == (class_name, method, [])


def test_an_installed_vllm_leaves_writes_to_the_backend():
    skip_without(BACKENDS[0])
    made = importlib.import_module(BACKENDS[0])
    assert made.FlashAttentionBackend.forward_includes_kv_cache_update is False
    assert made.LeanBackend.forward_includes_kv_cache_update is True


def test_an_installed_vllm_names_its_ranges_of_images_as_the_backend_does():
    skip_without(BACKENDS[0])
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadata

    names = {one.name for one in fields(FlashAttentionMetadata)}
    made = importlib.import_module(BACKENDS[0])
    of_ranges = {name for name in names if name.startswith("mm_prefix")}
    assert len(of_ranges) == 1
    assert of_ranges <= set(made.MM_PREFIX_FIELDS)


@pytest.mark.gpu
def test_an_installed_vllm_and_the_kernel_write_the_same():
    """Also in a graph that was captured with other lengths. Its last row pads it."""
    skip_without(BACKENDS[0])
    made = importlib.import_module(BACKENDS[0])
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    impl = made.LeanImpl(32, 128, 128**-0.5, 8, None, None, "auto")
    shape_of = getattr(made.FlashAttentionBackend, "get_kv_cache_shape", None)
    cache = random(*((64, 8, 16, 256) if shape_of is None else shape_of(64, 16, 8, 128)))
    q, k, v = random(4, 48, 128).split((32, 8, 8), dim=1)
    table = (1 + torch.randperm(63, device="cuda", generator=generator)[:48]).int().view(4, 12)
    table[3] = 0
    lengths = torch.tensor([1, 1, 1, 0], dtype=torch.int32, device="cuda")
    starts = torch.arange(5, dtype=torch.int32, device="cuda")
    slots = torch.full((4,), -1, dtype=torch.int64, device="cuda")
    layer = SimpleNamespace(_k_scale=torch.ones((), device="cuda"))
    layer._v_scale = layer._q_scale = layer._k_scale

    def step(may_append: bool, of: torch.Tensor) -> torch.Tensor:
        sizes = {"num_actual_tokens": 4, "query_start_loc": starts, "seq_lens": lengths}
        pages = {"block_table": table, "slot_mapping": slots}
        metadata = batch(may_append=may_append, **sizes, **pages)
        output = torch.zeros_like(q)
        for _ in range(2):  # layers
            impl.forward(layer, q, k, v, of, metadata, output)
        return output

    appended = cache.clone()
    step(True, appended)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = step(True, appended)
    appended.copy_(cache)
    lengths.copy_(torch.tensor([33, 192, 80, 0]))
    last = (lengths[:3] - 1).long()
    rows = torch.arange(3, device="cuda")
    slots[:3] = table[rows, last // 16].long() * 16 + last % 16
    graph.replay()
    wanted = step(False, cache)
    torch.testing.assert_close(appended[1:], cache[1:], rtol=0, atol=0)
    torch.testing.assert_close(output[:3], wanted[:3], rtol=2e-2, atol=2e-3)
