"""Where an audit finds servers and what transcribes: addresses, artifacts that it serves, commands."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from mingc.audit.sounds import Sound
from mingc.bench.server import Server
from mingc.console.serve_child import serve_child
from mingc.errors import ConfigError, MingcError

Transcribe = Callable[[Sound], str]

_COMMAND_S, _MOST_PRINTED = 600.0, 100_000  # of a command that transcribes
_END_S = 60


def is_url(target: str) -> bool:
    return target.startswith(("http://", "https://"))


def transcribed_by(server: Server) -> Transcribe:
    return lambda sound: server.transcribe(sound.data, Path(sound.name).name)


def _server(url: str) -> Server:
    return Server(url, os.environ.get("OPENAI_API_KEY", ""))


def transcriber(choice: str) -> Transcribe:
    """What transcribes sounds: a server's URL, or a command that prints the text of the file named last or as `{}`."""
    if is_url(choice):
        return transcribed_by(_server(choice))
    words = shlex.split(choice)
    if not words:
        raise ConfigError("--transcriber is empty", where="mingc audit", fix="give a URL or a command")

    def run(sound: Sound) -> str:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / Path(sound.name).name
            path.write_bytes(sound.data)
            line = [each.replace("{}", str(path)) for each in words]
            try:
                return _printed(line if line != words else [*words, str(path)])
            except (OSError, ValueError) as error:
                raise ConfigError(
                    f"{words[0]} failed: {error}", where="--transcriber", fix="try the command on one file"
                ) from error

    return run


def _printed(line: Sequence[str]) -> str:
    """What a command prints; it and what it started end with it. Raises: OSError, ValueError when it fails."""
    with tempfile.TemporaryFile() as log:
        child = subprocess.Popen(
            line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, start_new_session=True
        )
        assert child.stdout is not None

        def end() -> None:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)

        timer = threading.Timer(_COMMAND_S, end)
        timer.start()
        try:
            said = child.stdout.read(_MOST_PRINTED + 1)
            if len(said) > _MOST_PRINTED:
                raise ValueError(f"it prints more than {_MOST_PRINTED} bytes, a transcript is wanted")
            child.wait()
        finally:
            timer.cancel()
            end()
            child.wait()
            child.stdout.close()
        if child.returncode:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 300))
            why = log.read().decode(errors="replace").strip()
            raise ValueError(f"it ended with {child.returncode} within {_COMMAND_S:g} s: {why}")
    return said.decode(errors="replace").strip()


@contextmanager
def served(target: str) -> Iterator[Server]:
    """The server at a URL; for an artifact `mingc serve` in a child process, which ends with the block."""
    if is_url(target):
        with _server(target) as server:
            yield server
        return
    with serve_child([target, "--port", "0", "--log-level", "warning"], stop_s=_END_S) as (child, stdout):
        url = stdout.readline().decode().strip()
        if not url:
            raise MingcError(
                f"mingc serve ended with {child.wait()}", where=target, fix="see its messages above"
            )
        with served(url) as server:
            yield server
