"""Messages between two GPUs: the kernel compiled for GPUs, and run on the CPU."""

import ctypes
import shutil
import subprocess

import pytest

from leanbench.compile.nvrtc import compile_cuda
from tools.gpu.ping_pong import MESSAGES, round_trip_us

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


def test_sent_bytes_and_round_trips():
    sent_bytes = {"unit": 16, "partial": 4096, "flag": 4}
    assert {name: message.sent_bytes for name, message in MESSAGES.items()} == sent_bytes
    # 100 rounds per batch: the first, with the other GPU's launch in it, ends at 9,000,000 ns.
    ends = [9_000_000, 9_170_000, 9_345_000, 9_515_000, 9_985_000]
    assert round_trip_us(ends, rounds=100) == pytest.approx((1.70 + 1.75) / 2)
    assert round_trip_us(ends[:4], rounds=100) == pytest.approx(1.70)


@pytest.mark.deep
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
