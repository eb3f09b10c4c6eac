"""Launch settings: what each field takes, what goes together, how they are written and read."""

import json
from dataclasses import replace
from typing import Any

import pytest
from config_examples import FLASH_DECODING
from leanbench.kernels.fa2.configs import Fa2CudaConfig, Fa2TritonConfig
from leanbench.kernels.lean.configs import LEAN_CONFIGS, LeanCudaConfig, LeanTritonConfig

from leanbench.core.config import KernelConfig, limits, read_config, required
from leanbench.core.errors import UserError
from leanbench.core.registry import kernels

TRITON = LeanTritonConfig(128, 4, 3, 2, 1, False)
CUDA = LeanCudaConfig(
    128, 4, 2, 1, 1, True, chunk_tokens=32, tile_rows=8, cluster_size=2, copy="bulk"
)

FA2_CUDA = Fa2CudaConfig(128, 4, 3, ctas_per_sm=1, chunk_tokens=64, tile_rows=8, copy="bulk")


def types_with(config: KernelConfig) -> tuple[type[KernelConfig], ...]:
    """The classes of the kernel that a config is of."""
    of_kernels = (kernels()[name].config_types for name in ("lean", "fa2", "fixed_split"))
    return next(types for types in of_kernels if type(config) in types)


def values_of(text: str) -> dict[str, Any]:
    """Read settings as they are written in flags."""
    words = dict(pair.split("=") for pair in text.split())
    switches = {"true": True, "false": False}
    return {
        name: switches.get(word, int(word) if word.isdigit() else word)
        for name, word in words.items()
    }


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (Fa2TritonConfig(64, 4, 3), "triton 64 4 3"),
        (FA2_CUDA, "cuda 128 4 3 chunk_tokens=64 tile_rows=8 copy=bulk ctas_per_sm=1"),
        (TRITON, "triton 128 4 3 ctas_per_sm=2 min_tiles_per_cta=1 align_grid=false"),
        (
            CUDA,
            "cuda 128 4 2 ctas_per_sm=1 min_tiles_per_cta=1 align_grid=true chunk_tokens=32"
            " tile_rows=8 cluster_size=2 copy=bulk",
        ),
    ],
    ids=["fa2 in Triton", "fa2 in CUDA", "triton", "cuda"],
)
def test_what_is_written_is_read_again(config, text):
    words = text.split()
    first = ("implementation", "tile_tokens", "num_warps", "num_stages")
    values = values_of(" ".join([*map("{}={}".format, first, words), *words[len(first) :]]))
    assert config.to_dict() == values
    types = types_with(config)
    assert read_config(types, json.loads(json.dumps(values))) == config
    # Settings that one implementation alone has say which.
    del values["implementation"]
    assert read_config(types, values) == config


def test_optional_settings_are_written_where_they_are_used():
    assert replace(TRITON, fixed_run_tiles=8).to_dict()["fixed_run_tiles"] == 8
    assert "fixed_run_tiles" not in required(LeanTritonConfig)
    assert (
        list(limits(LeanTritonConfig))[:4] == "tile_tokens num_warps num_stages ctas_per_sm".split()
    )
    assert (Fa2TritonConfig(64, 4, 3).ctas_per_sm, TRITON.ctas_per_sm) == (1, 2)


@pytest.mark.parametrize(
    ("of", "changes", "sentence"),
    [
        # It compiled, and counted the tokens of a chunk that two LeanTiles share twice.
        (CUDA, {"chunk_tokens": 48}, "chunk_tokens 48 is not a power of two from 16 to 128"),
        (CUDA, {"chunk_tokens": 64, "tile_tokens": 32}, "chunk_tokens 64 is more than tile_tok"),
        (CUDA, {"tile_tokens": 96}, "tile_tokens 96 is not a power of two from 16 to 1024"),
        (CUDA, {"tile_rows": 256}, "tile_rows 256 is not a power of two from 8 to 128"),
        (CUDA, {"cluster_size": 16}, "cluster_size 16 is not a whole number from 1 to 8"),
        (CUDA, {"copy": "tma"}, "copy 'tma' is not bulk or async"),
        (CUDA, {"fixed_run_tiles": 3}, "fixed_run_tiles 3 is not a power of two"),
        (TRITON, {"num_warps": 3}, "num_warps 3 is not a power of two from 1 to 32"),
        (TRITON, {"num_stages": 0}, "num_stages 0 is not a whole number from 1 to 10"),
        (TRITON, {"align_grid": 1}, "align_grid 1 is not true or false"),
        (TRITON, {"ctas_per_sm": True}, "ctas_per_sm True is not a whole number from 1 to 32"),
        (TRITON, {"ctas_per_sm": 2.0}, "ctas_per_sm 2.0 is not a whole number from 1 to 32"),
        (TRITON, {"fixed_run_tiles": -1}, "fixed_run_tiles -1 is not a whole number from 1 to"),
        (TRITON, {"num_warps": 16, "ctas_per_sm": 8}, "num_warps 16 times ctas_per_sm 8 is 128"),
        (FA2_CUDA, {"tile_rows": 64}, "tile_rows 64 is of warpgroups, which"),
        (FA2_CUDA, {"ctas_per_sm": 32}, "num_warps 4 times ctas_per_sm 32 is 128, an SM holds 64"),
        (FLASH_DECODING, {"splits": 0}, "splits 0 is not a whole number from 1 to 65536"),
        (FLASH_DECODING, {"chunk_tokens": 128, "tile_tokens": 64}, "chunk_tokens 128 is more than"),
    ],
)
def test_no_config_exists_that_cannot_be_launched(of, changes, sentence):
    with pytest.raises(UserError) as caught:
        replace(of, **changes)
    assert str(caught.value).startswith(sentence)
    with pytest.raises(UserError) as caught:
        read_config(types_with(of), {**of.to_dict(), **changes})
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"implementation": "ptx"}, "implementation 'ptx' is not triton or cuda"),
        ({"implementation": []}, "implementation [] is not triton or cuda"),
        ({"implementation": None, "tile_token": 64}, "there is no setting 'tile_token', did"),
        ({"implementation": None, "chunk_tokens": 64}, "implementation must be given as well"),
        ({"tile_token": 64}, "there is no setting 'tile_token', did you mean 'tile_tokens'?"),
        ({"copy": "bulk"}, "there is no setting 'copy', "),
    ],
)
def test_what_is_no_config_is_one_sentence(values, sentence):
    with pytest.raises(UserError) as caught:
        read_config(LEAN_CONFIGS, {**TRITON.to_dict(), **values})
    assert str(caught.value).startswith(sentence)
    missing: dict[str, Any] = {"implementation": "triton", "tile_tokens": 64, "num_warps": 4}
    with pytest.raises(UserError, match=r"^num_stages, ctas_per_sm, min_tiles_per_cta, align_grid"):
        read_config(LEAN_CONFIGS, missing)


def test_every_kernel_with_settings_says_of_which_class():
    with_settings = {name for name, registered in kernels().items() if registered.config_types}
    own = {kernel for kernel in kernels() if kernel.startswith(("lean", "fa2", "fixed_split"))}
    others = {"flash_decoding", "flash_attn_3", "unified_max", "ring_attention", "cudnn_best"}
    assert with_settings >= own | others
    assert not with_settings & {"reference", "cudnn", "torch_flash"}
    for name in with_settings:
        assert all(issubclass(of, KernelConfig) for of in kernels()[name].config_types)
    for family in ("lean", "fa2", "fixed_split"):
        names = (family, f"{family}_triton", f"{family}_cuda")
        assert [kernels()[name].implementation for name in names] == [None, "triton", "cuda"]
