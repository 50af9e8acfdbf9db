"""Decoder processes: the features of the same code in this process, and limits that hold whatever a file does."""

from __future__ import annotations

import dataclasses
import errno
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostile_media import edit_bomb, index_bomb, small_video
from preprocess_data import audio_parameters, noise_image, png, vision_parameters, wav

from mingc.errors import CapacityError, ConfigError, RequestError, WorkerError
from mingc.media import decoder_pool, decoder_process
from mingc.media.decoder_pool import DecoderPool
from mingc.media.decoder_process import TaskHead, receive, send
from mingc.media.decoding import digest_of, run_task
from mingc.media.limits import DEFAULT_MEDIA_BYTES, MIB
from mingc.prompts.conversation import VideoParams
from mingc.prompts.features import AudioFeatures, VideoFeatures
from mingc.prompts.media_decoder import MediaTask

WHERE = "messages[0].content[1]"
IMAGE = MediaTask(kind="image", where=WHERE, max_bytes=DEFAULT_MEDIA_BYTES, vision=vision_parameters())
VIDEO = MediaTask(
    kind="video",
    where=WHERE,
    max_bytes=DEFAULT_MEDIA_BYTES,
    vision=vision_parameters(),
    video=VideoParams(min_pixels=4096, fps=1.5),
)
AUDIO = MediaTask(kind="audio", where=WHERE, max_bytes=DEFAULT_MEDIA_BYTES, audio=audio_parameters())


@pytest.fixture(scope="module")
def pool() -> Iterator[DecoderPool]:
    pool = DecoderPool(timeout_s=20)
    yield pool
    pids = pool.pids
    pool.close()
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def peak_bytes(pid: int) -> int:
    """Peak resident memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


MEDIA = pytest.mark.parametrize(
    ("task", "data"),
    [
        (IMAGE, png(noise_image(70, 90))),
        (VIDEO, small_video()),
        (AUDIO, wav(np.sin(np.arange(8000) / 9).astype(np.float32), 16000)),
    ],
    ids=["image", "video", "audio"],
)


@MEDIA
def test_features_equal_those_of_this_process(pool: DecoderPool, task: MediaTask, data: bytes) -> None:
    expected, found = run_task(task, data), pool.run(task, data)
    if isinstance(expected, AudioFeatures):
        assert isinstance(found, AudioFeatures)
        assert found.num_tokens == expected.num_tokens
        np.testing.assert_allclose(found.mel, expected.mel, rtol=0, atol=1e-6)
        return
    if isinstance(expected, VideoFeatures):
        assert isinstance(found, VideoFeatures)
        assert found.timestamps == expected.timestamps
        expected, found = expected.vision, found.vision
    assert not isinstance(found, VideoFeatures | AudioFeatures)
    assert found.grid == expected.grid
    np.testing.assert_array_equal(found.pixels, expected.pixels)


@MEDIA
def test_features_have_the_digest_of_their_file(pool: DecoderPool, task: MediaTask, data: bytes) -> None:
    found = pool.run(task, data)
    features = found.vision if isinstance(found, VideoFeatures) else found
    assert features.digest == digest_of(task, data)


def test_a_process_is_used_again(pool: DecoderPool) -> None:
    pool.run(IMAGE, png(noise_image(64, 64)))
    before = pool.pids
    pool.run(IMAGE, png(noise_image(64, 96)))
    assert pool.pids == before


def test_a_process_is_ready_before_a_second_medium_comes() -> None:
    """Up to the number that a server uses at once."""
    data = png(noise_image(64, 64))
    pool = DecoderPool(timeout_s=20, num_prepared=2)
    try:
        pool.start()
        pool.start()
        (first,) = pool.pids
        os.kill(first, signal.SIGSTOP)
        with ThreadPoolExecutor(2) as threads:
            waiting = threads.submit(pool.run, IMAGE, data)
            deadline = time.monotonic() + 20
            while len(pool.pids) < 2 and time.monotonic() < deadline:
                time.sleep(0.01)
            both = set(pool.pids)
            assert len(both) == 2
            assert np.array_equal(pool.run(IMAGE, data).patches, run_task(IMAGE, data).patches)
            os.kill(first, signal.SIGCONT)
            assert np.array_equal(waiting.result().patches, run_task(IMAGE, data).patches)
        assert set(pool.pids) == both, "no third"
    finally:
        pool.close()


@pytest.mark.parametrize("task", [IMAGE, VIDEO, AUDIO], ids=["image", "video", "audio"])
def test_errors_arrive_whole(pool: DecoderPool, task: MediaTask) -> None:
    errors: list[Any] = []
    for run in (run_task, pool.run):
        with pytest.raises(RequestError) as caught:
            run(task, b"nothing")
        errors.append(caught.value)
    shown = [(str(e), e.status, e.param, e.code) for e in errors]
    assert shown[0] == shown[1]
    assert shown[0][1:] == (400, WHERE, "undecodable_media")


def test_a_file_that_claims_memory_in_its_index_is_refused(pool: DecoderPool) -> None:
    """A 3 kB MP4 with an index of 60 million frames, which FFmpeg expands when it opens the file: 4 GB before."""
    data = index_bomb(60_000_000)
    assert len(data) < 5000
    (pid,) = pool.pids
    with pytest.raises(RequestError) as caught:
        pool.run(VIDEO, data)
    assert caught.value.code in ("media_too_large", "undecodable_media")  # as FFmpeg words it
    if pool.pids == [pid]:  # else it was retired
        assert peak_bytes(pid) < 600 * MIB
    pool.run(IMAGE, png(noise_image(64, 64)))


def test_a_file_that_takes_too_long_ends_its_process_only() -> None:
    pool = DecoderPool(timeout_s=0.5)
    try:
        pool.start()
        (pid,) = pool.pids
        with pytest.raises(RequestError, match=r"took more than 0\.5 s") as caught:
            pool.run(VIDEO, edit_bomb(2000, edits=60_000))
        assert caught.value.code == "media_too_large"
        assert not Path(f"/proc/{pid}").exists()
    finally:
        pool.close()


def kill_the_next(monkeypatch: pytest.MonkeyPatch, number: int, count: int) -> None:
    """The next `count` decoder processes get a signal when they get a medium."""
    run, pending = decoder_pool._Decoder.run, [number] * count

    def run_and_kill(self: Any, task: MediaTask, data: bytes) -> Any:
        self.wait_until_ready()
        if pending:
            os.kill(self.process.pid, pending.pop())
            if number != signal.SIGSTOP:
                os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        return run(self, task, data)

    monkeypatch.setattr(decoder_pool._Decoder, "run", run_and_kill)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGUSR1])
def test_a_medium_whose_decoder_is_killed_is_decoded_by_another(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill_the_next(monkeypatch, number, 1)
    pool, data = DecoderPool(), png(noise_image(64, 64))
    try:
        assert np.array_equal(pool.run(IMAGE, data).patches, run_task(IMAGE, data).patches)
    finally:
        pool.close()


@pytest.mark.parametrize(
    ("number", "kind", "status"), [(signal.SIGKILL, WorkerError, 500), (signal.SIGSEGV, RequestError, 400)]
)
def test_a_medium_that_crashes_two_decoders_is_refused_and_two_kills_are_the_fault_of_the_server(
    number: signal.Signals,
    kind: type[RequestError | WorkerError],
    status: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kill_the_next(monkeypatch, number, 2)
    pool, data = DecoderPool(), png(noise_image(64, 64))
    try:
        with pytest.raises(kind, match=f"by signal {number}") as caught:
            pool.run(IMAGE, data)
        assert (type(caught.value), caught.value.status, caught.value.where) == (kind, status, WHERE)
        pool.run(IMAGE, data)
    finally:
        pool.close()


def test_a_decoder_that_does_not_answer_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped process gets no SIGALRM."""
    monkeypatch.setattr(decoder_pool, "_GRACE_S", 0.2)
    kill_the_next(monkeypatch, signal.SIGSTOP, 1)
    pool, data = DecoderPool(timeout_s=2.0), png(noise_image(64, 64))
    try:
        pool.start()
        (pid,) = pool.pids
        with pytest.raises(WorkerError, match=r"did not answer for 2\.2 s") as caught:
            pool.run(IMAGE, data)
        assert caught.value.status == 500
        assert not Path(f"/proc/{pid}").exists()
        pool.run(IMAGE, data)
    finally:
        pool.close()


def test_a_pool_does_not_start_without_a_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """soundfile is there, its cffi is not: nothing would play clips but a slower library."""
    (tmp_path / "soundfile.py").write_text("raise ModuleNotFoundError(\"No module named 'cffi'\")")
    monkeypatch.syspath_prepend(tmp_path)
    lacking = DecoderPool()
    try:
        with pytest.raises(
            ConfigError, match="soundfile cannot be imported: No module named 'cffi'"
        ) as caught:
            lacking.start()
        assert "pip install 'mingc[serve]'" in str(caught.value.fix)
    finally:
        lacking.close()


def test_a_bug_of_the_decoder_is_no_fault_of_the_client() -> None:
    """Python takes time to end after an error, in which the socket is closed already."""
    pool = DecoderPool()
    try:
        with pytest.raises(WorkerError, match="exited with code 1"):
            pool.run(dataclasses.replace(IMAGE, vision=None), png(noise_image(64, 64)))
        pool.run(IMAGE, png(noise_image(64, 64)))
    finally:
        pool.close()


def test_a_process_that_died_while_idle_is_replaced() -> None:
    pool = DecoderPool()
    try:
        pool.start()
        (pid,) = pool.pids
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        pool.run(IMAGE, png(noise_image(64, 64)))
        assert pid not in pool.pids
    finally:
        pool.close()


def test_a_process_that_asks_to_be_replaced_gets_no_further_medium(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps memory of an earlier medium, which the limit of a later one would count."""
    run = decoder_pool._Decoder.run

    def run_and_retire(self: Any, task: MediaTask, data: bytes) -> Any:
        return run(self, task, data)[0], False

    monkeypatch.setattr(decoder_pool._Decoder, "run", run_and_retire)
    pool = DecoderPool()
    try:
        pool.start()
        (pid,) = pool.pids
        assert (
            pool.run(IMAGE, png(noise_image(64, 64))).grid == run_task(IMAGE, png(noise_image(64, 64))).grid
        )
        assert not Path(f"/proc/{pid}").exists()
        (other,) = pool.pids  # is ready before another medium needs it
        monkeypatch.undo()
        pool.run(IMAGE, png(noise_image(64, 64)))
        assert pool.pids == [other]
    finally:
        pool.close()


@pytest.mark.parametrize("ends", ["retires", "crashes"])
def test_a_process_that_cannot_be_replaced_takes_no_answer_with_it(
    ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A system without memory or process ids: the next medium tries again."""
    run, data = decoder_pool._Decoder.run, png(noise_image(64, 64))

    def run_and_retire(self: Any, task: MediaTask, data: bytes) -> Any:
        if ends == "crashes":
            os.kill(self.process.pid, signal.SIGSEGV)
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        return run(self, task, data)[0], False

    def refuse(*args: Any, **options: Any) -> Any:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    pool = DecoderPool()
    try:
        pool.start()
        with monkeypatch.context() as patch:
            patch.setattr(decoder_pool._Decoder, "run", run_and_retire)
            patch.setattr(decoder_pool.subprocess, "Popen", refuse)
            if ends == "crashes":
                with pytest.raises(CapacityError, match=r"cannot be started: .*unavailable"):
                    pool.run(IMAGE, data)
            else:
                pool.run(IMAGE, data)
        assert pool.pids == []
        assert np.array_equal(pool.run(IMAGE, data).patches, run_task(IMAGE, data).patches)
    finally:
        pool.close()


def test_an_idle_process_is_not_limited_by_the_time_of_a_task() -> None:
    pool = DecoderPool(timeout_s=1.0)
    try:
        pool.run(IMAGE, png(noise_image(70, 90)))
        (pid,) = pool.pids
        time.sleep(1.5)
        assert Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
        pool.run(IMAGE, png(noise_image(70, 90)))
        assert pool.pids == [pid]
    finally:
        pool.close()


@pytest.mark.parametrize(("kept", "retires"), [(100, False), (101, True)])
def test_a_result_is_not_memory_that_a_process_keeps(
    kept: int, retires: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = np.zeros(500, np.uint8)
    monkeypatch.setattr(decoder_process, "run_task", lambda task, data: None)
    monkeypatch.setattr(decoder_process, "pack", lambda result_: ({}, [result]))
    monkeypatch.setattr(decoder_process, "_data_bytes", lambda: kept + result.nbytes)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send(ours, TaskHead(task=IMAGE, size=3), memoryview(b"abc"))
        decoder_process._serve_task(theirs, 20.0, retire_bytes=100)
        assert receive(ours)["retire"] is retires


def test_memory_of_a_medium_is_counted_beyond_that_of_the_libraries() -> None:
    """The kernel's limit leaves room for `max_bytes`, and for little more, in a process that is ready."""
    pool = DecoderPool(max_bytes=32 * MIB, timeout_s=20)
    try:
        pool.run(IMAGE, png(noise_image(64, 64)))
        (pid,) = pool.pids
        used = int(Path(f"/proc/{pid}/status").read_text().split("VmData:")[1].split()[0]) * 1024
        limit, _ = resource.prlimit(pid, resource.RLIMIT_DATA)
    finally:
        pool.close()
    assert 32 * MIB <= limit - used <= (32 + 64) * MIB


def test_closing_ends_a_running_task_and_refuses_others() -> None:
    pool = DecoderPool(timeout_s=20)
    pool.start()
    (pid,) = pool.pids
    os.kill(pid, signal.SIGSTOP)
    failures: list[Exception] = []

    def run() -> None:
        try:
            pool.run(IMAGE, png(noise_image(64, 64)))
        except (CapacityError, WorkerError) as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    while True:  # until the thread has taken the process
        with pool._lock:
            if not pool._idle:
                break
    pool.close()
    thread.join(10)
    assert not thread.is_alive()
    assert [type(each) for each in failures] == [CapacityError]
    assert pool.pids == []
    assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(CapacityError):
        pool.run(IMAGE, b"")


def test_a_smaller_limit_of_a_task_holds(pool: DecoderPool) -> None:
    task = dataclasses.replace(IMAGE, max_bytes=MIB)
    with pytest.raises(RequestError, match="MiB of memory") as caught:
        pool.run(task, png(noise_image(1000, 1000)))
    assert caught.value.status == 413


@MEDIA
def test_every_kind_obeys_the_memory_of_its_task(task: MediaTask, data: bytes) -> None:
    with pytest.raises(RequestError) as refused:
        run_task(dataclasses.replace(task, max_bytes=1000), data)
    assert refused.value.code == "media_too_large"


class Answering:
    """A decoder process that is not there: its reply is given."""

    pid, is_alive, exit_code = 1, True, 0

    def __init__(self, head: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(decoder_pool, "send", lambda *words: None)
        monkeypatch.setattr(decoder_pool, "receive", lambda socket: head)
        self._socket = None
        self.ended: list[bool] = []

    def run(self, task: MediaTask, data: bytes) -> Any:
        return decoder_pool._Decoder.run(self, task, data)  # type: ignore[arg-type]

    def wait_until_ready(self) -> None:
        pass

    def kill(self) -> None:
        self.ended.append(True)

    def end(self, *, has_failed: bool) -> None:
        self.ended.append(has_failed)


@pytest.mark.parametrize("retires", [False, True])
@pytest.mark.parametrize(("is_config", "kind"), [(False, RequestError), (True, ConfigError)])
def test_an_error_of_the_process_is_raised_here_and_a_process_that_retires_is_ended(
    is_config: bool, kind: type[Exception], retires: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing library is the operator's fault, not the client's."""
    head = {"retire": retires, "is_config": is_config, "error": {"message": "no", "where": "w", "fix": "f"}}
    decoder = Answering(head, monkeypatch)
    pool = DecoderPool()
    monkeypatch.setattr(pool, "take", lambda: decoder)
    with pytest.raises(kind) as caught:
        pool.run(IMAGE, b"data")
    error = caught.value
    assert (str(error).splitlines()[0], getattr(error, "where", ""), getattr(error, "fix", "")) == (
        "no",
        "w",
        "f",
    )
    assert decoder.ended == [False] * retires and (decoder in pool._idle) is not retires
    assert len(pool.pids) == retires, "another one takes its place"
    pool.close()


def test_a_process_whose_reply_cannot_be_read_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = Answering({"arrays": []}, monkeypatch)  # "retire" is missing
    pool = DecoderPool()
    monkeypatch.setattr(pool, "take", lambda: decoder)
    with pytest.raises(KeyError):
        pool.run(IMAGE, b"data")
    assert decoder.ended == [False] and decoder not in pool._idle
    assert len(pool.pids) == 1, "another one takes its place"
    pool.close()


def test_a_process_whose_pool_was_closed_meanwhile_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    head = {"retire": False, "is_config": False, "error": {"message": "no"}}
    decoder = Answering(head, monkeypatch)
    pool = DecoderPool()
    monkeypatch.setattr(pool, "take", lambda: decoder)
    pool.close()
    with pytest.raises(RequestError):
        pool.run(IMAGE, b"data")
    assert decoder.ended == [False] and not pool._idle
