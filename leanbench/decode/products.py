"""What the matrix products of a step take, by the GPU's own timestamps of every kernel."""

from __future__ import annotations

import re
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

#: Names of GPU kernels that compute matrix products, of cuBLAS, CUTLASS and torch; of a split
#: product, the sum of its parts too.
_PRODUCTS = re.compile(r"gemm|gemv|nvjet|cutlass|xmma|splitK|cublas", re.IGNORECASE)


def is_product(name: str) -> bool:
    """Whether a GPU kernel of this name computes a matrix product."""
    return _PRODUCTS.search(name) is not None


def gemm_us(graph: torch.cuda.CUDAGraph, launches: int) -> float | None:
    """Microseconds of the matrix products of one step, of a graph of so many steps without
    attention; None where the profiler sees no kernels.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    with warnings.catch_warnings():
        # It warns that a second session does not keep the first one's events.
        warnings.simplefilter("ignore")
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
            graph.replay()
            torch.cuda.synchronize()
        events = profiler.events()
    on_gpu = torch.autograd.DeviceType.CUDA  # pyright: ignore[reportPrivateImportUsage]
    spans = [event for event in events or () if event.device_type == on_gpu]
    if not spans:
        return None
    products = (event.time_range for event in spans if is_product(event.name))
    return sum(span.end - span.start for span in products) / launches
