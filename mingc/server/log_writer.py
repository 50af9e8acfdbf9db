"""Writes the lines of stderr on a thread of its own, so that a reader that stalls stops nobody."""

from __future__ import annotations

import io
import logging
import os
import select
import threading
from collections import deque
from collections.abc import Callable

_QUEUE_BYTES = 4 << 20
_PART_BYTES = 64 << 10
_STALLED_S = 1.0  # a flush waits for a reader that has read nothing for so long


class LogWriter:
    """Queue of lines and the thread that writes them to a file descriptor. Thread-safe; nobody waits in `put`.

    Lines that find the queue full are dropped and counted. When there is room again, a line says how many.

    Args:
        report: makes the line for a number of dropped lines.
    """

    def __init__(self, descriptor: int, report: Callable[[int], bytes]) -> None:
        self.report = report
        self.num_dropped = 0
        self.num_bytes = 0  # not yet written
        self._descriptor = descriptor
        self._num_reported = 0
        self._is_stalled = False
        self._lines: deque[bytes] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    @property
    def limit(self) -> tuple[int, int]:
        """Bytes in the queue, and the most that it takes."""
        return self.num_bytes, _QUEUE_BYTES

    def put(self, line: bytes) -> None:
        """Queue a line that ends in a line break."""
        with self._changed:
            if self.num_bytes + len(line) > _QUEUE_BYTES:
                self.num_dropped += 1
                return
            self._report()
            self._add(line)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="mingc-log", daemon=True)
                self._thread.start()

    def flush(self) -> None:
        """Wait until all lines are written, unless the reader stalls.

        For a reader that stalls only the first call waits: at exit, every handler of a library flushes stderr.
        """
        with self._changed:
            while self.num_bytes and not self._is_stalled:
                self._is_stalled = not self._changed.wait(_STALLED_S)

    def _add(self, line: bytes) -> None:
        self._lines.append(line)
        self.num_bytes += len(line)
        self._changed.notify_all()

    def _report(self) -> None:
        if missing := self.num_dropped - self._num_reported:
            self._num_reported = self.num_dropped
            self._add(self.report(missing))

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._lines:
                    self._report()
                    if not self._lines:
                        self._changed.wait()
                part = [self._lines.popleft()]
                while self._lines and sum(map(len, part)) < _PART_BYTES:
                    part.append(self._lines.popleft())
            data = b"".join(part)
            is_written = self._write(data)
            with self._changed:
                self.num_bytes -= len(data)
                self._is_stalled = False
                self.num_dropped += 0 if is_written else len(part)
                self._changed.notify_all()
                if not is_written:
                    self._num_reported = self.num_dropped  # there is nobody to tell

    def _write(self, data: bytes) -> bool:
        """Write all of `data`, as fast as it is read. Returns False if nobody can read it."""
        left = memoryview(data)
        while left:
            try:
                left = left[os.write(self._descriptor, left) :]
            except BlockingIOError:  # another process has made the shared file non-blocking
                select.select((), (self._descriptor,), ())
            except OSError:  # the reader is gone, or the disk is full
                return False
        return True


class LogHandler(logging.Handler):
    """Passes records to a `LogWriter`."""

    def __init__(self, writer: LogWriter) -> None:
        super().__init__()
        self.writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record) + "\n"
        except (TypeError, ValueError, KeyError):  # the arguments do not fit the message
            self.handleError(record)
            return
        self.writer.put(line.encode(errors="backslashreplace"))

    def flush(self) -> None:
        """Wait until all lines are written, unless the reader stalls. Called at exit."""
        self.writer.flush()


class LogStream(io.TextIOBase):
    """Takes the place of `sys.stderr`: what is printed goes through the same queue.

    Args:
        stream: the stream whose place it takes.
        as_lines: makes log lines of printed text; None: text is passed on as it is.
    """

    def __init__(
        self, writer: LogWriter, stream: io.TextIOBase, as_lines: Callable[[str], str] | None
    ) -> None:
        self.writer = writer
        self.stream = stream
        self._as_lines = as_lines
        self._text = ""  # the beginning of a line
        self._lock = threading.Lock()

    def write(self, text: str) -> int:
        count = len(text)
        if self._as_lines is not None:
            with self._lock:
                text = self._text + text
                end = len(text) if text.endswith("\n") else 0
                text, self._text = text[:end], text[end:]
            if text.strip():
                text = self._as_lines(text.rstrip("\n")) + "\n"
        if text:
            self.writer.put(text.encode(errors="backslashreplace"))
        return count

    def flush(self) -> None:
        self.writer.flush()

    def fileno(self) -> int:
        return self.stream.fileno()

    def isatty(self) -> bool:
        return self.stream.isatty()

    @property
    def name(self) -> str:
        """Name of the stream, for errors."""
        return "<stderr>"
