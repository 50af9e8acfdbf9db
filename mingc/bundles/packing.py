"""`mingc bundle pack`: write an artifact's folder as one file, in one pass over its content, resumable."""

from __future__ import annotations

import hashlib
import json
import os
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import mingc
from mingc.artifacts.artifact import Artifact, open_artifact
from mingc.artifacts.bundle_manifest import BUNDLE_FILE, FORMAT, SIGNATURE_FILE, BundleFile, BundleManifest
from mingc.artifacts.file_region import CHUNK_BYTES
from mingc.artifacts.manifest import FILE_NAME
from mingc.artifacts.packed_file import open_packed
from mingc.artifacts.zip_layout import Placed, central_directory, local_header, place
from mingc.bundles.transfer import Stop, boot_id, check_free, locked, make_parent, open_own, run_all, writing
from mingc.errors import ArtifactError, ConfigError, IntegrityError

EXTRAS = "bundle/"  # folder of what a bundle adds to the artifact


@dataclass(frozen=True, kw_only=True, slots=True)
class PackReport:
    """`resumed_bytes` were copied by an earlier run that was interrupted."""

    bundle: Path
    files: int
    size_bytes: int
    resumed_bytes: int
    seconds: float
    gigabytes_per_second: float


@dataclass(frozen=True, slots=True)
class _Source:
    """One file to pack: a path or its content, and its sha256 if already known."""

    content: Path | bytes
    size_bytes: int
    sha256: str | None

    def chunks(self) -> Iterator[bytes]:
        if isinstance(self.content, bytes):
            yield self.content
            return
        with self.content.open("rb") as stream:
            while chunk := stream.read(CHUNK_BYTES):
                yield chunk


def pack(
    folder: Path,
    output: Path,
    extras: Mapping[str, Path | bytes],
    *,
    replace_existing: bool = False,
    log: Callable[[str], None] = lambda step: None,
) -> PackReport:
    """Write the artifact in `folder`, with `extras` under `bundle/`, to the new file `output`.

    The file appears when it is complete. After an interruption the same command continues: finished files are not
    copied again. The result depends only on the content, not on times, owners or the order of threads.

    Raises: ConfigError, IntegrityError when a file has changed since the export, ArtifactError when there is no space.
    """
    started = time.perf_counter()
    artifact = open_artifact(folder)
    if artifact.packed is not None:
        raise ConfigError(
            f"{folder} is packed already", where=str(folder), fix="pass the folder of an artifact"
        )
    check_replaceable_bundle(output, replace_existing=replace_existing)
    sources = _sources(artifact, extras)
    placed = place([(name, source.size_bytes) for name, source in sources.items()])
    total = placed[-1].end
    with writing(output):
        make_parent(output)
        with _partial(output, _key(sources)) as (descriptor, journal):
            done = journal.files
            left = [each for each in placed if each.name not in done]
            resumed = total - sum(each.size_bytes for each in left) if done else 0
            if done:
                log(f"{len(done)} of {len(placed)} files are there already")
            check_free(output.parent, sum(each.size_bytes for each in left))

            def copy(each: Placed, stop: Stop) -> None:
                record = _copy(descriptor, each, sources[each.name], stop)
                os.pwrite(descriptor, local_header(each, record.crc32), each.header_at)
                journal.add(each.name, record)
                log(each.name)

            run_all(sorted(left, key=lambda each: -each.size_bytes), copy)
            bundle = BundleManifest(
                format=FORMAT, model=artifact.manifest.model, mingc=mingc.__version__, files=journal.files
            )
            _finish(descriptor, placed, bundle, None)
            os.fsync(descriptor)
            check_replaceable_bundle(
                output, replace_existing=replace_existing
            )  # another command may have written it
            partial_path(output).replace(output)
    seconds = time.perf_counter() - started
    size = output.stat().st_size
    return PackReport(
        bundle=output,
        files=len(placed),
        size_bytes=size,
        resumed_bytes=resumed,
        seconds=seconds,
        gigabytes_per_second=size / 1e9 / seconds,
    )


def partial_path(output: Path) -> Path:
    """Path of the unfinished file."""
    return output.with_name(f".{output.name}.partial")


def journal_path(output: Path) -> Path:
    return output.with_name(f".{output.name}.partial.journal")


def check_replaceable_bundle(output: Path, *, replace_existing: bool) -> None:
    """Raises: ConfigError unless nothing is at `output`, or a bundle that may be replaced."""
    if not os.path.lexists(output):
        return
    if output.is_symlink() or not output.is_file() or not _looks_packed(output):
        raise ConfigError(f"{output} exists and is not a bundle", where="OUTPUT", fix="pass another path")
    if not replace_existing:
        raise ConfigError(
            f"{output} exists", where="OUTPUT", fix="pass --force to replace it, or another path"
        )


def _looks_packed(path: Path) -> bool:
    with path.open("rb") as stream:
        return stream.read(4) == b"PK\3\4"


def _sources(artifact: Artifact, extras: Mapping[str, Path | bytes]) -> dict[str, _Source]:
    sources = {
        name: _Source(artifact.root / name, record.size_bytes, record.sha256)
        for name, record in artifact.manifest.files.items()
    }
    manifest = (artifact.root / FILE_NAME).read_bytes()
    own: dict[str, Path | bytes] = {FILE_NAME: manifest}
    own |= {EXTRAS + name: content for name, content in extras.items()}
    for name, content in own.items():
        if name in sources:
            raise ConfigError(f"the artifact already contains a file {name}", where=str(artifact.root))
        size = len(content) if isinstance(content, bytes) else content.stat().st_size
        digest = hashlib.sha256(content).hexdigest() if isinstance(content, bytes) else None
        sources[name] = _Source(content, size, digest)
    return dict(sorted(sources.items()))


def _key(sources: Mapping[str, _Source]) -> str:
    """Identifies the content: a partial file of other content is not continued."""
    named = {
        name: [source.size_bytes, source.sha256 or os.stat(str(source.content)).st_mtime_ns]
        for name, source in sources.items()
    }
    return hashlib.sha256(json.dumps([boot_id(), mingc.__version__, named]).encode()).hexdigest()


class _Journal:
    """Journal of a partial bundle: a line with the key, then one JSON line for each finished file."""

    def __init__(self, path: Path, key: str) -> None:
        self.files: dict[str, BundleFile] = {}
        self._stream = os.fdopen(open_own(path, os.O_RDWR | os.O_APPEND | os.O_CREAT), "a+b")
        self._stream.seek(0)
        *lines, half = self._stream.read().split(b"\n")
        self.is_resumed = lines[:1] == [key.encode()]
        if not self.is_resumed:
            self._stream.truncate(0)
            self._write(key)
            return
        if half:  # a line that was not written to its end
            self._stream.truncate(self._stream.tell() - len(half))
        for line in lines[1:]:
            try:
                record = json.loads(line)
            except ValueError:  # a full disk cut this line off, and the next one was appended to it
                continue
            name = record.pop("name")
            self.files[name] = BundleFile(**record)

    def add(self, name: str, record: BundleFile) -> None:
        self.files[name] = record
        fields = {"size_bytes": record.size_bytes, "sha256": record.sha256, "crc32": record.crc32}
        self._write(json.dumps({"name": name, **fields}))

    def _write(self, line: str) -> None:
        # One unbuffered append per line: lines of several threads do not mix.
        os.write(self._stream.fileno(), line.encode() + b"\n")

    def close(self) -> None:
        self._stream.close()


@contextmanager
def _partial(output: Path, key: str) -> Iterator[tuple[int, _Journal]]:
    """Open and lock the unfinished file and its journal.

    Both are kept when the block fails, so that packing can continue.
    """
    path = partial_path(output)
    descriptor = open_own(path, os.O_RDWR | os.O_CREAT)
    with locked(descriptor, output):
        if not path.exists() or not os.path.samestat(os.fstat(descriptor), path.stat()):
            raise ConfigError(f"another process just wrote {output}", where=str(output), fix="run again")
        if not os.fstat(descriptor).st_size:  # new: an existing journal belongs to a removed file
            journal_path(output).unlink(missing_ok=True)
        journal = _Journal(journal_path(output), key)
        try:
            if not journal.is_resumed:
                os.ftruncate(descriptor, 0)
            yield descriptor, journal
            # Another pack may have begun since the rename, and removed it.
            journal_path(output).unlink(missing_ok=True)
        finally:
            journal.close()


def _copy(descriptor: int, place: Placed, source: _Source, stop: Stop) -> BundleFile:
    digest, crc, at = hashlib.sha256(), 0, place.data_at
    for chunk in source.chunks():
        stop()
        if at + len(chunk) > place.end:
            break
        digest.update(chunk)
        crc = zlib.crc32(chunk, crc)
        _write_all(descriptor, chunk, at)
        at += len(chunk)
    if at != place.end or source.sha256 not in (None, digest.hexdigest()):
        raise IntegrityError(
            f"{place.name}: sha256 differs from the manifest"
            if at == place.end
            else f"{place.name}: size changed",
            where=str(source.content) if isinstance(source.content, Path) else place.name,
            fix="copy the artifact again, or export again",
        )
    return BundleFile(size_bytes=place.size_bytes, sha256=digest.hexdigest(), crc32=crc)


def _finish(descriptor: int, placed: list[Placed], bundle: BundleManifest, signature: bytes | None) -> None:
    crcs = [bundle.files[each.name].crc32 for each in placed]
    tail, start = tail_bytes(placed, crcs, bundle.to_bytes(), signature)
    os.ftruncate(descriptor, start)
    _write_all(descriptor, tail, start)


def tail_bytes(
    placed: list[Placed], crcs: list[int], bundle: bytes, signature: bytes | None
) -> tuple[bytes, int]:
    """Everything after the last file: bundle.json, the signature, the index; and the offset where it begins."""
    start = placed[-1].end
    contents = {BUNDLE_FILE: bundle} | ({} if signature is None else {SIGNATURE_FILE: signature})
    own = place([(name, len(content)) for name, content in contents.items()], start)
    out = bytearray()
    for each, content in zip(own, contents.values(), strict=True):
        out += local_header(each, zlib.crc32(content)) + content
    every_crc = [*crcs, *map(zlib.crc32, contents.values())]
    out += central_directory([*placed, *own], every_crc)
    return bytes(out), start


def _write_all(descriptor: int, content: bytes, at: int) -> None:
    view = memoryview(content)
    while view:
        written = os.pwrite(descriptor, view, at)
        view, at = view[written:], at + written


def set_signature(path: Path, signature: bytes) -> None:
    """Write `signature` into the packed bundle at `path`, replacing an existing one.

    The end of the file changes in place. Until that is done, a copy of the old end is kept next to the bundle, and
    `restore_end` restores it after an interruption.
    """
    packed = open_packed(path)
    placed = place([(name, region.size_bytes) for name, region in packed.files.items()])
    crcs = [packed.bundle.files[name].crc32 for name in packed.files]
    tail, start = tail_bytes(placed, crcs, packed.bundle_bytes, signature)
    kept = kept_end_path(path)
    with writing(path):
        descriptor = os.open(path, os.O_RDWR)
        with locked(descriptor, path):
            former = os.pread(descriptor, os.fstat(descriptor).st_size - start, start)
            half = kept.with_name(f"{kept.name}.partial")
            half.write_bytes(start.to_bytes(8, "little") + former)
            with half.open("rb") as stream:
                os.fsync(stream.fileno())
            half.replace(kept)
            _write_all(descriptor, tail, start)
            os.ftruncate(descriptor, start + len(tail))
            os.fsync(descriptor)
            kept.unlink()


def kept_end_path(path: Path) -> Path:
    """Path of the old end of a bundle while it is signed; if it exists, `open_packed` reports the interruption."""
    return path.with_name(f".{path.name}.sign")


def restore_end(path: Path) -> None:
    """Undo an interrupted signing. An intact bundle is not changed: the kept end may belong to an earlier bundle."""
    kept = kept_end_path(path)
    if not kept.is_file() or not path.is_file():
        return
    descriptor = os.open(path, os.O_RDWR)
    with locked(descriptor, path):
        if not kept.is_file():  # the process that signed has ended in the meantime
            return
        if _is_in_order(path):
            kept.unlink()
            return
        content = kept.read_bytes()
        start = int.from_bytes(content[:8], "little")
        _write_all(descriptor, content[8:], start)
        os.ftruncate(descriptor, start + len(content) - 8)
        os.fsync(descriptor)
        kept.unlink()


def _is_in_order(path: Path) -> bool:
    try:
        open_packed(path)
    except ArtifactError:
        return False
    return True
