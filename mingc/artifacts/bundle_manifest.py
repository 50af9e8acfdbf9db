"""`bundle.json`: every file of a bundle with size, sha256 and CRC-32. Signatures cover its bytes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from mingc.artifacts.codec import decode, encode
from mingc.artifacts.manifest import is_inside
from mingc.errors import ManifestError

BUNDLE_FILE = "bundle.json"
SIGNATURE_FILE = "bundle.json.minisig"
FORMAT = 1
MAX_BYTES = 256 << 20
_FIX = "copy the bundle again, or pack again"


@dataclass(frozen=True, kw_only=True, slots=True)
class BundleFile:
    """One file. CRC-32 is recorded for ZIP; no check relies on it alone."""

    size_bytes: int
    sha256: str
    crc32: int


@dataclass(frozen=True, kw_only=True, slots=True)
class BundleManifest:
    """The whole bundle.json: nothing in it depends on when or where the bundle was packed."""

    format: int
    model: str
    mingc: str
    files: dict[str, BundleFile]

    def to_bytes(self) -> bytes:
        text = json.dumps(encode(self), ensure_ascii=False, indent=1, sort_keys=True)
        return (text + "\n").encode()


def parse_bundle_manifest(content: bytes, where: str) -> BundleManifest:
    """Raises: ManifestError."""
    try:
        document: Any = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"{BUNDLE_FILE} is not readable: {error}", where=where, fix=_FIX) from error
    found = document.get("format") if isinstance(document, dict) else None
    if found != FORMAT:
        raise ManifestError(
            f"bundle format {repr(found)[:40]}, this mingc reads format {FORMAT}",
            where=where,
            fix="pack again with this mingc, or install the mingc that packed the bundle",
        )
    try:
        manifest = decode(BundleManifest, document)
    except ManifestError as error:
        raise ManifestError(error.message, where=f"{where}: {error.where}", fix=_FIX) from error
    # Two names for one path, or a file named like the folder of another, could not be unpacked.
    folders = {parent.as_posix() for name in manifest.files for parent in PurePosixPath(name).parents}
    outside = [
        name
        for name in manifest.files
        if not is_inside(name) or PurePosixPath(name).as_posix() != name or name in folders
    ]
    own = {BUNDLE_FILE, SIGNATURE_FILE} & {*manifest.files}
    if outside or own:
        problem = (
            f"{outside[0]!r} is not a path inside the bundle" if outside else f"{min(own)} cannot list itself"
        )
        raise ManifestError(f"{BUNDLE_FILE} names files that cannot exist: {problem}", where=where, fix=_FIX)
    return manifest
