"""lean.cu, many_rows.cu and mla.cu on the CPU: compiled by g++ with cuda_on_cpu.cpp instead of a
GPU, and launched with the arguments of `launch_of`. Cases of lean.cu, and their check.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from depth import DEEP
from filelock import FileLock
from leanbench.kernels.lean import cuda
from leanbench.kernels.lean.configs import CudaConfig, LeanCudaConfig
from leanbench.kernels.lean.cuda import CudaLaunch, launch_of, misalignment
from leanbench.kernels.lean.cuda_build import ENTRY, MANY_ROWS_ENTRY, CudaBuild
from leanbench.kernels.lean.cuda_params import Params, aligned_params
from leanbench.kernels.lean.cuda_settings import cuda_config
from leanbench.kernels.mla import launch as mla_launch
from leanbench.kernels.mla.build import MlaBuild
from leanbench.kernels.mla.configs import MlaConfig
from leanbench.kernels.reference.torch import attend_all

from leanbench.check.poison import poison_unused
from leanbench.check.reference import Reference
from leanbench.core.inputs import AttentionInputs, make_inputs
from leanbench.core.paths import KERNELS
from leanbench.core.problem import AttentionProblem

COMPILER = shutil.which("g++")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs g++ to compile kernels")
_HERE = Path(__file__).parent
_SOURCES = {ENTRY: "lean.cu", MANY_ROWS_ENTRY: "many_rows.cu", MlaBuild.entry: "mla.cu"}
#: Name of shared memory in the sources, replaced by memory of each CTA.
_SHARED = {"lean.cu": "shared", "many_rows.cu": "shared", "mla.cu": "memory"}
#: Compiler flags. Launches are short, so fast compilation matters more than fast code.
_FLAGS = (
    *("-std=c++17", "-Og", "-fwrapv", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE"),
    *("-w", "-Wno-psabi", "-fPIC"),
)
#: Flags that make g++ report kernels' accesses through pointers to cuda_on_cpu.cpp.
_REPORTS = (
    "-fsanitize=kernel-address",
    *("--param", "asan-instrumentation-with-call-threshold=0"),
    *("--param", "asan-stack=0", "--param", "asan-globals=0", "--param", "asan-memintrin=0"),
)
#: Late copies, resident CTAs, seed of the order.
ORDERS = [
    (True, 1 << 20, 1),
    # The second cluster has to wait for the end of the first.
    (False, 0, 2),
    *((bool(seed % 2), 16 * (seed % 3), seed) for seed in range(4, 24 if DEEP else 4)),
]
#: Edit of a source: file, old text, new text.
Mutation = tuple[str, str, str]


@dataclass
class Cpu:
    """A fake GPU with a few SMs."""

    #: Edit of the sources of all launches.
    mutation: Mutation | None = None
    #: Value of __CUDA_ARCH__.
    architecture: int = 900
    _libraries: dict[CudaBuild | MlaBuild, ctypes.CDLL] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.mutation is not None:
            # Outside of the launch: there, any error would count as a detected mutation.
            name, old, new = self.mutation
            [path] = (path for family in ("lean", "mla") for path in (KERNELS / family).glob(name))
            replaced(path.read_text(encoding="utf-8"), old, new)

    def launch(
        self,
        inputs: AttentionInputs,
        config: CudaConfig | MlaConfig,
        sms: int,
        workspace: Workspace,
        most_ctas: int = 1 << 20,
        lazy: bool = True,
        seed: int = 0,
    ) -> CudaLaunch:
        """Launch the call.

        Args:
            sms: SMs of the GPU that determine the grid.
            most_ctas: number of resident CTAs.
            lazy: copies and warpgroups' products end as late as possible, not at once.
            seed: of the order in which warps take turns.

        Raises:
            AssertionError: the launch does not end, or does something that is an error on a GPU.
        """
        launch = launch_on(inputs, config, sms)
        build = launch.build
        if build not in self._libraries:
            self._libraries[build] = library_of(build, self.mutation, self.architecture)
        params = aligned_params()
        ctypes.pointer(params)[0] = launch.params
        params.v_map.words[0] = params.v
        workspace.lend(params, launch.slots_bytes)
        workspace.keep(params, launch)
        run = self._libraries[build].launch
        run.restype = ctypes.c_char_p
        failure = run(
            ctypes.byref(params), launch.grid, build.shared_bytes, most_ctas, int(lazy), seed
        )
        assert failure is None, failure.decode()
        return launch


def with_cut_table(inputs: AttentionInputs) -> AttentionInputs:
    """Return the call with a block table cut from a wider one, with invalid pages in the rest."""
    table = inputs.block_table
    if table is None:
        return inputs
    pages = table.shape[-1]
    wider = table.new_full((*table.shape[:-1], pages + 3), 1 << 30)
    wider[..., :pages] = table
    return replace(inputs, block_table=wider[..., :pages])


def with_queries(inputs: AttentionInputs, q_len: int) -> AttentionInputs:
    """Return the call with other query tokens, and causal."""
    batch, _, heads, head_dim = inputs.q.shape
    generator = torch.Generator().manual_seed(q_len)
    q = inputs.q.new_empty(batch, q_len, heads, head_dim).normal_(generator=generator)
    out = inputs.out.new_full((*q.shape[:-1], inputs.value_dim), torch.nan)
    return replace(
        inputs, q=6 * q, out=out, lse=out.new_full((batch, heads, q_len), torch.nan).float()
    )


class Workspace:
    """Slots that initially hold anything but the launch's partials; later, contents of past
    launches.
    """

    def __init__(self, epoch: int, replays: int = 0) -> None:
        self.epoch = epoch
        self.slots = torch.empty(0, dtype=torch.int32)
        self.replays = torch.tensor([replays], dtype=torch.int32)
        #: Work ranges of the last launch, and the keys of all.
        self.kept = torch.empty(0, dtype=torch.int32)
        self._keys: dict[tuple[CudaBuild, int, bytes], int] = {}

    def keep(self, params: Params, launch: CudaLaunch) -> None:
        params.kept_stride = launch.build.kept_stride(params.batch)
        numbers = launch.grid * params.kept_stride
        if self.kept.numel() < numbers:
            generator = torch.Generator().manual_seed(self.epoch)
            self.kept = torch.randint(-2, 4, (numbers,), generator=generator, dtype=torch.int32)
        shares = bytes(launch.params)[Params.context.offset : Params.qk_scale.offset]
        key = launch.build, launch.grid, shares
        params.kept_key = self._keys.setdefault(key, 1 + len(self._keys))
        params.kept = self.kept.data_ptr() if numbers else 0

    def lend(self, params: Params, slots_bytes: int) -> None:
        if 4 * self.slots.numel() < slots_bytes:
            # Zeros, NaN, and units of the previous and the next launch.
            words = torch.tensor([0, -1, self.epoch - 1, self.epoch + 1], dtype=torch.int32)
            generator = torch.Generator().manual_seed(self.epoch)
            self.slots = words[torch.randint(4, (slots_bytes // 4,), generator=generator)]
        params.partials, params.replays = self.slots.data_ptr(), self.replays.data_ptr()
        params.epoch = self.epoch - int(self.replays)
        self.epoch += 1


@dataclass(frozen=True)
class Case:
    """Calls of one build, each on a GPU with its number of SMs."""

    config: CudaConfig
    calls: tuple[tuple[AttentionProblem, int], ...]


def case(config: CudaConfig, *calls: tuple[AttentionProblem, int]) -> Case:
    return Case(config, calls)


def failure_of(
    cpu: Cpu,
    workspace: Workspace,
    problem: AttentionProblem,
    config: CudaConfig | MlaConfig,
    sms: int,
    seed: int,
    lazy: bool = True,
    score_scale: float = 6.0,
) -> str | None:
    """Return why a launch is wrong, with NaN in all memory that a call must not read, or None."""
    inputs = make_inputs(problem, "cpu", seed, score_scale=score_scale)
    if inputs.sinks is not None:
        # On the scale of scores: smaller ones would not matter.
        inputs.sinks.mul_(12)
    return failure_over(cpu, workspace, inputs, config, sms, seed, lazy)


def failure_over(
    cpu: Cpu,
    workspace: Workspace,
    inputs: AttentionInputs,
    config: CudaConfig | MlaConfig,
    sms: int,
    seed: int = 0,
    lazy: bool = True,
) -> str | None:
    """Return the same of a launch over these inputs."""
    inputs = with_cut_table(poison_unused(inputs))
    inputs.poison()
    try:
        cpu.launch(inputs, config, sms, workspace, lazy=lazy, seed=seed)
    except AssertionError as error:
        return str(error)
    dtype = "bf16" if inputs.out.dtype == torch.bfloat16 else "fp16"
    return Reference(inputs).check(inputs).failure(dtype)


def settings(
    chunk: int, warps: int, stages: int, ctas_per_sm: int, cluster: int, rows: int, copy: str, *,
    tiles: int = 1, align: bool = False,
) -> LeanCudaConfig:  # fmt: skip
    return cuda_config(chunk, warps, stages, ctas_per_sm, cluster, rows, copy, tiles, align)


def on_device(
    lengths: tuple[int, ...], heads: str, head_dim: int, capacity: int, **axes: Any
) -> AttentionProblem:
    """Return a problem with its lengths on the device.

    Args:
        heads: query heads and KV heads, as in "8/2".
    """
    q_heads, kv_heads = map(int, heads.split("/"))
    given = {"capacity": capacity, "lengths_on": "device", **axes}
    return AttentionProblem(len(lengths), q_heads, kv_heads, lengths, head_dim, **given)


def attend(cpu: Cpu, case: Case) -> None:
    """Make all calls of a case."""
    for problem, sms in case.calls:
        inputs = make_inputs(problem, "cpu", 1, score_scale=6.0)
        attend_over(cpu, with_cut_table(poison_unused(inputs)), case.config, sms)


def attend_over(cpu: Cpu, inputs: AttentionInputs, config: CudaConfig, sms: int) -> None:
    """Make a call in every order, on one workspace.

    Checks that results are right and have the same bits each time, and that caches have the
    appended tokens and are otherwise unchanged.
    """
    expected, reference, workspace = copied(inputs), Reference(inputs), Workspace(1000, replays=1)
    if inputs.k_new is not None:
        attend_all(expected)
    outputs = []
    for lazy, ctas, seed in ORDERS:
        call = copied(inputs)
        cpu.launch(call, config, sms, workspace, max(ctas, config.cluster_size), lazy, seed)
        dtype = "bf16" if call.out.dtype == torch.bfloat16 else "fp16"
        assert reference.check(call).failure(dtype) is None
        assert is_same(call.k_cache, expected.k_cache)
        assert is_same(call.v_cache, expected.v_cache)
        outputs.append(call.out)
    assert all(torch.equal(output, outputs[0]) for output in outputs)


def copied(inputs: AttentionInputs) -> AttentionInputs:
    """Return the same call with its own caches, and outputs of NaN."""
    # Clones keep the strides.
    own = {name: getattr(inputs, name).clone() for name in ("k_cache", "v_cache", "out", "lse")}
    call = replace(inputs, **own)
    call.poison()
    return call


def is_same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return True if all bits are equal, including NaN."""
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


def fixed(config: LeanCudaConfig) -> LeanCudaConfig:
    """Return the config with fixed runs of 128 to 512 tokens."""
    return replace(config, fixed_run_tiles=4)


def launch_on(inputs: AttentionInputs, config: CudaConfig | MlaConfig, sms: int) -> CudaLaunch:
    stand_ins: dict[str, Any] = {"tensor_map": tensor_map}
    if isinstance(config, MlaConfig):
        stand_ins["sm_count"] = lambda device: sms
        stand_ins["clusters_at_once"] = lambda build, device: sms // build.cluster
        with mock.patch.multiple(mla_launch, **stand_ins):
            return mla_launch.launch_of(inputs, config)
    stand_ins["refusal"] = misalignment
    stand_ins["clusters_at_once"] = lambda build, device: sms * build.ctas_per_sm
    with mock.patch.multiple(cuda, **stand_ins):
        return launch_of(inputs, config, sms)


def tensor_map(
    address: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    build: CudaBuild,
    box_tokens: int | None = None,
) -> tuple[int, ...]:
    """Return the tensor map words that ptx_on_cpu.hpp reads."""
    rows, tokens, heads, head_dim = shape
    row, token, head, one = strides
    each = build.heads_of_row
    sizes, steps = (head_dim * each, tokens, heads // each, rows), (one, token, head * each, row)
    box = (box_tokens or build.box, build.kv_bytes, build.column_bytes)
    return (address, *sizes, *steps, *box, *[0] * 4)


def library_of(build: CudaBuild | MlaBuild, mutation: Mutation | None, arch: int) -> ctypes.CDLL:
    """Return the shared object of a build, compiled by g++ once for all processes.

    Args:
        arch: value of __CUDA_ARCH__.
    """
    # The kernel's is the last.
    families = ("lean", "mla") if isinstance(build, MlaBuild) else ("lean",)
    defines = [f"-D{name}={value}" for name, value in build.source((9, 0)).defines]
    defines += [f"-DENTRY={build.entry}", f"-D__CUDA_ARCH__={arch}"]
    machine = _machine()
    words = "\n".join([*families, *defines, *(mutation or ())])
    library = machine / f"{hashlib.sha256(words.encode()).hexdigest()}.so"
    if not library.exists():
        assert COMPILER is not None
        sources = _sources(families, mutation)
        source = sources / families[-1] / _SOURCES[build.entry]
        part = library.with_suffix(f".{os.getpid()}")
        words = (*defines, f"-I{sources}", f"-I{machine}", "-include", "cuda_on_cpu.hpp")
        # Linked only with the machine, which depends on the same libraries.
        words = (*words, "-shared", "-nostdlib", "-o", part, "-x", "c++", source)
        words = (*words, "-x", "none", machine / "cuda_on_cpu.so")
        subprocess.run([COMPILER, *_FLAGS, *_REPORTS, *words], check=True)
        part.rename(library)
    return ctypes.CDLL(str(library))


@cache
def _sources(families: tuple[str, ...], mutation: Mutation | None) -> Path:
    """Create a folder with the sources of families, for g++."""
    folder = Path(tempfile.mkdtemp(dir=_machine()))
    for family in families:
        (folder / family).mkdir()
        for path in (KERNELS / family).glob("*.cu*"):
            text = path.read_text(encoding="utf-8")
            if mutation is not None and mutation[0] == path.name:
                text = replaced(text, mutation[1], mutation[2])
            if path.name in _SHARED:
                name = _SHARED[path.name]
                shared = f"extern __shared__ __align__(1024) unsigned char {name}[];"
                text = replaced(text, shared, f"unsigned char *const {name} = shared_memory();")
            (folder / family / path.name).write_text(text, encoding="utf-8")
    shutil.copy(_HERE / "ptx_on_cpu.hpp", folder / "lean" / "ptx.cuh")
    shutil.copy(_HERE / "wgmma_on_cpu.hpp", folder / "lean" / "wgmma.cuh")
    return folder


@cache
def _machine() -> Path:
    """Create a folder with the code common to all builds, compiled once for all processes.

    It has the header cuda_on_cpu.hpp, and cuda_on_cpu.cpp as an optimised shared object.
    """
    folder = Path(os.environ["LEANBENCH_CACHE"]) / "cuda-on-cpu"
    folder.mkdir(parents=True, exist_ok=True)
    header, whole = folder / "cuda_on_cpu.hpp", folder / "cuda_on_cpu.so"
    with FileLock(folder / "lock"):
        if not whole.exists():
            assert COMPILER is not None
            shutil.copy(_HERE / header.name, header)
            words = ("-x", "c++-header", "-o", f"{header}.gch", header)
            subprocess.run([COMPILER, *_FLAGS, *words], check=True)
            part = folder / "part.so"
            words = ("-O2", "-shared", "-o", part, _HERE / "cuda_on_cpu.cpp")
            subprocess.run([COMPILER, *_FLAGS, *words], check=True)
            part.rename(whole)
    return folder


def replaced(text: str, old: str, new: str) -> str:
    """Return the text with another line.

    Raises:
        ValueError: the old line does not occur exactly once. Not AssertionError, which tests of
            mutations expect.
    """
    if text.count(old) != 1:
        raise ValueError(f"{old!r} stands there {text.count(old)} times")
    return text.replace(old, new)
