"""Files of mingc that a spoken chat executes, in the order in which they are first entered.

Run as a script to print them: `python tests/support/request_trace.py ARTIFACT`.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import FrameType

import httpx
from server_thread import run_server

import mingc
from mingc.media.decoder_pool import DecoderPool
from mingc.runtime.service.builder import open_service
from mingc.runtime.service.options import EngineOptions
from mingc.runtime.service.startup_clock import StartupClock

PACKAGE = Path(mingc.__file__).parent


class FileTrace:
    """Profiler hook that records files of mingc while `is_on`. Threads started after `install` are covered."""

    def __init__(self) -> None:
        self.is_on = False
        self.files: dict[str, int] = {}

    def install(self) -> None:
        threading.setprofile(self._see)
        sys.setprofile(self._see)

    def remove(self) -> None:
        threading.setprofile(None)
        sys.setprofile(None)

    def _see(self, frame: FrameType, event: str, argument: object) -> None:
        if not self.is_on or event != "call":
            return
        name = frame.f_code.co_filename
        if name.startswith(str(PACKAGE)):
            relative = Path(name).relative_to(PACKAGE.parent).as_posix()
            self.files[relative] = self.files.get(relative, 0) + 1


def trace_spoken_chat(artifact: Path) -> list[str]:
    """Paths such as `mingc/server/http/routes.py`, first entered first, of one streamed chat with speech."""
    trace = FileTrace()
    trace.install()
    try:
        with run_server(
            lambda: open_service(artifact, EngineOptions(), StartupClock(), media=DecoderPool())
        ) as url:
            body = {
                "modalities": ["text", "audio"],
                "audio": {"format": "pcm16", "max_steps": 2},
                "messages": [{"role": "user", "content": "How are you today?"}],
                "max_tokens": 12,
                "ignore_eos": True,
                "stream": True,
            }
            trace.is_on = True
            answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300)
            trace.is_on = False
            answer.raise_for_status()
            assert '"audio"' in answer.text, "the answer holds no speech"
    finally:
        trace.remove()
    return list(trace.files)


if __name__ == "__main__":
    print("\n".join(trace_spoken_chat(Path(sys.argv[1]))))
