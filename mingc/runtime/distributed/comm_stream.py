"""Work beside the current CUDA stream, also while it is captured into a graph; on the CPU it is done at once."""

from __future__ import annotations

from collections.abc import Callable

import torch

_FIRST = -1  # priority: its thread blocks are few, and what waits for them is long


class CommStream:
    """One function after the other, beside what its starter goes on with."""

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device, priority=_FIRST)  # type: ignore[no-untyped-call]

    def start(self, run: Callable[[], None]) -> Callable[[], None]:
        """Queue `run` behind what the current stream holds. Returns what makes that stream wait for its end.

        Until then nothing may write or free what `run` uses.
        """
        if self._stream is None:
            run()
            return lambda: None
        own = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(own)
        with torch.cuda.stream(self._stream):
            run()
            end = self._stream.record_event()
        return lambda: own.wait_event(end)
