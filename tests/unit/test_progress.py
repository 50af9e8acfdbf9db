"""Progress of long jobs."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace

import pytest

from mingc.console.progress import progress, step_logger


def test_without_a_terminal_each_step_is_a_line_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("export") as report:
        report(0, 2, "engine cfm.sample", None)
        report(1, 2, "engine cfm.sample", 35.25)
        report(1, 2, "manifest", None)
        report(2, 2, "manifest", 0.0)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == ["export: 1/2 engine cfm.sample 35.2 s", "export: 2/2 manifest 0.0 s"]


def test_on_a_terminal_progress_is_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with progress("export") as report:
        report(0, 3, "engine cfm.sample", None)
        report(0, 3, "engine cfm.speaker", None)
        report(1, 3, "engine cfm.sample", 35.25)
    assert "1/3" in terminal.getvalue()


def test_the_bar_names_the_steps_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    def update(bar: object, task: object, *, completed: int, total: int, step: str, left: str) -> None:
        shown.append(step)

    monkeypatch.setattr(
        sys, "stderr", SimpleNamespace(isatty=lambda: True, write=lambda _: 0, flush=lambda: None)
    )
    monkeypatch.setattr("rich.progress.Progress.update", update)
    with progress("export") as report:
        for step, seconds in (("a", None), ("b", None), ("c", None), ("a", 1.0), ("c", 1.0), ("b", 1.0)):
            report(0, 3, step, seconds)
    assert shown == ["a", "a (+1)", "a (+2)", "b (+1)", "b", ""]


def test_logged_steps_are_lines_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    log = step_logger("probe")
    log("engine cfm.sample")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "probe: engine cfm.sample\n")


def test_the_time_left_is_that_of_the_steps_so_far(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr("mingc.console.progress.time", SimpleNamespace(monotonic=lambda: now[0]))
    with progress("export") as report:
        for done in (1, 2, 3, 9, 10):
            now[0] = 100.0 + 60.0 * done
            report(done, 10, "x", 60.0)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "export: 1/10 x 60.0 s",
        "export: 2/10 x 60.0 s",
        "export: 3/10 x 60.0 s, about 7 min left",
        "export: 9/10 x 60.0 s, about 1 min left",
        "export: 10/10 x 60.0 s",
    ]
