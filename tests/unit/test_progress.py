"""Progress of long jobs."""

from __future__ import annotations

import io
import sys

import pytest

from mingc.console.progress import progress, step_logger


def test_without_a_terminal_each_step_is_a_line_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("export") as report:
        report(1, 2, "engine cfm.sample", 35.25)
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
        report(1, 2, "engine cfm.sample", 35.25)
    assert "engine cfm.sample" in terminal.getvalue()
    assert "1/2" in terminal.getvalue()


def test_logged_steps_are_lines_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    log = step_logger("probe")
    log("engine cfm.sample")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "probe: engine cfm.sample\n")
