"""A kernel that occupies SMs until it is released, leaving few for others."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from leanbench.compile.nvrtc import CudaSource, compile_cuda

#: Shared memory of a CTA: no other CTA with a ring fits next to it.
_SHARED_BYTES = 200 * 1024
_SOURCE = CudaSource(
    """
extern "C" __global__ void spin(volatile int *released, int *running) {
  if (threadIdx.x == 0) {
    atomicAdd_system(running, 1);
    while (*released == 0) __nanosleep(1000);
  }
}
""",
    "spin",
    (),
    (9, 0),
)


@contextmanager
def spinning(ctas: int) -> Iterator[None]:
    """Occupy `ctas` SMs until the end of the block."""
    from cuda.bindings import driver  # pyright: ignore[reportAttributeAccessIssue]

    def check(returned):
        assert int(returned[0]) == 0, returned
        return returned[1] if len(returned) > 1 else None

    released, running = [torch.zeros(1, dtype=torch.int32).pin_memory() for _ in range(2)]
    module = check(driver.cuModuleLoadData(compile_cuda(_SOURCE).cubin))
    function = check(driver.cuModuleGetFunction(module, b"spin"))
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    check(driver.cuFuncSetAttribute(function, attribute, _SHARED_BYTES))
    import ctypes

    pointers = ((released.data_ptr(), running.data_ptr()), (ctypes.c_void_p, ctypes.c_void_p))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    check(
        driver.cuLaunchKernel(
            function, ctas, 1, 1, 32, 1, 1, _SHARED_BYTES, stream.cuda_stream, pointers, 0
        )
    )
    while running.item() < ctas:
        time.sleep(0.001)
    try:
        yield
    finally:
        released.fill_(1)
        torch.cuda.synchronize()
