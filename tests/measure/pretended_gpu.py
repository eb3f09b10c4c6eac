"""A fake GPU for `leanbench.measure.protocol`: inputs and kernels are real, times are scripted."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from leanbench.core.config import TileConfig
from leanbench.core.decomposition import Schedule, TileGrid, one_cta_per_tile
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.inputs import AttentionInputs, make_windows
from leanbench.core.kernel import Kernel
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel
from leanbench.gpu.catalogue import find
from leanbench.measure import (
    buffers,
    instruments,
    judge,
    one_gpu,
    protocol,
    shared,
    tampering,
)
from leanbench.measure.crosscheck import CrossCheck
from leanbench.measure.instruments import open_instruments
from leanbench.measure.options import MeasureOptions
from leanbench.measure.protocol import measure_problem
from leanbench.measure.shared import attention_on

H200 = find("h200")
#: K and V have 102,400 bytes: three buffers exceed the fake GPU's cold bytes.
PROBLEM = AttentionProblem(2, 4, 2, 100, 64)
COLD_BYTES = 300_000
CONFIG = TileConfig(64, 4, 2)
FASTER = TileConfig(128, 4, 2)


class Right(Kernel):
    """The reference as a kernel with launch settings; its replays take `samples_us` in turn."""

    title = "the reference"
    decomposition = "one_cta_per_tile"
    source = "test"
    axes = Kernel.axes | {"capacity", "lengths", "lengths_on"}

    def __init__(self, name: str = "right", samples_us: Iterable[float] = (10.0,)) -> None:
        self.name = name
        self.samples_us: Iterator[float] = itertools.cycle(samples_us)
        self.prepared: list[TileConfig | None] = []
        self.launches = 0

    def refusal(self, problem: AttentionProblem) -> str | None:
        return f"{self.name} knows no head_dim 256" if problem.head_dim == 256 else None

    def default_config(self, problem: AttentionProblem, gpu: GpuSpec) -> TileConfig | None:
        return CONFIG

    def candidate_configs(self, problem: AttentionProblem, gpu: GpuSpec) -> list[TileConfig]:
        return [CONFIG, FASTER]

    def schedule(
        self, problem: AttentionProblem, config: TileConfig | None, gpu: GpuSpec
    ) -> Schedule:
        assert config is not None
        return one_cta_per_tile(TileGrid.of(problem, config.tile_tokens))

    def prepare(self, inputs: AttentionInputs, config: TileConfig | None) -> Callable[[], Any]:
        self.prepared.append(config)
        attend_all = kernel("reference").prepare(inputs, None)
        read = (inputs.q, inputs.k_cache, inputs.v_cache, inputs.cache_seqlens)
        # Results by inputs: hundreds of launches over the same inputs compute them once.
        written: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = {}

        def launch() -> None:
            self.launches += 1
            versions = tuple(tensor._version for tensor in read if tensor is not None)
            if versions in written:
                inputs.out.copy_(written[versions][0])
                inputs.lse.copy_(written[versions][1])
            else:
                attend_all()
                written[versions] = inputs.out.clone(), inputs.lse.clone()
            self.spoil(inputs)

        return Launch(self, launch)

    def spoil(self, inputs: AttentionInputs) -> None:
        """Do nothing. A wrong kernel overrides it."""

    def replay(self, launches: Sequence[Callable[[], object]]) -> None:
        for launch in launches:
            launch()


@dataclass
class Launch:
    kernel: Any
    launch: Callable[[], object]

    def __call__(self) -> object:
        return self.launch()


@dataclass
class PretendedGpu:
    """Answers of the GPU, set by tests, and a record of its calls."""

    free_bytes: float = 140e9
    #: Samples of the read floor: of the current variant, and of the one found by a new ranking.
    floor_us: float = 8.0
    best_floor_us: float = 8.0
    #: Cross-checks by kernel; all others agree with their latency of 10 µs.
    crosschecks: dict[str, CrossCheck | str] = field(default_factory=dict)
    made: list[AttentionProblem] = field(default_factory=list)
    #: Whether each floor was ranked anew.
    floors: list[bool] = field(default_factory=list)
    announced: list[str | None] = field(default_factory=list)
    #: Owner of each sample, None for the floor.
    sampled: list[str | None] = field(default_factory=list)
    nvml: Any = None
    #: Bytes of the L2 set aside for persisting accesses.
    persisting_l2_bytes: int = 0

    #: Bytes held by torch, used or not.
    reserved_bytes: int = 0
    unused_bytes: int = 0

    def empty_cache(self) -> None:
        self.reserved_bytes -= self.unused_bytes
        self.unused_bytes = 0

    def announce(self, name: str | None) -> None:
        if self.announced[-1:] != [name]:
            self.announced.append(name)


class PretendedReplay:
    """A fake of `leanbench.measure.timing.Replay`."""

    gpu: PretendedGpu

    def __init__(self, launches: Sequence[Any], sample_ms: float) -> None:
        for launch in launches:
            launch()
        self.launches = 64
        self._owner = launches[0].kernel
        self.graph = SimpleNamespace(replay=lambda: self._owner.replay(launches))

    def sample_us(self) -> float:
        self.gpu.sampled.append(self._owner.name)
        return next(self._owner.samples_us)


def pretend(monkeypatch: pytest.MonkeyPatch) -> PretendedGpu:
    """Replace torch's GPU 0 by a fake H200."""
    gpu = PretendedGpu()

    def made(problem: AttentionProblem, device: torch.device, count: int) -> list[AttentionInputs]:
        assert device == torch.device("cuda", 0)
        gpu.made.append(problem)
        return make_windows(problem, "cpu", count)

    class ReadFloor:
        def launches(
            self, inputs: Sequence[AttentionInputs], kv_bytes: int, again: bool = False
        ) -> list[Launch]:
            assert kv_bytes == gpu.made[-1].kv_bytes
            gpu.floors.append(again)
            samples_us = itertools.repeat(gpu.best_floor_us if again else gpu.floor_us)
            reader = SimpleNamespace(name=None, samples_us=samples_us, replay=lambda launches: None)
            return [Launch(reader, lambda: None) for _ in inputs]

    def cross_check(launches: Sequence[Launch], latency_us: float) -> CrossCheck | str:
        assert latency_us > 0
        name = launches[0].kernel.name
        return gpu.crosschecks.get(name, CrossCheck((10.0, 10.2, 10.1), (name,), 1755))

    def fingerprint(inputs: AttentionInputs) -> list[torch.Tensor]:
        tensors = (inputs.q, inputs.k_cache, inputs.v_cache, inputs.cache_seqlens)
        return [tensor.clone() for tensor in tensors if tensor is not None]

    PretendedReplay.gpu = gpu
    monkeypatch.setattr("torch.cuda.set_device", lambda device: None)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda: gpu.reserved_bytes)
    monkeypatch.setattr("torch.cuda.empty_cache", gpu.empty_cache)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (int(gpu.free_bytes), int(141e9)))
    monkeypatch.setattr(
        "leanbench.gpu.local.spec_of_device", lambda index: replace(H200, l2_mib=0.09)
    )
    monkeypatch.setattr(buffers, "make_windows", made)
    monkeypatch.setattr(buffers, "COLD_BYTES", COLD_BYTES)
    monkeypatch.setattr(buffers, "COLD_L2_MULTIPLE", 0)
    monkeypatch.setattr(instruments, "open_nvml", lambda device: gpu.nvml)
    monkeypatch.setattr(instruments, "ReadFloor", ReadFloor)
    for module in (protocol, shared):
        monkeypatch.setattr(module, "Replay", PretendedReplay)
    monkeypatch.setattr(judge, "cross_check", cross_check)
    monkeypatch.setattr(one_gpu, "fingerprint", fingerprint)
    monkeypatch.setattr(tampering, "persisting_l2_bytes", lambda: gpu.persisting_l2_bytes)
    return gpu


def measure(
    gpu: PretendedGpu, *kernels: Right, configs: str = "default", **options: Any
) -> dict[str, dict[str, Any]]:
    """Measure rows of `PROBLEM` with new instruments."""
    instruments = open_instruments(0, MeasureOptions(**options), gpu.announce)
    return measure_problem(attention_on(instruments, PROBLEM), kernels, configs)
