"""An artifact on disk: atomic writes, integrity and compatibility checks. No torch."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shlex
import shutil
import stat
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from mingc.artifacts.file_cache import file_copy
from mingc.artifacts.file_region import FileRegion
from mingc.artifacts.manifest import (
    FILE_NAME,
    FileRecord,
    Fingerprint,
    Manifest,
    parse_manifest,
    read_manifest,
)
from mingc.artifacts.packed_file import PackedFile, open_packed
from mingc.artifacts.target import Host, is_rtx
from mingc.artifacts.work_folder import work_folder
from mingc.errors import ArtifactError, ConfigError, IncompatibleError, IntegrityError

_WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
# What torch's writer of packages says about a disk that takes no more bytes; it does not look at the system's error.
_TORCH_WRITE_ERRORS = ("unexpected pos", "failed writing file")
_CPU_CAPABILITIES = ("DEFAULT", "AVX2", "AVX512")  # in torch's spelling, weakest first


@dataclass(frozen=True, slots=True)
class Artifact:
    """An opened artifact: its manifest, and its folder or the packed bundle that holds it.

    `root` is the folder or the bundle's file.
    """

    root: Path
    manifest: Manifest
    packed: PackedFile | None = None

    def region(self, relative: str) -> FileRegion:
        """The bytes of the file `relative`, for readers that need no path."""
        if self.packed is not None:
            return self.packed.region(relative)
        path = self.root / relative
        return FileRegion(path, relative, 0, path.stat().st_size, is_whole=True)

    def path(self, relative: str) -> Path:
        """Path of the file `relative`; for a packed bundle, of a copy in the user's cache.

        Raises: IntegrityError, ArtifactError when it has to be copied and cannot be.
        """
        if self.packed is None:
            return self.root / relative
        return file_copy(self.packed.region(relative), self.manifest.files[relative].sha256)


def open_artifact(root: Path) -> Artifact:
    """Read the manifest of a folder or packed bundle; check that every file is there with its recorded size.

    Raises: ManifestError, IntegrityError listing every file that differs, ArtifactError when this user may not read
        the files.
    """
    artifact = open_unchecked(root)
    if artifact.packed is not None:
        _raise_integrity(root, _packed_problems(artifact.packed, artifact.manifest))
        return artifact
    problems, unreadable = [], []
    for name, record in artifact.manifest.files.items():
        try:
            found = (root / name).stat()
        except PermissionError:
            unreadable.append(name)
            continue
        except OSError:
            problems.append(f"{name}: file is missing")
            continue
        if not stat.S_ISREG(found.st_mode):
            problems.append(f"{name}: is not a file")
            continue
        size = found.st_size
        if size != record.size_bytes:
            problems.append(f"{name}: {size} bytes, {record.size_bytes} recorded")
        elif not os.access(root / name, os.R_OK, effective_ids=True):
            unreadable.append(name)
    if unreadable:
        more = f" and {len(unreadable) - 1} more" if unreadable[1:] else ""
        raise ArtifactError(
            f"this user may not read {unreadable[0]}{more}",
            where=str(root),
            fix=f"run chmod -R a+rX {shlex.quote(str(root))} as the owner, or serve as the owner",
        )
    _raise_integrity(root, problems)
    return artifact


def open_unchecked(root: Path) -> Artifact:
    """Read the manifest only. Raises: ManifestError, and IntegrityError for a damaged bundle."""
    if not root.is_file():
        return Artifact(root, read_manifest(root))
    packed = open_packed(root)
    manifest = packed.region(FILE_NAME)
    return Artifact(root, parse_manifest(manifest.read(), str(manifest)), packed)


def _packed_problems(packed: PackedFile, manifest: Manifest) -> list[str]:
    """One line per difference between the file tables of manifest and bundle."""
    problems = []
    for name, record in manifest.files.items():
        found = packed.bundle.files.get(name)
        if found is None:
            problems.append(f"{name}: file is missing")
        elif (found.size_bytes, found.sha256) != (record.size_bytes, record.sha256):
            problems.append(f"{name}: the bundle has another file than the manifest records")
    return problems


def check_hashes(artifact: Artifact) -> None:
    """Read every file of the artifact and compare its sha256. Raises IntegrityError listing all that differ."""
    raise_changed(artifact, file_hashes(artifact, artifact.manifest.files))


def file_hashes(artifact: Artifact, names: Collection[str]) -> dict[str, str]:
    """What `hash_or_problem` returns for the files `names`.

    Files are read by several threads: one alone computes sha256 more slowly than a disk reads.
    """
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        hashes = pool.map(lambda name: hash_or_problem(lambda: artifact.region(name)), names)
        return dict(zip(names, hashes, strict=True))


def hash_or_problem(region: Callable[[], FileRegion]) -> str:
    """sha256 of what `region` returns, or why it cannot be read."""
    try:
        return region().sha256()
    except OSError as error:
        return unreadable(error)


def unreadable(error: OSError) -> str:
    return f"cannot be read: {error.strerror or error}"


def raise_changed(artifact: Artifact, hashes: Mapping[str, str]) -> None:
    """Raises: IntegrityError listing the files of `hashes` (see `hash_or_problem`) that are not as recorded."""
    files, problems = artifact.manifest.files, []
    for name in files:
        if name in hashes and (found := hashes[name]) != files[name].sha256:
            problems.append(f"{name}: {found if ' ' in found else 'sha256 differs from the manifest'}")
    _raise_integrity(artifact.root, problems)


def check_fingerprint(recorded: Fingerprint, here: Host) -> None:
    """Compare the recorded build environment with this machine.

    Raises: IncompatibleError with every difference at once.
    """
    differences = [f"  {each}" for each in fingerprint_problems(recorded, here)]
    if differences and is_rtx(recorded.target):
        raise IncompatibleError(
            "this artifact is for RTX cards:\n" + "\n".join(differences),
            where="manifest.json, fingerprint",
            fix=f"run it with torch {recorded.torch} on an NVIDIA RTX card of compute capability "
            f"{' or '.join(recorded.capability.split(','))}, or export again here with --target {here.device}",
        )
    if differences:
        raise IncompatibleError(
            "this artifact was built for something else:\n" + "\n".join(differences),
            where="manifest.json, fingerprint",
            fix=f"pip install 'torch=={recorded.torch}', or export again here with --target {here.device}",
        )


def fingerprint_problems(recorded: Fingerprint, here: Host) -> list[str]:
    """Why engines do not run on the machine `here`, one line per reason."""
    differences = []
    if recorded.torch != here.torch:
        differences.append(f"torch: built with {recorded.torch}, here {here.torch}")
    if recorded.device != here.device:
        differences.append(f"device: built for {recorded.device}, here {here.device}")
    elif not _runs_on(recorded, here):
        differences.append(f"capability: built for {recorded.capability}, here {here.capability}")
    return differences


def _runs_on(recorded: Fingerprint, here: Host) -> bool:
    """CPU engines run on their instruction set and every later one.

    CUDA engines run only on the capabilities that they name.
    """
    if recorded.device == "cpu" and {recorded.capability, here.capability} <= set(_CPU_CAPABILITIES):
        return _CPU_CAPABILITIES.index(recorded.capability) <= _CPU_CAPABILITIES.index(here.capability)
    return here.capability in recorded.capability.split(",")


@contextmanager
def folder_beside(root: Path, *, option: str) -> Iterator[Path]:
    """A work folder next to `root`. Raises: ConfigError, which names `option`, when it cannot be made."""
    with ExitStack() as stack:
        try:
            work = stack.enter_context(work_folder(root.absolute().parent, f".{root.name}."))
        except OSError as error:
            raise ConfigError(
                f"cannot create a folder next to {root}: {error.strerror}",
                where=option,
                fix="pass another folder",
            ) from error
        yield work


@contextmanager
def new_artifact(root: Path, *, replace_existing: bool) -> Iterator[Path]:
    """A temporary folder beside `root` that becomes `root` when the block succeeds and is removed otherwise.

    Leftovers of earlier builds of `root` that were killed are removed as well.

    Raises: ConfigError when `root` exists and is not an artifact that may be replaced. If one appears while the block
    runs, the finished folder is kept next to `root`, under the name given in the error.
    """
    check_replaceable(root, replace_existing=replace_existing)
    with folder_beside(root, option="--output") as work:
        try:
            yield work
            put_in_place(work, root, replace_existing=replace_existing)
        except Exception as error:
            reason = write_failure(error)
            if reason is None or isinstance(error, ConfigError):  # it names another place than `root`
                raise
            raise ArtifactError(
                f"the artifact cannot be written: {reason}",
                where=str(root),
                fix="free some space there and in the folder of temporary files, or pass another --output",
            ) from error


@contextmanager
def writing(path: Path, needed: int | None = None) -> Iterator[None]:
    """Reports that the file `path`, of `needed` bytes if that is known, cannot be written. Raises: ConfigError."""
    try:
        yield
    except Exception as error:
        reason = write_failure(error)
        if reason is None or isinstance(error, ConfigError):
            raise
        size = f"it has {needed:,} bytes, " if needed is not None else ""
        places = {
            path.parent.resolve(): "there",
            Path(tempfile.gettempdir()).resolve(): "in the temporary folder",
        }
        free = ", ".join(
            f"{shutil.disk_usage(place).free:,} are free {name}" for place, name in places.items()
        )
        raise ConfigError(
            f"{path.name} cannot be written: {reason}: {size}{free}",
            where=f"--output: {path.parent}",
            fix="free some space, pass another --output, or point TMPDIR to a larger disk; then run the command again",
        ) from error


def write_failure(error: Exception) -> str | None:
    """Why files cannot be written; None for another error. Libraries wrap a full disk in their own errors."""
    if isinstance(error, OSError):
        return error.strerror if error.errno in _WRITE_ERRORS else None
    named = next((reason for reason in map(os.strerror, _WRITE_ERRORS) if reason in str(error)), None)
    if named is None and any(text in str(error) for text in _TORCH_WRITE_ERRORS):
        return os.strerror(errno.ENOSPC)
    return named


def check_replaceable(root: Path, *, replace_existing: bool, option: str = "--output") -> None:
    """Raises: ConfigError unless nothing is at `root`, or an artifact or an empty folder that may be replaced.

    Errors name the option `option`, by which the user passed `root`.
    """
    if not os.path.lexists(root):
        return
    fix = "pass another folder"
    if root.is_symlink() or root.name == "..":
        problem = f"{root} is a symbolic link or ends in .."
        fix = "pass the folder by its own name"
    elif Path.cwd().is_relative_to(root.resolve()) or root.is_mount():
        problem = f"{root} cannot be replaced: it is a mount point or holds the working folder"
        fix = "pass a folder inside it"
    elif not ((root / FILE_NAME).is_file() or (root.is_dir() and not any(root.iterdir()))):
        problem = f"{root} exists and is not an artifact"
    elif not replace_existing:
        problem = f"{root} exists"
        fix = "pass --force to replace it, or another folder"
    else:
        return
    raise ConfigError(problem, where=option, fix=fix)


def put_in_place(work: Path, root: Path, *, replace_existing: bool, option: str = "--output") -> None:
    """Rename `work` to `root`; remove the replaced artifact, and artifacts that killed builds replaced but left."""
    try:
        check_replaceable(root, replace_existing=replace_existing, option=option)
    except ConfigError as error:
        kept = root.with_name(f"{root.name}.{secrets.token_hex(4)}")
        work.rename(kept)
        raise ConfigError(
            f"{error.message} (it was not there at the start); the finished artifact is {kept}",
            where=option,
            fix=f"move {kept} to its final place",
        ) from error
    aside = None
    if root.exists():
        aside = root.rename(root.with_name(f".{root.name}.{secrets.token_hex(4)}.old"))
    try:
        work.rename(root)
    except OSError:
        if aside is not None:
            aside.rename(root)
        raise
    replaced = re.compile(rf"\.{re.escape(root.name)}\.[0-9a-f]{{8}}\.old")
    for path in root.parent.iterdir():
        if replaced.fullmatch(path.name) and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)


def write_manifest(work: Path, manifest: Manifest) -> Manifest:
    """Hash every file under `work` into the manifest's file table and write the manifest last.

    Files get the permissions of `work`, which follow the umask: some libraries write files that only their owner reads.
    """
    mode = work.stat().st_mode & 0o666
    files = {}
    for path in sorted(work.rglob("*")):
        if path.is_file():
            path.chmod(mode)
            files[path.relative_to(work).as_posix()] = FileRecord(
                size_bytes=path.stat().st_size, sha256=hash_file(path)
            )
    whole = replace(manifest, files=files)
    target = work / FILE_NAME
    target.write_text(whole.to_json(), encoding="utf-8")
    with target.open("rb") as stream:
        os.fsync(stream.fileno())
    return whole


def hash_file(path: Path) -> str:
    """sha256 of a file, in hexadecimal."""
    return FileRegion(path, path.name, 0, path.stat().st_size).sha256()


def _raise_integrity(root: Path, problems: list[str]) -> None:
    if problems:
        listed = "\n".join(f"  - {problem}" for problem in problems)
        raise IntegrityError(
            f"{len(problems)} file(s) of the artifact are not as exported:\n{listed}",
            where=str(root),
            fix="copy the artifact again, or export again",
        )
