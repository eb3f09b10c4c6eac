"""Messages between two GPUs: the kernel compiled for GPUs and run on the CPU, and a fake driver
with known latencies.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections import Counter
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest

from leanbench.compile.nvrtc import CudaSource, compile_cuda
from tools.gpu import ping_pong
from tools.gpu.ping_pong import BATCHES, MESSAGES, ROUNDS, measure_round_trips, round_trip_us

COMPILER = shutil.which("g++")
#: GPU functions for the rounds of ping_pong.cu: threads that poll ordinary memory.
ON_CPU = """
#include <atomic>
#include <barrier>
#include <thread>
#include <vector>
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(threads)
typedef unsigned int u32;
typedef unsigned long long u64;
constexpr int UNIT = 1;
struct Cta {
  std::barrier<> barrier{THREADS};
  std::atomic<bool> all{true};
};
struct Index { unsigned x; };
static thread_local Index threadIdx;
static thread_local Cta *cta;
static void store(u32 *at, u32 number) { __atomic_store_n(at, number, __ATOMIC_RELEASE); }
static bool holds(const u32 *at, u32 number) {
  const bool is = __atomic_load_n(at, __ATOMIC_ACQUIRE) == number;
  if (!is) std::this_thread::yield();
  return is;
}
static bool __syncthreads_and(bool own) {
  if (!own) cta->all = false;
  cta->barrier.arrive_and_wait();
  const bool all = cta->all;
  cta->barrier.arrive_and_wait();
  cta->all = true;
  cta->barrier.arrive_and_wait();
  return all;
}
// Few suffice where no answer comes, and where one comes none may be too few.
static u32 polls;
static u64 globaltimer() {
  static std::atomic<u64> ticks{0};
  return ++ticks;
}
"""
PLAY = """
// GPU 0 asks; GPU 1 answers where `answers` is set.
extern "C" void play(u32 *slots, u64 *ends, bool answers) {
  polls = answers ? 1'000'000 : 1'000;
  Cta ctas[2];
  std::vector<std::thread> threads;
  u32 *of[2] = {slots, slots + THREADS * UNITS};
  for (int gpu = 0; gpu < 1 + answers; gpu++)
    for (unsigned thread = 0; thread < THREADS; thread++)
      threads.emplace_back([=, &ctas] {
        threadIdx.x = thread, cta = &ctas[gpu];
        ping_pong(of[gpu], of[1 - gpu], gpu == 0 ? ends : nullptr);
      });
  for (std::thread &thread : threads) thread.join();
}
"""


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
@pytest.mark.parametrize("name", MESSAGES)
def test_the_kernel_compiles(name, capability):
    binary = compile_cuda(MESSAGES[name].source(capability))
    assert binary.spilled_registers == 0
    assert binary.registers_per_thread <= 32


def test_what_is_sent():
    assert {name: message.sent_bytes for name, message in MESSAGES.items()} == {
        "unit": 16,
        "partial": 4096,
        "flag": 4,
    }


@pytest.mark.skipif(COMPILER is None, reason="needs g++ to compile ping_pong.cu")
@pytest.mark.parametrize(("threads", "units"), [(1, 1), (3, 2)])
def test_the_rounds_end_with_and_without_an_answer(tmp_path, threads, units):
    _, _, rounds = MESSAGES["unit"].source((9, 0)).text.partition("// ---- the rounds")
    assert "ping_pong(u32 *own" in rounds
    source, library = tmp_path / "ping_pong.cpp", tmp_path / "ping_pong.so"
    source.write_text(f"{ON_CPU}\n// {rounds}\n{PLAY}", encoding="utf-8")
    sizes = {"THREADS": threads, "UNITS": units, "BATCHES": 3, "ROUNDS": 5, "POLLS": "polls"}
    defines = [f"-D{name}={value}" for name, value in sizes.items()]
    flags = ["-std=c++20", "-O1", "-w", "-pthread", "-shared", "-fPIC"]
    subprocess.run([COMPILER, *flags, *defines, "-o", library, source], check=True)  # type: ignore[list-item]
    play = ctypes.CDLL(str(library)).play

    slots, ends = (ctypes.c_uint32 * (2 * threads * units))(), (ctypes.c_uint64 * 3)()
    play(slots, ends, ctypes.c_bool(True))
    assert list(ends) == [1, 2, 3]
    # Both have received all of the last message.
    assert list(slots) == [15] * (2 * threads * units)

    slots, ends = (ctypes.c_uint32 * (2 * threads * units))(), (ctypes.c_uint64 * 3)()
    play(slots, ends, ctypes.c_bool(False))
    assert list(ends) == [0, 0, 0]
    assert list(slots) == [0] * threads * units + [1] * threads * units


def test_a_round_trip_is_the_median_of_batches_after_the_first():
    # 100 rounds per batch: the first, with the other GPU's launch in it, ends at 9,000,000 ns.
    ends = [9_000_000, 9_170_000, 9_345_000, 9_515_000, 9_985_000]
    assert round_trip_us(ends, rounds=100) == pytest.approx((1.70 + 1.75) / 2)
    assert round_trip_us(ends[:4], rounds=100) == pytest.approx(1.70)


class Status(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED = 704


class Attribute(IntEnum):
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76


#: Round-trip times of the fake driver's messages.
TRUTH_NS = {"unit": 1700, "partial": 2800, "flag": 2500}


class FakeDriver:
    """Three H200s; GPU 2 has no peer access. Contexts are numbered 100 + GPU."""

    CUresult = Status
    CUdevice_attribute = Attribute

    def __init__(self) -> None:
        #: Number of live resources by kind: contexts, memory, modules, peer access.
        self.held: Counter[str] = Counter()
        self.contexts: list[int] = []
        #: (context, peer) pairs with access already enabled by torch.
        self.enabled: set[tuple[int, int]] = set()
        self.launches: list[tuple[int, str, tuple[int, ...]]] = []
        self.ends_ns: list[int] = []
        #: Number of batches with an answer.
        self.answered = BATCHES
        self.free_bytes = 1 << 30
        self.gpus = 3

    @property
    def context(self) -> int:
        return self.contexts[-1]

    def cuDeviceGetCount(self) -> tuple[Any, ...]:
        return Status.CUDA_SUCCESS, self.gpus

    def cuDeviceGet(self, index: int) -> tuple[Any, ...]:
        return Status.CUDA_SUCCESS, index

    def cuDeviceGetAttribute(self, attribute: Attribute, device: int) -> tuple[Any, ...]:
        return Status.CUDA_SUCCESS, {75: 9, 76: 0}[attribute]

    def cuDeviceCanAccessPeer(self, own: int, peer: int) -> tuple[Any, ...]:
        assert own != peer
        return Status.CUDA_SUCCESS, int(2 not in (own, peer))

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[Any, ...]:
        self.held["context"] += 1
        return Status.CUDA_SUCCESS, 100 + device

    def cuDevicePrimaryCtxRelease(self, device: int) -> tuple[Any, ...]:
        assert self.held["memory"] <= 2
        self.held["context"] -= 1
        return (Status.CUDA_SUCCESS,)

    def cuCtxPushCurrent(self, context: int) -> tuple[Any, ...]:
        self.contexts.append(context)
        return (Status.CUDA_SUCCESS,)

    def cuCtxPopCurrent(self) -> tuple[Any, ...]:
        return Status.CUDA_SUCCESS, self.contexts.pop()

    def cuCtxEnablePeerAccess(self, peer: int, flags: int) -> tuple[Any, ...]:
        if (self.context, peer) in self.enabled:
            return (Status.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED,)
        self.enabled.add((self.context, peer))
        return (Status.CUDA_SUCCESS,)

    def cuCtxDisablePeerAccess(self, peer: int) -> tuple[Any, ...]:
        self.enabled.remove((self.context, peer))
        return (Status.CUDA_SUCCESS,)

    def cuMemAlloc(self, size_bytes: int) -> tuple[Any, ...]:
        if size_bytes > self.free_bytes:
            return Status.CUDA_ERROR_OUT_OF_MEMORY, None
        self.held["memory"] += 1
        return Status.CUDA_SUCCESS, (self.context << 32) + size_bytes

    def cuMemFree(self, memory: int) -> tuple[Any, ...]:
        assert memory >> 32 == self.context
        self.held["memory"] -= 1
        return (Status.CUDA_SUCCESS,)

    def cuMemsetD32(self, memory: int, value: int, numbers: int) -> tuple[Any, ...]:
        assert (memory >> 32, value) == (self.context, 0)
        # The whole allocation.
        assert memory & 0xFFFFFFFF == 4 * numbers
        return (Status.CUDA_SUCCESS,)

    def cuModuleLoadData(self, cubin: CudaSource) -> tuple[Any, ...]:
        assert cubin.capability == (9, 0)
        self.held["module"] += 1
        return Status.CUDA_SUCCESS, cubin

    def cuModuleUnload(self, module: CudaSource) -> tuple[Any, ...]:
        self.held["module"] -= 1
        return (Status.CUDA_SUCCESS,)

    def cuModuleGetFunction(self, module: CudaSource, name: bytes) -> tuple[Any, ...]:
        assert name == b"ping_pong"
        return Status.CUDA_SUCCESS, module

    def cuLaunchKernel(self, function: CudaSource, *words: Any) -> tuple[Any, ...]:
        grid, block, (shared, stream, arguments, extra) = words[:3], words[3:6], words[6:]
        (own, peer, ends), types = arguments
        assert (grid, shared, stream, extra) == ((1, 1, 1), 0, 0, 0)
        assert types == (ctypes.c_void_p,) * 3
        [name] = [name for name, message in MESSAGES.items() if message.source((9, 0)) == function]
        assert block == (MESSAGES[name].threads, 1, 1)
        assert own >> 32 == self.context
        self.launches.append((self.context - 100, name, (peer >> 32, ends >> 32)))
        if ends:
            assert self.launches[-2][:2] == ((peer >> 32) - 100, name)
            batches = [5_000_000 + TRUTH_NS[name] * ROUNDS * batch for batch in range(BATCHES)]
            self.ends_ns = [end if i < self.answered else 0 for i, end in enumerate(batches)]
        return (Status.CUDA_SUCCESS,)

    def cuCtxSynchronize(self) -> tuple[Any, ...]:
        return (Status.CUDA_SUCCESS,)

    def cuMemcpyDtoH(self, address: int, memory: int, size_bytes: int) -> tuple[Any, ...]:
        assert (memory >> 32, memory & 0xFFFFFFFF) == (self.context, size_bytes)
        read = (ctypes.c_uint64 * BATCHES)(*self.ends_ns)
        ctypes.memmove(address, read, size_bytes)
        return (Status.CUDA_SUCCESS,)


@pytest.fixture
def driver(monkeypatch) -> FakeDriver:
    fake = FakeDriver()
    # Modules are the sources themselves.
    monkeypatch.setattr(ping_pong, "compile_cuda", lambda source: SimpleNamespace(cubin=source))
    return fake


def assert_nothing_is_left(driver: FakeDriver) -> None:
    assert +driver.held == Counter()
    assert driver.contexts == []


def test_round_trips(driver):
    trips_us = measure_round_trips(driver, 1, 0)
    assert trips_us == pytest.approx({"unit": 1.7, "partial": 2.8, "flag": 2.5})
    # GPU 0 waits before GPU 1 sends; a warm-up launch, and one that counts.
    once = [(0, "unit", (101, 0)), (1, "unit", (100, 101))]
    assert driver.launches[:4] == once * 2
    assert [name for _, name, _ in driver.launches] == ["unit"] * 4 + ["partial"] * 4 + ["flag"] * 4
    assert_nothing_is_left(driver)
    assert driver.enabled == set()


def test_peer_access_that_was_there_stays(driver):
    driver.enabled = {(100, 101)}
    measure_round_trips(driver, 0, 1)
    assert driver.enabled == {(100, 101)}


def test_a_message_that_does_not_come(driver):
    driver.answered = 2
    with pytest.raises(RuntimeError, match=r"GPUs 0 and 1 .* in round 257 to 384 of 4,224"):
        measure_round_trips(driver, 0, 1)
    assert_nothing_is_left(driver)


def test_no_memory(driver):
    driver.free_bytes = 100
    with pytest.raises(RuntimeError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        measure_round_trips(driver, 0, 1)
    assert_nothing_is_left(driver)


@pytest.mark.parametrize(
    ("gpus", "code", "lines"),
    [
        (
            3,
            0,
            [
                "GPUs 0 and 1, one way in us: unit 0.85, partial 1.40, flag 1.25",
                "GPUs 0 and 2: no peer access",
                "GPUs 1 and 2: no peer access",
            ],
        ),
        (1, 1, ["messages need two GPUs, CUDA sees 1"]),
    ],
)
def test_each_pair_has_a_line(driver, monkeypatch, capsys, gpus, code, lines):
    monkeypatch.setattr(ping_pong, "_driver", lambda: driver)
    driver.gpus = gpus
    assert ping_pong.main() == code
    assert capsys.readouterr().out.splitlines() == lines
