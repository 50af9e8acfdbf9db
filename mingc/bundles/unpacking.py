"""`mingc bundle unpack`: write the folder of a packed bundle and check hashes, resumable in the middle of a file.

Large files are linked to a store next to the folder, named by their sha256, so equal weights of several bundles are on
disk once.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from mingc.artifacts.artifact import check_replaceable, put_in_place
from mingc.artifacts.bundle_manifest import BUNDLE_FILE, SIGNATURE_FILE, BundleFile
from mingc.artifacts.file_region import CHUNK_BYTES, FileRegion
from mingc.artifacts.packed_file import PackedFile, open_packed
from mingc.bundles.transfer import Stop, boot_id, check_free, locked, make_parent, open_own, run_all, writing
from mingc.errors import ConfigError, IntegrityError

STORE = ".mingc-files"
WORK_SUFFIX = ".unpack"
_STATE = ".unpack-state"
_FILES = "files"  # beside the state, which must not move into the finished folder
_HALF = ".half"
SHARED_FROM_BYTES = 1 << 20  # smaller files are not worth a link


@dataclass(frozen=True, kw_only=True, slots=True)
class UnpackReport:
    """`resumed_bytes` were there from an interrupted run, `shared_bytes` from another bundle."""

    folder: Path
    files: int
    size_bytes: int
    resumed_bytes: int
    shared_bytes: int
    seconds: float
    gigabytes_per_second: float
    notes: tuple[str, ...]


def unpack(
    path: Path,
    folder: Path,
    *,
    replace_existing: bool = False,
    is_shared: bool = True,
    log: Callable[[str], None] = lambda step: None,
) -> UnpackReport:
    """Write the files of the packed bundle at `path` to the new folder `folder`, which appears when it is complete.

    After an interruption the same command continues, even in the middle of a file: existing bytes are hashed, the rest
    is copied.

    Raises: ConfigError, IntegrityError naming a file whose content has changed, ArtifactError without space.
    """
    started = time.perf_counter()
    if path.is_dir():
        raise ConfigError(
            f"{path} is a folder", where=str(path), fix="pass a file that mingc bundle pack wrote"
        )
    if folder.name == STORE:
        raise ConfigError(
            f"{STORE} is the folder of files that bundles share", where="OUTPUT", fix="pass another path"
        )
    packed = open_packed(path)
    check_replaceable(folder, replace_existing=replace_existing, option="OUTPUT")
    notes: list[str] = []
    with writing(folder):
        make_parent(folder)
        with (
            _work_folder(folder, packed) as files,
            _store(folder.parent, notes, is_shared=is_shared) as store,
        ):
            run = _Unpack(packed, files, store, log)
            total = sum(each.size_bytes for each in packed.files.values())
            check_free(folder.parent, _missing_bytes(packed, files, store))
            run_all(sorted(packed.files, key=lambda name: -packed.files[name].size_bytes), run.file)
            _write(files / BUNDLE_FILE, packed.bundle_bytes)
            if packed.signature is not None:
                _write(files / SIGNATURE_FILE, packed.signature)
            put_in_place(files, folder, replace_existing=replace_existing, option="OUTPUT")
    seconds = time.perf_counter() - started
    return UnpackReport(
        folder=folder,
        files=len(packed.files) + 1 + (packed.signature is not None),
        size_bytes=total,
        resumed_bytes=run.resumed,
        shared_bytes=run.shared,
        seconds=seconds,
        gigabytes_per_second=total / 1e9 / seconds,
        notes=(*notes, *(() if store is None or store.problem is None else (store.problem,))),
    )


class FileStore:
    """Files by sha256, to which unpacked folders hold hard links. `problem` says why nothing can be linked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.problem: str | None = None

    def path(self, record: BundleFile) -> Path:
        return self.folder / record.sha256

    def has(self, record: BundleFile) -> bool:
        """Whether the file exists, is not a link, and does not belong to a user who could change it later."""
        try:
            found = self.path(record).lstat()
        except OSError:
            return False
        return (
            stat.S_ISREG(found.st_mode)
            and found.st_size == record.size_bytes
            and found.st_uid in (os.geteuid(), 0)
        )

    def link(self, source: Path, target: Path) -> bool:
        """Whether `target` is now a link to `source`."""
        try:
            os.link(source, target)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EMLINK, errno.EXDEV, errno.EOPNOTSUPP, errno.EACCES):
                raise
            self.problem = f"files are not shared: {error.strerror}"
            return False
        return True


class _Unpack:
    """One unpack, whose files several threads write."""

    def __init__(
        self, packed: PackedFile, files: Path, store: FileStore | None, log: Callable[[str], None]
    ) -> None:
        self._packed = packed
        self._files = files
        self._store = store
        self._log = log
        self._mutex = threading.Lock()
        self.resumed = 0
        self.shared = 0

    def file(self, name: str, stop: Stop) -> None:
        """Write one file, unless an interrupted run or the store already has it."""
        target, region, record = self._files / name, self._packed.files[name], self._packed.bundle.files[name]
        if target.exists():  # renamed after its hash was compared
            self._count(resumed=record.size_bytes)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        store = self._store if _is_shareable(record) else None
        if store is not None and store.has(record) and self._take(store, record, target, stop):
            return
        half = _half_path(target)
        found, kept = _complete(region, half, stop)
        if found != record.sha256 and kept:
            half.unlink()  # what was there was not the beginning of this file
            found, kept = _complete(region, half, stop)
        if found != record.sha256:
            half.unlink()
            raise IntegrityError(
                f"{name}: sha256 differs from {BUNDLE_FILE}",
                where=str(self._packed.path),
                fix="copy the bundle again, or pack again",
            )
        self._count(resumed=kept)
        if store is not None:
            half.chmod(half.stat().st_mode & 0o555)  # a write to one folder would change the other
        half.replace(target)
        if store is not None and store.problem is None:
            store.link(target, store.path(record))
        self._log(name)

    def _take(self, store: FileStore, record: BundleFile, target: Path, stop: Stop) -> bool:
        """Link a stored file whose hash still matches; a changed one is removed from the store."""
        stored = store.path(record)
        digest = hashlib.sha256()
        for chunk in FileRegion(stored, stored.name, 0, record.size_bytes).chunks():
            stop()
            digest.update(chunk)
        if digest.hexdigest() != record.sha256:
            stored.unlink(missing_ok=True)
            return False
        if not store.link(stored, target):
            return False
        self._count(shared=record.size_bytes)
        return True

    def _count(self, *, resumed: int = 0, shared: int = 0) -> None:
        with self._mutex:
            self.resumed += resumed
            self.shared += shared


def _missing_bytes(packed: PackedFile, files: Path, store: FileStore | None) -> int:
    """Bytes that a run writes: the missing part of all files that are neither finished nor stored."""
    missing = 0
    for name, region in packed.files.items():
        record = packed.bundle.files[name]
        target, is_stored = files / name, store is not None and _is_shareable(record) and store.has(record)
        if not target.exists() and not is_stored:
            half = _half_path(target)
            missing += max(0, region.size_bytes - (half.stat().st_size if half.exists() else 0))
    return missing


def _is_shareable(record: BundleFile) -> bool:
    return record.size_bytes >= SHARED_FROM_BYTES


def _half_path(target: Path) -> Path:
    return target.with_name(target.name + _HALF)


def _complete(region: FileRegion, half: Path, stop: Stop) -> tuple[str, int]:
    """Copy the rest of `region` to the partial file `half`.

    Returns the sha256 of the whole and the number of existing bytes.
    """
    digest = hashlib.sha256()
    with half.open("a+b", buffering=0) as stream:
        stream.seek(0)
        kept = 0
        while kept < region.size_bytes and (chunk := stream.read(min(CHUNK_BYTES, region.size_bytes - kept))):
            stop()
            digest.update(chunk)
            kept += len(chunk)
        stream.truncate(kept)
        for chunk in region.chunks(kept):
            stop()
            digest.update(chunk)
            view = memoryview(chunk)
            while view:
                view = view[stream.write(view) or 0 :]
        os.fsync(stream.fileno())
    return digest.hexdigest(), kept


@contextmanager
def _work_folder(folder: Path, packed: PackedFile) -> Iterator[Path]:
    """Make the folder of unfinished files. It lies in a locked folder, together with the state of the run.

    Kept when the block fails, so that unpacking the same bundle can continue; removed after the final rename.
    """
    work = folder.with_name(f".{folder.name}{WORK_SUFFIX}")
    with suppress(FileExistsError):
        work.mkdir(mode=0o755)
    descriptor = open_own(work, os.O_RDONLY | os.O_DIRECTORY)
    with locked(descriptor, folder):
        if not work.exists() or not os.path.samestat(os.fstat(descriptor), work.stat()):
            raise ConfigError(f"another process just wrote {folder}", where=str(folder), fix="run again")
        state = json.dumps({"boot": boot_id(), "bundle": hashlib.sha256(packed.bundle_bytes).hexdigest()})
        try:
            is_same = (work / _STATE).read_text() == state
        except OSError:
            is_same = False
        if not is_same:
            for each in work.iterdir():
                shutil.rmtree(each) if each.is_dir() and not each.is_symlink() else each.unlink()
            (work / _STATE).write_text(state)
        files = work / _FILES
        files.mkdir(mode=0o755, exist_ok=True)
        try:
            yield files
        finally:
            if not files.exists():
                shutil.rmtree(work)


@contextmanager
def _store(parent: Path, notes: list[str], *, is_shared: bool) -> Iterator[FileStore | None]:
    """Lock the store of `parent` against `prune`. Yields None, and adds a note, if other users may change it."""
    if not is_shared:
        yield None
        return
    folder = parent / STORE
    if folder.is_symlink():
        notes.append(f"files are not shared: {folder} is a link")
        yield None
        return
    folder.mkdir(mode=0o755, exist_ok=True)
    with store_lock(folder, exclusive=False) as descriptor:
        store: FileStore | None = FileStore(folder)
        status = os.fstat(descriptor)
        if status.st_uid not in (os.geteuid(), 0) or status.st_mode & 0o022:
            store = None
            notes.append(f"files are not shared: other users may change {folder}")
        yield store


@contextmanager
def store_lock(folder: Path, *, exclusive: bool) -> Iterator[int]:
    """Lock a store: shared to add links, exclusive to remove files.

    Yields the open folder. Raises: ConfigError when an exclusive lock is not free.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB if exclusive else fcntl.LOCK_SH)
        except BlockingIOError:
            raise ConfigError(
                f"an unpack is adding files to {folder}", where=str(folder), fix="run again when it has ended"
            ) from None
        except OSError:
            pass  # a file system without locks
        yield descriptor
    finally:
        os.close(descriptor)


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
