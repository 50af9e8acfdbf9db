"""Priorities of the kernels in captured CUDA graphs, as the driver reports them."""

from __future__ import annotations

import ctypes

import pytest
import torch

from mingc.runtime.engines import stream_priority
from mingc.runtime.engines.cuda_graphs import GraphPool
from mingc.runtime.engines.programmatic_launch import _kernel_names
from mingc.runtime.thinker.layers import CommStream

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = torch.device("cuda", 0)
PRIORITY = 8  # CU_LAUNCH_ATTRIBUTE_PRIORITY


def priorities(graph: torch.cuda.CUDAGraph) -> list[int]:
    """Of the kernels of a graph, sorted."""
    driver = ctypes.CDLL("libcuda.so.1")
    found = []
    for node in _kernel_names(graph.raw_cuda_graph()):
        value = (ctypes.c_int * 16)()  # CUlaunchAttributeValue
        assert driver.cuGraphKernelNodeGetAttribute(ctypes.c_void_p(node), PRIORITY, value) == 0
        found.append(value[0])
    return sorted(found)


def test_decoding_overtakes_encoders_and_communication_overtakes_both() -> None:
    x, comm = torch.zeros(8, device=DEVICE), CommStream(DEVICE)

    def run() -> tuple[torch.Tensor, ...]:
        x.add_(1)
        comm.start(lambda: x.mul_(2))()
        return (x,)

    decoding, _ = GraphPool(DEVICE).capture(run, "a step")
    assert priorities(decoding) == [stream_priority.COMMUNICATION, stream_priority.DECODING] == [-2, -1]
    encoders, _ = GraphPool(DEVICE, stream_priority.ENCODERS).capture(lambda: (x.add_(1),), "an encoder")
    assert priorities(encoders) == [stream_priority.ENCODERS] == [0]
