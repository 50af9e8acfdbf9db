"""The server's side of decoder processes: one per decoding thread, started when needed."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from typing import Any

from mingc.artifacts.codec import encode
from mingc.errors import CapacityError, ConfigError, RequestError, WorkerError
from mingc.media.decoder_process import (
    DecoderConfig,
    TaskHead,
    receive,
    receive_array,
    send,
    unpack,
)
from mingc.media.decoding import digest_of, with_digest
from mingc.media.limits import DEFAULT_MEDIA_BYTES, too_large, undecodable
from mingc.media.options import DEFAULT_TIMEOUT_S, MediaOptions
from mingc.prompts.features import Features
from mingc.prompts.media_decoder import MediaTask

log = logging.getLogger("mingc.preprocess")
_EXIT_S = 5.0
# With one arena and a fixed threshold, the memory that a task frees returns to the system at once, except 4 MiB. These
# hold the arrays of a clip, which would otherwise take new pages for every clip: an eighth of its time.
_ENVIRONMENT = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 20),
    "MALLOC_TOP_PAD_": str(4 << 20),
    "OPENBLAS_NUM_THREADS": "1",
}


class DecoderPool:
    """Decodes media in separate processes. May be used from several threads.

    A process takes at most `max_bytes` (and a fixed margin) and `timeout_s` for one medium. While there are fewer than
    `num_prepared` processes, an idle one is kept ready for the next medium, as a start takes half a second.
    """

    def __init__(
        self,
        *,
        max_bytes: int = DEFAULT_MEDIA_BYTES,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        num_prepared: int = 1,
    ) -> None:
        self.max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._num_prepared = num_prepared
        self._idle: list[_Decoder] = []
        self._all: set[_Decoder] = set()
        self._is_closed = False
        self._lock = threading.Lock()

    @classmethod
    def from_options(cls, options: MediaOptions, *, num_prepared: int) -> DecoderPool:
        return cls(
            max_bytes=options.max_media_memory,
            timeout_s=options.media_decode_timeout_s,
            num_prepared=num_prepared,
        )

    def start(self) -> None:
        """Have a process ready for the next medium."""
        with self._lock:
            self._prepare()

    def run(self, task: MediaTask, data: bytes | memoryview) -> Features:
        """Run `run_task` in another process. The features have a `digest`.

        Raises: RequestError also when the decoder crashes or takes too long, CapacityError after `close`.
        """
        decoder = self._take()
        try:
            features, is_reusable = decoder.run(task, data)
        except (OSError, EOFError) as error:
            self._replace(decoder, has_failed=True)
            raise self._explain(decoder.process.returncode, task) from error
        except BaseException:
            self._replace(decoder)
            raise
        with self._lock:
            is_kept = is_reusable and not self._is_closed
            if is_kept:
                self._idle.append(decoder)
        if not is_kept:
            self._replace(decoder)
        if isinstance(features, Exception):
            raise features
        return features

    def close(self) -> None:
        """End all processes; running tasks fail."""
        with self._lock:
            self._is_closed = True
            decoders, idle = list(self._all), list(self._idle)
        for decoder in decoders:
            decoder.kill()
        for decoder in idle:
            self._drop(decoder)

    @property
    def pids(self) -> list[int]:
        """Ids of the running processes."""
        with self._lock:
            return [decoder.process.pid for decoder in self._all]

    def _take(self) -> _Decoder:
        with self._lock:
            if self._is_closed:
                raise CapacityError("the server is stopping", code="stopping")
            found = None
            while self._idle and found is None:
                decoder = self._idle.pop()
                if decoder.process.poll() is None:
                    found = decoder
                else:
                    decoder.end(has_failed=True)
                    self._all.discard(decoder)
            found = found or self._new()
            self._prepare()
            return found

    def _new(self) -> _Decoder:
        decoder = _Decoder(self.max_bytes, self._timeout_s)
        self._all.add(decoder)
        return decoder

    def _prepare(self) -> None:
        """Start the process that the next medium will take, unless one is idle or enough are running."""
        if self._is_closed or self._idle or len(self._all) >= self._num_prepared:
            return
        try:
            self._idle.append(self._new())
        except OSError as error:  # the next medium tries again, and fails if that fails
            log.warning("a media decoder cannot be started: %s", error)

    def _replace(self, decoder: _Decoder, *, has_failed: bool = False) -> None:
        self._drop(decoder, has_failed=has_failed)
        self.start()

    def _drop(self, decoder: _Decoder, *, has_failed: bool = False) -> None:
        decoder.end(has_failed=has_failed)
        with self._lock:
            self._all.discard(decoder)
            if decoder in self._idle:
                self._idle.remove(decoder)

    def _explain(self, code: int | None, task: MediaTask) -> Exception:
        if self._is_closed:
            return CapacityError("the server is stopping", code="stopping")
        if code == -signal.SIGALRM:
            return too_large(f"decoding the {task.kind} took more than {self._timeout_s:g} s", task.where)
        if code is not None and code < 0:
            return undecodable(
                f"the {task.kind} ended its decoder by signal {-code}", task.where, "send another file"
            )
        return WorkerError(f"a media decoder exited with code {code}", where=task.where)


class _Decoder:
    """One decoder process."""

    def __init__(self, max_bytes: int, timeout_s: float) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as ours:
            ours.enter_context(self._socket)  # closed if the process cannot be started
            config = DecoderConfig(socket=theirs.fileno(), max_bytes=max_bytes, timeout_s=timeout_s)
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "mingc.media.decoder_process",
                    json.dumps(encode(config)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # decoders write about every damaged byte
                pass_fds=(theirs.fileno(),),
                env={**os.environ, **_ENVIRONMENT},
            )
            ours.pop_all()

    def run(self, task: MediaTask, data: bytes | memoryview) -> tuple[Features | Exception, bool]:
        """Returns features or an error, and whether to use the process again. Raises: OSError, EOFError if it ended."""
        send(self._socket, TaskHead(task=task, size=len(data)), data)
        digest = digest_of(task, data)  # while the process decodes
        head = receive(self._socket)
        is_reusable = not head["retire"]
        if "error" in head:
            kind: Any = ConfigError if head["is_config"] else RequestError
            message = head["error"].pop("message")
            return kind(message, **head["error"]), is_reusable
        arrays = [receive_array(self._socket, dtype, shape) for dtype, shape in head["arrays"]]
        return with_digest(unpack(head, arrays), digest), is_reusable

    def kill(self) -> None:
        """End the process. The thread that waits for its reply gets an EOFError."""
        self.process.kill()
        self.process.wait()

    def end(self, *, has_failed: bool) -> None:
        """End the process and close its socket. After a failure it ends by itself, and the exit code is the reason."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_EXIT_S if has_failed else 0)
        self.kill()
        self._socket.close()
