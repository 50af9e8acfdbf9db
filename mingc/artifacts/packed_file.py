"""A packed bundle: one stored ZIP64 file whose weights are memory-mapped inside it. No torch.

Opening compares every byte outside file contents with the layout that names, sizes and CRC-32 determine
(`zip_layout`), and the file table of `bundle.json` with the index. The content is compared by sha256, as in a folder.
"""

from __future__ import annotations

import os
import stat
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mingc.artifacts.bundle_manifest import (
    BUNDLE_FILE,
    MAX_BYTES,
    SIGNATURE_FILE,
    BundleManifest,
    parse_bundle_manifest,
)
from mingc.artifacts.file_region import FileRegion
from mingc.artifacts.manifest import is_inside
from mingc.artifacts.zip_layout import (
    TAIL_BYTES,
    Member,
    Placed,
    central_directory,
    directory_place,
    local_header,
    place,
    read_directory,
)
from mingc.errors import ArtifactError, IntegrityError

_FIX = "copy the bundle again, or pack again"
_FIX_PATH = "pass a file that mingc bundle pack wrote"


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedFile:
    """An opened bundle: the place of every file, `bundle.json` as read and as bytes, and the signature if signed."""

    path: Path
    files: Mapping[str, FileRegion]
    bundle: BundleManifest
    bundle_bytes: bytes
    signature: bytes | None

    def region(self, name: str) -> FileRegion:
        """Raises: IntegrityError when the bundle has no file of that name."""
        found = self.files.get(name)
        if found is None:
            raise IntegrityError(f"{name}: file is missing", where=str(self.path), fix=_FIX)
        return found


def open_packed(path: Path) -> PackedFile:
    """Raises: IntegrityError naming the changed part, ManifestError, ArtifactError without read permission."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a named pipe would wait for a writer
    except PermissionError:
        raise ArtifactError(
            "this user may not read the bundle", where=str(path), fix=f"run chmod a+r {path} as the owner"
        ) from None
    except OSError as error:
        raise ArtifactError(
            f"the bundle cannot be read: {error.strerror}", where=str(path), fix=_FIX_PATH
        ) from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ArtifactError("the bundle is not a regular file", where=str(path), fix=_FIX_PATH)
        return _read(path, descriptor)
    finally:
        os.close(descriptor)


def _read(path: Path, descriptor: int) -> PackedFile:
    members, placed = _index(path, descriptor)
    for member, each in zip(members, placed, strict=True):
        expected = local_header(each, member.crc32)
        if os.pread(descriptor, len(expected), each.header_at) != expected:
            raise _damaged(path, f"{each.name}: its header, alignment or entry in the index is not as packed")
    regions = {
        each.name: FileRegion(path, each.name, each.data_at, each.size_bytes)
        for each in placed
        if each.name not in (BUNDLE_FILE, SIGNATURE_FILE)
    }
    own = {each.name: each for each in placed if each.name not in regions}
    if BUNDLE_FILE not in own or [each.name for each in placed[len(regions) :]] != sorted(own):
        raise _damaged(path, f"index: {BUNDLE_FILE} is not where a bundle has it")
    content = _content(path, descriptor, own[BUNDLE_FILE], members)
    signed = own.get(SIGNATURE_FILE)
    bundle = parse_bundle_manifest(content, f"{path}: {BUNDLE_FILE}")
    recorded = {name: (each.size_bytes, each.crc32) for name, each in bundle.files.items()}
    found = {each.name: (each.size_bytes, each.crc32) for each in members if each.name in regions}
    if recorded != found:
        names = sorted(name for name in {*recorded, *found} if recorded.get(name) != found.get(name))
        raise _damaged(path, f"{names[0]}: {BUNDLE_FILE} and the index differ")
    return PackedFile(
        path=path,
        files=regions,
        bundle=bundle,
        bundle_bytes=content,
        signature=None if signed is None else _content(path, descriptor, signed, members),
    )


def _index(path: Path, descriptor: int) -> tuple[list[Member], list[Placed]]:
    size = os.fstat(descriptor).st_size
    tail = os.pread(descriptor, TAIL_BYTES, max(0, size - TAIL_BYTES))
    where = directory_place(tail)
    if where is None:
        half = path.with_name(f".{path.name}.sign")
        if half.exists():
            raise IntegrityError(
                "signing this bundle was interrupted", where=str(path), fix="run mingc bundle sign again"
            )
        raise IntegrityError(
            f"{path.name} is not a bundle, or its end records are missing or changed",
            where=str(path),
            fix="pass a folder that mingc export wrote, or a file that mingc bundle pack wrote",
        )
    start, length = where
    if length > MAX_BYTES or start + length + TAIL_BYTES != size:
        raise _damaged(path, "end records: they do not fit the size of the file")
    index = os.pread(descriptor, length + TAIL_BYTES, start)
    members = read_directory(index[:length])
    if members is None:
        raise _damaged(path, "index: an entry is damaged")
    names = [each.name for each in members]
    wrong = next((name for name in names if not is_inside(name)), None)
    if wrong is not None or len({*names}) != len(names):
        raise _damaged(
            path,
            f"index: {wrong!r} is not a path inside the bundle" if wrong else "index: a name occurs twice",
        )
    if sum(each.size_bytes for each in members) > size:
        raise _damaged(path, "index: the files are larger than the bundle")
    placed = place([(each.name, each.size_bytes) for each in members])
    if index != central_directory(placed, [each.crc32 for each in members]):
        raise _damaged(path, "index or end records: they are not as packed")
    return members, placed


def _content(path: Path, descriptor: int, place: Placed, members: Sequence[Member]) -> bytes:
    if place.size_bytes > MAX_BYTES:
        raise _damaged(path, f"{place.name}: {place.size_bytes} bytes are too many")
    content = os.pread(descriptor, place.size_bytes, place.data_at)
    crc = next(each.crc32 for each in members if each.name == place.name)
    if zlib.crc32(content) != crc:
        raise _damaged(path, f"{place.name}: its content is not as packed")
    return content


def _damaged(path: Path, problem: str) -> IntegrityError:
    return IntegrityError(f"the bundle is damaged: {problem}", where=str(path), fix=_FIX)
