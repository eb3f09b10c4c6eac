"""CUDA C++ compiled by the real NVRTC, and what is kept of it."""

from __future__ import annotations

import dataclasses
import pickle
import sys
import warnings
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from leanbench.compile import cubin, nvrtc
from leanbench.compile.nvrtc import CudaCompileError, CudaSource, compile_cuda
from leanbench.core import paths
from leanbench.core.errors import UserError

#: Multiplies VALUES numbers that a thread holds all at once, and turns a tile around in shared
#: memory.
TEXT = """
extern "C" __global__ void __launch_bounds__(THREADS) turn(const float *x, float *y) {
    __shared__ float tile[TILE];
    float values[VALUES];
    #pragma unroll
    for (int i = 0; i < VALUES; ++i)
        asm volatile("ld.global.f32 %0, [%1];"
                     : "=f"(values[i]) : "l"(x + i * THREADS + threadIdx.x));
    OWN_INSTRUCTION
    tile[threadIdx.x] = values[0];
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < VALUES; ++i)
        y[i * THREADS + threadIdx.x] = values[i] * values[(i + 1) % VALUES];
    y[threadIdx.x] += tile[TILE - 1 - threadIdx.x];
}
"""
#: What only this architecture has.
OWN = {
    (8, 0): "",
    (9, 0): 'asm volatile("wgmma.fence.sync.aligned;");',
    (10, 0): 'asm volatile("tcgen05.fence::before_thread_sync;");',
    (12, 0): "",
}


def source(threads=128, tile=1024, values=8, capability=(8, 0), own=""):
    defines = (("THREADS", threads), ("TILE", tile), ("VALUES", values))
    return CudaSource(TEXT.replace("OWN_INSTRUCTION", own), "turn", defines, capability)


def kept(folder: Path) -> list[Path]:
    """The files of the cache."""
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.fixture
def compiled(monkeypatch) -> list[CudaSource]:
    """The sources that NVRTC compiles."""
    compiled: list[CudaSource] = []
    real = nvrtc._compiled

    def counting(source: CudaSource, options: Any) -> bytes:
        compiled.append(source)
        return real(source, options)

    monkeypatch.setattr(nvrtc, "_compiled", counting)
    return compiled


@pytest.fixture(autouse=True)
def nothing_is_checked_yet():
    nvrtc.check_nvrtc.cache_clear()


@pytest.mark.parametrize("capability", list(OWN))
def test_resources_are_those_of_the_source(capability):
    own = OWN[capability]
    small = compile_cuda(source(capability=capability, own=own))
    large = compile_cuda(source(values=96, tile=2048, capability=capability, own=own))
    assert small.cubin.startswith(b"\x7fELF")
    assert (small.static_shared_bytes, large.static_shared_bytes) == (4096, 8192)
    assert (small.spilled_registers, large.spilled_registers) == (0, 0)
    assert 8 < small.registers_per_thread < 64
    assert 96 < large.registers_per_thread <= 255


@pytest.mark.parametrize("capability", list(OWN))
def test_what_the_registers_do_not_hold_is_spilled(capability):
    # A CTA of 1024 threads leaves 64 of the SM's 65536 registers to each.
    crowded = compile_cuda(source(threads=1024, values=96, capability=capability))
    assert crowded.registers_per_thread <= 64
    assert 96 - 64 <= crowded.spilled_registers <= 2 * 96


@pytest.mark.parametrize("capability", list(OWN))
def test_a_stack_without_spills_is_no_spill(capability):
    text = """
    extern "C" __global__ void turn(float *x, int at) {
        float local[32];
        for (int i = 0; i < 32; ++i) local[i] = x[i] * x[i];
        x[0] = local[at] + local[at + 1];
        printf("%d", at);
    }
    """
    binary = compile_cuda(CudaSource(text, "turn", (), capability))
    assert " 0 bytes stack frame" not in binary.log
    assert binary.spilled_registers == 0


@pytest.mark.parametrize("capability", list(OWN))
def test_shared_memory_that_the_launch_gives_is_not_counted(capability):
    text = """
    extern "C" __global__ void turn(float *x) {
        extern __shared__ float given[];
        given[threadIdx.x] = x[threadIdx.x];
        __syncthreads();
        x[threadIdx.x] = given[31 - threadIdx.x];
    }
    """
    assert compile_cuda(CudaSource(text, "turn", (), capability)).static_shared_bytes == 0
    none = CudaSource('extern "C" __global__ void turn() {}', "turn", (), capability)
    assert compile_cuda(none).static_shared_bytes == 0


@pytest.mark.parametrize(
    ("capability", "own", "error"),
    [
        ((8, 0), OWN[9, 0], "ptxas .*error.*wgmma"),
        ((8, 0), OWN[10, 0], "ptxas .*error.*tcgen05"),
        ((3, 5), "", "nvrtc: error: invalid value for --gpu-arch"),
    ],
)
def test_other_architectures_are_refused(capability, own, error):
    with pytest.raises(CudaCompileError, match=f"^turn does not compile: {error}"):
        compile_cuda(source(capability=capability, own=own))


def test_resources_are_those_of_the_named_kernel():
    text = """
    extern "C" __global__ void first(int *x) {
        __shared__ int s[64]; s[threadIdx.x] = *x; __syncthreads(); *x = s[7];
    }
    extern "C" __global__ void first_and_more(int *x) { *x = 1; }
    """
    assert compile_cuda(CudaSource(text, "first", (), (9, 0))).static_shared_bytes == 256
    assert compile_cuda(CudaSource(text, "first_and_more", (), (9, 0))).static_shared_bytes == 0
    second = compile_cuda(CudaSource(text, "second", (), (9, 0)))
    with pytest.raises(RuntimeError, match="no kernel 'second'"):
        assert second.static_shared_bytes == 0


def test_what_is_kept_is_not_compiled_again(tmp_path, compiled):
    warned = source(own="int unused;")
    first = compile_cuda(warned, tmp_path / "cuda")
    assert "warning #177-D" in first.log
    assert compile_cuda(warned, tmp_path / "cuda") == first
    assert compiled == [warned]
    assert len(kept(tmp_path / "cuda")) == 1


def test_the_folder_is_that_of_the_environment(tmp_path, monkeypatch, compiled):
    monkeypatch.setenv("LEANBENCH_CACHE", str(tmp_path))
    compile_cuda(source())
    assert len(kept(tmp_path / "cuda")) == 1
    monkeypatch.delenv("LEANBENCH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert paths.cache_folder() == tmp_path / "xdg" / "leanbench"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert paths.cache_folder() == tmp_path / "home" / ".cache" / "leanbench"


@pytest.mark.parametrize(
    "changed",
    [
        dataclasses.replace(source(), text=TEXT.replace("OWN_INSTRUCTION", "// another")),
        source(values=9),
        source(capability=(9, 0)),
        dataclasses.replace(
            source(),
            kernel="changed",
            text=TEXT.replace("turn", "changed").replace("OWN_INSTRUCTION", ""),
        ),
    ],
    ids=["text", "defines", "capability", "kernel"],
)
def test_whatever_changes_is_compiled(tmp_path, compiled, changed):
    for variant in (source(), changed, source(), changed):
        compile_cuda(variant, tmp_path)
    assert compiled == [source(), changed]


def test_another_option_compiles_again(tmp_path, monkeypatch, compiled):
    compile_cuda(source(), tmp_path)
    options = nvrtc._options(source())
    options.use_fast_math = True
    monkeypatch.setattr(nvrtc, "_options", lambda source: options)
    compile_cuda(source(), tmp_path)
    assert len(compiled) == len(kept(tmp_path)) == 2


def test_a_header_that_changes_is_compiled(tmp_path, compiled):
    headers = tmp_path / "headers"
    headers.mkdir()
    text = '#include "size.cuh"\nextern "C" __global__ void turn(int *x) { __shared__ int s[SIZE];'
    text += " s[threadIdx.x] = *x; __syncthreads(); *x = s[7]; }"
    including = CudaSource(text, "turn", (), (9, 0), headers)
    for size in (64, 128, 64):
        (headers / "size.cuh").write_text(f"#define SIZE {size}\n")
        assert compile_cuda(including, tmp_path / "cuda").static_shared_bytes == 4 * size
    assert compiled == [including, including]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "truncated": lambda content: content[:-100],
    "no cubin": lambda content: content[: content.index(b"\x7fELF")],
    "checksum": lambda content: bytes(32) + content[32:],
    "cubin": lambda content: content[:-1] + bytes([content[-1] ^ 1]),
    "other": lambda content: b"\xff\xfe not ours",
}


@pytest.mark.parametrize("damage", list(DAMAGES))
def test_a_damaged_file_is_compiled_again_and_replaced(tmp_path, compiled, damage):
    first = compile_cuda(source(), tmp_path)
    (file,) = kept(tmp_path)
    whole = file.read_bytes()
    file.write_bytes(DAMAGES[damage](whole))
    assert file.read_bytes() != whole
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compile_cuda(source(), tmp_path) == first
    assert len(compiled) == 2
    assert file.read_bytes() == whole
    assert kept(tmp_path) == [file]


def test_a_folder_that_cannot_be_written_is_one_warning(tmp_path, compiled):
    (tmp_path / "file").write_text("in the way")
    folder = tmp_path / "file" / "cuda"
    with pytest.warns(UserWarning, match="are not kept") as warned:
        first = compile_cuda(source(), folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compile_cuda(source(), folder) == first
    assert [str(warning.message) for warning in warned] == [
        f"compiled CUDA kernels are not kept, {folder} cannot be written (Not a directory): "
        "choose a writable folder in LEANBENCH_CACHE"
    ]
    assert warned[0].filename == __file__
    assert len(compiled) == 2


def test_a_compile_error_says_the_first_error_and_carries_the_log(tmp_path):
    text = (
        'extern "C" __global__ void turn(int *x) {\n    int unused;\n    *x = nowhere;\n    *x ='
        " nothing;\n}\n"
    )
    with pytest.raises(CudaCompileError) as caught:
        compile_cuda(CudaSource(text, "turn", (), (9, 0)), tmp_path)
    assert (
        str(caught.value)
        == 'turn does not compile: turn.cu(3): error: identifier "nowhere" is undefined'
    )
    assert 'identifier "nothing" is undefined' in caught.value.log
    assert "\0" not in caught.value.log
    assert kept(tmp_path) == []
    # It comes back from a process that compiles.
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.log) == (str(caught.value), caught.value.log)


def fails(error: Exception) -> Any:
    def fail(*names: str) -> None:
        raise error

    return fail


def missing_library() -> Exception:
    from cuda.pathfinder import DynamicLibNotFoundError

    return DynamicLibNotFoundError("no libnvrtc.so.13\nhere\nthere")


@pytest.mark.parametrize(
    ("missing", "reason"),
    [
        ("bindings", "import of cuda.bindings halted; None in sys.modules"),
        ("core", "No package metadata was found for cuda-core"),
        ("old core", "cuda-core is 0.7.0"),
        ("library", "no libnvrtc.so.13"),
    ],
)
def test_a_missing_part_is_named(tmp_path, monkeypatch, missing, reason):
    from cuda.bindings import nvrtc as library  # pyright: ignore[reportAttributeAccessIssue]

    if missing == "bindings":
        monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    elif missing == "library":
        monkeypatch.setattr(library, "nvrtcVersion", fails(missing_library()))
    elif missing == "core":
        monkeypatch.setattr(nvrtc, "version", fails(PackageNotFoundError("cuda-core")))
    else:
        monkeypatch.setattr(nvrtc, "version", lambda name: "0.7.0")
    with pytest.raises(UserError) as caught:
        compile_cuda(source(), tmp_path)
    assert f"cannot be loaded ({reason}): pip install 'cuda-core>=1.0'" in str(caught.value)


@pytest.fixture
def without_triton(monkeypatch):
    monkeypatch.setattr(cubin, "find_spec", lambda name: None)
    cubin._cuobjdump.cache_clear()
    yield
    cubin._cuobjdump.cache_clear()


def test_without_triton_the_toolkits_cuobjdump_reads_the_cubin(
    tmp_path, monkeypatch, without_triton
):
    tool = tmp_path / "cuobjdump"
    tool.write_text(
        "#!/bin/sh\nprintf ' Function turn:\\n  REG:77 STACK:8 SHARED:1040 LOCAL:0\\n'\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert cubin.cubin_resources(b"", "turn") == cubin.CubinResources(77, 2)


def test_no_cuobjdump_is_one_sentence(tmp_path, monkeypatch, without_triton):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        UserError, match=r"^cuobjdump is found neither in Triton nor on PATH: pip install triton$"
    ):
        cubin.cubin_resources(b"", "turn")
