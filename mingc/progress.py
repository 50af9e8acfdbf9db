"""Tells on stderr how far a long job is: a bar on a terminal, one plain line a step otherwise."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Progress(Protocol):
    """Called before every step with the steps done so far, the steps in all, and what comes now."""

    def __call__(self, done: int, total: int, step: str, /) -> None: ...


@contextmanager
def progress(title: str) -> Iterator[Progress]:
    """A `Progress` that draws until the block ends."""
    if not sys.stderr.isatty():
        yield _Lines(title)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as RichProgress

    columns = (
        TextColumn(title),
        BarColumn(30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[step]}"),
    )
    with RichProgress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None, step="")

        def draw(done: int, total: int, step: str, /) -> None:
            bar.update(task, completed=done, total=total, step=step)

        yield draw


class _Lines:
    """One line a step with the seconds since the start."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._start = time.monotonic()

    def __call__(self, done: int, total: int, step: str, /) -> None:
        seconds = time.monotonic() - self._start
        print(f"{self._title}: {done}/{total} {step} ({seconds:.0f} s)", file=sys.stderr, flush=True)
