"""Run parts of a measuring script as processes with limits, so that a part that fails or hangs leaves the others."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Running:
    """A process in its own session that may run until `end` (monotonic clock)."""

    name: str
    process: subprocess.Popen[bytes]
    end: float


class Driver:
    """Runs parts of a script as processes with limits, and keeps what they report as soon as they end.

    Args:
        script: the script, which runs one of its parts when asked to.
        output: folder of `results.json` and, with `document`, `result.json`.
        folder: scratch; a part writes its result to `NAME.json` there.
        limit: seconds of the whole run.
        document: the result file of the results so far; None: there is none.
    """

    def __init__(
        self,
        script: Path,
        output: Path,
        folder: Path,
        limit: float,
        document: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None,
    ) -> None:
        self._script, self._output, self._folder, self._document = script, output, folder, document
        self._end = time.monotonic() + limit
        self._running: list[Running] = []
        self.results: dict[str, Any] = {}

    @property
    def left(self) -> float:
        """Seconds of the whole run that are left."""
        return self._end - time.monotonic()

    def start(
        self, name: str, words: list[str], limit: float, environment: Mapping[str, str] | None = None
    ) -> Running:
        """Start a command that is killed after `limit` seconds, or at the end of the run."""
        (self._folder / f"{name}.json").unlink(missing_ok=True)  # of an earlier run
        paths = [self._folder / f"{name}.{kind}" for kind in ("out", "log")]
        with paths[0].open("wb") as out, paths[1].open("wb") as log:
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=log,
                cwd=ROOT,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": python_path(), **(environment or {})},
            )
        running = Running(name, process, time.monotonic() + min(limit, max(0.0, self.left)))
        self._running.append(running)
        return running

    def part(self, *words: str) -> list[str]:
        """The command of a part that is a function of the script."""
        script = [sys.executable, "-X", "faulthandler", "-u", "-W", "ignore", str(self._script)]
        return [*script, "--folder", str(self._folder), *words]

    def is_done(self, running: Running) -> bool:
        """Whether the part has ended. Keeps its result; kills it when it is out of time."""
        code: Any = running.process.poll()
        if code is None and time.monotonic() < running.end:
            return False
        if code is None:
            code = "out of time"
        self.stop(running)
        name = running.name
        result, out = self._folder / f"{name}.json", self._folder / f"{name}.out"
        if result.exists():
            self.keep(name, json.loads(result.read_text(encoding="utf-8")))
            return True
        text = out.read_bytes().decode(errors="replace")
        log = (self._folder / f"{name}.log").read_bytes().decode(errors="replace")
        row: dict[str, Any] = {"exit": code, "log": log[-2500:]}
        try:
            row["document"] = json.loads(text)
        except ValueError:
            row["out"] = text[-1000:]
        self.keep(name, row)
        return True

    def finish(self, running: Running) -> Any:
        """Wait for a part to end, or for its limit. Returns its result."""
        while not self.is_done(running):
            time.sleep(0.1)
        return self.results[running.name]

    def stop(self, running: Running) -> None:
        """End a part with its children."""
        if running in self._running:
            self._running.remove(running)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.process.pid, signal.SIGKILL)
        running.process.wait()

    def stop_all(self) -> None:
        for running in [*self._running]:
            self.stop(running)

    def keep(self, name: str, found: Any) -> None:
        """Write all results with this one."""
        self.results[name] = found
        write_whole(self._output / "results.json", self.results)
        if self._document is not None:
            write_whole(self._output / "result.json", self._document(self.results))
        print(f"{self.left:6.0f} s left  {name}: {json.dumps(found)[:600]}", flush=True)


def python_path() -> str:
    """PYTHONPATH: this checkout, then the caller's."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def write_whole(path: Path, value: Any) -> None:
    """Write `value` as JSON, with null for infinite numbers and NaN, which JSON lacks."""
    partial = path.with_suffix(".partial")
    strict = json.loads(json.dumps(value), parse_constant=lambda _: None)
    partial.write_text(json.dumps(strict, indent=1) + "\n", encoding="utf-8")
    partial.rename(path)
