"""Tells on stderr how far a long job is: a bar on a terminal, one plain line a step otherwise."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol


class Progress(Protocol):
    """Called after every step with the steps done, the steps in all, what was done and the seconds it took."""

    def __call__(self, done: int, total: int, step: str, seconds: float, /) -> None: ...


def teller(title: str) -> Callable[[str], None]:
    """Tells what a job does next, one line each, where nobody knows how much there is to do."""

    def tell(step: str) -> None:
        print(f"{title}: {step}", file=sys.stderr, flush=True)

    return tell


@contextmanager
def progress(title: str) -> Iterator[Progress]:
    """A `Progress` that draws until the block ends."""
    if not sys.stderr.isatty():
        yield _Lines(title)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as RichProgress

    last = TextColumn("{task.fields[step]}")
    columns = (TextColumn(title), BarColumn(30), MofNCompleteColumn(), TimeElapsedColumn(), last)
    with RichProgress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=None, step="starting")

        def draw(done: int, total: int, step: str, seconds: float, /) -> None:
            bar.update(task, completed=done, total=total, step=f"{step} {seconds:.1f} s")

        yield draw


class _Lines:
    """One line a step."""

    def __init__(self, title: str) -> None:
        self._title = title

    def __call__(self, done: int, total: int, step: str, seconds: float, /) -> None:
        print(f"{self._title}: {done}/{total} {step} {seconds:.1f} s", file=sys.stderr, flush=True)
