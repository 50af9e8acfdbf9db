"""Sign a bundle and verify it: the signature covers bundle.json, which has the sha256 of every file."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from mingc.artifacts.bundle_manifest import BUNDLE_FILE, SIGNATURE_FILE, BundleManifest, parse_bundle_manifest
from mingc.artifacts.file_region import FileRegion
from mingc.artifacts.manifest import FILE_NAME
from mingc.artifacts.packed_file import open_packed
from mingc.bundles import minisign
from mingc.bundles.packing import restore_end, set_signature
from mingc.errors import ArtifactError, ConfigError, IntegrityError, SignatureError


@dataclass(frozen=True, kw_only=True, slots=True)
class KeysReport:
    key_id: str
    secret_key: Path
    public_key: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class SignReport:
    bundle: Path
    key_id: str
    trusted_comment: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SignatureReport:
    """Result for a valid signature and unchanged files."""

    bundle: Path
    key_id: str
    trusted_comment: str
    files: int
    size_bytes: int
    seconds: float
    gigabytes_per_second: float


@dataclass(frozen=True, slots=True)
class _Opened:
    """bundle.json of a packed or unpacked bundle, the signature, and where each file is."""

    bundle: BundleManifest
    content: bytes
    signature: bytes | None
    files: Mapping[str, FileRegion]


def generate_keys(secret: Path) -> KeysReport:
    """Write a new pair of keys: `secret`, and next to it the public key with the suffix .pub."""
    public = secret.with_name(f"{secret.stem if secret.suffix == '.key' else secret.name}.pub")
    return KeysReport(key_id=minisign.new_keys(secret, public), secret_key=secret, public_key=public)


def sign_bundle(path: Path, secret_key: Path, comment: str | None) -> SignReport:
    """Sign a packed bundle, or the unchanged folder of an unpacked one; an existing signature is replaced.

    Raises: ConfigError, IntegrityError when a file has changed since packing.
    """
    key = minisign.read_secret_key(secret_key)
    if path.is_file():
        restore_end(path)
    opened = _open(path)
    _check_files(path, opened)
    text = comment if comment is not None else f"model:{opened.bundle.model} mingc:{opened.bundle.mingc}"
    if not text.isprintable():
        raise ConfigError(
            "the comment contains characters that cannot be printed",
            where="--comment",
            fix="pass one line of text",
        )
    signature = minisign.sign(opened.content, key, text)
    if path.is_file():
        set_signature(path, signature)
    else:
        half = path / f".{SIGNATURE_FILE}.partial"
        half.write_bytes(signature)
        half.replace(path / SIGNATURE_FILE)
    shown = minisign.PublicKey(key.id_bytes, key.key.public_key())
    return SignReport(bundle=path, key_id=shown.key_id, trusted_comment=text)


def verify_signature(path: Path, public_key: str) -> SignatureReport:
    """Check the signature of a packed or unpacked bundle, and the sha256 of every file.

    Raises: SignatureError, IntegrityError naming every file that has changed since signing, ConfigError for the key.
    """
    started = time.perf_counter()
    key = minisign.read_public_key(public_key)
    opened = _open(path)
    comment = _check_signature(path, opened, key)
    _check_files(path, opened)
    seconds = time.perf_counter() - started
    size = sum(each.size_bytes for each in opened.bundle.files.values())
    return SignatureReport(
        bundle=path,
        key_id=key.key_id,
        trusted_comment=comment,
        files=len(opened.bundle.files),
        size_bytes=size,
        seconds=seconds,
        gigabytes_per_second=size / 1e9 / seconds,
    )


def require_signature(path: Path, public_key: str) -> str:
    """Check the signature and the hash of manifest.json. Returns the trusted comment.

    The manifest has the sha256 of every file that is served; opening the artifact for serving compares them.
    """
    key = minisign.read_public_key(public_key)
    opened = _open(path)
    comment = _check_signature(path, opened, key)
    recorded = opened.bundle.files.get(FILE_NAME)
    if recorded is None or _hash(opened.files[FILE_NAME]) != recorded.sha256:
        raise IntegrityError(
            f"{FILE_NAME}: sha256 differs from {BUNDLE_FILE}", where=str(path), fix="copy the bundle again"
        )
    return comment


def _open(path: Path) -> _Opened:
    if path.is_file():
        packed = open_packed(path)
        return _Opened(packed.bundle, packed.bundle_bytes, packed.signature, packed.files)
    try:
        content = (path / BUNDLE_FILE).read_bytes()
    except PermissionError:
        raise _unreadable(path / BUNDLE_FILE) from None
    except OSError:
        raise SignatureError(
            f"{path} has no {BUNDLE_FILE}: only bundles are signed"
            if path.exists()
            else f"{path} does not exist",
            where=str(path),
            fix="pass a file that mingc bundle pack wrote, or a folder that mingc bundle unpack wrote",
        ) from None
    bundle = parse_bundle_manifest(content, str(path / BUNDLE_FILE))
    signature = path / SIGNATURE_FILE
    return _Opened(
        bundle,
        content,
        signature.read_bytes() if signature.is_file() else None,
        {
            name: FileRegion(path / name, name, 0, each.size_bytes, is_whole=True)
            for name, each in bundle.files.items()
        },
    )


def _check_signature(path: Path, opened: _Opened, key: minisign.PublicKey) -> str:
    if opened.signature is None:
        raise SignatureError(
            "the bundle is not signed", where=str(path), fix="run mingc bundle sign where it was packed"
        )
    return minisign.check(opened.content, opened.signature, key, f"{path}: {SIGNATURE_FILE}")


def _check_files(path: Path, opened: _Opened) -> None:
    problems = []
    if path.is_dir():
        found = {
            each.relative_to(path).as_posix()
            for each in path.rglob("*")
            if each.is_symlink() or not each.is_dir()
        }
        extra = sorted(found - {*opened.files, BUNDLE_FILE, SIGNATURE_FILE})
        problems = [f"{name}: is not in {BUNDLE_FILE}" for name in extra]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        hashes = pool.map(_hash, opened.files.values())
        for (name, recorded), sha256 in zip(opened.bundle.files.items(), hashes, strict=True):
            if sha256 is None:
                problems.append(f"{name}: file is missing or has another size")
            elif sha256 != recorded.sha256:
                problems.append(f"{name}: sha256 differs from {BUNDLE_FILE}")
    if problems:
        listed = "\n".join(f"  - {problem}" for problem in problems)
        raise IntegrityError(
            f"{len(problems)} file(s) of the bundle are not as packed:\n{listed}",
            where=str(path),
            fix="copy the bundle again, or pack again",
        )


def _hash(region: FileRegion) -> str | None:
    """sha256 of a file; None when it is missing, is not a file, or has another size."""
    if region.is_whole and not (region.path.is_file() and region.path.stat().st_size == region.size_bytes):
        return None
    try:
        return region.sha256()
    except PermissionError:
        raise _unreadable(region.path) from None


def _unreadable(path: Path) -> ArtifactError:
    return ArtifactError(
        "this user may not read the file",
        where=str(path),
        fix="run chmod -R a+rX on the bundle's folder as the owner, or run as the owner",
    )
