"""The start of a server while weights are still being hashed: a file lets the hashing process go on."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from eager_export import copy_of
from mingc_command import ENVIRONMENT, REPOSITORY

from mingc.artifacts.manifest import read_manifest

# Python imports this module at its start.
_SLOWED = """
import sys, time
from pathlib import Path

if "mingc.artifacts.hash_process" in sys.orig_argv:
    from mingc.artifacts.file_region import FileRegion

    sha256 = FileRegion.sha256

    def wait(region):
        while not Path({gate!r}).exists():
            time.sleep(0.01)
        return sha256(region)

    FileRegion.sha256 = wait
"""
_LOADED = "memory of cpu: "  # begins the line that is logged when everything is loaded


@contextmanager
def _loaded(artifact: Path, gate: Path) -> Iterator[subprocess.Popen[str]]:
    """`mingc serve`, when all is loaded and weights are being hashed, until `gate` exists. No process may be left."""
    slowed = gate.parent / "slowed"
    slowed.mkdir()
    (slowed / "sitecustomize.py").write_text(_SLOWED.format(gate=str(gate)))
    words = [sys.executable, "-m", "mingc", "serve", str(artifact), "--port", "0", "--drain-seconds", "0"]
    path = os.pathsep.join((str(slowed), ENVIRONMENT["PYTHONPATH"]))
    with subprocess.Popen(
        words,
        cwd=REPOSITORY,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**ENVIRONMENT, "PYTHONPATH": path},
    ) as server:
        family = []
        try:
            assert server.stderr is not None
            log = []
            for line in server.stderr:
                log.append(line)
                if _LOADED in line:
                    break
            assert server.poll() is None, "".join(log)
            family = psutil.Process(server.pid).children(recursive=True)
            assert any("mingc.artifacts.hash_process" in each.cmdline() for each in family)
            yield server
        finally:
            server.kill()
            _gone, alive = psutil.wait_procs(family, timeout=10)
            for each in alive:
                each.kill()
    assert alive == []


def test_a_server_is_ready_when_all_hashes_are_compared(eager_artifact: Path, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with _loaded(eager_artifact, gate) as server:
        assert server.stdout is not None
        assert not select.select([server.stdout], [], [], 0.5)[0], "it waits for the hashes"
        listening = [each for each in psutil.Process(server.pid).net_connections() if each.status == "LISTEN"]
        assert listening == []
        gate.touch()
        assert server.stdout.readline().startswith("http://127.0.0.1:")
        server.terminate()
        assert server.wait(20) == 0


def test_a_changed_weight_ends_the_start(two_rank_artifact: Path, tmp_path: Path) -> None:
    artifact, gate = copy_of(two_rank_artifact, tmp_path), tmp_path / "gate"
    name = read_manifest(artifact).stages["thinker"].weights_files[1]
    data = bytearray((artifact / name).read_bytes())
    data[-1] ^= 1
    (artifact / name).write_bytes(data)
    with _loaded(artifact, gate) as server:
        gate.touch()
        stdout, stderr = server.communicate(timeout=60)
        assert (server.returncode, stdout) == (1, "")
        assert "1 file(s) of the artifact are not as exported" in stderr
        assert f"- {name}: sha256 differs from the manifest" in stderr
        assert "fix: copy the artifact again, or export again" in stderr


def test_a_signal_ends_the_start(two_rank_artifact: Path, tmp_path: Path) -> None:
    with _loaded(two_rank_artifact, tmp_path / "gate") as server:
        children = psutil.Process(server.pid).children()
        [rank] = [each for each in children if "mingc.runtime.thinker.ranks.rank_process" in each.cmdline()]
        assert os.getpgid(rank.pid) == rank.pid, "Ctrl-C while it imports is not for it"
        server.send_signal(signal.SIGINT)
        stdout, stderr = server.communicate(timeout=60)
        assert (server.returncode, stdout) == (130, "")
        assert "Traceback" not in stderr
