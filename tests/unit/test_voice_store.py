"""The folder of uploaded voices: names, ids, several processes, and what cannot be written or read."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from mingc.errors import ConfigError, MingcError, RequestError
from mingc.runtime.service import voice_store
from mingc.runtime.service.voice_store import StoredVoice, VoiceStore, check_name, voice_id
from mingc.runtime.voices import VoiceInfo

TENSORS = {
    "latents": np.zeros((4, 2), np.float32),
    "embeds": np.zeros((1, 3), np.float32),
    "speaker": np.arange(3, dtype=np.float32),
    "clip": np.arange(-5, 5, dtype=np.int16),
}


def voice(name: str, created_at: int = 1) -> StoredVoice:
    made = voice_id(name, TENSORS["clip"], "Words.")
    info = VoiceInfo(id=made, name=name, kind="audio_sample", transcript="Words.", created_at=created_at)
    return StoredVoice(info=info, weights="w", sample_rate=16_000)


@pytest.mark.parametrize("name", ["a", "Ann", "声音", "a b", "…", ".a", "a" * 64, "voice_1"])
def test_names_that_voices_may_have(name: str, tmp_path: Path) -> None:
    """What is in the folder does not depend on them."""
    check_name(name)
    VoiceStore(tmp_path).add(voice(name), TENSORS)
    (path,) = tmp_path.glob("*.safetensors")
    assert path.stem == voice(name).info.id and path.stat().st_mode & 0o077 == 0
    again = VoiceStore(tmp_path).find(name)
    assert again == voice(name) and again is not None
    read = VoiceStore(tmp_path).read(again)
    assert read is not None and read.keys() == TENSORS.keys()
    for key, value in TENSORS.items():
        np.testing.assert_array_equal(read[key], value)
        assert read[key].dtype == value.dtype


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "a/b",
        "a\\b",
        "a\0",
        "a\n",
        "\x1b[2J",
        "\u202e",
        " a",
        "a ",
        "a" * 65,
        "voice_" + "0" * 32,
    ],
)
def test_names_that_voices_may_not_have(name: str) -> None:
    with pytest.raises(RequestError, match="the name of the voice") as refused:
        check_name(name)
    assert refused.value.param == "name"


def test_an_id_differs_with_name_words_and_recording() -> None:
    clip = TENSORS["clip"]
    others = [
        voice_id("b", clip, "w"),
        voice_id("a", clip, "x"),
        voice_id("a", clip, None),
        voice_id("a", clip[1:], "w"),
    ]
    assert len({voice_id("a", clip, "w"), *others}) == 5
    assert voice_id("a", clip, "w") == voice_id("a", clip.copy(), "w")


def test_a_name_is_given_to_one_of_many_at_once(tmp_path: Path) -> None:
    """By stores that know nothing of each other, as in several processes."""
    stores = [VoiceStore(tmp_path) for _ in range(8)]
    barrier, outcomes = threading.Barrier(8), list[int]()

    def add(store: VoiceStore, number: int) -> None:
        own = TENSORS | {"clip": np.full(9, number, np.int16)}
        made = voice_id("same", own["clip"], "w")
        barrier.wait()
        try:
            store.add(
                StoredVoice(
                    info=VoiceInfo(id=made, name="same", kind="audio_sample"), weights="", sample_rate=1
                ),
                own,
            )
            outcomes.append(200)
        except RequestError as error:
            outcomes.append(error.status)

    threads = [threading.Thread(target=add, args=(store, number)) for number, store in enumerate(stores)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == [200] + [409] * 7
    assert len(list(tmp_path.glob("*.safetensors"))) == 1 and not list(tmp_path.glob("*.tmp"))


def test_there_are_only_so_many_voices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert voice_store.MAX_VOICES == 1000
    monkeypatch.setattr(voice_store, "MAX_VOICES", 2)
    store, other = VoiceStore(tmp_path), VoiceStore(tmp_path)
    store.add(voice("b", 2), TENSORS)
    other.add(voice("a", 3), TENSORS)
    with pytest.raises(RequestError, match="2 voices already") as full:
        store.add(voice("c", 1), TENSORS)
    assert full.value.status == 409
    assert other.find("b") is not None and other.remove(voice("b")) and not store.remove(voice("b"))
    store.add(voice("c", 1), TENSORS)
    assert [each.info.name for each in store.list()] == ["c", "a"]
    assert store.read(voice("b")) is None


def test_files_that_are_no_voices_are_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    VoiceStore(tmp_path).add(voice("a"), TENSORS)
    good = (tmp_path / f"{voice('a').info.id}.safetensors").read_bytes()
    others = {
        f"voice_{'1' * 32}.safetensors": good[:20],
        f"voice_{'2' * 32}.safetensors": b"",
        f"voice_{'3' * 32}.safetensors": b"\xff" * 100,
        f"voice_{'4' * 32}.safetensors": good.replace(b"created_at", b"created_by"),
        "notes.txt": b"mine",
        "model.safetensors": good,
    }
    for name, content in others.items():
        (tmp_path / name).write_bytes(content)
    # Opening a pipe waits for a writer.
    os.mkfifo(tmp_path / f"voice_{'5' * 32}.safetensors")
    store = VoiceStore(tmp_path)
    assert [each.info.name for each in store.list()] == ["a"] == [each.info.name for each in store.list()]
    assert store.find("b") is None
    assert len([record for record in caplog.records if "is no voice" in record.message]) == 4, "once each"
    assert {name: (tmp_path / name).read_bytes() for name in others} == others


def test_a_voice_that_could_not_be_read_once_is_read_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as from a network disk, or without a free file descriptor."""
    VoiceStore(tmp_path).add(voice("a"), TENSORS)
    store, failures = (
        VoiceStore(tmp_path),
        [OSError(errno.EIO, "I/O error"), OSError(errno.EMFILE, "no file")],
    )
    whole = voice_store.safe_open

    def fail(*given: object, **named: object) -> object:
        if failures:
            raise failures.pop()
        return whole(*given, **named)

    monkeypatch.setattr(voice_store, "safe_open", fail)
    assert store.list() == [] and store.find("b") is None
    assert store.find("a") is not None
    assert len([record for record in caplog.records if "is no voice" in record.message]) == 1


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="voices cannot be kept") as refused:
        VoiceStore(tmp_path / "file" / "voices")
    assert refused.value.where == "--voices-dir"
    store = VoiceStore(tmp_path / "new" / "voices")
    store.add(voice("a"), TENSORS)
    for path in (tmp_path / "new" / "voices").iterdir():
        path.unlink()
    os.rmdir(tmp_path / "new" / "voices")
    for work in (lambda: store.add(voice("b"), TENSORS), lambda: store.find("c")):
        with pytest.raises(MingcError, match=r"cannot be (kept|listed): No such file or directory"):
            work()
