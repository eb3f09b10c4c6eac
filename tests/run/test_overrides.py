"""Launch settings that a person gives."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from leanbench.kernels.fa2.configs import Fa2TritonConfig
from leanbench.kernels.fixed_split.configs import FixedSplitTritonConfig
from leanbench.kernels.lean.configs import LeanTritonConfig

from leanbench.core.errors import UserError
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernels
from leanbench.gpu.catalogue import find
from leanbench.run.overrides import check_overrides, override_text, parse_override, parse_overrides

LEAN = (
    "lean:implementation=triton,tile_tokens=128,num_warps=4,num_stages=3,"
    "ctas_per_sm=2,min_tiles_per_cta=1,align_grid=false"
)
CUDA = (
    "lean_cuda:tile_tokens=128,num_warps=4,num_stages=2,ctas_per_sm=1,min_tiles_per_cta=1,"
    "align_grid=true,chunk_tokens=32,tile_rows=8,cluster_size=2,copy=bulk"
)
FA2 = "fa2_triton:tile_tokens=64,num_warps=4,num_stages=3"
SPLIT = "fixed_split_triton:tile_tokens=64,num_warps=4,num_stages=3,splits=8"


def test_kernels_have_settings_in_any_order_and_form():
    assert parse_overrides([LEAN, FA2, SPLIT]) == {
        "lean": LeanTritonConfig(128, 4, 3, 2, 1, False),
        "fa2_triton": Fa2TritonConfig(64, 4, 3),
        "fixed_split_triton": FixedSplitTritonConfig(64, 4, 3, splits=8),
    }
    own = ("fa2", Fa2TritonConfig(64, 4, 3))
    assert parse_override(" fa2 : num_stages = 3, tile_tokens=64 ,num_warps=4") == own
    for word, value in (("YES", True), ("true", True), ("No", False)):
        config: Any = parse_override(LEAN.replace("false", word))[1]
        assert config.align_grid is value
    config: Any = parse_override(LEAN.replace("lean:", "lean_batch_invariant:"))[1]
    assert config.fixed_run_tiles == 0
    config = parse_override(LEAN.replace("lean:", "lean_batch_invariant:fixed_run_tiles=8,"))[1]
    assert config.fixed_run_tiles == 8


@given(
    st.builds(
        LeanTritonConfig,
        st.sampled_from([16, 64, 1024]),
        st.sampled_from([1, 2, 32]),
        st.integers(1, 10),
        st.integers(1, 2),
        st.integers(1, 2**20),
        st.booleans(),
    )
)
def test_what_is_written_is_read_again(config):
    assert parse_override(override_text("lean", config)) == ("lean", config)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lean", "config 'lean' is invalid: write KERNEL:FIELD=VALUE,..."),
        ("laen:tile_tokens=64", "there is no kernel 'laen', did you mean 'lean'?"),
        ("reference:tile_tokens=64", "reference has no launch settings, leave it out"),
        ("fa2_triton:", "'' is not FIELD=VALUE, write for example fa2_triton:implementation=trito"),
        ("fa2_triton:tile_tokens", "'tile_tokens' is not FIELD=VALUE"),
        ("fa2_triton:tile_tokens=", "'tile_tokens=' is not FIELD=VALUE"),
        (f"{FA2},", "'' is not FIELD=VALUE"),
        ("fa2_triton:tile_tokens=64;num_warps=4", "tile_tokens '64;num_warps=4' is not a power of"),
        ("fa2_triton:tile_tokens=64", "num_warps, num_stages must be given as well, as in fa2_tri"),
        ("fa2_triton:tile_token=64", "there is no setting 'tile_token', did you mean 'tile_tokens"),
        ("lean:tile_tokens=64", "implementation must be given as well, triton or cuda, as in lean"),
        ("lean:implementation=ptx", "implementation 'ptx' is not triton or cuda"),
        ("lean:implementation=cuda,tile_tokens=128", ", as in lean:implementation=cuda,"),
        ("lean:implementation=triton,num_warps=4", ", as in lean:implementation=triton,"),
        ("fa2_triton:implementation=cuda", "implementation 'cuda' is not triton"),
        ("lean_mla:implementation=cuda", "there is no setting 'implementation', the kernel has on"),
        (CUDA.replace("copy=bulk", "copy=slow"), "copy 'slow' is not bulk or async"),
        ("fa2_triton:splits=4", "there is no setting 'splits', known: num_stages, num_warps, tile"),
        (f"{FA2},num_warps=8", "num_warps is given twice, leave one of them out"),
        (SPLIT.replace(",splits=8", ""), "splits must be given as well, as in fixed_split_triton:"),
        ("lean_triton:tile_tokens=64,num_warps=4,num_stages=3", "ctas_per_sm, min_tiles_per_cta, "),
        (FA2.replace("64", "96"), "tile_tokens 96 is not a power of two from 16 to 1024"),
        (FA2.replace("num_warps=4", "num_warps=four"), "num_warps 'four' is not a power of two fr"),
        (FA2.replace("num_stages=3", "num_stages=-1"), "num_stages '-1' is not a whole number fro"),
        (LEAN.replace("false", "1"), "align_grid '1' is not true or false"),
        (SPLIT.replace("8", "99999999999"), "splits '99999999999' is not a whole number from 1 to"),
    ],
)
def test_bad_input_is_one_sentence(text, words):
    with pytest.raises(UserError) as caught:
        parse_override(text)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_kernel_is_given_settings_once_and_must_run():
    with pytest.raises(UserError, match="lean already has settings, give one config per kernel"):
        parse_overrides([LEAN, FA2, LEAN])
    overrides = parse_overrides([LEAN, FA2])
    check_overrides(overrides, ["fa2_triton", "lean"])
    with pytest.raises(UserError, match=r"num_stages=3' is for a kernel that is not among"):
        check_overrides(overrides, ["lean"])


@pytest.mark.parametrize("gpu", ["a100-80gb", "h200"])
def test_every_kernels_own_settings_are_read_again(gpu):
    """The report's commands contain them."""
    problem = AttentionProblem(4, 32, 8, 8192, 128)
    for registered in kernels().values():
        config = registered.default_config(problem, find(gpu))
        if config is not None:
            own = (registered.name, config)
            assert parse_override(override_text(*own)) == own
