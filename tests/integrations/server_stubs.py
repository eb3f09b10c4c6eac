"""Stand-ins of vLLM 0.25.0 and 0.33.0 and SGLang 0.5.23, with the behaviour plugins use."""

import enum
from abc import ABC, abstractmethod
from copy import copy
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

FROM_FLASH_ATTENTION = "computed by the server's FlashAttention"


@dataclass
class VllmMetadata:
    """FlashAttentionMetadata of vLLM: the fields of both versions."""

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: Any
    seq_lens: Any
    block_table: Any
    slot_mapping: Any = None
    causal: Any = True
    rswa_prefix_lens: Any = None


@dataclass
class VllmCommonMetadata:
    """CommonAttentionMetadata of vLLM."""

    max_query_len: int


@dataclass
class SglangMetadata:
    """FlashAttentionMetadata of SGLang."""

    cache_seqlens_int32: Any = None
    max_seq_len_q: int = 1
    page_table: Any = None
    swa_page_table: Any = None
    pa_swa_page_table: Any = None
    swa_out_cache_loc: Any = None


def modules_of(names: dict[str, dict[str, Any]]) -> dict[str, ModuleType]:
    """Modules by name with these contents, and the packages above them."""
    modules: dict[str, ModuleType] = {}
    for name, contents in names.items():
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            path = ".".join(parts[:depth])
            module = modules.setdefault(path, ModuleType(path))
            module.__path__ = []
        vars(modules[name]).update(contents)
    return modules


def named(*contents: Any) -> dict[str, Any]:
    return {own.__name__: own for own in contents}


def vllm_modules() -> dict[str, ModuleType]:
    overrides: dict[Any, str] = {}

    class AttentionBackendEnum(enum.Enum):
        FLASH_ATTN = "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend"
        CUSTOM = None

        def is_overridden(self) -> bool:
            return self in overrides

        def get_path(self) -> Any:
            return overrides.get(self, self.value)

    def register_backend(backend: AttentionBackendEnum, class_path: str) -> None:
        overrides[backend] = class_path

    class AttentionType(enum.StrEnum):
        DECODER = "decoder"
        ENCODER_ONLY = "encoder_only"

    class AttentionCGSupport(enum.Enum):
        ALWAYS = 3
        UNIFORM_BATCH = 2

    class AttentionBackend(ABC):
        @staticmethod
        @abstractmethod
        def get_name() -> str: ...

        @staticmethod
        @abstractmethod
        def get_impl_cls() -> type: ...

        @staticmethod
        @abstractmethod
        def get_builder_cls() -> type: ...

    class FlashAttentionBackend(AttentionBackend):
        forward_includes_kv_cache_update = False

        @staticmethod
        def get_name() -> str:
            return "FLASH_ATTN"

    class FullAttentionSpec:
        pass

    class SlidingWindowSpec(FullAttentionSpec):
        pass

    class AttentionLayerBase(ABC):
        @abstractmethod
        def get_kv_cache_spec(self, vllm_config: Any) -> Any: ...

    def get_layers_from_vllm_config(
        vllm_config: Any, layer_type: type, layer_names: Any = None
    ) -> dict[str, Any]:
        layers = vllm_config.compilation_config.static_forward_context
        return {name: one for name, one in layers.items() if isinstance(one, layer_type)}

    class FlashAttentionMetadataBuilder:
        _cudagraph_support = AttentionCGSupport.ALWAYS

        @classmethod
        def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
            return cls._cudagraph_support

        def __init__(
            self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any
        ) -> None:
            self.vllm_config = vllm_config

        def build(
            self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
        ) -> Any:
            metadata = copy(common_attn_metadata)
            metadata.built = common_prefix_len, fast_build
            return metadata

        def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
            return self.build(0, common_attn_metadata)

    class FlashAttentionImpl:
        def __init__(
            self,
            num_heads: int,
            head_size: int,
            scale: float,
            num_kv_heads: int,
            alibi_slopes: Any,
            sliding_window: int | None,
            kv_cache_dtype: str,
            logits_soft_cap: float | None = None,
            attn_type: AttentionType = AttentionType.DECODER,
            kv_sharing_target_layer_name: str | None = None,
            sinks: Any = None,
        ) -> None:
            self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
            self.num_kv_heads, self.alibi_slopes = num_kv_heads, alibi_slopes
            self.sliding_window = (-1, -1) if sliding_window is None else (sliding_window - 1, 0)
            self.kv_cache_dtype, self.logits_soft_cap = kv_cache_dtype, logits_soft_cap or 0
            self.attn_type, self.sinks = attn_type, sinks
            self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
            self.written: list[Any] = []
            self.dcp_world_size, self.batch_invariant_enabled = 1, False

        def forward(
            self,
            layer: Any,
            query: Any,
            key: Any,
            value: Any,
            kv_cache: Any,
            attn_metadata: Any,
            output: Any,
            output_scale: Any = None,
            output_block_scale: Any = None,
        ) -> Any:
            return FROM_FLASH_ATTENTION

        def do_kv_cache_update(
            self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any
        ) -> None:
            self.written.append((key, value, slot_mapping))

    return modules_of(
        {
            "vllm.config": named(get_layers_from_vllm_config),
            "vllm.model_executor.layers.attention_layer_base": named(AttentionLayerBase),
            "vllm.v1.kv_cache_interface": named(FullAttentionSpec, SlidingWindowSpec),
            "vllm.v1.attention.backend": {
                **named(AttentionCGSupport, AttentionType),
                "CommonAttentionMetadata": VllmCommonMetadata,
            },
            "vllm.v1.attention.backends.registry": named(AttentionBackendEnum, register_backend),
            "vllm.v1.attention.backends.flash_attn": {
                "FlashAttentionMetadata": VllmMetadata,
                **named(FlashAttentionBackend, FlashAttentionImpl, FlashAttentionMetadataBuilder),
            },
        }
    )


def sglang_modules() -> dict[str, ModuleType]:
    backends: dict[str, Any] = {}
    choices = ["fa3", "flashinfer"]

    def register_attention_backend(name: str) -> Any:
        return lambda function: backends.setdefault(name, function)

    class AttentionType(enum.Enum):
        DECODER = "decoder"
        ENCODER_ONLY = "encoder_only"

    class KVWriteLoc:
        @classmethod
        def for_layer(
            cls, forward_batch: Any, layer: Any, *, swa_loc: Any = None, full_loc: Any = None
        ) -> Any:
            return forward_batch.out_cache_loc

    class FlashAttentionBackend:
        use_mla = kv_cache_is_mxfp8 = is_prefill_aware_swa = use_sliding_window_kv_pool = False
        local_attn_builder = None

        def __init__(self, model_runner: Any) -> None:
            self.token_to_kv_pool = model_runner

        def forward_decode(
            self,
            q: Any,
            k: Any,
            v: Any,
            layer: Any,
            forward_batch: Any,
            save_kv_cache: bool = True,
            q_rope: Any = None,
            k_rope: Any = None,
            sinks: Any = None,
            q_descale: Any = None,
            k_descale: Any = None,
            v_descale: Any = None,
            score_mod: Any = None,
            aux_tensors: Any = None,
            rel_bias: Any = None,
            rel_bias_event: Any = None,
            return_lse: bool = False,
        ) -> Any:
            return FROM_FLASH_ATTENTION

        def prepare_paged_mha_query(
            self,
            q: Any,
            q_rope: Any,
            k_rope: Any,
            layer: Any,
            *,
            logical_batch_size: int,
            kv_head_num: int,
            is_prefill: bool,
        ) -> tuple[Any, ...]:
            return q, q_rope, k_rope, None, None

        def get_paged_mha_kv_cache(self, layer: Any, *, head_group_num: int = 1) -> tuple[Any, Any]:
            return self.token_to_kv_pool.caches

    return modules_of(
        {
            "sglang.srt.arg_groups.choices": {
                "ATTENTION_BACKEND_CHOICES": choices,
                "add_attention_backend_choices": choices.extend,
            },
            "sglang.srt.layers.attention.attention_registry": {
                "ATTENTION_BACKENDS": backends,
                "register_attention_backend": register_attention_backend,
            },
            "sglang.srt.layers.attention.flashattention_backend": {
                "FlashAttentionBackend": FlashAttentionBackend,
                "FlashAttentionMetadata": SglangMetadata,
            },
            "sglang.srt.layers.radix_attention": {"AttentionType": AttentionType},
            "sglang.srt.mem_cache.memory_pool": {"KVWriteLoc": KVWriteLoc},
        }
    )


def sglang_layer(**changes: Any) -> SimpleNamespace:
    """Return a stub with the fields that a backend reads of SGLang's RadixAttention."""
    own: dict[str, Any] = {"tp_q_head_num": 4, "tp_k_head_num": 2, "head_dim": 8, "v_head_dim": 8}
    own |= {"scaling": 0.25, "logit_cap": 0.0, "sliding_window_size": -1}
    own |= {"is_cross_attention": False, "k_scale": None, "v_scale": None}
    return SimpleNamespace(**{**own, **changes})
