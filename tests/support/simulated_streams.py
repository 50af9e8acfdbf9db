"""Simulation on the CPU of the CUDA streams, events and graphs that `mingc.runtime.talker.patch_pipeline` uses.

Launched work runs late, in a random order that streams and events allow, so a missing dependency shows as a wrong
order in some seed.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from torch import Tensor

from mingc.runtime.engines.cuda_graphs import Shapes


class Event:
    """An event; it counts as reached when the last launched `record` has run."""

    def __init__(self) -> None:
        self.launched = 0
        self.reached = 0

    def record(self, stream: Stream) -> None:
        self.launched += 1
        number = self.launched

        def reach() -> None:
            self.reached = number

        stream.add(reach)


class Stream:
    """Work that runs in order."""

    def __init__(self) -> None:
        self.work: deque[tuple[Callable[[], bool], Callable[[], None]]] = deque()

    def add(self, run: Callable[[], None], is_ready: Callable[[], bool] = lambda: True) -> None:
        self.work.append((is_ready, run))

    def wait_event(self, event: Event) -> None:
        number = event.launched
        self.add(lambda: None, lambda: event.reached >= number)

    def wait_stream(self, other: Stream) -> None:
        event = Event()
        event.record(other)
        self.wait_event(event)


class Device:
    """All streams of one device, and stand-ins for what the pipeline's module imports."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._main = Stream()
        self._streams = [self._main]
        self._current = [self._main]
        device = self

        def make_stream(_: torch.device, priority: int) -> Stream:
            assert priority < 0, "encoders have 0: the talker overtakes them"
            device._streams.append(Stream())
            return device._streams[-1]

        @contextmanager
        def use(stream: Stream) -> Iterator[None]:
            device._current.append(stream)
            yield
            device._current.pop()

        def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
            device.launch(lambda: torch._foreach_copy_(targets, sources))

        cuda = SimpleNamespace(
            Stream=make_stream, Event=Event, stream=use, current_stream=lambda _: device._current[-1]
        )
        self.torch = SimpleNamespace(
            cuda=cuda,
            _foreach_copy_=copy_all,
            zeros_like=torch.zeros_like,
            int64=torch.int64,
            float32=torch.float32,
        )

        class Graph:
            def __init__(self, run: Callable[[], tuple[Tensor, ...]], outputs: tuple[Tensor, ...]) -> None:
                self._run, self._outputs = run, outputs
                self.overwritten: list[Tensor] = []

            def replay(self) -> None:
                device.launch(self._replay)

            def _replay(self) -> None:
                with device._inside_a_graph():
                    made = self._run()
                for each in self.overwritten:
                    each.fill_(-1)
                for output, value in zip(self._outputs, made, strict=True):
                    output.copy_(value)

        class GraphPool:
            """The outputs of a graph lie where all graphs captured before it keep intermediates."""

            def __init__(self, _: torch.device) -> None:
                self._graphs: list[Graph] = []

            def capture(
                self, run: Callable[[], tuple[Tensor, ...]], _: str
            ) -> tuple[Graph, tuple[Tensor, ...]]:
                with device._inside_a_graph():
                    outputs = tuple(value.clone() for value in run())
                for each in self._graphs:
                    each.overwritten.extend(outputs)
                self._graphs.append(Graph(run, outputs))
                return self._graphs[-1], outputs

        class StagingBuffer:
            def __init__(self, shapes: Shapes, _: torch.device) -> None:
                self.tensors = {
                    name: torch.zeros(tuple(shape), dtype=dtype) for name, (dtype, shape) in shapes.items()
                }

            def write(self, values: Mapping[str, Tensor]) -> None:
                device.launch(lambda: [self.tensors[name].copy_(value) for name, value in values.items()])

        class AsyncHostCopy:
            def __init__(self, *values: Tensor) -> None:
                self._copies: list[Tensor] = []
                device.launch(lambda: self._copies.extend(value.clone() for value in values))

            def wait(self) -> tuple[Tensor, ...]:
                while not self._copies:
                    device.run_something()
                return tuple(self._copies)

        self.GraphPool, self.StagingBuffer, self.AsyncHostCopy = GraphPool, StagingBuffer, AsyncHostCopy

    def launch(self, run: Callable[[], object]) -> None:
        """On the current stream."""

        def call() -> None:
            run()

        self._current[-1].add(call)

    def run_something(self) -> None:
        """Run one work item of a random stream that is ready."""
        ready = [stream for stream in self._streams if stream.work and stream.work[0][0]()]
        assert ready, "every stream waits for another"
        self._random.choice(ready).work.popleft()[1]()

    @contextmanager
    def _inside_a_graph(self) -> Iterator[None]:
        """Ignore stream operations during capture: they only add edges to the graph, which runs as one item."""
        streams, current = self._streams, self._current
        self._streams, self._current = [], [Stream()]
        kept = [(stream, stream.work) for stream in streams]
        for stream in streams:
            stream.work = deque()
        yield
        for stream, work in kept:
            stream.work = work
        self._streams, self._current = streams, current
