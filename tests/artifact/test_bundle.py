"""Bundles as a user has them: packed, signed, verified, served from the one file, killed half-way and continued."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from mingc_command import ENVIRONMENT, REPOSITORY, mingc_here, serving
from server_thread import run_server

from mingc.artifacts.packed_file import open_packed
from mingc.media.decoding import InProcessDecoder
from mingc.runtime.service.builder import open_service


@pytest.fixture(scope="module")
def made(eager_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `tiny.mingc`, signed by `team.key`."""
    folder = tmp_path_factory.mktemp("bundle")
    for words in (
        ("bundle", "pack", eager_artifact, folder / "tiny.mingc"),
        ("bundle", "keygen", folder / "team.key"),
        (
            "bundle",
            "sign",
            folder / "tiny.mingc",
            "--secret-key",
            folder / "team.key",
            "--comment",
            "release 1",
        ),
    ):
        done = mingc_here(*words)
        assert done.code == 0, done.stderr
    return folder


def _speech(url: str) -> bytes:
    body = {"input": "Hello there.", "response_format": "pcm", "seed": 5}
    answer = httpx.post(f"{url}/v1/audio/speech", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.content


def test_a_packed_bundle_speaks_as_its_folder_does(
    made: Path, eager_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same samples; weights are mapped from the bundle, and no copy of them is in the cache."""
    monkeypatch.setitem(ENVIRONMENT, "XDG_CACHE_HOME", str(tmp_path))
    bundle = made / "tiny.mingc"
    with serving(bundle, "--require-signature", made / "team.pub") as server:
        packed = _speech(server.url)
        maps = Path(f"/proc/{server.process.pid}/maps").read_text()
        assert str(bundle) in maps
    weights = {
        record.sha256
        for name, record in open_packed(bundle).bundle.files.items()
        if name.startswith("weights/")
    }
    copies = {path.stem for path in (tmp_path / "mingc/files").iterdir()}
    assert copies and not copies & weights
    with run_server(lambda: open_service(eager_artifact, media=InProcessDecoder())) as url:
        assert _speech(url) == packed and len(packed) > 1000


def test_verify_replays_the_packed_engines(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert mingc_here("verify", made / "tiny.mingc", "--no-replay").code == 0
    assert mingc_here("bundle", "inspect", made / "tiny.mingc").code == 0


@pytest.mark.parametrize(
    "words, says",
    [
        (("--require-signature", "{other}"), "signed with the key"),
        (("--require-signature", "{team}", "--no-check-hashes"), "proves nothing about files"),
    ],
)
def test_serve_refuses_what_is_not_signed_as_required(
    words: tuple[str, ...], says: str, made: Path, tmp_path: Path
) -> None:
    assert mingc_here("bundle", "keygen", tmp_path / "other.key").code == 0
    given = [word.format(other=tmp_path / "other.pub", team=made / "team.pub") for word in words]
    done = mingc_here("serve", made / "tiny.mingc", "--port", 0, *given)
    assert done.code in (1, 2) and says in done.stderr and "fix:" in done.stderr


def _kill_after(words: list[object], seconds: float) -> bool:
    """Run `mingc WORDS` and kill it after `seconds` of work; whether it was killed before its end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "mingc", *map(str, words)],
        cwd=REPOSITORY,
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    assert process.stderr is not None
    try:
        process.stderr.readline()  # the first file is done: imports are over
        time.sleep(seconds)
        process.kill()
        return process.wait(30) == -signal.SIGKILL
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def test_pack_and_unpack_survive_kills(eager_artifact: Path, tmp_path: Path) -> None:
    """Killed several times each at random moments: no result, or the whole one; then the same command finishes."""
    chosen = random.Random(11)
    bundle, folder = tmp_path / "tiny.mingc", tmp_path / "out"
    for words, target in (
        (["bundle", "pack", eager_artifact, bundle], bundle),
        (["bundle", "unpack", bundle, folder], folder),
    ):
        for _ in range(3):
            _kill_after(words, chosen.uniform(0, 0.15))
            if target.exists():
                assert mingc_here("verify", target, "--no-replay").code == 0
                assert mingc_here(*words, "--force").code == 0
                break
        else:
            done = mingc_here(*words)
            assert done.code == 0, done.stderr
        assert mingc_here("verify", target, "--no-replay").code == 0
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"tiny.mingc", "out", ".mingc-files"}
    assert not [path for path in folder.rglob("*") if path.name.endswith((".half", "-state"))]


def test_an_interrupted_unpack_ends_at_once(made: Path, tmp_path: Path) -> None:
    """Ctrl-C ends the threads, with the exit code of an interruption; the next run continues."""
    out = tmp_path / "out"
    process = subprocess.Popen(
        [sys.executable, "-m", "mingc", "bundle", "unpack", str(made / "tiny.mingc"), str(out)],
        cwd=REPOSITORY,
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    assert process.stderr is not None
    try:
        process.stderr.readline()
        os.kill(process.pid, signal.SIGINT)
        code = process.wait(30)
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
    assert code == 130 or (code == 0 and out.exists())
    if not out.exists():
        assert mingc_here("bundle", "unpack", made / "tiny.mingc", out).code == 0
    # It is there after an interruption as well when that came after its rename, while the report was written.
    assert mingc_here("verify", out, "--no-replay").code == 0
