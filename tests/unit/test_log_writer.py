"""The queue of stderr, with a reader that stalls."""

from __future__ import annotations

import os
import threading

import pytest

from mingc.server import log_writer
from mingc.server.log_writer import LogWriter

LINES = [b"%0200d\n" % index for index in range(2_000)]  # more than a pipe holds


def test_only_the_first_flush_waits_for_a_reader_that_stalls(monkeypatch: pytest.MonkeyPatch) -> None:
    """At exit `logging` flushes every handler, and torch has one for each of its loggers."""
    waits: list[float] = []

    class Counted(threading.Condition):
        def wait(self, timeout: float | None = None) -> bool:
            if timeout is not None:
                waits.append(timeout)
            return super().wait(timeout)

    monkeypatch.setattr(log_writer, "_STALLED_S", 0.05)
    monkeypatch.setattr(threading, "Condition", Counted)
    reader, descriptor = os.pipe()
    writer = LogWriter(descriptor, lambda count: b"%d lines were dropped\n" % count)
    monkeypatch.undo()
    monkeypatch.setattr(log_writer, "_STALLED_S", 0.05)
    for line in LINES:
        writer.put(line)
    writer.flush()
    assert writer.num_bytes > 0
    waits.clear()
    for _ in range(20):
        writer.flush()
    assert waits == []

    with open(reader, "rb") as stream:
        assert [next(stream) for _ in LINES] == LINES
        writer.put(b"last\n")
        assert next(stream) == b"last\n"
    writer.flush()
    assert writer.num_bytes == 0
    os.close(descriptor)
