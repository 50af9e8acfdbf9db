"""Voices that clients uploaded, one file each in a folder that replicas share.

A file holds the tensors of a voice (`latents`, `embeds`, `speaker`, as in `VoicePack`) and what they were computed
from (`clip` (n,) int16, or `vector` (D,) float32), so that another artifact can compute them again. It never changes.
It is written under another name, synced and renamed, so a process that is killed or a disk that is full leaves nothing
half-written. A lock file makes names unique among processes.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save

from mingc.artifacts.codec import decode, encode
from mingc.errors import ConfigError, ManifestError, RequestError, WorkerError
from mingc.runtime.voices import VoiceInfo

log = logging.getLogger("mingc.voices")

MAX_VOICES = 1000
MAX_NAME = 64  # characters
_ID = re.compile(r"voice_[0-9a-f]{32}")
_SUFFIX, _UNFINISHED, _LOCK = ".safetensors", ".tmp", ".lock"
_KEY = "voice"  # of the JSON document in the header of a file
_RESCAN_S = 1.0
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

Tensors = Mapping[str, NDArray[np.generic]]


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredVoice:
    """The header of a file. `weights`: hash of the weights that computed its tensors. `sample_rate`: of the clip."""

    info: VoiceInfo
    weights: str
    sample_rate: int


def check_name(name: str) -> None:
    """Raises: RequestError when a voice may not be called `name`."""
    why = None
    if not 1 <= len(name) <= MAX_NAME:
        why = f"has {len(name)} characters; it may have 1 to {MAX_NAME}"
    elif name in (".", "..") or {"/", "\\"} & {*name} or not name.isprintable():
        why = "is '.', '..' or contains a slash, a backslash or a character that cannot be printed"
    elif name != name.strip():
        why = "begins or ends with a space"
    elif _ID.fullmatch(name):
        why = "looks like the id of a voice"
    if why is not None:
        raise RequestError(f"the name of the voice {why}", where="name", param="name")


def voice_id(name: str, source: NDArray[np.generic], transcript: str | None) -> str:
    """Id of a voice, from a hash of everything that makes it; its file has the same name."""
    digest = hashlib.sha256(json.dumps([name, transcript, source.dtype.str]).encode())
    digest.update(source.tobytes())
    return f"voice_{digest.hexdigest()[:32]}"


class VoiceStore:
    """The voices in `folder`. Thread-safe; blocks for the disk.

    Other processes may add and remove voices: the folder is listed again after a second, and when a voice is missing.

    Raises: ConfigError when the folder cannot be created and written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._voices: dict[str, StoredVoice] = {}  # by file name
        self._unreadable: set[str] = set()
        self._scanned_at = -_RESCAN_S
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with self._exclusive():
                for path in folder.glob(f"*{_UNFINISHED}"):  # of processes that were killed
                    path.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(
                f"voices cannot be kept in {folder}: {error.strerror}",
                where="--voices-dir",
                fix="name a folder that may be written",
            ) from error

    def list(self) -> list[StoredVoice]:
        """All voices, the oldest first."""
        with self._lock:
            self._rescan()
            return sorted(self._voices.values(), key=lambda each: (each.info.created_at, each.info.name))

    def find(self, name: str) -> StoredVoice | None:
        """The voice with this id or name."""
        with self._lock:
            self._rescan()
            found = self._known(name)
            if found is None:
                self._rescan(at_once=True)
                found = self._known(name)
            return found

    def read(self, voice: StoredVoice) -> Tensors | None:
        """The tensors of a voice; None when it has been removed meanwhile. Raises: WorkerError."""
        path = self._folder / f"{voice.info.id}{_SUFFIX}"
        try:
            tensors: Tensors = load_file(path)
        except FileNotFoundError:
            return None
        except (OSError, SafetensorError) as error:
            raise WorkerError(f"the voice cannot be read: {error}", where=str(path)) from error
        return tensors

    def add(self, voice: StoredVoice, tensors: Tensors) -> None:
        """Write a voice.

        Raises: RequestError (409) when its name is taken or there are too many, (507) when the disk is full.
        """
        content = save(dict(tensors), {_KEY: json.dumps(encode(voice), ensure_ascii=False)})
        path = self._folder / f"{voice.info.id}{_SUFFIX}"
        unfinished = path.with_suffix(f".{os.getpid()}{_UNFINISHED}")
        try:
            with self._lock, self._exclusive():
                self._rescan(at_once=True)
                if self._known(voice.info.name) is not None:
                    raise RequestError(
                        f"there is a voice called {voice.info.name!r}: remove it first, or take another name",
                        status=409,
                        param="name",
                        code="voice_exists",
                    )
                if len(self._voices) >= MAX_VOICES:
                    raise RequestError(
                        f"there are {MAX_VOICES} voices already: remove some",
                        status=409,
                        code="too_many_voices",
                    )
                try:
                    _write(unfinished, content)
                    unfinished.replace(path)
                finally:
                    unfinished.unlink(missing_ok=True)
                _sync(self._folder)
                self._voices[path.name] = voice
        except OSError as error:
            if error.errno in _FULL:
                raise RequestError(
                    f"the voice cannot be kept: {error.strerror}",
                    status=507,
                    code="insufficient_storage",
                ) from error
            raise WorkerError(
                f"the voice cannot be kept: {error.strerror}", where=str(self._folder)
            ) from error

    def remove(self, voice: StoredVoice) -> bool:
        """Remove a voice; False if another process has. Raises: WorkerError."""
        path = self._folder / f"{voice.info.id}{_SUFFIX}"
        with self._lock:
            self._voices.pop(path.name, None)
            try:
                path.unlink()
                _sync(self._folder)
            except FileNotFoundError:
                return False
            except OSError as error:
                raise WorkerError(
                    f"the voice cannot be removed: {error.strerror}", where=str(self._folder)
                ) from error
        return True

    def _known(self, name: str) -> StoredVoice | None:
        by_id = self._voices.get(f"{name}{_SUFFIX}")
        return by_id or next((each for each in self._voices.values() if each.info.name == name), None)

    def _rescan(self, *, at_once: bool = False) -> None:
        """Read the headers of new files, unless the folder was listed a moment ago."""
        now = time.monotonic()
        if now - self._scanned_at < _RESCAN_S and not at_once:
            return
        try:
            with os.scandir(self._folder) as entries:
                names = {each.name for each in entries if _is_voice(each.name) and each.is_file()}
        except OSError as error:
            raise WorkerError(
                f"the voices cannot be listed: {error.strerror}", where=str(self._folder)
            ) from error
        for name in self._voices.keys() - names:
            del self._voices[name]
        for name in names - self._voices.keys():
            try:
                self._voices[name] = _read_header(self._folder / name)
            except FileNotFoundError:
                continue
            except (
                OSError,
                SafetensorError,
                ValueError,
                ManifestError,
            ) as error:  # the next scan tries again
                if name not in self._unreadable:
                    log.warning("%s is no voice: %s", self._folder / name, error)
                self._unreadable.add(name)
        self._unreadable &= names
        self._scanned_at = now

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Hold the lock of the folder among processes; the system frees it when a process ends."""
        with open(self._folder / _LOCK, "ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _is_voice(name: str) -> bool:
    return name.endswith(_SUFFIX) and _ID.fullmatch(name.removesuffix(_SUFFIX)) is not None


def _read_header(path: Path) -> StoredVoice:
    with safe_open(path, framework="np") as file:
        return decode(StoredVoice, json.loads((file.metadata() or {}).get(_KEY, "null")))


def _write(path: Path, content: bytes) -> None:
    with open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
