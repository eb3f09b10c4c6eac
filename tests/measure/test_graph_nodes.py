"""Names of a graph's nodes, with a driver in Python."""

import enum
from types import SimpleNamespace
from typing import Any

import pytest

from leanbench.measure import crosscheck as module
from leanbench.measure.crosscheck import demangled


class Types(enum.IntEnum):
    """Node types with the driver's numbers."""

    CU_GRAPH_NODE_TYPE_KERNEL = 0
    CU_GRAPH_NODE_TYPE_MEMCPY = 1
    CU_GRAPH_NODE_TYPE_MEMSET = 2
    CU_GRAPH_NODE_TYPE_GRAPH = 4
    CU_GRAPH_NODE_TYPE_EMPTY = 5


class Driver:
    """Fake functions of `cuda.bindings.driver`, which return a status first. A graph is a list of
    nodes; a node is a kernel's name, a list (a child graph), or a type.
    """

    CUgraphNodeType = Types

    def __init__(self) -> None:
        self.asked: list[int] = []

    def cuGraphGetNodes(self, graph: list[Any], count: int = 0) -> tuple[Any, ...]:
        self.asked.append(count)
        return 0, graph[:count] or None, len(graph)

    def cuGraphNodeGetType(self, node: Any) -> tuple[Any, ...]:
        if isinstance(node, Types):
            return 0, node
        kernel, graph = Types.CU_GRAPH_NODE_TYPE_KERNEL, Types.CU_GRAPH_NODE_TYPE_GRAPH
        return 0, graph if isinstance(node, list) else kernel

    def cuGraphChildGraphNodeGetGraph(self, node: list[Any]) -> tuple[Any, ...]:
        return 0, node

    def cuGraphKernelNodeGetParams(self, node: bytes) -> tuple[Any, ...]:
        if node == b"broken":
            return 1, None
        # A kernel is identified by its function, or else by itself.
        number = int.from_bytes(node, "big")
        is_function = node.startswith(b"_Z")
        return 0, SimpleNamespace(func=number * is_function, kern=number * (not is_function))

    def cuFuncGetName(self, function: int) -> tuple[Any, ...]:
        return 0, function.to_bytes(-(-function.bit_length() // 8), "big")

    def cuKernelGetName(self, kernel: int) -> tuple[Any, ...]:
        status, name = self.cuFuncGetName(kernel)
        return (1, None) if name == b"nameless" else (status, name)

    def cuGetErrorString(self, status: int) -> tuple[Any, ...]:
        return 0, b"invalid argument"


def test_kernels_copies_and_fills_of_a_graph_and_of_those_in_it():
    copy, fill, empty = Types(1), Types(2), Types(5)
    driver = Driver()
    graph = [b"lean", copy, [b"_Z5mergeiPf", fill], empty, b"nameless"]
    names = module._names_in(driver, graph)
    assert names == ["lean", "memcpy", "merge(int, float*)", "memset", "unknown"]
    # A count first, for the graph and for its child.
    assert driver.asked == [0, 5, 0, 2]
    assert module._names_in(driver, []) == []
    with pytest.raises(RuntimeError, match=r"^CUDA driver: invalid argument$"):
        module._names_in(Driver(), [b"broken"])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (b"_ZN5flash6kernelILi64EEEvf", "void flash::kernel<64>(float)"),
        (b"lean", "lean"),
        (b"_Zz", "_Zz"),
    ],
)
def test_names_of_cpp_sources(name, text):
    assert demangled(name) == text
