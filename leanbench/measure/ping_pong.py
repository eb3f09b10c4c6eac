"""How long a message takes from one GPU to another and back: a CTA on each, which store into one
another's memory and poll their own.

Half of it is the floor of what an exchange in a launch adds to GPUs that share tokens: the last
partial has to arrive. Plain peer memory (NVLink, or PCIe between GPUs with peer access), through
the driver alone: contexts that were not there before are gone afterwards, and so is peer access.
"""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

from leanbench.compile.nvrtc import CudaSource, check_nvrtc, compile_cuda
from leanbench.core.errors import UserError

#: Batches of a launch, and round trips of each, which lasts some 100 timer ticks of 1 us or more.
#: The first batch is not used: one GPU waits there for the other's launch.
BATCHES, ROUNDS = 33, 128
#: Looks for a message before a launch gives up: one to two seconds.
POLLS = 1 << 21
#: The first launch of each message wakes both GPUs.
_LAUNCHES = 2


@dataclass(frozen=True)
class Message:
    """What goes from GPU to GPU, by one CTA."""

    threads: int
    #: That each thread stores and polls: 16 bytes with the round's number in them, or a flag of 4.
    units: int
    #: A flag by store-release and load-acquire, in place of relaxed units.
    release: bool = False

    @property
    def sent_bytes(self) -> int:
        return self.threads * self.units * (4 if self.release else 16)

    def source(self, capability: tuple[int, int]) -> CudaSource:
        """The kernel that sends it, for a compute capability."""
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


#: By name. `unit`: 16 bytes as `lean` stores them, the least that it can send. `partial`: what a
#: CTA of `lean` sends of 4 query heads x 128, 32 bytes to 4 numbers (kernels/lean/peers.cuh).
#: `flag`: what barriers are made of, and exchanges whose flag comes after the data.
MESSAGES = {
    "unit": Message(threads=1, units=1),
    "partial": Message(threads=128, units=2),
    "flag": Message(threads=1, units=1, release=True),
}


@dataclass(frozen=True)
class PingPong:
    """What was measured between two GPUs, as CUDA counts them."""

    first: int
    second: int
    #: Of each of MESSAGES, there and back.
    round_trip_us: dict[str, float]

    @property
    def one_way_us(self) -> dict[str, float]:
        """Half of each: the mean of both ways."""
        return {name: trip_us / 2 for name, trip_us in self.round_trip_us.items()}


def peer_pairs() -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """The pairs of GPUs, as CUDA counts them, that have peer access both ways, and the others: by
    CUDA, which is asked to enable it, not by NVML as `leanbench.gpu.topology`, which may not know.

    Raises:
        UserError: NVRTC or cuda-bindings is missing.
        RuntimeError: a call of the driver failed.
    """
    driver = _driver()
    _check(driver.cuInit(0))
    pairs = list(combinations(range(_check(driver.cuDeviceGetCount())), 2))
    with_access = [pair for pair in pairs if _has_peer_access(driver, *pair)]
    return with_access, [pair for pair in pairs if pair not in with_access]


def measure_ping_pong(first: int, second: int) -> PingPong:
    """Round trips of each of MESSAGES between two GPUs, the medians of batches.

    Args:
        first: the GPU that sends and takes the time, as CUDA counts.
        second: the one that answers.

    Raises:
        UserError: there is no such GPU, both are one, they have no peer access, a message did not
            come in POLLS looks, or NVRTC or cuda-bindings is missing.
        RuntimeError: a call of the driver failed.
    """
    driver = _driver()
    _check(driver.cuInit(0))
    _check_pair(driver, first, second)
    with ExitStack() as stack:
        asking, answering = (_Side(driver, index, stack) for index in (first, second))
        asking.reach(answering, stack)
        answering.reach(asking, stack)
        trips = {name: _measure(message, asking, answering) for name, message in MESSAGES.items()}
    return PingPong(first, second, trips)


def round_trip_us(ends_ns: Sequence[int], rounds: int = ROUNDS) -> float:
    """The median over batches of a round trip in microseconds; the first batch is not used.

    Args:
        ends_ns: nanoseconds at the end of each batch of `rounds`.
    """
    batches = [later - earlier for earlier, later in pairwise(ends_ns)]
    return statistics.median(batches) / rounds / 1e3


class _Side:
    """One of the two GPUs: its context and its memory, until the stack unwinds."""

    def __init__(self, driver: Any, index: int, stack: ExitStack) -> None:
        self._driver, self.index = driver, index
        self._device = _check(driver.cuDeviceGet(index))
        # Not a new context, but the one that torch uses or would.
        self._context = _check(driver.cuDevicePrimaryCtxRetain(self._device))
        stack.callback(driver.cuDevicePrimaryCtxRelease, self._device)
        attributes = driver.CUdevice_attribute
        self._capability = (
            self._attribute(attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
            self._attribute(attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
        )
        slots_bytes = max(message.sent_bytes for message in MESSAGES.values())
        # Not torch's allocator: memory of its expandable segments has no peer access.
        self._slots = self._allocate(slots_bytes, stack)
        self._ends = self._allocate(8 * BATCHES, stack)
        self._numbers = ((self._slots, slots_bytes // 4), (self._ends, 2 * BATCHES))

    def reach(self, peer: _Side, stack: ExitStack) -> None:
        """Lets kernels of this GPU store into the other's memory."""
        returned = self._call("cuCtxEnablePeerAccess", peer._context, 0)
        # torch enables it when it first copies between two GPUs, and counts on it.
        if returned[0] == self._driver.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED:
            return
        _check(returned)
        stack.callback(self._call, "cuCtxDisablePeerAccess", peer._context)

    def load(self, message: Message, stack: ExitStack) -> Any:
        """The kernel of a message, on this GPU."""
        binary = compile_cuda(message.source(self._capability))
        module = _check(self._call("cuModuleLoadData", binary.cubin))
        stack.callback(self._call, "cuModuleUnload", module)
        return _check(self._call("cuModuleGetFunction", module, b"ping_pong"))

    def clear(self) -> None:
        """Makes slots and ends 0, and waits until they are."""
        for memory, numbers in self._numbers:
            _check(self._call("cuMemsetD32", memory, 0, numbers))
        self.wait()

    def launch(self, function: Any, message: Message, peer: _Side, asks: bool) -> None:
        """Starts the CTA that sends first and takes the time, or the one that answers."""
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
        """What a function of the driver returns in this GPU's context; the caller's is current
        again afterwards.
        """
        _check(self._driver.cuCtxPushCurrent(self._context))
        try:
            return getattr(self._driver, name)(*arguments)
        finally:
            self._driver.cuCtxPopCurrent()


def _measure(message: Message, asking: _Side, answering: _Side) -> float:
    """The round trip of a message in microseconds, between GPUs that reach one another."""
    ends_ns: list[int] = []
    with ExitStack() as stack:
        # Both are loaded before either runs: loading may wait for what runs.
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
                raise UserError(
                    f"a message between GPUs {asking.index} and {answering.index} did not come"
                    f" within {POLLS:,} looks, in round {done + 1:,} to {done + ROUNDS:,} of"
                    f" {BATCHES * ROUNDS:,}: stop what else runs on them, or leave one out with"
                    " CUDA_VISIBLE_DEVICES"
                )
    return round_trip_us(ends_ns)


def _check_pair(driver: Any, first: int, second: int) -> None:
    """Raises UserError where two GPUs cannot send one another messages."""
    count = _check(driver.cuDeviceGetCount())
    for index in (first, second):
        if not 0 <= index < count:
            raise UserError(
                f"GPU {index} is asked for and CUDA sees {count}, counted from 0: give two that are"
                " here"
            )
    if first == second:
        raise UserError(f"GPU {first} is asked for twice: give two GPUs")
    if not _has_peer_access(driver, first, second):
        raise UserError(
            f"GPUs {first} and {second} have no peer access: give two that have it, `leanbench"
            " doctor` says which"
        )


def _has_peer_access(driver: Any, first: int, second: int) -> bool:
    """Whether each of two GPUs may store into the other's memory."""
    own, peer = (_check(driver.cuDeviceGet(index)) for index in (first, second))
    return all(_check(driver.cuDeviceCanAccessPeer(*way)) for way in ((own, peer), (peer, own)))


def _check(returned: tuple[Any, ...]) -> Any:
    """What a driver call returned after its status.

    Raises:
        RuntimeError: the status says that it failed.
    """
    status, *rest = returned
    if int(status) != 0:
        raise RuntimeError(f"CUDA driver: {getattr(status, 'name', status)}")
    return rest[0] if rest else None


def _driver() -> Any:
    check_nvrtc()
    from cuda.bindings import driver  # pyright: ignore[reportAttributeAccessIssue]

    return driver
