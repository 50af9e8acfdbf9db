"""Side CUDA stream for communication that overlaps with compute, also during graph capture; inline on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mingc.runtime.engines import stream_priority


class CommStream:
    """Runs functions one after the other on a stream of its own, concurrently with the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device, priority=stream_priority.COMMUNICATION)  # type: ignore[no-untyped-call]

    def start(self, run: Callable[[], None]) -> Callable[[], None]:
        """Enqueue `run` after the work already queued on the current stream.

        Returns a function that makes the current stream wait for its end. Until then nothing may write or free the
        tensors that `run` uses.
        """
        if self._stream is None:
            run()
            return lambda: None
        main = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(main)
        with torch.cuda.stream(self._stream):
            run()
            end = self._stream.record_event()
        return lambda: main.wait_event(end)
