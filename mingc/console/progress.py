"""Progress of long jobs on stderr: a bar on a terminal, one plain line per step otherwise."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

_FIRST_ESTIMATE = 3  # steps done; before, the time left is a guess


class Progress(Protocol):
    """Callback before and after each step: steps done, total steps, name of the step, and its seconds.

    Seconds are None for a step that begins. Several may run at the same time.
    """

    def __call__(self, done: int, total: int, step: str, seconds: float | None, /) -> None: ...


def step_logger(title: str) -> Callable[[str], None]:
    """Callback that logs each next step as one line, for jobs with an unknown number of steps."""

    def log(step: str) -> None:
        # In one piece: several threads may log.
        sys.stderr.write(f"{title}: {step}\n")
        sys.stderr.flush()

    return log


@contextmanager
def progress(title: str) -> Iterator[Progress]:
    """Context manager with a `Progress` that is shown until the block ends."""
    if not sys.stderr.isatty():
        yield _Lines(title)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as RichProgress

    last = TextColumn("{task.fields[step]}")
    columns = (
        TextColumn(title),
        BarColumn(30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
        last,
    )
    with RichProgress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=None, step="starting", left="")
        running: list[str] = []
        clock = _Clock()

        def draw(done: int, total: int, step: str, seconds: float | None, /) -> None:
            if seconds is None:
                running.append(step)
            elif step in running:
                running.remove(step)
            bar.update(task, completed=done, total=total, step=_shown(running), left=clock.left(done, total))

        yield draw


def _shown(running: Sequence[str]) -> str:
    """Name the step that has run longest, and count the others."""
    if not running:
        return ""
    return running[0] if len(running) == 1 else f"{running[0]} (+{len(running) - 1})"


class _Lines:
    """Progress as one line per step that ended."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._clock = _Clock()

    def __call__(self, done: int, total: int, step: str, seconds: float | None, /) -> None:
        if seconds is None:
            return
        left = self._clock.left(done, total)
        print(
            f"{self._title}: {done}/{total} {step} {seconds:.1f} s{left and ', ' + left}",
            file=sys.stderr,
            flush=True,
        )


class _Clock:
    """Time left, if the remaining steps take as long as those done: a rough figure, shown from a minute on."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    def left(self, done: int, total: int) -> str:
        """Return `about 4 min left`, or nothing while too little is done or left."""
        if not _FIRST_ESTIMATE <= done < total:
            return ""
        minutes = (time.monotonic() - self._started) / done * (total - done) / 60
        return f"about {minutes:.0f} min left" if minutes >= 1 else ""
