"""Time messages between the GPUs of this machine.

    python tools/gpu/ping_pong.py

A CTA on each of two GPUs stores into the other's memory and polls its own. Half of a round trip is
the floor for the cost of an exchange in a launch with shared tokens: the last partial has to
arrive. Plain peer memory (NVLink, or PCIe between GPUs with peer access), by the driver alone.
"""

from __future__ import annotations

import ctypes
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

from leanbench.compile.nvrtc import CudaSource, check_nvrtc, compile_cuda
from leanbench.core.errors import UserError

#: Batches per launch, and round trips per batch, which lasts some 100 timer ticks of 1 us or more.
#: The first batch is discarded: one GPU waits there for the other's launch.
BATCHES, ROUNDS = 33, 128
#: Polls before a launch gives up: one to two seconds.
POLLS = 1 << 21
#: The first launch of each message wakes both GPUs.
_LAUNCHES = 2


@dataclass(frozen=True)
class Message:
    """Message from GPU to GPU, sent by one CTA."""

    threads: int
    #: Units per thread: 16 bytes that carry the round's number, or a flag of 4 bytes.
    units: int
    #: Store-release and load-acquire of a flag instead of relaxed units.
    release: bool = False

    @property
    def sent_bytes(self) -> int:
        return self.threads * self.units * (4 if self.release else 16)

    def source(self, capability: tuple[int, int]) -> CudaSource:
        """Return the kernel that sends it, for a compute capability."""
        defines = {
            "BATCHES": BATCHES,
            "POLLS": POLLS,
            "RELEASE": int(self.release),
            "ROUNDS": ROUNDS,
            "THREADS": self.threads,
            "UNITS": self.units,
        }
        text = Path(__file__).with_suffix(".cu").read_text(encoding="utf-8")
        return CudaSource(text, "ping_pong", tuple(sorted(defines.items())), capability)


#: By name. `unit`: 16 bytes as stored by `lean`, its smallest message. `partial`: data of a CTA of
#: `lean` with 4 query heads x 128, 32 bytes per 4 numbers (kernels/lean/peers.cuh). `flag`: the
#: basis of barriers, and of exchanges with a flag after the data.
MESSAGES = {
    "unit": Message(threads=1, units=1),
    "partial": Message(threads=128, units=2),
    "flag": Message(threads=1, units=1, release=True),
}


def main() -> int:
    """Print a line for each pair of GPUs; return 1 if no pair has peer access."""
    driver = _driver()
    count = _check(driver.cuDeviceGetCount())
    if count < 2:
        print(f"messages need two GPUs, CUDA sees {count}")
    pairs = list(combinations(range(count), 2))
    with_access = [pair for pair in pairs if _has_peer_access(driver, *pair)]
    for pair in pairs:
        if pair not in with_access:
            print(f"GPUs {pair[0]} and {pair[1]}: no peer access")
            continue
        trips_us = measure_round_trips(driver, *pair)
        half = ", ".join(f"{name} {trip_us / 2:.2f}" for name, trip_us in trips_us.items())
        print(f"GPUs {pair[0]} and {pair[1]}, one way in us: {half}", flush=True)
    return 0 if with_access else 1


def measure_round_trips(driver: Any, first: int, second: int) -> dict[str, float]:
    """Return the round trip in microseconds of each of MESSAGES between two GPUs.

    Args:
        first: index of the GPU that sends and takes the time.
        second: index of the GPU that answers.

    Raises:
        RuntimeError: a message did not arrive, or a driver call failed.
    """
    with ExitStack() as stack:
        asking, answering = (_Side(driver, index, stack) for index in (first, second))
        asking.reach(answering, stack)
        answering.reach(asking, stack)
        return {name: _measure(message, asking, answering) for name, message in MESSAGES.items()}


def round_trip_us(ends_ns: Sequence[int], rounds: int = ROUNDS) -> float:
    """Return the median round trip over all batches but the first, in microseconds.

    Args:
        ends_ns: nanoseconds at the end of each batch of `rounds`.
    """
    batches = [later - earlier for earlier, later in pairwise(ends_ns)]
    return statistics.median(batches) / rounds / 1e3


class _Side:
    """One of the two GPUs, with its context and memory until the stack unwinds."""

    def __init__(self, driver: Any, index: int, stack: ExitStack) -> None:
        self._driver, self.index = driver, index
        self._device = _check(driver.cuDeviceGet(index))
        # The primary context, which torch also uses.
        self._context = _check(driver.cuDevicePrimaryCtxRetain(self._device))
        stack.callback(driver.cuDevicePrimaryCtxRelease, self._device)
        attributes = driver.CUdevice_attribute
        self._capability = (
            self._attribute(attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
            self._attribute(attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
        )
        slots_bytes = max(message.sent_bytes for message in MESSAGES.values())
        # Memory of torch's expandable segments has no peer access.
        self._slots = self._allocate(slots_bytes, stack)
        self._ends = self._allocate(8 * BATCHES, stack)
        self._numbers = ((self._slots, slots_bytes // 4), (self._ends, 2 * BATCHES))

    def reach(self, peer: _Side, stack: ExitStack) -> None:
        """Let kernels of this GPU store into the other's memory."""
        returned = self._call("cuCtxEnablePeerAccess", peer._context, 0)
        # torch enables peer access at its first copy between two GPUs, and relies on it.
        if returned[0] == self._driver.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED:
            return
        _check(returned)
        stack.callback(self._call, "cuCtxDisablePeerAccess", peer._context)

    def load(self, message: Message, stack: ExitStack) -> Any:
        """Load the kernel of a message on this GPU."""
        binary = compile_cuda(message.source(self._capability))
        module = _check(self._call("cuModuleLoadData", binary.cubin))
        stack.callback(self._call, "cuModuleUnload", module)
        return _check(self._call("cuModuleGetFunction", module, b"ping_pong"))

    def clear(self) -> None:
        """Zero slots and ends, and wait."""
        for memory, numbers in self._numbers:
            _check(self._call("cuMemsetD32", memory, 0, numbers))
        self.wait()

    def launch(self, function: Any, message: Message, peer: _Side, asks: bool) -> None:
        """Start the CTA that sends first and takes the time, or the one that answers."""
        values = (int(self._slots), int(peer._slots), int(self._ends) if asks else 0)
        arguments = (values, (ctypes.c_void_p,) * 3)
        grid, block = (1, 1, 1), (message.threads, 1, 1)
        _check(self._call("cuLaunchKernel", function, *grid, *block, 0, 0, arguments, 0))

    def wait(self) -> None:
        _check(self._call("cuCtxSynchronize"))

    def read_ends(self) -> list[int]:
        ends = (ctypes.c_uint64 * BATCHES)()
        address = ctypes.addressof(ends)
        _check(self._call("cuMemcpyDtoH", address, self._ends, ctypes.sizeof(ends)))
        return list(ends)

    def _allocate(self, size_bytes: int, stack: ExitStack) -> Any:
        memory = _check(self._call("cuMemAlloc", size_bytes))
        stack.callback(self._call, "cuMemFree", memory)
        return memory

    def _attribute(self, attribute: Any) -> int:
        return _check(self._driver.cuDeviceGetAttribute(attribute, self._device))

    def _call(self, name: str, *arguments: Any) -> tuple[Any, ...]:
        """Call the driver in this GPU's context, and restore the caller's."""
        _check(self._driver.cuCtxPushCurrent(self._context))
        try:
            return getattr(self._driver, name)(*arguments)
        finally:
            self._driver.cuCtxPopCurrent()


def _measure(message: Message, asking: _Side, answering: _Side) -> float:
    """Return the round trip of a message in microseconds."""
    ends_ns: list[int] = []
    with ExitStack() as stack:
        # Load both before either runs: loading may wait for running kernels.
        asks, answers = (side.load(message, stack) for side in (asking, answering))
        for _ in range(_LAUNCHES):
            asking.clear()
            answering.clear()
            answering.launch(answers, message, asking, asks=False)
            asking.launch(asks, message, answering, asks=True)
            asking.wait()
            answering.wait()
            ends_ns = asking.read_ends()
            if 0 in ends_ns:
                done = ends_ns.index(0) * ROUNDS
                raise RuntimeError(
                    f"a message between GPUs {asking.index} and {answering.index} did not arrive"
                    f" within {POLLS:,} polls, in round {done + 1:,} to {done + ROUNDS:,} of"
                    f" {BATCHES * ROUNDS:,}: stop other work on them, or hide one with"
                    " CUDA_VISIBLE_DEVICES"
                )
    return round_trip_us(ends_ns)


def _has_peer_access(driver: Any, first: int, second: int) -> bool:
    """Return True if each of two GPUs can store into the other's memory."""
    own, peer = (_check(driver.cuDeviceGet(index)) for index in (first, second))
    return all(_check(driver.cuDeviceCanAccessPeer(*way)) for way in ((own, peer), (peer, own)))


def _check(returned: tuple[Any, ...]) -> Any:
    """Return the result of a driver call.

    Raises:
        RuntimeError: the call failed.
    """
    status, *results = returned
    if int(status) != 0:
        raise RuntimeError(f"CUDA driver: {getattr(status, 'name', status)}")
    return results[0] if results else None


def _driver() -> Any:
    check_nvrtc()
    from cuda.bindings import driver  # pyright: ignore[reportAttributeAccessIssue]

    _check(driver.cuInit(0))
    return driver


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (RuntimeError, UserError) as error:
        sys.exit(f"Error: {error}")
