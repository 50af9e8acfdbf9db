"""Puts the process's logging back: a command that runs in the process of its test sends all logs elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def restored_logging() -> Iterator[None]:
    """After the block the root logger has the handlers and the level of before, and libraries have no level."""
    root = logging.getLogger()
    handlers, level = [*root.handlers], root.level  # a copy: handlers are replaced within the list
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        for name in ("httpx", "httpcore", "asyncio", "uvicorn"):
            logging.getLogger(name).setLevel(logging.NOTSET)
