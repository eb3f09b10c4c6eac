"""What a CUDA graph is made of, as the driver tells it."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

#: The name of a kernel that the driver does not tell.
UNKNOWN = "unknown"


def node_names(graph: torch.cuda.CUDAGraph) -> list[str]:
    """Names of the kernels, copies and fills of a graph that was captured with `keep_graph`, and of
    graphs in it, in the order that the driver has. Kernels without one are `UNKNOWN`.

    Raises:
        RuntimeError: the driver says that it failed.
    """
    from cuda.bindings import driver  # pyright: ignore[reportAttributeAccessIssue]

    return _names(driver, driver.CUgraph(graph.raw_cuda_graph()))


def _names(driver: Any, graph: Any) -> list[str]:
    types = driver.CUgraphNodeType
    others = {
        types.CU_GRAPH_NODE_TYPE_MEMCPY: "memcpy",
        types.CU_GRAPH_NODE_TYPE_MEMSET: "memset",
    }
    _, count = _checked(driver, driver.cuGraphGetNodes(graph))
    nodes, _ = _checked(driver, driver.cuGraphGetNodes(graph, count)) if count else ((), 0)
    names = []
    for node in nodes[:count]:
        (kind,) = _checked(driver, driver.cuGraphNodeGetType(node))
        if kind == types.CU_GRAPH_NODE_TYPE_KERNEL:
            names.append(_kernel_name(driver, node))
        elif kind == types.CU_GRAPH_NODE_TYPE_GRAPH:
            (child,) = _checked(driver, driver.cuGraphChildGraphNodeGetGraph(node))
            names += _names(driver, child)
        elif kind in others:
            names.append(others[kind])
    return names


def _kernel_name(driver: Any, node: Any) -> str:
    (params,) = _checked(driver, driver.cuGraphKernelNodeGetParams(node))
    status, name = (
        driver.cuFuncGetName(params.func)
        if int(params.func)
        else driver.cuKernelGetName(params.kern)
    )
    # Kernels of another context or of an older driver.
    return UNKNOWN if int(status) or not name else demangled(name)


def _checked(driver: Any, returned: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a driver call returned after its status."""
    status, *rest = returned
    if int(status):
        _, text = driver.cuGetErrorString(status)
        raise RuntimeError(f"CUDA driver: {text.decode() if text else status}")
    return tuple(rest)


@cache
def demangled(name: bytes) -> str:
    """A name as C++ sources have it; the name itself where it is none of C++."""
    try:
        demangle = ctypes.CDLL("libstdc++.so.6")["__cxa_demangle"]
        free = ctypes.CDLL(None)["free"]
    except (OSError, AttributeError):
        return name.decode()
    demangle.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    demangle.restype, free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    status = ctypes.c_int()
    # It writes one that it has made room for, which is ours to free.
    address = demangle(name, None, None, ctypes.addressof(status))
    if status.value or not address:
        return name.decode()
    text = ctypes.string_at(address).decode()
    free(address)
    return text
