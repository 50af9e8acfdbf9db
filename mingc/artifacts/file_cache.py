"""Files of packed bundles that a library opens by path, such as engines: copied once to the user's cache.

A copy is named by its sha256 and compared with it at every use, so bundles share copies, and a changed copy is
replaced. Weights are not copied: they are mapped inside the bundle.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
from contextlib import suppress
from pathlib import Path, PurePosixPath

from mingc.artifacts.file_region import FileRegion
from mingc.errors import ArtifactError, ConfigError, IntegrityError


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/mingc`, by default `~/.cache/mingc`. Raises: ConfigError when there is no home folder."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return Path(base) / "mingc"
    try:
        return Path.home() / ".cache" / "mingc"
    except RuntimeError:  # a user without an entry in the password database, as in some containers
        raise ConfigError(
            "this user has no home folder for a cache",
            where="$XDG_CACHE_HOME",
            fix="set XDG_CACHE_HOME to a folder that can be written",
        ) from None


def file_copy(region: FileRegion, sha256: str) -> Path:
    """The path of a file with the content of `region`.

    Raises: IntegrityError when the content has another sha256; ArtifactError when the cache cannot be written.
    """
    target = cache_folder() / "files" / f"{sha256}{PurePosixPath(region.name).suffix}"
    if _has(target, region.size_bytes, sha256):
        return target
    partial = target.with_name(f"{target.name}.{secrets.token_hex(4)}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        digest = hashlib.sha256()
        try:
            with partial.open("xb") as stream:
                with suppress(OSError):  # a file system without locks
                    fcntl.flock(stream, fcntl.LOCK_EX)  # `bundle prune --cache` leaves it alone
                for chunk in region.chunks():
                    digest.update(chunk)
                    stream.write(chunk)
            if digest.hexdigest() != sha256:
                raise IntegrityError(
                    f"{region.name}: sha256 differs from the manifest",
                    where=str(region.path),
                    fix="copy the bundle again, or pack again",
                )
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise ArtifactError(
            f"{region.name} cannot be copied to the cache: {error.strerror}",
            where=str(target.parent),
            fix="free space there, set XDG_CACHE_HOME to a folder that can be written, or run mingc bundle unpack",
        ) from error
    return target


def _has(path: Path, size: int, sha256: str) -> bool:
    try:
        return path.stat().st_size == size and FileRegion(path, path.name, 0, size).sha256() == sha256
    except OSError:
        return False
