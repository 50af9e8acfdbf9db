"""What each command passes on from its options, and the exit code that it makes of the result.

The functions behind the commands are replaced; `tests/artifact` runs the real ones.
"""

from __future__ import annotations

import errno
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import mingc
from mingc import cli, demo, doctor
from mingc.cli import main
from mingc.console.signals import SIGNALS, clean_shutdown
from mingc.errors import RankError, WorkerError
from mingc.export.recipe import ExportRecipe
from mingc.probe import prober
from mingc.runtime.http import logs, server
from mingc.runtime.service import builder
from mingc.runtime.service.builder import EngineOptions
from mingc.verify import verification
from mingc.verify.verification import VerifyReport


@dataclass(frozen=True)
class Result:
    """What a replaced function returns; `show` prints any dataclass."""

    regressions: tuple[str, ...] = ()


def run(*words: str) -> int:
    """Exit code of `mingc WORDS` in this process."""
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Keyword arguments that `verify` and `run_demo` get, and attributes of the recipe of an export."""
    found: list[dict[str, Any]] = []

    def verify(path: Path, **given: Any) -> VerifyReport:
        found.append({"path": path, **given})
        return REPORT

    def run_demo(output: Path, **given: Any) -> Result:
        found.append({"output": output, **given})
        return Result()

    def export(recipe: ExportRecipe) -> Result:
        found.append({"recipe": recipe})
        return Result()

    monkeypatch.setattr(verification, "verify", verify)
    monkeypatch.setattr(demo, "run_demo", run_demo)
    monkeypatch.setattr(cli, "_export", export)
    return found


REPORT = VerifyReport(
    artifact=Path("x"),
    passed=True,
    checked=3,
    failed=0,
    expected_differences=0,
    files_hashed=1,
    files=(),
    comparisons=(),
    not_engine_outputs=(),
)


@pytest.mark.parametrize(("failed", "code"), [(0, 0), (1, 3), (3, 3)])
def test_verify_exits_with_3_when_a_comparison_fails(
    failed: int, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = replace(REPORT, passed=not failed, failed=failed)
    monkeypatch.setattr(verification, "verify", lambda path, **_: report)
    assert run("verify", "x") == code


@pytest.mark.parametrize("option", ["--reference", "--against"])
def test_verify_compares_with_the_folder_of_either_option(option: str, calls: list[dict[str, Any]]) -> None:
    assert run("verify", "x") == 0
    assert run("verify", "x", option, "goldens") == 0
    assert [each["reference"] for each in calls] == [None, Path("goldens")]


def test_verify_runs_engines_unless_no_replay_is_given(calls: list[dict[str, Any]]) -> None:
    assert run("verify", "x") == 0
    assert run("verify", "x", "--no-replay") == 0
    assert [each["replay"] for each in calls] == [True, False]


@pytest.mark.parametrize(("regressions", "code"), [((), 0), (("talker.step",), 3)])
def test_probe_exits_with_3_when_an_engine_is_slower_than_the_baseline(
    regressions: tuple[str, ...], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prober, "probe", lambda *_, **__: Result(regressions))
    assert run("probe", "x") == code


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_export_is_for_as_many_ranks_as_asked(ranks: int, calls: list[dict[str, Any]]) -> None:
    assert run("export", "x", "--output", "y", "--tp", str(ranks)) == 0
    assert [each["recipe"].world_size for each in calls] == [ranks]


def test_demo_exports_again_only_with_force(calls: list[dict[str, Any]]) -> None:
    assert run("demo", "--output", "y") == 0
    assert run("demo", "--output", "y", "--force") == 0
    assert [each["again"] for each in calls] == [False, True]


@pytest.fixture
def options_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., EngineOptions]]:
    """A function that gives the options with which `mingc serve ARTIFACT WORDS` opens the artifact; it then fails."""
    listeners: list[socket.socket] = []
    opened: list[EngineOptions] = []
    bind = server.bind_socket

    def open_service(artifact: Path, options: EngineOptions, clock: object) -> None:
        opened.append(options)
        raise WorkerError("far enough")

    def bind_socket(host: str, port: int) -> socket.socket:
        listeners.append(bind(host, port))
        return listeners[-1]

    monkeypatch.setattr(builder, "open_service", open_service)
    monkeypatch.setattr(server, "bind_socket", bind_socket)
    monkeypatch.setattr(logs, "configure_logging", lambda *_: None)

    def options(*words: str) -> EngineOptions:
        assert run("serve", "x", "--port", "0", *words) == 1
        return opened[-1]

    yield options
    for each in listeners:
        each.close()


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--max-queue", "5"], "max_waiting", 5),
        (["--max-queue", "0"], "max_waiting", 0),
        (["--threads", "3"], "num_torch_threads", 3),
        (["--tp", "2"], "tp", 2),
        (["--max-total-tokens", "640"], "max_total_tokens", 640),
        (["--max-speech-seqs", "2"], "max_speech_seqs", 2),
        (["--step-timeout", "7"], "step_timeout_s", 7.0),
        (["--max-media-memory", str(1 << 30)], "max_media_memory", 1 << 30),
        (["--media-decode-timeout", "3"], "media_decode_timeout_s", 3.0),
        (["--served-model-name", "a", "--served-model-name", "b"], "served_model_names", ("a", "b")),
        (["--parse-special-tokens"], "parse_special_tokens", True),
        (["--no-check-hashes"], "check_hashes", False),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_serve_opens_the_artifact_with_its_options(
    words: list[str], name: str, value: object, options_of: Callable[..., EngineOptions]
) -> None:
    assert getattr(options_of(), name) != value
    assert getattr(options_of(*words), name) == value


def test_a_port_in_use_is_reported_before_the_artifact_is_opened(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(builder, "open_service", lambda *_: pytest.fail("loaded before the port was bound"))
    monkeypatch.setattr(logs, "configure_logging", lambda *_: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert run("serve", "x", "--port", str(taken.getsockname()[1])) == 2
    assert "the port is in use" in capsys.readouterr().err


def test_a_lost_rank_exits_with_4(monkeypatch: pytest.MonkeyPatch) -> None:
    def examine(artifacts: object) -> None:
        raise RankError("rank 1 ended")

    monkeypatch.setattr(doctor, "examine", examine)
    assert run("doctor") == 4


@pytest.mark.parametrize(
    "number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EPERM, errno.EMFILE, errno.EDQUOT, errno.EIO]
)
def test_a_fault_of_the_environment_is_not_reported_as_a_bug(
    number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def examine(artifacts: object) -> None:
        raise OSError(number, os.strerror(number), "/some/folder")

    monkeypatch.setattr(doctor, "examine", examine)
    assert run("doctor", "--json") == 1
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["message"] == f"{os.strerror(number)}: /some/folder" and "bug" not in error["fix"]


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], doctor.Check]:
    """A function that examines a compiler whose libraries hold the given text; None: there is no compiler."""

    def check(library: str | None) -> doctor.Check:
        monkeypatch.delenv("CXX", raising=False)
        if library is None:
            monkeypatch.setattr("shutil.which", lambda name: None)
            return doctor._compiler()
        script = tmp_path / "c++"
        script.write_text(f'#!/bin/sh\nfor last; do :; done\necho "{library}" > "$last"\n')
        script.chmod(0o755)
        monkeypatch.setenv("CXX", str(script))
        return doctor._compiler()

    return check


@pytest.mark.parametrize(
    ("library", "state"),
    [("libstdc++.so.6", "ok"), ("libc++.so.1", "ok"), ("no such name", "problem"), (None, "missing")],
)
def test_a_compiler_is_fit_when_it_links_the_standard_library_dynamically(
    library: str | None, state: str, compiler: Callable[[str | None], doctor.Check]
) -> None:
    check = compiler(library)
    assert check.state == state and (check.fix is None) == (state == "ok")


def test_handlers_of_the_caller_are_back_after_a_command(calls: list[dict[str, Any]]) -> None:
    own = [signal.signal(number, signal.default_int_handler) for number in SIGNALS]
    try:
        with clean_shutdown():
            assert all(signal.getsignal(number) != signal.default_int_handler for number in SIGNALS)
        assert all(signal.getsignal(number) == signal.default_int_handler for number in SIGNALS)
        assert run("verify", "x") == 0
        assert all(signal.getsignal(number) == signal.default_int_handler for number in SIGNALS)
    finally:
        for number, handler in zip(SIGNALS, own, strict=True):
            signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_that_the_parent_ignores_stays_ignored(number: signal.Signals) -> None:
    """`nohup` and background jobs of shells."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with clean_shutdown():
            assert signal.getsignal(number) is signal.SIG_IGN
            signal.raise_signal(number)
    finally:
        signal.signal(number, before)


_POOL = """
import multiprocessing, os, time
from concurrent.futures import ProcessPoolExecutor
from mingc.parent_watchdog import watch_pool_owner

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=watch_pool_owner) as pool:
        print(pool.submit(os.getpid).result(), flush=True)
        pool.submit(time.sleep, 600).result()
"""


def test_workers_end_with_the_owner_of_their_pool(tmp_path: Path) -> None:
    script = tmp_path / "owner.py"
    script.write_text(_POOL, encoding="utf-8")
    with subprocess.Popen(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(Path(mingc.__file__).parents[1])},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    ) as owner:
        assert owner.stdout is not None
        try:
            number = int(owner.stdout.readline())
            worker = os.pidfd_open(number)
        finally:
            owner.kill()
    poll = select.poll()
    poll.register(worker, select.POLLIN)
    try:
        assert poll.poll(30_000), "the worker outlives the owner of its pool"
    finally:
        if not poll.poll(0):
            signal.pidfd_send_signal(worker, signal.SIGKILL)
        os.close(worker)
