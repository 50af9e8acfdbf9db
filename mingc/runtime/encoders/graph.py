"""Calls of an encoder's graph with host tensors: on CUDA on a separate stream, small sizes as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from mingc.dtypes import torch_dtype
from mingc.runtime.encoders import host_tensors
from mingc.runtime.engines import stream_priority
from mingc.runtime.engines.base import Graph
from mingc.runtime.engines.cuda_graphs import AsyncHostCopy, GraphPool, GraphRunner

_Shapes = tuple[torch.Size, ...]


class EncoderGraph:
    """Runs `graph`, whose output is `embeddings`, on `device`. Call it from one thread.

    On CUDA neither a call nor other streams wait for each other: inputs come from the host, and the output is on the
    host before the call returns. No device tensor is used on two streams, so torch's allocator, which reuses memory
    within the stream that it was allocated for, needs no events.

    Args:
        examples: valid inputs of the sizes to capture on CUDA, the largest first, so that the others reuse its memory.
            Other sizes are called directly.
        prepare: computes the inputs of the graph on the device from the tensors of a call; None: a call has the inputs.
    """

    def __init__(
        self,
        graph: Graph,
        device: torch.device,
        examples: Iterable[Mapping[str, Tensor]] = (),
        prepare: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] | None = None,
    ) -> None:
        self._graph = graph
        self._prepare = prepare
        self._device = device
        self._dtypes = {each.name: torch_dtype(each.dtype) for each in graph.spec.inputs}
        self._runners: dict[_Shapes, GraphRunner] = {}
        self._stream: torch.cuda.Stream | None = None
        if device.type != "cuda":
            return
        self._stream = torch.cuda.Stream(device, priority=stream_priority.ENCODERS)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))  # the weights are being copied there
        # Static inputs are allocated and written on the stream on which they are replayed.
        with torch.cuda.stream(self._stream):
            pool = GraphPool(device, stream_priority.ENCODERS)  # not shared with an encoder of another thread
            for example in examples if graph.is_capturable else ():
                self._capture(example, pool)
        self._stream.synchronize()

    @property
    def num_captured(self) -> int:
        """How many sizes are captured."""
        return len(self._runners)

    @torch.inference_mode()
    def __call__(self, inputs: Mapping[str, Tensor], num_rows: int) -> Tensor:
        """Returns on the host the first `num_rows` embeddings for host tensors `inputs`, which are padded to buckets.

        Converts the inputs of the graph to the dtypes of the spec. Blocks until the device is done.
        """
        if self._stream is None:
            output = self._run({name: value.to(self._device) for name, value in inputs.items()})[:num_rows]
            return host_tensors.copy(output)  # the last request to drop it may do so on the event loop
        with torch.cuda.stream(self._stream):
            runner = self._runners.get(_shapes(inputs))
            if runner is None:
                output = self._run({name: value.to(self._device) for name, value in inputs.items()})
            else:
                (output,) = runner(inputs)
            # The next call overwrites the output of a CUDA graph: it is launched on this stream, behind the copy.
            return AsyncHostCopy(output[:num_rows]).wait()[0]

    def _run(self, tensors: Mapping[str, Tensor]) -> Tensor:
        inputs = tensors if self._prepare is None else self._prepare(tensors)
        converted = {name: value.to(self._dtypes[name]) for name, value in inputs.items()}
        return self._graph.run(**converted)["embeddings"]

    @torch.inference_mode()
    def _capture(self, example: Mapping[str, Tensor], pool: GraphPool) -> None:
        sizes = ", ".join(f"{name} {list(value.shape)}" for name, value in example.items())
        self._runners[_shapes(example)] = GraphRunner(
            {name: (self._dtypes.get(name, value.dtype), value.shape) for name, value in example.items()},
            lambda tensors: (self._run(tensors),),
            device=self._device,
            pool=pool,
            name=f"{self._graph.spec.name}: {sizes}",
            initial=example,
        )


def _shapes(inputs: Mapping[str, Tensor]) -> _Shapes:
    """Key of a call: the shapes of its inputs, by name."""
    return tuple(inputs[name].shape for name in sorted(inputs))
