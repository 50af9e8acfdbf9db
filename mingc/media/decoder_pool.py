"""The server's side of decoder processes: one per decoding thread, started when needed."""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from mingc.artifacts.codec import encode
from mingc.errors import CapacityError, ConfigError, RequestError, WorkerError
from mingc.media.audio import Wave
from mingc.media.decoder_process import (
    DecoderConfig,
    TaskHead,
    receive,
    receive_array,
    send,
    unpack,
)
from mingc.media.decoding import digest_of, speech_finder, with_digest
from mingc.media.limits import DEFAULT_MEDIA_BYTES, stated_limits, too_large, undecodable
from mingc.media.options import DEFAULT_TIMEOUT_S, MediaOptions
from mingc.media.speech import BlockReader
from mingc.media.voice_clip import check_speech
from mingc.prompts.features import Features, VoiceClip
from mingc.prompts.media_decoder import MediaTask, TurnRules
from mingc.python_module import module_command, module_environment

log = logging.getLogger("mingc.preprocess")
_EXIT_S = 5.0
_GRACE_S = 5.0  # beyond the time of a task, in which the kernel ends the process unless it is stopped
_CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT}
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

    A process takes at most `max_bytes` (and a fixed margin) and `timeout_s` for one medium. A medium whose process dies
    is decoded again by a new one, once: a process may be killed for memory that others took. While there are fewer than
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

    def prepare(self) -> None:
        """Start a process for the next medium, unless one is idle or enough are running."""
        with self._lock:
            self._prepare()

    def start(self) -> None:
        """Wait until a process is ready.

        Raises: ConfigError when it cannot import a library, WorkerError when it ended.
        """
        self.prepare()
        with self._lock:
            decoder = self._idle[-1] if self._idle else None
        if decoder is None:
            return
        try:
            decoder.wait_until_ready()
        except (OSError, EOFError) as error:
            self._drop(decoder, has_failed=True)
            raise WorkerError(
                f"a media decoder ended with code {decoder.process.returncode} while it started",
                where="media input",
                fix="see `mingc doctor`",
            ) from error

    def run(self, task: MediaTask, data: bytes | memoryview) -> Features:
        """Run `run_task` in another process. The features have a `digest`.

        Raises: RequestError also when the medium takes too long or crashes two processes, WorkerError when a process
            does not answer or two are killed, CapacityError after `close` or when none can be started.
        """
        try:
            features = self._run(task, data)
        except _ProcessDied as death:
            log.warning(
                "a media decoder ended by signal %d; the %s is decoded again", death.signal, task.kind
            )
            try:
                features = self._run(task, data)
            except _ProcessDied as again:
                raise again.described(task) from again
        if isinstance(features, Exception):
            raise features
        if isinstance(features, VoiceClip):
            check_speech(features, task.where)
        return features

    def read_speech(self, task: MediaTask, data: bytes | memoryview, rules: TurnRules) -> PooledReader:
        """See `MediaDecoder`."""
        return PooledReader(self, task, data, rules)

    def _run(self, task: MediaTask, data: bytes | memoryview) -> Features | Exception:
        """The result, or the error that the process reports. Raises: _ProcessDied, WorkerError, ..."""
        decoder = self.take()
        with self.explained(decoder, task):
            features, is_reusable = decoder.run(task, data)
        self.give_back(decoder, is_reusable=is_reusable)
        return features

    @contextlib.contextmanager
    def explained(self, decoder: _Decoder, task: MediaTask) -> Iterator[None]:
        """Replace a process whose work fails in this block. Raises: _ProcessDied, WorkerError, ..."""
        try:
            yield
        except TimeoutError as error:
            self._replace(decoder)
            log.error("media decoder %d does not answer; it was killed", decoder.process.pid)
            raise WorkerError(
                f"a media decoder did not answer for {decoder.patience_s:g} s",
                where=task.where,
                fix="send the request again",
            ) from error
        except (OSError, EOFError) as error:
            self._replace(decoder, has_failed=True)
            raise self._explain(decoder.process.returncode, task) from error
        except BaseException:
            self._replace(decoder)
            raise

    def give_back(self, decoder: _Decoder, *, is_reusable: bool = True) -> None:
        """Take a process back after its work."""
        with self._lock:
            is_kept = is_reusable and not self._is_closed
            if is_kept:
                self._idle.append(decoder)
        if not is_kept:
            self._replace(decoder)

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
    def limits(self) -> Mapping[str, int]:
        """See `MediaDecoder`."""
        return stated_limits(self.max_bytes)

    @property
    def pids(self) -> list[int]:
        """Ids of the running processes."""
        with self._lock:
            return [decoder.process.pid for decoder in self._all]

    def take(self) -> _Decoder:
        """A process for one task. Raises: CapacityError."""
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
            try:
                found = found or self._new()
            except OSError as error:
                raise CapacityError(
                    f"a media decoder cannot be started: {error}", code="overloaded"
                ) from error
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
        self.prepare()

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
            return _ProcessDied(-code)
        return WorkerError(f"a media decoder exited with code {code}", where=task.where)


class _ProcessDied(Exception):
    """A signal ended a decoder process."""

    def __init__(self, signal: int) -> None:
        super().__init__(signal)
        self.signal = signal

    def described(self, task: MediaTask) -> Exception:
        """The error when a second process died as well: a crash is the fault of the medium, a kill is not."""
        if self.signal in _CRASHES:
            return undecodable(
                f"the {task.kind} ended two decoders by signal {self.signal}", task.where, "send another file"
            )
        return WorkerError(f"two media decoders were killed by signal {self.signal}", where=task.where)


class PooledReader(BlockReader):
    """A `SpeechReader` whose decoder is a process of the pool, from the first `read` to the end of the file.

    The process waits while nobody reads; the time limit of a medium is for decoding the whole file.
    """

    def __init__(
        self, pool: DecoderPool, task: MediaTask, data: bytes | memoryview, rules: TurnRules
    ) -> None:
        super().__init__(speech_finder(task, rules))
        self._pool = pool
        self._task = replace(task, is_stream=True)
        self._data = data
        self._decoder: _Decoder | None = None
        self._is_closed = False
        self._lock = threading.Lock()  # of these two, which `close` reads on another thread
        self._is_first_try = True

    def next_block(self) -> Wave | None:
        """See `BlockReader`. A process that dies before the first block is replaced, once. Raises: see `run`."""
        try:
            return self._next_block()
        except _ProcessDied as death:
            if self.duration_ms or self._is_closed or not self._is_first_try:
                raise death.described(self._task) from death
            self._is_first_try = False
            return self.next_block()

    def close(self) -> None:
        """See `SpeechReader`."""
        with self._lock:
            self._is_closed = True
        if (decoder := self._release()) is not None:
            decoder.kill()  # a thread that reads gets an EOFError
            self._pool.give_back(decoder, is_reusable=False)

    def _next_block(self) -> Wave | None:
        decoder = self._decoder
        if is_new := decoder is None:
            decoder = self._pool.take()
            with self._lock:
                self._decoder = None if self._is_closed else decoder
            if self._decoder is None:
                self._pool.give_back(decoder)
                return None
        assert decoder is not None
        try:
            with self._pool.explained(decoder, self._task):
                if is_new:
                    decoder.begin(self._task, self._data)
                block = decoder.next_block()
        except BaseException:
            self._release()
            raise
        if isinstance(block, Wave):
            return block
        error, is_reusable = block
        if self._release() is not None:
            self._pool.give_back(decoder, is_reusable=is_reusable)
        if error is not None:
            raise error
        return None

    def _release(self) -> _Decoder | None:
        """Take the process from this reader, if it has one."""
        with self._lock:
            decoder, self._decoder = self._decoder, None
            return decoder


def _reported(head: dict[str, Any]) -> Exception:
    """The error that a process reports."""
    kind: Any = ConfigError if head["is_config"] else RequestError
    message = head["error"].pop("message")
    error: Exception = kind(message, **head["error"])
    return error


class _Decoder:
    """One decoder process."""

    def __init__(self, max_bytes: int, timeout_s: float) -> None:
        self._socket, theirs = socket.socketpair()
        self.patience_s = timeout_s + _GRACE_S
        self._socket.settimeout(self.patience_s)
        self._is_ready = False
        with theirs, contextlib.ExitStack() as ours:
            ours.enter_context(self._socket)  # closed if the process cannot be started
            config = DecoderConfig(socket=theirs.fileno(), max_bytes=max_bytes, timeout_s=timeout_s)
            self.process = subprocess.Popen(
                module_command("mingc.media.decoder_process", json.dumps(encode(config))),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # decoders write about every damaged byte
                pass_fds=(theirs.fileno(),),
                env={**module_environment(), **_ENVIRONMENT},
            )
            ours.pop_all()

    def run(self, task: MediaTask, data: bytes | memoryview) -> tuple[Features | Exception, bool]:
        """Returns features or an error, and whether to use the process again.

        Raises: OSError, EOFError if it ended; TimeoutError if it does not answer; ConfigError if it lacks a library.
        """
        self.wait_until_ready()
        send(self._socket, TaskHead(task=task, size=len(data)), data)
        digest = digest_of(task, data)  # while the process decodes
        head = receive(self._socket)
        is_reusable = not head["retire"]
        if "error" in head:
            return _reported(head), is_reusable
        arrays = [receive_array(self._socket, dtype, shape) for dtype, shape in head["arrays"]]
        return with_digest(unpack(head, arrays), digest), is_reusable

    def begin(self, task: MediaTask, data: bytes | memoryview) -> None:
        """Send a task whose result `next_block` reads. Raises: see `run`."""
        self.wait_until_ready()
        send(self._socket, TaskHead(task=task, size=len(data)), data)

    def next_block(self) -> Wave | tuple[Exception | None, bool]:
        """A block of sound, or at the end an error and whether to use the process again. Raises: see `run`."""
        head = receive(self._socket)
        if "rate" not in head:
            return _reported(head) if "error" in head else None, not head["retire"]
        ((dtype, shape),) = head["arrays"]
        return Wave(samples=receive_array(self._socket, dtype, shape), sample_rate=head["rate"])

    def wait_until_ready(self) -> None:
        """Raises: ConfigError when the process cannot import a library, and what `run` raises."""
        if self._is_ready:
            return
        head = receive(self._socket)
        if "error" in head:
            raise ConfigError(head["error"].pop("message"), **head["error"])
        self._is_ready = True

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
