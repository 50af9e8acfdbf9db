"""Programmatic dependent launch (PDL) in captured CUDA graphs: let kernels start before their predecessor has ended.

An ordinary edge between two kernels starts the second one when the first has ended and its writes are visible. A
programmatic edge starts it as soon as every thread block of the first has executed
`griddepcontrol.launch_dependents` or ended; the second kernel itself waits (`griddepcontrol.wait`) for that end. Until
then it may do work that depends on no other kernel, for example prefetch weights.

A kernel opts in by a name that ends in `PDL_SUFFIX`. The name promises that every thread block waits before it reads
what another kernel of the graph writes, and before it writes anything. Only edges into these kernels are changed. The
captured graph is edited because the launchers of compiled engines do not set the PDL launch attribute.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable, Mapping

from mingc.errors import WorkerError

PDL_SUFFIX = "_pdl"

_KERNEL_NODE = 0  # CU_GRAPH_NODE_TYPE_KERNEL
_PROGRAMMATIC = 1  # CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC, and CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC


class _EdgeData(ctypes.Structure):
    """CUgraphEdgeData; all zeros means an ordinary edge."""

    _fields_ = (
        ("from_port", ctypes.c_ubyte),
        ("to_port", ctypes.c_ubyte),
        ("kind", ctypes.c_ubyte),
        ("reserved", ctypes.c_ubyte * 5),
    )


class _KernelParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("sizes", ctypes.c_uint * 7),  # grid, block, dynamic shared memory
        ("arguments", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


def enable_pdl(graph: int) -> int:
    """Make edges programmatic in a graph (cudaGraph_t) that is not instantiated yet. Returns how many were changed.

    An edge can be changed if its target has no other predecessor and both ends are kernels.
    Raises: WorkerError when the driver refuses.
    """
    edges = _pdl_edges(_kernel_names(graph), _edges(graph))
    if edges:
        count = len(edges)
        sources, targets = ((ctypes.c_void_p * count)(*side) for side in zip(*edges, strict=True))
        ordinary = (_EdgeData * count)()
        programmatic = (_EdgeData * count)(*[_EdgeData(from_port=_PROGRAMMATIC, kind=_PROGRAMMATIC)] * count)
        size = ctypes.c_size_t(count)
        _call("cuGraphRemoveDependencies_v2", _handle(graph), sources, targets, ordinary, size)
        _call("cuGraphAddDependencies_v2", _handle(graph), sources, targets, programmatic, size)
    return len(edges)


def _pdl_edges(names: Mapping[int, str], edges: Iterable[tuple[int, int, bool]]) -> list[tuple[int, int]]:
    """Edges (from, to) that can be made programmatic."""
    before: dict[int, list[tuple[int, bool]]] = {}
    for source, target, is_ordinary in edges:
        before.setdefault(target, []).append((source, is_ordinary))
    return [
        (found[0][0], target)
        for target, found in before.items()
        if names.get(target, "").endswith(PDL_SUFFIX)
        and len(found) == 1
        and found[0][1]
        and found[0][0] in names
    ]


def _kernel_names(graph: int) -> dict[int, str]:
    """Kernel names by node handle."""
    count = ctypes.c_size_t()
    _call("cuGraphGetNodes", _handle(graph), None, ctypes.byref(count))
    nodes = (ctypes.c_void_p * count.value)()
    _call("cuGraphGetNodes", _handle(graph), nodes, ctypes.byref(count))
    names: dict[int, str] = {}
    for node in nodes:
        kind = ctypes.c_int()
        _call("cuGraphNodeGetType", _handle(node), ctypes.byref(kind))
        if kind.value == _KERNEL_NODE:
            names[int(node or 0)] = _kernel_name(int(node or 0))
    return names


def _kernel_name(node: int) -> str:
    params, name = _KernelParams(), ctypes.c_char_p()
    _call("cuGraphKernelNodeGetParams_v2", _handle(node), ctypes.byref(params))
    if params.function:
        _call("cuFuncGetName", ctypes.byref(name), _handle(params.function))
    else:
        _call("cuKernelGetName", ctypes.byref(name), _handle(params.kernel))
    return (name.value or b"").decode()


def _edges(graph: int) -> list[tuple[int, int, bool]]:
    """All edges as (from, to, whether it is an ordinary edge)."""
    count = ctypes.c_size_t()
    _call("cuGraphGetEdges_v2", _handle(graph), None, None, None, ctypes.byref(count))
    if not count.value:  # the driver refuses a request for zero edges
        return []
    sources, targets = ((ctypes.c_void_p * count.value)() for _ in range(2))
    data = (_EdgeData * count.value)()
    _call("cuGraphGetEdges_v2", _handle(graph), sources, targets, data, ctypes.byref(count))
    return [
        (int(source or 0), int(target or 0), not (each.from_port or each.to_port or each.kind))
        for source, target, each in zip(sources, targets, data, strict=True)
    ]


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _handle(value: int | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(value)


def _call(name: str, *arguments: object) -> None:
    status = getattr(_driver(), name)(*arguments)
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise WorkerError(
            f"the CUDA driver refused {name}: {(text.value or b'unknown error').decode()} ({status})",
            where="programmatic dependent launch",
            fix="report this together with the driver version",
        )
