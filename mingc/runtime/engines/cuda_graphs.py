"""CUDA graphs over static tensors: capture, replay, upload of inputs, asynchronous copy of outputs to the host.

On the CPU the same classes call the function directly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from mingc.errors import WorkerError
from mingc.runtime.engines import stream_priority
from mingc.runtime.engines.programmatic_launch import enable_pdl

Shapes = Mapping[str, tuple[torch.dtype, Sequence[int]]]

_ALIGNMENT = 64  # bytes; engines copy inputs that are aligned to less than 16
_WARM_UPS = 2  # the first call of an engine loads its kernels, which is not allowed during capture


def current_device(device: torch.device) -> AbstractContextManager[None]:
    """Make `device` the current device of this thread inside a block; a CPU needs nothing.

    Loading an engine changes the current device, and code that names no device runs on it.
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class GraphPool:
    """A capture stream and a memory pool for intermediates, which several graphs of one device share.

    Graphs of one pool overwrite each other's intermediates, so replay them on the same stream. Their kernels have the
    `priority`.
    """

    def __init__(self, device: torch.device, priority: int = stream_priority.DECODING) -> None:
        self._stream = torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]
        self._handle = torch.cuda.graph_pool_handle()

    def capture(
        self, run: Callable[[], tuple[Tensor, ...]], name: str
    ) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]:
        """Capture `run`, after two warm-up calls. Returns the graph and its outputs, which every replay overwrites.

        Raises: WorkerError when the device runs out of memory.
        """
        try:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
            with torch.cuda.stream(self._stream):
                for _ in range(_WARM_UPS):
                    run()
            self._stream.synchronize()
            graph = torch.cuda.CUDAGraph(keep_graph=True)
            with torch.cuda.graph(
                graph, pool=self._handle, stream=self._stream, capture_error_mode="thread_local"
            ):
                outputs = run()
            enable_pdl(graph.raw_cuda_graph())
            graph.instantiate()
        except torch.cuda.OutOfMemoryError as error:
            raise WorkerError(
                f"not enough GPU memory to capture {name}: {error}",
                where=name,
                fix="free memory on the device, pass a smaller --max-speech-seqs, or export smaller batch sizes",
            ) from error
        return graph, outputs


class StagingBuffer:
    """Named input tensors in one contiguous block, so that a single copy uploads them all."""

    def __init__(self, shapes: Shapes, device: torch.device) -> None:
        self._places: dict[str, tuple[int, int, torch.dtype, tuple[int, ...]]] = {}
        end = 0
        for name, (dtype, shape) in shapes.items():
            num_bytes = math.prod(shape) * dtype.itemsize
            self._places[name] = (end, num_bytes, dtype, tuple(shape))
            end += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        self._block = torch.zeros(end, dtype=torch.uint8, device=device)
        self.tensors = self._views(self._block)

    def write(self, values: Mapping[str, Tensor]) -> None:
        """Overwrite the inputs. On CUDA this does not wait for the device."""
        if not self._places:
            return
        if not self._block.is_cuda:
            for name, value in values.items():
                self.tensors[name].copy_(value)
            return
        # torch's caching allocator does not reuse this pinned memory before the copy has finished.
        staged = torch.empty(self._block.shape, dtype=torch.uint8, pin_memory=True)
        views = self._views(staged)
        for name, value in values.items():
            views[name].copy_(value)
        self._block.copy_(staged, non_blocking=True)

    def _views(self, block: Tensor) -> dict[str, Tensor]:
        return {
            name: block[start : start + num_bytes].view(dtype).view(shape)
            for name, (start, num_bytes, dtype, shape) in self._places.items()
        }


class AsyncHostCopy:
    """Copies tensors to the host asynchronously. Work launched later may overwrite `values`."""

    def __init__(self, *values: Tensor) -> None:
        self._copies = values
        self._event: torch.cuda.Event | None = None
        if not values[0].is_cuda:
            return
        self._copies = tuple(torch.empty(each.shape, dtype=each.dtype, pin_memory=True) for each in values)
        for copy, value in zip(self._copies, values, strict=True):
            copy.copy_(value, non_blocking=True)
        self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(values[0].device))

    @property
    def is_ready(self) -> bool:
        """Whether `wait` would not block."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> tuple[Tensor, ...]:
        """Returns the tensors on the host; blocks until they are there."""
        if self._event is not None:
            self._event.synchronize()
        return self._copies


class GraphRunner:
    """Runs a function of static input tensors: captured as a CUDA graph and replayed, or called directly.

    Args:
        shapes: dtype and shape of every input.
        run: computes outputs from the inputs without waiting for the device; may mutate state.
        pool: pool to capture into; None: call `run` directly.
        name: for error messages.
        initial: inputs to capture with; None: zeros.
    """

    def __init__(
        self,
        shapes: Shapes,
        run: Callable[[Mapping[str, Tensor]], tuple[Tensor, ...]],
        *,
        device: torch.device,
        pool: GraphPool | None,
        name: str,
        initial: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._inputs = StagingBuffer(shapes, device)
        if initial is not None:
            self._inputs.write(initial)
        self._run = run
        self._graph: torch.cuda.CUDAGraph | None = None
        self._outputs: tuple[Tensor, ...] = ()
        if pool is not None:
            self._graph, self._outputs = pool.capture(lambda: run(self._inputs.tensors), name)

    def __call__(self, values: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Run with `values`, which name every input. The next run overwrites the outputs."""
        self._inputs.write(values)
        if self._graph is None:
            return self._run(self._inputs.tensors)
        self._graph.replay()
        return self._outputs

    def close(self) -> None:
        """Release the graph; no run may follow."""
        if self._graph is not None:
            self._graph.reset()
