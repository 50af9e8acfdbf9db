"""Exit codes of the command line: problems found, bugs, interrupts."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from mingc_command import conformance, mingc_here

import mingc
from mingc.cli import main
from mingc.commands import doctor_report
from mingc.commands.doctor_report import DoctorReport, Verdict

_START_S = 30  # without torch, on a busy machine


def exit_code(*words: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.mark.parametrize(("options", "code"), [([], 0), (["--strict"], 3), (["--strict", "--json"], 3)])
@pytest.mark.parametrize("lacking", ["can_export", "can_serve"])
def test_doctor_reports_problems_and_fails_only_when_asked(
    options: list[str], code: int, lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    works = {"can_export": True, "can_serve": True, lacking: False}
    monkeypatch.setattr(doctor_report, "examine", lambda artifacts: DoctorReport(checks=(), **works))
    assert exit_code("doctor", *options) == code


@pytest.mark.parametrize(("works", "code"), [((True, True), 0), ((False, True), 3), ((True, False), 3)])
def test_strict_doctor_fails_when_a_stage_of_an_artifact_would_not_work(
    works: tuple[bool, bool], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdicts = tuple(
        Verdict(artifact=Path("x"), stage=stage, target="cpu", works=each)
        for stage, each in zip(("thinker", "talker"), works, strict=True)
    )
    report = DoctorReport(can_export=True, can_serve=True, checks=(), verdicts=verdicts)
    monkeypatch.setattr(doctor_report, "examine", lambda artifacts: report)
    assert exit_code("doctor", "x", "--strict") == code
    assert exit_code("doctor", "x") == 0


@pytest.mark.parametrize("options", [[], ["--strict"]])
def test_doctor_of_a_good_machine_succeeds(options: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    report = DoctorReport(can_export=True, can_serve=True, checks=())
    monkeypatch.setattr(doctor_report, "examine", lambda artifacts: report)
    assert exit_code("doctor", *options) == 0


@pytest.fixture
def _bug(monkeypatch: pytest.MonkeyPatch) -> None:
    def examine(artifacts: object) -> DoctorReport:
        raise LookupError("no such wheel")

    monkeypatch.setattr(doctor_report, "examine", examine)


_BUG = """\
mingc: error: this is a bug of mingc: LookupError: no such wheel
  where: mingc doctor{words}
  fix: run again with --debug and report the traceback
"""


@pytest.mark.usefixtures("_bug")
def test_a_bug_is_one_message_that_says_how_to_report_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("doctor") == 1
    assert capsys.readouterr() == ("", _BUG.format(words=""))


@pytest.mark.usefixtures("_bug")
def test_a_bug_is_an_object_with_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("doctor", "--json") == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["error"] == {
        "type": "MingcError",
        "message": "this is a bug of mingc: LookupError: no such wheel",
        "where": "mingc doctor --json",
        "fix": "run again with --debug and report the traceback",
    }
    assert err == _BUG.format(words=" --json")


@pytest.mark.usefixtures("_bug")
def test_debug_adds_the_traceback_of_a_bug(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("doctor", "--debug") == 1
    out, err = capsys.readouterr()
    assert out == "" and "Traceback (most recent call last)" in err and "in examine" in err
    assert err.endswith(_BUG.format(words=" --debug"))


# `mingc serve` of a service that answers without an artifact and without torch. Signals within argv[1] seconds count as
# one; with 0 the service never closes.
_SERVE = """
import asyncio, sys, types
from fake_service import FakeService
from mingc.cli import main
from mingc.console import signals

class Slow(FakeService):
    async def close(self, *, shutdown_timeout_s):
        print("closing", flush=True)
        while sys.argv[1] == "0":
            await asyncio.sleep(1)

builder = sys.modules["mingc.runtime.service.builder"] = types.ModuleType("builder")
builder.open_service = lambda *_, **__: Slow()
signals.SIGNAL_DEBOUNCE_S = float(sys.argv[1])
main(["serve", "artifact", "--port", "0", "--shutdown-timeout", "600", "--no-check-hashes"])
"""
# A command that works until it is interrupted and then takes its time.
_WORK = """
import sys, time
from mingc.commands import doctor_report
from mingc.cli import main
from mingc.console import signals

def examine(artifacts):
    try:
        print("begun", flush=True)
        time.sleep(600)
    finally:
        print("closing", flush=True)
        if sys.argv[1] == "0":
            time.sleep(600)

doctor_report.examine = examine
signals.SIGNAL_DEBOUNCE_S = float(sys.argv[1])
main(["doctor"])
"""


@contextmanager
def running(code: str, debounce_s: float) -> Iterator[subprocess.Popen[str]]:
    path = os.pathsep.join([str(Path(mingc.__file__).parents[1]), str(Path(__file__).parents[1] / "support")])
    environment = {**os.environ, "PYTHONPATH": path}
    environment.pop("PYTHONUNBUFFERED", None)  # what a script reads from the pipe must be flushed
    with subprocess.Popen(
        [sys.executable, "-c", code, str(debounce_s)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            readable, _, _ = select.select([process.stdout], [], [], _START_S)
            assert readable and process.stdout.readline(), "nothing comes through the pipe"
            yield process
        finally:
            process.kill()


def closing(process: subprocess.Popen[str]) -> None:
    """Wait until the process has got its first signal."""
    assert process.stdout is not None and process.stdout.readline() == "closing\n"


@pytest.mark.parametrize(("code", "expected"), [(_SERVE, 0), (_WORK, 130)], ids=["serve", "other"])
def test_one_interrupt_ends_a_server_in_order_and_other_commands_with_130(code: str, expected: int) -> None:
    with running(code, 600) as process:
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert process.returncode == expected
        assert "Traceback" not in err
        assert expected == 0 or err.strip() == "mingc: interrupted"


@pytest.mark.parametrize(
    ("code", "expected"), [(_SERVE, 130), (_WORK, -signal.SIGINT)], ids=["serve", "other"]
)
def test_a_second_interrupt_does_not_wait_for_the_shutdown(code: str, expected: int) -> None:
    with running(code, 0) as process:
        process.send_signal(signal.SIGINT)
        closing(process)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
        assert process.returncode == expected
        assert "Traceback" not in err


@pytest.mark.parametrize("words", [("--port",), ("--self-check=1",)])
def test_an_option_without_its_value_names_the_command(words: tuple[str, ...]) -> None:
    found = mingc_here("serve", "artifact", *words)
    assert found.code == 2
    assert "where: mingc serve\n" in found.stderr


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("inf", "must be a finite number"),
        ("١٢", "not a number"),
        ("1_0", "not a number"),
    ],
)
def test_a_duration_is_a_finite_number_in_plain_digits(value: str, said: str) -> None:
    found = mingc_here("serve", "artifact", "--header-timeout", value)
    assert found.code == 2
    assert "--header-timeout" in found.stderr and said in found.stderr


@pytest.mark.parametrize("words", [(), ("artifact", "--reference"), ("artifact", "--reference", "")])
def test_a_wrong_command_line_of_conformance_is_told_as_one_of_mingc(words: tuple[str, ...]) -> None:
    found = conformance(*words)
    assert found.code == 2
    assert all(part in found.stderr for part in ("error: ", "where: python -m conformance", "fix: see "))


def test_synth_refuses_an_empty_config(tmp_path: Path) -> None:
    found = mingc_here("synth", tmp_path / "out", "--config", "")
    assert found.code == 2
    assert "--config: the path is empty" in found.stderr
